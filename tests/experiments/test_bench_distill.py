"""The benchmark's own checks: what it puts in, and that it would notice a loss."""

from __future__ import annotations

import json

import pytest
from absl import flags

from experiments.bench import distill


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
  path = str(tmp_path_factory.mktemp("bench"))
  distill._write(path, {40})
  return path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_case_counts_what_was_put_in(folder, workers):
  row = distill.measure(folder, 40, workers)
  assert row["rows"] == 40 and row["rows_per_s"] > 0
  assert 3000 < row["tokens_per_row"] < 5000
  assert (row["worker_mb"] is None) == (workers == 0)


def test_a_row_that_is_lost_is_noticed(folder, monkeypatch):
  wanted = distill.expected(40)
  assert wanted == {"wrong": 2, "benchmark": 1, "near_duplicate": 4}
  monkeypatch.setattr(distill, "expected", lambda n: {**wanted, "wrong": 3})
  with pytest.raises(AssertionError, match="kept"):
    distill.measure(folder, 40, 0)


def test_rows_are_a_function_of_their_number():
  words = distill.vocabulary()
  one, other = (json.dumps(distill.make_row(7, words)) for _ in range(2))
  assert one == other
  assert one != json.dumps(distill.make_row(8, words))


@pytest.mark.parametrize("processes", [["two"], [], ["-1"]])
def test_processes_are_numbers(monkeypatch, processes):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test"])
  monkeypatch.setattr(flags.FLAGS["processes"], "value", processes)
  with pytest.raises(ValueError, match=r"--processes=.*: give numbers, as 1,2"):
    distill.run()

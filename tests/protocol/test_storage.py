"""Trajectories through files: what is read is what was written."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.protocol.storage import read_parquet, write_lines
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  Status,
  ToolCall,
  Trajectory,
  Usage,
  read_trajectories,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
REAL = st.floats(allow_nan=False, allow_infinity=False)
SEGMENT = st.builds(
  Segment, st.sampled_from(Author), TEXT, TEXT, IDS, st.lists(REAL, max_size=3), IDS
)
CALL = st.builds(ToolCall, TEXT, TEXT, TEXT, st.sampled_from(CallStatus), REAL)
TRAJECTORY = st.builds(
  Trajectory,
  TEXT,
  st.lists(SEGMENT, max_size=3),
  st.lists(CALL, max_size=2),
  st.sampled_from(Status),
  st.none() | REAL,
  st.dictionaries(TEXT, REAL, max_size=2),
  st.builds(Usage, prompt=st.integers(0, 10**12), seconds=REAL),
  st.integers(0, 9),
  st.dictionaries(TEXT, st.none() | TEXT | st.lists(st.integers()), max_size=3),
)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@settings(max_examples=40, deadline=None)
@given(written=st.lists(TRAJECTORY, min_size=1, max_size=4))
def test_what_is_read_is_what_was_written(tmp_path_factory, suffix, written):
  path = str(tmp_path_factory.mktemp("storage") / f"t.{suffix}")
  lines = (json.dumps(t.to_json()) for t in written)
  assert write_lines(path, lines) == len(written)
  assert read_trajectories(path) == written


def test_more_rows_than_a_group(tmp_path):
  rows = [Trajectory(f"t{n}").to_json() for n in range(600)]
  path = tmp_path / "t.parquet"
  assert write_lines(path, iter(rows)) == 600
  assert [row["task_id"] for _, row in read_parquet(path)] == [
    f"t{n}" for n in range(600)
  ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_appears_when_it_is_whole(tmp_path, suffix):
  path = tmp_path / f"t.{suffix}"

  def fails():
    yield Trajectory("a").to_json()
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    write_lines(path, fails())
  with pytest.raises(EOFError):
    write_lines(path, [], at_least_one=True)
  assert os.listdir(tmp_path) == []
  assert write_lines(path, []) == 0 and read_trajectories(path) == []


def test_refusals(tmp_path):
  with pytest.raises(ValueError, match=r"'.txt'; accepted: .jsonl, .parquet"):
    write_lines(tmp_path / "t.txt", [])
  (tmp_path / "t.parquet").write_text("no")
  with pytest.raises(ValueError, match=r"t\.parquet: not parquet"):
    read_trajectories(tmp_path / "t.parquet")


def test_half_a_character_is_no_reason_to_lose_a_row(tmp_path):
  t = Trajectory("a", [Segment(Author.TOOL, "observation", "x \ud800")])
  write_lines(tmp_path / "t.parquet", [t.to_json()])
  (read,) = read_trajectories(tmp_path / "t.parquet")
  assert read.segments[0].text == "x ?"

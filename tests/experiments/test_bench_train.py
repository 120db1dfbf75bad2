"""The training benchmark: its rows, its check of losses, its workers, that it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from coa_jax.learner import log_probs
from coa_jax.learner.batch import Batch
from coa_jax.model.hf.io import load_model
from experiments.bench import train, train_work, workers

TINY = train_work.Size(
  train_work.model_fields(V=64, D=16, L=1, N=2, K=1, H=8, F=32),
  rows=2,
  steps=1,
  length=64,
)


@pytest.fixture
def folder(tmp_path):
  """What contestants read, for TINY."""
  job = {"size": dataclasses.asdict(TINY), "settings": train.SETTINGS}
  (tmp_path / "job.json").write_text(json.dumps(job))
  train_work.write_work(str(tmp_path))
  return str(tmp_path)


def test_rows_are_full_of_whole_segments_and_equal_in_weight():
  rows = train_work.make_rows(TINY, seed=3)
  assert all(x.shape == (2, 64) for x in rows.values())
  for segment, position, weight in zip(
    rows["segment"], rows["position"], rows["weight"], strict=True
  ):
    lengths = np.bincount(segment)[1:]
    assert sorted(lengths) == [6, 8, 10, 18, 22] and segment.all()
    assert (np.diff(segment) >= 0).all()
    assert position.tolist() == [i for n in lengths for i in range(n)]
    # A segment's first token is predicted by another's last: it must not count.
    assert not weight[position == 0].any()
    assert weight.sum() == 64 - sum(n // 4 for n in lengths)
  again = train_work.make_rows(TINY, seed=4)
  assert not np.array_equal(rows["tokens"], again["tokens"])


def test_work_is_cut_into_micro_batches_and_goes_round(folder):
  work = train_work.Work(folder, {"rows": 1})
  first = work.micro_batches()
  assert work.pieces == len(first) == 2 and first[0]["tokens"].shape == (1, 64)
  (all_rows,) = train_work.Work(folder, {"rows": 9}).micro_batches()
  for name, x in all_rows.items():
    assert np.array_equal(np.concatenate([b[name] for b in first]), x)
  others = [work.micro_batches() for _ in range(4)]
  assert not np.array_equal(others[0][0]["tokens"], first[0]["tokens"])
  assert np.array_equal(others[3][0]["tokens"], first[0]["tokens"])
  three = dataclasses.replace(TINY, rows=3)
  np.savez(
    os.path.join(folder, "rows.npz"),
    **{k: x[None] for k, x in train_work.make_rows(three, 0).items()},
  )
  with pytest.raises(ValueError, match="rows=2 does not divide a step's 3 rows"):
    train_work.Work(folder, {"rows": 2})


def mean_loss(folder: str, rows: dict[str, np.ndarray]) -> float:
  """Of the folder's model over rows, by this process."""
  cfg, params = load_model(os.path.join(folder, "model"))
  assert sum(x.size for x in jax.tree.leaves(params)) == train.parameters(TINY)
  given = [rows[k] for k in ("tokens", "segment", "position", "weight")]
  nothing = np.zeros_like(rows["weight"])
  batch = Batch(*given, nothing, nothing, np.full_like(rows["tokens"], -1))
  logp_BT, *_ = log_probs.token_logps(cfg, params, batch)
  return float(log_probs.nll(logp_BT, batch.loss_mask_BT) / rows["weight"].sum())


def test_our_worker_trains_the_folders_model_and_is_measured(folder, capsys):
  settings = {"ours": {"rows": 1}}
  (row,) = train.measure("tiny", TINY, {}, settings, rounds=2)
  assert row["contestant"] == "ours" and row["parameters"] == 3_392
  # Two micro-batches of a row, in another process: the mean over both rows.
  expected = mean_loss(folder, train_work.make_rows(TINY, 0))
  assert row["first_loss"] == pytest.approx(expected, rel=1e-5)
  line = capsys.readouterr().out.split()
  printed = [float(x) for x in line[3:6]]
  assert line[:3] == ["tiny", "ours:", "losses"] and len(printed) == 3
  # Steps after the first see other rows and updated weights.
  unchanged = mean_loss(folder, train_work.make_rows(TINY, 1))
  assert printed[1] != pytest.approx(unchanged, rel=1e-5)
  assert row["slowest"] <= row["tokens_per_second"] <= row["fastest"]
  assert row["peak_mb"] > 50 and row["cores"] > 0
  json.dumps(row)


def test_losses_that_differ_name_the_peer_and_the_step():
  same = {"ours": [7.0, 6.9], "torch": [7.001, 6.9], "tunix": [7.0, 6.9]}
  workers.check_losses(same)
  for wrong in (6.91, float("nan")):
    with pytest.raises(ValueError, match=r"tunix does other work.* step 2"):
      workers.check_losses(same | {"tunix": [7.0, wrong]})
  with pytest.raises(ValueError):  # a step is missing
    workers.check_losses(same | {"torch": [7.0]})


def test_a_worker_that_dies_says_why(tmp_path):
  (tmp_path / "job.json").write_text(json.dumps({"settings": {"ours": {"rows": 1}}}))
  with pytest.raises(ValueError, match=r"worker of ours ended(.|\n)*rows\.npz"):
    workers.Worker("ours", str(tmp_path))


SPAWNS = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[2], "child").write_text(str(child.pid))
print("{}", flush=True)
sys.stdin.read()
"""


def test_what_a_worker_has_started_ends_with_it(tmp_path):
  (tmp_path / "spawns.py").write_text(SPAWNS)
  env = {**os.environ, "PYTHONPATH": str(tmp_path)}
  with workers.Worker("ours", str(tmp_path), env=env, module="spawns"):
    child = pathlib.Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert child.exists()
  # It may wait to be reaped by whoever has adopted it.
  deadline = time.monotonic() + 10
  while child.exists() and ") Z " not in child.read_text():
    assert time.monotonic() < deadline
    time.sleep(0.01)


@flagsaver.flagsaver
def test_a_peer_that_is_not_installed_is_left_out_with_a_line(monkeypatch, capsys):
  flags.FLAGS.mark_as_parsed()
  absent = {"torch": (("absl", "no_such_module"), "torch transformers absl-py")}
  monkeypatch.setattr(workers, "PEERS", absent)
  assert workers.available(["torch"]) == {}
  (line,) = capsys.readouterr().out.splitlines()
  assert "no no_such_module;" in line and "pip install torch transformers" in line
  monkeypatch.setattr(workers, "PEERS", {"torch": (("absl", "numpy"), "")})
  assert workers.available(["torch"]) == {"torch": sys.executable}
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize("python", ["/nowhere/python", "", "/bin/false"])
def test_what_is_no_interpreter_is_named(python):
  with pytest.raises(ValueError, match=f"'{python}' is no Python interpreter"):
    workers.missing(python, ["numpy"])


def test_ratios_are_ours_over_theirs():
  def row(size, contestant, speed, peak):
    return {
      "size": size,
      "contestant": contestant,
      "tokens_per_second": speed,
      "peak_mb": peak,
    }

  rows = [row("1M", "ours", 30, 2), row("1M", "torch", 20, 4), row("5M", "ours", 1, 1)]
  assert train.ratios(rows) == {
    "1M tokens_per_second over torch": 1.5,
    "1M peak_mb over torch": 0.5,
  }


def test_settings_go_over_the_defaults_and_are_checked():
  out = train.merged('{"ours": {"remat": "full"}, "torch": {"compile": true}}')
  assert out["ours"] == {**train.SETTINGS["ours"], "remat": "full"}
  assert out["torch"]["compile"] and not train.SETTINGS["torch"]["compile"]
  for wrong in ('{"tunix": {"compile": 1}}', '{"vllm": {"rows": 1}}', "{"):
    with pytest.raises(ValueError, match="--settings"):
      train.merged(wrong)


def test_an_unknown_size_ends_with_one_line():
  done = subprocess.run(
    [sys.executable, "-m", "experiments.bench.train", "--cases=9M"],
    cwd=workers.ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 2
  assert done.stderr.strip() == "error: --cases='9M' finds none of: 1M, 5M, 100M"

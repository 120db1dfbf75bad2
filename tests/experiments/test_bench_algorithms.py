"""The benchmark of algorithms: what it runs, and what it makes of the logs."""

from __future__ import annotations

import errno
import json
import math
import pathlib
import subprocess
import sys

import pytest

from coa_jax.config import ConfigError, read_config
from coa_jax.disk import DiskError
from coa_jax.learner.algorithms import PRESETS
from coa_jax.lock import InUseError
from coa_jax.rl import AlgoConfig, RLConfig
from experiments.bench import algorithms as bench

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("quick", [False, True])
def test_every_run_has_the_presets_fields_and_the_same_budget(name, quick, tmp_path):
  (tmp_path / "sft" / "model").mkdir(parents=True)
  config = bench.config_of(name, str(tmp_path), 2, 5, quick)
  algo = read_config(config.algo, AlgoConfig, "algo")
  for part, fields in PRESETS[name].items():
    values = vars(getattr(algo, part))
    assert {k: v for k, v in values.items() if k in fields and k != "rounds"} == {
      k: v for k, v in fields.items() if k != "rounds"
    }
  assert algo.sampling.rounds == 1
  config = bench.config_of("dapo", str(tmp_path), 2, 5, quick)
  other = read_config(config.algo, AlgoConfig, "algo")
  assert algo.steps == other.steps
  assert algo.sampling.prompts == other.sampling.prompts
  assert algo.sampling.samples == other.sampling.samples
  assert algo.steps == (2 if quick else 5)
  assert config.init == str(tmp_path / "sft" / "model") and config.rollout.seed == 2


def test_a_line_of_the_table_is_the_mean_over_seeds(tmp_path):
  rewards = {"a": [0.25, 0.5, 0.75, 0.75, 0.75], "b": [0.5, 0.5, 0.25, 0.5, 0.25]}
  for name, values in rewards.items():
    (tmp_path / name).mkdir()
    rows = [
      {"stage": "rl", "step": i + 1, "reward": r, "entropy": 0.5, "seconds": 2.0 * i}
      for i, r in enumerate(values)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name / "metrics.jsonl").write_text(text)
  row = bench.row_of("x", [str(tmp_path / n) for n in rewards])
  assert (row["before"], row["improved"], row["seeds"]) == (0.375, 1, 2)
  assert row["after"] == pytest.approx((0.75 + 1 / 3) / 2)
  assert row["least"] == pytest.approx(1 / 3)
  assert (row["entropy"], row["seconds"]) == (0.5, 8.0)


def test_without_a_quickstart_it_says_how_to_make_one(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"run python -m experiments\.quickstart"):
    bench.run(["ppo"], str(tmp_path), str(tmp_path / "w"), 1, 1, True)


def long_run(**changed) -> list[dict]:
  """60 lines of a run that goes well, some columns changed: name -> step -> value."""
  usual = {
    "reward": lambda i: min(0.4 + i / 60, 0.8),
    "format": lambda i: 0.97,
    "truncated_share": lambda i: 0.01,
    "grad_norm": lambda i: 0.1,
  }
  rows = [{k: f(i) for k, f in {**usual, **changed}.items()} for i in range(60)]
  rows[0]["dev_accuracy"], rows[25]["dev_accuracy"] = 0.8, 0.9
  return rows


@pytest.mark.parametrize(
  ("changed", "accuracy", "said"),
  [
    ({}, 0.85, []),
    # One bad batch, and an update without a gradient, are no collapse.
    ({"reward": lambda i: 0.1 if i == 59 else 0.8}, 0.85, []),
    ({"reward": lambda i: 0.8 if i < 35 else 0.3}, 0.85, ["at best"]),
    ({"reward": lambda i: 0.5 - i / 300}, 0.85, ["reward"]),
    ({}, 0.75, ["greedy accuracy 0.900 at best, 0.750 at last"]),
    ({"format": lambda i: 1.0 if i < 30 else 0.5}, 0.85, ["well-formed 0.5"]),
    ({"truncated_share": lambda i: i / 100}, 0.85, ["cut off"]),
    ({"grad_norm": lambda i: None if i == 7 else 0.1}, 0.85, ["not finite"]),
    # Null is what nobody could grade: now and then, or a run that is dead.
    ({"reward": lambda i: None if i in (3, 50) else 0.8}, 0.85, []),
    (
      {"reward": lambda i: None if i > 9 else 0.8},
      0.85,
      ["graded at 20 of the last 20"],
    ),
    (
      {"reward": lambda i: None, "format": lambda i: None},
      0.85,
      ["nothing was graded"],
    ),
    (
      {"reward": lambda i: None if i > 50 else 0.8},
      0.85,
      ["graded at 9 of the last 20"],
    ),
    ({}, None, ["no greedy answer was graded"]),
    ({}, math.nan, ["no greedy answer was graded"]),
  ],
)
def test_a_collapse_is_found_and_said(changed, accuracy, said):
  found = bench.collapse(long_run(**changed), accuracy, 24)
  assert len(found) == len(said)
  assert all(word in line for word, line in zip(said, found, strict=True))


def test_small_batches_are_averaged_over_as_many_tasks():
  """Of means of few tasks, the best of many is luck, and what follows it no fall."""
  log = long_run(reward=lambda i: 1.0 if 20 <= i < 30 else 0.7)
  assert bench.collapse(log, 0.85, 24) == [
    "reward 0.700 at first, 0.850 at best, 0.700 at last"
  ]
  assert bench.collapse(log, 0.85, 12) == []


def test_an_evaluation_that_nobody_could_grade_is_not_the_best_nor_the_worst():
  log = long_run()
  log[0]["dev_accuracy"] = None
  assert bench.collapse(log, 0.85, 24) == []
  assert bench.collapse(log, 0.75, 24) == [
    "greedy accuracy 0.900 at best, 0.750 at last",
  ]


def test_a_step_without_a_grade_leaves_a_line_of_the_table(tmp_path):
  rows = [
    {"stage": "rl", "step": i + 1, "reward": r, "seconds": 1.0 * i}
    for i, r in enumerate((None, 0.5, 0.5, None))
  ]
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "metrics.jsonl").write_text(text)
  row = bench.row_of("x", [str(tmp_path)])
  assert math.isnan(row["before"]) and math.isnan(row["after"])
  assert row["improved"] == 0


def test_runs_that_ended_are_not_made_again_and_one_that_fails_costs_no_other(
  tmp_path, monkeypatch
):
  quickstart, work = tmp_path / "q", str(tmp_path / "w")
  (quickstart / "sft" / "model").mkdir(parents=True)
  did = []

  def made(config, workdir):
    did.append(workdir)
    if "ppo" in workdir and len(did) == 1:
      raise ValueError("no good")
    bench.prepare_workdir(read_config(config, RLConfig), workdir)
    row = {"stage": "rl", "step": 1, "reward": 0.5, "seconds": 2.0}
    (pathlib.Path(workdir) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (pathlib.Path(workdir) / "results.json").write_text("{}")

  monkeypatch.setattr(bench.rl, "run", made)
  args = (["ppo", "grpo"], str(quickstart), work, 2, 5, False)
  figures = bench.run(*args)
  assert [r["algorithm"] for r in figures["table"]] == ["ppo", "grpo"]
  assert list(figures["failed"].values()) == ["ValueError: no good"]
  assert [r["seeds"] for r in figures["table"]] == [1, 2]
  assert len(did) == 4
  figures = bench.run(*args)
  assert not figures["failed"] and len(did) == 5 and "ppo" in did[-1]
  # The same folders with other settings are refused, not taken for these.
  (tmp_path / "other" / "sft" / "model").mkdir(parents=True)
  with pytest.raises(ConfigError, match="holds a run whose section"):
    bench.run(["ppo"], str(tmp_path / "other"), work, 2, 5, False)


@pytest.mark.parametrize(
  ("error", "raised", "words"),
  [
    (OSError(errno.EROFS, "Read-only file system"), DiskError, "choose another place"),
    (InUseError("w: process 7 works there"), InUseError, "process 7 works there"),
  ],
)
def test_where_nothing_can_be_written_no_run_follows(
  tmp_path, monkeypatch, capsys, error, raised, words
):
  (tmp_path / "q" / "sft" / "model").mkdir(parents=True)
  workdirs = []

  def run(config, workdir):
    workdirs.append(workdir)
    raise error

  monkeypatch.setattr(bench.rl, "run", run)
  with pytest.raises(raised, match=words):
    bench.run(["ppo", "grpo"], str(tmp_path / "q"), str(tmp_path / "w"), 2, 5, False)
  assert len(workdirs) == 1 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--cases=(", "flag --cases=(: no regular expression: missing )"),
    ("--quickstart=/dev/null/x", "/dev/null/x/sft/model: there is no such model"),
    ("--rounds=none", "flag --rounds=none: invalid literal"),
    ("more", "unexpected argument 'more'"),
  ],
)
def test_a_wrong_flag_is_one_line(tmp_path, flag: str, words: str):
  command = [sys.executable, "-m", "experiments.bench.algorithms", "--quick", flag]
  ended = subprocess.run(
    [*command, f"--runs={tmp_path}"], capture_output=True, text=True, cwd=ROOT
  )
  assert ended.returncode == 2, ended.stderr
  assert words in ended.stderr and "Traceback" not in ended.stderr
  assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1

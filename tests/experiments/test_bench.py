"""Benchmarks on tiny cases: one smoke test each, and refusals of unequal contestants.

test_bench_peers tests the failures of peers' processes.
"""

from __future__ import annotations

import json
import pathlib
import sys

import ml_collections
import pytest
from programs import toy_runs

from coa_jax import rl as rl_journey
from coa_jax.report.metrics import read_metrics
from coa_jax.runtime.config import ConfigError, read_config
from experiments.bench import (
  agentic,
  algorithms,
  async_rl,
  gpu_work,
  peers,
  program,
  rl,
  rollout,
  train,
  train_work,
)
from tests.backend import BACKEND

FIELDS = train_work.model_fields(V=64, D=16, L=1, N=2, K=1, H=8, F=32)


# Benchmark -> its rows for the smallest case with our worker alone; a known figure.
SMALLEST = {
  "rollout": (
    lambda: rollout.measure("tiny", FIELDS, "float32", {}, [2], rounds=1, new=4),
    {"batch": 2},
  ),
  "uneven": (
    lambda: rollout.measure(
      "tiny uneven", FIELDS, "float32", {}, [4], rounds=1, new=4, prompt=30
    ),
    {"batch": 4},
  ),
  "agentic": (
    lambda: agentic.measure(
      "tiny", FIELDS, "float32", {}, [False], rounds=1, trajectories=2, new=2
    ),
    {"prefilled": 2 * (agentic.PROMPT + 3 * 48)},
  ),
  "rl": (
    lambda: rl.measure("tiny", FIELDS, {}, [False], rounds=1, prompts=1, new=2),
    {"tools": "0 s"},
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_our_worker_is_measured(name: str):
  measure, known = SMALLEST[name]
  (row,) = measure()
  assert row["contestant"] == "ours"
  assert {key: row[key] for key in known} == known
  rates = [v for k, v in row.items() if k.endswith("_per_second")]
  assert rates and all(rate > 0 for rate in rates)
  json.dumps(row)


@pytest.mark.slow
@pytest.mark.parametrize(
  "stage",
  [
    "rates",
    *(pytest.param(s, marks=pytest.mark.soak) for s in ("window", "train")),
    "compile",
  ],
)
def test_a_stage_of_the_gpu_benchmark_writes_its_figures(stage, tmp_path, monkeypatch):
  monkeypatch.setattr(peers, "available", lambda pythons: {})
  figures = gpu_work.Figures(stage, str(tmp_path))
  gpu_work.STAGES[stage](figures, sys.executable, ["tiny"])
  assert figures.rows
  assert json.loads((tmp_path / f"{stage}.json").read_text()) == figures.rows
  numbers = [v for row in figures.rows for v in row.values() if isinstance(v, float)]
  assert numbers and all(number > 0 for number in numbers)


@pytest.mark.parametrize(
  ("check", "same", "other"),
  [
    (train.check_losses, [7.0, 6.9], [7.0, 6.91]),
    (train.check_losses, [7.0, 6.9], [7.0, float("nan")]),
    (train.check_losses, [7.0, 6.9], [7.0]),
    (rollout.check_tokens, [[1, 2], [3]], [[1, 2], [4]]),
    (rl.check_tokens, [[1], [2]] * 9, [[1], [2]] * 8 + [[0], [0]]),
  ],
)
def test_a_contestant_that_does_other_work_is_refused(check, same, other):
  check({"ours": same, "tunix": same})
  with pytest.raises(ValueError, match=r"tunix|zip"):
    check({"ours": same, "tunix": other})


def test_ratios_are_ours_over_theirs():
  own = {"size": "5M", "tokens_per_second": 3.0, "peak_mb": 3, "contestant": "ours"}
  row = {**own, "tokens_per_second": 6.0, "contestant": "tunix"}
  ratios = program.ratios([own, row], ["size"], ["tokens_per_second", "peak_mb"])
  assert ratios == {
    "5M tokens_per_second over tunix": 0.5,
    "5M peak_mb over tunix": 1.0,
  }


# --- RL benchmarks, from a quickstart's model.


def test_algorithms_that_ended_are_not_made_again_and_a_failure_costs_no_other(
  tmp_path, monkeypatch
):
  quickstart = tmp_path / "q"
  (quickstart / "sft" / "model").mkdir(parents=True)
  workdirs = []

  def run(config, workdir):
    workdirs.append(workdir)
    if len(workdirs) == 1:
      raise ValueError("no good")
    settings = read_config(config, rl_journey.RLConfig)
    algorithms.prepare_workdir(settings, workdir)
    row = {"stage": "rl", "step": 1, "reward": 0.5, "seconds": 2.0}
    (pathlib.Path(workdir) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (pathlib.Path(workdir) / "results.json").write_text("{}")

  monkeypatch.setattr(algorithms.rl, "run", run)
  for failed, seeds, runs in (["ValueError: no good"], [1, 2], 4), ([], [2, 2], 5):
    figures = algorithms.run(
      ["ppo", "grpo"], str(quickstart), str(tmp_path / "w"), 2, 5, quick=False
    )
    assert list(figures["failed"].values()) == failed
    assert [row["seeds"] for row in figures["table"]] == seeds
    assert len(workdirs) == runs
  # The same folders are refused, not reused, under other settings.
  (tmp_path / "other" / "sft" / "model").mkdir(parents=True)
  with pytest.raises(ConfigError, match="holds a run"):
    algorithms.run(
      ["ppo"], str(tmp_path / "other"), str(tmp_path / "w"), 2, 5, quick=False
    )


def log_of(steps: int = 60, **changes) -> list[dict]:
  """Log lines of a healthy run; `changes` maps a column to other values by step."""
  usual = {
    "reward": lambda i: min(0.4 + i / 60, 0.8),
    "format": lambda i: 0.97,
    "truncated_share": lambda i: 0.01,
    "grad_norm": lambda i: 0.1,
  }
  columns = usual | changes
  return [{name: at(i) for name, at in columns.items()} for i in range(steps)]


@pytest.mark.parametrize(
  ("changes", "accuracy", "prompts", "reason"),
  [
    ({}, 0.85, 24, ""),
    ({"reward": lambda i: 0.1 if i == 59 else 0.8}, 0.85, 24, ""),  # one bad batch
    ({"reward": lambda i: 0.8 if i < 35 else 0.3}, 0.85, 24, "at best"),
    ({"format": lambda i: 1.0 if i < 30 else 0.5}, 0.85, 24, "well-formed 0.5"),
    ({"truncated_share": lambda i: i / 100}, 0.85, 24, "cut off"),
    ({"grad_norm": lambda i: None if i == 7 else 0.1}, 0.85, 24, "not finite"),
    ({"reward": lambda i: None if i > 9 else 0.8}, 0.85, 24, "graded at 20 of"),
    ({}, None, 24, "no greedy answer was graded"),
    # Ten better updates: with 12 tasks each they may be chance, so not a peak.
    ({"reward": lambda i: 1.0 if 20 <= i < 30 else 0.7}, 0.85, 24, "0.850 at best"),
    ({"reward": lambda i: 1.0 if 20 <= i < 30 else 0.7}, 0.85, 12, ""),
  ],
)
def test_a_collapse_of_an_algorithm_is_found(changes, accuracy, prompts, reason):
  lines = algorithms.collapse(log_of(**changes), accuracy, prompts)
  assert len(lines) == bool(reason) and reason in "".join(lines)


@pytest.mark.slow
def test_an_asynchronous_runs_seconds_are_those_of_its_log(tmp_path, monkeypatch):
  config = toy_runs(tmp_path)["rl"]
  config["tools"] = dict(tools=("code",), sandbox=BACKEND)
  config["algo"] |= dict(steps=4, loss=dict(is_clip=2.0))
  config["algo"]["sampling"]["staleness"] = 1
  config["checkpoint"] = dict(every=1)
  monkeypatch.setattr(rl_journey, "Toolbox", async_rl.SlowToolbox)
  results = rl_journey.run(ml_collections.ConfigDict(config), str(tmp_path / "w"))
  log = read_metrics(str(tmp_path / "w"), "rl")
  figures = async_rl.figures_of(log, results)
  timed = log[3:]  # after the steps that compile
  assert figures["learn"] == pytest.approx(sum(r["seconds_learn"] for r in timed))
  waited = figures["seconds"] - figures["learn"]
  assert figures["learner_waited"] == pytest.approx(waited) and waited > 0

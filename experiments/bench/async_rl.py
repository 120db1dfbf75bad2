"""Compares asynchronous and synchronous RL under slow tools: steps/s, accuracy.

  python -m experiments.bench.async_rl [--quick] [--rounds=5] [--out=FILE.json]
    [--quickstart=runs/quickstart] [--runs=runs/async] [--steps=24] [--staleness=2]

Needs a finished `experiments.quickstart`. Both contestants train the quickstart's SFT
model with configs/rl_world.py. A step has 8 groups of 8 trajectories, which the slots
hold at once; every tool call takes 0.1 to 0.3 s longer, by the call's hash. Whole runs
alternate, one seed per round. Both make one update per step, so that on-policy
importance weights are 1. A step's seconds exclude evaluation and saving; the first
steps, which compile, are left out. The learner learns, and waits for the rest of a
step.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import ml_collections
from absl import flags

from coa_jax import rl
from coa_jax.cli.launch import COMPILE_CACHE, prepare, run_program
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.report.metrics import read_metrics
from coa_jax.report.timers import seconds_of
from coa_jax.tools.toolbox import Toolbox
from experiments.bench import program as bench

_COMPILES = 3  # steps that are not timed
_UNTIMED = ("dev", "save")  # phases that are the same for both
_LAST = 3  # the reward after training is the mean of these last steps
# Added seconds per call.
_LEAST_S = 0.1
_MOST_S = 0.3


def _define_flags() -> None:
  # Not at import: other programs define the same flags, and tests import both.
  flags.DEFINE_string("quickstart", "runs/quickstart", "A finished quickstart.")
  flags.DEFINE_string("runs", "runs/async", "Folder for the runs.")
  flags.DEFINE_integer("steps", 24, "Updates per run.", _COMPILES + 1)
  flags.DEFINE_integer("staleness", 2, "The asynchronous runs' staleness.", 1)


_COLUMNS = {
  "name": "rollouts",
  "steps_per_s": "steps/s",
  "learn": "learns",
  "learner_waited": "waits",
  "staleness": "stale",
  "before": "before",
  "after": "after",
}


class SlowToolbox(Toolbox):
  """Real tools with added latency."""

  def answer(self, name: str, arguments: str, seconds: float) -> tuple[CallStatus, str]:
    """`Toolbox.answer` after a delay that depends on the call."""
    hashed = hashlib.blake2b(f"{name} {arguments}".encode(), digest_size=8).digest()
    share = int.from_bytes(hashed) / 2**64
    time.sleep(_LEAST_S + share * (_MOST_S - _LEAST_S))
    return super().answer(name, arguments, seconds)


def config_of(
  quickstart: str, seed: int, steps: int, quick: bool, algo: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Returns a run's config; `algo` has the contestant's fields."""
  config = bench.quickstart_config(quickstart, quick, seed)
  config.dev.every = config.checkpoint.every = config.algo.steps = steps
  if not quick:
    config.algo.sampling.prompts = 8
    config.algo.sampling.samples = 8
  with config.algo.unlocked():
    config.algo.update(algo)
  return config


def figures_of(log: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> dict:
  """Computes one run's figures from its log."""

  def mean(name: str, rows: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(_number(row.get(name, 0.0)) for row in rows)

  timed = log[_COMPILES:]
  totals = []
  for row in timed:
    phases = seconds_of(row)
    for name in _UNTIMED:
      phases.pop(name, None)
    totals.append(sum(phases.values()))
  seconds = statistics.fmean(totals)
  learn = mean("seconds_learn", timed)
  return {
    "seconds": seconds,
    "learn": learn,
    # In synchronous RL the whole rollout: decoding, tools, grading.
    "learner_waited": seconds - learn,
    "rollouts_waited": mean("rollouts_waited", timed),
    "staleness": mean("staleness", timed),
    "staleness_max": max(row.get("staleness_max", 0.0) for row in timed),
    "reward": mean("reward", log[-_LAST:]),
    "before": _number(results["dev_accuracy_first"]),
    "after": _number(results["dev_accuracy"]),
  }


def _number(value: float | None) -> float:
  """Returns NaN for null (nothing could be graded)."""
  return math.nan if value is None else value


def run(
  quickstart: str, workdir: str, rounds: int, steps: int, staleness: int, quick: bool
) -> dict[str, Any]:
  """Alternates the contestants' runs; returns the table and the speed-ups."""
  ahead = {"loss": {"is_clip": 2.0}, "sampling": {"staleness": staleness}}
  contestants = {"in turns": {}, "ahead": ahead}
  runs: dict[str, list[dict]] = {name: [] for name in contestants}
  for seed in range(rounds):
    for i, (name, algo) in enumerate(contestants.items()):
      print(f"{name}, seed {seed}", file=sys.stderr)
      own = os.path.join(workdir, f"{i}_seed{seed}")
      with mock.patch.object(rl, "Toolbox", SlowToolbox):
        results = rl.run(config_of(quickstart, seed, steps, quick, algo), own)
      log = read_metrics(own, "rl")
      runs[name].append(figures_of(log, results))

  # --- Means over rounds; the speed-up is the rounds' median.
  first = runs["in turns"]
  table = []
  ratios = {}
  for name, mine in runs.items():
    row = {k: statistics.fmean(r[k] for r in mine) for k in mine[0]}
    pairs = zip(first, mine, strict=True)
    speedup = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    ratios[f"steps/s, rollouts {name} over in turns"] = speedup
    row |= {"name": name, "steps_per_s": 1 / row["seconds"]}
    table.append(row)
  return {"table": table, "ratios": ratios, "runs": runs}


def main() -> None:
  """Trains and prints."""
  prepare(COMPILE_CACHE.value)
  quick = bench.QUICK.value

  def work() -> dict[str, Any]:
    rounds = bench.rounds()
    options = flags.FLAGS
    return run(
      options.quickstart,
      options.runs,
      rounds,
      steps=_COMPILES + 1 if quick else options.steps,
      staleness=options.staleness,
      quick=quick,
    )

  note = (
    "Seconds a step that the learner learns and waits; below, the median ratio of the "
    "rounds. Stale: mean updates that a token is old. Greedy accuracy on dev_tasks."
  )
  bench.program(work, "RL under slow tools", _COLUMNS, note)()


if __name__ == "__main__":
  _define_flags()
  run_program(main)

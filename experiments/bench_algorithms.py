"""It learns: every algorithm from the quickstart's SFT model, a small fixed budget.

  python -m experiments.bench_algorithms [--quick] [--cases=REGEX] [--out=FILE.json]
    [--quickstart=runs/quickstart] [--runs=runs/algorithms] [--seeds=3] [--steps=12]

Needs a finished `experiments.quickstart`. Each run is configs/rl_world.py with the
fields of one preset; a run that has ended is not made again, so the table may grow in
several goes. The sampled reward counts: it is what is maximised, and greedy answers are
nearly all right before RL. An algorithm that does not raise it is named, and the exit
status is 1 (not with --quick, which makes 2 updates from a few rollouts).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np
from absl import app, flags

from coa_jax import rl
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.report.metrics import METRICS_FILE, read_metrics
from configs import rl_world
from experiments import bench
from experiments.launch import COMPILE_CACHE, prepare

_LAST = 3  # steps whose reward is the reward after training
_QUICKSTART = flags.DEFINE_string("quickstart", "runs/quickstart", "A finished one.")
_RUNS = flags.DEFINE_string("runs", "runs/algorithms", "Where the runs go.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each algorithm.", 1)
_STEPS = flags.DEFINE_integer("steps", 12, "Updates of each run.", 1)


def config_of(name: str, quickstart: str, seed: int, steps: int, quick: bool) -> Any:
  """The config of one run."""
  config: ml_collections.ConfigDict = rl_world.get_config("tiny" if quick else "")
  world = os.path.join(quickstart, "world")
  config.init = os.path.join(quickstart, "sft", "model")
  config.tasks.uri = os.path.join(world, "rl_tasks.jsonl")
  config.tools.corpus = os.path.join(world, "train_pages.jsonl")
  config.dev.uri = os.path.join(world, "dev_tasks.jsonl")
  config.dev.corpus = os.path.join(world, "dev_pages.jsonl")
  config.rollout.seed = seed
  # One batch of rollouts a step for all, whatever an algorithm does with it.
  config.algo.update(preset(name) | {"rounds": 1, "critic_lr": 1e-3})
  if not quick:
    config.algo.steps = config.dev.every = steps
  return config


def row_of(name: str, workdirs: Sequence[str]) -> dict[str, Any]:
  """One line of the table from the logs of an algorithm's runs."""
  logs = [read_metrics(os.path.join(w, METRICS_FILE), "rl") for w in workdirs]
  before = [log[0]["reward"] for log in logs]
  after = [float(np.mean([r["reward"] for r in log[-_LAST:]])) for log in logs]
  entropy = [log[-1].get("entropy") for log in logs]
  return {
    "algorithm": name,
    "before": float(np.mean(before)),
    "after": float(np.mean(after)),
    "least": min(after),
    "improved": sum(a > b for a, b in zip(after, before, strict=True)),
    "seeds": len(logs),
    "entropy": float(np.mean([x for x in entropy if x is not None] or [np.nan])),
    "seconds": float(np.mean([log[-1]["seconds"] for log in logs])),
  }


def run(
  names: Sequence[str],
  quickstart: str,
  workdir: str,
  seeds: int,
  steps: int,
  quick: bool,
) -> dict[str, Any]:
  """Trains all; returns the table.

  Raises:
    FileNotFoundError: there is no finished quickstart.
  """
  model = os.path.join(quickstart, "sft", "model")
  if not os.path.isdir(model):
    raise FileNotFoundError(
      f"{model}: there is no such model; run python -m experiments.quickstart, or give "
      "--quickstart the folder of a finished one"
    )
  table = []
  for name in names:
    workdirs = [os.path.join(workdir, f"{name}_seed{seed}") for seed in range(seeds)]
    for seed, own in enumerate(workdirs):
      print(f"{name}, seed {seed}", file=sys.stderr)
      rl.run(config_of(name, quickstart, seed, steps, quick), own)
    table.append(row_of(name, workdirs))
  return {"table": table, "ratios": {}}


def main(argv: list[str]) -> None:
  """Trains, prints, judges."""
  prepare(COMPILE_CACHE.value)
  quick, table = bench.QUICK.value, []

  def work() -> dict[str, Any]:
    names = [name for name in PRESETS if re.search(bench.CASES.value, name)]
    if not names:
      raise ValueError(f"--cases={bench.CASES.value!r} finds none of {list(PRESETS)}")
    seeds = 1 if quick else _SEEDS.value
    args = (_QUICKSTART.value, _RUNS.value, seeds, _STEPS.value, quick)
    figures = run(names, *args)
    table.extend(figures["table"])
    return figures

  columns = {
    "algorithm": "algorithm",
    "before": "reward before",
    "after": "after",
    "least": "least after",
    "improved": "seeds that rose",
    "entropy": "entropy (nats)",
    "seconds": "s a run",
  }
  note = f"Mean sampled reward of the first step, and of the last {_LAST}."
  bench.program(work, "From the SFT model", columns, note)(argv)
  stuck = [r["algorithm"] for r in table if r["improved"] < r["seeds"]]
  if stuck and not quick:
    print(f"the reward did not rise with every seed: {', '.join(stuck)}")
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)

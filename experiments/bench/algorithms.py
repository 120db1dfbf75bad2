"""Trains the quickstart's SFT model with every algorithm, on a small fixed budget.

  python -m experiments.bench.algorithms [--quick] [--cases=REGEX] [--out=FILE.json]
    [--quickstart=runs/quickstart] [--runs=runs/algorithms] [--seeds=3] [--steps=15]
  python -m experiments.bench.algorithms --long=NAME [--steps=500]

Needs a finished `experiments.quickstart`. Each run uses configs/rl_world.py with one
preset's fields. All runs take about an hour alone on two cores; --long takes two thirds
of an hour. After Ctrl-C or a kill the same command resumes and does not repeat finished
runs. The verdict uses the sampled reward: RL maximises it, and nearly all greedy
answers are right before RL. The command names algorithms that fail or, without --quick,
do not raise the reward with every seed; the exit status is then 1. --quick makes 2
updates from a few rollouts. --long instead makes 500 updates with one algorithm, from a
quarter of the rollouts each, and tests for collapse; the exit status is 1 if the run
collapses.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from absl import flags

from coa_jax import rl
from coa_jax.cli.launch import COMPILE_CACHE, CPU_DEVICES, prepare, run_program
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.report.metrics import duration, read_metrics
from coa_jax.runtime.config import read_config
from coa_jax.runtime.disk import DiskError, clear_errors
from coa_jax.runtime.lock import InUseError
from coa_jax.runtime.record import prepare_workdir
from experiments.bench import program as bench

_LAST = 3  # the reward after training is the mean of these last steps
_QUICKSTART = flags.DEFINE_string("quickstart", "runs/quickstart", "A finished one.")
_RUNS = flags.DEFINE_string("runs", "runs/algorithms", "The runs' folder.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each algorithm.", 1)
_STEPS = flags.DEFINE_integer("steps", None, "Updates; 15, or 500 with --long.", 1)
_LONG = flags.DEFINE_enum(
  "long", None, list(PRESETS), "Test this algorithm for collapse."
)
flags.set_default(CPU_DEVICES, 2)
# Seconds per update, and for a run's other work, alone on two cores: the estimate until
# runs have ended.
_UPDATE, _START = 6.0, 25.0
_LONG_PROMPTS = 6  # tasks per update in a long run
_WINDOW = 480  # tasks per average in a long run


def config_of(
  name: str,
  quickstart: str,
  seed: int,
  steps: int,
  quick: bool,
  prompts: int | None = None,
) -> ml_collections.ConfigDict:
  """Returns a run's config; `prompts` are tasks per update, by default rl_world's."""
  config = bench.quickstart_config(quickstart, quick, seed)
  # Every algorithm gets one batch of rollouts per step.
  config.algo.update(preset(name))
  config.algo.update(sampling={"rounds": 1}, loss={"critic_lr": 1e-3})
  if not quick:
    config.algo.steps = steps
    config.dev.every = min(steps, 25)
    config.dev.limit = 48
    config.checkpoint.every = 5
    config.algo.keep_every = 50
  if prompts:
    config.algo.sampling.prompts = prompts
    trajectories = prompts * config.algo.sampling.samples
    config.rollout.slots = min(config.rollout.slots, trajectories)
  return config


def row_of(name: str, workdirs: Sequence[str]) -> dict[str, Any]:
  """Makes a table row from the logs of an algorithm's runs."""
  # --- Figures per seed.
  before: list[float] = []
  after: list[float] = []
  entropy: list[float] = []
  seconds: list[float] = []
  for workdir in workdirs:
    log = read_metrics(workdir, "rl")
    rewards = _column(log, "reward")
    before.append(float(rewards[0]))
    after.append(float(np.mean(rewards[-_LAST:])))
    seconds.append(log[-1]["seconds"])
    # Updates without mixed groups have no such figure.
    known = [row["entropy"] for row in log if row.get("entropy") is not None]
    entropy += known[-1:]

  # --- Their means.
  return {
    "algorithm": name,
    "before": float(np.mean(before)),
    "after": float(np.mean(after)),
    "least": min(after),
    "improved": sum(a > b for a, b in zip(after, before, strict=True)),
    "seeds": len(workdirs),
    "entropy": float(np.mean(entropy or [np.nan])),
    "seconds": float(np.mean(seconds)),
  }


def _column(log: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
  """Returns a metric per update, with NaN for null (nothing could be graded)."""
  return np.array([row[name] for row in log], float)


def collapse(
  log: Sequence[Mapping[str, Any]], accuracy: float | None, prompts: int
) -> list[str]:
  """Returns the reasons why a run counts as collapsed; [] if none.

  A mean covers a window of updates with 480 tasks (`_WINDOW`; with fewer tasks the best
  mean would be chance), without ungraded updates. A run has collapsed if more than a
  tenth of its last window is ungraded; its last mean reward is less than nine tenths of
  the best; its last greedy dev accuracy is unknown, or more than a tenth below the
  best; less than nine tenths of its last window's trajectories are well-formed, or more
  than a tenth are cut off; or a gradient was not finite.

  Args:
    log: the log lines of stage rl.
    accuracy: the last policy's greedy accuracy on dev tasks; None if ungraded.
    prompts: tasks per update.
  """
  size = min(-(-_WINDOW // prompts), len(log))

  def window_means(name: str) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(_column(log, name), size)
    graded = windows[~np.isnan(windows).all(axis=1)]
    return np.nanmean(graded, axis=1)

  # --- Training's figures.
  reasons = []
  dead = np.isnan(_column(log[-size:], "reward")).sum()
  if dead > 0.1 * size:
    reasons.append(f"nothing was graded at {dead} of the last {size} updates")
  reward = window_means("reward")
  if len(reward) and reward[-1] < 0.9 * reward.max():
    reasons.append(
      f"reward {reward[0]:.3f} at first, {reward.max():.3f} at best, {reward[-1]:.3f} "
      "at last"
    )
  # --- Greedy accuracy.
  known = [r["dev_accuracy"] for r in log if r.get("dev_accuracy") is not None]
  if accuracy is None or np.isnan(accuracy):
    reasons.append("no greedy answer was graded at last")
  elif accuracy < max([accuracy, *known]) - 0.1:
    reasons.append(f"greedy accuracy {max(known):.3f} at best, {accuracy:.3f} at last")
  # --- Form, length and gradients.
  written = window_means("format")
  if len(written) and written[-1] < 0.9:
    reasons.append(f"well-formed {written[-1]:.3f} at last")
  if window_means("truncated_share")[-1] > 0.1:
    reasons.append(f"cut off {window_means('truncated_share')[-1]:.3f} at last")
  # An update without mixed groups has no gradient and no value.
  if any("grad_norm" in row and row["grad_norm"] is None for row in log):
    reasons.append("a gradient was not finite")
  return reasons


def train(
  jobs: Sequence[tuple[ml_collections.ConfigDict, str]], steps: int
) -> dict[str, str]:
  """Runs every unfinished (config, workdir) and prints the progress.

  Returns:
    Workdir -> the error, for failed runs.

  Raises:
    DiskError, InUseError: a workdir is not writable, or another command works there.
  """
  failed: dict[str, str] = {}
  run_seconds: list[float] = []
  unfinished = []

  # --- Durations of finished runs.
  for config, own in jobs:
    if os.path.exists(os.path.join(own, "results.json")):
      # A finished run must have the same settings.
      settings = read_config(config, rl.RLConfig)
      prepare_workdir(settings, own, may_change=("log.wandb_project",))
      run_seconds.append(read_metrics(own, "rl")[-1]["seconds"])
    else:
      unfinished.append((config, own))

  # --- The others.
  for number, (config, own) in enumerate(unfinished):
    each = steps * _UPDATE + _START
    if run_seconds:
      each = statistics.fmean(run_seconds)
    left = duration(each * (len(unfinished) - number))
    place = f"[{len(jobs) - len(unfinished) + number + 1}/{len(jobs)}]"
    print(f"{place} {own}: {left} left", file=sys.stderr, flush=True)
    try:
      with clear_errors(own):
        rl.run(config, own)
    except (DiskError, InUseError):  # the others would fail, too
      raise
    except Exception as e:  # one algorithm's fault must not stop the others
      traceback.print_exc()
      failed[own] = f"{type(e).__name__}: {e}"
    else:
      run_seconds.append(read_metrics(own, "rl")[-1]["seconds"])
  return failed


def run(
  names: Sequence[str],
  quickstart: str,
  workdir: str,
  seeds: int,
  steps: int,
  quick: bool,
  prompts: int | None = None,
) -> dict[str, Any]:
  """Trains all algorithms; returns the table, and errors under "failed"."""
  # --- Seed after seed, each with all algorithms: so the table grows.
  workdirs: dict[str, list[str]] = {name: [] for name in names}
  jobs = []
  for seed in range(seeds):
    for name in names:
      own = os.path.join(workdir, f"{name}_{steps}_seed{seed}")
      config = config_of(name, quickstart, seed, steps, quick, prompts)
      workdirs[name].append(own)
      jobs.append((config, own))
  failed = train(jobs, steps)
  table = []
  for name, every in workdirs.items():
    ended = [own for own in every if own not in failed]
    if ended:
      table.append(row_of(name, ended))
  return {"table": table, "ratios": {}, "failed": failed}


def run_long(name: str, quickstart: str, workdir: str, steps: int) -> dict[str, Any]:
  """Makes a long run; adds `collapse`'s reasons to its figures, under "collapse"."""
  quick = bench.QUICK.value
  prompts = None if quick else _LONG_PROMPTS
  figures = run([name], quickstart, workdir, 1, steps, quick, prompts)
  if not figures["failed"]:
    own = os.path.join(workdir, f"{name}_{steps}_seed0")
    with open(os.path.join(own, "results.json")) as f:
      accuracy = json.load(f)["dev_accuracy"]
    config = config_of(name, quickstart, 0, steps, quick, prompts)
    tasks = config.algo.sampling.prompts
    figures["collapse"] = collapse(read_metrics(own, "rl"), accuracy, tasks)
  return figures


def main() -> None:
  """Trains, prints the table and judges."""
  prepare(COMPILE_CACHE.value, CPU_DEVICES.value)
  quick = bench.QUICK.value
  figures: dict[str, Any] = {}
  steps = _STEPS.value or (500 if _LONG.value else 15)

  def work() -> dict[str, Any]:
    if _LONG.value:
      name = _LONG.value
      figures.update(run_long(name, _QUICKSTART.value, _RUNS.value, steps))
      return figures
    names = [name for name in PRESETS if re.search(bench.CASES.value, name)]
    if not names:
      raise ValueError(f"--cases={bench.CASES.value!r} finds none of {list(PRESETS)}")
    seeds = 1 if quick else _SEEDS.value
    figures.update(run(names, _QUICKSTART.value, _RUNS.value, seeds, steps, quick))
    return figures

  # --- The runs and their table.
  columns = {
    "algorithm": "algorithm",
    "before": "reward before",
    "after": "after",
    "least": "least after",
    "improved": "seeds that rose",
    "seeds": "of",
    "entropy": "entropy (nats)",
    "seconds": "s a run",
  }
  note = f"Mean sampled reward of the first step, and of the last {_LAST}."
  bench.program(work, "From the SFT model", columns, note)()

  # --- The verdict.
  bad = [f"{own} failed: {why}" for own, why in figures["failed"].items()]
  if _LONG.value and not bad:
    reasons = figures["collapse"]
    print(f"collapsed: {'; '.join(reasons)}" if reasons else "did not collapse")
    bad += reasons
  elif not quick:
    stuck = [r["algorithm"] for r in figures["table"] if r["improved"] < r["seeds"]]
    if stuck:
      bad.append(f"the reward did not rise with every seed: {', '.join(stuck)}")
  for line in bad:
    print(line)
  sys.exit(1 if bad else 0)


if __name__ == "__main__":
  run_program(main)

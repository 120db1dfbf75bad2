"""The ablation: what each part of the recipe is worth. One command, a table, a plot.

  python -m experiments.studies.ablation [--workdir=runs/ablation] [--budget=small]
    [--seeds=3] [--arms=REGEX] [--report_only]

Every arm is the whole journey (world, team, distillation, SFT, RL, evaluation on worlds
never seen) with the few fields changed that `ablation_arms.ARMS` says. What arms share
is made once: a folder of the workdir is named by its config, which names the folders
that it reads. Ctrl-C at any time, or a kill; the same command goes on, and runs nothing
twice. An arm that fails is reported and the others go on; the exit status is then 1.

About 65 minutes alone on two cores for all arms and three seeds, by processor time of
their parts. --budget=medium has twice as many updates of SFT, which end it: two
hours of one core's work; worlds and trajectories of a "small" run in the same workdir
are used again. --budget=tiny, some minutes, only walks through.

Writes results.json, table.md, report.html and plot.png into the workdir.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import rich
from absl import flags

from coa_jax.lock import hold
from experiments import launch
from experiments.studies import ablation_report
from experiments.studies.ablation_arms import ARMS, BUDGETS
from experiments.studies.ablation_jobs import KINDS, AblationPlan, Job, Runner, ordered
from tools_sandbox.jail.keeper import check as check_jail


def _define_flags() -> None:
  # Not on import: other programs have flags of these names, and tests import both.
  flags.DEFINE_string("workdir", "runs/ablation", "Where everything goes.")
  flags.DEFINE_enum("budget", "small", list(BUDGETS), "Size of each arm.")
  flags.DEFINE_integer("seeds", 3, "Of world, team, SFT and RL alike.", 1)
  flags.DEFINE_string("arms", "", "Only arms whose name or title this regex finds.")
  flags.DEFINE_bool("report_only", False, "Of what is there; run nothing.")
  flags.set_default(launch.CPU_DEVICES, 2)


def run(
  workdir: str, budget: str, seeds: int, arms: Sequence[str], report_only: bool = False
) -> dict[str, Any]:
  """Runs arms for seeds 0.. and writes the report.

  Args:
    workdir: where everything goes and where a run goes on.
    budget: a name in BUDGETS.
    seeds: how many.
    arms: names in ARMS.
    report_only: to run nothing and tell of what is done.

  Returns:
    What results.json holds; `failed` names arms with what stopped them.
  """
  sandbox = "jail"
  missing = check_jail()
  if missing:  # as in the quickstart: these programs are harmless
    rich.print(f"tools.sandbox=subprocess, for there is no jail: {'; '.join(missing)}")
    sandbox = "subprocess"

  # --- The jobs of all arms and seeds; equal ones are one.
  goals: dict[tuple[int, str], dict[str, list[Job]]] = {}
  evaluations: list[Job] = []
  used: dict[str, str] = {}  # job -> for whom it is first
  for seed in range(seeds):
    plan = AblationPlan(workdir, budget, seed, sandbox)
    for arm in arms:
      parts = plan.evaluations(ARMS[arm])
      goals[seed, arm] = parts
      mine = [*parts["test"], *parts["unseen"]]
      evaluations += mine
      for job in ordered(mine):
        used.setdefault(job.name, f"{ARMS[arm].title!r}, seed {seed}")
  jobs = ordered(evaluations)
  runner = Runner(workdir, jobs)

  # --- Run what is not done.
  if not report_only:
    with hold(workdir):
      runner.run(used)

  # --- What is done by now, and what failed on the way.
  failed: dict[str, str] = {}
  done: dict[tuple[str, int], ablation_report.Folders] = {}
  for (seed, arm), parts in goals.items():
    names = [job.name for job in (*parts["test"], *parts["unseen"])]
    reasons = [runner.failed[name] for name in names if name in runner.failed]
    if reasons:
      failed[f"{arm}, seed {seed}"] = reasons[0]
    elif all(runner.seconds[name] is not None for name in names):
      folders = {}
      for part, of in parts.items():
        folders[part] = [os.path.join(workdir, job.name) for job in of]
      done[arm, seed] = folders
  seconds = dict.fromkeys(KINDS, 0.0)
  for job in jobs:
    seconds[job.kind] += runner.seconds[job.name] or 0.0
  titles = {arm: (ARMS[arm].title, ARMS[arm].changes()) for arm in arms}
  return ablation_report.write(workdir, titles, done, failed, budget, seconds)


def main() -> None:
  """Runs the ablation and prints its table."""
  launch.prepare(launch.COMPILE_CACHE.value, launch.CPU_DEVICES.value)
  options = flags.FLAGS
  try:
    wanted = re.compile(options.arms)
    arms = [
      name
      for name, arm in ARMS.items()
      if wanted.search(name) or wanted.search(arm.title)
    ]
  except re.error as e:
    raise ValueError(f"--arms={options.arms!r} is no regular expression: {e}") from e
  if not arms:
    raise ValueError(f"--arms={options.arms!r} finds none of: {', '.join(ARMS)}")
  results = run(
    options.workdir, options.budget, options.seeds, arms, options.report_only
  )
  for who, why in results["failed"].items():
    print(f"failed: {who}: {why}", file=sys.stderr)
  sys.exit(1 if results["failed"] else 0)


if __name__ == "__main__":
  _define_flags()
  launch.run_program(main)

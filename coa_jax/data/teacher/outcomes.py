"""Distillation results: verdicts, costs, trajectories, figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.convert import ConvertConfig, Dropped, convert
from coa_jax.data.teacher.runs import Run, RunFile
from coa_jax.data.teacher.select import Selection
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import ANSWER, Variant, wrap
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.rewards.graded import Ungradable
from coa_jax.rewards.grader import Grader

Job = tuple[Task, int]  # a task and a sample number


def grade_run(run: Run, task: Task, grader: Grader) -> Run:
  """Grades the run's answer with the grader for the task's kind; returns a new run.

  A run that cannot be judged becomes `infrastructure`, not a wrong answer.

  Raises:
    ValueError: the user's own grader fails or returns nonsense.
  """
  if run.status == Status.INFRASTRUCTURE:
    return run
  answer = run.prediction
  if answer is not None:
    answer = answer.strip()
  try:
    verdict = grader.answer(task, answer, usage_record(run, task))
  except Ungradable as e:
    return dataclasses.replace(run, status=Status.INFRASTRUCTURE, error=str(e))
  return dataclasses.replace(run, reward=verdict.answer, graded=verdict.record)


def usage_record(run: Run, task: Task) -> Trajectory:
  """Returns a trajectory with only the run's cost, calls, answer and reward."""
  answer = Segment(Author.POLICY, ANSWER, wrap(ANSWER, run.prediction or ""))
  return Trajectory(
    run.task_id,
    segments=[answer],
    calls=run.calls,
    status=run.status,
    reward=run.reward,
    reward_parts={} if run.reward is None else {"answer": run.reward},
    usage=run.usage,
    sample=run.sample,
    meta={"family": task.family, "reported": list(run.reported)},
  )


def convert_all(
  jobs: Sequence[Job],
  file: RunFile,
  variant: Variant,
  style: str,
  config: ConvertConfig,
  selections: Mapping[str, Selection] | None,
) -> tuple[list[Trajectory], list[tuple[Task, Trajectory]], Counter[str]]:
  """Converts every job's finished run, in order.

  Args:
    jobs: the runs; those missing from the file are skipped.
    file: the runs.
    variant: the trajectories' dialect.
    style: the trajectories' prompt style; see `protocol.prompts`.
    config: the allowed changes.
    selections: task id -> its selected run; None selects all.

  Returns:
    Every run's usage record; (task, trajectory) pairs; drop counts by reason.
  """
  usage_records: list[Trajectory] = []
  pairs: list[tuple[Task, Trajectory]] = []
  dropped: Counter[str] = Counter()
  for task, sample in jobs:
    run = file.read(task.id, sample)
    if run is None:
      continue  # its infrastructure failed
    # Unselected runs cost as much as selected ones.
    usage_records.append(usage_record(run, task))
    if selections is not None and selections[task.id].sample != sample:
      dropped["not_selected"] += 1
      continue

    # --- With the student's prompt.
    prompt = prompt_segments(variant, task.question, style)
    result = convert(run, task, variant, prompt, config)
    if isinstance(result, Dropped):
      dropped[result.reason] += 1
    else:
      pairs.append((task, result))
  return usage_records, pairs, dropped


def figures(
  usage_records: Sequence[Trajectory], kept: Sequence[Trajectory]
) -> dict[str, Any]:
  """Computes mean rewards, a run's mean cost, and the kept trajectories by family."""
  # --- All runs: their rewards and costs.
  rewards: list[float] = []
  by_family: dict[str, list[float]] = {}
  usage: dict[str, list[float]] = {}
  for record in usage_records:
    for name, amount in dataclasses.asdict(record.usage).items():
      usage.setdefault(name, []).append(amount)
    if record.reward is not None:  # an unjudged answer is not a wrong answer
      rewards.append(record.reward)
      family = record.meta["family"] or "all"
      by_family.setdefault(family, []).append(record.reward)

  # --- The trajectories kept for training.
  families = Counter(trajectory.meta["family"] for trajectory in kept)
  return {
    "right": _mean(rewards),
    "right_by_family": {name: _mean(r) for name, r in sorted(by_family.items())},
    "mean_usage": {name: _mean(amounts) for name, amounts in usage.items()},
    "kept": len(kept),
    "kept_by_family": dict(sorted(families.items())),
  }


def _mean(values: Sequence[float]) -> float | None:
  return sum(values) / len(values) if values else None

"""Measures tasks' difficulty for a model, and selects tasks useful for RL.

A group with only right or only wrong attempts has zero advantages and teaches nothing,
so RL needs tasks that a model solves sometimes. Chain-of-Agents (arXiv 2508.13167, RL
data) keeps web questions that Qwen2.5-72B without tools solves in at most 30 % of 32
attempts. It drops code and math tasks that the fine-tuned model solves in 8 of 8
attempts, or another model fails in 16 of 16.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.runtime.fields import bounded, check_fields

STRATA = ("source", "family", "rate")


@dataclasses.dataclass(frozen=True)
class SelectConfig:
  """Config section `select`: the tasks to keep. The default keeps tasks useful to GRPO.

  Attributes:
    at_least: the lowest pass rate.
    at_most: the highest pass rate; for web questions, the paper uses 0.3 with
      `all_wrong`.
    all_wrong: True to keep tasks without a right attempt, if the band includes them.
    all_right: likewise for tasks with only right attempts.
    min_attempts: tasks with fewer graded attempts are left out (the missing attempts
      were infrastructure failures).
    limit: the number of tasks to keep; 0 keeps all.
    strata: with a limit, the strata to balance: any of "source", "family" and "rate"
      (the number of right attempts). Each stratum gives equally many tasks, until it is
      empty. () draws uniformly.
    without: files of tasks or trajectories (.jsonl) to exclude, by id or by question,
      such as the training set of SFT.
    played: files of earlier attempts (an evaluation's sampled.jsonl, a distillation's
      teacher.jsonl); with any, no attempts are made.
    seed: the seed for the draw.
  """

  at_least: float = bounded(0.0, least=0, most=1)
  at_most: float = bounded(1.0, least=0, most=1)
  all_wrong: bool = False
  all_right: bool = False
  min_attempts: int = bounded(1, least=1)
  limit: int = bounded(0, least=0)
  strata: tuple[str, ...] = ("family",)
  without: tuple[str, ...] = ()
  played: tuple[str, ...] = ()
  seed: int = 0

  def __post_init__(self):
    check_fields(self)
    if self.at_least > self.at_most:
      raise ValueError(
        f"at_least is {self.at_least} and at_most {self.at_most}: no pass rate is in "
        "the band"
      )
    for name in self.strata:
      if name not in STRATA:
        raise ValueError(f"strata has {name!r}; accepted: {', '.join(STRATA)}")


@dataclasses.dataclass(frozen=True)
class Attempts:
  """Outcome counts: a task's right and graded attempts."""

  right: int
  graded: int

  @property
  def rate(self) -> float:
    """The share of right attempts, an unbiased estimate of the success probability."""
    return self.right / self.graded


def pass_rates(outcomes: Iterable[tuple[str, bool]]) -> dict[str, Attempts]:
  """Counts attempts by task id, from (task id, whether right) per graded attempt."""
  counts: dict[str, list[int]] = {}
  for task_id, right in outcomes:
    entry = counts.setdefault(task_id, [0, 0])
    entry[0] += right
    entry[1] += 1
  return {task_id: Attempts(*entry) for task_id, entry in counts.items()}


def keep_tasks(
  tasks: Sequence[Task],
  attempts: Mapping[str, Attempts],
  config: SelectConfig,
  used: Collection[str] = (),
) -> tuple[list[Task], dict[str, Any]]:
  """Returns the selected tasks with their pass rates, in input order.

  Args:
    tasks: the candidates.
    attempts: task id -> outcome counts; see `pass_rates`.
    config: the selection's settings.
    used: ids and questions of tasks to leave out.

  Returns:
    The tasks, with `pass_rate` and `attempts` in their `meta`; and the funnel: `in`,
    the reasons for leaving tasks out (see `_reason`, and `limit`), `out`, `rates`
    (right/graded -> tasks with attempts), `kept_rates` and `kept_strata`.
  """
  # --- Tasks with a pass rate in the band, and the reasons for dropping the others.
  left: collections.Counter[str] = collections.Counter()
  rates: collections.Counter[str] = collections.Counter()
  fitting: list[Task] = []
  for task in tasks:
    outcome = attempts.get(task.id)
    if outcome is not None:
      rates[_name(outcome)] += 1
    reason = _reason(task, outcome, config, used)
    if reason or outcome is None:  # None always has a reason
      left[reason] += 1
      continue
    # Samplers order and weight tasks by these fields.
    meta = {**task.meta, "pass_rate": outcome.rate, "attempts": outcome.graded}
    fitting.append(dataclasses.replace(task, meta=meta))
  # --- At most `limit` tasks, balanced over the strata.
  strata = {t.id: _stratum(t, attempts[t.id], config.strata) for t in fitting}
  chosen = fitting
  if config.limit and len(fitting) > config.limit:
    chosen = _balanced(fitting, strata, config.limit, config.seed)
    left["limit"] = len(fitting) - len(chosen)
  # --- The funnel's statistics.
  chosen_rates = collections.Counter(_name(attempts[task.id]) for task in chosen)
  chosen_strata = collections.Counter("/".join(strata[task.id]) for task in chosen)
  funnel = {
    "in": len(tasks),
    **_sorted(left),
    "out": len(chosen),
    "rates": _sorted(rates),
    "kept_rates": _sorted(chosen_rates),
    "kept_strata": _sorted(chosen_strata),
  }
  return chosen, funnel


def _reason(
  task: Task, outcome: Attempts | None, config: SelectConfig, used: Collection[str]
) -> str:
  """Returns the first reason to leave a task out; "" if it fits."""
  # Also by question: the same question may have another id in another file.
  if task.id in used or task.question.strip() in used:
    return "used"
  if outcome is None or outcome.graded < config.min_attempts:
    return "attempts"
  # The two extremes come before the band: they teach nothing, whatever the band.
  if outcome.right == 0 and not config.all_wrong:
    return "all_wrong"
  if outcome.right == outcome.graded and not config.all_right:
    return "all_right"
  if outcome.rate < config.at_least:
    return "too_hard"
  if outcome.rate > config.at_most:
    return "too_easy"
  return ""


def _stratum(task: Task, outcome: Attempts, strata: Sequence[str]) -> tuple[str, ...]:
  values = {"source": task.source, "family": task.family, "rate": _name(outcome)}
  return tuple(values[name] for name in strata)


def _name(outcome: Attempts) -> str:
  return f"{outcome.right}/{outcome.graded}"


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
  return dict(sorted(counts.items()))


def _balanced(
  tasks: Sequence[Task], strata: Mapping[str, tuple[str, ...]], limit: int, seed: int
) -> list[Task]:
  """Draws `limit` tasks, one from each stratum in turn; returns them in input order."""
  # --- Each stratum's tasks, in random order.
  rng = random.Random(seed)
  groups: dict[tuple[str, ...], list[str]] = {}
  for task in tasks:
    groups.setdefault(strata[task.id], []).append(task.id)
  for group in groups.values():
    rng.shuffle(group)
  # --- One task from each stratum in turn; empty strata are dropped.
  chosen: set[str] = set()
  turns = [groups[name] for name in sorted(groups)]
  while len(chosen) < limit:
    turns = list(filter(None, turns))
    for group in turns[: limit - len(chosen)]:
      chosen.add(group.pop())
  return [task for task in tasks if task.id in chosen]

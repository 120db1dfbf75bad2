"""Which task is played next: all alike, those that teach most, or easy ones first.

All walk through one endless stream in which every epoch is a new permutation of the
tasks. What draws strategically leaves tasks of it out by chance, so what is kept is
drawn in proportion to its chance and seldom twice in a batch. A draw depends on the
seed, on the state, and on nothing else.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.tasks.task import Task

DRAWS = ("uniform", "learnability", "curriculum")
_LEAST = 0.1  # chance of a task that teaches nothing by now
_FADE = 0.5  # of earlier attempts, by policies that are no more, at every new group
_FIRST = 0.1  # share of the tasks that a curriculum begins with


class TaskSampler:
  """All tasks alike, each once in an epoch."""

  def __init__(self, tasks: Sequence[Task], seed: int):
    """Args: what to draw from; the seed of the order."""
    self.tasks = tasks
    self.seed = seed
    self._order = (-1, np.zeros(0, int))  # an epoch, and its permutation

  def task(self, n: int, step: int) -> Task:
    """The task of the n-th group of a run.

    Args:
      n: asked for once and in order; some may be left out.
      step: updates made by then.
    """
    return self._in_stream(n)

  def learn(self, group: Sequence[Trajectory]) -> None:
    """Takes note of how a task's group went."""

  @property
  def state(self) -> dict[str, Any]:
    """JSON values, for a checkpoint; `restore` takes them."""
    return {}

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on where another draw from the same tasks was."""

  def _in_stream(self, place: int) -> Task:
    epoch, nth = divmod(place, len(self.tasks))
    if self._order[0] != epoch:
      order = np.random.default_rng((self.seed, epoch)).permutation(len(self.tasks))
      self._order = epoch, order
    return self.tasks[self._order[1][nth]]


class _WeightedTaskSampler(TaskSampler, abc.ABC):
  """The same stream, of which a task is taken with a chance that is its own by now."""

  def __init__(self, tasks: Sequence[Task], seed: int):
    super().__init__(tasks, seed)
    self._place = 0

  def task(self, n: int, step: int) -> Task:
    """The next task of the stream that is taken. See `TaskSampler`."""
    while True:
      place, self._place = self._place, self._place + 1
      task = self._in_stream(place)
      if np.random.default_rng((self.seed, place, 1)).random() < self.chance(
        task, step
      ):
        return task

  @property
  def state(self) -> dict[str, Any]:
    """See `TaskSampler`."""
    return {"place": self._place}

  def restore(self, state: dict[str, Any]) -> None:
    """See `TaskSampler`."""
    self._place = state["place"]

  @abc.abstractmethod
  def chance(self, task: Task, step: int) -> float:
    """From 0 to 1; 1 for at least one task, or never 0."""


class Learnability(_WeightedTaskSampler):
  """Tasks that are solved sometimes: by 4 p (1 - p), p being the pass rate by now.

  p (1 - p) is the variance of a reward of 0 or 1, and what a group's advantages are
  made of; as a measure of what a task can teach it is "learnability" (arXiv 2408.15099;
  for language models 2502.12272). p is estimated by the rule of
  succession, (right + 1) / (graded + 2), over attempts that fade; those on record in
  `meta` (`difficulty.keep_tasks`) count first. An unknown task has p 1/2 and is taken.
  One that is always or never solved is drawn less often, but at least by 1/10.
  """

  def __init__(self, tasks: Sequence[Task], seed: int):
    """Args: as those of `TaskSampler`."""
    super().__init__(tasks, seed)
    self._counts: dict[str, tuple[float, float]] = {}  # right, graded
    for task in tasks:
      if {"pass_rate", "attempts"} <= task.meta.keys():
        graded = float(task.meta["attempts"])
        self._counts[task.id] = task.meta["pass_rate"] * graded, graded

  def learn(self, group: Sequence[Trajectory]) -> None:
    """Counts the attempts; one without a reward says nothing. See `TaskSampler`."""
    graded = [t for t in group if t.reward is not None]
    if graded:
      parts = [t.reward_parts.get("answer", t.reward) for t in graded]
      right, before = self._counts.get(graded[0].task_id, (0.0, 0.0))
      right = _FADE * right + float(np.clip(parts, 0, 1).sum())
      self._counts[graded[0].task_id] = right, _FADE * before + len(graded)

  def chance(self, task: Task, step: int) -> float:
    """See the class."""
    right, graded = self._counts.get(task.id, (0.0, 0.0))
    p = (right + 1) / (graded + 2)
    return max(_LEAST, 4 * p * (1 - p))

  @property
  def state(self) -> dict[str, Any]:
    """See `TaskSampler`."""
    return {**super().state, "counts": {k: list(v) for k, v in self._counts.items()}}

  def restore(self, state: dict[str, Any]) -> None:
    """See `TaskSampler`."""
    super().restore(state)
    self._counts = {
      k: (right, graded) for k, (right, graded) in state["counts"].items()
    }


class Curriculum(_WeightedTaskSampler):
  """The easiest tasks first, by the pass rates on record; later all.

  At step t of T the easiest share c(t) = min(1, sqrt(t (1 - c0^2) / T + c0^2)) is drawn
  from, all of it alike: the square-root competence of arXiv 1903.09848. (Its
  c0 is 0.01, for data sets of millions; here it is 0.1.)
  """

  def __init__(self, tasks: Sequence[Task], seed: int, steps: float):
    """Args: as those of `TaskSampler`, and T, after which all tasks are drawn from.

    Raises:
      ValueError: a task has no pass rate on record.
    """
    super().__init__(tasks, seed)
    for task in tasks:
      if "pass_rate" not in task.meta:
        raise ValueError(
          f"task {task.id!r} has no meta.pass_rate, by which "
          "algo.sampling.task_sampler='curriculum' orders; "
          "experiments.select_tasks writes task files that have it"
        )
    easy = sorted(tasks, key=lambda t: -t.meta["pass_rate"])
    self._rank = {task.id: i for i, task in enumerate(easy)}
    self._steps = steps

  def chance(self, task: Task, step: int) -> float:
    """See the class."""
    begun = step / self._steps if self._steps else 1.0
    share = min(1.0, math.sqrt(begun * (1 - _FIRST**2) + _FIRST**2))
    return float(self._rank[task.id] < share * len(self.tasks))


def make_task_sampler(
  how: str, tasks: Sequence[Task], seed: int, steps: float
) -> TaskSampler:
  """One of DRAWS.

  Args:
    how: its name.
    tasks: what to draw from.
    seed: of all chance.
    steps: after which a curriculum draws from all tasks.

  Raises:
    ValueError: no such draw, or the tasks lack what it needs.
  """
  if how == "curriculum":
    return Curriculum(tasks, seed, steps)
  if how not in DRAWS:
    raise ValueError(f"draw {how!r}; accepted: {', '.join(DRAWS)}")
  return (
    Learnability(tasks, seed) if how == "learnability" else TaskSampler(tasks, seed)
  )

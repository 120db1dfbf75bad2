"""Task samplers: uniform, most instructive tasks, or easiest tasks first.

All samplers iterate over one endless stream, with a new task permutation per epoch. A
weighted sampler skips tasks at random, so it takes a task in proportion to the task's
weight, and seldom twice in a batch. The next task depends only on the seed and the
sampler's state.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Trajectory

TASK_SAMPLERS = ("uniform", "learnability", "curriculum")
_MIN_CHANCE = 0.1  # minimum weight, for tasks always or never solved
_DECAY = 0.5  # per new group, for earlier attempts by older policies
_FIRST_SHARE = 0.1  # task share at a curriculum's start


class TaskSampler:
  """Samples uniformly: takes every task once per epoch."""

  def __init__(self, tasks: Sequence[Task], seed: int):
    """Takes the tasks to choose from, and the seed for their order."""
    self.tasks = tasks
    self.seed = seed
    self._order = (-1, np.zeros(0, int))  # an epoch, and its permutation

  def task(self, n: int, step: int) -> Task:
    """Returns the task for a run's n-th group; n only grows."""
    return self._in_stream(n)

  def learn(self, group: Sequence[Trajectory]) -> None:
    """Learns from a task's group of attempts; does nothing here."""

  @property
  def state(self) -> dict[str, Any]:
    """The checkpoint state as JSON values; `restore` reads them."""
    return {}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues from the state of a sampler with the same tasks."""

  def _in_stream(self, place: int) -> Task:
    # Seed and epoch number alone give the order, so any place can be computed.
    epoch, nth = divmod(place, len(self.tasks))
    if self._order[0] != epoch:
      order = np.random.default_rng((self.seed, epoch)).permutation(len(self.tasks))
      self._order = (epoch, order)
    return self.tasks[self._order[1][nth]]


class _WeightedTaskSampler(TaskSampler, abc.ABC):
  """Takes each streamed task with its current chance (rejection sampling)."""

  def __init__(self, tasks: Sequence[Task], seed: int):
    super().__init__(tasks, seed)
    self._place = 0

  def task(self, n: int, step: int) -> Task:
    while True:
      place = self._place
      self._place += 1
      task = self._in_stream(place)
      # Keyed by the place (and 1, to differ from an epoch's stream): a restored sampler
      # needs only its place.
      threshold = np.random.default_rng((self.seed, place, 1)).random()
      if threshold < self.chance(task, step):
        return task

  @property
  def state(self) -> dict[str, Any]:
    return {"place": self._place}

  def restore(self, state: dict[str, Any]) -> None:
    self._place = state["place"]

  @abc.abstractmethod
  def chance(self, task: Task, step: int) -> float:
    """Returns a chance in [0, 1]: 1 for at least one task, or positive for all."""


class Learnability(_WeightedTaskSampler):
  """Prefers tasks solved sometimes: weight 4 p (1 - p), with p their pass rate so far.

  p (1 - p) is the variance of a 0/1 reward, and the source of a group's advantages; as
  a measure of training value it is called "learnability" (arXiv 2408.15099; for
  language models 2502.12272). The rule of succession estimates p as (right + 1) /
  (graded + 2), over attempts with decaying weight; recorded attempts in `meta`
  (`difficulty.keep_tasks`) count first. An unknown task has p = 1/2 and is always
  taken. Tasks always or never solved are drawn less often, with weight 1/10 at least.
  """

  def __init__(self, tasks: Sequence[Task], seed: int):
    super().__init__(tasks, seed)
    self._counts: dict[str, tuple[float, float]] = {}  # right, graded
    for task in tasks:
      if {"pass_rate", "attempts"} <= task.meta.keys():
        graded = float(task.meta["attempts"])
        self._counts[task.id] = (task.meta["pass_rate"] * graded, graded)

  def learn(self, group: Sequence[Trajectory]) -> None:
    """Counts the group's attempts; ignores attempts without a reward."""
    graded = [t for t in group if t.reward is not None]
    if not graded:
      return
    # Only the answer counts: shaping can lower a right answer's reward.
    parts = [t.reward_parts.get("answer", t.reward) for t in graded]
    task_id = graded[0].task_id
    right, attempts = self._counts.get(task_id, (0.0, 0.0))
    # The policy has moved on since the earlier attempts.
    right = _DECAY * right + float(np.clip(parts, 0, 1).sum())
    attempts = _DECAY * attempts + len(graded)
    self._counts[task_id] = (right, attempts)

  def chance(self, task: Task, step: int) -> float:
    right, graded = self._counts.get(task.id, (0.0, 0.0))
    p = (right + 1) / (graded + 2)
    return max(_MIN_CHANCE, 4 * p * (1 - p))

  @property
  def state(self) -> dict[str, Any]:
    # Lists, as JSON has no tuples: restored and saved states are equal.
    counts = {task_id: list(count) for task_id, count in self._counts.items()}
    return {**super().state, "counts": counts}

  def restore(self, state: dict[str, Any]) -> None:
    super().restore(state)
    self._counts = {}
    for task_id, (right, graded) in state["counts"].items():
      self._counts[task_id] = (right, graded)


class Curriculum(_WeightedTaskSampler):
  """Takes the easiest tasks first, by recorded pass rates; later all tasks.

  At step t of T, draws uniformly from the easiest share c(t) = min(1, sqrt(t (1 - c0^2)
  / T + c0^2)), the square-root competence from arXiv 1903.09848. There c0 is 0.01, for
  data sets of millions; here c0 is 0.1.
  """

  def __init__(self, tasks: Sequence[Task], seed: int, steps: float):
    """Takes T, the first step that uses all tasks, as `steps`; see `TaskSampler`.

    Raises:
      ValueError: a task has no recorded pass rate.
    """
    super().__init__(tasks, seed)
    for task in tasks:
      if "pass_rate" not in task.meta:
        raise ValueError(
          f"task {task.id!r} has no meta.pass_rate, which "
          "algo.sampling.task_sampler='curriculum' orders by; "
          "coa tasks writes task files that have it"
        )
    # Stable: tasks with the same pass rate keep the file's order.
    easiest_first = sorted(tasks, key=lambda t: -t.meta["pass_rate"])
    self._rank = {task.id: i for i, task in enumerate(easiest_first)}
    self._steps = steps

  def chance(self, task: Task, step: int) -> float:
    progress = 1.0
    if self._steps:
      progress = step / self._steps
    competence = math.sqrt(progress * (1 - _FIRST_SHARE**2) + _FIRST_SHARE**2)
    share = min(1.0, competence)
    # The easiest task has rank 0, below any share: one task always has a chance.
    return float(self._rank[task.id] < share * len(self.tasks))


def make_task_sampler(
  name: str, tasks: Sequence[Task], seed: int, steps: float
) -> TaskSampler:
  """Makes one of TASK_SAMPLERS; a curriculum uses all tasks from step `steps` on.

  Raises:
    ValueError: the sampler is unknown, or the tasks lack its required fields.
  """
  if name == "curriculum":
    return Curriculum(tasks, seed, steps)
  if name == "learnability":
    return Learnability(tasks, seed)
  if name == "uniform":
    return TaskSampler(tasks, seed)
  raise ValueError(f"task sampler {name!r}; accepted: {', '.join(TASK_SAMPLERS)}")

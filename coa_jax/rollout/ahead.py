"""Rollouts that go on while the learner learns, and how old their tokens may get.

A thread plays groups of a numbered stream. The learner takes them in their order, so
no short trajectory overtakes a long one. A newer policy is taken up in the midst of
running trajectories, and every token keeps the version that sampled it. A group begins
only when it will be learnt from in time, however slow it is (back-pressure): no token
is then older than allowed, nothing is played in vain, and nothing is thrown away.

Of P processes each plays every P-th group; a step takes them in the order of the
stream, and every process gets all of them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.episode import CoAEpisode
from coa_jax.rollout.player import Player, gathered, of_all_processes
from coa_jax.tasks.sampling import Draw
from coa_jax.tasks.task import Task
from coa_jax.tools.toolbox import Toolbox


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one step learns from, and how far ahead of it rollouts may be.

  Attributes:
    steps: of the run.
    prompts: groups that a step learns from; with them it is over.
    most: groups that a step takes, at most, to find those.
    samples: trajectories of a group.
    temperature: of the sampling.
    staleness: updates that a token may be old when it is learnt from; 1 or more.
  """

  steps: int
  prompts: int
  most: int
  samples: int
  temperature: float
  staleness: int

  def latest(self, ahead: int, kept: int = 0, taken: int = 0) -> int:
    """How many steps from now a group is taken, at the latest.

    Nothing that happens later makes it more: a step that takes groups which it does
    not keep only brings the others forward.

    Args:
      ahead: groups to be taken before it.
      kept: groups that this step has kept so far.
      taken: groups that it has taken.
    """
    left = min(self.prompts - kept, self.most - taken)
    if ahead < left:
      return 0
    return 1 + (ahead - left) // min(self.prompts, self.most)


@dataclasses.dataclass
class Taken:
  """What a step has to learn from.

  Attributes:
    kept: groups.
    played: all groups taken, in their order.
    cursor: JSON values that say where the next step goes on: the next group; the tasks
      of it and those after it (None of one that has not begun), which a resumed run
      plays again with the random numbers that they had; and the state of the draw.
    learner_waited: seconds that this took.
    rollouts_waited: seconds since the last step in which nothing ran, for nothing
      might begin.
  """

  kept: list[list[Trajectory]]
  played: list[list[Trajectory]]
  cursor: dict[str, Any]
  learner_waited: float
  rollouts_waited: float


@dataclasses.dataclass(eq=False)
class _Group:
  """Attempts at a task, or an evaluation; `left` of them are not graded yet."""

  episodes: list[CoAEpisode]
  left: int
  evaluation: bool = False

  @property
  def trajectories(self) -> list[Trajectory]:
    return [e.trajectory for e in self.episodes]


class _Closed(Exception):
  """Ends the engine's run."""


class Ahead:
  """The thread that plays, and the groups between it and the learner; close it.

  Everything is under one lock; only the engine and the graders work outside of it.
  """

  def __init__(
    self,
    player: Player,
    draw: Draw,
    toolbox: Toolbox,
    plan: Plan,
    seed: int,
    keep: Callable[[list[Trajectory]], bool],
    step: int = 0,
    cursor: dict[str, Any] | None = None,
  ):
    """Nothing is played before there is a policy.

    Args:
      player: plays; nobody else may use its engine until this is closed.
      draw: what is asked.
      toolbox: answers the calls.
      plan: what a step takes.
      seed: of the sampling; a group's number is the rest of its key.
      keep: whether a group counts among the `plan.prompts` of a step.
      step: updates made so far.
      cursor: of the run that is continued, as in `Taken`; empty at its beginning.

    Raises:
      ValueError: a task of the run that is continued is not there any more.
    """
    self._player, self._draw, self._toolbox = player, draw, toolbox
    self._plan, self._seed, self._keep = plan, seed, keep
    cursor = cursor or {"group": 0, "unfinished": [], "draw": draw.state}
    by_id = {task.id: task for task in draw.tasks}
    gone = set(cursor["unfinished"]) - by_id.keys() - {None}
    if gone:
      raise ValueError(f"task {min(gone)!r} was begun and is not among the tasks now")
    tasks = enumerate(cursor["unfinished"], cursor["group"])
    self._again = {n: by_id[i] for n, i in tasks if i is not None}
    draw.restore(cursor["draw"])
    self._step = step  # that takes next, or takes now
    self._kept = self._examined = 0  # groups of this step
    self._head = cursor["group"]  # to be taken next
    # Those of this process: every P-th number, from this one on.
    self._every, self._place = jax.process_count(), jax.process_index()
    self._begun = self._head + (self._place - self._head) % self._every  # to begin next
    self._groups: dict[int, _Group] = {}  # from the one to the other
    self._waiting: collections.deque[tuple[CoAEpisode, _Group]] = collections.deque()
    self._running: dict[CoAEpisode, _Group] = {}
    self._policy: tuple[list[Any], int] = ([], -1)
    self._idle = 0.0
    self._error: BaseException | None = None
    self._closed = False
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._work, name="ahead", daemon=True)

  def __enter__(self) -> Ahead:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the thread, after a window at most; what runs is left unfinished."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    if self._thread.ident is not None:
      self._thread.join()

  def hand_over(self, params: Any, version: int) -> None:
    """Gives the rollouts a policy, copied, for the learner may donate its own."""
    if self._policy[1] == version:
      return
    views = self._player.engine.views(jax.tree.map(jnp.copy, params))
    with self._changed:
      self._policy = views, version
      self._changed.notify_all()
    if self._thread.ident is None:
      self._thread.start()

  def next(self, params: Any, step: int) -> Taken:
    """What the step learns from, with `params` handed over; waits for it.

    Raises:
      RuntimeError: a token is older than allowed, which can not be.
      BaseException: what ended the thread, or a grader raised.
    """
    self.hand_over(params, step)
    began, plan = time.monotonic(), self._plan
    out = Taken([], [], {}, 0.0, 0.0)
    while self._kept < plan.prompts and self._examined < plan.most:
      most = min(plan.prompts - self._kept, plan.most - self._examined)
      groups = self._take(min(most, self._every))
      with self._changed:
        for group in groups:
          self._draw.learn(group)
          out.played.append(group)
          if self._keep(group):
            self._kept += 1
            out.kept.append(group)
        self._head += len(groups)
        self._examined += len(groups)
        self._changed.notify_all()
    with self._changed:
      self._step, self._kept, self._examined = step + 1, 0, 0
      begun = {n: group.episodes[0].task.id for n, group in self._groups.items()}
      begun |= {n: task.id for n, task in self._again.items() if n >= self._head}
      draw = self._draw.state
      out.rollouts_waited, self._idle = self._idle, 0.0
    begun = dict(pair for part in gathered([*begun.items()]) for pair in part)
    tasks = [begun.get(n) for n in range(self._head, max(begun, default=-1) + 1)]
    out.cursor = {"group": self._head, "unfinished": tasks, "draw": draw}
    out.learner_waited = time.monotonic() - began
    oldest = max(ages(out.kept, step), default=0)
    if oldest > plan.staleness:
      raise RuntimeError(f"step {step}: a token is {oldest} updates old")
    return out

  def evaluate(
    self, params: Any, version: int, tasks: Sequence[Task], toolbox: Toolbox
  ) -> list[Trajectory]:
    """Greedy attempts at tasks, one each, among the running rollouts; waits for them.

    The caller hands nothing over meanwhile, so they are of this one policy.
    """
    self.hand_over(params, version)
    episodes = [
      self._player.episode(task, 0, i, 0.0, toolbox, version, ("evaluation", i))
      for i, task in enumerate(tasks)
      if i % self._every == self._place
    ]
    group = _Group(episodes, len(episodes), evaluation=True)
    with self._changed:
      self._waiting.extendleft((e, group) for e in reversed(episodes))
      self._changed.notify_all()
      self._wait_for(lambda: self._done(group))
    played = [(e.sequence, e.trajectory) for e in episodes]
    return [t for _, t in sorted(of_all_processes(played), key=lambda pair: pair[0])]

  def _take(self, many: int) -> list[list[Trajectory]]:
    """The next groups of the stream, this process's own once they are done."""
    own = []
    with self._changed:
      for n in range(self._head, self._head + many):
        if n % self._every == self._place:
          self._wait_for(lambda n=n: self._done(self._groups.get(n)))
          own += [(n, t) for t in self._groups.pop(n).trajectories]
    groups: dict[int, list[Trajectory]] = collections.defaultdict(list)
    for n, trajectory in of_all_processes(own):
      groups[n].append(trajectory)
    return [groups[n] for n in sorted(groups)]

  def _wait_for(self, done: Callable[[], bool]) -> None:
    """Waits, with the lock. Raises what the thread or a grader did."""
    self._changed.wait_for(lambda: self._error is not None or done())
    if self._error is not None:
      raise self._error

  @staticmethod
  def _done(group: _Group | None) -> bool:
    return group is not None and not group.left

  def _work(self) -> None:
    """The thread: plays until it is closed."""
    engine = self._player.engine
    try:
      for episode in engine.run_newest(self._newest, self._episodes(), self._seed):
        with self._changed:
          group = self._running.pop(episode)
        graded = self._player.grade(episode, group.evaluation)
        graded.add_done_callback(functools.partial(self._graded, group))
    except _Closed:
      pass
    except BaseException as e:  # raised again where the learner waits
      self._fail(e)

  def _newest(self) -> tuple[list[Any], int]:
    if self._closed:
      raise _Closed
    return self._policy

  def _episodes(self) -> Iterator[CoAEpisode | None]:
    """Attempts as they may begin; None where none may while others run."""
    while True:
      with self._changed:
        if not self._running:
          began = time.monotonic()
          self._changed.wait_for(
            lambda: self._closed or self._waiting or self._may_begin()
          )
          self._idle += time.monotonic() - began
        if self._closed:
          return
        if not self._waiting and self._may_begin():
          self._begin()
        episode = None
        if self._waiting:
          episode, group = self._waiting.popleft()
          self._running[episode] = group
      yield episode

  def _may_begin(self) -> bool:
    """Whether the next group of the stream is learnt from before it is too old."""
    ahead = self._begun - self._head
    step = self._step + self._plan.latest(ahead, self._kept, self._examined)
    return step <= min(self._policy[1] + self._plan.staleness, self._plan.steps - 1)

  def _begin(self) -> None:
    n, plan = self._begun, self._plan
    task = self._again.pop(n, None) or self._draw.task(n, self._step)
    toolbox, version = self._toolbox, self._policy[1]
    how, number = (plan.temperature, toolbox, version), n * plan.samples
    # An interrupted run may have begun it under another version: within the staleness.
    episodes = [
      self._player.episode(task, k, number + k, *how, (n, k), plan.staleness)
      for k in range(plan.samples)
    ]
    group = self._groups[n] = _Group(episodes, len(episodes))
    self._waiting.extend((e, group) for e in episodes)
    self._begun += self._every

  def _graded(self, group: _Group, future: concurrent.futures.Future[None]) -> None:
    if future.cancelled():  # the graders are closed
      return
    error = future.exception()
    if error is not None:
      self._fail(error)
    with self._changed:
      group.left -= 1
      self._changed.notify_all()

  def _fail(self, error: BaseException) -> None:
    with self._changed:
      self._error = self._error or error
      self._changed.notify_all()


def ages(groups: Sequence[Sequence[Trajectory]], step: int) -> list[int]:
  """Of every sampled token of graded trajectories: updates since, at this step."""
  return [
    step - version
    for group in groups
    for t in group
    if t.reward is not None
    for s in t.segments
    for version in s.versions
  ]

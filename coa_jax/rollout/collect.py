"""Collects each RL step's batch: on-policy, or ahead of the learner.

Groups (attempts at one task) are numbered, and each step takes them in number order, so
short trajectories never overtake long ones.

* `staleness=0`, on-policy: a step submits a round of groups under its own policy and
  waits for all of them; dynamic sampling (DAPO, arXiv 2503.14476) may take several
  rounds.
* `staleness=n`, asynchronous: groups are played while the learner trains. Running
  trajectories switch to each newer policy, and every token records the policy version
  that sampled it (PipelineRL, arXiv 2509.19128). A group is submitted only if it is
  certain to be learnt in time, however slow it is: no token is then older than n
  steps, and no trajectory is discarded as too old.

Each of P processes plays every P-th group; then all exchange their trajectories.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.episode import CoAEpisode
from coa_jax.rollout.exchange import gather_trajectories
from coa_jax.rollout.types import Attempt, Group, RolloutBatch, SamplingConfig
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.runtime.processes import gather_json
from coa_jax.tools.types import Tools

Future = concurrent.futures.Future[Trajectory]


class RolloutCollector:
  """Submits groups as far ahead as the config allows, and takes them in order."""

  def __init__(
    self,
    worker: RolloutWorker,
    task_sampler: TaskSampler,
    toolbox: Tools,
    config: SamplingConfig,
    has_reward_variance: Callable[[Sequence[Group]], np.ndarray],
    steps: int,
    seed: int,
    step: int = 0,
    cursor: dict[str, Any] | None = None,
    until_done: Callable[[Sequence[Future]], None] = lambda futures: None,
  ):
    """Prepares the collector; no group starts before there is a policy.

    Args:
      worker: plays the groups; no one else may use it until `close`.
      has_reward_variance: returns keep_G for groups: whether a group's rewards, before
        penalties, differ.
      steps: steps in the whole run; no group for a later step starts.
      step: steps made so far.
      cursor: the last step's `RolloutBatch.cursor`; empty or None at a run's beginning.
      until_done: waits for this process's groups or ends the run; every process calls
        it before each exchange.

    Raises:
      ValueError: a task begun by the interrupted run is missing now.
    """
    self._worker = worker
    self._task_sampler = task_sampler
    self._toolbox = toolbox
    self._config = config
    self._steps = steps
    self._has_reward_variance = has_reward_variance
    self._seed = seed
    self._until_done = until_done
    # On-policy, a step takes groups one round at a time.
    self._round = config.round_prompts or config.prompts
    self._most = config.rounds * self._round

    cursor = cursor or {"group": 0, "unfinished": [], "draw": task_sampler.state}
    by_id = {task.id: task for task in task_sampler.tasks}
    gone = set(cursor["unfinished"]) - by_id.keys() - {None}
    if gone:
      raise ValueError(f"task {min(gone)!r} was begun and is not among the tasks now")
    self._resumed: dict[int, Task] = {}  # begun before the interruption
    for n, task_id in enumerate(cursor["unfinished"], cursor["group"]):
      if task_id is not None:
        self._resumed[n] = by_id[task_id]
    task_sampler.restore(cursor["draw"])

    self._step = step  # the current step, or the next one between steps
    self._num_kept = 0  # groups kept by this step so far
    self._num_taken = 0  # groups taken by this step so far
    self._head = cursor["group"]  # number of the next group to take
    self._processes = jax.process_count()
    self._process = jax.process_index()
    self._next = self._head  # number of the next group to draw a task for
    # Groups submitted and not taken yet, by number.
    self._groups: dict[int, dict[Future, CoAEpisode]] = {}
    self._version = -1  # the engine's policy version; -1 for none

  def __enter__(self) -> RolloutCollector:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Drops the running groups."""
    # Cancelled, not awaited: a tool may hang.
    for group in self._groups.values():
      for episode in group.values():
        self._worker.engine.cancel(episode)
    self._groups.clear()

  @property
  def asynchronous(self) -> bool:
    """Whether groups are played while the learner learns."""
    return self._config.staleness > 0

  def set_policy(self, params: Any, version: int) -> None:
    """Gives the engine the policy after `version` steps.

    If asynchronous, copies the parameters, because the learner may donate its own, and
    submits due groups.
    """
    if version != self._version:
      if self.asynchronous:
        params = jax.tree.map(jnp.copy, params)
      self._worker.engine.set_policy(params, version)
      self._version = version
    if self.asynchronous:
      self._submit_allowed()

  @functools.partial(jax.profiler.annotate_function, name="rollout")
  def next(self, params: Any, step: int) -> RolloutBatch:
    """Waits for a step's batch and returns it.

    On-policy, tasks and sampled tokens depend only on (seed, round number, params) and
    the task sampler's state.

    Raises:
      RuntimeError: a token is older than allowed (an internal error).
      BaseException: the engine, a tool or a grader failed.
    """
    began = time.monotonic()
    before = self._worker.engine.timings
    self.set_policy(params, step)
    config = self._config
    batch = RolloutBatch()

    # --- Take groups until enough have differing rewards.
    while self._num_kept < config.prompts and self._num_taken < self._most:
      self._submit_allowed()
      groups, own = self._take()
      batch.own += own
      for group in groups:
        # Kept or not: the task sampler's data must not depend on the filter.
        self._task_sampler.learn(group)
        batch.played += group
      keep_G = self._has_reward_variance(groups)
      batch.num_groups += len(groups)
      batch.num_varied += int(keep_G.sum())
      if config.filter_groups:
        groups = list(itertools.compress(groups, keep_G))
      batch.groups += groups
      self._num_kept += len(groups)
      self._num_taken = batch.num_groups
    # On-policy, the last round may have brought too many groups.
    batch.groups = batch.groups[: config.prompts]

    # --- Start the next step's groups, or free the policy's memory.
    self._step = step + 1
    self._num_kept = 0
    self._num_taken = 0
    # Before submitting more: a resumed run starts later groups itself.
    batch.cursor = self._cursor()
    if self.asynchronous:
      self._submit_allowed()
    else:
      self._worker.engine.set_policy(None, step)
      self._version = -1

    # --- Metrics.
    waited = time.monotonic() - began
    batch.spent = self._worker.engine.timings.since(before)
    idle = batch.spent.pop("idle")
    if self.asynchronous:
      batch.spent = {"rollout": waited}
      batch.figures = self._off_policy_figures(batch.groups, step)
      batch.figures |= {"learner_waited": waited, "rollouts_waited": idle}
    return batch

  def evaluate(
    self, params: Any, step: int, tasks: Sequence[Task], toolbox: Tools
  ) -> list[Trajectory]:
    """Returns a greedy attempt at each task, by the policy after `step` steps.

    Asynchronous rollouts continue meanwhile; these attempts precede waiting episodes.
    """
    self.set_policy(params, step)
    futures = {}
    with self._worker.engine.batch():
      for i in range(self._process, len(tasks), self._processes):
        attempt = Attempt(tasks[i], 0, self._seed, i, temperature=0.0, version=step)
        episode = self._worker.episode(attempt, toolbox, key=("evaluation", i))
        futures[i] = self._worker.submit(episode, first=True, evaluation=True)
    self._until_done(list(futures.values()))
    played = [(i, future.result()) for i, future in futures.items()]
    # Each process has every P-th attempt: restore the task order.
    everywhere = dict(gather_trajectories(played))
    return [everywhere[i] for i in range(len(tasks))]

  def _submit_allowed(self) -> None:
    """Submits this process's due groups: every P-th."""
    with self._worker.engine.batch():
      while self._may_start(self._next - self._head):
        task = self._resumed.pop(self._next, None)
        if task is None:
          # For every group, so that the samplers of all processes stay equal.
          task = self._task_sampler.task(self._next, self._step)
        if self._next % self._processes == self._process:
          self._submit(self._next, task)
        self._next += 1

  def _may_start(self, ahead: int) -> bool:
    """Whether a group taken after `ahead` others may start."""
    # On-policy a round waits for its policy.
    if not self.asynchronous:
      return self._version == self._step and ahead < self._round
    # The worst case: the latest step that may take it, however many groups are kept.
    step = self._step + steps_until(
      ahead,
      kept_left=self._config.prompts - self._num_kept,
      taken_left=self._most - self._num_taken,
      config=self._config,
    )
    newest = min(self._version + self._config.staleness, self._steps - 1)
    return step <= newest

  def _submit(self, number: int, task: Task) -> None:
    config = self._config
    # --- Randomness keys: on-policy one seed per round, else one seed for all groups.
    seed = self._seed
    first = number * config.samples
    if not self.asynchronous:
      number_of_round, number_in_round = divmod(number, self._round)
      mixed = np.random.SeedSequence((self._seed, number_of_round))
      seed = int(mixed.generate_state(1)[0])
      first = number_in_round * config.samples
    # --- The attempts: all made first, so that the engine gets them consecutively.
    episodes = []
    for k in range(config.samples):
      attempt = Attempt(
        task, k, seed, first + k, config.temperature, version=self._version
      )
      # An interrupted run may have submitted the attempt under another version.
      within = config.staleness
      episode = self._worker.episode(attempt, self._toolbox, (number, k), within)
      episodes.append(episode)
    self._groups[number] = {
      self._worker.submit(episode, group=number): episode for episode in episodes
    }

  def _take(self) -> tuple[list[Group], list[Trajectory]]:
    """Waits for the next groups: on-policy a round, else at most one per process.

    Returns:
      The groups, and this process's trajectories in them.
    """
    if self.asynchronous:
      left = min(self._config.prompts - self._num_kept, self._most - self._num_taken)
      count = min(left, self._processes)
    else:
      count = self._round
    own: list[tuple[int, Trajectory]] = []
    numbers = range(self._head, self._head + count)
    mine = [n for n in numbers if n % self._processes == self._process]
    self._until_done([future for n in mine for future in self._groups[n]])
    for n in mine:
      # Results first: a failed group stays, so that `close` drops it.
      own += [(n, future.result()) for future in self._groups[n]]
      del self._groups[n]
    self._head += count
    groups: dict[int, Group] = collections.defaultdict(list)
    for n, trajectory in gather_trajectories(own):
      groups[n].append(trajectory)
    return [groups[n] for n in sorted(groups)], [t for _, t in own]

  def _cursor(self) -> dict[str, Any]:
    """Returns the next step's cursor; see `RolloutBatch`."""
    # --- Known here: running groups, and resumed groups not submitted yet.
    task_ids = []
    for n, group in self._groups.items():
      task_ids.append((n, next(iter(group.values())).task.id))
    for n, task in self._resumed.items():
      if n >= self._head:  # else another process has played it since
        task_ids.append((n, task.id))
    # --- All processes' unfinished groups.
    everywhere: dict[int, str] = {}
    for part in gather_json(task_ids):
      everywhere.update(part)
    end = max(everywhere, default=-1) + 1
    return {
      "group": self._head,
      "unfinished": [everywhere.get(n) for n in range(self._head, end)],
      "draw": self._task_sampler.state,
    }

  def _off_policy_figures(self, groups: list[Group], step: int) -> dict[str, float]:
    """Returns metrics of a step's token ages, in steps."""
    tokens_by_age = ages(groups, step) or {0: 1}
    oldest = max(tokens_by_age)
    if oldest > self._config.staleness:
      raise RuntimeError(f"step {step}: a token is {oldest} steps old")
    total = sum(tokens_by_age.values())
    return {
      "staleness": sum(age * n for age, n in tokens_by_age.items()) / total,
      "staleness_max": oldest,
      "off_policy_share": 1 - tokens_by_age.get(0, 0) / total,
    }


def steps_until(
  ahead: int, kept_left: int, taken_left: int, config: SamplingConfig
) -> int:
  """Returns the maximum number of steps until a group is taken; 0: in this step.

  Later events never increase this number: a step that drops groups only brings the
  others forward.

  Args:
    ahead: groups taken before this one.
    kept_left: groups this step still has to keep.
    taken_left: groups this step may still take.
  """
  left = min(kept_left, taken_left)
  if ahead < left:
    return 0
  # A later step takes at least this many: it ends at `prompts` kept or `most` taken.
  most = config.rounds * (config.round_prompts or config.prompts)
  return 1 + (ahead - left) // min(config.prompts, most)


def ages(groups: Sequence[Group], step: int) -> dict[int, int]:
  """Counts graded trajectories' sampled tokens by their age, in steps, at a step."""
  out: collections.Counter[int] = collections.Counter()
  for t in itertools.chain.from_iterable(groups):
    if t.reward is None:  # has left its group: not trained on
      continue
    for version, count in t.versions:
      out[step - version] += count
  return out

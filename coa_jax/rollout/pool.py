"""Threads for playing episodes: one per replica, each with its own queue.

`ReplicaThreads` is the common part of the JAX engine (`replicas.ReplicaPool`) and the
vLLM engine: queues, futures, cancellation, and the threads' lifetime. A replica plays a
few episodes at once, round by round. Only its own thread touches its device; the thread
starts with the first episode and ends with the last.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from coa_jax.rollout.types import Counters, Episode, RolloutConfig, Timings
from coa_jax.runtime import heartbeat


class Replica(Protocol):
  """A replica with `slots` episodes at once, driven by one thread, its only caller."""

  slots: int
  counters: Counters
  timings: Timings

  def round(
    self, policy: Any, version: int, new: Sequence[Episode]
  ) -> Sequence[Episode]:
    """Starts new episodes, samples once for all, handles stops; returns the ended ones.

    Args:
      policy: this replica's entry from `ReplicaThreads.publish`.
      version: the policy's version.
      new: new episodes, at most one per free slot.
    """

  def drop(self, episode: Episode) -> None:
    """Frees the slot of a dropped episode."""

  def clear(self) -> None:
    """Forgets all episodes, and the policy."""


@dataclasses.dataclass(eq=False)
class _Job:
  """An episode and its future; jobs of lower rank are taken first."""

  episode: Episode
  future: concurrent.futures.Future[Episode]
  rank: tuple[bool, int]


@dataclasses.dataclass(eq=False)
class _Lane:
  """A replica, its episodes and its thread.

  Attributes:
    replica: the thread's replica.
    queue: waiting jobs, in order.
    running: running jobs by episode.
    dropped: episodes to drop before the thread's next round.
    thread: None while the replica rests.
    rested: end of the last thread, monotonic seconds; None before the first.
  """

  replica: Replica
  queue: list[_Job] = dataclasses.field(default_factory=list)
  running: dict[Episode, _Job] = dataclasses.field(default_factory=dict)
  dropped: list[Episode] = dataclasses.field(default_factory=list)
  thread: threading.Thread | None = None
  rested: float | None = None

  @property
  def load(self) -> int:
    """Counts the replica's episodes, waiting ones included."""
    return len(self.queue) + len(self.running)

  @property
  def is_full(self) -> bool:
    """Whether every slot has an episode, or will get a waiting one."""
    return self.load >= self.replica.slots


class ReplicaThreads:
  """Replicas' queues and threads; subclasses complete `types.Engine`."""

  def __init__(self, config: RolloutConfig, replicas: Sequence[Replica], name: str):
    """Starts no thread yet."""
    self.config = config
    self._lanes = [_Lane(replica) for replica in replicas]
    self._name = name
    self._lock = threading.Lock()
    self._policies: list[Any] | None = None
    self._version = 0
    self._sync_seconds = 0.0
    self._submitted = 0
    self._batches = 0  # open `batch` blocks
    self._last_group: int | None = None
    self._last_lane = self._lanes[0]  # the last group's lane
    self._closed = False

  @property
  def capacity(self) -> int:
    """Counts the episodes that can run at once."""
    return sum(lane.replica.slots for lane in self._lanes)

  @property
  def counters(self) -> Counters:
    """Returns all replicas' work so far."""
    return Counters.total(lane.replica.counters for lane in self._lanes)

  @property
  def timings(self) -> Timings:
    """Returns the seconds so far, by phase."""
    mean = Timings.mean(lane.replica.timings for lane in self._lanes)
    mean.sync += self._sync_seconds
    return mean

  def publish(self, policies: list[Any] | None, version: int) -> None:
    """Publishes the newest policy, in one form per replica; None for no policy.

    Raises:
      RuntimeError: None is published while episodes are left.
    """
    with self._lock:
      if policies is None and any(lane.load for lane in self._lanes):
        raise RuntimeError("the engine still plays episodes: it needs its policy")
      self._policies = policies
      self._version = version

  def submit(
    self, episode: Episode, group: int | None = None, first: bool = False
  ) -> concurrent.futures.Future[Episode]:
    """Queues an episode; see `types.Engine`."""
    future: concurrent.futures.Future[Episode] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # so that only `cancel` ends it early
    with self._lock:
      if self._closed:
        raise RuntimeError("the engine is closed")
      if self._policies is None:
        raise RuntimeError("the engine has no policy: call set_policy first")
      self._submitted += 1
      job = _Job(episode, future, (not first, self._submitted))
      lane = self._lane_for(group)
      bisect.insort(lane.queue, job, key=lambda job: job.rank)
      self._start_threads()
    return future

  @contextlib.contextmanager
  def batch(self) -> Iterator[None]:
    """Delays idle replicas until the block ends; see `types.Engine`."""
    with self._lock:
      self._batches += 1
    try:
      yield
    finally:
      with self._lock:
        self._batches -= 1
        self._start_threads()

  def cancel(self, episode: Episode) -> None:
    """Drops an episode; no effect if it is over or was never submitted."""
    job = None
    with self._lock:
      # A running episode is dropped by its replica's thread before the next round,
      # because only that thread may touch the slots. A waiting one is dropped here.
      for lane in self._lanes:
        if episode in lane.running:
          job = lane.running.pop(episode)
          lane.dropped.append(episode)
          break
        waiting = [job for job in lane.queue if job.episode is episode]
        if waiting:
          job = waiting[0]
          lane.queue.remove(job)
          break
    if job:  # without the lock: a waiter may submit again at once
      job.future.set_exception(concurrent.futures.CancelledError())

  def close(self) -> None:
    """Drops all episodes and waits for the threads, for a window at most."""
    with self._lock:
      self._closed = True
      jobs: list[_Job] = []
      for lane in self._lanes:
        jobs += lane.queue
        lane.queue.clear()
    self._join_threads()
    # Only now: until the threads have ended, a round may still finish an episode.
    for lane in self._lanes:
      jobs += lane.running.values()
      lane.running.clear()
    for job in jobs:
      job.future.set_exception(concurrent.futures.CancelledError())

  def _join_threads(self) -> None:
    with self._lock:
      threads = [lane.thread for lane in self._lanes if lane.thread]
    # Without the lock: the threads need it to end.
    for thread in threads:
      thread.join()

  def _lane_for(self, group: int | None) -> _Lane:
    """Chooses a new episode's replica: its group's, if there is room."""
    # A group's episodes share their prompt's cache, but only within one replica.
    beside = group is not None and group == self._last_group
    if not beside or self._last_lane.is_full:
      self._last_lane = min(self._lanes, key=lambda lane: lane.load)
    self._last_group = group
    return self._last_lane

  def _start_threads(self) -> None:
    """Starts idle replicas that have jobs, unless in a `batch`; needs the lock."""
    if self._batches or self._closed:
      return
    for lane in self._lanes:
      if lane.thread is not None or not lane.queue:
        continue
      # Idle time ends here; time before the first episode does not count.
      if lane.rested is not None:
        lane.replica.timings.idle += time.monotonic() - lane.rested
      lane.thread = threading.Thread(
        target=self._work, args=(lane,), name=self._name, daemon=True
      )
      lane.thread.start()

  def _work(self, lane: _Lane) -> None:
    """Runs a replica's thread until it has no episodes or the pool is closed."""
    place = self._lanes.index(lane)  # its policy's index
    finished: list[tuple[_Job, Episode]] = []  # in the last round
    try:
      while True:
        # --- With the lock: this round's episodes and policy.
        with self._lock:
          new = [] if self._closed else self._take(lane)
          for job in new:
            lane.running[job.episode] = job
          dropped = lane.dropped
          lane.dropped = []
          # Decided under the lock that `submit` takes: no job can come in between.
          over = self._closed or not lane.running
          if over:
            self._rest(lane)
          # Read after the episodes were taken, so that none starts under a policy older
          # than the newest at its submission.
          policy = self._policies[place] if not over else None
          version = self._version
        # --- Without the lock: waiters are notified only now, so that the last
        # episode's waiter finds the device memory free.
        for job, episode in finished:
          job.future.set_result(episode)
        finished = []
        if over:
          return
        # --- Play a round on the device.
        heartbeat.beat()
        for episode in dropped:
          lane.replica.drop(episode)
        ended = lane.replica.round(policy, version, [job.episode for job in new])
        with self._lock:
          for episode in ended:
            job = lane.running.pop(episode, None)
            if job:  # else it was cancelled during the round
              finished.append((job, episode))
    except BaseException as error:  # raised again where the futures are read
      with self._lock:
        jobs = [*lane.running.values(), *lane.queue]
        lane.running.clear()
        lane.queue.clear()
        self._rest(lane)
      for job in jobs:
        job.future.set_exception(error)

  def _rest(self, lane: _Lane) -> None:
    """Ends a thread's work, holding the lock; the next `submit` starts a new thread."""
    lane.replica.clear()
    lane.dropped.clear()
    lane.thread = None
    lane.rested = time.monotonic()

  def _take(self, lane: _Lane) -> list[_Job]:
    """Takes jobs for the free slots: the replica's own, else others' surplus."""
    out: list[_Job] = []
    free = lane.replica.slots - len(lane.running)
    while len(out) < free:
      if lane.queue:
        out.append(lane.queue.pop(0))
        continue
      # The replica's own queue is empty: take from the end of an overfull replica's
      # queue, so that the longest waiting jobs stay with their group.
      other = max(self._lanes, key=lambda lane: lane.load)
      if other.load <= other.replica.slots or not other.queue:
        break
      out.append(other.queue.pop())
    return out

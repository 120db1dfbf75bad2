"""Threads that play episodes: one for each replica, each with a queue of its own.

`EpisodePool` is what the JAX engine (`replicas.ReplicaPool`) and the vLLM engine share:
queues, futures, cancelling, and the life of the threads. A replica plays a few episodes
at once, round by round. Its thread is the only one that touches its device; it starts
with the first episode and ends when there is none left.
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

from coa_jax import heartbeat
from coa_jax.rollout.types import Counters, Episode, RolloutConfig, Timings


class Replica(Protocol):
  """What a thread drives; only that thread calls it.

  Attributes:
    slots: episodes that it plays at once.
    counters: what it did so far.
    timings: what its seconds went into.
  """

  slots: int
  counters: Counters
  timings: Timings

  def round(
    self, policy: Any, version: int, new: Sequence[Episode]
  ) -> Sequence[Episode]:
    """Starts the new episodes, samples once for all that run, handles who stopped.

    Args:
      policy: this replica's entry of what was given to `EpisodePool.publish`.
      version: of the policy.
      new: as many as there are free slots, at most.

    Returns:
      The episodes that ended.
    """

  def drop(self, episode: Episode) -> None:
    """Frees the slot of an episode that nobody wants any more."""

  def clear(self) -> None:
    """Forgets all episodes, and the policy."""


@dataclasses.dataclass(eq=False)
class _Job:
  """An episode and who waits for it; jobs of lower rank are taken first."""

  episode: Episode
  future: concurrent.futures.Future[Episode]
  rank: tuple[bool, int]


class EpisodePool:
  """Queues in front of replicas and the threads that drive them: `types.Engine`."""

  def __init__(self, config: RolloutConfig, replicas: Sequence[Replica], name: str):
    """Starts no thread yet.

    Args:
      config: slots, limits and the sampling distribution.
      replicas: what the threads drive, one each.
      name: of the threads.
    """
    self.config = config
    self._replicas = list(replicas)
    self._name = name
    self._lock = threading.Lock()
    count = len(self._replicas)
    # Of each replica: the jobs that wait, those that run, those to be dropped.
    self._queues: list[list[_Job]] = []
    self._running: list[dict[Episode, _Job]] = []
    self._dropped: list[list[Episode]] = []
    for _ in self._replicas:
      self._queues.append([])
      self._running.append({})
      self._dropped.append([])
    self._threads: list[threading.Thread | None] = [None] * count
    self._rested: list[float | None] = [None] * count  # since when, in seconds
    self._policies: list[Any] | None = None
    self._version = 0
    self._sync_seconds = 0.0
    self._submitted = 0
    self._batches = 0  # blocks of `batch` that are being filled
    self._last_group: tuple[int | None, int] = (None, 0)  # and its replica
    self._closed = False

  @property
  def capacity(self) -> int:
    """Episodes that can run at once."""
    return sum(replica.slots for replica in self._replicas)

  @property
  def counters(self) -> Counters:
    """What all devices were asked to do so far."""
    return Counters.total(replica.counters for replica in self._replicas)

  @property
  def timings(self) -> Timings:
    """What the seconds so far went into."""
    mean = Timings.mean(replica.timings for replica in self._replicas)
    mean.sync += self._sync_seconds
    return mean

  def publish(self, policies: list[Any] | None, version: int) -> None:
    """Makes a policy the newest: its form for each replica; None for no policy.

    Raises:
      RuntimeError: there is to be no policy while episodes are left.
    """
    with self._lock:
      if policies is None and any(map(self._load, range(len(self._replicas)))):
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
      i = self._replica_for(group)
      bisect.insort(self._queues[i], job, key=lambda job: job.rank)
      self._start_threads()
    return future

  @contextlib.contextmanager
  def batch(self) -> Iterator[None]:
    """Has idle replicas wait for all that the block submits; see `types.Engine`."""
    with self._lock:
      self._batches += 1
    try:
      yield
    finally:
      with self._lock:
        self._batches -= 1
        self._start_threads()

  def cancel(self, episode: Episode) -> None:
    """Drops an episode; one that is over, or was never submitted, changes nothing."""
    job = None
    with self._lock:
      # Running, its replica's thread drops it before the next round, for only that
      # thread may touch the slots; waiting, it is forgotten here.
      for queue, running, dropped in zip(
        self._queues, self._running, self._dropped, strict=True
      ):
        if episode in running:
          job = running.pop(episode)
          dropped.append(episode)
          break
        waiting = [job for job in queue if job.episode is episode]
        if waiting:
          job = waiting[0]
          queue.remove(job)
          break
    if job:  # without the lock: who waits may submit again at once
      job.future.set_exception(concurrent.futures.CancelledError())

  def close(self) -> None:
    """Drops all episodes and waits for the threads, for a window at most."""
    with self._lock:
      self._closed = True
      jobs: list[_Job] = []
      for queue in self._queues:
        jobs += queue
        queue.clear()
      threads = list(self._threads)
    # Without the lock, which the threads need to end.
    for thread in threads:
      if thread:
        thread.join()
    # Only now: until its thread has ended, a round may still finish an episode.
    for running in self._running:
      jobs += running.values()
      running.clear()
    for job in jobs:
      job.future.set_exception(concurrent.futures.CancelledError())

  def _load(self, i: int) -> int:
    """Episodes that a replica has, or will have."""
    return len(self._queues[i]) + len(self._running[i])

  def _replica_for(self, group: int | None) -> int:
    """Where a new episode goes: beside its group if there is room."""
    last, i = self._last_group
    # A group's episodes share their prompt's cache, but only within one replica.
    beside = group is not None and group == last
    if not beside or self._load(i) >= self._replicas[i].slots:
      i = min(range(len(self._replicas)), key=self._load)
    self._last_group = (group, i)
    return i

  def _start_threads(self) -> None:
    """Starts the idle replicas that have jobs, with the lock; not within a batch."""
    if self._batches or self._closed:
      return
    for i, replica in enumerate(self._replicas):
      if self._threads[i] is not None or not self._queues[i]:
        continue
      # Idle time ends here; before the first episode there was none to count.
      if self._rested[i] is not None:
        replica.timings.idle += time.monotonic() - self._rested[i]
      thread = threading.Thread(
        target=self._work, args=(i,), name=self._name, daemon=True
      )
      self._threads[i] = thread
      thread.start()

  def _work(self, i: int) -> None:
    """The thread of a replica: plays until it has no episode, or the pool is closed."""
    replica = self._replicas[i]
    running = self._running[i]
    finished: list[tuple[_Job, Episode]] = []  # in the last round
    try:
      while True:
        # --- With the lock: what this round plays, and under which policy.
        with self._lock:
          new = [] if self._closed else self._take(i)
          for job in new:
            running[job.episode] = job
          dropped = self._dropped[i]
          self._dropped[i] = []
          # Decided under the lock that `submit` takes: no job can come in between.
          over = self._closed or not running
          if over:
            self._rest(i)
          # Read after the episodes were taken: none starts under an older policy than
          # was the newest when it was submitted.
          policy = self._policies[i] if not over else None
          version = self._version
        # --- Without it: who waits is told only now, so that whoever gets the last
        # episode finds the device's memory given back.
        for job, episode in finished:
          job.future.set_result(episode)
        finished = []
        if over:
          return
        # --- The device's time.
        heartbeat.beat()
        for episode in dropped:
          replica.drop(episode)
        ended = replica.round(policy, version, [job.episode for job in new])
        with self._lock:
          for episode in ended:
            job = running.pop(episode, None)
            if job:  # else it was cancelled during the round
              finished.append((job, episode))
    except BaseException as error:  # raised again where the futures are read
      with self._lock:
        jobs = [*running.values(), *self._queues[i]]
        running.clear()
        self._queues[i].clear()
        self._rest(i)
      for job in jobs:
        job.future.set_exception(error)

  def _rest(self, i: int) -> None:
    """Ends a thread's work, with the lock: the next `submit` starts another thread."""
    self._replicas[i].clear()
    self._dropped[i].clear()
    self._threads[i] = None
    self._rested[i] = time.monotonic()

  def _take(self, i: int) -> list[_Job]:
    """Jobs for the free slots: the replica's own, else what others can not start."""
    out: list[_Job] = []
    free = self._replicas[i].slots - len(self._running[i])
    while len(out) < free:
      if self._queues[i]:
        out.append(self._queues[i].pop(0))
        continue
      # Its own queue is empty: help who has more than it has slots, from the end of the
      # queue, so that what waits longest stays where its group is.
      other = max(range(len(self._queues)), key=self._load)
      if self._load(other) <= self._replicas[other].slots or not self._queues[other]:
        break
      out.append(self._queues[other].pop())
    return out

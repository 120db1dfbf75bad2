"""Episodes over the slots of every replica of the model that a process holds.

Each replica (a device, or as many as `mesh.tensor` takes) decodes in a thread of its
own: none waits for another's windows, nor for its tools. All take from one queue as
their slots fall free, and what they decode does not depend on who takes it.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from coa_jax.model import decode_params
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Layout
from coa_jax.protocol.grammar.automaton import Automaton, Constraint
from coa_jax.rollout.scheduler import Slots
from coa_jax.rollout.types import Counters, Episode, Newest, RolloutConfig, Spent


class Scheduler:
  """Runs episodes over a fixed number of slots on each replica."""

  def __init__(
    self,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    layout: Layout | None = None,
    constraint: Constraint | None = None,
  ):
    """Allocates the caches.

    Args:
      model: the architecture; it decodes as `decoding.architecture` says.
      automaton: where decoding stops.
      config: slots of a replica, window and limits.
      layout: of the policy, on several devices; of several processes each decodes
        on its own devices.
      constraint: what may be sampled; everything where None.

    Raises:
      ValueError: the mesh does not divide the model, or splits it over processes.
    """
    self.model = decode_params.architecture(model, layout)
    self.config = config
    self._layout = layout
    replicas = layout.decoding().replicas() if layout else [None]
    for replica in replicas:
      if replica:
        replica.check(model)
    args = (self.model, automaton, config)
    self._slots = [Slots(*args, replica, constraint) for replica in replicas]
    self._sync_seconds = 0.0

  @property
  def counters(self) -> Counters:
    """What all devices were asked to do so far."""
    each = [dataclasses.astuple(slots.counters) for slots in self._slots]
    return Counters(*map(sum, zip(*each, strict=True)))

  @property
  def spent(self) -> Spent:
    """What the seconds of all runs so far went into."""
    each = [dataclasses.astuple(slots.spent) for slots in self._slots]
    _, *means = (sum(x) / len(each) for x in zip(*each, strict=True))
    return Spent(self._sync_seconds, *means)

  def run(
    self, params: Any, episodes: Iterable[Episode | None], seed: int
  ) -> Iterator[Episode]:
    """Decodes every episode to its end, yielding each as it ends.

    Args:
      params: the policy, stacked or not.
      episodes: taken in order as slots fall free; None says that there is none now,
        while others are still running. With several replicas, episodes are taken and
        asked in threads, each by one thread at a time.
      seed: of this run's sampling; an episode's tokens depend on (seed, its sequence,
        params, what its tools said) alone.
    """
    views = self.views(params)
    yield from self.run_newest(lambda: (views, None), episodes, seed)

  def views(self, params: Any) -> list[Any]:
    """The parameters as each replica decodes with them; see `decoding_views`."""
    began = time.monotonic()
    views = decode_params.decoding_views(self.model, params, self._layout)
    jax.block_until_ready(views)
    self._sync_seconds += time.monotonic() - began
    return views

  def run_newest(
    self, newest: Newest, episodes: Iterable[Episode | None], seed: int
  ) -> Iterator[Episode]:
    """As `run`, but the policy may change on the way.

    Running episodes go on with a newer policy from their next window; what is in the
    cache stays there, as in PipelineRL's in-flight updates (arXiv 2509.19128).
    An episode's `version` says which one samples.

    Args:
      newest: asked for the policy; in the thread of each replica.
      episodes: as for `run`. One that is taken never begins under an older policy than
        `newest` would have named then.
      seed: of this run's sampling.
    """
    if len(self._slots) == 1:
      for ended in self._slots[0].run(_part(newest, 0), iter(episodes), seed):
        yield from ended
      return
    parts = _deal(iter(episodes), len(self._slots), self.config.slots)
    ended: queue.SimpleQueue[Episode | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work(replica: int, part: Iterator[Episode | None]) -> None:
      try:
        for episodes in self._slots[replica].run(_part(newest, replica), part, seed):
          for episode in episodes:
            ended.put(episode)
          if stop.is_set():
            break
        ended.put(None)
      except BaseException as e:  # raised again where the run was asked for
        ended.put(e)

    threads = [
      threading.Thread(target=work, args=args, name="replica", daemon=True)
      for args in enumerate(parts)
    ]
    for thread in threads:
      thread.start()
    working = len(threads)
    try:
      while working:
        what = ended.get()
        if isinstance(what, BaseException):
          raise what
        if what is None:
          working -= 1
        else:
          yield what
    finally:
      stop.set()
      for thread in threads:
        thread.join()


def _part(newest: Newest, replica: int) -> Callable[[], tuple[Any, int | None]]:
  """The policy by now, as one replica decodes with it."""

  def part() -> tuple[Any, int | None]:
    views, version = newest()
    return views[replica], version

  return part


def _deal(
  episodes: Iterator[Episode | None], replicas: int, slots: int
) -> list[Iterator[Episode | None]]:
  """Of each replica: an equal part of what there is for all slots, then who asks first.

  A part is a run of the queue, for samples of one task share their prompt's prefill.
  """
  lock = threading.Lock()
  first: list[Episode] = []
  for episode in episodes:
    if episode is not None:
      first.append(episode)
    if episode is None or len(first) == replicas * slots:
      break
  size = -(-len(first) // replicas)

  def part(i: int) -> Iterator[Episode | None]:
    yield from first[i * size : (i + 1) * size]
    while True:
      with lock:
        try:
          episode = next(episodes)
        except StopIteration:
          return
      yield episode

  return [part(i) for i in range(replicas)]

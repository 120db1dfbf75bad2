"""Which trajectory sits in which slot of a replica, and when it goes on.

Host code only: it moves token ids between episodes and the sampler, and never touches
a tensor of the model. A slot whose episode waits for a tool keeps its cache and stays
idle; the others go on decoding. Every given token is prefilled exactly once; a prompt
that another slot holds is copied from there. The cache grows by doubling as the longest
trajectory needs, which changes no other trajectory in any bit.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask
from coa_jax.model.sharding import Layout
from coa_jax.protocol.grammar.automaton import Automaton, Constraint
from coa_jax.rollout import sampler
from coa_jax.rollout.types import Counters, Episode, RolloutConfig, Spent

_END = object()  # of the queue
_IDLE = 0.05  # seconds between two looks where nothing can be decoded


class Slots:
  """A fixed number of slots on one replica of the model, one live trajectory each."""

  def __init__(
    self,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    layout: Layout | None = None,
    constraint: Constraint | None = None,
  ):
    """Allocates the cache.

    Args:
      model: the architecture as it decodes, its layers unrolled.
      automaton: where decoding stops.
      config: slots, window and limits.
      layout: of the replica, one of `Layout.replicas`; None on the only device.
      constraint: what may be sampled; everything where None.
    """
    self.model = model
    self.layout = layout
    self.config = config
    self.inject_rows = min(config.inject_rows, config.slots)
    self.counters = Counters()
    self.spent = Spent()
    self._tags = automaton.tags
    self._resume_S = constraint.resume_S if constraint else None
    tables = automaton.class_V, automaton.next_SC, automaton.stop_SC
    self._tables = jax.device_put(
      sampler.Tables(*tables, constraint=on_device(constraint)),
      layout.sharding("") if layout else None,
    )
    self._cache = KVCache.one_block(model, config.slots, config.max_len, layout)

  def run(
    self,
    newest: Callable[[], tuple[Any, int | None]],
    episodes: Iterator[Episode | None],
    seed: int,
  ) -> Iterator[list[Episode]]:
    """Decodes episodes; yields after every round those that ended in it.

    Args:
      newest: the policy by now, as `decoding_views` makes it for this replica, and its
        version; see `engine.Newest`.
      episodes: taken in order as slots fall free; None says that there is none now.
      seed: of the sampling.
    """
    self._cache = self._cache.free(self.layout)
    run = _Run(self, newest, episodes, seed)
    while run.fill():
      yield run.step()

  def _fit(self, places: int) -> None:
    """Gives the cache room for so many places."""
    self._cache = self._cache.resize(places, self.config.max_len, self.layout)


class _Run:
  """The state of one `Slots.run`."""

  def __init__(
    self,
    owner: Slots,
    newest: Callable[[], tuple[Any, int | None]],
    queue: Iterator[Episode | None],
    seed: int,
  ):
    B = owner.config.slots
    self.owner = owner
    self.newest = newest
    self.params, self.version = newest()
    self.queue = queue
    self.ended = False  # the queue
    self.key = jax.random.key(seed)
    self.window_seconds = 0.0  # of the last one
    self.episodes: list[Episode | None] = [None] * B
    self.prompts = [b""] * B  # of the episodes, as bytes
    self.waiting: dict[int, concurrent.futures.Future] = {}
    self.asked: list[concurrent.futures.Future] = []  # in the last window
    self.ids: list[list[int]] = [[] for _ in range(B)]
    self.logps: list[list[float]] = [[] for _ in range(B)]
    self.forced: list[list[int]] = [[] for _ in range(B)]
    self.state = sampler.SamplerState(
      length_B=np.zeros(B, np.int32),
      pending_B=np.zeros(B, np.int32),
      limit_B=np.full(B, owner.config.max_len, np.int32),
      sequence_B=np.zeros(B, np.uint32),
      temperature_B=np.ones(B, np.float32),
      automaton_B=np.zeros(B, np.int32),
      active_B=np.zeros(B, bool),
      grammar_B=np.zeros(B, np.int32),
    )

  def fill(self) -> bool:
    """Puts new episodes into free slots; False when all work is done."""
    given, copies = [], []
    self._renew()
    held = {self.prompts[slot]: slot for slot in self.live()}
    for slot in [i for i, episode in enumerate(self.episodes) if episode is None]:
      episode = None if self.ended else next(self.queue, _END)
      self.ended |= episode is _END
      if self.ended or episode is None:
        break
      if self._renew():
        held = {}
      ids = episode.start()
      if len(ids) >= self.owner.config.max_len:
        raise ValueError(
          f"a prompt of {len(ids)} tokens leaves no room in rollout.max_len="
          f"{self.owner.config.max_len}; raise it or drop the task"
        )
      self.episodes[slot] = episode
      self.prompts[slot] = prompt = np.asarray(ids, np.int32).tobytes()
      self.state.sequence_B[slot] = episode.sequence
      self.state.temperature_B[slot] = episode.temperature
      self.state.length_B[slot] = 0
      self.state.grammar_B[slot] = 0
      if prompt in held:
        copies.append((slot, held[prompt], ids))
      else:
        held[prompt] = slot
        given.append((slot, ids))
    self._extend(given, fresh=True)
    self._copy(copies)
    return bool(self.live()) or not self.ended

  def _renew(self) -> bool:
    """Takes the policy by now; True where it is a newer one."""
    params, version = self.newest()
    if version == self.version:
      return False
    self.params, self.version = params, version
    # Another policy has read these: they go on, but no new episode begins from them.
    self.prompts = [b""] * len(self.prompts)
    return True

  def live(self) -> list[int]:
    """Slots that hold an episode."""
    return [slot for slot, e in enumerate(self.episodes) if e is not None]

  def step(self) -> list[Episode]:
    """One round: finished tools go in, one window is sampled, stops are handled.

    Returns:
      The episodes that ended.
    """
    began = time.monotonic()
    if self.state.active_B.any():
      # Most tools answer in far less time than a window takes, and a slot that just
      # misses one idles for all of it: a short wait for them is well spent. But once
      # only, or one tool that hangs would delay every window of the others.
      concurrent.futures.wait(self.asked, timeout=self.window_seconds / 8)
    elif self.waiting:
      # Not for as long as a tool takes: there may be new episodes for free slots.
      concurrent.futures.wait(
        self.waiting.values(), _IDLE, return_when=concurrent.futures.FIRST_COMPLETED
      )
    else:
      time.sleep(_IDLE)  # until there is another episode
    self.owner.spent.tools += time.monotonic() - began
    ended = self._inject()
    if self.state.active_B.any():
      ended += self._sample()
    return ended

  def _inject(self) -> list[Episode]:
    given, ended = [], []
    for slot in [s for s, f in self.waiting.items() if f.done()]:
      episode = self.episodes[slot]
      ids = episode.observed(self.waiting.pop(slot).result())
      # One more place, so that at least one token can be sampled after them.
      room = self.owner.config.max_len - int(self.state.length_B[slot]) - 2
      if ids is not None and len(ids) > room:
        episode.out_of_room()
        ids = None
      if ids is None:
        ended.append(self._free(slot))
      else:
        if self.owner._resume_S is not None:
          state = self.state.grammar_B[slot]
          self.state.grammar_B[slot] = self.owner._resume_S[state]
        given.append((slot, ids))
    self._extend(given, fresh=False)
    return ended

  def _extend(self, given: list[tuple[int, list[int]]], fresh: bool) -> None:
    """Appends ids to slots, in batches of one row bucket and one length bucket."""
    batches: dict[int, list[tuple[int, list[int]]]] = {}
    for slot, ids in given:
      if not fresh:
        ids = [int(self.state.pending_B[slot]), *ids]
      # The last token stays pending: running it is what the next sample starts from.
      batches.setdefault(_bucket(len(ids) - 1), []).append((slot, ids))
    ends = [int(self.state.length_B[slot]) + len(ids) for slot, ids in given]
    began = time.monotonic()
    self.owner._fit(max([*self.state.length_B[self.live()], *ends], default=1))
    R = self.owner.inject_rows
    for length, rows in batches.items():
      for i in range(0, len(rows), R):
        self._extend_batch(rows[i : i + R], length)
    self.owner.counters.prefilled_tokens += sum(len(ids) for _, ids in given)
    self.owner.spent.decode += time.monotonic() - began

  def _extend_batch(self, rows: list[tuple[int, list[int]]], length: int) -> None:
    config, s = self.owner.config, self.state
    R = self.owner.inject_rows
    row_R = np.full(R, config.slots, np.int32)
    token_RT = np.zeros((R, length), np.int32)
    start_R = np.zeros(R, np.int32)
    count_R = np.zeros(R, np.int32)
    for r, (slot, ids) in enumerate(rows):
      count = len(ids) - 1
      row_R[r], start_R[r], count_R[r] = slot, s.length_B[slot], count
      token_RT[r, :count] = ids[:-1]
      self._given(slot, ids)
    self.owner._cache = sampler.extend(
      self.owner.model,
      self.params,
      self.owner._cache,
      row_R,
      token_RT,
      start_R,
      count_R,
      self.owner.layout,
    )

  def _given(self, slot: int, ids: list[int]) -> None:
    """Notes that ids have been appended, the last of them pending."""
    self.state.length_B[slot] += len(ids) - 1
    self.state.pending_B[slot] = ids[-1]
    self.state.automaton_B[slot] = 0
    self.state.active_B[slot] = True
    self.forced[slot] = self.episodes[slot].forced()

  def _copy(self, copies: list[tuple[int, int, list[int]]]) -> None:
    """Gives slots the prompts that other slots hold: (slot, the other, ids)."""
    R = self.owner.inject_rows
    for i in range(0, len(copies), R):
      from_R = np.zeros(R, np.int32)
      to_R = np.full(R, self.owner.config.slots, np.int32)
      for r, (slot, other, ids) in enumerate(copies[i : i + R]):
        from_R[r], to_R[r] = other, slot
        self._given(slot, ids)
        self.owner.counters.copied_tokens += len(ids)
      cache = self.owner._cache
      self.owner._cache = cache.share(from_R, to_R, self.owner.layout)

  def _sample(self) -> list[Episode]:
    owner, before, ended = self.owner, self.state.active_B, []
    ends = self.state.length_B + owner.config.window * before
    owner._fit(min(int(ends[self.live()].max()), owner.config.max_len))
    forced_BW = np.full((len(before), owner.config.window), -1, np.int32)
    for slot in np.flatnonzero(before):
      self.state.limit_B[slot] = min(self.episodes[slot].limit, owner.config.max_len)
      if self.version is not None:
        self.episodes[slot].version = self.version
      rest = self.forced[slot][len(self.ids[slot]) :][: owner.config.window]
      forced_BW[slot, : len(rest)] = rest
    self.asked = []
    began = time.monotonic()
    owner._cache, state, out = sampler.window(
      owner.model,
      self.params,
      owner._cache,
      self.state,
      owner._tables,
      self.key,
      forced_BW,
      owner.layout,
      owner.config.truncation,
    )
    self.state, out = jax.tree.map(np.array, (state, out))
    self.window_seconds = time.monotonic() - began
    owner.spent.decode += self.window_seconds
    owner.counters.windows += 1
    owner.counters.sampled_tokens += int(out.count_B.sum())
    owner.counters.slot_steps += int(out.count_B.max()) * len(self.episodes)
    for slot in np.flatnonzero(before):
      count = out.count_B[slot]
      self.ids[slot] += out.token_BW[slot, :count].tolist()
      self.logps[slot] += out.logp_BW[slot, :count].tolist()
      if self.state.active_B[slot]:
        self.episodes[slot].progress(self.ids[slot])
        continue
      stop = int(out.stop_B[slot])
      tag = owner._tags[stop - 1] if stop else None
      future = self.episodes[slot].sampled(self.ids[slot], self.logps[slot], tag)
      self.ids[slot], self.logps[slot] = [], []
      if future is None:
        ended.append(self._free(slot))
      else:
        self.waiting[slot] = future
        self.asked.append(future)
    return ended

  def _free(self, slot: int) -> Episode:
    episode, self.episodes[slot] = self.episodes[slot], None
    self.state.active_B[slot] = False
    return episode


def on_device(constraint: Constraint | None) -> TokenMask | None:
  """The tables that the sampler and the learner look into."""
  if constraint is None:
    return None
  return TokenMask(*jax.device_put((constraint.class_V, constraint.next_SC)))


def _bucket(length: int) -> int:
  """The padded length of a run of given tokens: a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length()) if length > 0 else 16

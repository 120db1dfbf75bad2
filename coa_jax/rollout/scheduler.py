"""Continuous batching: which episode sits in which slot, and what runs next.

Host code only: it moves token ids between episodes and the sampler, and never touches
a tensor of the model. A slot whose episode waits for a tool keeps its cache and stays
idle; the others go on decoding. Every given token is prefilled exactly once; a prompt
that another slot holds is copied from there. The cache grows by doubling as the longest
trajectory needs, which changes no other trajectory in any bit.

budget: the state of the slots and all that changes it, in one place.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask
from coa_jax.model.sharding import Partitioner, platform
from coa_jax.protocol.grammar.automaton import Automaton, Constraint
from coa_jax.rollout import sampler
from coa_jax.rollout.types import Counters, Episode, RolloutConfig, Timings

_POLL_S = 0.05  # between two looks for new episodes while all others wait for tools
# Given tokens of a slot that one call runs, at most: what it computes with grows with
# them, and each length is a program of its own.
PIECE = 512


class Scheduler:
  """A fixed number of slots on one replica of the model, one running episode each."""

  def __init__(
    self,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    partitioner: Partitioner | None = None,
    constraint: Constraint | None = None,
  ):
    """Prepares the slots; the cache is allocated when the first episode starts.

    Args:
      model: the architecture as it decodes, its layers unrolled.
      automaton: where decoding stops.
      config: slots, window and limits.
      partitioner: the replica's, one of `Partitioner.replicas`; None on one device.
      constraint: what may be sampled; everything where None.
    """
    self.model = model
    self.partitioner = partitioner
    self.config = config
    self.slots = config.slots
    self.inject_rows = min(config.inject_rows, config.slots)
    self.counters = Counters()
    self.timings = Timings()
    self._tags = automaton.tags
    self._resume_S = constraint.resume_S if constraint else None
    tables = sampler.Tables(
      automaton.class_V,
      automaton.next_SC,
      automaton.stop_SC,
      constraint=on_device(constraint),
    )
    # Small, and looked into at every token: each device of the replica has all of them.
    whole = partitioner.sharding("") if partitioner else None
    self._tables = jax.device_put(tables, whole)
    self.clear()

  def clear(self) -> None:
    """Forgets all episodes, the policy and the cache."""
    B = self.slots
    self._cache: KVCache | None = None
    self._params: Any = None
    self._version = 0
    self._episodes: list[Episode | None] = [None] * B
    # Of each slot: the prompt as bytes, what was sampled since the last stop, and the
    # ids that are to be taken instead of sampling.
    self._prompts = [b""] * B
    self._ids: list[list[int]] = [[] for _ in range(B)]
    self._logps: list[list[float]] = [[] for _ in range(B)]
    self._forced: list[list[int]] = [[] for _ in range(B)]
    # Tool calls that run, by slot; those that the last window made; its seconds.
    self._calls: dict[int, concurrent.futures.Future] = {}
    self._new_calls: list[concurrent.futures.Future] = []
    self._window_seconds = 0.0
    self._state = sampler.SamplerState(
      length_B=np.zeros(B, np.int32),
      pending_B=np.zeros(B, np.int32),
      limit_B=np.full(B, self.config.max_len, np.int32),
      seed_B=np.zeros(B, np.uint32),
      sequence_B=np.zeros(B, np.uint32),
      temperature_B=np.ones(B, np.float32),
      automaton_B=np.zeros(B, np.int32),
      active_B=np.zeros(B, bool),
      grammar_B=np.zeros(B, np.int32),
    )

  def drop(self, episode: Episode) -> None:
    """Frees the slot of an episode, if it has one; its tool call goes on for nobody."""
    if episode not in self._episodes:
      return
    slot = self._episodes.index(episode)
    # Nobody waits for its call any more; the tool itself can not be stopped from here.
    self._calls.pop(slot, None)
    self._ids[slot] = []
    self._logps[slot] = []
    self._free(slot)

  def round(
    self, policy: Any, version: int, new: Sequence[Episode]
  ) -> Sequence[Episode]:
    """Starts new episodes, takes finished calls, samples a window, handles stops.

    Args:
      policy: one of `decoding_views`. Running episodes go on with a newer one from
        this window; what is in the cache stays there, as in PipelineRL's in-flight
        updates (arXiv 2509.19128).
      version: of the policy.
      new: episodes for free slots.

    Returns:
      The episodes that ended.

    Raises:
      ValueError: a prompt leaves no room in `rollout.max_len`.
    """
    if policy is not self._params:
      self._params = policy
      # The older policy has read these prompts: who runs goes on from them, but no new
      # episode starts from a copy.
      self._prompts = [b""] * self.slots
    self._version = version
    if self._cache is None:
      most = self.config.max_len
      self._cache = KVCache.one_block(self.model, self.slots, most, self.partitioner)
    self._start(new)
    self._wait_for_tools()
    ended = self._inject()
    if self._state.active_B.any():
      ended += self._sample()
    return ended

  def _live(self) -> list[int]:
    """Slots that hold an episode."""
    return [slot for slot, e in enumerate(self._episodes) if e is not None]

  def _start(self, new: Sequence[Episode]) -> None:
    """Puts episodes into free slots: prefills prompts, or copies a neighbour's."""
    # A group has one prompt: the first of its episodes prefills it, the others copy.
    slot_of_prompt = {self._prompts[slot]: slot for slot in self._live()}
    free = [slot for slot, e in enumerate(self._episodes) if e is None]
    prefills: list[tuple[int, list[int]]] = []
    copies: list[tuple[int, int, list[int]]] = []
    for slot, episode in zip(free, new, strict=False):
      ids = episode.start()
      if len(ids) >= self.config.max_len:
        raise ValueError(
          f"a prompt of {len(ids)} tokens leaves no room in rollout.max_len="
          f"{self.config.max_len}; raise it or drop the task"
        )
      prompt = np.asarray(ids, np.int32).tobytes()
      self._episodes[slot] = episode
      self._prompts[slot] = prompt
      self._state.seed_B[slot] = episode.seed
      self._state.sequence_B[slot] = episode.sequence
      self._state.temperature_B[slot] = episode.temperature
      self._state.length_B[slot] = 0
      self._state.grammar_B[slot] = 0
      if prompt in slot_of_prompt:
        copies.append((slot, slot_of_prompt[prompt], ids))
      else:
        slot_of_prompt[prompt] = slot
        prefills.append((slot, ids))
    self._extend(prefills, fresh=True)
    self._copy(copies)

  def _wait_for_tools(self) -> None:
    began = time.monotonic()
    if self._state.active_B.any():
      # Most tools answer in far less time than a window takes, and a slot that just
      # misses one idles for all of it: a short wait for them is well spent. But once
      # only, or one tool that hangs would delay every window of the others.
      concurrent.futures.wait(self._new_calls, timeout=self._window_seconds / 8)
    elif self._calls:
      # Not for as long as a tool takes: there may be new episodes for free slots.
      concurrent.futures.wait(
        self._calls.values(), _POLL_S, return_when=concurrent.futures.FIRST_COMPLETED
      )
    self.timings.tools += time.monotonic() - began

  def _inject(self) -> list[Episode]:
    """Appends the observations of calls that are done; returns who ended by one."""
    observations: list[tuple[int, list[int]]] = []
    ended: list[Episode] = []
    # A list of its own: calls are taken out of the dictionary on the way.
    done = [slot for slot, call in self._calls.items() if call.done()]
    for slot in done:
      episode = self._episodes[slot]
      ids = episode.observed(self._calls.pop(slot).result())
      # One more place, so that at least one token can be sampled after them.
      room = self.config.max_len - int(self._state.length_B[slot]) - 2
      if ids is not None and len(ids) > room:
        episode.out_of_room()
        ids = None
      if ids is None:
        ended.append(self._free(slot))
        continue
      # The grammar reads no observation: it goes on from where the call left it.
      if self._resume_S is not None:
        state = self._state.grammar_B[slot]
        self._state.grammar_B[slot] = self._resume_S[state]
      observations.append((slot, ids))
    self._extend(observations, fresh=False)
    return ended

  def _extend(self, rows: list[tuple[int, list[int]]], fresh: bool) -> None:
    """Appends ids to slots, as many rows at once as are given, in pieces.

    Args:
      rows: (slot, ids to append).
      fresh: whether the slots are empty, so that no token of theirs is pending.
    """
    began = time.monotonic()
    # --- Room first: the cache grows once, before anything is written.
    longest = max(self._state.length_B[self._live()], default=1)
    for slot, ids in rows:
      longest = max(longest, int(self._state.length_B[slot]) + len(ids))
      self.counters.prefilled_tokens += len(ids)
    self._fit(longest)
    # --- Pieces of one length bucket run together; a slot's later ones after its first.
    rounds: list[dict[int, list[tuple[int, list[int], int]]]] = []
    for slot, ids in rows:
      if not fresh:
        ids = [int(self._state.pending_B[slot]), *ids]
      # The last token stays pending: running it is what the next sample starts from.
      given = ids[:-1]
      for turn, begin in enumerate(range(0, max(len(given), 1), PIECE)):
        piece = given[begin : begin + PIECE]
        start = int(self._state.length_B[slot]) + begin
        if turn == len(rounds):
          rounds.append({})
        length = token_bucket(len(piece))
        rounds[turn].setdefault(length, []).append((slot, piece, start))
    for batches in rounds:
      for length, batch in batches.items():
        for i in range(0, len(batch), self.inject_rows):
          self._extend_batch(batch[i : i + self.inject_rows], length)
    # --- The slots go on from there.
    for slot, ids in rows:
      self._append(slot, ids if fresh else [int(self._state.pending_B[slot]), *ids])
    self.timings.decode += time.monotonic() - began

  def _extend_batch(self, rows: list[tuple[int, list[int], int]], length: int) -> None:
    """Runs pieces: of each its slot, its ids and the position of the first."""
    R = row_bucket(len(rows), self.inject_rows, platform(self.partitioner))
    # Slot B is none: rows that are not used write to it, that is nowhere.
    row_R = np.full(R, self.slots, np.int32)
    token_RT = np.zeros((R, length), np.int32)
    start_R = np.zeros(R, np.int32)
    count_R = np.zeros(R, np.int32)
    for r, (slot, ids, start) in enumerate(rows):
      row_R[r] = slot
      start_R[r] = start
      count_R[r] = len(ids)
      token_RT[r, : len(ids)] = ids
    self._cache = sampler.extend(
      self.model,
      self._params,
      self._cache,
      row_R,
      token_RT,
      start_R,
      count_R,
      self.partitioner,
    )

  def _append(self, slot: int, ids: list[int]) -> None:
    """Notes that ids have been appended, the last of them pending."""
    self._state.length_B[slot] += len(ids) - 1
    self._state.pending_B[slot] = ids[-1]
    self._state.automaton_B[slot] = 0
    self._state.active_B[slot] = True
    # Asked only now: what is forced may depend on what was appended.
    self._forced[slot] = self._episodes[slot].forced()

  def _copy(self, copies: list[tuple[int, int, list[int]]]) -> None:
    """Gives slots the prompts that other slots hold: (slot, the other, ids)."""
    R = self.inject_rows
    for i in range(0, len(copies), R):
      from_R = np.zeros(R, np.int32)
      to_R = np.full(R, self.slots, np.int32)
      for r, (slot, other, ids) in enumerate(copies[i : i + R]):
        from_R[r] = other
        to_R[r] = slot
        self._append(slot, ids)
        self.counters.copied_tokens += len(ids)
      self._cache = self._cache.share(from_R, to_R, self.partitioner)

  def _sample(self) -> list[Episode]:
    """Samples one window for all active slots; returns the episodes that ended."""
    # --- What each slot may do in this window.
    before = self._state.active_B
    ended: list[Episode] = []
    # All slots that hold an episode count: an idle one's cache must stay, too.
    ends = self._state.length_B + self.config.window * before
    self._fit(min(int(ends[self._live()].max()), self.config.max_len))
    # What is to be taken instead of sampling goes on where the last window ended.
    forced_BW = np.full((len(before), self.config.window), -1, np.int32)
    for slot in np.flatnonzero(before):
      # A limit may change while the episode runs: 0 is how it is called off.
      self._state.limit_B[slot] = min(self._episodes[slot].limit, self.config.max_len)
      self._episodes[slot].version = self._version
      rest = self._forced[slot][len(self._ids[slot]) :][: self.config.window]
      forced_BW[slot, : len(rest)] = rest
    self._new_calls = []
    # --- The device.
    began = time.monotonic()
    self._cache, state, out = sampler.window(
      self.model,
      self._params,
      self._cache,
      self._state,
      self._tables,
      forced_BW,
      self.partitioner,
      self.config.truncation,
    )
    # Copies: the host writes into the state, and a device's own memory is read-only.
    self._state, out = jax.tree.map(np.array, (state, out))
    self._window_seconds = time.monotonic() - began
    self.timings.decode += self._window_seconds
    self.counters.windows += 1
    self.counters.sampled_tokens += int(out.count_B.sum())
    self.counters.slot_steps += int(out.count_B.max()) * len(self._episodes)
    # --- Tokens to their episodes, which say what happens at a stop.
    for slot in np.flatnonzero(before):
      count = out.count_B[slot]
      self._ids[slot] += out.token_BW[slot, :count].tolist()
      self._logps[slot] += out.logp_BW[slot, :count].tolist()
      if self._state.active_B[slot]:
        self._episodes[slot].progress(self._ids[slot])
        continue
      stop = int(out.stop_B[slot])
      tag = self._tags[stop - 1] if stop else None  # None at the token limit
      future = self._episodes[slot].sampled(self._ids[slot], self._logps[slot], tag)
      self._ids[slot] = []
      self._logps[slot] = []
      if future is None:
        ended.append(self._free(slot))
      else:
        self._calls[slot] = future
        self._new_calls.append(future)
    return ended

  def _free(self, slot: int) -> Episode:
    episode = self._episodes[slot]
    self._episodes[slot] = None
    self._state.active_B[slot] = False
    return episode

  def _fit(self, positions: int) -> None:
    """Gives the cache room for so many positions."""
    self._cache = self._cache.resize(positions, self.config.max_len, self.partitioner)


def on_device(constraint: Constraint | None) -> TokenMask | None:
  """The tables that the sampler and the learner look into."""
  if constraint is None:
    return None
  return TokenMask(*jax.device_put((constraint.class_V, constraint.next_SC)))


def token_bucket(length: int) -> int:
  """Rounds the length of given tokens up: a power of two, at least 16."""
  bucket = 16
  while bucket < length:
    bucket *= 2
  return bucket


def row_bucket(rows: int, most: int, on: str) -> int:
  """Rounds the rows of a call up: a power of four, or the most.

  On a CPU always to the most: products of other numbers of rows have other bits there,
  and a slot's may not depend on its neighbours.

  Args:
    rows: how many are given tokens.
    most: `inject_rows`.
    on: the kind of device: cpu, gpu or tpu.
  """
  if on == "cpu":
    return most
  bucket = 1
  while bucket < rows:
    bucket *= 4
  return min(bucket, most)

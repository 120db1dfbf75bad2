"""Continuous batching: assigns episodes to slots, and schedules their work.

Host code only: it moves token ids between episodes and the device loop, and never
touches the model's tensors. A slot waiting for a tool keeps its pages and stays idle;
the other slots continue decoding. Prompts with a common prefix share pages, and the
prefix is prefilled once. If pages run out, the youngest trajectory is paused: its cache
waits on the host, and the trajectory resumes bit-identical.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.rollout import pages as paging
from coa_jax.rollout.slot_cache import OnHost, Prefill
from coa_jax.rollout.types import (
  Counters,
  Episode,
  RolloutConfig,
  Timings,
  prompt_ids,
)

_POLL_S = 0.05  # between two polls for new episodes while all others wait for tools


@dataclasses.dataclass(eq=False)
class _Slot:
  """A slot with an episode.

  Attributes:
    index: the slot's index.
    episode: the running episode.
    age: number of episodes started before this one.
    ids: ids sampled since the last stop.
    logps: log-probs of `ids`.
    forced: ids to take instead of sampling.
    forced_from: position of the first forced id.
    call: the running tool call.
    observation: ids to append once there is room.
    held: the pages' contents while paused.
    was_active: whether the slot was sampling when paused.
  """

  index: int
  episode: Episode
  age: int
  ids: list[int] = dataclasses.field(default_factory=list)
  logps: list[float] = dataclasses.field(default_factory=list)
  forced: list[int] = dataclasses.field(default_factory=list)
  forced_from: int = 0
  call: concurrent.futures.Future | None = None
  observation: list[int] | None = None
  held: OnHost | None = None
  was_active: bool = False


class Scheduler:
  """A fixed number of slots on one model replica, each with one running episode."""

  def __init__(self, device: Any):
    """Prepares the slots; the cache is allocated when the first episode starts.

    Args:
      device: the replica's `device_loop.DeviceLoop`, or a test's.
    """
    self.config: RolloutConfig = device.config
    self.device = device
    self.slots = self.config.slots
    self.counters = Counters()
    self.clear()

  @property
  def timings(self) -> Timings:
    """Returns the device's seconds by phase."""
    return self.device.timings

  def clear(self) -> None:
    """Forgets all episodes, the policy and the cache."""
    self.device.clear()
    # New episodes waiting for pages, with their prompts.
    self._waiting: list[tuple[Episode, list[int]]] = []
    self._slots: list[_Slot | None] = [None] * self.slots
    self._started = 0
    # Tool calls from the last window.
    self._new_calls: list[concurrent.futures.Future] = []

  def drop(self, episode: Episode) -> None:
    """Forgets an episode and frees its slot, if any; abandons its tool call."""
    self._waiting = [each for each in self._waiting if each[0] is not episode]
    for slot in self._taken():
      if slot.episode is episode:
        self._free(slot)

  def round(
    self, policy: Any, version: int, new: Sequence[Episode]
  ) -> Sequence[Episode]:
    """Starts new episodes, takes finished calls, samples a window, handles stops.

    The stops are the previous window's if two windows may be in flight.

    Args:
      policy: one of `decoding_views`. Running episodes switch to a newer policy with
        this window and keep their cache, as in PipelineRL's in-flight updates (arXiv
        2509.19128).

    Returns:
      The episodes that ended.

    Raises:
      ValueError: a prompt leaves no room in `rollout.max_len`, or the device has no
        room for a trajectory of that length.
    """
    self.device.set_policy(policy, version)
    for episode in new:
      self._waiting.append((episode, prompt_ids(episode, self.config.max_len)))
    self._resume()
    self._start()
    self._wait_for_tools()
    ended = self._observe()
    sampling = bool(self.device.state.active_B.any())
    if sampling:
      self._sample()
    while self.device.is_due(sampling):
      ended += self._hand_out()
    return ended

  def _taken(self) -> list[_Slot]:
    return [slot for slot in self._slots if slot]

  def _live(self) -> list[_Slot]:
    """Lists slots with unpaused episodes, the oldest first."""
    slots = [slot for slot in self._taken() if not slot.held]
    return sorted(slots, key=lambda slot: slot.age)

  def _start(self) -> None:
    """Puts episodes into free slots; common prefixes are prefilled once."""
    prefills: list[Prefill] = []
    started: list[tuple[_Slot, list[int]]] = []
    free = [i for i, slot in enumerate(self._slots) if slot is None]
    # Paused episodes come first.
    if any(slot.held for slot in self._taken()):
      return
    for i in free[: len(self._waiting)]:
      episode, ids = self._waiting[0]
      prompt = ids[:-1]  # the last stays pending: sampling starts from it
      known = self.device.cache.place(i, prompt)
      if known is None:
        break
      del self._waiting[0]
      slot = self._slots[i] = _Slot(i, episode, age=self._started)
      self._started += 1
      self._set_state(slot)
      started.append((slot, ids))
      if known < len(prompt):
        # Another slot may be prefilling the prefix now: run after it.
        prefills.append(Prefill(i, prompt[known:], known, known // paging.PIECE))
        self.counters.copied_tokens += known
        self.counters.prefilled_tokens += len(ids) - known
      else:
        self.counters.copied_tokens += len(ids)
    self.device.prefill(prefills)
    self.device.cache.copy(prefilled=self.config.max_len)
    for slot, ids in started:
      self._append(slot, ids)

  def _set_state(self, slot: _Slot) -> None:
    """Records a new episode's sampling settings in its empty slot."""
    state = self.device.state
    episode = slot.episode
    state.seed_B[slot.index] = episode.seed
    state.sequence_B[slot.index] = episode.sequence
    state.temperature_B[slot.index] = episode.temperature
    if state.top_p_B is not None:
      own = episode.top_p
      state.top_p_B[slot.index] = self.config.top_p if own is None else own
    state.length_B[slot.index] = 0
    state.grammar_B[slot.index] = 0
    if self.device.constraint:
      state.grammar_B[slot.index] = self.device.constraint.after(episode.opening)

  def _length(self, slot: _Slot) -> int:
    """Returns how many tokens of a slot are cached, as far as the host knows."""
    return int(self.device.state.length_B[slot.index])

  def _make_room(self, slot: _Slot, places: int) -> bool:
    """Gives a slot pages for its first `places`, and pauses younger ones if needed.

    Returns:
      Whether the slot has the pages; if not, it is the youngest, and now paused.
    """
    while not self.device.cache.reach(slot.index, places):
      self.device.read()  # the host's state must match the pages to be held
      youngest = self._live()[-1]
      self._pause(youngest)
      if youngest is slot:
        return False
    return True

  def _pause(self, slot: _Slot) -> None:
    """Pauses an episode: takes its pages and keeps their contents on the host."""
    slot.held = self.device.cache.to_host(slot.index, self._length(slot))
    slot.was_active = bool(self.device.state.active_B[slot.index])
    self.device.state.active_B[slot.index] = False
    self.counters.pauses += 1

  def _resume(self) -> None:
    """Resumes paused episodes, the oldest first, while there is room."""
    paused = [slot for slot in self._taken() if slot.held]
    for slot in sorted(paused, key=lambda slot: slot.age):
      if not self.device.cache.from_host(slot.index, slot.held):
        return
      slot.held = None
      self.device.state.active_B[slot.index] = slot.was_active

  def _wait_for_tools(self) -> None:
    began = time.monotonic()
    if self.device.state.active_B.any():
      # Wait for each call only once: a hanging tool would delay all others' windows.
      concurrent.futures.wait(self._new_calls, timeout=self.device.patience())
      self._new_calls = []
    elif not self.device.windows:  # a window in flight would show the stopped slots
      # Not until the tool ends: there may be new episodes for free slots.
      calls = [slot.call for slot in self._live() if slot.call]
      concurrent.futures.wait(
        calls, _POLL_S, return_when=concurrent.futures.FIRST_COMPLETED
      )
    self.device.waited_for_tools(began)

  def _observe(self) -> list[Episode]:
    """Appends finished calls' observations; returns the episodes that ended."""
    # --- The episodes' observations.
    ended: list[Episode] = []
    for slot in self._taken():
      if slot.call is None or not slot.call.done():
        continue
      ids = slot.episode.observed(slot.call.result())
      slot.call = None
      # One more place, so that at least one token can be sampled after them.
      if ids is not None and len(ids) > self.config.max_len - self._length(slot) - 2:
        slot.episode.out_of_room()
        ids = None
      if ids is None:
        ended.append(self._free(slot))
      else:
        slot.observation = ids

    # --- The observations' pages; a paused episode keeps its observation for later.
    rows: list[Prefill] = []
    appended: list[tuple[_Slot, list[int]]] = []
    state = self.device.state
    for slot in self._live():
      if slot.observation is None or slot.held:
        continue
      length = self._length(slot)
      # The last sampled token is not in the cache yet.
      ids = [int(state.pending_B[slot.index]), *slot.observation]
      if not self._make_room(slot, length + len(ids) - 1):
        continue
      rows.append(Prefill(slot.index, ids[:-1], length))
      appended.append((slot, ids))
      self.counters.prefilled_tokens += len(slot.observation)
      slot.observation = None
      # The grammar reads no observation: it continues from its state after the call.
      if self.device.constraint:
        grammar = state.grammar_B[slot.index]
        state.grammar_B[slot.index] = self.device.constraint.resume_S[grammar]
    self.device.prefill(rows)
    for slot, ids in appended:
      self._append(slot, ids)
    return ended

  def _append(self, slot: _Slot, ids: list[int]) -> None:
    """Records appended ids, the last one pending."""
    state = self.device.state
    state.length_B[slot.index] += len(ids) - 1
    state.pending_B[slot.index] = ids[-1]
    state.automaton_B[slot.index] = 0
    state.active_B[slot.index] = True
    # Asked only now: forced ids may depend on the appended ones.
    slot.forced = slot.episode.forced()
    slot.forced_from = self._length(slot)

  def _sample(self) -> None:
    state = self.device.state
    W = self.config.window
    # --- Pages for all possible tokens in unread windows and this one.
    for slot in self._live():
      # A younger slot may have been paused by now, to give an older slot its pages.
      if state.active_B[slot.index]:
        end = self._length(slot) + W * (1 + self.device.unread(slot.index))
        self._make_room(slot, min(end, self.config.max_len))
    # --- Each slot's limits.
    active = set(np.flatnonzero(state.active_B).tolist())
    forced_BW = np.full((self.slots, W), -1, np.int32)
    for i in active:
      slot = self._slots[i]
      # A limit may change while the episode runs: 0 cancels it.
      state.limit_B[i] = min(slot.episode.limit, self.config.max_len)
      # A slot still active in an unread window samples all of it.
      length = self._length(slot) + W * self.device.unread(i)
      rest = slot.forced[length - slot.forced_from :][:W]
      forced_BW[i, : len(rest)] = rest
    self.device.dispatch(active, forced_BW)

  def _hand_out(self) -> list[Episode]:
    """Delivers the oldest window's tokens to the episodes; returns those that ended."""
    window = self.device.take()
    out = window.out
    self.counters.windows += 1
    self.counters.sampled_tokens += int(out.count_B.sum())
    self.counters.slot_steps += int(out.count_B.max()) * self.slots
    ended: list[Episode] = []
    for i in sorted(window.slots):
      count = out.count_B[i]
      slot = self._slots[i]
      slot.episode.version = window.version
      slot.ids += out.token_BW[i, :count].tolist()
      slot.logps += out.logp_BW[i, :count].tolist()
      if window.state.active_B[i]:
        slot.episode.progress(slot.ids)
        continue
      stop = int(out.stop_B[i])
      tag = self.device.tags[stop - 1] if stop else None  # None at the token limit
      slot.call = slot.episode.sampled(slot.ids, slot.logps, tag)
      slot.ids = []
      slot.logps = []
      if slot.call is None:
        ended.append(self._free(slot))
      else:
        self._new_calls.append(slot.call)
    return ended

  def _free(self, slot: _Slot) -> Episode:
    self._slots[slot.index] = None
    self.device.free(slot.index)
    return slot.episode

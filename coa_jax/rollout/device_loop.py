"""One replica's device loop: dispatches prefills and windows, and reads windows.

An accelerator gets its next window before the host reads the last one, so it never
waits for Python. Continuing slots need nothing from the host; slots stopped in the last
window miss the window in flight. The scheduler chooses each window's slots.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.protocol.grammar.tables import Automaton, Constraint
from coa_jax.rollout import pages as paging
from coa_jax.rollout import programs, sampler, slot_cache
from coa_jax.rollout.slot_cache import Prefill, SlotCache
from coa_jax.rollout.types import RolloutConfig, Timings
from coa_jax.runtime import compiling


@dataclasses.dataclass
class Window:
  """A dispatched window, until its episodes are updated.

  Attributes:
    slots: slots that may sample in the window, as far as the host knows.
    version: the policy's version.
    dispatched: time of dispatch, monotonic seconds.
    state: all slots' state after the window; on the device until read.
    out: the sampled tokens; on the device until read.
    is_read: whether the device has finished and `DeviceLoop.state` has the result.
  """

  slots: set[int]
  version: int
  dispatched: float
  state: sampler.SamplerState
  out: sampler.Sampled
  is_read: bool = False


class DeviceLoop:
  """A replica's device state and programs.

  Attributes:
    constraint: the allowed tokens; all if None.
    tags: the tags that stop a slot.
    cache: the slots' cache; None until there is a policy.
    state: the slots' state as known to the host: after the last read window.
    windows: windows not yet delivered to their episodes, the oldest first.
    timings: the replica's seconds by phase.
    compiles_ahead: whether all programs are compiled before the first episode.
  """

  def __init__(
    self,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    partitioner: Partitioner = ONE_DEVICE,
    constraint: Constraint | None = None,
    own_top_p: bool = False,
  ):
    """Puts the automaton on the device; the first policy allocates the cache.

    Args:
      model: the decoding architecture, with unrolled layers.
      partitioner: the replica's; one of `Partitioner.replicas`.
      own_top_p: whether episodes may have their own top_p, which needs other programs.
    """
    self.model = model
    self.config = config
    self.constraint = constraint
    self.tags = automaton.tags
    self.timings = Timings()
    self._partitioner = partitioner
    self._on = partitioner.platform
    on_cpu = self._on == "cpu"
    # Maximum windows dispatched before the first is read: with 2 the device need not
    # wait for the host, but a stopped slot misses a window. A CPU computes on Python's
    # own cores and gains nothing.
    self._most_in_flight = 1 if on_cpu else 2
    # A CPU's cache grows, and few programs for its possible sizes are ever used.
    self.compiles_ahead = not on_cpu
    self._page_counts: list[int] = []
    self._own_top_p = own_top_p
    self._truncation = config.truncation
    if own_top_p:
      self._truncation = dataclasses.replace(config.truncation, top_p=1.0)
    tables = sampler.Tables(
      automaton.class_V,
      automaton.next_SC,
      automaton.stop_SC,
      constraint=TokenMask.of(constraint),
    )
    # Small and read at every token, so replicated on all the replica's devices.
    self._whole = partitioner.sharding("")
    self._tables = jax.device_put(tables, self._whole)
    self._join = jax.jit(sampler.join, out_shardings=self._whole)
    self.clear()

  def clear(self) -> None:
    """Forgets the policy, the cache and all windows."""
    B = self.config.slots
    self.cache: SlotCache | None = None
    self.windows: list[Window] = []
    self.state = sampler.SamplerState(
      length_B=np.zeros(B, np.int32),
      pending_B=np.zeros(B, np.int32),
      limit_B=np.full(B, self.config.max_len, np.int32),
      seed_B=np.zeros(B, np.uint32),
      sequence_B=np.zeros(B, np.uint32),
      temperature_B=np.ones(B, np.float32),
      automaton_B=np.zeros(B, np.int32),
      active_B=np.zeros(B, bool),
      grammar_B=np.zeros(B, np.int32),
      top_p_B=np.ones(B, np.float32) if self._own_top_p else None,
    )
    self._params: Any = None
    self._version = 0
    self._window_seconds = 0.0  # the last read window's duration
    self._window_ended = 0.0  # the last read window's end
    self._waited_until = 0.0  # end of the last wait for tools
    # Start of the device's known idle time.
    self._idle_since: float | None = None

  def set_policy(self, policy: Any, version: int) -> None:
    """Samples with this policy from the next window; the cache stays."""
    if self.cache is None:
      self._make_cache(policy)
    if policy is not self._params:
      self._params = policy
      # The older policy filled the cache: running episodes continue with this cache,
      # but no new episode starts from it.
      self.cache.forget_prompts()
    self._version = version

  def _make_cache(self, policy: Any) -> None:
    """Allocates the cache; compiles programs ahead for a new number of pages."""
    config = self.config
    counts = slot_cache.page_counts(self.model, config, self._partitioner)
    # A new number of pages needs new programs, and a device's free memory varies a
    # little from step to step: the old number is kept if there is room.
    if self._page_counts and self._page_counts[-1] <= counts[-1]:
      counts = self._page_counts
    self.cache = SlotCache(self.model, config, counts, self._partitioner)
    if self.compiles_ahead and counts != self._page_counts:
      calls = programs.device_calls(config, self._on, counts)
      lowered = [functools.partial(self._lower, call, policy) for call in calls]
      compiling.compile_all("the sampler", lowered, replica_on=self._on)
    self._page_counts = counts

  def _lower(self, call: programs.DeviceCall, policy: Any) -> jax.stages.Lowered:
    """Lowers a program with arguments like those of later calls."""
    table_BC = np.full((call.rows, call.blocks), -1, np.int32)
    token_BT = np.zeros((call.rows, call.tokens), np.int32)
    model = (self.model, policy, self.cache.kv)
    if call.function == "prefill":
      row_B = np.zeros(call.rows, np.int32)
      return sampler.prefill.lower(
        *model, table_BC, token_BT, row_B, row_B, self._partitioner, row_B
      )
    return sampler.window.lower(
      *model,
      table_BC,
      self._after_last(),
      self._tables,
      token_BT,
      self._partitioner,
      self._truncation,
    )

  def free(self, slot: int) -> None:
    """Removes a slot from all windows, and releases its pages."""
    self.state.active_B[slot] = False
    for window in self.windows:
      window.slots.discard(slot)
    self.cache.release(slot)

  def prefill(self, rows: list[Prefill]) -> None:
    """Prefills rows in pieces, as many rows per call as fit."""
    began = time.monotonic()
    # Pieces in one length bucket run together; a slot's pieces run in order.
    turns: dict[int, dict[int, list[Prefill]]] = {}
    most = paging.PIECE
    for row in rows:
      for i, begin in enumerate(range(0, len(row.ids), most)):
        ids = row.ids[begin : begin + most]
        piece = Prefill(row.slot, ids, row.start + begin)
        batches = turns.setdefault(row.turn + i, {})
        batches.setdefault(programs.token_bucket(len(ids)), []).append(piece)
    most_rows = min(self.config.prefill_rows, self.config.slots)
    for turn, batches in sorted(turns.items()):
      self.cache.copy(prefilled=turn * most)
      for length, batch in batches.items():
        rows_of_call = programs.most_rows(length, most_rows, self._on)
        for i in range(0, len(batch), rows_of_call):
          self._prefill_batch(batch[i : i + rows_of_call], length, rows_of_call)
    self.timings.decode += time.monotonic() - began

  def _prefill_batch(self, pieces: list[Prefill], length: int, rows: int) -> None:
    """Prefills pieces in one call, padded to `length` tokens and to a row bucket."""
    R = programs.row_bucket(len(pieces), rows, self._on)
    end = max(piece.start + len(piece.ids) for piece in pieces)
    blocks = programs.block_bucket(end, self.config.max_len, self._on)
    table_BC = self.cache.table_BC[:, :blocks]
    # Unused rows have no pages, so they write nothing.
    table_RC = np.full((R, table_BC.shape[1]), -1, np.int32)
    token_RT = np.zeros((R, length), np.int32)
    start_R = np.zeros(R, np.int32)
    count_R = np.zeros(R, np.int32)
    slot_R = np.full(R, self.cache.state_rows, np.int32)
    for r, piece in enumerate(pieces):
      table_RC[r] = table_BC[piece.slot]
      start_R[r] = piece.start
      count_R[r] = len(piece.ids)
      slot_R[r] = piece.slot
      token_RT[r, : len(piece.ids)] = piece.ids
    self._count_idle()
    self.cache.kv = sampler.prefill(
      self.model,
      self._params,
      self.cache.kv,
      table_RC,
      token_RT,
      start_R,
      count_R,
      self._partitioner,
      slot_R,
    )

  def dispatch(self, slots: set[int], forced_BW: np.ndarray) -> None:
    """Dispatches a window to the device.

    Args:
      slots: the window's sampling slots; they have pages for all its tokens.
      forced_BW: ids taken instead of sampling; -1 to sample.
    """
    self._count_idle()
    began = time.monotonic()
    state = self._after_last()
    self.cache.kv, state, out = sampler.window(
      self.model,
      self._params,
      self.cache.kv,
      self.cache.table_BC.copy(),  # the host goes on while the device reads it
      state,
      self._tables,
      forced_BW,
      self._partitioner,
      self._truncation,
    )
    self.windows.append(Window(slots, self._version, began, state, out))
    self.timings.decode += time.monotonic() - began

  def _after_last(self) -> sampler.SamplerState:
    """Returns the slots' state for the device: an unread window's, else the host's."""
    if self._most_in_flight == 1:
      return self.state
    # A copy: the host goes on while the device reads it.
    host = jax.device_put(jax.tree.map(np.copy, self.state), self._whole)
    last = host
    goes_on_B = np.zeros(self.config.slots, bool)
    if self.windows and not self.windows[-1].is_read:
      last = self.windows[-1].state
      goes_on_B[list(self.windows[-1].slots)] = True
    return self._join(last, host, goes_on_B)

  def _count_idle(self) -> None:
    """Counts the device's idle seconds up to now."""
    now = time.monotonic()
    last = self.windows[-1] if self.windows else None
    if last and not last.is_read and last.out.count_B.is_ready():
      # The window ended unobserved: the previous one took about as long. Waits for
      # tools are counted as the tools'.
      self._idle_since = max(
        self._window_ended + self._window_seconds, self._waited_until
      )
    if self._idle_since is not None:
      self.timings.host += max(0.0, now - self._idle_since)
      self._idle_since = None

  def unread(self, slot: int) -> int:
    """Counts the windows in flight in which a slot may sample."""
    return sum(not w.is_read and slot in w.slots for w in self.windows)

  def read(self, most: int | None = None) -> None:
    """Waits for the oldest `most` windows, all if None, and updates `state`."""
    for i, window in enumerate(self.windows[:most]):
      if window.is_read:
        continue
      began = time.monotonic()
      window.state, window.out = jax.device_get((window.state, window.out))
      window.is_read = True
      now = time.monotonic()
      self.timings.decode += now - began
      self._window_seconds = now - max(self._window_ended, window.dispatched)
      self._window_ended = now
      if window is self.windows[-1]:
        self._idle_since = now
      slots = list(window.slots)
      for mine_B, new_B in zip(
        jax.tree.leaves(self.state), jax.tree.leaves(window.state), strict=True
      ):
        mine_B[slots] = new_B[slots]
      stopped = {slot for slot in slots if not window.state.active_B[slot]}
      for later in self.windows[i + 1 :]:
        later.slots -= stopped

  def is_due(self, sampling: bool) -> bool:
    """Whether to deliver the oldest window to its episodes now.

    `sampling` tells whether this round dispatched a window.
    """
    if not self.windows:
      return False
    enough = len(self.windows) >= self._most_in_flight
    return self.windows[0].is_read or not sampling or enough

  def take(self) -> Window:
    """Reads, removes and returns the oldest window."""
    self.read(1)
    return self.windows.pop(0)

  def patience(self) -> float:
    """Returns how many seconds a round may wait for tools while slots are active."""
    # Most tools answer in far less than a window's time, and a slot that just misses
    # a window idles through it: a short wait pays.
    if self.windows:  # the device is busy meanwhile
      until = self._window_ended + self._window_seconds / 2
      return max(0.0, until - time.monotonic())
    return self._window_seconds / 8

  def waited_for_tools(self, began: float) -> None:
    """Counts the seconds since `began` as the tools', not the host's."""
    self._waited_until = time.monotonic()
    waited = self._waited_until - began
    self.timings.tools += waited
    if self._idle_since is not None:
      self._idle_since += waited

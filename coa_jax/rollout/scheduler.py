"""Continuous batching: which episode sits in which slot, and what runs next.

Host code only: it moves token ids between episodes and the sampler, and never touches
a tensor of the model. A slot whose episode waits for a tool keeps its pages and stays
idle; the others go on decoding. Prompts that begin alike share pages, and what they
have in common is prefilled once. Where pages run out, the youngest trajectory is
paused: what it holds waits on the host, and it goes on with the same bits.

An accelerator is given the next window before the last one is read, so that it never
waits for Python. Slots that go on do so without the host; those that stopped in the
last window miss the one that is in flight.

budget: the state of the slots and all that changes it, in one place.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from coa_jax import compiling
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask
from coa_jax.model.sharding import Partitioner, platform
from coa_jax.protocol.grammar.automaton import Automaton, Constraint
from coa_jax.rollout import programs, sampler, slot_cache
from coa_jax.rollout.slot_cache import OnHost, SlotCache
from coa_jax.rollout.types import Counters, Episode, RolloutConfig, Timings

_POLL_S = 0.05  # between two looks for new episodes while all others wait for tools


class _Given(NamedTuple):
  """Tokens to append to a slot that has pages for them.

  Attributes:
    slot: whose they are.
    ids: the tokens.
    start: position of the first.
    turn: among pieces of prompts; those of a lower one run first.
  """

  slot: int
  ids: list[int]
  start: int
  turn: int = 0


@dataclasses.dataclass
class _Window:
  """A window that the device was given, until its episodes know of it.

  Attributes:
    slots: those that may sample in it, as far as the host knows.
    version: of the policy.
    given: when the device got it, in monotonic seconds.
    state: of all slots after it; on the device until it is read.
    out: what was sampled; likewise.
    is_read: whether the device is done with it, and the scheduler's state is as here.
  """

  slots: set[int]
  version: int
  given: float
  state: sampler.SamplerState
  out: sampler.Sampled
  is_read: bool = False


class Scheduler:
  """A fixed number of slots on one replica of the model, one running episode each."""

  def __init__(
    self,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    partitioner: Partitioner | None = None,
    constraint: Constraint | None = None,
    own_top_p: bool = False,
  ):
    """Prepares the slots; the cache is allocated when the first episode starts.

    Args:
      model: the architecture as it decodes, its layers unrolled.
      automaton: where decoding stops.
      config: slots, window and limits.
      partitioner: the replica's, one of `Partitioner.replicas`; None on one device.
      constraint: what may be sampled; everything where None.
      own_top_p: whether episodes may have a top_p of their own, in other programs.
    """
    self.model = model
    self.partitioner = partitioner
    self.config = config
    self.slots = config.slots
    self.inject_rows = min(config.inject_rows, config.slots)
    # A CPU computes with the very cores that Python needs: nothing is gained there, and
    # a slot that stopped would miss a window.
    self._on = platform(partitioner)
    on_cpu = self._on == "cpu"
    self._most_in_flight = config.in_flight or (1 if on_cpu else 2)
    # A CPU's cache grows: of programs for all of its sizes few come to be used.
    self.compiles_ahead = not on_cpu
    self._page_counts: list[int] = []
    self._own_top_p = own_top_p
    self._truncation = config.truncation
    if own_top_p:
      self._truncation = dataclasses.replace(config.truncation, top_p=1.0)
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
    self._whole = partitioner.sharding("") if partitioner else None
    self._tables = jax.device_put(tables, self._whole)
    self._join = jax.jit(sampler.join, out_shardings=self._whole)
    self.clear()

  def clear(self) -> None:
    """Forgets all episodes, the policy and the cache."""
    B = self.slots
    self._cache: SlotCache | None = None
    self._params: Any = None
    self._version = 0
    # New episodes that wait for pages, with their prompts.
    self._waiting: list[tuple[Episode, list[int]]] = []
    self._episodes: list[Episode | None] = [None] * B
    # Of each slot: how many episodes started before its own, what was sampled since the
    # last stop, the ids that are to be taken instead of sampling, and from which place.
    self._age = [0] * B
    self._started = 0
    self._ids: list[list[int]] = [[] for _ in range(B)]
    self._logps: list[list[float]] = [[] for _ in range(B)]
    self._forced: list[list[int]] = [[] for _ in range(B)]
    self._forced_from = [0] * B
    # Of slots what their tools said, until it is appended.
    self._observations: dict[int, list[int]] = {}
    # Of slots whose episodes are paused: whether they sampled, and what they hold.
    self._paused: dict[int, tuple[bool, OnHost]] = {}
    # Tool calls that run, by slot; those that the last window made; its seconds.
    self._calls: dict[int, concurrent.futures.Future] = {}
    self._new_calls: list[concurrent.futures.Future] = []
    self._window_seconds = 0.0
    # Windows whose episodes do not know of them yet, the oldest first.
    self._windows: list[_Window] = []
    # When the last window that was read had ended; since when the device is known to
    # have nothing to do.
    self._window_ended = 0.0
    self._waited_until = 0.0
    self._idle_since: float | None = None
    # The slots as the host knows them: after the last window that was read.
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
      top_p_B=np.ones(B, np.float32) if self._own_top_p else None,
    )

  def drop(self, episode: Episode) -> None:
    """Frees the slot of an episode, if it has one; its tool call goes on for nobody."""
    self._waiting = [each for each in self._waiting if each[0] is not episode]
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

    The stops are those of the window before where another one may be in flight.

    Args:
      policy: one of `decoding_views`. Running episodes go on with a newer one from
        this window; what is in the cache stays there, as in PipelineRL's in-flight
        updates (arXiv 2509.19128).
      version: of the policy.
      new: episodes for free slots.

    Returns:
      The episodes that ended.

    Raises:
      ValueError: a prompt leaves no room in `rollout.max_len`, or the device none for a
        trajectory of that length.
    """
    if self._cache is None:
      self._make_cache(policy)
    if policy is not self._params:
      self._params = policy
      # The older policy has read what is there: who runs goes on from it, but no new
      # episode starts with it.
      self._cache.forget_prompts()
    self._version = version
    for episode in new:
      self._waiting.append((episode, self._prompt(episode)))
    self._resume()
    self._start()
    self._wait_for_tools()
    ended = self._inject()
    sampling = bool(self._state.active_B.any())
    if sampling:
      self._sample()
    while self._windows and (
      self._windows[0].is_read
      or not sampling
      or len(self._windows) >= self._most_in_flight
    ):
      ended += self._hand_out()
    return ended

  def _make_cache(self, policy: Any) -> None:
    """Allocates the pages; before the first time compiles what will run on them."""
    config = self.config
    counts = slot_cache.page_counts(
      self.model, config.slots, config.max_len, config.memory, self.partitioner
    )
    # Another number of pages would be other programs. What a device has left differs a
    # little from step to step: as long as there is room, it stays what it was.
    if self._page_counts and self._page_counts[-1] <= counts[-1]:
      counts = self._page_counts
    self._cache = SlotCache(
      self.model, config.slots, config.max_len, counts, self.partitioner
    )
    if self.compiles_ahead and counts != self._page_counts:
      calls = programs.device_calls(config, self._on, counts)
      lowered = [functools.partial(self._lower, call, policy) for call in calls]
      compiling.compile_all("the sampler", lowered, replica_on=self._on)
    self._page_counts = counts

  def _lower(self, call: programs.DeviceCall, policy: Any) -> jax.stages.Lowered:
    """Traces a program with arguments as it gets them later."""
    table_BC = np.full((call.rows, call.blocks), -1, np.int32)
    token_BT = np.zeros((call.rows, call.tokens), np.int32)
    model = (self.model, policy, self._cache.kv)
    if call.function == "extend":
      row_B = np.zeros(call.rows, np.int32)
      return sampler.extend.lower(
        *model, table_BC, token_BT, row_B, row_B, self.partitioner
      )
    return sampler.window.lower(
      *model,
      table_BC,
      self._after_last(),
      self._tables,
      token_BT,
      self.partitioner,
      self._truncation,
    )

  def _prompt(self, episode: Episode) -> list[int]:
    ids = episode.start()
    if len(ids) >= self.config.max_len:
      raise ValueError(
        f"a prompt of {len(ids)} tokens leaves no room in rollout.max_len="
        f"{self.config.max_len}; raise it or drop the task"
      )
    return ids

  def _live(self) -> list[int]:
    """Slots whose episodes are not paused, the oldest first."""
    slots = []
    for slot, episode in enumerate(self._episodes):
      if episode is not None and slot not in self._paused:
        slots.append(slot)
    return sorted(slots, key=self._age.__getitem__)

  def _start(self) -> None:
    """Puts episodes into free slots; what prompts have in common is prefilled once."""
    prefills: list[_Given] = []
    started: list[tuple[int, list[int]]] = []
    free = [slot for slot, e in enumerate(self._episodes) if e is None]
    while self._waiting and len(started) < len(free):
      slot = free[len(started)]
      episode, ids = self._waiting[0]
      given = ids[:-1]  # the last stays pending: sampling starts from it
      # Who was paused comes first.
      known = None if self._paused else self._cache.place(slot, given)
      if known is None:
        break
      del self._waiting[0]
      self._episodes[slot] = episode
      self._age[slot] = self._started
      self._started += 1
      self._state.seed_B[slot] = episode.seed
      self._state.sequence_B[slot] = episode.sequence
      self._state.temperature_B[slot] = episode.temperature
      if self._own_top_p:
        own = episode.top_p
        self._state.top_p_B[slot] = self.config.top_p if own is None else own
      self._state.length_B[slot] = 0
      self._state.grammar_B[slot] = 0
      started.append((slot, ids))
      if known < len(given):
        # Another slot may prefill what it begins with, here and now: after that.
        prefills.append(_Given(slot, given[known:], known, known // slot_cache.PIECE))
        self.counters.copied_tokens += known
        self.counters.prefilled_tokens += len(ids) - known
      else:
        self.counters.copied_tokens += len(ids)
    self._extend(prefills)
    self._cache.copy(prefilled=self.config.max_len)
    for slot, ids in started:
      self._append(slot, ids)

  def _make_room(self, slot: int, places: int) -> bool:
    """Gives a slot pages for its first places; younger episodes pause for it.

    Returns:
      Whether it has them; where not, it is the youngest itself, and paused.
    """
    while not self._cache.reach(slot, places):
      self._read_windows()  # what somebody holds can only be taken as it is now
      youngest = self._live()[-1]
      self._pause(youngest)
      if youngest == slot:
        return False
    return True

  def _pause(self, slot: int) -> None:
    """Takes an episode's pages; what they hold waits on the host."""
    held = self._cache.to_host(slot, int(self._state.length_B[slot]))
    self._paused[slot] = (bool(self._state.active_B[slot]), held)
    self._state.active_B[slot] = False
    self.counters.pauses += 1

  def _resume(self) -> None:
    """Has paused episodes go on, the oldest first, as far as there is room."""
    for slot in sorted(self._paused, key=self._age.__getitem__):
      active, held = self._paused[slot]
      if not self._cache.from_host(slot, held):
        return
      del self._paused[slot]
      self._state.active_B[slot] = active

  def _wait_for_tools(self) -> None:
    began = time.monotonic()
    if self._state.active_B.any():
      # Most tools answer in far less time than a window takes, and a slot that just
      # misses one idles for all of it: a short wait for them is well spent. But once
      # only, or one tool that hangs would delay every window of the others.
      patience = self._window_seconds / 8
      if self._windows:  # the device has work meanwhile
        patience = self._window_ended + self._window_seconds / 2 - began
      concurrent.futures.wait(self._new_calls, timeout=max(0.0, patience))
      self._new_calls = []
    elif self._windows:
      pass  # what is in flight tells who has stopped
    elif self._calls:
      # Not for as long as a tool takes: there may be new episodes for free slots.
      calls = [call for slot, call in self._calls.items() if slot not in self._paused]
      concurrent.futures.wait(
        calls, _POLL_S, return_when=concurrent.futures.FIRST_COMPLETED
      )
    self._waited_until = time.monotonic()
    waited = self._waited_until - began
    self.timings.tools += waited
    if self._idle_since is not None:
      self._idle_since += waited

  def _inject(self) -> list[Episode]:
    """Appends the observations of calls that are done; returns who ended by one."""
    # --- What episodes make of the results.
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
      else:
        self._observations[slot] = ids

    # --- Where they go; one that is paused, or is now, keeps its own for later.
    rows: list[_Given] = []
    appended: list[tuple[int, list[int]]] = []
    for slot in self._live():
      if slot not in self._observations or slot in self._paused:
        continue
      length = int(self._state.length_B[slot])
      # The token that was sampled last is not in the cache yet.
      ids = [int(self._state.pending_B[slot]), *self._observations[slot]]
      if not self._make_room(slot, length + len(ids) - 1):
        continue
      rows.append(_Given(slot, ids[:-1], length))
      appended.append((slot, ids))
      self.counters.prefilled_tokens += len(self._observations.pop(slot))
      # The grammar reads no observation: it goes on from where the call left it.
      if self._resume_S is not None:
        state = self._state.grammar_B[slot]
        self._state.grammar_B[slot] = self._resume_S[state]
    self._extend(rows)
    for slot, ids in appended:
      self._append(slot, ids)
    return ended

  def _extend(self, rows: list[_Given]) -> None:
    """Runs given tokens, as many rows at once as there are, in pieces."""
    began = time.monotonic()
    # Pieces of one length bucket run together; a slot's later ones after its first.
    turns: dict[int, dict[int, list[_Given]]] = {}
    most = slot_cache.PIECE
    for row in rows:
      for i, begin in enumerate(range(0, len(row.ids), most)):
        ids = row.ids[begin : begin + most]
        piece = _Given(row.slot, ids, row.start + begin)
        batches = turns.setdefault(row.turn + i, {})
        batches.setdefault(programs.token_bucket(len(ids)), []).append(piece)
    for turn, batches in sorted(turns.items()):
      self._cache.copy(prefilled=turn * most)
      for length, batch in batches.items():
        rows = programs.most_rows(length, self.inject_rows, self._on)
        for i in range(0, len(batch), rows):
          self._extend_batch(batch[i : i + rows], length, rows)
    self.timings.decode += time.monotonic() - began

  def _extend_batch(self, pieces: list[_Given], length: int, rows: int) -> None:
    """Runs pieces, each filled up to a length, as rows of a call that may have more."""
    R = programs.row_bucket(len(pieces), rows, self._on)
    end = max(piece.start + len(piece.ids) for piece in pieces)
    blocks = programs.block_bucket(end, self.config.max_len, self._on)
    table_BC = self._cache.table_BC[:, :blocks]
    # Rows that are not used have no pages: they are written nowhere.
    table_RC = np.full((R, table_BC.shape[1]), -1, np.int32)
    token_RT = np.zeros((R, length), np.int32)
    start_R = np.zeros(R, np.int32)
    count_R = np.zeros(R, np.int32)
    for r, piece in enumerate(pieces):
      table_RC[r] = table_BC[piece.slot]
      start_R[r] = piece.start
      count_R[r] = len(piece.ids)
      token_RT[r, : len(piece.ids)] = piece.ids
    self._count_idle()
    self._cache.kv = sampler.extend(
      self.model,
      self._params,
      self._cache.kv,
      table_RC,
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
    self._forced_from[slot] = int(self._state.length_B[slot])

  def _sample(self) -> None:
    """Gives the device a window for all active slots."""
    # --- Pages for all that the windows that are not read yet, and this one, may write.
    W = self.config.window
    for slot in self._live():
      # A younger one may have been paused for an older one's pages by now.
      if self._state.active_B[slot]:
        end = int(self._state.length_B[slot]) + W * (1 + len(self._unread(slot)))
        self._make_room(slot, min(end, self.config.max_len))
    # --- What each slot may do.
    slots = set(np.flatnonzero(self._state.active_B).tolist())
    forced_BW = np.full((self.slots, W), -1, np.int32)
    for slot in slots:
      # A limit may change while the episode runs: 0 is how it is called off.
      self._state.limit_B[slot] = min(self._episodes[slot].limit, self.config.max_len)
      # A slot that is still active in a window that is not read samples all of it.
      length = int(self._state.length_B[slot]) + W * len(self._unread(slot))
      rest = self._forced[slot][length - self._forced_from[slot] :][:W]
      forced_BW[slot, : len(rest)] = rest
    # --- The device.
    self._count_idle()
    began = time.monotonic()
    state = self._after_last()
    self._cache.kv, state, out = sampler.window(
      self.model,
      self._params,
      self._cache.kv,
      self._cache.table_BC.copy(),  # the host goes on while the device reads it
      state,
      self._tables,
      forced_BW,
      self.partitioner,
      self._truncation,
    )
    self._windows.append(_Window(slots, self._version, began, state, out))
    self.timings.decode += time.monotonic() - began

  def _after_last(self) -> sampler.SamplerState:
    """The slots for the device: as the last window leaves those that are in it."""
    if self._most_in_flight == 1:
      return self._state
    # A copy: the host goes on while the device reads it.
    host = jax.device_put(jax.tree.map(np.copy, self._state), self._whole)
    last = host
    goes_on_B = np.zeros(self.slots, bool)
    if self._windows and not self._windows[-1].is_read:
      last = self._windows[-1].state
      goes_on_B[list(self._windows[-1].slots)] = True
    return self._join(last, host, goes_on_B)

  def _count_idle(self) -> None:
    """Counts the seconds that end now, in which the device had nothing to do."""
    now = time.monotonic()
    last = self._windows[-1] if self._windows else None
    if last and not last.is_read and last.out.count_B.is_ready():
      # It ended unseen: the one before took about as long. Tools were waited for since.
      self._idle_since = max(
        self._window_ended + self._window_seconds, self._waited_until
      )
    if self._idle_since is not None:
      self.timings.host += max(0.0, now - self._idle_since)
      self._idle_since = None

  def _unread(self, slot: int) -> list[_Window]:
    """Windows in flight in which a slot may sample."""
    return [w for w in self._windows if not w.is_read and slot in w.slots]

  def _read_windows(self, most: int | None = None) -> None:
    """Waits for windows in flight; the state of their slots is that after the last."""
    for i, window in enumerate(self._windows[:most]):
      if window.is_read:
        continue
      began = time.monotonic()
      window.state, window.out = jax.device_get((window.state, window.out))
      window.is_read = True
      now = time.monotonic()
      self.timings.decode += now - began
      self._window_seconds = now - max(self._window_ended, window.given)
      self._window_ended = now
      if window is self._windows[-1]:
        self._idle_since = now
      slots = list(window.slots)
      for mine_B, new_B in zip(
        jax.tree.leaves(self._state), jax.tree.leaves(window.state), strict=True
      ):
        mine_B[slots] = new_B[slots]
      stopped = {slot for slot in slots if not window.state.active_B[slot]}
      for later in self._windows[i + 1 :]:
        later.slots -= stopped

  def _hand_out(self) -> list[Episode]:
    """Gives episodes what the oldest window sampled; they say what happens at a stop.

    Returns:
      The episodes that ended.
    """
    self._read_windows(1)
    window = self._windows.pop(0)
    out = window.out
    self.counters.windows += 1
    self.counters.sampled_tokens += int(out.count_B.sum())
    self.counters.slot_steps += int(out.count_B.max()) * len(self._episodes)
    ended: list[Episode] = []
    for slot in sorted(window.slots):
      count = out.count_B[slot]
      episode = self._episodes[slot]
      episode.version = window.version
      self._ids[slot] += out.token_BW[slot, :count].tolist()
      self._logps[slot] += out.logp_BW[slot, :count].tolist()
      if window.state.active_B[slot]:
        episode.progress(self._ids[slot])
        continue
      stop = int(out.stop_B[slot])
      tag = self._tags[stop - 1] if stop else None  # None at the token limit
      future = episode.sampled(self._ids[slot], self._logps[slot], tag)
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
    self._observations.pop(slot, None)
    self._paused.pop(slot, None)
    for window in self._windows:
      window.slots.discard(slot)
    self._cache.release(slot)
    return episode


def on_device(constraint: Constraint | None) -> TokenMask | None:
  """The tables that the sampler and the learner look into."""
  if constraint is None:
    return None
  return TokenMask(*jax.device_put((constraint.class_V, constraint.next_SC)))

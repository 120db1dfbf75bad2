"""Which trajectory sits in which slot, and when it goes on.

Host code only: it moves token ids between episodes and the sampler, and never touches
a tensor of the model. A slot whose episode waits for a tool keeps its cache and stays
idle; the others go on decoding. Every given token is prefilled exactly once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from coa_jax.model import qwen
from coa_jax.model.architecture import QwenConfig
from coa_jax.model.distribution import Constraint, Truncation
from coa_jax.model.sharding import Layout
from coa_jax.protocol import automaton as automata
from coa_jax.protocol import prompts, roles
from coa_jax.rollout import sampler


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Config section `rollout`.

  Attributes:
    variant: the protocol's dialect; its tools are those of section `tools`.
    style: of the prompt: full, or brief for models trained from scratch.
    slots: trajectories decoded together.
    window: tokens sampled between two looks at the tools.
    max_len: S, tokens a trajectory may have in all.
    max_calls: tool calls a trajectory may make.
    tool_seconds: seconds of tool time a trajectory may spend.
    inject_rows: slots that receive given tokens in one call of the device.
    constrain: sample only what the variant's grammar allows.
    top_k: sample from the most likely tokens; 0 for all.
    top_p: sample from the most likely tokens of this probability in all; 1 for all.
    min_p: sample from tokens at least this share as likely as the likeliest.
    seed: of all sampling.
  """

  variant: str = "unified"
  style: str = "full"
  slots: int = 64
  window: int = 8
  max_len: int = 320
  max_calls: int = 8
  tool_seconds: float = 60.0
  inject_rows: int = 16
  constrain: bool = False
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self):
    for field in ("slots", "window", "max_len", "inject_rows"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
    prompts.instructions(roles.get_variant(self.variant), self.style)
    _ = self.truncation  # refuses what it can not mean

  @property
  def truncation(self) -> Truncation:
    """Which tokens may be drawn."""
    return Truncation(self.top_k, self.top_p, self.min_p)


class Episode(Protocol):
  """What the scheduler asks of one trajectory; tokens in, tokens out."""

  sequence: int  # keys its randomness; unique in a run
  temperature: float

  def start(self) -> list[int]:
    """The prompt's ids."""

  def progress(self, ids: list[int]) -> None:
    """Told after a window that did not stop it what was sampled since `sampled`."""

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future | None:
    """Takes what was sampled since the last call.

    `tag` is the closing tag that stopped decoding, or None at the token limit. Returns
    a future to wait for, or None when the episode is over.
    """

  def observed(self, result: Any) -> list[int] | None:
    """Takes the future's result; returns ids to append, or None when it is over."""

  def out_of_room(self) -> None:
    """Told that the ids to append would exceed the token limit; it is over."""

  def lost(self) -> None:
    """Told that the engine can not sample for it any more; it is over."""


@dataclasses.dataclass
class Counters:
  """What the device was asked to do since the scheduler was made."""

  prefilled_tokens: int = 0
  sampled_tokens: int = 0
  windows: int = 0
  slot_steps: int = 0  # decode steps times slots: sampled_tokens / this is utilisation
  removed_mass: float = 0.0  # probability the grammar took away, summed over tokens

  def removed_since(self, before: Counters) -> float:
    """The mean probability that the grammar took from a token since then."""
    tokens = self.sampled_tokens - before.sampled_tokens
    return (self.removed_mass - before.removed_mass) / max(tokens, 1)


class Scheduler:
  """Runs episodes over a fixed number of slots."""

  def __init__(
    self,
    model: QwenConfig,
    automaton: automata.Automaton,
    config: RolloutConfig,
    layout: Layout | None = None,
    constraint: automata.Constraint | None = None,
  ):
    """Allocates the cache.

    Args:
      model: the architecture; layers are unrolled for decoding.
      automaton: where decoding stops.
      config: slots, window and limits.
      layout: of the policy, on several devices.
      constraint: what may be sampled; everything where None.

    Raises:
      ValueError: the mesh does not divide the slots or the rows of an injection.
    """
    self.model = dataclasses.replace(model, scan=False, remat="none")
    self.layout = layout.decoding() if layout else None
    if self.layout:
      self.layout.check(model, B=math.gcd(config.slots, config.inject_rows))
    self.config = config
    self.counters = Counters()
    self._tags = automaton.tags
    self._resume_S = constraint.resume_S if constraint else None
    self._tables = sampler.Tables(
      *jax.device_put((automaton.class_V, automaton.next_SC, automaton.stop_SC)),
      constraint=on_device(constraint),
    )
    size = (config.slots, config.max_len)
    self._cache = qwen.init_cache(self.model, *size, self.layout)

  def run(
    self, params: Any, episodes: Iterable[Episode | None], seed: int
  ) -> Iterator[Episode]:
    """Decodes every episode to its end, yielding each as it ends.

    Args:
      params: the policy, stacked or not.
      episodes: taken in order as slots fall free; None says that there is none now,
        while others are still running.
      seed: of this run's sampling; an episode's tokens depend on (seed, its sequence,
        params, what its tools said) alone.
    """
    view = qwen.decoding_view(self.model, params, self.layout)
    run = _Run(self, view, iter(episodes), seed)
    while run.fill():
      yield from run.step()


class _Run:
  """The state of one `Scheduler.run`."""

  def __init__(
    self, owner: Scheduler, params: Any, queue: Iterator[Episode], seed: int
  ):
    B = owner.config.slots
    self.owner = owner
    self.params = params
    self.queue = queue
    self.key = jax.random.key(seed)
    self.window_seconds = 0.0  # of the last one
    self.episodes: list[Episode | None] = [None] * B
    self.waiting: dict[int, concurrent.futures.Future] = {}
    self.ids: list[list[int]] = [[] for _ in range(B)]
    self.logps: list[list[float]] = [[] for _ in range(B)]
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
    given = []
    for slot, episode in enumerate(self.episodes):
      if episode is not None:
        continue
      episode = next(self.queue, None)
      if episode is None:
        break
      ids = episode.start()
      if len(ids) >= self.owner.config.max_len:
        raise ValueError(
          f"a prompt of {len(ids)} tokens leaves no room in rollout.max_len="
          f"{self.owner.config.max_len}; raise it or drop the task"
        )
      self.episodes[slot] = episode
      self.state.sequence_B[slot] = episode.sequence
      self.state.temperature_B[slot] = episode.temperature
      self.state.length_B[slot] = 0
      self.state.grammar_B[slot] = 0
      given.append((slot, ids))
    self._extend(given, fresh=True)
    return any(e is not None for e in self.episodes)

  def step(self) -> Iterator[Episode]:
    """One round: finished tools go in, one window is sampled, stops are handled."""
    if self.state.active_B.any():
      # Most tools answer in far less time than a window takes, and a slot that just
      # misses one idles for all of it: a short wait for them is well spent.
      concurrent.futures.wait(self.waiting.values(), timeout=self.window_seconds / 8)
    else:
      concurrent.futures.wait(
        self.waiting.values(), return_when=concurrent.futures.FIRST_COMPLETED
      )
    yield from self._inject()
    if self.state.active_B.any():
      yield from self._sample()

  def _inject(self) -> Iterator[Episode]:
    given = []
    for slot in [s for s, f in self.waiting.items() if f.done()]:
      episode = self.episodes[slot]
      ids = episode.observed(self.waiting.pop(slot).result())
      # One more place, so that at least one token can be sampled after them.
      room = self.owner.config.max_len - int(self.state.length_B[slot]) - 2
      if ids is not None and len(ids) > room:
        episode.out_of_room()
        ids = None
      if ids is None:
        yield self._free(slot)
      else:
        if self.owner._resume_S is not None:
          state = self.state.grammar_B[slot]
          self.state.grammar_B[slot] = self.owner._resume_S[state]
        given.append((slot, ids))
    self._extend(given, fresh=False)

  def _extend(self, given: list[tuple[int, list[int]]], fresh: bool) -> None:
    """Appends ids to slots, in batches of one row bucket and one length bucket."""
    batches: dict[int, list[tuple[int, list[int]]]] = {}
    for slot, ids in given:
      if not fresh:
        ids = [int(self.state.pending_B[slot]), *ids]
      # The last token stays pending: running it is what the next sample starts from.
      batches.setdefault(_bucket(len(ids) - 1), []).append((slot, ids))
    R = self.owner.config.inject_rows
    for length, rows in batches.items():
      for i in range(0, len(rows), R):
        self._extend_batch(rows[i : i + R], length)
    self.owner.counters.prefilled_tokens += sum(len(ids) for _, ids in given)

  def _extend_batch(self, rows: list[tuple[int, list[int]]], length: int) -> None:
    config, s = self.owner.config, self.state
    R = config.inject_rows
    row_R = np.full(R, config.slots, np.int32)
    token_RT = np.zeros((R, length), np.int32)
    start_R = np.zeros(R, np.int32)
    count_R = np.zeros(R, np.int32)
    for r, (slot, ids) in enumerate(rows):
      count = len(ids) - 1
      row_R[r], start_R[r], count_R[r] = slot, s.length_B[slot], count
      token_RT[r, :count] = ids[:-1]
      s.length_B[slot] += count
      s.pending_B[slot] = ids[-1]
      s.automaton_B[slot] = 0
      s.active_B[slot] = True
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

  def _sample(self) -> Iterator[Episode]:
    owner, before = self.owner, self.state.active_B
    began = time.monotonic()
    owner._cache, state, out = sampler.window(
      owner.model,
      owner.config.window,
      self.params,
      owner._cache,
      self.state,
      owner._tables,
      self.key,
      owner.layout,
      owner.config.truncation,
    )
    self.state, out = jax.tree.map(np.array, (state, out))
    self.window_seconds = time.monotonic() - began
    owner.counters.windows += 1
    owner.counters.sampled_tokens += int(out.count_B.sum())
    owner.counters.removed_mass += float(out.removed_B.sum())
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
        yield self._free(slot)
      else:
        self.waiting[slot] = future

  def _free(self, slot: int) -> Episode:
    episode, self.episodes[slot] = self.episodes[slot], None
    self.state.active_B[slot] = False
    return episode


def on_device(constraint: automata.Constraint | None) -> Constraint | None:
  """The tables that the sampler and the learner look into."""
  if constraint is None:
    return None
  return Constraint(*jax.device_put((constraint.class_V, constraint.next_SC)))


def _bucket(length: int) -> int:
  """The padded length of a run of given tokens: a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length()) if length > 0 else 16

"""Compares paged and dense caches: the real scheduler on a simulated device.

  python -m experiments.bench.pages [--quick] [--out=FILE.json]
    [--trajectories=runs/rl/trajectories/step_000000.jsonl]

Trajectories resemble an agent's: lengths are log-normal with mean 8k and maximum 32k
tokens; a group of 8 shares its prompt; a turn samples 200 tokens, then a tool returns
300. Tool times are drawn from a run's recorded calls (--trajectories), otherwise
log-normally (median 1 s, one in twenty above 10 s).

The scheduler is the real one (`coa_jax.rollout.scheduler`); a clock replaces the
device's programs. A decoding step takes the longer of a chip's time to read weights,
keys and values, and its time for the arithmetic; prefill takes its arithmetic. The
measurement ends when the last trajectory gets a slot. Contestants are

  pages   a pool that fills the memory, up to 1,024 slots, read page by page
  dense   rows of 32k tokens that fill the memory, each read up to the longest
          trajectory, rounded up to a power of two

so their ratio compares floors, not measured times. A hybrid's `pages` have as many
slots as fit with their states and MEAN tokens each; a step reads and writes the active
slots' states.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.model import cache as caching
from coa_jax.model.config import ModelConfig
from coa_jax.model.flops import products
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.model.variants import variant
from coa_jax.protocol.grammar.automaton import Automaton
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.rollout import sampler, slot_cache
from coa_jax.rollout.device_loop import DeviceLoop
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.rollout.types import Episode, RolloutConfig
from experiments.bench import program as bench
from experiments.bench.compile_check import CHIPS, Chip

LONGEST, MEAN, PROMPT, TURN, OBSERVATION, GROUP = 32_768, 8_192, 1_024, 200, 300, 8
WINDOW = 32


def _define_flags() -> None:
  # Not at import: other programs define the same flags, and tests import both.
  flags.DEFINE_string("trajectories", "", "Tool times are drawn from this file.")


@dataclasses.dataclass(frozen=True)
class Replica:
  """A group of chips that decodes together.

  `held`: GB per chip that the learner uses.
  """

  model: str
  generation: str
  chips: int
  held: float


# held: AdamW's float32 state over 16 chips, v5p:2x2x4 and v6e:4x4: 16 bytes for each
# parameter; parameters in billions.
CASES = {
  "qwen2.5-7b v5p": Replica("qwen2.5-7b", "v5p", 4, 16 * 7.6 / 16),
  "qwen3-8b v6e": Replica("qwen3-8b", "v6e", 4, 16 * 8.2 / 16),
  "qwen3.5-9b v6e": Replica("qwen3.5-9b", "v6e", 4, 16 * 9.0 / 16),
}


class Clock:
  """Simulated time, and the pending tool calls."""

  def __init__(self):
    self.now = 0.0
    self._calls: list[tuple[float, int, concurrent.futures.Future]] = []
    self._number = itertools.count()  # futures have no order

  def call(self, seconds: float) -> concurrent.futures.Future:
    """Returns a future that is done after `seconds`."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    heapq.heappush(self._calls, (self.now + seconds, next(self._number), future))
    return future

  def pass_by(self, seconds: float) -> None:
    """Advances the time; finishes due calls."""
    self.now += seconds
    while self._calls and self._calls[0][0] <= self.now:
      heapq.heappop(self._calls)[2].set_result(None)

  def wait(self) -> None:
    """Advances the time to the next finished call."""
    self.pass_by(max(0.0, self._calls[0][0] - self.now))


class Turns(Episode):
  """A trajectory with a given length: a prompt, then turns and observations."""

  seed = 0
  temperature = 1.0

  def __init__(self, sequence: int, length: int, clock: Clock, seconds: np.ndarray):
    self.sequence = sequence
    self.limit = PROMPT + TURN
    self._prompt = [3 + sequence // GROUP, *[3] * (PROMPT - 1)]
    self._length = min(length, LONGEST)
    self._clock = clock
    self._rng = np.random.default_rng(sequence)
    self._seconds = seconds

  def start(self) -> list[int]:
    return self._prompt

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future | None:
    if self.limit + OBSERVATION + TURN > self._length:
      return None
    self.limit += OBSERVATION + TURN
    return self._clock.call(float(self._rng.choice(self._seconds)))

  def observed(self, result: Any) -> list[int]:
    return [3] * OBSERVATION


class Device:
  """Replaces the sampler's programs; their seconds follow from arithmetic and traffic.

  `live` has (seconds, trajectories in memory) per window.
  """

  def __init__(self, model: ModelConfig, case: Replica, clock: Clock, dense: bool):
    self.chip: Chip = CHIPS[case.generation]
    self.clock = clock
    self.dense = dense
    self.parameters = sum(products(model)) / case.chips
    self.token = caching.row_bytes(model, 1) / case.chips
    rows = caching.state_rows(model, 4)  # with the snapshots of four slots
    self.state = caching.state_bytes(model, 4, ONE_DEVICE) / max(1, rows) / case.chips
    self.slot_states = self.state * rows / 4
    self.tokens = 0
    self.live: list[tuple[float, int]] = []

  def prefill(self, cfg, params, cache, table_RC, token_RT, start_R, count_R, *rest):
    """`sampler.prefill`."""
    self.clock.pass_by(2 * self.parameters * int(count_R.sum()) / self.chip.flops)
    return cache

  def window(self, cfg, params, cache, table_BC, state, tables, forced_BW, *rest):
    """`sampler.window`: every slot continues to its limit or the window's end."""
    B, W = forced_BW.shape
    room_B = np.maximum(state.limit_B - 1 - state.length_B, 0)
    count_B = np.where(state.active_B, np.minimum(W, room_B), 0).astype(np.int32)
    # --- Its duration.
    held_B = table_BC[:, 0] >= 0
    length_B = state.length_B[held_B | state.active_B]
    read = (state.length_B * state.active_B).sum()
    if self.dense:
      blocks = -(-int(length_B.max()) // caching.PAGE_SIZE)
      read = B * caching.PAGE_SIZE * 2 ** int(np.ceil(np.log2(blocks)))
    moved = 2 * self.parameters + self.token * read
    active = int(state.active_B.sum())
    moved += 2 * self.state * active
    flops = 2 * self.parameters * active
    step = max(moved / self.chip.hbm_rate, flops / self.chip.flops)
    seconds = int(count_B.max()) * step
    self.live.append((seconds, int(held_B.sum())))
    self.tokens += int(count_B.sum())
    self.clock.pass_by(seconds)
    # --- Its results.
    length_B = state.length_B + count_B
    state = state.replace(
      length_B=length_B, active_B=state.active_B & (length_B + 1 < state.limit_B)
    )
    filler = np.zeros((B, W))
    out = sampler.Sampled(filler.astype(int), filler, count_B, np.zeros(B, int))
    return cache, state, out


class NoCache:
  """Replaces `KVCache`: pages without memory."""

  shared = True

  def __init__(self, pages: int):
    self.pages = pages

  @classmethod
  def empty(cls, cfg, pages, page_size, partitioner=None, slots=0) -> NoCache:
    """`KVCache.empty`."""
    return cls(pages)

  def copy(self, from_X, to_X, partitioner=None) -> NoCache:
    """`KVCache.copy`."""
    return self

  def copy_states(self, from_X, to_X, partitioner=None) -> NoCache:
    """`KVCache.copy_states`."""
    return self

  def to_host(self, pages: Sequence[int]) -> list:
    """`KVCache.to_host`."""
    return []

  def from_host(self, pages, contents, partitioner=None) -> NoCache:
    """`KVCache.from_host`."""
    return self


def simulate(
  case: Replica, dense: bool, lengths: Sequence[int], seconds: np.ndarray
) -> dict[str, Any]:
  """Plays trajectories of `lengths` tokens, with tool times drawn from `seconds`.

  Returns a table row. `dense` cache rows are contiguous, without pages.
  """
  # --- The memory that the learner, weights and logits leave.
  model = variant(case.model, dtype="bfloat16")
  clock = Clock()
  device = Device(model, case, clock, dense)
  room = 0.95 * device.chip.hbm - 1e9 * case.held - 2 * device.parameters
  room -= 2**30  # logits and temporaries
  slots = min(1024, len(lengths) // 2)
  if dense:
    slots = int(room / (device.slot_states + LONGEST * device.token))
  elif device.state:
    slots = min(slots, int(room / (device.slot_states + MEAN * device.token)))
  room -= slots * device.slot_states
  pages = int(room / (caching.PAGE_SIZE * device.token))
  config = RolloutConfig(slots=slots, window=WINDOW, max_len=LONGEST)

  # --- Rounds until the last trajectory gets a slot.
  automaton = Automaton(
    np.zeros(8, int), np.zeros((1, 1), int), np.zeros((1, 1), int), ()
  )
  waiting = [Turns(n, length, clock, seconds) for n, length in enumerate(lengths)]
  running = 0
  with (
    mock.patch.object(sampler, "prefill", device.prefill),
    mock.patch.object(sampler, "window", device.window),
    mock.patch.object(slot_cache, "KVCache", NoCache),
    mock.patch.object(slot_cache, "page_counts", lambda *_: [pages]),
  ):
    device_loop = DeviceLoop(model, automaton, config)
    replica = Scheduler(device_loop)
    while waiting:
      new = waiting[: slots - running]
      waiting = waiting[len(new) :]
      running += len(new)
      windows = replica.counters.windows
      running -= len(replica.round("policy", 0, new))
      if replica.counters.windows == windows:  # all wait for tools
        clock.wait()

  total = sum(s for s, _ in device.live)
  return {
    "contestant": "dense" if dense else "pages",
    "live": sum(s * n for s, n in device.live) / total,
    "pauses": replica.counters.pauses,
    "rate": device.tokens / clock.now / case.chips,
    "busy": 100 * total / clock.now,
    "seconds": clock.now,
  }


def run() -> dict[str, Any]:
  """Runs the selected cases; returns the table and the ratios."""
  # --- Drawn lengths; drawn or recorded tool times.
  rng = np.random.default_rng(0)
  count = 512 if bench.QUICK.value else 4096
  lengths = MEAN * np.exp(rng.normal(-0.5 * 0.8**2, 0.8, count))
  lengths = np.clip(lengths, PROMPT + TURN, LONGEST).astype(int).tolist()
  seconds = np.exp(rng.normal(0.0, 1.4, 10_000))
  file = flags.FLAGS.trajectories
  if file:
    calls = [c.seconds for t in read_trajectories(file) for c in t.calls]
    if not calls:
      raise ValueError(f"--trajectories={file}: no trajectory in it calls a tool")
    seconds = np.array(calls)

  # --- Both contestants, on every replica.
  rows = []
  ratios = {}
  for name, case in bench.chosen(CASES).items():
    dense = simulate(case, True, lengths, seconds)
    pages = simulate(case, False, lengths, seconds)
    for row in (dense, pages):
      rows.append({"case": name, **row})
      print(f"{name} {row['contestant']}: {row['rate']:.0f}", flush=True)
    for what in ("live", "rate"):
      ratios[f"{name}: {what}"] = pages[what] / dense[what]
  return {"table": rows, "ratios": ratios}


_COLUMNS = {
  "case": "case",
  "contestant": "rows as",
  "live": "live trajectories",
  "pauses": "pauses",
  "rate": "tokens/s a chip",
  "busy": "device busy %",
  "seconds": "seconds",
}
NOTE = "Simulated: floors of a chip, not measured times."

if __name__ == "__main__":
  _define_flags()
  run_program(bench.program(run, "Pages", _COLUMNS, NOTE))

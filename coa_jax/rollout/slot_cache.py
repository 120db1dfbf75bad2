"""A replica's cache by slot: each slot has pages, some of them shared, and states.

`SlotCache` joins the device's pages (`model.cache.KVCache`) and their ownership
(`rollout.pages`), so that both change together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coa_jax.model import cache as caching
from coa_jax.model import memory
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.memory import CacheConfig
from coa_jax.model.sharding import Partitioner
from coa_jax.rollout import pages as paging
from coa_jax.rollout.pages import PagePool, Snapshots, pool_sizes, prefix_keys

# Maximum pages per copy.
_COPIED = 16


@dataclasses.dataclass(frozen=True)
class OnHost:
  """A slot's page contents, in host memory.

  Attributes:
    pages: number of pages.
    contents: for `KVCache.from_host`.
  """

  pages: int
  contents: list[list[np.ndarray]]


class Prefill(NamedTuple):
  """Tokens to append to a slot, which has pages for them.

  Attributes:
    slot: the slot's index.
    ids: the tokens.
    start: position of the first token.
    turn: order among prompt pieces; lower turns run first.
  """

  slot: int
  ids: list[int]
  start: int
  turn: int = 0


class _Copy(NamedTuple):
  """A page's or a state row's copy, due once `end` places of a prompt are prefilled."""

  end: int
  source: int
  target: int


class SlotCache:
  """Keys, values and states for a fixed number of slots.

  Attributes:
    kv: on the device; a caller passing it to a program stores the result back.
    table_BC: each slot's page per block; -1 for none.
  """

  def __init__(
    self,
    model: ModelConfig,
    config: CacheConfig,
    page_counts: Sequence[int],
    partitioner: Partitioner,
  ):
    """Allocates the minimum number of pages for the decoder `model`.

    Args:
      page_counts: the cache's possible numbers of pages, ascending.
    """
    slots = config.slots
    self._max_len = max_len = config.max_len
    self._partitioner = partitioner
    self._page_size = caching.page_size(max_len)
    blocks = caching.num_blocks(max_len, max_len)
    self._sizes = page_counts
    self.kv = KVCache.empty(model, self._sizes[0], self._page_size, partitioner, slots)
    self.table_BC = np.full((slots, blocks), -1, np.int32)
    self._pool = PagePool(self._sizes[0])
    self._pages: list[list[int]] = [[] for _ in range(slots)]
    self._copies: list[_Copy] = []  # of pages
    # Linear attention: each slot's states have a row; the other rows hold snapshots.
    self.state_rows = caching.state_rows(model, slots)
    self._snapshots = Snapshots(range(slots, self.state_rows))
    self._to_snapshots: list[_Copy] = []
    self._to_slots: list[_Copy] = []

  def forget_prompts(self) -> None:
    """Stops sharing older pages with new prompts: the policy changed."""
    self._pool.forget()
    self._snapshots.forget()

  def place(self, slot: int, given: list[int]) -> int | None:
    """Gives an empty slot pages for a prompt; equal prefixes share pages.

    Returns:
      The number of leading tokens that need no prefill, once other slots are prefilled
      up to there and `copy` has run; None, and no pages, if there is no room.
    """
    # --- Pages holding the prompt's prefix, or the whole prompt.
    piece = paging.PIECE
    if piece % self._page_size:
      piece = max(1, len(given))
    keys = prefix_keys(given, piece)
    found: list[list[int]] = []
    for key in keys:
      of_piece = self._pool.find(key)
      if of_piece is None:
        break
      found.append(of_piece)
    seen = len(found)
    while found and self.state_rows and keys[len(found) - 1] not in self._snapshots:
      self._pool.release(found.pop())  # useless without the states after them
    pages = list(itertools.chain(*found))
    known = min(len(found) * piece, len(given))

    # --- The slot's own pages. Pages with other readers are copied if they cannot be
    # shared; so is the last one, if partly filled, because it will be written.
    shared = known // self._page_size if self.kv.shared else 0
    copied = [page for page in pages[shared:] if self._pool.readers(page) > 1]
    blocks = caching.num_blocks(len(given), self._max_len)
    needed = blocks - len(pages) + len(copied)
    # Leave pages that other slots need soon; a pool able to grow does so then.
    room = self._pool.free + self._sizes[-1] - self._pool.size
    if room < needed + self._spare() or not self._make_room(needed):
      self._pool.release(pages)
      return None
    own = self._pool.take(needed)
    for page in copied:
      onto = own.pop()
      self._copies.append(_Copy(known, page, onto))
      pages[pages.index(page)] = onto
    self._give(slot, pages + own)

    # --- Register the pages for later prompts.
    per_piece = -(-piece // self._page_size)
    for i in range(-(-known // piece), len(keys)):
      self._pool.remember(keys[i], self._pages[slot][i * per_piece :][:per_piece])
    if self.state_rows and keys:
      if found:
        row = self._snapshots.row(keys[len(found) - 1])
        self._to_slots.append(_Copy(known, row, slot))
      # Snapshots: the whole prompt, for its group; a prefix met again, for others.
      for count in dict.fromkeys((len(keys), seen)):
        if count > len(found):
          self._take_snapshot(slot, keys[count - 1], min(count * piece, len(given)))
    return known

  def _take_snapshot(self, slot: int, key: bytes, end: int) -> None:
    """Registers a snapshot of a slot's states after `end` places, if a row is free."""
    pending = {copy.target for copy in self._to_snapshots}
    pending |= {copy.source for copy in self._to_slots}
    row = self._snapshots.take(key, pending)
    if row is not None:
      self._to_snapshots.append(_Copy(end, slot, row))

  def copy(self, prefilled: int) -> None:
    """Makes the copies registered by `place`: unsharable pages, and states.

    Args:
      prefilled: places prefilled in every prompt; copies beyond them stay pending.
    """
    for copies in (self._to_snapshots, self._to_slots):
      for from_X, to_X in _rows(_take_due(copies, prefilled), self.state_rows):
        self.kv = self.kv.copy_states(from_X, to_X, self._partitioner)
    due = _take_due(self._copies, prefilled)
    for from_X, to_X in _rows(due, self._pool.size):
      self.kv = self.kv.copy(from_X, to_X, self._partitioner)
    self._pool.release([copy.source for copy in due])

  def reach(self, slot: int, places: int) -> bool:
    """Gives a slot pages for its first `places`; False if too few are free."""
    more = caching.num_blocks(places, self._max_len) - len(self._pages[slot])
    if more > 0:
      if not self._make_room(more):
        return False
      self._give(slot, self._pool.take(more))
    return True

  def release(self, slot: int) -> None:
    """Releases a slot's pages."""
    self._pool.release(self._pages[slot])
    self._pages[slot] = []
    self.table_BC[slot] = -1

  def to_host(self, slot: int, places: int) -> OnHost:
    """Releases a slot's pages, and returns the contents of its first `places`."""
    pages = self._pages[slot][: caching.num_blocks(places, self._max_len)]
    contents = self.kv.to_host(pages)
    self.release(slot)
    return OnHost(len(pages), contents)

  def from_host(self, slot: int, held: OnHost) -> bool:
    """Restores a slot's contents; False if too few pages would stay free."""
    if not self._make_room(held.pages + self._spare()):
      return False
    self._give(slot, self._pool.take(held.pages))
    self.kv = self.kv.from_host(self._pages[slot], held.contents, self._partitioner)
    return True

  def _spare(self) -> int:
    """Counts slots that may need another page soon."""
    most = self.table_BC.shape[1]
    return sum(0 < len(pages) < most for pages in self._pages)

  def _make_room(self, pages: int) -> bool:
    """Grows the cache within its limit; returns whether N pages are free."""
    for size in self._sizes:
      if self._pool.free >= pages:
        break
      if size > self._pool.size:
        self._pool.grow(size)
    if self._pool.size > self.kv.pages:
      self.kv = self.kv.grow(self._pool.size, self._partitioner)
    return self._pool.free >= pages

  def _give(self, slot: int, pages: list[int]) -> None:
    self._pages[slot] += pages
    self.table_BC[slot, : len(self._pages[slot])] = self._pages[slot]


def _take_due(copies: list[_Copy], prefilled: int) -> list[_Copy]:
  """Removes the due copies from the pending ones, and returns them."""
  due = [copy for copy in copies if copy.end <= prefilled]
  copies[:] = [copy for copy in copies if copy.end > prefilled]
  return due


def _rows(copies: list[_Copy], nowhere: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields sources and targets for one call after another, padded with `nowhere`."""
  for i in range(0, len(copies), _COPIED):
    from_X = np.zeros(_COPIED, np.int32)
    to_X = np.full(_COPIED, nowhere, np.int32)
    for x, copy in enumerate(copies[i : i + _COPIED]):
      from_X[x] = copy.source
      to_X[x] = copy.target
    yield from_X, to_X


def page_counts(
  model: ModelConfig, config: CacheConfig, partitioner: Partitioner
) -> list[int]:
  """Lists a replica cache's possible numbers of pages: one if fixed.

  Raises:
    ValueError: there is no room for one trajectory of `rollout.max_len`.
  """
  # --- The slots' maximum pages.
  max_len = config.max_len
  blocks = caching.num_blocks(max_len, max_len)
  sizes = pool_sizes(config.slots, blocks)
  if not config.memory and partitioner.platform == "cpu":
    return sizes  # host memory is shared: none is taken before it is needed

  # --- Pages that fit.
  page = caching.page_bytes(model, caching.page_size(max_len), partitioner)
  room = memory.cache_room(model, config, partitioner)
  if room == math.inf:
    return sizes[-1:]
  if room < blocks * page:
    there = max(0, room) / 1e9
    raise ValueError(
      f"no room for one trajectory of rollout.max_len={max_len}: it takes "
      f"{blocks * page / 1e9:,.3g} GB of a device, and there are {there:,.3g} GB "
      f"(rollout.memory={config.memory:g}, 0 for all that is left); lower max_len, "
      "split the model further (rollout.tensor) or give the cache more"
    )
  return [min(int(room // page), sizes[-1])]

"""Page and state ownership in a replica's cache: bookkeeping on the host, no tensors.

A page belongs to all rows that read it, and is free once they have ended. Its prefilled
tokens stay registered until the page is allocated again, so rows with the same first
tokens read the same pages.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Container, Iterable, Sequence

import numpy as np

# Maximum tokens per slot in one prefill: activations grow with the tokens, and each
# length is a separate program.
PIECE = 512


class PagePool:
  """Counts each page's readers, and registers page contents."""

  def __init__(self, pages: int):
    """Starts with N pages, all free."""
    self._readers: list[int] = []
    # In allocation order: unregistered pages first, then the pages free the longest.
    self._free: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._pages_of: dict[bytes, list[int]] = {}
    self._key_of: dict[int, bytes] = {}
    self.grow(pages)

  @property
  def size(self) -> int:
    """Counts all pages."""
    return len(self._readers)

  @property
  def free(self) -> int:
    """Counts the pages without readers."""
    return len(self._free)

  def readers(self, page: int) -> int:
    """Counts the readers of a page."""
    return self._readers[page]

  def grow(self, pages: int) -> None:
    """Adds free pages, up to `pages` in all."""
    for page in range(self.size, pages):
      self._readers.append(0)
      self._free[page] = None

  def take(self, count: int) -> list[int]:
    """Allocates free pages to one reader; their contents are forgotten."""
    out = []
    for _ in range(count):
      page, _ = self._free.popitem(last=False)
      self._forget_key(self._key_of.get(page))
      self._readers[page] = 1
      out.append(page)
    return out

  def find(self, key: bytes) -> list[int] | None:
    """Returns the pages registered under a key, or None; adds a reader to each."""
    pages = self._pages_of.get(key)
    if pages is None:
      return None
    for page in pages:
      self._readers[page] += 1
      self._free.pop(page, None)
    return list(pages)

  def remember(self, key: bytes, pages: Iterable[int]) -> None:
    """Registers pages under a key; their earlier keys are forgotten."""
    pages = list(pages)
    for page in pages:
      self._forget_key(self._key_of.get(page))
    self._forget_key(key)
    self._pages_of[key] = pages
    for page in pages:
      self._key_of[page] = key

  def release(self, pages: Sequence[int]) -> None:
    """Removes one reader from each of a row's pages."""
    # Last page first: more prompts share the first pages, so these are kept longest.
    for page in reversed(pages):
      self._readers[page] -= 1
      if self._readers[page] == 0:
        self._free[page] = None
        if page not in self._key_of:
          self._free.move_to_end(page, last=False)

  def forget(self) -> None:
    """Forgets all pages' contents: another policy wrote them."""
    self._pages_of.clear()
    self._key_of.clear()

  def _forget_key(self, key: bytes | None) -> None:
    for page in self._pages_of.pop(key, ()):
      del self._key_of[page]


class Snapshots:
  """State rows, each registered under the prefix that led to its state."""

  def __init__(self, rows: Iterable[int]):
    """Starts with these rows, all free."""
    # Least recently used first; free rows have no key.
    self._key_of: collections.OrderedDict[int, bytes | None] = collections.OrderedDict(
      dict.fromkeys(rows)
    )
    self._row_of: dict[bytes, int] = {}

  def __contains__(self, key: bytes) -> bool:
    return key in self._row_of

  def row(self, key: bytes) -> int:
    """Returns the row registered under a prefix's key."""
    row = self._row_of[key]
    self._key_of.move_to_end(row)
    return row

  def take(self, key: bytes, pending: Container[int]) -> int | None:
    """Registers the least recently used row under a key; None if all are pending."""
    row = next((row for row in self._key_of if row not in pending), None)
    if row is None:
      return None
    self._row_of.pop(self._key_of[row], None)
    self._row_of[key] = row
    self._key_of[row] = key
    self._key_of.move_to_end(row)
    return row

  def forget(self) -> None:
    """Frees all rows: another policy made their states."""
    self._row_of.clear()
    self._key_of.update(dict.fromkeys(self._key_of))


def prefix_keys(ids: Sequence[int], piece: int) -> list[bytes]:
  """Returns a 16-byte key per prompt piece: a hash of all tokens up to its end.

  Keys are per piece, not per page, because one call prefills a piece: equal pieces
  after equal tokens are computed by one program in one shape, so reading their pages is
  bit-identical to prefilling.
  """
  keys = []
  key = b""
  for begin in range(0, len(ids), piece):
    tokens = np.asarray(ids[begin : begin + piece], np.int32)
    key = hashlib.blake2b(key + tokens.tobytes(), digest_size=16).digest()
    keys.append(key)
  return keys


def pool_sizes(slots: int, blocks: int) -> list[int]:
  """Lists a growing pool's sizes, in pages.

  The sizes are the slots times powers of two, with one size between each two: few sizes
  are compiled, and at most a third of the pages is wasted.

  Args:
    slots: concurrent rows; a pool has at least one page per row.
    blocks: maximum pages per row.
  """
  most = slots * blocks
  out = [slots]
  while out[-1] < most:
    size = out[-1]
    out.append(size * 3 // 2)
    out.append(size * 2)
  sizes = [size for size in out if size < most]
  return [*dict.fromkeys(sizes), most]

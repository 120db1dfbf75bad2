"""Ownership of pages and states in a replica's cache; on the host, numbers only.

A page belongs to all rows that read it, and is free once they have ended. Its prefilled
tokens stay registered until the page is allocated again: rows with the same first
tokens read the same pages.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Container, Iterable, Sequence

import numpy as np

# Maximum tokens per slot in one prefill: its activations grow with them, and each
# length is a separate program.
PIECE = 512


class PagePool:
  """Counts each page's readers, and registers pages' contents."""

  def __init__(self, pages: int):
    """Starts with N pages, all free."""
    self._readers: list[int] = []
    # In allocation order: empty pages first, then those with the longest ended row.
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
    """Resizes to N pages."""
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
    """Returns the pages registered under these keys, with one more reader each."""
    pages = self._pages_of.get(key)
    if pages is None:
      return None
    for page in pages:
      self._readers[page] += 1
      self._free.pop(page, None)
    return list(pages)

  def remember(self, key: bytes, pages: Iterable[int]) -> None:
    """Registers pages' contents; earlier keys are forgotten."""
    pages = list(pages)
    for page in pages:
      self._forget_key(self._key_of.get(page))
    self._forget_key(key)
    self._pages_of[key] = pages
    for page in pages:
      self._key_of[page] = key

  def release(self, pages: Sequence[int]) -> None:
    """Removes one reader from each of a row's pages."""
    # The last first: more prompts share a beginning, so it is kept longest.
    for page in reversed(pages):
      self._readers[page] -= 1
      if self._readers[page] == 0:
        self._free[page] = None
        if page not in self._key_of:
          self._free.move_to_end(page, last=False)

  def forget(self) -> None:
    """Forgets pages' contents: another policy wrote them."""
    self._pages_of.clear()
    self._key_of.clear()

  def _forget_key(self, key: bytes | None) -> None:
    for page in self._pages_of.pop(key, ()):
      del self._key_of[page]


class Snapshots:
  """Rows of states, each registered under the prefix that it is the state after."""

  def __init__(self, rows: Iterable[int]):
    """Starts with these rows, all free."""
    # The one used longest ago comes first; free rows have no key.
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
    """Registers a row under a key; None if all are pending: still to be copied."""
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
  """Returns a key for each piece of a prompt: all tokens up to its end, in 16 bytes.

  Pieces, not pages, since one call prefills a piece: equal pieces after equal tokens
  are computed by one program in one shape, so reading them is bit-identical to
  prefilling.

  Args:
    ids: tokens to prefill.
    piece: tokens per piece; the last one may have fewer.
  """
  keys = []
  key = b""
  for begin in range(0, len(ids), piece):
    tokens = np.asarray(ids[begin : begin + piece], np.int32)
    key = hashlib.blake2b(key + tokens.tobytes(), digest_size=16).digest()
    keys.append(key)
  return keys


def pool_sizes(slots: int, blocks: int) -> list[int]:
  """Lists the sizes of a pool that grows with its rows, in pages.

  Powers of two times the slots, and one in between: few sizes are compiled, and at most
  a third of the pages is wasted.

  Args:
    slots: rows at once; a pool has a page for each at least.
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

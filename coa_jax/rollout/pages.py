"""Which pages of a replica's cache are whose; on the host, and numbers only.

A page belongs to as many rows as read it, and to nobody once they have ended. What was
prefilled into it is remembered under the tokens that it came from until the page is
given away: who starts with the same tokens reads the same pages.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

# Tokens of a slot that one prefill runs, at most: its activations grow with them, and
# each length is a program of its own.
PIECE = 512


class PagePool:
  """Counts who reads each page, and remembers what pages hold."""

  def __init__(self, pages: int):
    """Begins with so many pages, all free."""
    self._readers: list[int] = []
    # In the order in which they are given away: those that hold nothing first, then
    # those whose row ended longest ago.
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
    """Counts the pages that nobody reads."""
    return len(self._free)

  def readers(self, page: int) -> int:
    """Counts the readers of a page."""
    return self._readers[page]

  def grow(self, pages: int) -> None:
    """Makes it so many pages."""
    for page in range(self.size, pages):
      self._readers.append(0)
      self._free[page] = None

  def take(self, count: int) -> list[int]:
    """Gives away free pages to one reader; what they held is forgotten."""
    out = []
    for _ in range(count):
      page, _ = self._free.popitem(last=False)
      self._forget_key(self._key_of.get(page))
      self._readers[page] = 1
      out.append(page)
    return out

  def find(self, key: bytes) -> list[int] | None:
    """Returns the pages that hold what is remembered so, with one more reader each."""
    pages = self._pages_of.get(key)
    if pages is None:
      return None
    for page in pages:
      self._readers[page] += 1
      self._free.pop(page, None)
    return list(pages)

  def remember(self, key: bytes, pages: Iterable[int]) -> None:
    """Notes what pages hold; what they were remembered for before is forgotten."""
    pages = list(pages)
    for page in pages:
      self._forget_key(self._key_of.get(page))
    self._forget_key(key)
    self._pages_of[key] = pages
    for page in pages:
      self._key_of[page] = key

  def release(self, pages: Sequence[int]) -> None:
    """Takes one reader off each of a row's pages."""
    # The last first: what a prompt begins with is of use to more, and is kept longest.
    for page in reversed(pages):
      self._readers[page] -= 1
      if self._readers[page] == 0:
        self._free[page] = None
        if page not in self._key_of:
          self._free.move_to_end(page, last=False)

  def forget(self) -> None:
    """Forgets what pages hold: another policy has read it."""
    self._pages_of.clear()
    self._key_of.clear()

  def _forget_key(self, key: bytes | None) -> None:
    for page in self._pages_of.pop(key, ()):
      del self._key_of[page]


def prefix_keys(ids: Sequence[int], piece: int) -> list[bytes]:
  """Returns a key for each piece of a prompt: all tokens up to its end, in 16 bytes.

  Pieces, not pages, since a piece is what is prefilled at once: equal pieces after
  equal tokens are computed by one program in one shape, so whoever reads them gets the
  bits that prefilling would have given.

  Args:
    ids: tokens that are prefilled.
    piece: tokens of a piece; the last one may have fewer.
  """
  keys = []
  key = b""
  for begin in range(0, len(ids), piece):
    tokens = np.asarray(ids[begin : begin + piece], np.int32)
    key = hashlib.blake2b(key + tokens.tobytes(), digest_size=16).digest()
    keys.append(key)
  return keys


def pool_sizes(slots: int, blocks: int) -> list[int]:
  """Lists the pages that a pool may have that grows as its rows do.

  Powers of two times the slots, and one in between: few sizes are ever compiled, and at
  most a third of the pages is in vain.

  Args:
    slots: rows at once; a pool has a page for each at least.
    blocks: pages that a row may have.
  """
  most = slots * blocks
  out = [slots]
  while out[-1] < most:
    size = out[-1]
    out.append(size * 3 // 2)
    out.append(size * 2)
  sizes = [size for size in out if size < most]
  return [*dict.fromkeys(sizes), most]

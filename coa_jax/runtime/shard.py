"""One of several parts of a journey's work, done by processes that never meet.

Parts are dealt by turns: of n shards number i has every n-th item from the i-th on.
Each writes logs of its own. Put one after the other these are the logs of a process
that did all of the work and was then cut off: the journey goes on from them to its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Shard:
  """Number `index` of `count` parts, counted from 0."""

  index: int
  count: int

  def owns(self, place: int) -> bool:
    """Tells whether the item at this place is one of this part."""
    return place % self.count == self.index

  def of(self, items: Sequence[T]) -> Sequence[T]:
    """Returns this part of the items, in their order."""
    return items[self.index :: self.count]

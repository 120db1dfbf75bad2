"""Splits a stage's work into shards, each done by an independent process.

Shards are interleaved: shard i of n has every n-th item, beginning with item i. Each
shard writes its own logs. The concatenated logs equal those of one process interrupted
after all work, so the stage can resume from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Shard:
  """Shard number `index` of `count`, counted from 0."""

  index: int
  count: int

  def owns(self, place: int) -> bool:
    """Whether the item at this place belongs to this shard."""
    return place % self.count == self.index

  def of(self, items: Sequence[T]) -> Sequence[T]:
    """Returns this shard's items, in order."""
    return items[self.index :: self.count]

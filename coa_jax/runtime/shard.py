"""Parts of a stage's work, each done by an independent process.

Parts are interleaved: shard i of n has every n-th item from the i-th on. Each writes
its own logs. Concatenated they equal the logs of a process interrupted after all of the
work: the stage resumes from them.
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
    """Whether the item at this place belongs to this part."""
    return place % self.count == self.index

  def of(self, items: Sequence[T]) -> Sequence[T]:
    """Returns this part's items, in their order."""
    return items[self.index :: self.count]

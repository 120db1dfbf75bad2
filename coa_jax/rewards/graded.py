"""A grader's verdict on an answer, or its failure to give one."""

from __future__ import annotations

import dataclasses
from typing import Any


class Ungradable(RuntimeError):
  """The service behind a reward failed, or a task's own tests did.

  This says nothing about the answer, so the trajectory leaves its group.
  """


@dataclasses.dataclass(frozen=True)
class Graded:
  """A verdict on one answer.

  Attributes:
    answer: 0 (wrong) to 1 (right).
    record: additional data for readers; JSON values only.
    parts: further values by name, for the record.
  """

  answer: float
  record: dict[str, Any] = dataclasses.field(default_factory=dict)
  parts: dict[str, float] = dataclasses.field(default_factory=dict)


def after_thoughts(reply: str) -> str:
  """Returns a judge's reply after its thoughts; "" if a thought is cut off."""
  rest = reply.rpartition("</think>")[2]
  return "" if "<think>" in rest else rest

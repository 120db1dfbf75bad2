"""Checks whether answers look like their tasks' kind."""

from __future__ import annotations

import re
from collections.abc import Iterable

from coa_jax.data.tasks.task import Kind, Task

# Mathematical notation in an answer: LaTeX anywhere, a power, a sign, ...
_NOTATION = re.compile(r"\\[a-zA-Z(\[{%]|\$[^$]+\$|\^|[\u221a\u221e\u03c0]")
# ... or nothing but a number, a fraction, a tuple, an equation.
_NUMBERS = re.compile(
  r"[-+]?\(?[\d,. ]*\d%?\)?|[-+]?\d+ ?/ ?\d+|[\[(][-+\d.,/ ]+[\])]"
  r"|[a-zA-Z] ?= ?[-+\d.,/ ]+"
)
# Prose starts with a letter and contains a word, which no formula does.
_PROSE = re.compile(r"[^\W\d].*", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]{3}")
# A year or a count: text and value compare alike, unless numbers are written
# differently.
_WHOLE_NUMBER = re.compile(r"0|[1-9]\d*")


def check_kinds(unsaid: Iterable[Task], uri: str) -> None:
  """Refuses to grade likely mathematics by exact match, or likely prose as math.

  Takes the tasks without a kind in their rows, and their URI for the message.

  Raises:
    ValueError: most answers from one source do not look like their kind.
  """
  groups: dict[tuple[str, Kind], list[Task]] = {}
  for task in unsaid:
    groups.setdefault((task.source, task.kind), []).append(task)
  for (source, kind), tasks in groups.items():
    if kind == Kind.MATH:
      found = [t for t in tasks if all(map(_is_prose, t.answers))]
      look = "words, not mathematics"
    else:
      found = [t for t in tasks if all(map(_is_mathematics, t.answers))]
      look = "mathematics"
      if all(map(are_whole_numbers, found)):
        continue  # years, counts: `describe_tasks` says how they are judged
    if 2 * len(found) > len(tasks):
      raise ValueError(
        f"{uri}: {len(found):,} of {len(tasks):,} answers of {source} without a "
        f"kind look like {look}, as {found[0].answers[0]!r:.60} of {found[0].id}; say "
        "which they are: tasks.kind='math' (equal in value), or tasks.kind='qa' (equal "
        "as text)"
      )


def _is_mathematics(answer: str) -> bool:
  return bool(_NOTATION.search(answer) or _NUMBERS.fullmatch(answer))


def _is_prose(answer: str) -> bool:
  words = _PROSE.fullmatch(answer) and _WORD.search(answer)
  return bool(words) and not _NOTATION.search(answer)


def are_whole_numbers(task: Task) -> bool:
  """Whether all answers are whole numbers, which compare alike as text and value."""
  return all(_WHOLE_NUMBER.fullmatch(answer) for answer in task.answers)

"""Do answers look like the kind that they are judged as?"""

from __future__ import annotations

import re
from collections.abc import Iterable

from coa_jax.tasks.task import Kind, Task

# An answer that a mathematician wrote: LaTeX anywhere, a power, a sign, ...
_NOTATION = re.compile(r"\\[a-zA-Z(\[{%]|\$[^$]+\$|\^|[\u221a\u221e\u03c0]")
# ... or nothing but a number, a fraction, a tuple, an equation.
_NUMBERS = re.compile(
  r"[-+]?\(?[\d,. ]*\d%?\)?|[-+]?\d+ ?/ ?\d+|[\[(][-+\d.,/ ]+[\])]"
  r"|[a-zA-Z] ?= ?[-+\d.,/ ]+"
)
# Prose: it starts with a letter and has a word, which no formula has.
_PROSE = re.compile(r"[^\W\d].*", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]{3}")
# One that text and value judge alike, but for how it is written: a year, a count.
_WHOLE_NUMBER = re.compile(r"0|[1-9]\d*")


def check_kinds(unsaid: Iterable[Task], uri: str) -> None:
  """Refuses to judge by exact match what most likely is mathematics, or the reverse.

  Args:
    unsaid: tasks whose rows do not say their kind.
    uri: how the message names where they come from.

  Raises:
    ValueError: most answers of a source do not look like the kind that they have.
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
  """Whether text and value judge the answers of a task alike."""
  return all(_WHOLE_NUMBER.fullmatch(answer) for answer in task.answers)

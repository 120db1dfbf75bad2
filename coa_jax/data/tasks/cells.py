"""Parses lists stored as text in table cells."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

# Text that starts like a list of strings, an empty list, or an array.
_LIST = re.compile(r"\[\s*['\"].*|\[\s*\]|(?:np\.)?array\(.*\)", re.DOTALL)
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
# ['a', 'b'] or numpy's ['a' 'b']; with a comma also ('a', 'b').
_PYTHON_LIST = re.compile(
  rf"\[(?:\s*(?:{_STRING}),?)+\s*\]|\(\s*(?:{_STRING}),(?:\s*(?:{_STRING}),?)*\s*\)"
)


def listed(text: str) -> Any:
  """Parses a string list from JSON, Python or numpy; returns other text unchanged.

  A list of numbers stays text: `[0, 1]` is a mathematical answer.
  """
  stripped = text.strip()
  if not re.match(r"""[\[(]\s*['"]""", stripped):
    return text
  try:
    value = json.loads(stripped)
  except (ValueError, RecursionError):
    value = _python_list(stripped)
  if isinstance(value, list) and all(isinstance(item, str) for item in value):
    return value
  return text


def is_unread_list(text: str) -> bool:
  """Whether a text looks like a list that `listed` cannot parse, or an empty list."""
  return _LIST.fullmatch(text.strip()) is not None


def _python_list(text: str) -> list[str] | None:
  """Parses the strings in "['a', 'b']", "('a', 'b')" and numpy's "['a' 'b']"."""
  if not _PYTHON_LIST.fullmatch(text):
    return None
  try:
    # One by one, because Python joins 'a' 'b' into one string.
    return [ast.literal_eval(string) for string in re.findall(_STRING, text)]
  except (SyntaxError, ValueError):  # an escape such as '\\x'
    return None

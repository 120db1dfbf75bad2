"""Parses lists stored as text in table cells."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from typing import Any

# Text that starts like a list of strings, an empty list, or an array.
_LIST = re.compile(r"\[\s*['\"].*|\[\s*\]|(?:np\.)?array\(.*\)", re.DOTALL)
# Layout tokens in a list on several lines.
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)


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
  # By tokens, because Python joins 'a' 'b' into one string.
  try:
    lines = io.StringIO(text).readline
    tokens = [t for t in tokenize.generate_tokens(lines) if t.type not in _LAYOUT]
    inner = [t for t in tokens[1:-1] if t.string != ","]
    # A name in brackets, ("Weird Al"), is not a list.
    if text[0] == "(" and len(inner) == len(tokens) - 2:
      return None
    if tokens[-1].string != {"[": "]", "(": ")"}[text[0]]:
      return None
    if any(t.type != tokenize.STRING or t.string[0] not in "'\"" for t in inner):
      return None
    return [ast.literal_eval(t.string) for t in inner]
  except (tokenize.TokenError, SyntaxError, ValueError, MemoryError):
    return None

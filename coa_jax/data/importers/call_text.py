"""Parses calls in text: JSON, Python literals, <tool_call> blocks (Hermes, Qwen)."""

from __future__ import annotations

import ast
import json
from typing import Any

CALL_OPEN = "<tool_call>"
_CALL_CLOSE = "</tool_call>"
_LITERAL = 100_000  # the longest Python literal to parse
_CLOSINGS = 8  # most closing tags to try as a Python literal's end
_JSON = json.JSONDecoder(strict=False)  # takes raw line breaks in strings


def read_value(text: str, python: bool = True) -> Any:
  """Parses text as JSON or, with `python`, as a Python literal; None for neither.

  Line breaks in strings may be raw.
  """
  try:
    return json.loads(text, strict=False)
  except (ValueError, RecursionError):
    pass
  if not python or len(text) > _LITERAL:
    return None
  try:
    # Through JSON: a set, bytes or the like is not a valid argument.
    return json.loads(json.dumps(ast.literal_eval(text)))
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return None


def parse_calls(text: str) -> list[Any]:
  """Reads the calls in a text: one or a list, as JSON or as a Python literal.

  Raises:
    ValueError: the text is not a call.
  """
  text = text.strip()
  if text.startswith(CALL_OPEN):
    rest, calls = take_blocks(text)
    if rest:
      raise ValueError(f"text beside a call: {rest!r:.60}")
    return calls
  value = read_value(text)
  out = value if isinstance(value, list) else [value]
  if not out or not all(isinstance(call, dict) for call in out):
    raise ValueError(f"{text!r:.60} is no call")
  return out


def take_blocks(text: str) -> tuple[str, list[Any]]:
  """Returns the text without its call blocks, and the calls in them.

  Raises:
    ValueError: a block holds no call, or is not closed.
  """
  left = []
  calls: list[Any] = []
  at = 0
  while (start := text.find(CALL_OPEN, at)) >= 0:
    inside = start + len(CALL_OPEN)
    while inside < len(text) and text[inside].isspace():
      inside += 1
    if text[inside : inside + 1] not in ("{", "["):  # a mention, not a call
      left.append(text[at:inside])
      at = inside
      continue
    left.append(text[at:start])
    value, at = _block(text, inside)
    calls += value if isinstance(value, list) else [value]
  left.append(text[at:])
  return "".join(left).strip(), calls


def _block(text: str, start: int) -> tuple[Any, int]:
  """Returns a call block's value, and its closing tag's end."""
  # A closing tag inside a JSON string ends nothing.
  try:
    value, end = _JSON.raw_decode(text, start)
  except (ValueError, RecursionError):
    pass
  else:
    while end < len(text) and text[end].isspace():
      end += 1
    if text.startswith(_CALL_CLOSE, end):
      return value, end + len(_CALL_CLOSE)
  end = start
  for _ in range(_CLOSINGS):
    end = text.find(_CALL_CLOSE, end)
    if end < 0:
      break
    value = read_value(text[start:end].strip())
    end += len(_CALL_CLOSE)
    if value is not None:
      return value, end
  raise ValueError(f"{text[start : start + 60]!r} is no call")

"""Finds calls that an importer left unread: in a text, or in the row's objects.

Every imported row, in any format, is checked here: a call in an unknown form drops its
row, so that no model learns the call as an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Author, Trajectory

# Tags around a call or its result. In back quotes they are only mentioned.
_TAG = re.compile(
  r"(?<!`)</?(?:tool_?calls?|function_?calls?|tool_use|tool_code|tool_request|"
  r"(?:tool|function)_(?:response|result)s?|execute_(?:bash|ipython)|use_mcp_tool|"
  r"antml:\w+)>",
  re.IGNORECASE,
)
# The text after such a tag in a call, as opposed to a mention.
_PAYLOAD = re.compile(r"[\s:]*[\[{(<'\"]|\s*\w+\s*[\[({<\n]")
# Marks found only in calls.
_MARK = re.compile(
  r"(?<!`)(?:<(?:antml:)?invoke\b|<function=|<(?:function|tool)\s+name=|<parameter="
  r"|<\|python_tag\|>|<\|/?(?:tool|function|action)_?\w*\|>|<\|plugin\|>|<\|call\|>"
  r"|<\|channel\|>|\bto=functions\.\w"
  "|<\uff5c[\\w\u2581]*tool[\\w\u2581]*\uff5c>"
  "|\u273f(?:FUNCTION|ARGS|RESULT|RETURN)\u273f"
  r"|\[/?(?:TOOL_CALLS?|TOOL_REQUEST|TOOL_RESULTS|END_TOOL_REQUEST)\]"
  r"|functools\[\{)"
  r"|```[ \t]*(?:tool_code|tool_call|tool_use|tool_outputs?|function_call)\b"
  r"|^Action(?: \d+)?:[ \t]*[\w.-]+(?:\[|[ \t]*\n+Action Input)"
  r"|^Action Input(?: \d+)?:",
  re.MULTILINE | re.IGNORECASE,
)
# A text that is entirely a call: a JSON object with its name and arguments, perhaps in
# a fence or a list, or a Python list of calls.
_WHOLE = re.compile(
  r"\s*(?:```(?:json)?\s*)?\[?\s*"
  r"(?:\{\s*[\"'](?:name|function|function_name|tool|tool_name|action|type|id|"
  r"tool_calls|function_call|arguments|parameters|args|input|action_input)[\"']\s*:"
  r"|\w[\w.]*\(\w+\s*=)"
)
_ARGUMENTS = re.compile(
  r"[\"'](?:arguments|parameters|args|tool_input|action_input|tool_calls|"
  r"function_call)[\"']\s*:"
)
_CALL_LIST = re.compile(r"\s*\[\s*\w[\w.]*\(\w+\s*=.*\)\s*\]\s*", re.DOTALL)
# A row's fields for messages and actions; the first with calls counts.
_FIELDS = (
  "messages",
  "conversation",
  "conversations",
  "completion",
  "output",
  "intermediate_steps",
  "steps",
)
_CALL_KEYS = ("functionCall", "function_call", "toolUse", "tool_call")
_RESULTS = ("tool", "function", "tool_result", "function_call_output")


def unread_text(trajectory: Trajectory) -> str:
  """Returns the first call in the policy's text; "" if there is none.

  An answer may not contain any mark of a call; a thought or a plan may mention one.
  """
  for segment in trajectory.segments:
    if segment.author != Author.POLICY or segment.role not in roles.ROLES:
      continue
    text = segment.text.strip().removeprefix(roles.open_tag(segment.role)).lstrip()
    is_answer = segment.role in (roles.ANSWER, roles.SUGGESTED_ANSWER)
    if mark := _MARK.search(text):
      return text[mark.start() : mark.start() + 60]
    for tag in _TAG.finditer(text):
      if is_answer or _PAYLOAD.match(text, tag.end()):
        return text[tag.start() : tag.start() + 60]
    inner = text.removesuffix(roles.close_tag(segment.role))
    if is_answer and _is_call(inner):
      return inner[:60]
  return ""


def _is_call(text: str) -> bool:
  """Whether a text is entirely a call."""
  if _CALL_LIST.fullmatch(text):
    return True
  return bool(_WHOLE.match(text) and _ARGUMENTS.search(text[:2000]))


def count_calls(row: Mapping[str, Any]) -> int:
  """Returns a lower bound for the number of calls in a row's objects.

  A call may have two names (LangChain repeats calls), so among a message's fields only
  the one with most calls counts.
  """
  for name in _FIELDS:
    if count := _count(row.get(name)):
      return count
  return 0


def _count(value: Any) -> int:
  if isinstance(value, list):
    return sum(map(_count, value))
  if not isinstance(value, dict):
    return 0
  kind = value.get("role") or value.get("type") or value.get("from")
  if kind in _RESULTS:
    return 0
  named = isinstance(kind, str) and re.search(r"(?:^|_)(?:tool_use|call)$", kind)
  if named and "role" not in value and "from" not in value:
    return 1
  if "tool" in value and "tool_input" in value:
    return 1
  if any(isinstance(value.get(key), dict) for key in _CALL_KEYS):
    return 1
  calls = value.get("tool_calls")
  listed = len(calls) if isinstance(calls, list) else 0
  return max(listed, *map(_count, value.values()), 0)

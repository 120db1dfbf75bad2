"""ShareGPT conversations with tool calls as chat messages.

A row holds `conversations`: turns of `from` and `value`, mostly by human and gpt, with
function_call (an object of `name` and `arguments`, or a list of them) and observation
between (LLaMA-Factory's tool sets), or with <tool_call> and <tool_response> blocks in
what gpt and tool say (Hermes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax.importers.row import RowRefused, are_objects
from coa_jax.importers.turns import CALL, SPEAKERS
from coa_jax.json_io import parse_json

_CALL_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT_BLOCK = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)


def as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row of format sharegpt as one of format chat.

  Raises:
    RowRefused: the turns do not have that shape.
  """
  turns = row.get("conversations")
  if not are_objects(turns):
    raise RowRefused("no_messages", "conversations is not a list of objects")
  # --- Turns as messages.
  messages: list[dict[str, Any]] = []
  if row.get("system"):
    messages.append({"role": "system", "content": row["system"]})
  for number, turn in enumerate(turns):
    _add(messages, turn, f"turn {number}")

  # --- The row as one of chat; an empty list of tools is often written as text.
  chat = {key: value for key, value in row.items() if key not in _READ}
  chat["messages"] = messages
  if row.get("tools") not in (None, "", "[]"):
    chat["tools"] = row["tools"]
  return {"source": "sharegpt", **chat}


_READ = ("conversations", "system", "tools")


def _add(messages: list[dict[str, Any]], turn: dict[str, Any], where: str) -> None:
  """Adds a turn to the messages; a call to what was said just before it."""
  if "role" in turn:  # a chat message under this name
    messages.append(turn)
    return
  rest = {key: v for key, v in turn.items() if key not in ("from", "value")}
  role = SPEAKERS.get(str(turn.get("from")).lower())
  text = turn.get("value")
  if role is None or not isinstance(text, str):
    raise RowRefused(
      "bad_turn", f"{where} is of {turn.get('from')!r:.40}: {text!r:.40}"
    )

  # --- A call in a turn of its own, or in blocks of the assistant's text.
  calls = []
  if role == CALL:
    calls = _calls(text, where)
    text = ""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not last.get("tool_calls"):
      text = messages.pop()["content"]
  elif role == "assistant":
    for block in _CALL_BLOCK.findall(text):
      calls += _calls(block, where)
    if calls:
      text = _CALL_BLOCK.sub("", text).strip()
  if calls:
    functions = [{"type": "function", "function": call} for call in calls]
    rest |= {"role": "assistant", "content": text, "tool_calls": functions}
    messages.append(rest)
    return

  # --- Results in blocks: one message each. Text around them makes it one result.
  texts = [text]
  if role == "tool" and not _RESULT_BLOCK.sub("", text).strip():
    texts = [block.strip("\n") for block in _RESULT_BLOCK.findall(text)] or texts
  for text in texts:
    messages.append({"role": role, "content": text, **rest})


def _calls(text: str, where: str) -> list[Any]:
  """The calls that a turn's JSON holds: one, or a list of them."""
  try:
    value = parse_json(text.strip(), where)
  except ValueError as e:
    raise RowRefused("bad_call", f"{e}: {text!r:.60}") from e
  return value if isinstance(value, list) else [value]

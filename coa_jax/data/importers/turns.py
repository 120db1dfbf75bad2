"""Splits conversations with several questions into one row per question.

A trajectory answers one question, so each turn in a recorded conversation becomes a
separate row. Its question begins with the earlier user and assistant messages, in the
format of `prompts.conversation_text` and `serve --conversation`. Earlier turns' tool
results are only in those turns' trajectories.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from coa_jax.data.importers.row import ANSWER_FIELDS, QUESTION_FIELDS, RowRefused
from coa_jax.data.importers.shapes import as_chat
from coa_jax.protocol import roles
from coa_jax.protocol.prompts import conversation_text


def split_turns(row: dict[str, Any], task_id: str) -> list[dict[str, Any]]:
  """Returns one row per question; a row with at most one question is unchanged.

  The turns' ids are TASK_ID-turn1, -turn2 and so on. An answer next to the row's
  messages belongs to the last turn.
  """
  # --- The start of each turn: a user's message after any other speaker's.
  try:
    chat = as_chat(row)
  except (RowRefused, TypeError, KeyError, AttributeError, RecursionError):
    return [row]  # its reader refuses the row
  messages = chat["messages"]
  speakers = [message.get("role") for message in messages]
  starts = []
  for at, speaker in enumerate(speakers):
    if speaker == "user" and (at == 0 or speakers[at - 1] != "user"):
      starts.append(at)
  if len(starts) < 2:
    return [row]

  # --- A row for each turn, with the earlier messages.
  out = []
  said: list[tuple[str, str]] = []
  for number, (start, end) in enumerate(
    itertools.pairwise([*starts, len(messages)]), 1
  ):
    turn = dict(chat)
    for field in QUESTION_FIELDS:
      turn.pop(field, None)
    if end < len(messages):
      for field in ANSWER_FIELDS:
        turn.pop(field, None)
    turn["task_id"] = f"{task_id}-turn{number}"
    asked = _after(messages[start], said)
    turn["messages"] = [*messages[: starts[0]], asked, *messages[start + 1 : end]]
    out.append(turn)
    said.append(("user", _text(messages[start])))
    if speakers[end - 1] == "assistant":
      said.append(("assistant", _without_thought(_text(messages[end - 1]))))
  return out


def _after(message: dict[str, Any], said: list[tuple[str, str]]) -> dict[str, Any]:
  """Puts the earlier messages before a user's message."""
  content = message.get("content")
  if not said:
    return message
  before = conversation_text([*said, ("user", "")])
  if isinstance(content, list):  # parts, as a chat message may have them
    return {**message, "content": [{"type": "text", "text": before}, *content]}
  if not isinstance(content, str):
    return message  # its reader refuses the message
  return {**message, "content": before + content}


def _text(message: Mapping[str, Any]) -> str:
  content = message.get("content")
  if isinstance(content, list):
    content = "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
  return content if isinstance(content, str) else ""


def _without_thought(text: str) -> str:
  """Removes an answer's think block, if it begins with one."""
  return text.rpartition(roles.close_tag(roles.THINK))[2].strip()

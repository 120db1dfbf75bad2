"""OpenAI chat messages with tool calls as runs.

A row holds `messages` (or `conversation`): perhaps a system message, one user message,
then assistant messages with `tool_calls` (or the older `function_call`), a tool message
for each call, and at last an assistant message without calls, the answer. Text beside a
call is a thought. Calls made at once are written one after the other, each with its
result. A think block that content begins with is the thought that it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from coa_jax.importers.calls import translate_and_note
from coa_jax.importers.row import (
  TASK_FIELDS,
  ImportedRun,
  Recorder,
  RowRefused,
  are_objects,
  fields,
  note_unread,
  task_of,
)
from coa_jax.protocol import roles
from coa_jax.teacher import runs

_ROW = TASK_FIELDS | fields("messages conversation tools")
_MESSAGE = fields(
  "role content tool_calls function_call reasoning_content reasoning tool_call_id name "
  "id"
)
_REASONING = ("reasoning_content", "reasoning")  # the same, by two servers


def read_chat(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> ImportedRun:
  """Reads one row as a run.

  Args:
    row: as above; `answer` or `answers` where they are known.
    task_id: what to call the task.
    table: names of tools beyond `calls.TOOLS`.

  Raises:
    RowRefused: the messages do not have that shape, or a call cannot be translated.
  """
  # --- The row: its messages, and what it has beside them.
  messages = row.get("messages") or row.get("conversation")
  conversation = row.get("conversation") or messages
  if not are_objects(messages):
    raise RowRefused("no_messages", "messages is not a list of objects")
  recorder = Recorder(task_id)
  note_unread(recorder, "row", row, _ROW)
  if conversation != messages:
    recorder.note("row", "field 'conversation' is not read, but 'messages'")
  if row.get("tools"):
    recorder.note("row", "the list of tools; ours takes its place")

  # --- The question, then replies: each with calls, whose results follow, or the last.
  pending = iter(enumerate(messages))  # one iterator: whoever reads on takes it along
  question = _question(pending, recorder)
  answer = None
  for at, message in pending:
    where = f"message {at}"
    if message.get("role") == "user":
      raise RowRefused("multi_turn", f"{where} is a second question")
    if message.get("role") != "assistant":
      raise RowRefused("stray_result", f"{where} is of role {message.get('role')!r}")
    if answer is not None:
      raise RowRefused("multi_turn", f"{where} follows the answer")
    note_unread(recorder, where, message, _MESSAGE)
    calls = _calls(message, where)
    text = _think(message, where, recorder)
    if calls:
      recorder.think(text)
      # A call that ends the work needs no result, and mostly has none.
      results = itertools.islice(pending, len(calls))
      answer = _record_calls(calls, results, recorder, where, table)
    else:
      answer = text
  task = task_of(row, task_id, row.get("question") or question, "chat")
  return recorder.end(task, answer)


def _question(pending: Iterator[tuple[int, dict]], recorder: Recorder) -> str:
  # System messages may stand before it; anything else means that the start is missing.
  for at, message in pending:
    text = _text(message.get("content"), f"message {at}", recorder)
    note_unread(recorder, f"message {at}", message, _MESSAGE)
    if message.get("role") == "user":
      return text
    if message.get("role") not in ("system", "developer"):
      break
    if text:
      recorder.note(f"message {at}", "the system prompt; ours takes its place")
  raise RowRefused("no_question", "no user message before the first reply")


def _think(message: Mapping[str, Any], where: str, recorder: Recorder) -> str:
  """Records what an assistant message thinks; the text that is left.

  Templates of reasoning models open the block in the prompt: a closing tag is enough.
  """
  # --- A field of its own; some servers write it under both names.
  thoughts = [message[k] for k in _REASONING if message.get(k)]
  if thoughts:
    recorder.think(_text(thoughts[0], where, recorder))
  for thought in thoughts[1:]:
    if thought != thoughts[0]:
      recorder.note(where, f"reasoning {thought!r:.80} beside another")

  # --- A block that the content begins with.
  text = _text(message.get("content"), where, recorder)
  opening = roles.open_tag(roles.THINK)
  closing = roles.close_tag(roles.THINK)
  head, closed, rest = text.partition(closing)
  head = head.lstrip().removeprefix(opening)
  if not closed or opening in head:
    return text  # no block, or one that stands further on: part of the text
  # A server that has the field may leave the block in the content as well.
  if head.strip() not in (str(t).strip() for t in thoughts):
    recorder.think(head)
  return rest.strip()


def _text(content: Any, where: str, recorder: Recorder) -> str:
  """A message's text; of a list of parts, the text parts."""
  if content is None:
    return ""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise RowRefused("bad_content", f"{where}: content is {content!r:.60}")
  texts = []
  for part in content:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
      texts.append(part["text"])
    else:  # an image, say
      kind = part
      if isinstance(part, dict):
        kind = part.get("type")
      recorder.note(where, f"a part of kind {kind!r:.40} is left out")
  return "".join(texts)


def _calls(message: Mapping[str, Any], where: str) -> list[tuple[Any, str, Any]]:
  """(id, name, arguments) of every call in a message."""
  out = []
  for call in message.get("tool_calls") or []:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
      raise RowRefused("bad_call", f"{where}: {call!r:.80}")
    out.append((call.get("id") or None, function["name"], function.get("arguments")))
  older = message.get("function_call")  # one call, without an id
  if older:
    if not isinstance(older, dict) or not isinstance(older.get("name"), str):
      raise RowRefused("bad_call", f"{where}: {older!r:.80}")
    out.append((None, older["name"], older.get("arguments")))
  ids = [key for key, _, _ in out]
  # All have one, each its own, or none has: then results are told apart by order.
  if any(ids) and len(set(ids) - {None}) < len(ids):
    raise RowRefused("mixed_ids", f"{where}: its calls have the ids {ids!r:.80}")
  return out


def _record_calls(
  calls: list[tuple[Any, str, Any]],
  messages: Iterator[tuple[int, dict]],
  recorder: Recorder,
  where: str,
  table: Mapping[str, str],
) -> str | None:
  """Records calls with their results, in the calls' order; the answer if it is one."""
  answer = None
  results = _results(calls, messages, recorder, where)
  for (_, name, arguments), result in zip(calls, results, strict=True):
    call = translate_and_note(recorder, where, name, arguments, table)
    if call.tag == roles.ANSWER:
      # Nothing reads what a tool says to the end of the work.
      answer = call.body
      if result:
        recorder.note(where, f"the result {result!r:.80} of {name}")
      continue
    if answer is not None:
      raise RowRefused("multi_turn", f"{where}: a call after the answer")
    if result is None:
      raise RowRefused("no_result", f"{where}: the call of {name} has no result")
    # A candidate is a span of its own, without an observation.
    if call.tag == roles.SUGGESTED_ANSWER:
      recorder.say(runs.SOLVER, runs.CANDIDATE, call.body)
      recorder.note(where, f"the result {result!r:.80} of {name}")
      continue
    recorder.call(call.tag, call.body, result)
  return answer


def _results(
  calls: list[tuple[Any, str, Any]],
  messages: Iterator[tuple[int, dict]],
  recorder: Recorder,
  where: str,
) -> list[str | None]:
  """The result of each call, None where it has none."""
  ids = [key for key, _, _ in calls]
  by_id: dict[Any, str] = {}
  in_order: list[str | None] = []
  for at, message in messages:
    if message.get("role") not in ("tool", "function"):
      raise RowRefused("no_result", f"message {at} answers no call of {where}")
    note_unread(recorder, f"message {at}", message, _MESSAGE)
    text = _text(message.get("content"), f"message {at}", recorder)
    key = message.get("tool_call_id") or None
    if key is not None and key in by_id:
      raise RowRefused("stray_result", f"message {at} answers {key!r} again")
    if key is not None and key not in ids:
      raise RowRefused(
        "stray_result", f"message {at} answers {key!r}, which is no call"
      )
    in_order.append(text)
    by_id[key] = text
  if None in ids:  # no call has an id (see `_calls`): results stand in their order
    return in_order + [None] * (len(calls) - len(in_order))
  return [by_id.get(key) for key in ids]

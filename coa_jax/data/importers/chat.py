"""Reads chat messages with tool calls as runs.

`shapes` converts a row to this form: `messages` with an optional system message, one
user message, assistant messages with `tool_calls`, a tool message for each call, and
finally an assistant message without calls, the answer. Text next to a call is a
thought, and so is a think block at the content's start. The calls of one message were
made together; `convert` writes them as one span, or one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from coa_jax.data.importers.calls import translate_and_note
from coa_jax.data.importers.row import (
  TASK_FIELDS,
  ImportedRun,
  Recorder,
  RowRefused,
  fields,
  note_unread,
  task_of,
)
from coa_jax.data.importers.shapes import as_chat
from coa_jax.data.teacher import runs
from coa_jax.protocol import roles

_ROW = TASK_FIELDS | fields("messages conversation tools")
_MESSAGE = fields(
  "role content tool_calls reasoning_content reasoning tool_call_id name id is_error"
)
# Non-text message parts, which a trajectory cannot represent.
_MEDIA = fields(
  "image image_url input_image audio input_audio video video_url document file "
  "input_file redacted_thinking"
)
_REASONING = ("reasoning_content", "reasoning")  # two servers' names for one field


def read_chat(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> ImportedRun:
  """Reads one row, in any `shapes` form, as a run; `table` extends `calls.TOOLS`.

  Raises:
    RowRefused: the messages do not have the form above, or a call cannot be
      translated.
  """
  # --- The row's messages and its other fields.
  row = as_chat(row)
  messages = row["messages"]
  recorder = Recorder(task_id)
  note_unread(recorder, "row", row, _ROW)
  if row.get("conversation"):
    recorder.note("row", "field 'conversation' is not read, but 'messages'")
  if row.get("tools"):
    recorder.note("row", "the list of tools; ours takes its place")

  # --- The question, then the replies: each has calls, with results after it, or is
  # the last.
  pending = iter(enumerate(messages))  # shared: every reader advances it
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
      # A call that ends the work needs no result, and usually has none.
      results = itertools.islice(pending, len(calls))
      answer = _record_calls(calls, results, recorder, where, table)
    else:
      answer = text
  task = task_of(row, task_id, row.get("question") or question, "chat")
  return recorder.end(task, answer)


def _question(pending: Iterator[tuple[int, dict]], recorder: Recorder) -> str:
  # Only system messages may precede the question; others mean a missing start.
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
  """Records an assistant message's thoughts; returns the remaining text.

  Reasoning models' templates open the block in the prompt: a closing tag is enough.
  """
  # --- A separate field; some servers write it under both names.
  thoughts = [message[k] for k in _REASONING if message.get(k)]
  if thoughts:
    recorder.think(_text(thoughts[0], where, recorder))
  for thought in thoughts[1:]:
    if thought != thoughts[0]:
      recorder.note(where, f"reasoning {thought!r:.80} beside another")

  # --- A block at the content's start.
  text = _text(message.get("content"), where, recorder)
  opening = roles.open_tag(roles.THINK)
  closing = roles.close_tag(roles.THINK)
  head, closed, rest = text.partition(closing)
  head = head.lstrip().removeprefix(opening)
  if not closed or opening in head:
    return text  # no block, or a later one: part of the text
  # A server with this field may also leave the block in the content.
  if head.strip() not in (str(t).strip() for t in thoughts):
    recorder.think(head)
  return rest.strip()


def _text(content: Any, where: str, recorder: Recorder) -> str:
  """Returns a message's text; for a list of parts, its text parts."""
  if content is None:
    return ""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise RowRefused("bad_content", f"{where}: content is {content!r:.60}")
  texts = []
  for part in content:
    part = {"text": part} if isinstance(part, str) else part
    kind = part.get("type") if isinstance(part, dict) else part
    if kind in _MEDIA:
      recorder.note(where, f"a part of kind {kind!r:.40} is left out")
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
      texts.append(part["text"])
    elif kind == "refusal" and isinstance(part.get("refusal"), str):
      texts.append(part["refusal"])
    else:  # it may be the model's text or input
      raise RowRefused("bad_content", f"{where}: a part of kind {kind!r:.40}")
  return "".join(texts)


def _calls(message: Mapping[str, Any], where: str) -> list[tuple[Any, str, Any]]:
  """Lists (id, name, arguments) for every call in a message."""
  out = []
  for call in message.get("tool_calls") or []:
    function = call["function"]
    out.append((call["id"] or None, function["name"], function["arguments"]))
  ids = [key for key, _, _ in out]
  # Ids must be complete and unique, or all missing: then results follow the calls'
  # order.
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
  """Records calls and results in call order; returns the answer if a call gives it."""
  answer = None
  made: list[tuple[str, str, str, bool]] = []  # together, up to a candidate
  results = _results(calls, messages, recorder, where)
  for (_, name, arguments), (result, failed) in zip(calls, results, strict=True):
    call = translate_and_note(recorder, where, name, arguments, table)
    if call.tag == roles.ANSWER:
      # A result after the final answer is never read.
      answer = call.body
      if result:
        recorder.note(where, f"the result {result!r:.80} of {name}")
      continue
    if answer is not None:
      raise RowRefused("multi_turn", f"{where}: a call after the answer")
    if result is None:
      raise RowRefused("no_result", f"{where}: the call of {name} has no result")
    # A candidate is a separate span, without an observation.
    if call.tag == roles.SUGGESTED_ANSWER:
      recorder.calls(made)
      made = []
      recorder.say(runs.SOLVER, runs.CANDIDATE, call.body)
      recorder.note(where, f"the result {result!r:.80} of {name}")
      continue
    made.append((call.tag, call.body, result, failed))
  recorder.calls(made)
  return answer


def _results(
  calls: list[tuple[Any, str, Any]],
  messages: Iterator[tuple[int, dict]],
  recorder: Recorder,
  where: str,
) -> list[tuple[str | None, bool]]:
  """Returns each call's result (None if missing), and whether the call failed."""
  ids = [key for key, _, _ in calls]
  by_id: dict[Any, tuple[str | None, bool]] = {}
  in_order: list[tuple[str | None, bool]] = []
  for at, message in messages:
    if message.get("role") not in ("tool", "function"):
      if len(in_order) == 1:
        raise RowRefused("shared_observation", f"{where}: {len(calls)} calls, 1 result")
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
    by_id[key] = (text, bool(message.get("is_error")))
    in_order.append(by_id[key])
  if None in ids:  # no call has an id (see `_calls`): results are in call order
    return in_order + [(None, False)] * (len(calls) - len(in_order))
  return [by_id.get(key, (None, False)) for key in ids]

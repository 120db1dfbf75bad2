"""Reads Search-R1 text (arXiv 2503.09516) as runs.

  <think>I need the river.</think> <search>river of Paris</search>
  <information>Doc 1(Title: "Seine") ...</information>
  <think>That is it.</think> <answer>Seine</answer>

Searches there use Wikipedia, so a search becomes `wiki_search`; `--tools=search=TAG`
overrides it. Information is not escaped, so authorship is inferred from text, strictly:
these four spans follow one another without nesting, and each search is followed by its
information. The paper's prompt may come first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax.data.importers.calls import translate_and_note
from coa_jax.data.importers.row import (
  TASK_FIELDS,
  TEXT_FIELDS,
  ImportedRun,
  Recorder,
  RowRefused,
  note_unread,
  question_of,
  task_of,
)

_TEXT = (*TEXT_FIELDS, "response", "sequences_str")
_SPAN = re.compile(r"\s*<(think|search|information|answer)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|search|information|answer)>")
# The start and the end of the released data's prompt.
_PROMPT = "Answer the given question."
_QUESTION = re.compile(
  r"Question: ([^\n]+)\n*(?:<\|im_end\|>\s*<\|im_start\|>assistant|Assistant:)?"
)
_AFTER = re.compile(r"\s*(?:<\|im_end\|>|<\|endoftext\|>)?\s*")


def is_search_r1(row: Mapping[str, Any]) -> bool:
  """Whether some field in a row has text in this layout."""
  return bool(_texts(row))


def _texts(row: Mapping[str, Any]) -> list[str]:
  """Lists the names of fields in this layout."""
  out = []
  for name in _TEXT:
    text = row.get(name)
    if isinstance(text, str) and "</search>" in text and "</information>" in text:
      out.append(name)
  return out


def read_search_r1(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> ImportedRun:
  """Reads one row (`question`, and the text in one of `_TEXT`) as a run.

  Raises:
    RowRefused: the text does not have exactly this order.
  """
  # --- The text, without a prompt, and the question. A run without a search does not
  # show this layout: the first text is read.
  names = _texts(row) or [name for name in _TEXT if isinstance(row.get(name), str)]
  if not names:
    raise RowRefused("no_text", f"none of {', '.join(_TEXT)} is a string")
  recorder = Recorder(task_id)
  note_unread(recorder, "row", row, TASK_FIELDS | {names[0]})
  text = row[names[0]].replace("\r\n", "\n")
  question = question_of(row, None)
  before, found, _ = text.partition(_PROMPT)
  asked = _QUESTION.search(text, len(before))
  if found and asked and not _TAG.search(before):
    question = question or asked[1].strip()
    text = text[asked.end() :]

  # --- The spans, one after the other.
  table = {"search": "wiki_search", **table}
  answer = None
  query: str | None = None  # a search still without its information
  position = 0
  while not _AFTER.fullmatch(text, position):
    where = f"character {position}"
    role, content, position = _span(text, position)
    if answer is not None:
      raise RowRefused("multi_turn", f"<{role}> after the answer")
    if (role == "information") != (query is not None):
      fault = "without a search" if query is None else f"missing before <{role}>"
      raise RowRefused("no_result", f"{where}: <information> {fault}")
    if role == "think":
      recorder.think(content)
    elif role == "search":
      query = content.strip()
    elif role == "information":
      call = translate_and_note(recorder, where, "search", query, table)
      recorder.call(call.tag, call.body, content)
      query = None
    else:
      answer = content.strip()
  if query is not None:
    raise RowRefused("no_result", f"the search {query!r:.60} has no information")
  return recorder.end(task_of(row, task_id, question, "search_r1"), answer)


def _span(text: str, position: int) -> tuple[str, str, int]:
  """Returns (role, content, end) for the span at a position."""
  match = _SPAN.match(text, position)
  if match is None:
    excerpt = text[position:].strip()[:40]
    if re.match(r"\s*<(think|search|information|answer)>", text[position:]):
      raise RowRefused("unclosed", f"never closed: {excerpt!r}")
    raise RowRefused("stray_text", f"text outside every span: {excerpt!r}")
  inner = _TAG.search(match[2])
  if inner:
    raise RowRefused("nested", f"{inner[0]} inside <{match[1]}>")
  return match[1], match[2], match.end()

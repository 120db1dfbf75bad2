"""Reads ReAct text (Thought, Action, Observation) as runs (arXiv 2210.03629).

  Thought: I need the river.          Thought 1: I need the river.
  Action: Search[Paris]               Action 1: Search
  Observation: Paris is on the ...    Action Input 1: Paris
  Thought: ...                        Observation 1: Paris is on the ...
  Final Answer: Seine                 Action 2: Finish[Seine]

Observations are not escaped, so authorship is inferred from text, strictly: every
action needs a thought before it and an observation after it, and numbers, if present,
must count up. A marker at a line's start in an observation breaks that order, and the
row is refused. In unnumbered text, an observation that prints a whole round
(thought to observation) cannot be detected.
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
from coa_jax.data.teacher import runs
from coa_jax.protocol import roles

_MARK = re.compile(
  r"^(Question|Thought|Action Input|Action|Observation|Final Answer)"
  r"(?: (\d+))?:[ \t]?",
  re.MULTILINE,
)
# An action with its input: Search[Paris].
_INLINE = re.compile(r"\s*([\w.-]+)\[(.*)\]\s*", re.DOTALL)
# Marker -> allowed successors; "" is the start and the end.
_ORDER = {
  "": {"Thought"},
  "Thought": {"Action", "Final Answer"},
  "Action": {"Action Input", "Observation", ""},
  "Action Input": {"Observation", ""},
  "Observation": {"Thought", ""},
  "Final Answer": {""},
}


def is_react(row: Mapping[str, Any]) -> bool:
  """Whether some field in a row has text in this layout."""
  return any(_marks(row.get(name)) for name in TEXT_FIELDS)


def _marks(text: Any) -> bool:
  # One marker alone may occur in any text: require a thought and its successor.
  return isinstance(text, str) and bool(
    re.search(r"^Thought(?: \d+)?:", text, re.MULTILINE)
    and re.search(r"^(Action(?: \d+)?|Final Answer):", text, re.MULTILINE)
  )


def read_react(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> ImportedRun:
  """Reads one row (`question`, and the text in one of `TEXT_FIELDS`) as a run.

  If several fields have text, the first in this layout is read.

  Raises:
    RowRefused: the text does not have exactly this order, or a call cannot be
      translated.
  """
  recorder = Recorder(task_id)
  texts = [k for k in TEXT_FIELDS if isinstance(row.get(k), str)]
  if not texts:
    raise RowRefused("no_text", f"none of {', '.join(TEXT_FIELDS)} is a string")
  # A row may have other texts. If none has the layout, reading the first gives the
  # error.
  in_layout = [name for name in texts if _marks(row[name])]
  used = (in_layout or texts)[0]
  note_unread(recorder, "row", row, TASK_FIELDS | {used})
  blocks = _blocks(row[used])
  question = question_of(row, None)
  if blocks and blocks[0][0] == "Question":
    text = blocks[0][1].strip()
    if question and text != str(question).strip():
      recorder.note("block 0", f"the question {text!r:.80} beside the row's")
    question = question or text
    blocks = blocks[1:]
  _check(blocks)
  answer = _record_blocks(blocks, recorder, table)
  return recorder.end(task_of(row, task_id, question, "react"), answer)


def _blocks(text: str) -> list[tuple[str, str, str]]:
  """Splits text into (marker, content, number); drops one final line break each."""
  text = text.replace("\r\n", "\n")
  marks = list(_MARK.finditer(text))
  starts = [mark.start() for mark in marks] + [len(text)]
  head = text[: starts[0]]
  if head.strip():
    raise RowRefused("stray_text", f"text before every marker: {head.strip()[:40]!r}")
  out = []
  for mark, end in zip(marks, starts[1:], strict=True):
    content = text[mark.end() : end].removesuffix("\n")
    out.append((mark[1], content, mark[2] or ""))
  return out


def _check(blocks: list[tuple[str, str, str]]) -> None:
  """Refuses misplaced or miscounted markers, which an observation may have printed.

  A final answer ends the text in any round, so it needs no number.
  """
  last = ""
  count = 0
  numbered = {bool(number) for name, _, number in blocks if name != "Final Answer"}
  if len(numbered) > 1:
    raise RowRefused("ambiguous", "some markers have numbers, some have none")
  for name, content, number in blocks:
    if name not in _ORDER[last]:
      raise RowRefused(
        "ambiguous", f"{name} after {last or 'the start'}: {content!r:.40}"
      )
    if number:
      # An observation that prints markers does not know its round's number.
      if name == "Thought":  # begins a round
        count += 1
      if int(number) != count:
        raise RowRefused("ambiguous", f"{name} {number} in round {count}")
    last = name
  if not blocks or "" not in _ORDER[last]:
    raise RowRefused("cut", f"the text ends after {last or 'nothing'}")


def _record_blocks(
  blocks: list[tuple[str, str, str]], recorder: Recorder, table: Mapping[str, str]
) -> str | None:
  """Records every block; returns the answer, if there is one."""
  at = 0
  while at < len(blocks):
    name, content, _ = blocks[at]
    where = f"block {at}"
    at += 1
    if name == "Thought":
      recorder.think(content)
    elif name == "Final Answer":
      return content.strip()
    elif name == "Action":
      # --- The call, with its input in a separate block or in brackets.
      tool = content.strip()
      arguments = ""
      if at < len(blocks) and blocks[at][0] == "Action Input":
        arguments = blocks[at][1]
        at += 1
      elif match := _INLINE.fullmatch(content):
        tool = match[1]
        arguments = match[2]
      call = translate_and_note(recorder, where, tool, arguments, table)

      # --- Its result. `_check` has excluded any other successor.
      observation = blocks[at][1] if at < len(blocks) else None
      at += 1
      if call.tag == roles.ANSWER:
        # --- A final action (Finish[...]).
        if observation is not None and at < len(blocks):
          raise RowRefused("ambiguous", f"{where}: the answer is not the end")
        if observation:
          recorder.note(where, f"the result {observation!r:.80} of {tool}")
        return call.body
      if observation is None:
        raise RowRefused("no_result", f"{where}: {tool} has no observation")
      if call.tag == roles.SUGGESTED_ANSWER:
        recorder.say(runs.SOLVER, runs.CANDIDATE, call.body)
        recorder.note(where, f"the result {observation!r:.80} of {tool}")
      else:
        recorder.call(call.tag, call.body, observation)
  return None

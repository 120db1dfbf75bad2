"""Reads released Chain-of-Agents trajectories as this project's trajectories.

The released Chain-of-Agents SFT data (arXiv 2508.13167) are alpaca records: a JSON list
of objects with `instruction`, `input` and `output`. `output` has the whole trajectory,
including observations, as one string. Observations are not escaped there, so this
module infers authorship from text, strictly: an ambiguous record is dropped, with the
reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from coa_jax.data.importers.row import (
  TASK_FIELDS,
  Recorder,
  RowRefused,
  fields,
  note_unread,
  question_of,
  task_of,
)
from coa_jax.data.tasks.rl_schemas import question_below
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.prompts import conversation_text
from coa_jax.protocol.roles import ANSWER, OBSERVATION, Variant
from coa_jax.protocol.trajectory import (
  Author,
  Segment,
  Status,
  ToolCall,
  Trajectory,
  Usage,
)

_ROW = TASK_FIELDS | fields("instruction input output system history")
_OBSERVATION_TAG = re.compile(r"<(/?)observation>")
_OPENING = re.compile(r"\s*<([A-Za-z_][A-Za-z0-9_]*)>")


def read_alpaca(
  row: Mapping[str, Any], task_id: str, variant: Variant, keep_illegal: bool = False
) -> Trajectory:
  """Reads one alpaca record as a trajectory.

  The tool is the author of observation segments, including both tags and trailing white
  space. The policy is the author of the rest: one segment per span, with trailing white
  space. White space is verbatim: the segments' texts join to the record's `output`,
  except for escaped tags inside observations.

  Args:
    row: `instruction`, `output`, and perhaps `input`, `system`, `history` (earlier
      question-reply pairs, put before the question) and task fields, e.g. `answer`.
      `meta["lost"]` names all other fields.
    task_id: the task's id.
    variant: the record's dialect.
    keep_illegal: True keeps a record with separable spans that break the variant's
      rules (order, content), with the fault in `meta["fault"]`.

  Returns:
    The trajectory: status ended, or truncated if there is no answer; ungraded.

  Raises:
    RowRefused: the record is ambiguous, or (without `keep_illegal`) breaks a rule.
  """
  row = {**row, "input": "" if row.get("input") is None else row["input"]}
  for field in ("instruction", "input", "output"):
    value = row.get(field)
    if not isinstance(value, str):
      raise RowRefused("bad_field", f"{field!r} must be a string, got {value!r:.80}")
  trajectory = _trajectory(row, task_id, variant)
  # The spans are separated by now. Their order comes next: model-written records often
  # violate it.
  fault = parse(trajectory.text, variant)
  if not fault.ok and not keep_illegal:
    raise RowRefused(fault.verdict.value, fault.detail)
  if not fault.ok:
    trajectory.meta["fault"] = f"{fault.verdict.value}: {fault.detail}"
  return trajectory


def _trajectory(row: Mapping[str, Any], task_id: str, variant: Variant) -> Trajectory:
  # The records' own loader joins these fields with a line break.
  prompt = "\n".join(filter(None, (row["instruction"], row["input"])))
  asked = question_below(prompt) or prompt
  # As in a chat, earlier turns go between the prompt's head and the question.
  before = _before(row.get("history"), variant)
  at = prompt.rindex(asked)
  prompt = prompt[:at] + before + prompt[at:]
  # The prompt's head, too, comes from the file, so no part is trusted.
  segments = [Segment(Author.PROMPT, "question", prompt)]
  segments += _segments(row["output"], variant)
  calls = _calls(segments, variant)
  ended = segments[-1].role == ANSWER

  # --- The task's fields; only present ones, so that equal rows stay equal.
  question = question_of(row, asked)
  if isinstance(question, str):
    question = before + question
  task = task_of(row, task_id, question, "alpaca")
  meta: dict[str, Any] = {"question": task.question, "source": task.source}
  if task.answers:
    meta["answers"] = list(task.answers)
  if row.get("kind"):
    meta["kind"] = task.kind.value
  if task.family:
    meta["family"] = task.family
  if row.get("system"):
    meta["system"] = row["system"]
  recorder = Recorder(task_id)
  note_unread(recorder, "row", row, _ROW)
  if recorder.lost:
    meta["lost"] = recorder.lost
  return Trajectory(
    task_id=task_id,
    segments=segments,
    calls=calls,
    status=Status.ENDED if ended else Status.TRUNCATED,
    usage=Usage(tool_calls=len(calls), model_calls=1),
    meta=meta,
  )


def _before(history: Any, variant: Variant) -> str:
  """Formats earlier turns for the question's beginning; "" if there are none."""
  if not history:
    return ""
  if not isinstance(history, list):
    raise RowRefused("bad_field", f"'history' must be a list, got {history!r:.80}")
  said: list[tuple[str, str]] = []
  for turn in history:
    if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
      raise RowRefused("bad_field", f"'history' holds {turn!r:.80}, not two texts")
    asked, reply = turn
    said.append(("user", question_below(asked) or asked))
    # The user saw only a trajectory's answer.
    answer = parse(reply, variant).answer
    said.append(("assistant", reply.strip() if answer is None else answer))
  return conversation_text([*said, ("user", "")])


def _segments(output: str, variant: Variant) -> list[Segment]:
  """Cuts the output at its observations, and the text between them into spans."""
  if not output.strip():
    raise RowRefused("empty", "the output is empty")
  segments: list[Segment] = []
  position = 0
  for start, end in _observations(output):
    segments += _policy_segments(output[position:start], variant, observed=True)
    opening = roles.open_tag(OBSERVATION)
    closing = roles.close_tag(OBSERVATION)
    content = output[start + len(opening) : end - len(closing)]
    # Trailing white space belongs to the observation: the policy continues with its
    # next tag.
    after = output[end:]
    space = after[: len(after) - len(after.lstrip())]
    text = f"{opening}{roles.escape(content)}{closing}{space}"
    segments.append(Segment(Author.TOOL, OBSERVATION, text))
    position = end + len(space)
  return segments + _policy_segments(output[position:], variant, observed=False)


def _observations(output: str) -> list[tuple[int, int]]:
  """Finds each observation's start and end; refuses tags that do not alternate."""
  spans: list[tuple[int, int]] = []
  start: int | None = None
  for match in _OBSERVATION_TAG.finditer(output):
    closing = bool(match[1])
    # Observations must not nest: a tool printed the inner tag, so the observation's end
    # is unknown.
    if closing != (start is not None):
      detail = "closed but not open" if closing else "opened inside another"
      raise RowRefused("nested", f"observation {detail} at character {match.start()}")
    if closing:
      spans.append((start, match.end()))
      start = None
    else:
      start = match.start()
  if start is not None:
    raise RowRefused("unclosed", f"observation at character {start} is never closed")
  return spans


def _policy_segments(text: str, variant: Variant, observed: bool) -> list[Segment]:
  """Cuts the policy's text between observations into spans, one segment each.

  `observed` says whether an observation follows.
  """
  segments: list[Segment] = []
  position = 0
  while text[position:].strip():
    # --- The opening tag, after white space at most.
    match = _OPENING.match(text, position)
    if match is None:
      excerpt = text[position:].strip()[:40]
      raise RowRefused("stray_text", f"text outside every span: {excerpt!r}")
    role = match[1]
    if role not in variant.tags:
      raise RowRefused("unknown_tool", f"<{role}> is no span of {variant.name!r}")

    # --- The closing tag, before any other tag.
    close = roles.close_tag(role)
    end = text.find(close, match.end())
    if end < 0:
      detail = f"<{role}> is never closed"
      if observed:
        detail = f"<{role}> is still open where an observation starts"
      raise RowRefused("unclosed", detail)
    inner = roles.find_tag(text[match.end() : end])
    if inner is not None:
      raise RowRefused("nested", f"{inner} inside <{role}>")

    # --- White space after the span belongs to it, as in sampled text.
    end += len(close)
    while end < len(text) and text[end].isspace():
      end += 1
    segments.append(Segment(Author.POLICY, role, text[position:end]))
    position = end
  if position < len(text):  # only white space before an initial observation
    segments.append(Segment(Author.POLICY, "", text[position:]))
  return segments


def _calls(segments: list[Segment], variant: Variant) -> list[ToolCall]:
  """Makes a call from each tool span directly before an observation."""
  calls = []
  # A call without an observation never ran: the record ends there, or breaks a rule.
  for call, result in itertools.pairwise(segments):
    if call.role in variant.tools and result.role == OBSERVATION:
      calls.append(ToolCall(call.role, _content(call), _content(result)))
  return calls


def _content(segment: Segment) -> str:
  text = segment.text.strip()
  opening = roles.open_tag(segment.role)
  closing = roles.close_tag(segment.role)
  content = text[len(opening) : len(text) - len(closing)]
  if segment.role == OBSERVATION:  # `_segments` has escaped it
    return roles.unescape(content)
  return content

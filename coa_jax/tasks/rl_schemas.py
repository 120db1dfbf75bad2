"""Rows of RL data sets in verl's schema: `prompt`, `reward_model`, `extra_info`.

The released Chain-of-Agents rows, DAPO-Math, Skywork-OR1 and Search-R1 are of it. What
a row's truth looks like says how it is judged.
"""

from __future__ import annotations

import json
import re
from typing import Any

from coa_jax.tasks.code_schemas import are_strings, count_tests
from coa_jax.tasks.task import Kind, Row, Task

# Where the question starts in a released prompt: below the last rule of its head.
_QUESTION = re.compile(r"\n\s*\n(?:Task|Question):\s*")
# Words around the problem of DAPO-Math, which ask for a format that is not ours.
_DAPO = re.compile(
  r"\ASolve the following math problem step by step\. The last line of your response "
  r"should be of the form Answer:.*?\n\n(.*?)"
  r'(?:\n\nRemember to put your answer on its own line after "Answer:"\.?)?\s*\Z',
  re.DOTALL,
)
# The shapes of hidden tests (released schema, `reward_model.ground_truth`).
_TESTS = (
  {"stdin", "expected_output"},
  {"functional"},
  {"test_code", "entry_point"},
  {"inputs", "outputs"},
)


def released(row: Row, where: str, default_id: str) -> Task:
  """A row of the released RL schema, as written for verl."""
  # --- What the answer is judged by.
  truth = None
  if isinstance(row["reward_model"], dict):
    truth = row["reward_model"].get("ground_truth")
  if truth is None:
    raise ValueError(
      f"{where}: field 'reward_model.ground_truth' is missing; accepted: a string, a "
      "JSON string or an object"
    )
  truth = _structured(truth)
  if isinstance(truth, dict):  # a table gives every row the fields of all
    truth = {k: v for k, v in truth.items() if v is not None}
  # --- Id, question, source. An index is unique in its source alone.
  extra = row.get("extra_info") or {}
  source = str(row.get("data_source") or "")
  name = str(extra.get("index") or default_id)
  if not name.startswith(source):
    name = f"{source}-{name}"
  task = {
    "id": name,
    "question": _question(row, extra, where),
    "source": source,
    "family": extra.get("difficulty") or "",
    "meta": {},
  }
  # --- The kind, by the shape of the truth; no field names it.
  if isinstance(truth, dict) and "target" in truth:
    task.update(kind=Kind.QA, answers=truth["target"])
  elif isinstance(truth, dict) and _has_tests(truth):
    meta = {k: v for k, v in extra.items() if k in _CODE_META and v}
    meta["tests"] = truth
    answer = f"a program that passes {count_tests(truth)} tests"
    task.update(kind=Kind.CODE, answers=answer, meta=meta)
  elif isinstance(truth, str | list):
    task.update(kind=Kind.MATH, answers=truth)
  else:
    fields = repr(truth)
    if isinstance(truth, dict):
      fields = ", ".join(map(repr, truth))
    accepted = " or ".join(map("+".join, map(sorted, _TESTS)))
    raise ValueError(
      f"{where}: field 'reward_model.ground_truth' has {fields}; accepted: a string or "
      f"a list of strings (math), 'target' (qa), or tests: {accepted} (code)"
    )
  return Task.from_json(task, where)


def _has_tests(truth: Row) -> bool:
  return any(shape <= set(truth) for shape in _TESTS)


_CODE_META = ("starter_code", "platform", "contest_id", "contest_date", "metadata")


def _structured(truth: Any) -> Any:
  """A JSON string of an object or of a list of strings as such; all else unchanged.

  `[0,1]` is a mathematical answer, so a list of anything but strings stays text.
  """
  if not isinstance(truth, str):
    return truth
  try:
    value = json.loads(truth)
  except (ValueError, RecursionError):
    return truth
  if isinstance(value, dict) or (value and are_strings(value)):
    return value
  return truth


def _question(row: Row, extra: Row, where: str) -> str:
  """The question as it was stored, else as it stands in the last user message.

  A message that does not mark its question is the question as a whole.
  """
  for question in (extra.get("question"), row.get("question")):
    if isinstance(question, str) and question.strip():
      return question
  users = [m["content"] for m in row["prompt"] if m.get("role") == "user"]
  if not users or not isinstance(users[-1], str) or not users[-1].strip():
    raise ValueError(
      f"{where}: no question; accepted: 'extra_info.question', 'question', or a user "
      "message in 'prompt'"
    )
  question = question_below(users[-1])
  if question is not None:
    return question
  dapo = _DAPO.search(users[-1])
  if dapo is not None:
    return dapo[1].strip()
  return users[-1].strip()


def question_below(prompt: str) -> str | None:
  """The question of a released prompt, below its head; None where it has no mark."""
  match = _QUESTION.search(prompt)
  if match is None:
    return None
  return prompt[match.end() :].strip()

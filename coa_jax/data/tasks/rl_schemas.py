"""Reads RL data sets in verl's schema: `prompt`, `reward_model`, `extra_info`.

The released Chain-of-Agents rows, DAPO-Math, Skywork-OR1 and Search-R1 use this schema.
The ground truth's form decides the task's kind.
"""

from __future__ import annotations

import json
import re
from typing import Any

from coa_jax.data.tasks.code_schemas import are_strings, tests_as_answer
from coa_jax.data.tasks.task import Kind, Row, first_of, is_absent
from coa_jax.runtime.json_io import shown

# The mark before a released prompt's question, after the last rule in its head.
_QUESTION = re.compile(r"\n\s*\n(?:Task|Question):\s*")
_TAG = re.compile("<(think|plan|answer)>")
# The instructions around DAPO-Math's problem ask for a format different from ours.
_DAPO = re.compile(
  r"\ASolve the following math problem step by step\. The last line of your response "
  r"should be of the form Answer:.*?\n\n(.*?)"
  r'(?:\n\nRemember to put your answer on its own line after "Answer:"\.?)?\s*\Z',
  re.DOTALL,
)
# Hidden tests' field sets (released schema, `reward_model.ground_truth`).
_TESTS = (
  {"stdin", "expected_output"},
  {"functional"},
  {"test_code", "entry_point"},
  {"inputs", "outputs"},
)
_CODE_META = ("starter_code", "platform", "contest_id", "contest_date", "metadata")


def released(row: Row, where: str, default_id: str) -> Row:
  """Reads a row in the released RL schema, as written for verl."""
  # --- The ground truth.
  truth = None
  reward_model = _structured(row["reward_model"])
  if isinstance(reward_model, dict):
    truth = reward_model.get("ground_truth")
  if is_absent(truth) or truth == "":
    raise ValueError(
      f"{where}: field 'reward_model.ground_truth' is missing; accepted: a string, a "
      "number, a JSON string or an object"
    )
  truth = _structured(truth)
  if isinstance(truth, dict):  # a table gives every row all fields
    truth = {k: v for k, v in truth.items() if v is not None}
  # --- Id, question, source. An index is unique only within its source.
  extra = _structured(row.get("extra_info"))
  if extra is not None and not isinstance(extra, dict):
    raise ValueError(f"{where}: field 'extra_info' is {shown(extra)}, not an object")
  extra = extra or {}
  source = str(first_of(row, "data_source"))
  name = str(first_of(extra, "index", default=default_id))
  if not name.startswith(source):
    name = f"{source}-{name}"
  messages = _messages(row["prompt"])
  task: dict[str, Any] = {
    "id": name,
    "question": _question(row, extra, messages, where),
    "source": source,
    "family": str(first_of(extra, "difficulty")),
    "meta": {},
  }
  system = system_text(messages)
  if system:
    task["meta"] = {"system": system}
  # --- The kind, from the truth's shape; no field names the kind.
  if isinstance(truth, dict) and "target" in truth:
    task.update(kind=Kind.QA, answers=truth["target"])
  elif isinstance(truth, dict) and any(shape <= set(truth) for shape in _TESTS):
    meta = {k: v for k, v in extra.items() if k in _CODE_META and v}
    task["meta"] |= {**meta, "tests": truth}
    task.update(kind=Kind.CODE, answers=tests_as_answer(truth))
  elif isinstance(truth, str | int | float | list):
    task.update(kind=Kind.MATH, answers=truth)
  else:
    fields = repr(truth)
    if isinstance(truth, dict):
      fields = ", ".join(map(repr, truth)) or "no fields"
    accepted = " or ".join(map("+".join, map(sorted, _TESTS)))
    raise ValueError(
      f"{where}: field 'reward_model.ground_truth' has {fields}; accepted: a string, a "
      f"number or a list of them (math), 'target' (qa), or tests: {accepted} (code)"
    )
  return task


def _structured(truth: Any) -> Any:
  """Decodes a JSON object or string list; returns other values unchanged.

  Other JSON lists stay text: `[0,1]` is a mathematical answer.
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


def _question(row: Row, extra: Row, messages: list[Any], where: str) -> str:
  """Returns the stored question for one message, else the question in the messages."""
  candidates = (extra.get("question"), row.get("question"))
  stored = next((q for q in candidates if isinstance(q, str) and q.strip()), None)
  if stored and len([m for m in messages if _role(m) != "system"]) < 2:
    return stored
  return last_question(messages, where, stored)


def _messages(prompt: Any) -> list[Any]:
  """Reads a prompt as messages: a list, its JSON, or one user message's text."""
  if isinstance(prompt, str):
    try:
      value = json.loads(prompt)
    except (ValueError, RecursionError):
      value = None
    if isinstance(value, list) and value and all(map(_role, value)):
      return value
  return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def last_question(messages: list[Any], where: str, question: str | None = None) -> str:
  """Returns the question in a prompt's messages, after any earlier turns.

  The last message must be the user's. Without a stored `question` and without a mark
  in that message, the whole message is the question.

  Raises:
    ValueError: there is no question, or a message has an unknown role or no text.
  """
  said = []
  for number, message in enumerate(messages):
    role = _role(message)
    text = _text(message)
    if role not in ("system", "user", "assistant") or text is None:
      raise ValueError(
        f"{where}: field 'prompt[{number}]' is {shown(message)}; accepted: a system, "
        "user or assistant message with a text as content"
      )
    if role != "system":
      said.append((role, text))
  if not said or said[-1][0] != "user" or not said[-1][1].strip():
    raise ValueError(
      f"{where}: no question; accepted: 'extra_info.question', 'question', or a user "
      "message at the end of 'prompt'"
    )
  if question is None:
    text = said[-1][1]
    dapo = _DAPO.search(text)
    question = question_below(text)
    if question is None:
      question = dapo[1].strip() if dapo else text.strip()
  if len(said) == 1:
    return question
  said[-1] = ("user", question)
  # As `protocol.prompts.conversation_text`, whose import would lengthen the chain.
  return "\n\n".join(f"{role.capitalize()}: {text}" for role, text in said)


def system_text(messages: list[Any]) -> str:
  """Returns a prompt's system messages, which are not part of the question."""
  texts = [_text(m) for m in messages if _role(m) == "system"]
  return "\n\n".join(filter(None, texts))


def _role(message: Any) -> str:
  return str(message.get("role", "")) if isinstance(message, dict) else ""


def _text(message: Any) -> str | None:
  """Returns a message's text, with parts joined; None for other content."""
  content = message.get("content") if isinstance(message, dict) else None
  if isinstance(content, list) and all(isinstance(part, dict) for part in content):
    texts = [part.get("text") for part in content]
    content = "\n".join(texts) if content and are_strings(texts) else None
  return content if isinstance(content, str) else None


def question_below(prompt: str) -> str | None:
  """Returns a released prompt's question, after its head; None without either."""
  match = _QUESTION.search(prompt)
  # A head describes the protocol's tags. Other text before the mark is the question's.
  if match is None or not _TAG.search(prompt[: match.start()]):
    return None
  return prompt[match.end() :].strip()

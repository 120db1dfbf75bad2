"""Multiple-choice tasks: the question lists the options, a letter is the answer.

Reads rows from MMLU, MMLU-Pro, ARC, GPQA, MedQA, MedMCQA, C-Eval, SciQ and similar data
sets. Options are a list, a mapping from letters, columns A, B, C, or a right answer
next to wrong answers.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import string
from collections.abc import Sequence
from typing import Any

from coa_jax.data.tasks.cells import listed
from coa_jax.data.tasks.task import Row, first_of, is_absent
from coa_jax.runtime.json_io import shown

ASK_LETTER = "Answer with the letter of the right option."  # added to a question
# Columns with one option each (A, "Option B", option_c, opd), right or wrong answers.
_LETTERED = re.compile(r"([A-J])|(?:option|choice|op)[ _]?([a-jA-J])", re.IGNORECASE)
_RIGHT = re.compile(r"correct[ _]answer", re.IGNORECASE)
_WRONG = re.compile(
  r"(?:incorrect|wrong)[ _]answers?[ _]?\d*|distractors?[ _]?\d*", re.IGNORECASE
)
# Columns with the right option, besides answer columns.
_GOLD = (
  "answerKey",
  "answer_index",
  "answer_idx",
  "answer_letter",
  "correct_option",
  "cop",
  "correct",
)
_LABELS = ("label", "letter", "key", "id")
_TEXTS = ("text", "value", "content", "option")
# Columns with a passage that the question refers to, but does not show.
_PASSAGES = ("article", "passage", "context")


@dataclasses.dataclass(frozen=True)
class _Options:
  """A row's option texts and their labels (letters by default).

  `numeric` means all options are numbers: then an integer answer may be an
  option's text or its index; otherwise it is an index first.
  """

  labels: list[str]
  texts: list[str]
  numeric: bool


def with_options(question: Any, answers: Any, row: Row, where: str) -> Row | None:
  """Returns a multiple-choice row's question and answers; None without options.

  The question lists the options by letter; the answers are the right option's letter
  and text. `where` names the row in error messages.

  Raises:
    ValueError: the options' shape or number is not accepted, or the row does not
      select exactly one option.
  """
  if not isinstance(question, str):
    return None
  # --- The options, and the right option's index.
  right = [text for n in row if _RIGHT.fullmatch(n) for text in _texts(row[n])]
  wrong = [text for n in row if _WRONG.fullmatch(n) for text in _texts(row[n])]
  if len(right) == 1 and wrong:
    # Shuffled: the right option would always be the first. The row's id is the seed,
    # not the row's place.
    name = first_of(row, "id", "Record ID", "question_id", default=question)
    texts = right + wrong
    random.Random(f"options of {name}").shuffle(texts)
    gold = texts.index(right[0])
  else:
    options = _options(row, where)
    if options is None:
      return None
    said = {name: row[name] for name in _GOLD if not is_absent(row.get(name))}
    if not is_absent(answers):
      said["answer"] = answers
    gold = _gold(said, options, where)
    texts = options.texts
  if not 2 <= len(texts) <= len(string.ascii_uppercase):
    raise ValueError(f"{where}: {len(texts)} options; accepted: from 2 to 26")

  # --- The question with all options, unless it already shows them.
  letters = string.ascii_uppercase[: len(texts)]
  lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True)]
  parts = [row[name] for name in _PASSAGES if isinstance(row.get(name), str)]
  parts.append(question)
  if not all(_in_question(line, question) for line in lines):
    parts.append("\n".join(lines))
  parts.append(ASK_LETTER)
  # --- The right text is an answer, too, unless it is an option's letter.
  accepted = [letters[gold]]
  if texts[gold].strip(" .()[]").upper() not in letters:
    accepted.append(texts[gold])
  return {"question": "\n\n".join(parts), "answers": accepted}


def _in_question(line: str, question: str) -> bool:
  """Whether a question shows an option: "A. text", "A) text" or "(A) text"."""
  letter, text = line.split(". ", 1)
  return any(f"{letter}{mark} {text}" in question for mark in ".):")


def _options(row: Row, where: str) -> _Options | None:
  """Reads a row's options; None if it has none."""
  for name in row:
    if name.lower() in ("options", "choices"):
      value = row[name]
      if isinstance(value, str):
        value = _structured(value)
      if isinstance(value, dict) and not any(value.values()):
        continue  # a table gives every row all fields
      if value in ("", []) or is_absent(value):
        continue
      found = _labelled(value)
      if found is None:
        raise ValueError(
          f"{where}: field {name!r} is {shown(value)}; accepted: a list of texts, "
          "{letter: text}, or {text: [...], label: [...]}"
        )
      return found
  # --- One column per option.
  columns = {}
  for name, value in row.items():
    match = _LETTERED.fullmatch(name)
    # Columns a and b may hold anything; A and B are options.
    if match and name not in string.ascii_lowercase and not is_absent(value):
      columns[(match[1] or match[2]).upper()] = value
  if not {"A", "B"} <= set(columns):
    return None
  return _labelled(dict(sorted(columns.items())))


def _structured(text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return listed(text)


def _labelled(value: Any) -> _Options | None:
  """Reads options in any accepted form; returns None for other values."""
  labels: Sequence[Any] = string.ascii_uppercase
  # --- {"text": [...], "label": [...]}, or {"A": text}; unused letters may be null.
  if isinstance(value, dict) and isinstance(value.get("text"), list):
    if isinstance(value.get("label"), list):
      labels = value["label"]
    value = value["text"]
  elif isinstance(value, dict):
    value = {label: text for label, text in value.items() if not is_absent(text)}
    labels = list(value)
    value = list(value.values())
  # --- [{"label": "A", "text": ...}]
  elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
    if all(first_of(one, *_LABELS) != "" for one in value):
      labels = [first_of(one, *_LABELS) for one in value]
    value = [first_of(one, *_TEXTS, default=None) for one in value]
  if not isinstance(value, list) or len(labels) < len(value):
    return None
  if not all(isinstance(one, str | int | float) for one in (*value, *labels)):
    return None
  labels = [str(label).strip().upper() for label in labels[: len(value)]]
  texts = [str(text).strip() for text in value]
  # --- Texts that begin with their own letters: "A) 21".
  heads = [re.compile(rf"\(?{re.escape(label)}[).:]\s*") for label in labels]
  pairs = list(zip(heads, texts, strict=True))
  if all(head.match(text) for head, text in pairs):
    texts = [head.sub("", text, count=1) for head, text in pairs]
  numeric = not any(isinstance(one, str) for one in value)
  return _Options(labels, texts, numeric)


def _gold(said: Row, options: _Options, where: str) -> int:
  """Returns the option index on which the row's answer fields agree."""
  found: set[int] = set(range(len(options.texts)))
  fits = [_fitting(value, options) for value in said.values()]
  for fitting in filter(None, fits):
    found &= fitting
  if not any(fits) or len(found) != 1:
    number = "several" if any(fits) and found else "none"
    raise ValueError(
      f"{where}: {number} of the {len(options.texts)} options fit "
      f"{', '.join(f'{k}={shown(v)}' for k, v in said.items()) or 'no answer'}; "
      "accepted: a letter, the number of an option from 0, or its text"
    )
  return found.pop()


def _fitting(value: Any, options: _Options) -> set[int]:
  """Returns the indices of options that match a value by letter, text or number."""
  if isinstance(value, list) and len(value) == 1:
    value = value[0]
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    return set()
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  said = str(value).strip().casefold()
  letter = said.strip(" .()[]")
  by_letter = set()
  by_text = set()
  for n, (label, text) in enumerate(zip(options.labels, options.texts, strict=True)):
    label, text = label.casefold(), text.casefold()
    if label == letter:
      by_letter.add(n)
    if said in (text, f"{label}. {text}", f"{label}) {text}", f"({label}) {text}"):
      by_text.add(n)
  # --- A number counts from 0, as in MMLU, unless the labels are numbers.
  by_number = {int(said)} if said.isdecimal() and len(said) < 3 else set()
  by_number &= set(range(len(options.texts)))
  if by_letter and said.isdecimal():
    return by_letter
  if isinstance(value, int) and by_number and not options.numeric:
    return by_number
  return by_letter | by_text | by_number


def _texts(value: Any) -> list[str]:
  """Returns a column's non-empty texts; its value is one text or a list."""
  if isinstance(value, str):
    value = listed(value)
  if not isinstance(value, list):
    value = [value]
  return [str(one).strip() for one in value if not is_absent(one) and one != ""]

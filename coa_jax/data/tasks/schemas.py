"""Reads a data set's row as a task, by the row's fields.

A file's name never decides the schema. A row without a matching schema raises an error
that names the row, its columns and the nearest schema. Unused columns go into `meta`.

budget: a schema is a reader and a row of `_SCHEMAS`, side by side.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from coa_jax.data.tasks.cells import is_unread_list, listed
from coa_jax.data.tasks.choices import with_options
from coa_jax.data.tasks.code_schemas import (
  apps,
  codecontests,
  humaneval,
  livecodebench,
  mbpp,
)
from coa_jax.data.tasks.encrypted import (
  browsecomp,
  browsecomp_plus,
  check_in_clear,
  opened,
)
from coa_jax.data.tasks.rl_schemas import last_question, released, system_text
from coa_jax.data.tasks.task import Kind, Row, Task, first_of, is_absent
from coa_jax.runtime.fields import nearest
from coa_jax.runtime.json_io import parse_json, shown

_NAME_COLUMNS = (
  "--config.tasks.fields.question=COLUMN --config.tasks.fields.answers=COLUMN "
  "(coa tasks: --fields=question=COLUMN,answers=COLUMN)"
)
_GSM8K_FINAL = re.compile(r"\n#### *(\S.*?)\s*$")
# Our field -> data sets' names for it; the first non-empty column is used.
_NAMES = {
  "question": (
    "question",
    "Question",
    "problem",
    "Problem",
    "query",
    "question_stem",
    "prompt",
    "Prompt",
  ),
  "answers": (
    "answers",
    "answer",
    "golden_answers",
    "possible_answers",
    "Answer",
    "Final answer",
    "final_answer",
  ),
  "id": (
    "id",
    "task_id",
    "unique_id",
    "_id",
    "ID",
    "query_id",
    "Record ID",
  ),
  "family": ("family", "Level", "level", "category", "topic", "subject", "difficulty"),
  "source": ("source", "data_source"),
}
_OURS = {field.name for field in dataclasses.fields(Task)} | {"answer"}
FIELDS = ("question", "answers", "id", "kind", "source", "family")
# Columns with a question's pictures or files.
_ATTACHED = re.compile(
  r"(?:image|img|picture|photo|video|audio)s?(?:_?\d+|_path|_url|_preview)?"
  r"|attachments?|file_?(?:name|path)s?",
  re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Reading:
  """Defaults and column names for reading rows.

  Attributes:
    default_id: the task's id if the row has none.
    fields: our field -> the row's column, "a.b" for b inside a; a missing column is
      allowed if the row has our field.
    kind: the default kind; None to infer it from the row's columns.
    source: the default source.
  """

  default_id: str
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  kind: Kind | None = None
  source: str = ""


def read_task(row: Row, where: str, default_id: str) -> Task:
  """Reads one row in any accepted schema as a task.

  Raises:
    ValueError: the row fits no schema.
  """
  return read_row(row, where, Reading(default_id))[0]


def read_row(row: Row, where: str, reading: Reading) -> tuple[Task, bool]:
  """Reads a row as a task; also returns whether the row gives its kind.

  Raises:
    ValueError: the row fits no schema, or lacks a column of `reading.fields`.
  """
  mapped = _mapped(row, where, reading.fields)
  task = None
  if not {"question", "answers"} & set(mapped):
    task = _by_schema(row, where, reading.default_id)
  if task is None:
    task, said = _plain_row(row, where, reading, mapped)
  else:
    # A text truth is assumed to be mathematics, but may be anything.
    said = "reward_model" not in row or task.kind != Kind.MATH
    # Configured columns override a known schema's.
    if mapped:
      task = Task.from_json({**task.to_json(), **mapped}, where)
      said = said or "kind" in mapped
  check_in_clear(task.question, where)
  if not said and reading.kind is not None:
    task = dataclasses.replace(task, kind=reading.kind)
  if not task.source:
    task = dataclasses.replace(task, source=reading.source)
  return task, said


def attached(row: Row) -> str | None:
  """Returns the name of a column with a picture or a file; None if there is none."""
  for name, value in row.items():
    if _ATTACHED.fullmatch(name) and _holds_something(value):
      return name
  # Messages with a part other than text.
  for message in row["prompt"] if isinstance(row.get("prompt"), list) else ():
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else ():
      if isinstance(part, dict) and part.get("type", "text") != "text":
        return "prompt"
  return None


def _holds_something(value: Any) -> bool:
  """Whether a value is neither null nor empty, and not made only of empty values."""
  if isinstance(value, dict):
    return any(map(_holds_something, value.values()))
  if isinstance(value, list | tuple):
    return any(map(_holds_something, value))
  if isinstance(value, str | bytes):
    return bool(value.strip())
  return value is not False and not is_absent(value)


def _mapped(row: Row, where: str, fields: Mapping[str, str]) -> Row:
  """Returns {our field: value} for every field that the config maps to a column."""
  mapped = {}
  absent = []
  for ours, column in fields.items():
    value: Any = row
    names = [column] if column in row else column.split(".")
    for name in names:
      value = value.get(name) if isinstance(value, dict) else None
    if not is_absent(value):
      mapped[ours] = value
    elif ours not in row and ours in ("question", "answers"):
      absent.append(f"{ours}={column!r}{nearest(column, row)}")
  if absent:
    raise ValueError(f"{where}: tasks.fields names no column: {'; '.join(absent)}")
  return mapped


def _by_schema(row: Row, where: str, default_id: str) -> Task | None:
  """Reads a row by its data set's schema; None if its fields match no schema."""
  for name, needed, reader in _SCHEMAS:
    if needed <= set(row):
      # The file is untrusted: a reader's exception is the row's fault.
      try:
        return Task.from_json(reader(row, where, default_id), where)
      except (TypeError, KeyError, AttributeError, IndexError, ValueError) as e:
        if type(e) is ValueError and str(e).startswith(where):
          raise
        found = ", ".join(
          f"{field}: {shown(row[field], 40)}" for field in sorted(needed)
        )
        raise ValueError(
          f"{where}: the row has the columns of {name}, but not its values ({found}); "
          f"to read it as a plain question name its columns: {_NAME_COLUMNS}"
        ) from e
  # GSM8K, with any other columns: the solution ends with the answer.
  answer = row.get("answer")
  final = _GSM8K_FINAL.search(answer) if isinstance(answer, str) else None
  if final is None or row.get("kind") is not None or not row.get("question"):
    return None
  if set(row) == {"question", "answer"}:
    default_id = f"gsm8k-{default_id}"
  rest = {name: row[name] for name in row if first_of(row, name) != ""}
  del rest["question"], rest["answer"]
  plain = {
    "id": default_id,
    "source": "gsm8k",
    **rest,
    "question": row["question"],
    "answers": _without_separators(final[1]),
    "kind": Kind.MATH,
  }
  task = _with_extras(plain, where)
  return dataclasses.replace(task, meta={**task.meta, "solution": answer})


def _without_separators(answer: str) -> str:
  """Removes a number's thousands separators; other commas stay."""
  if re.fullmatch(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?%?", answer):
    return answer.replace(",", "")
  return answer


def _plain_row(
  row: Row, where: str, reading: Reading, mapped: Row
) -> tuple[Task, bool]:
  """Reads a row with question and answers, under our names or names in `_NAMES`.

  Returns:
    The task, and whether the row gives its kind.
  """
  empty = [name for name, value in row.items() if is_absent(value)]
  row = {name: value for name, value in row.items() if name not in empty}
  whole_row = dict(row)
  # --- Drop the whole columns that fields.* names: `mapped` has their values.
  for ours, column in reading.fields.items():
    if ours in mapped:
      row.pop(column, None)
  foreign = bool(mapped) or not set(row) <= _OURS
  # --- Rename known columns to our fields.
  plain = dict(mapped)
  columns = dict(reading.fields)
  for ours, names in _NAMES.items():
    found = [name for name in names if name in row]
    # Among several columns, prefer a non-empty one.
    found.sort(key=lambda name: row[name] == "")
    if ours not in plain and found:
      columns[ours] = found[0]
      plain[ours] = row.pop(found[0])
  # --- Messages, ciphertext, lists as text, options.
  if isinstance(plain.get("question"), list):
    system = system_text(plain["question"])
    plain["question"] = last_question(plain["question"], where)
    if system:
      row["system"] = system
  if "question" in plain and "answers" in plain:
    plain["question"], plain["answers"] = opened(
      plain["question"],
      plain["answers"],
      row.get("canary"),
      where,
      (columns["question"], columns["answers"]),
    )
  if isinstance(plain.get("answers"), str):
    plain["answers"] = _read_list(plain["answers"], where, columns["answers"])
  options = with_options(plain.get("question"), plain.get("answers"), whole_row, where)
  if options is not None:
    plain.update(options)
  missing = [ours for ours in ("question", "answers") if ours not in plain]
  if missing:
    raise ValueError(_lacking(missing, row, plain, empty, where))
  # --- A problem is mathematics, unless the row or the config gives another kind.
  said = "kind" in row or "kind" in plain
  if not said and options is None and columns["question"] in ("problem", "Problem"):
    plain["kind"] = Kind.MATH
  if foreign:
    plain["family"] = str(plain.get("family", ""))
  if plain.get("id", "") == "":
    plain["id"] = reading.default_id
  return _with_extras({**row, **plain}, where), said


def _read_list(text: str, where: str, column: str) -> Any:
  """Reads answers stored as one text: a list's items, or the text itself.

  Raises:
    ValueError: the list cannot be read.
  """
  answers = listed(text)
  if isinstance(answers, str) and is_unread_list(answers):
    raise ValueError(
      f"{where}: field {column!r} is {shown(text)}, a list that cannot be read; "
      'accepted: a text, or a list of texts: ["a", "b"]'
    )
  return answers


def _lacking(
  missing: list[str], row: Row, plain: Row, empty: list[str], where: str
) -> str:
  """Says which fields a row lacks, and which of its columns may be meant."""
  named = ", ".join(map(repr, [*plain, *row][:12])) or "none"
  absent = " and ".join(f"no field {name!r}" for name in missing)
  hints = []
  for name in missing:
    near = nearest(name, row) if row else ""
    hints.append(near.removeprefix("; ") if "did you mean" in near else "")
  hint = " ".join(dict.fromkeys(filter(None, hints)))
  if empty:
    named += f" and nothing in {', '.join(map(repr, empty[:12]))}"
  named += _nearest_schema({*row, *plain})
  return (
    f"{where}: {absent}; the row has {named}. {hint + ' ' if hint else ''}Name its "
    f"columns: {_NAME_COLUMNS}"
  )


def _nearest_schema(columns: set[str]) -> str:
  """Names the data set that shares most columns with a row; "" if none is near."""
  shared, name, needed = max(
    (
      (len(needed & columns) / len(needed), name, needed)
      for name, needed, _ in _SCHEMAS
    ),
    key=lambda one: one[0],
  )
  if shared < 0.5 or needed & columns <= {"question", "answer", "problem", "prompt"}:
    return ""
  lacks = ", ".join(map(repr, sorted(needed - columns)))
  return f"; nearest is {name}, which has {lacks}, too"


def _with_extras(plain: Row, where: str) -> Task:
  """Makes a task from a row in our schema; other columns go into `meta`."""
  extras = {k: v for k, v in plain.items() if k not in _OURS and v is not None}
  row = {k: v for k, v in plain.items() if k in _OURS}
  meta = row.get("meta")
  if extras and (meta is None or isinstance(meta, dict)):
    kept = {str(k): v for k, v in extras.items() if _is_json(v)}
    row["meta"] = {**kept, **(meta or {})}
  return Task.from_json(row, where)


def misspelt(row: Row, task: Task) -> dict[str, str]:
  """Returns {column in `meta`: field that it probably means}.

  Considers only unfilled optional fields: a row without a required field was refused.
  """
  unfilled = {"kind", "source", "family"}
  for ours, names in _NAMES.items():
    if any(name in row for name in names):
      unfilled.discard(ours)
  unfilled -= set(row)
  found = {}
  for name in row:
    near = difflib.get_close_matches(name.lower(), sorted(unfilled), n=1, cutoff=0.75)
    if near and name in task.meta:
      found[name] = near[0]
  return found


def _is_json(value: Any) -> bool:
  """Whether JSON can represent a value: not a picture from `datasets`, for example."""
  try:
    json.dumps(value)
  except (TypeError, ValueError, RecursionError):
    return False
  return True


def _hotpotqa(row: Row, where: str, default_id: str) -> Row:
  # Pairs (title, sentence); the hub and TFDS have two lists instead.
  facts = row["supporting_facts"]
  if isinstance(facts, str):  # JSON in 2WikiMultihopQA's hub version
    facts = parse_json(facts, f"{where}: field 'supporting_facts'")
  if isinstance(facts, dict):
    titles = facts["title"]
  else:
    titles = [fact[0] for fact in facts]
  return {
    "id": first_of(row, "_id", "id", default=default_id),
    "question": row["question"],
    "answers": row["answer"],
    "source": "2wikimultihopqa" if "evidences" in row else "hotpotqa",
    "family": first_of(row, "type"),
    "meta": {
      "level": first_of(row, "level"),
      "supporting_titles": list(dict.fromkeys(titles)),
    },
  }


def _musique(row: Row, where: str, default_id: str) -> Row:
  family = ""
  hops = row.get("question_decomposition")
  if hops:
    family = f"{len(hops)}_hop"
  supporting = [p["title"] for p in row["paragraphs"] if p.get("is_supporting")]
  return {
    "id": first_of(row, "id", default=default_id),
    "question": row["question"],
    "answers": [row["answer"], *filter(None, row["answer_aliases"])],
    "source": "musique",
    "family": family,
    "meta": {"supporting_titles": supporting},
  }


def _webwalker(row: Row, where: str, default_id: str) -> Row:
  info = row["info"]
  return {
    "id": default_id,
    "question": row["question"],
    "answers": row["answer"],
    "source": "webwalker",
    "family": first_of(info, "type"),
    "meta": {"root_url": row["root_url"], **info},
  }


def _triviaqa(row: Row, where: str, default_id: str) -> Row:
  """Reads a TriviaQA row without its web pages."""
  answer = row["answer"]
  aliases = filter(None, answer["aliases"])
  return {
    "id": first_of(row, "question_id", default=default_id),
    "question": row["question"],
    "answers": list(dict.fromkeys([answer["value"], *aliases])),
    "source": "triviaqa",
  }


def _popqa(row: Row, where: str, default_id: str) -> Row:
  answers = row["possible_answers"]
  if isinstance(answers, str):
    answers = _read_list(answers, where, "possible_answers")
  return {
    "id": first_of(row, "id", default=default_id),
    "question": row["question"],
    "answers": answers,
    "source": "popqa",
    "family": first_of(row, "prop"),
    "meta": {name: row[name] for name in ("subj", "obj") if name in row},
  }


# A data set, its identifying fields, its reader; the first match is used.
_SCHEMAS: tuple[tuple[str, set[str], Callable[[Row, str, str], Row]], ...] = (
  ("verl", {"prompt", "reward_model"}, released),
  (
    "HotpotQA or 2WikiMultihopQA",
    {"question", "answer", "supporting_facts", "context"},
    _hotpotqa,
  ),
  ("MuSiQue", {"question", "answer", "answer_aliases", "paragraphs"}, _musique),
  ("WebWalkerQA", {"question", "answer", "root_url", "info"}, _webwalker),
  ("HumanEval", {"prompt", "entry_point", "test"}, humaneval),
  ("MBPP", {"code", "test_list"}, mbpp),
  ("LiveCodeBench", {"question_content", "public_test_cases"}, livecodebench),
  ("APPS", {"question", "input_output", "solutions"}, apps),
  ("CodeContests", {"description", "public_tests", "private_tests"}, codecontests),
  ("BrowseComp", {"problem", "answer", "canary"}, browsecomp),
  ("BrowseComp-Plus", {"query", "answer", "evidence_docs"}, browsecomp_plus),
  ("PopQA", {"question", "possible_answers", "prop"}, _popqa),
  ("TriviaQA", {"question", "answer", "question_id", "question_source"}, _triviaqa),
)

"""Reads a row of a data set as a task, by the fields that the row has.

A file's name never decides the schema, and a row that fits none is an error that names
the row and what would be accepted. Columns that no schema asks for go into `meta`.

budget: a schema is a reader and a row of `_SCHEMAS`, side by side.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from coa_jax.fields import nearest
from coa_jax.tasks.browsecomp import browsecomp
from coa_jax.tasks.code_schemas import apps, are_strings, humaneval, livecodebench, mbpp
from coa_jax.tasks.rl_schemas import released
from coa_jax.tasks.task import Kind, Row, Task

_GSM8K_FINAL = re.compile(r"\n#### *(\S.*?)\s*$")
# What data sets call our fields; the first that a row has is taken.
_NAMES = {
  "question": ("question", "Question", "problem", "Problem"),
  "answers": (
    "answers",
    "answer",
    "golden_answers",
    "possible_answers",
    "Answer",
    "Final answer",
    "final_answer",
  ),
  "id": ("id", "task_id", "unique_id", "_id", "ID"),
  "family": ("family", "Level", "level", "category", "topic", "subject", "difficulty"),
  "source": ("source", "data_source"),
}
_OURS = {field.name for field in dataclasses.fields(Task)} | {"answer"}
FIELDS = ("question", "answers", "id", "kind", "source", "family")


@dataclasses.dataclass(frozen=True)
class Reading:
  """How a row is read where it does not say by itself.

  Attributes:
    default_id: the task's id where the row has none.
    fields: our field -> the row's column, "a.b" for b inside a; a column that is not
      there is no fault where the row has our field.
    kind: of a task whose row says none; None for qa.
    source: of a task whose row says none; "" for `default_source`.
    default_source: of rows in a schema of others that name no source.
  """

  default_id: str
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  kind: Kind | None = None
  source: str = ""
  default_source: str = ""


def read_task(row: Row, where: str, default_id: str) -> Task:
  """One row of any accepted schema as a task.

  Args:
    row: the row.
    where: what an error message calls the row.
    default_id: the task's id where the row has none of its own.

  Raises:
    ValueError: the row fits no schema.
  """
  return read_row(row, where, Reading(default_id))[0]


def read_row(row: Row, where: str, reading: Reading) -> tuple[Task, bool]:
  """One row of any accepted schema as a task, and whether it said its kind.

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
    said = True
    # What is named over a known schema stands above what it says.
    if mapped:
      task = Task.from_json({**task.to_json(), **mapped}, where)
  if not said and reading.kind is not None:
    task = dataclasses.replace(task, kind=reading.kind)
  if reading.source and not task.source:
    task = dataclasses.replace(task, source=reading.source)
  return task, said


def _mapped(row: Row, where: str, fields: Mapping[str, str]) -> Row:
  """Our field -> its value, for every field that the config maps to a column."""
  mapped = {}
  absent = []
  for ours, column in fields.items():
    value: Any = row
    names = [column] if column in row else column.split(".")
    for name in names:
      value = value.get(name) if isinstance(value, dict) else None
    if value is not None:
      mapped[ours] = value
    elif ours not in row and ours in ("question", "answers"):
      absent.append(f"{ours}={column!r}{nearest(column, row)}")
  if absent:
    raise ValueError(f"{where}: tasks.fields names no column: {'; '.join(absent)}")
  if isinstance(mapped.get("answers"), str):
    mapped["answers"] = _listed(mapped["answers"])
  return mapped


def _listed(text: str) -> Any:
  """A JSON list of texts as such; `[0, 1]` is an answer, and stays a text."""
  if not text.lstrip().startswith("["):
    return text
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return text
  return value if value and are_strings(value) else text


def _by_schema(row: Row, where: str, default_id: str) -> Task | None:
  """By the reader of a data set that the row's fields tell; None if they tell none."""
  for needed, reader in _SCHEMAS:
    if needed <= set(row):
      # The row comes from a file of anybody's: what its reader stumbles over is the
      # row's fault.
      try:
        return reader(row, where, default_id)
      except (TypeError, KeyError, AttributeError) as e:
        fields = ", ".join(sorted(needed))
        raise ValueError(
          f"{where}: has the fields {fields}, but not as that schema has them: {e!r}"
        ) from e
  # GSM8K, whatever stands beside: a solution that ends in its answer.
  answer = row.get("answer")
  final = _GSM8K_FINAL.search(answer) if isinstance(answer, str) else None
  if final is None or row.get("kind") is not None or "question" not in row:
    return None
  if set(row) == {"question", "answer"}:
    default_id = f"gsm8k-{default_id}"
  rest = {name: row[name] for name in row if name not in ("question", "answer")}
  plain = {
    "id": default_id,
    "source": "gsm8k",
    **rest,
    "question": row["question"],
    "answers": final[1].replace(",", ""),
    "kind": Kind.MATH,
  }
  task = _with_extras(plain, where)
  return dataclasses.replace(task, meta={**task.meta, "solution": answer})


def _plain_row(
  row: Row, where: str, reading: Reading, mapped: Row
) -> tuple[Task, bool]:
  """A row of question and answers, under our names or those of `_NAMES`.

  Returns:
    The task, and whether the row says its kind.
  """
  row = {name: value for name, value in row.items() if value is not None}
  # --- The columns that fields.* name are used up, whole ones only.
  for ours, column in reading.fields.items():
    if ours in mapped:
      row.pop(column, None)
  foreign = bool(mapped) or not set(row) <= _OURS
  if "data_source" in row and set(row) <= _OURS | {"data_source", "file_name"}:
    foreign = False
  # --- A problem is one of mathematics.
  named = [name for name in _NAMES["question"] if name in row][:1]
  if named in (["problem"], ["Problem"]):
    row.setdefault("kind", Kind.MATH)
  # --- Our names for theirs.
  plain = dict(mapped)
  for ours, names in _NAMES.items():
    found = [name for name in names if name in row]
    if ours not in plain and found:
      plain[ours] = row.pop(found[0])
      if found[0] == "possible_answers" and isinstance(plain[ours], str):
        plain[ours] = _listed(plain[ours])
  missing = [ours for ours in ("question", "answers") if ours not in plain]
  if missing:
    raise ValueError(_lacking(missing, row, plain, where))
  if foreign:
    plain.setdefault("source", reading.source or reading.default_source)
    plain["family"] = str(plain.get("family", ""))
  plain.setdefault("id", reading.default_id)
  said = "kind" in row or "kind" in plain
  return _with_extras({**row, **plain}, where), said


def _lacking(missing: list[str], row: Row, plain: Row, where: str) -> str:
  """Says which fields a row lacks, and which of its columns may be meant."""
  named = ", ".join(map(repr, [*plain, *row][:12])) or "none"
  absent = " and ".join(f"no field {name!r}" for name in missing)
  hints = []
  for name in missing:
    near = nearest(name, row) if row else ""
    hints.append(near.removeprefix("; ") if "did you mean" in near else "")
  hint = " ".join(filter(None, hints))
  return (
    f"{where}: {absent}; the row has {named}. {hint + ' ' if hint else ''}Name its "
    "columns: tasks.fields=dict(question='COLUMN', answers='COLUMN')"
  )


def _with_extras(plain: Row, where: str) -> Task:
  """Our schema, and in `meta` what else the row has."""
  extras = {k: v for k, v in plain.items() if k not in _OURS and v is not None}
  row = {k: v for k, v in plain.items() if k in _OURS}
  meta = row.get("meta")
  if extras and (meta is None or isinstance(meta, dict)):
    kept = {str(k): v for k, v in extras.items() if _is_json(v)}
    row["meta"] = {**kept, **(meta or {})}
  return Task.from_json(row, where)


def misspelt(row: Row, task: Task) -> dict[str, str]:
  """Columns of a row that went into `meta` -> the field that each may have meant.

  Only fields that no other column fills: a row that lacks a required one has been
  refused.
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
  """Whether JSON holds it: a picture of `datasets` is left out, a text is not."""
  try:
    json.dumps(value)
  except (TypeError, ValueError, RecursionError):
    return False
  return True


def _hotpotqa(row: Row, where: str, default_id: str) -> Task:
  # Pairs (title, sentence); the hub and TFDS have two lists instead.
  facts = row["supporting_facts"]
  if isinstance(facts, dict):
    titles = facts["title"]
  else:
    titles = [title for title, _ in facts]
  plain = {
    "id": row.get("_id") or row.get("id") or default_id,
    "question": row["question"],
    "answers": row["answer"],
    "source": "2wikimultihopqa" if "evidences" in row else "hotpotqa",
    "family": row.get("type", ""),
    "meta": {
      "level": row.get("level", ""),
      "supporting_titles": list(dict.fromkeys(titles)),
    },
  }
  return Task.from_json(plain, where)


def _musique(row: Row, where: str, default_id: str) -> Task:
  family = ""
  hops = row.get("question_decomposition")
  if hops:
    family = f"{len(hops)}_hop"
  supporting = [p["title"] for p in row["paragraphs"] if p.get("is_supporting")]
  plain = {
    "id": row.get("id", default_id),
    "question": row["question"],
    "answers": [row["answer"], *row["answer_aliases"]],
    "source": "musique",
    "family": family,
    "meta": {"supporting_titles": supporting},
  }
  return Task.from_json(plain, where)


def _webwalker(row: Row, where: str, default_id: str) -> Task:
  info = row["info"]
  plain = {
    "id": default_id,
    "question": row["question"],
    "answers": row["answer"],
    "source": "webwalker",
    "family": info.get("type", ""),
    "meta": {"root_url": row["root_url"], **info},
  }
  return Task.from_json(plain, where)


def _triviaqa(row: Row, where: str, default_id: str) -> Task:
  """A row of TriviaQA; the pages that come with it are left out."""
  answer = row["answer"]
  plain = {
    "id": row["question_id"] or default_id,
    "question": row["question"],
    "answers": list(dict.fromkeys([answer["value"], *answer["aliases"]])),
    "source": "triviaqa",
  }
  return Task.from_json(plain, where)


def _popqa(row: Row, where: str, default_id: str) -> Task:
  answers = row["possible_answers"]
  if isinstance(answers, str):
    answers = _listed(answers)
  plain = {
    "id": row.get("id", default_id),
    "question": row["question"],
    "answers": answers,
    "source": "popqa",
    "family": row.get("prop") or "",
    "meta": {name: row[name] for name in ("subj", "obj") if name in row},
  }
  return Task.from_json(plain, where)


# Fields that tell a schema -> its reader; the first that fits is taken.
_SCHEMAS: tuple[tuple[set[str], Callable[[Row, str, str], Task]], ...] = (
  ({"prompt", "reward_model"}, released),
  ({"question", "answer", "supporting_facts", "context"}, _hotpotqa),
  ({"question", "answer", "answer_aliases", "paragraphs"}, _musique),
  ({"question", "answer", "root_url", "info"}, _webwalker),
  ({"prompt", "entry_point", "test"}, humaneval),
  ({"code", "test_list"}, mbpp),
  ({"question_content", "public_test_cases"}, livecodebench),
  ({"question", "input_output", "solutions"}, apps),
  ({"problem", "answer", "canary"}, browsecomp),
  ({"question", "possible_answers", "prop"}, _popqa),
  ({"question", "answer", "question_id", "question_source"}, _triviaqa),
)

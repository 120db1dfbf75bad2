"""Task: one question, its accepted answers, and how an answer to it is judged."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

Row = dict[str, Any]


class Kind(enum.StrEnum):
  """Which reward judges the answer."""

  QA = "qa"  # exact match after normalisation
  MATH = "math"  # mathematical equivalence
  CODE = "code"  # hidden tests


_KINDS = (
  ("source", str, "a string"),
  ("family", str, "a string"),
  ("meta", dict, "an object"),
)


@dataclasses.dataclass(frozen=True)
class Task:
  """One thing to ask.

  Attributes:
    id: unique in its source; also the group id in RL.
    question: the text put to the model.
    answers: accepted answers; () where none is known and attempts stay ungraded (a
      question from a user), in a data set at least one.
    kind: how an answer is judged.
    source: data set it came from; rewards and reports group by it.
    family: finer kind inside a source (e.g. "two_hop"); "" where there is none.
    meta: what else its source knows (JSON values only).
  """

  id: str
  question: str
  answers: tuple[str, ...]
  kind: Kind = Kind.QA
  source: str = ""
  family: str = ""
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    """A JSON-serialisable dict; `from_json` reads it back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, row: dict[str, Any], where: str = "task") -> Task:
    """Builds a task from a row in this project's schema.

    Besides `answers` (a list) a row may hold `answer` (a string or a list); `id`
    defaults to `where`. A field that is null counts as left out.

    Raises:
      ValueError: a field is missing, unknown or of the wrong kind; the message starts
        with `where` and names the field and what would be accepted.
    """
    # --- Names: null is left out, `answer` may stand for `answers`.
    row = {name: value for name, value in row.items() if value is not None}
    if "answer" in row and "answers" not in row:
      row["answers"] = row.pop("answer")
    row.setdefault("id", where)
    fields = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(row) - fields)
    if unknown:
      raise ValueError(
        f"{where}: unknown field {unknown[0]!r}; a task has "
        f"{', '.join(sorted(fields))}, and what else a row knows goes into meta"
      )
    # --- What a task can not do without.
    question = row.get("question")
    answers = row.get("answers")
    if not isinstance(question, str) or not question.strip():
      raise ValueError(f"{where}: field 'question' must be a non-empty string")
    # A number is an answer as good as a text: tables read 42 as one.
    if isinstance(answers, str | int | float):
      answers = [answers]
    if not isinstance(answers, list | tuple) or not answers:
      raise ValueError(
        f"{where}: field 'answers' must be a string or a non-empty list, "
        f"got {answers!r}"
      )
    row["answers"] = tuple(_answer(answer, where) for answer in answers)
    # --- What it may have.
    for field, kind, label in _KINDS:
      if not isinstance(row.get(field, kind()), kind):
        raise ValueError(
          f"{where}: field {field!r} must be {label}, got {row[field]!r}"
        )
    try:
      row["kind"] = Kind(row.get("kind", Kind.QA))
    except ValueError:
      raise ValueError(
        f"{where}: field 'kind' is {row['kind']!r}; accepted: {', '.join(Kind)}"
      ) from None
    if not isinstance(row["id"], str | int | float):
      raise ValueError(
        f"{where}: field 'id' must be a string or a number, got {row['id']!r}"
      )
    row["id"] = str(row["id"])
    return cls(**row)


def _answer(value: Any, where: str) -> str:
  """An accepted answer as text; a whole number that a table holds as a float as one."""
  if not isinstance(value, str | int | float):
    raise ValueError(
      f"{where}: field 'answers' must hold strings or numbers, got {value!r}"
    )
  # A column with one missing number has floats alone: 1934.0 was 1934.
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  return str(value)

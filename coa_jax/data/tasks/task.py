"""Task: one question, its accepted answers, and how answers are judged."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from coa_jax.runtime.json_io import shown

Row = dict[str, Any]


class Kind(enum.StrEnum):
  """Selects the reward that judges the answer."""

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
  """A question with its accepted answers.

  Attributes:
    id: unique in its source; also the group id in RL.
    question: the text for the model.
    answers: accepted answers, at least one in a data set; () if unknown (a user's
      question): then attempts stay ungraded.
    kind: selects the grader.
    source: the data set's name; rewards and reports group by source.
    family: a finer category within a source (e.g. "two_hop"); "" for none.
    meta: the source's other data (JSON values only).
  """

  id: str
  question: str
  answers: tuple[str, ...]
  kind: Kind = Kind.QA
  source: str = ""
  family: str = ""
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def evidence(self) -> list[str]:
    """Returns the pages that a right answer needs, if the data set names them.

    BrowseComp-Plus names ids (`meta.evidence_docs`); HotpotQA, 2WikiMultihopQA and
    MuSiQue titles (`meta.supporting_titles`).
    """
    names = self.meta.get("evidence_docs") or self.meta.get("supporting_titles")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []

  @property
  def trajectory_meta(self) -> dict[str, Any]:
    """Returns the task's part of its trajectories' `meta`."""
    return {
      "question": self.question,
      "answers": list(self.answers),
      "family": self.family,
      "source": self.source,
    }

  def to_json(self) -> dict[str, Any]:
    """Returns JSON values; `from_json` reads them back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, row: dict[str, Any], where: str = "task") -> Task:
    """Builds a task from a row in this project's schema.

    A row may have `answers` (a list) or `answer` (a string or a list); `id` defaults to
    `where`. A null field counts as left out.

    Raises:
      ValueError: a field is missing, unknown or of the wrong kind; the message starts
        with `where` and names the field and the accepted values.
    """
    # --- Names: null fields are left out, `answer` may replace `answers`.
    row = {name: value for name, value in row.items() if not is_absent(value)}
    if "answer" in row and "answers" not in row:
      row["answers"] = row.pop("answer")
    if row.get("id", "") == "":
      row["id"] = where
    fields = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(row) - fields)
    if unknown:
      raise ValueError(
        f"{where}: unknown field {unknown[0]!r}; a task has "
        f"{', '.join(sorted(fields))}, and what else a row knows goes into meta"
      )
    # --- Required fields.
    question = row.get("question")
    if not isinstance(question, str) or not _is_visible(question):
      raise ValueError(f"{where}: field 'question' must be a non-empty string")
    row["answers"] = _answers(row.get("answers"), where)
    # --- Optional fields.
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


def is_absent(value: Any) -> bool:
  """Whether a value is null: None, or NaN (an empty cell in tables)."""
  return value is None or (isinstance(value, float) and math.isnan(value))


def first_of(row: Row, *names: str, default: Any = "") -> Any:
  """Returns the first present value other than empty text; 0 is a value."""
  for name in names:
    value = row.get(name)
    if not is_absent(value) and value != "":
      return value
  return default


def _answers(value: Any, where: str) -> tuple[str, ...]:
  """Returns accepted answers as texts.

  Raises:
    ValueError: there is no answer, or an answer cannot be matched.
  """
  # Numbers are answers, too: tables read 42 as a number.
  if isinstance(value, str | int | float):
    value = [value]
  if not isinstance(value, list | tuple) or not value:
    raise ValueError(
      f"{where}: field 'answers' must be a string or a non-empty list, "
      f"got {shown(value)}"
    )
  return tuple(_answer(answer, where) for answer in value)


def _answer(value: Any, where: str) -> str:
  """Returns an accepted answer as text; a whole float as a whole number."""
  accepted = isinstance(value, str | int | float)
  if isinstance(value, float):
    accepted = math.isfinite(value)
  elif isinstance(value, str):
    # Python and tables write "nan" for a missing number.
    accepted = _is_visible(value) and value.strip() not in ("nan", "NaN")
  if not accepted:
    raise ValueError(
      f"{where}: field 'answers' must hold non-empty strings or finite numbers, got "
      f"{shown(value)}"
    )
  # One missing number turns a column into floats: 1934.0 was 1934.
  if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
    value = int(value)
  return str(value)


def _is_visible(text: str) -> bool:
  """Whether a text has a character besides spaces and zero-width ones."""
  return any(c.isprintable() and not c.isspace() for c in text)

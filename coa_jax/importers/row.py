"""What importers share: a row's task and run, and a record of what was lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall
from coa_jax.tasks.task import Kind, Task
from coa_jax.teacher import runs
from coa_jax.teacher.runs import Event, Run


class RowRefused(Exception):
  """A row that cannot be read: a short reason, and what exactly was wrong."""

  def __init__(self, reason: str, detail: str):
    super().__init__(reason, detail)
    self.reason = reason
    self.detail = detail


@dataclasses.dataclass(frozen=True)
class ImportedRun:
  """One row, read.

  Attributes:
    task: what was asked; without answers where the row tells none.
    run: what was done about it, tools named as here.
    lost: what the run has no place for, one line each.
  """

  task: Task
  run: Run
  lost: tuple[str, ...] = ()


class Recorder:
  """Writes a run event by event, and notes what is lost on the way."""

  def __init__(self, task_id: str):
    self.run = Run(task_id)
    self.lost: list[str] = []

  def say(self, agent: str, kind: str, content: str, detail: str = "") -> None:
    """Adds what an agent wrote."""
    self.run.events.append(Event(agent, kind, content, detail))

  def think(self, content: Any) -> None:
    """Adds a thought, unless it is empty."""
    if isinstance(content, str) and content.strip():
      self.say(runs.ORCHESTRATOR, runs.DECISION, content.strip())

  def call(self, tag: str, body: str, result: str, failed: bool = False) -> None:
    """Adds a tool call and what it gave."""
    status = CallStatus.MODEL if failed else CallStatus.OK
    self.run.calls.append(ToolCall(tag, body, result, status))
    agent = runs.CODE if tag == "code" else runs.SEARCH
    self.say(agent, runs.CALL, body, tag)
    self.say(tag, runs.OBSERVATION, result, tag)

  def note(self, where: str, text: str) -> None:
    """Notes something that the run has no place for."""
    self.lost.append(f"{where}: {text}")

  def end(self, task: Task, prediction: str | None) -> ImportedRun:
    """Ends the row with its answer; without one the run is out of turns."""
    run = self.run
    run.usage.tool_calls = len(run.calls)
    if prediction is not None:
      run.prediction = prediction
      run.status = Status.ENDED
      self.say(runs.ORCHESTRATOR, runs.FINAL, prediction)
    elif run.status == Status.UNGRADED:
      run.status = Status.TURN_LIMIT
    return ImportedRun(task, run, tuple(self.lost))


def fields(names: str) -> frozenset[str]:
  """Splits a string of words into names of fields."""
  return frozenset(names.split())


# Fields of any foreign row that `task_of` reads, or that name it.
TASK_FIELDS = fields(
  "question task_question problem answers answer true_answer golden_answer "
  "ground_truth target kind data_source source family id task_id"
)
_ANSWERS = (
  "answers",
  "answer",
  "true_answer",
  "ground_truth",
  "golden_answer",
  "target",
)
QUESTION_FIELDS = ("question", "task_question", "problem")


def task_of(row: Mapping[str, Any], task_id: str, question: Any, source: str) -> Task:
  """Makes the task of a foreign row; its answers come from the field that has them.

  Raises:
    RowRefused: there is no question, or the row's `kind` is none.
  """
  if not isinstance(question, str) or not question.strip():
    raise RowRefused("no_question", f"the question is {question!r:.80}")
  answers = next((row[k] for k in _ANSWERS if row.get(k) not in (None, "", [])), ())
  if isinstance(answers, dict):
    answers = answers.get("target", ())
  if not isinstance(answers, list | tuple):
    answers = (answers,)
  try:
    kind = Kind(row.get("kind") or Kind.QA)
  except ValueError:
    raise RowRefused("bad_kind", f"kind is {row['kind']!r}") from None
  return Task(
    id=task_id,
    question=question,
    answers=tuple(map(str, answers)),
    kind=kind,
    source=str(row.get("data_source") or row.get("source") or source),
    family=str(row.get("family") or ""),
  )


def note_unread(
  recorder: Recorder, where: str, row: Mapping[str, Any], read: frozenset[str]
) -> None:
  """Notes the fields of a row that no line of the importer reads."""
  for name, value in row.items():
    if name not in read and value not in (None, "", [], {}, False):
      recorder.note(where, f"field {name!r} is not read")

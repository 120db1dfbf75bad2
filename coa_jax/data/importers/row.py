"""Common importer code: a row's task and run, and a record of losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.runs import Event, Run
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall


class RowRefused(Exception):
  """An unreadable row: a short reason, and the exact problem."""

  def __init__(self, reason: str, detail: str):
    super().__init__(reason, detail)
    self.reason = reason
    self.detail = detail


@dataclasses.dataclass(frozen=True)
class ImportedRun:
  """An imported row: its task, its run with our tool names, the number of calls read.

  `lost` has a line for each unmapped row part.
  """

  task: Task
  run: Run
  lost: tuple[str, ...] = ()
  calls_read: int = 0


class Recorder:
  """Writes a run event by event, and notes losses."""

  def __init__(self, task_id: str):
    self.run = Run(task_id)
    self.lost: list[str] = []
    self.calls_read = 0

  def say(self, agent: str, kind: str, content: str, detail: str = "") -> None:
    """Adds an agent's text."""
    self.run.events.append(Event(agent, kind, content, detail))

  def think(self, content: Any) -> None:
    """Adds a thought, unless it is empty."""
    if isinstance(content, str) and content.strip():
      self.say(runs.ORCHESTRATOR, runs.DECISION, content.strip())

  def call(self, tag: str, body: str, result: str, failed: bool = False) -> None:
    """Adds a tool call and its result."""
    self.calls([(tag, body, result, failed)])

  def calls(self, made: Iterable[tuple[str, str, str, bool]]) -> None:
    """Adds calls made together, each as the arguments of `call`, and their results."""
    calls = []
    for tag, body, result, failed in made:
      status = CallStatus.MODEL if failed else CallStatus.OK
      calls.append(ToolCall(tag, body, result, status))
      # Foreign agents are not ours: the tool decides which team agent makes the call.
      agent = runs.CODE if tag == "code" else runs.SEARCH
      self.say(agent, runs.CALL, body, tag)
    for call in calls:
      self.say(call.name, runs.OBSERVATION, call.result, call.name)
    self.run.calls += calls

  def note(self, where: str, text: str) -> None:
    """Notes a row part without a place in the run."""
    self.lost.append(f"{where}: {text}")

  def end(self, task: Task, prediction: str | None) -> ImportedRun:
    """Ends the run with its answer; a run without one counts as out of turns."""
    run = self.run
    run.usage.tool_calls = len(run.calls)
    if prediction is not None:
      run.prediction = prediction
      run.status = Status.ENDED
      self.say(runs.ORCHESTRATOR, runs.FINAL, prediction)
    elif run.status == Status.UNGRADED:  # the cause of the end is unknown
      run.status = Status.TURN_LIMIT
    return ImportedRun(task, run, tuple(self.lost), self.calls_read)


def fields(names: str) -> frozenset[str]:
  """Splits a string of words into field names."""
  return frozenset(names.split())


# Foreign rows' fields that describe or name the task.
TASK_FIELDS = fields(
  "question task_question problem answers answer true_answer golden_answer "
  "golden_answers ground_truth target kind data_source source family id task_id "
  "example_id"
)
# The first non-empty field is read.
ANSWER_FIELDS = (
  "answers",
  "answer",
  "true_answer",
  "ground_truth",
  "golden_answer",
  "golden_answers",
  "target",
)
# Fields that may contain a run as one text.
TEXT_FIELDS = ("trajectory", "react", "output", "text", "completion", "scratchpad")
QUESTION_FIELDS = ("question", "task_question", "problem")


def are_objects(value: Any) -> bool:
  """Whether a value is a list of objects, like a row's messages or steps."""
  return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def question_of(row: Mapping[str, Any], default: Any) -> Any:
  """Returns a row's own question, else the default."""
  for name in QUESTION_FIELDS:
    if row.get(name):
      return row[name]
  return default


def _answers_of(row: Mapping[str, Any]) -> Sequence[Any]:
  for name in ANSWER_FIELDS:
    answers = row.get(name)
    if answers in (None, "", []):
      continue
    if isinstance(answers, dict):  # verl's rows nest them: {"target": [...]}
      answers = answers.get("target", ())
    return answers if isinstance(answers, list | tuple) else (answers,)
  return ()


def task_of(row: Mapping[str, Any], task_id: str, question: Any, source: str) -> Task:
  """Makes a foreign row's task; its answers come from the first field with answers.

  Raises:
    RowRefused: there is no question, or the row's `kind` is unknown.
  """
  if not isinstance(question, str) or not question.strip():
    raise RowRefused("no_question", f"the question is {question!r:.80}")
  try:
    kind = Kind(row.get("kind") or Kind.QA)
  except ValueError:
    raise RowRefused("bad_kind", f"kind is {row['kind']!r}") from None
  return Task(
    id=task_id,
    question=question,
    answers=tuple(map(str, _answers_of(row))),
    kind=kind,
    # Rewards and reports group by source: a mixed file keeps its sources separate.
    source=str(row.get("data_source") or row.get("source") or source),
    family=str(row.get("family") or ""),
  )


def note_unread(
  recorder: Recorder, where: str, row: Mapping[str, Any], read: frozenset[str]
) -> None:
  """Notes the row's fields that the importer does not read."""
  for name, value in row.items():
    # A table gives every row all columns: an empty column says nothing.
    if name not in read and value not in (None, "", [], {}, False):
      recorder.note(where, f"field {name!r} is not read")

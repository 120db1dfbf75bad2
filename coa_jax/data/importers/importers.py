"""Converts other systems' traces to this project's trajectories, row by row.

Every row becomes a trajectory, or is dropped with the reason; a kept row's unmapped
fields are listed in its `meta["lost"]`, line by line. Formats:

  trajectories  our own trajectories, checked against the variant's rules
  runs          our own runs (`distill`'s runs.jsonl); their tasks are passed separately
  alpaca        the released Chain-of-Agents SFT records (`alpaca`)
  oagents       OAgents and smolagents, JSON lines (`oagents`)
  chat          conversations with tool calls (`chat`): messages of OpenAI, Anthropic,
                Hermes, LangChain or LLaMA-Factory v1
  sharegpt, atif, verifiers, responses conversations in other fields, read as chat
                messages (`shapes`)
  react         ReAct text (`react`)
  search_r1     Search-R1 text (`search_r1`)

A conversation with several questions is split into one row per question (`turns`).

budget: every list of formats, in one place.

The released RL rows hold no trajectory: they are tasks, which `tasks.sources` reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coa_jax.data.importers.alpaca import read_alpaca
from coa_jax.data.importers.chat import read_chat
from coa_jax.data.importers.oagents import read_oagents
from coa_jax.data.importers.react import is_react, read_react
from coa_jax.data.importers.row import ImportedRun, RowRefused
from coa_jax.data.importers.search_r1 import is_search_r1, read_search_r1
from coa_jax.data.importers.shapes import SHAPES, shape_of
from coa_jax.data.importers.turns import split_turns
from coa_jax.data.importers.unread_calls import count_calls, unread_text
from coa_jax.data.tasks.rows import read_rows
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.data.teacher.convert import ConvertConfig, Dropped, convert
from coa_jax.data.teacher.runs import Run
from coa_jax.protocol.parser import parse
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import TOOLS, Variant
from coa_jax.protocol.trajectory import Trajectory

# Format -> the fields that identify it.
FORMATS: Mapping[str, str] = {
  "trajectories": "task_id, segments",
  "runs": "task_id, events, calls",
  "alpaca": "instruction, output",
  "oagents": "steps or intermediate_steps",
  "chat": "messages or conversation",
  "sharegpt": "conversations",
  "atif": "steps with a source",
  "verifiers": "prompt and completion, lists of messages",
  "responses": "output, a list of items",
  "react": "a text of 'Thought:', 'Action:' lines",
  "search_r1": "a text of <search> and <information> spans",
}
RL = "rl"  # the result of `detect` for task rows
_CONVERSATIONS = tuple(shape.name for shape in SHAPES)
_READERS = {
  **dict.fromkeys(_CONVERSATIONS, read_chat),
  "oagents": read_oagents,
  "react": read_react,
  "search_r1": read_search_r1,
}

Record = tuple[int, str, dict[str, Any]]  # number, "FILE:LINE", row


def detect(row: Mapping[str, Any]) -> str:
  """Detects a row's format by its fields: one of FORMATS, or RL.

  A table's row has all columns, so non-empty fields are tried first.

  Raises:
    ValueError: the fields match no format.
  """
  filled = {name: v for name, v in row.items() if v not in (None, "", [], {})}
  name = _format(filled)
  if name:
    return name
  # These formats have no fields of their own: the text in a field identifies them.
  if is_react(row):
    return "react"
  if is_search_r1(row):
    return "search_r1"
  name = _format(dict.fromkeys(row, True))  # with empty fields: a reader says why
  if name:
    return name
  names = ", ".join(sorted(map(str, row))[:12]) or "none"
  accepted = {**FORMATS, RL: "prompt, reward_model"}
  raise ValueError(
    f"its fields ({names}) are those of no format; accepted: "
    f"{', '.join(f'{name} ({told})' for name, told in accepted.items())}"
  )


def _format(row: Mapping[str, Any]) -> str:
  names = set(row)
  if {"task_id", "segments"} <= names:
    return "trajectories"
  if {"task_id", "events", "calls"} <= names:
    return "runs"
  if {"prompt", "reward_model"} <= names:
    return RL
  if {"instruction", "output"} <= names:
    return "alpaca"
  shape = shape_of(row)
  if names & {"intermediate_steps", "steps"} and shape != "atif":
    return "oagents"
  return shape


@dataclasses.dataclass(frozen=True)
class Importer:
  """Reads one file's rows; picklable, for worker processes.

  Attributes:
    format: one of FORMATS.
    variant: the trajectories' dialect.
    prompt: the prompt's style (`protocol.prompts`); alpaca records and trajectories
      keep their own prompts.
    stem: the prefix for task ids, if rows have no ids.
    tools: foreign tool name -> our tag, extending `calls.TOOLS`.
    convert: the allowed changes.
    keep_illegal: True keeps readable rows that break the variant's rules; for alpaca
      records and trajectories.
    tasks: id -> task, for runs.
  """

  format: str
  variant: Variant
  prompt: str = "brief"
  stem: str = "row"
  tools: Mapping[str, str] = dataclasses.field(default_factory=dict)
  convert: ConvertConfig = dataclasses.field(default_factory=ConvertConfig)
  keep_illegal: bool = False
  tasks: Mapping[str, Task] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.format not in FORMATS:
      raise ValueError(f"format {self.format!r}; accepted: {', '.join(FORMATS)}")
    for name, tag in self.tools.items():
      if tag not in TOOLS:
        raise ValueError(f"tools: {name!r} is {tag!r}; accepted: {', '.join(TOOLS)}")

  def read(
    self, number: int, where: str, row: dict[str, Any]
  ) -> tuple[Task, Trajectory] | Dropped:
    """Reads one row as a trajectory with its task, or says why there is none.

    A whole number in `sample` is the row's attempt number for its task.
    """
    # --- The task, and the attempt's number.
    task_id = _id(row) or f"{self.stem}-{number}"
    sample = row.get("sample")
    if self.format in ("trajectories", "runs") or not isinstance(sample, int):
      sample = 0  # trajectories and runs read it with the rest
    else:
      row = dict(row)
      del row["sample"]  # otherwise a reader would note it as unread

    # --- Read the row. A faulty foreign row is refused and never crashes the import.
    try:
      result = self._read(row, task_id, where, sample)
      if isinstance(result, Dropped):
        return result
      if text := unread_text(result[1]):
        raise RowRefused("unread_call", f"the policy's text holds {text!r}")
      return result
    except RowRefused as e:
      return Dropped(task_id, sample, e.reason, e.detail)
    except (TypeError, KeyError, AttributeError) as e:
      # A field has another type than its format has; only its use shows this.
      detail = f"not as {self.format} rows are: {e!r:.200}"
      return Dropped(task_id, sample, "bad_record", detail)
    except RecursionError:
      detail = "its values are nested too deeply"
      return Dropped(task_id, sample, "bad_record", detail)

  def _read(
    self, row: dict[str, Any], task_id: str, where: str, sample: int
  ) -> tuple[Task, Trajectory] | Dropped:
    if self.format == "alpaca":
      trajectory = read_alpaca(row, task_id, self.variant, self.keep_illegal)
      trajectory.sample = sample
      return _task(trajectory), trajectory
    if self.format == "trajectories":
      return self._own(row, task_id, where)
    imported = self._imported(row, task_id, where, sample)
    if self.format != "runs" and count_calls(row) > imported.calls_read:
      raise RowRefused(
        "unread_call",
        f"the row holds {count_calls(row)} calls, {imported.calls_read} were read",
      )

    # --- Convert the run under our prompt, like the team's own runs.
    task = imported.task
    run = imported.run
    lost = list(imported.lost)
    prompt = prompt_segments(self.variant, task.question, self.prompt)
    result = convert(run, task, self.variant, prompt, self.convert, lost)
    if isinstance(result, Dropped):
      return result
    result.meta["source"] = task.source or self.format
    if lost:
      result.meta["lost"] = lost
    return task, result

  def _imported(
    self, row: dict[str, Any], task_id: str, where: str, sample: int
  ) -> ImportedRun:
    # --- A foreign record: use its format's reader.
    if self.format != "runs":
      # Models vary a name's case, so case does not count.
      tools = {name.lower(): tag for name, tag in self.tools.items()}
      imported = _READERS[self.format](row, task_id, tools)
      imported.run.sample = sample
      return imported
    # --- Our own run; its task is in another file.
    try:
      run = Run.from_json(row, where)
    except ValueError as e:
      raise RowRefused("bad_record", str(e)) from e
    if run.task_id not in self.tasks:
      raise RowRefused("unknown_task", f"no task {run.task_id!r} among those given")
    return ImportedRun(self.tasks[run.task_id], run)

  def _own(
    self, row: dict[str, Any], task_id: str, where: str
  ) -> tuple[Task, Trajectory]:
    try:
      trajectory = Trajectory.from_json(row, where)
    except (ValueError, AttributeError) as e:
      raise RowRefused("bad_record", str(e)) from e
    # The record may be from another dialect, or edited by hand.
    verdict = parse(trajectory.text, self.variant)
    if not verdict.ok and not self.keep_illegal:
      raise RowRefused(verdict.verdict.value, verdict.detail)
    return _task(trajectory), trajectory


def _id(row: Mapping[str, Any]) -> str:
  """Returns a row's task id; "" if it has none."""
  for name in ("task_id", "id", "example_id"):
    if row.get(name) not in (None, ""):
      return str(row[name])
  return ""


def _task(trajectory: Trajectory) -> Task:
  """Makes a task from a trajectory's `meta`."""
  meta = trajectory.meta
  try:
    kind = Kind(meta.get("kind", Kind.QA))
  except ValueError:
    raise RowRefused("bad_record", f"meta['kind'] is {meta['kind']!r}") from None
  return Task(
    id=trajectory.task_id,
    question=str(meta.get("question", "")),
    answers=tuple(map(str, meta.get("answers") or ())),
    kind=kind,
    source=str(meta.get("source", "")),
    family=str(meta.get("family", "")),
  )


def records(uri: str, chosen: str = "") -> tuple[str, Iterator[Record]]:
  """Returns a source's format (by default the first row's) and all rows, from 0.

  A conversation has one row per question, all with the same number. A task's later rows
  without `sample` get their number among the task's rows: draws by task and sample must
  distinguish attempts.

  Raises:
    FileNotFoundError, ValueError: as `tasks.rows.read_rows`; or there are no rows, or
      the first row's format is unknown.
  """
  rows = _numbered(uri)
  first = next(rows, None)
  if first is None:
    raise ValueError(f"{uri}: holds no row")
  try:
    name = chosen or detect(first[2])
  except ValueError as e:
    raise ValueError(f"{first[1]}: {e}") from e
  rows = itertools.chain([first], rows)
  if name != RL:  # tasks have no attempts
    rows = _attempts(rows)
  if name in _CONVERSATIONS:
    rows = _turns(rows, stem(uri))
  return name, rows


def _numbered(uri: str) -> Iterator[Record]:
  for number, (where, row) in enumerate(read_rows(uri)):
    yield number, where, row


def _attempts(rows: Iterable[Record]) -> Iterator[Record]:
  seen: Counter[str] = Counter()
  for number, where, row in rows:
    # A row without an id is a separate task.
    task = _id(row)
    if task and seen[task] and row.get("sample") is None:
      row["sample"] = seen[task]
    seen[task] += 1
    yield number, where, row


def _turns(rows: Iterable[Record], name: str) -> Iterator[Record]:
  for number, where, row in rows:
    for turn in split_turns(row, _id(row) or f"{name}-{number}"):
      yield number, where, turn


def stem(uri: str) -> str:
  """Returns the id prefix for a source's rows without ids."""
  # Without the query and the scheme: hf:owner/name?split=x is `name`.
  name = uri.partition("?")[0].rstrip("/").rpartition(":")[2]
  return os.path.splitext(os.path.basename(name).removesuffix(".gz"))[0] or "row"

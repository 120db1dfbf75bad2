"""Reads tasks from files: this project's own schema, the released one, and data sets'.

Which schema a row has is told by its fields (`schemas`), where rows come from by the
URI (`rows`). Code tasks keep their tests in `meta["tests"]`, GSM8K's their worked
solution in `meta["solution"]`; nothing of either is in the question, but one assert in
MBPP's.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import random
import re
from collections.abc import Sequence

from coa_jax.fields import bounded, check_fields, choice, nearest
from coa_jax.tasks.rows import list_uris, read_rows
from coa_jax.tasks.schemas import FIELDS, Reading, misspelt, read_row
from coa_jax.tasks.task import Kind, Task

# Files that are called by what they hold of a data set have their folder's name.
_SPLITS = ("train", "test", "dev", "val", "valid", "validation", "data")
# An answer that a mathematician wrote: LaTeX, a fraction, a power, a number, a tuple.
_MATHEMATICS = re.compile(
  r".*(?:\\[a-zA-Z]|\$|\^|\\boxed)|[-+]?\(?[\d,. ]*\d%?\)?|[-+]?\d+ ?/ ?\d+"
  r"|[\[(][-+\d.,/ ]+[\])]",
  re.DOTALL,
)
# One that text and value judge alike, but for how it is written: a year, a count.
_WHOLE_NUMBER = re.compile(r"0|[1-9]\d*")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TasksConfig:
  """Config section `tasks`.

  Attributes:
    uri: a file, several with commas between, a glob, a folder, or a source by its URI:
      see `rows`.
    limit: take this many tasks; 0 takes all.
    families: take only these families; () takes all.
    seed: of the order; None keeps the file's. With a limit: which tasks are taken.
    fields: question, answers, id, kind, source or family -> the column that holds it,
      where the rows call it otherwise; "a.b" is b inside a.
    kind: how answers are judged of rows that do not say it: qa, math or code.
    source: name of the data set, for rows that do not say it.
  """

  uri: str
  limit: int = bounded(0, least=0)
  families: tuple[str, ...] = ()
  seed: int | None = None
  fields: dict[str, str] = dataclasses.field(default_factory=dict)
  kind: str = choice("", of=("", *Kind))
  source: str = ""

  def __post_init__(self):
    check_fields(self)
    for name in self.fields:
      if name not in FIELDS:
        raise ValueError(
          f"fields: a task has no field {name!r} to be filled{nearest(name, FIELDS)}"
        )


def select_tasks(config: TasksConfig) -> list[Task]:
  """The tasks that a config asks for.

  Raises:
    FileNotFoundError, ValueError: as `load_tasks`; or no task is left; or rows that do
      not say their kind have answers that look like mathematics.
  """
  tasks, unsaid = _load(config)
  _check_kinds(config, unsaid)
  if config.families:
    known = sorted({t.family for t in tasks})
    tasks = [t for t in tasks if t.family in config.families]
    if not tasks:
      raise ValueError(
        f"{config.uri}: no task of families {', '.join(config.families)}; "
        f"there are {', '.join(known)}"
      )
  # Shuffled before it is cut: with a seed, a limit takes a sample of the file.
  if config.seed is not None:
    random.Random(config.seed).shuffle(tasks)
  return tasks[: config.limit or None]


def load_tasks(uri: str | os.PathLike[str]) -> list[Task]:
  """Every task of a file or of a source that `rows.read_rows` knows, in order.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file's kind is unknown, it holds no task, a row fits no schema, or
      two rows have the same id; the message names the file, the row and the field.
  """
  return _load(TasksConfig(os.fspath(uri)))[0]


def describe_tasks(tasks: Sequence[Task]) -> str:
  """Says which kinds were found, in a line: "1,319 tasks of gsm8k: math"."""
  groups: dict[tuple[str, Kind], list[Task]] = {}
  for task in tasks:
    groups.setdefault((task.source, task.kind), []).append(task)
  parts = []
  for (source, kind), found in groups.items():
    of = f" of {source}" if source else ""
    noun = "task" if len(found) == 1 else "tasks"
    words = str(kind.value)
    if kind == Kind.QA and all(_are_whole_numbers(t) for t in found):
      words += " (numbers, equal as text; tasks.kind='math': in value)"
    parts.append(f"{len(found):,} {noun}{of}: {words}")
  if len(parts) > 8:
    parts[8:] = [f"and {len(parts) - 8} more sources"]
  return "; ".join(parts)


def _load(config: TasksConfig) -> tuple[list[Task], list[Task]]:
  """All tasks, and those among them whose rows do not say their kind."""
  tasks: list[Task] = []
  unsaid: list[Task] = []
  seen: dict[str, tuple[str, Task]] = {}
  numbers: collections.Counter[str] = collections.Counter()
  shapes: set[tuple[frozenset[str], frozenset[str]]] = set()
  warned: set[str] = set()
  kind = Kind(config.kind) if config.kind else None
  for uri in list_uris(config.uri):
    stem = os.path.splitext(os.path.basename(uri).removesuffix(".gz"))[0]
    name = _source_of(uri)
    for where, row in read_rows(uri):
      # Files of one name in several folders count on, so that no two ids are the same.
      default_id = f"{stem}-{numbers[stem]}"
      numbers[stem] += 1
      reading = Reading(default_id, config.fields, kind, config.source, name)
      task, said = read_row(row, where, reading)
      # An id is the group of a task's attempts: two tasks must not share one.
      if task.id in seen:
        before, other = seen[task.id]
        if "reward_model" in row and task == other:
          continue  # DAPO-Math has every row a hundred times
        raise ValueError(f"{where}: id {task.id!r} is already the id of {before}")
      seen[task.id] = (where, task)
      # Looked at once for every set of columns: a file may have millions of rows.
      shape = (frozenset(row), frozenset(task.meta))
      if shape not in shapes:
        shapes.add(shape)
        _warn_misspelt(misspelt(row, task), where, warned)
      tasks.append(task)
      if not said:
        unsaid.append(task)
  if not tasks:
    raise ValueError(f"{config.uri}: holds no task")
  return tasks, unsaid


def _warn_misspelt(columns: dict[str, str], where: str, warned: set[str]) -> None:
  """Says of each column, once, which field it may have meant."""
  for column, field in columns.items():
    if column in warned:
      continue
    warned.add(column)
    _log.warning(
      "%s: column %r is kept in meta and not read as %s; if it is meant to be, give "
      "tasks.fields=dict(%s=%r)",
      where,
      column,
      field,
      field,
      column,
    )


def _source_of(uri: str) -> str:
  """What a data set is called by its file: its stem, or its folder's name."""
  folder, name = os.path.split(uri.partition("?")[0])
  stem = os.path.splitext(name.removesuffix(".gz"))[0].rpartition(":")[2]
  if stem.lower() in _SPLITS and os.path.basename(folder):
    return os.path.basename(folder)
  return stem


def _check_kinds(config: TasksConfig, unsaid: list[Task]) -> None:
  """Refuses to judge by exact match what most likely is mathematics."""
  if config.kind:
    return
  found = [t for t in unsaid if all(_MATHEMATICS.fullmatch(a) for a in t.answers)]
  if all(map(_are_whole_numbers, found)):
    return  # years, counts: `describe_tasks` says how they are judged
  if 2 * len(found) > len(unsaid):
    raise ValueError(
      f"{config.uri}: {len(found):,} of {len(unsaid):,} answers without a kind look "
      f"like mathematics, as {found[0].answers[0]!r:.60} of {found[0].id}; say which "
      "they are: tasks.kind='math' (equal in value), or tasks.kind='qa' (equal as text)"
    )


def _are_whole_numbers(task: Task) -> bool:
  return all(_WHOLE_NUMBER.fullmatch(answer) for answer in task.answers)

"""Reads tasks from files in our own schema, the released schema, or a data set's.

A row's fields decide its schema (`schemas`), the URI its source (`rows`). Code tasks
keep their tests in `meta["tests"]`, GSM8K tasks their worked solution in
`meta["solution"]`; questions show neither, except one assert in MBPP.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
import random
import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence

from coa_jax.data.tasks.kinds import are_whole_numbers, check_kinds
from coa_jax.data.tasks.rows import list_uris, read_rows
from coa_jax.data.tasks.schemas import FIELDS, Reading, attached, misspelt, read_row
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.runtime.fields import bounded, check_fields, choice, nearest

# Files named after a split take their folder's name.
_SPLITS = ("train", "test", "dev", "val", "valid", "validation", "data")
# The part number at the end of a data set's file name.
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TasksConfig:
  """Config section `tasks`.

  Attributes:
    uri: a file, several files separated by commas, a glob, a folder, or another
      source's URI; see `rows`.
    limit: take this many tasks; 0 takes all.
    limit_per_source: take this many tasks from each source, before `limit`; 0 takes
      all.
    families: take only these; () takes all.
    seed: the seed for shuffling; None keeps the file's order. With a limit, the seed
      also selects the tasks.
    fields: question, answers, id, kind, source or family -> its column in the rows, if
      the name differs; "a.b" is b inside a.
    kind: the kind for rows without one: qa, math or code.
    source: the data set's name for rows without one; the file's name if empty.
    attachments: True also reads rows with a picture or a file, which no model sees; by
      default such rows are left out and counted.
  """

  uri: str
  limit: int = bounded(0, least=0)
  limit_per_source: int = bounded(0, least=0)
  families: tuple[str, ...] = ()
  seed: int | None = None
  fields: dict[str, str] = dataclasses.field(default_factory=dict)
  kind: str = choice("", of=("", *Kind))
  source: str = ""
  attachments: bool = False

  def __post_init__(self):
    check_fields(self)
    for name in self.fields:
      if name not in FIELDS:
        raise ValueError(
          f"fields: a task has no field {name!r} to be filled{nearest(name, FIELDS)}"
        )


def select_tasks(config: TasksConfig) -> list[Task]:
  """Loads the tasks that a config selects.

  Raises:
    FileNotFoundError, ValueError: as `load_tasks`; or no task is left; or rows without
      a kind have answers that look like mathematics.
  """
  tasks, unsaid = _load(config)
  if not config.kind:
    check_kinds(unsaid, config.uri)
  if config.families:
    known = sorted({t.family for t in tasks})
    tasks = [t for t in tasks if t.family in config.families]
    if not tasks:
      raise ValueError(
        f"{config.uri}: no task of families {', '.join(config.families)}; "
        f"there are {', '.join(known)}"
      )
  # Shuffled before the cut: with a seed, a limit takes a random sample.
  if config.seed is not None:
    random.Random(config.seed).shuffle(tasks)
  if config.limit_per_source:
    tasks = _first_of_each_source(tasks, config.limit_per_source)
  chosen = tasks[: config.limit or None]
  lost = {t.source for t in tasks} - {t.source for t in chosen}
  if lost:
    _log.warning(
      "tasks.limit=%d takes none of %s; tasks.limit_per_source takes some of each",
      config.limit,
      ", ".join(sorted(lost)),
    )
  return chosen


def _first_of_each_source(tasks: Sequence[Task], limit: int) -> list[Task]:
  by_source: dict[str, Iterator[int]]
  by_source = collections.defaultdict(lambda: itertools.count(1))
  return [task for task in tasks if next(by_source[task.source]) <= limit]


def load_tasks(uri: str | os.PathLike[str]) -> list[Task]:
  """Reads all tasks in order from a file or source accepted by `rows.read_rows`.

  Includes rows with pictures or files: their questions are held out, too.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file's kind is unknown, it has no task, a row matches no schema, or
      two rows have the same id; the message names the file, the row and the field.
  """
  return _load(TasksConfig(os.fspath(uri), attachments=True))[0]


def describe_tasks(tasks: Sequence[Task]) -> str:
  """Describes the tasks' kinds in one line: "1,319 tasks of gsm8k: math"."""
  groups: dict[tuple[str, Kind], list[Task]] = {}
  for task in tasks:
    groups.setdefault((task.source, task.kind), []).append(task)
  parts = []
  for (source, kind), found in groups.items():
    of = f" of {source}" if source else ""
    noun = "task" if len(found) == 1 else "tasks"
    words = str(kind.value)
    if kind == Kind.QA and all(map(are_whole_numbers, found)):
      words += " (numbers, equal as text; tasks.kind='math': in value)"
    parts.append(f"{len(found):,} {noun}{of}: {words}")
  if len(parts) > 8:
    parts[8:] = [f"and {len(parts) - 8} more sources"]
  return "; ".join(parts)


@dataclasses.dataclass
class _Found:
  """A task, its place, and whether its row gives its kind."""

  task: Task
  where: str
  stem: str
  said: bool


def _load(config: TasksConfig) -> tuple[list[Task], list[Task]]:
  """Returns all tasks, and the tasks without a kind in their rows."""
  found: list[_Found] = []
  seen: dict[str, Task] = {}
  numbers: collections.Counter[str] = collections.Counter()
  left_out: collections.Counter[tuple[str, str]] = collections.Counter()
  shapes: set[tuple[frozenset[str], frozenset[str]]] = set()
  warned: set[str] = set()
  kind = Kind(config.kind) if config.kind else None
  for uri in list_uris(config.uri):
    stem = os.path.splitext(os.path.basename(uri).removesuffix(".gz"))[0]
    source = config.source or _source_of(uri)
    for where, row in read_rows(uri):
      # Files with one name in several folders share a count, so that ids stay unique.
      default_id = f"{stem}-{numbers[stem]}"
      numbers[stem] += 1
      column = None if config.attachments else attached(row)
      if column is not None:
        left_out[uri, column] += 1
        continue
      reading = Reading(default_id, config.fields, kind, source)
      task, said = read_row(row, where, reading)
      # DAPO-Math repeats every row a hundred times.
      if "reward_model" in row:
        before = seen.setdefault(task.id, task)
        if before is not task and before == task:
          continue
      # Checked once per column set: a file may have millions of rows.
      shape = (frozenset(row), frozenset(task.meta))
      if shape not in shapes:
        shapes.add(shape)
        _warn_misspelt(misspelt(row, task), where, warned)
      found.append(_Found(task, where, stem, said))
  _warn_unasked(left_out, found)
  if not found:
    reason = " but with pictures or files: see tasks.attachments" if left_out else ""
    raise ValueError(f"{config.uri}: holds no task{reason}")
  _tell_ids_apart(found)
  return [one.task for one in found], [one.task for one in found if not one.said]


def _warn_unasked(
  left_out: collections.Counter[tuple[str, str]], found: list[_Found]
) -> None:
  """Warns about skipped rows, and about system messages left out of questions."""
  for (uri, column), count in left_out.items():
    _log.warning(
      "%s: rows left out: %d; column %r holds a picture or a file, which no model is "
      "shown; tasks.attachments=True reads them without it",
      uri,
      count,
      column,
    )
  systems = collections.Counter(
    one.task.source for one in found if "system" in one.task.meta
  )
  for source, count in systems.items():
    _log.warning(
      "%s: rows with a system message: %d; it is kept in meta.system, not in the "
      "question",
      source,
      count,
    )


def _tell_ids_apart(found: list[_Found]) -> None:
  """Makes ids unique: shared ids get their source's or file's name as a prefix.

  Raises:
    ValueError: an id occurs twice within one file.
  """
  names: tuple[Callable[[_Found], str], ...] = (
    lambda one: one.task.source,
    lambda one: one.stem,
  )
  for name_of in names:
    owners: dict[str, set[str]] = {}
    for one in found:
      owners.setdefault(one.task.id, set()).add(name_of(one))
    shared = set().union(*(names for names in owners.values() if len(names) > 1))
    for one in found:
      if name_of(one) in shared:
        new_id = f"{name_of(one)}-{one.task.id}"
        one.task = dataclasses.replace(one.task, id=new_id)
    if shared:
      _log.warning(
        "%s have ids in common: each id gets the name before it",
        ", ".join(sorted(shared)),
      )
  # Attempts are grouped by task id, so two tasks must not share an id.
  places: dict[str, str] = {}
  for one in found:
    if one.task.id in places:
      raise ValueError(
        f"{one.where}: id {one.task.id!r} is already the id of {places[one.task.id]}"
      )
    places[one.task.id] = one.where


def _warn_misspelt(columns: dict[str, str], where: str, warned: set[str]) -> None:
  for column, field in columns.items():
    if column in warned:
      continue
    warned.add(column)
    _log.warning(
      "%s: column %r is kept in meta and not read as %s; if it is meant to be, give "
      "--config.tasks.fields.%s=%s",
      where,
      column,
      field,
      field,
      column,
    )


def _source_of(uri: str) -> str:
  """Names a data set by its file's stem, or by its folder if the stem is a split.

  A hub config is appended: FlashRAG_datasets-nq.
  """
  path, _, query = uri.partition("?")
  *folders, name = [p for p in path.split("/") if p not in ("", ".", "..")] or [uri]
  stem = os.path.splitext(name.removesuffix(".gz"))[0].rpartition(":")[2]
  stem = _PART.sub("", stem)
  while stem.lower() in _SPLITS and folders:
    stem = folders.pop().rpartition(":")[2]
  config = urllib.parse.parse_qs(query).get("config")
  if config:
    stem = f"{stem}-{config[0]}"
  # Source or kind names a grader, so a source must not have a kind's name.
  return name if stem in list(Kind) else stem

"""Rows of traces in, filtered trajectories out: streamed, by any number of processes.

What looks at one row alone (reading, conversion, the filters' verdict, token ids) is
`Refiner.work`, which worker processes share; what must see all rows in order (near
duplicates, copies, counts) stays here. The result is the same for any number of
processes, and at most a few chunks of rows are in memory at once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from coa_jax.importers.importers import Importer, Record
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.rewards import grade
from coa_jax.tasks.task import Kind, Task
from coa_jax.teacher.convert import Dropped
from coa_jax.teacher.filters import Examined, FiltersConfig, Funnel, examine
from coa_jax.teacher.novelty import Benchmarks
from coa_jax.teacher.tool_augmentation import ToolAugmentation, augmented_copies

CHUNK = 16  # rows that travel together


@dataclasses.dataclass(frozen=True)
class Shape:
  """What statistics want to know of a trajectory.

  Attributes:
    length: its tokens where it has ids, else its characters without the prompt.
    roles: number of spans of each role.
  """

  length: int
  roles: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Found:
  """A row that gave a trajectory.

  Attributes:
    task_id: its task.
    line: the trajectory as a line of JSON; "" where a filter that looks at it alone
      drops it.
    shape: for statistics.
    lost: what the row has that the trajectory has no place for.
    restyled: lines of the copies in other formats.
    fault, reflected, corrected, graded, signature: as `filters.Examined` has them.
  """

  task_id: str
  line: str
  shape: Shape
  lost: tuple[str, ...]
  restyled: tuple[str, ...]
  fault: tuple[str, str] | None
  reflected: bool
  corrected: bool
  graded: bool
  signature: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Refiner:
  """What is done to every row; a value, so that worker processes can have it.

  Attributes:
    importer: reads and converts.
    filters: thresholds and ratios; None keeps every trajectory.
    benchmarks: as from `filters.load_benchmarks`; None without filters.
    tokenizer: folder of the tokenizer that writes ids; "" writes none.
    formats: how many copies of each trajectory in other formats.
  """

  importer: Importer
  filters: FiltersConfig | None = None
  benchmarks: Benchmarks | None = None
  tokenizer: str = ""
  formats: ToolAugmentation = dataclasses.field(default_factory=ToolAugmentation)

  def work(self, records: Sequence[Record]) -> list[Dropped | Found]:
    """Rows one by one, each alone."""
    return [self._row(*record) for record in records]

  def _row(self, number: int, where: str, row: dict[str, Any]) -> Dropped | Found:
    read = self.importer.read(number, where, row)
    if isinstance(read, Dropped):
      return read
    task, trajectory = read
    found = Examined(trajectory, None)
    if self.filters is not None and self.benchmarks is not None:
      found = examine(
        task,
        trajectory,
        self.importer.variant,
        judge,
        self.filters,
        self.benchmarks,
      )
    kept = [] if found.fault else [trajectory]
    restyled = augmented_copies(kept, self.importer.variant, self.formats)
    if self.tokenizer:
      _tokenizer(self.tokenizer).encode_trajectories([trajectory, *restyled])
    return Found(
      task_id=trajectory.task_id,
      line="" if found.fault else json.dumps(trajectory.to_json()),
      shape=shape(trajectory),
      lost=tuple(trajectory.meta.get("lost", ())),
      restyled=tuple(json.dumps(t.to_json()) for t in restyled),
      fault=found.fault,
      reflected=found.reflected,
      corrected=found.corrected,
      graded=found.graded,
      signature=found.signature,
    )


def judge(task: Task, prediction: str | None) -> float | None:
  """The reward of an answer; None where none is known, or only tests could tell."""
  if not task.answers or task.kind == Kind.CODE:
    return None
  return grade(task, prediction)


def shape(trajectory: Trajectory) -> Shape:
  """The trajectory's length and make-up."""
  spans = [s for s in trajectory.segments if s.author != Author.PROMPT]
  length = trajectory.num_tokens or sum(len(s.text) for s in spans)
  return Shape(length, dict(Counter(s.role for s in spans if s.role)))


class Refinement:
  """One pass over a source; `lines` runs it, the rest tells what came of it."""

  def __init__(self, refiner: Refiner, workers: int = 0):
    """Args: what is done to a row; worker processes, 0 for none but this one."""
    self._refiner = refiner
    self._workers = workers
    self._funnel = Funnel(refiner.filters) if refiner.filters else None
    self._dropped: Counter[str] = Counter()
    self._rows = self._lossy = self._restyled = 0

  def lines(
    self,
    records: Iterable[Record],
    on_dropped: Callable[[Dropped], None] = lambda _: None,
    on_found: Callable[[Found, int], None] = lambda *_: None,
  ) -> Iterator[str]:
    """Every trajectory that is to be written, as a line of JSON, in the rows' order.

    Args:
      records: rows, as from `importers.records`; read as they are needed.
      on_dropped: told of every row that gives no trajectory.
      on_found: told of every other, and how often it is written.
    """
    for result in self._results(records):
      self._rows += 1
      if isinstance(result, Dropped):
        self._dropped[result.reason] += 1
        on_dropped(result)
        continue
      self._lossy += bool(result.lost)
      copies = self._funnel.admit(result) if self._funnel else 1
      on_found(result, copies)
      for number in range(copies):
        yield result.line if number == 0 else _copy(result.line, number)
      if copies:
        self._restyled += len(result.restyled)
        yield from result.restyled

  def counts(self) -> dict[str, Any]:
    """Rows read, dropped at import and with losses; restyled copies; the funnel."""
    dropped = dict(sorted(self._dropped.items()))
    kept = self._rows - self._dropped.total()
    out: dict[str, Any] = {
      "rows": self._rows,
      "import": {"kept": kept, "dropped": dropped, "with_losses": self._lossy},
      "restyled": self._restyled,
    }
    return {**out, "filters": self._funnel.report()} if self._funnel else out

  def _results(self, records: Iterable[Record]) -> Iterator[Dropped | Found]:
    rows = iter(records)
    chunks = iter(lambda: list(itertools.islice(rows, CHUNK)), [])
    if not self._workers:
      for chunk in chunks:
        yield from self._refiner.work(chunk)
      return
    # Spawned, not forked: threads of libraries do not survive a fork.
    pool = concurrent.futures.ProcessPoolExecutor(
      self._workers,
      multiprocessing.get_context("spawn"),
      initializer=_begin,
      initargs=(self._refiner,),
    )
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
      for chunk in chunks:
        waiting.append(pool.submit(_work, chunk))
        if len(waiting) > 2 * self._workers:  # bounds what is in memory
          yield from waiting.popleft().result()
      while waiting:
        yield from waiting.popleft().result()
    finally:
      pool.shutdown(cancel_futures=True)


def _copy(line: str, number: int) -> str:
  row = json.loads(line)
  row["meta"]["copy"] = number
  return json.dumps(row)


# Of a worker process: what it was started with, and the tokenizers it has read.
_MINE: list[Refiner] = []
_TOKENIZERS: dict[str, Any] = {}


def _begin(refiner: Refiner) -> None:
  _MINE[:] = [refiner]


def _work(records: Sequence[Record]) -> list[Dropped | Found]:
  return _MINE[0].work(records)


def _tokenizer(folder: str) -> Any:
  if folder not in _TOKENIZERS:
    from coa_jax.protocol.tokens import Tokenizer  # takes seconds to import

    _TOKENIZERS[folder] = Tokenizer.load(folder)
  return _TOKENIZERS[folder]

"""Streams trace rows into filtered trajectories, with any number of processes.

`RowPipeline.work` handles each row alone (reading, conversion, the filters' verdict,
token ids), also in worker processes; `ImportJob` handles all rows in order (near
duplicates, copies, counts). The result is the same for any number of processes, and at
most a few chunks are in memory at once.

budget: one pass, by processes of one machine or by shards of several.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from coa_jax.data.importers import parts
from coa_jax.data.importers.importers import Importer, Record
from coa_jax.data.teacher.convert import Dropped
from coa_jax.data.teacher.filters import FilterResult, FiltersConfig, Funnel, examine
from coa_jax.data.teacher.novelty import Benchmarks
from coa_jax.data.teacher.tool_augmentation import ToolAugmentation, augmented_copies
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.rewards import grade_known
from coa_jax.runtime.shard import Shard

CHUNK = 16  # rows in one chunk


@dataclasses.dataclass(frozen=True)
class TrajectoryStats:
  """A trajectory's length in tokens, else characters, without prompt; spans by role."""

  length: int
  roles: dict[str, int]


@dataclasses.dataclass(frozen=True)
class ImportedRow:
  """A row converted to a trajectory.

  Attributes:
    task_id: the task's id.
    line: the trajectory as a JSON line; "" if a single-trajectory filter drops it.
    stats: the trajectory's length and spans.
    lost: the row's unmapped fields.
    augmented: JSON lines for the copies with other tool names and formats.
    verdict: the filters' verdict.
  """

  task_id: str
  line: str
  stats: TrajectoryStats
  lost: Sequence[str]
  augmented: Sequence[str]
  verdict: FilterResult

  def to_json(self) -> dict[str, Any]:
    """Returns the row as JSON values."""
    value = dataclasses.asdict(self)
    if self.verdict.signature is not None:
      value["verdict"]["signature"] = self.verdict.signature.tolist()
    return value

  @classmethod
  def from_json(cls, value: dict[str, Any]) -> ImportedRow:
    """Reads the output of `to_json`."""
    verdict = FilterResult(**value["verdict"])
    if verdict.signature is not None:
      verdict.signature = np.array(verdict.signature, np.uint32)
    stats = TrajectoryStats(**value["stats"])
    return cls(**{**value, "stats": stats, "verdict": verdict})


@dataclasses.dataclass(frozen=True)
class RowPipeline:
  """Processes rows, each alone; picklable, for worker processes.

  Attributes:
    importer: reads and converts rows.
    filters: thresholds and ratios; None keeps every trajectory.
    benchmarks: the result of `filters.load_benchmarks`; None without filters.
    tokenizer: the tokenizer's folder, for ids; "" writes none.
    formats: the copies to make with other tool names and formats.
  """

  importer: Importer
  filters: FiltersConfig | None = None
  benchmarks: Benchmarks | None = None
  tokenizer: str = ""
  formats: ToolAugmentation = dataclasses.field(default_factory=ToolAugmentation)

  def work(self, records: Sequence[Record]) -> list[Dropped | ImportedRow]:
    """Imports rows, each alone."""
    return [self._import(*record) for record in records]

  def _import(
    self, number: int, where: str, row: dict[str, Any]
  ) -> Dropped | ImportedRow:
    # --- Read and convert.
    imported = self.importer.read(number, where, row)
    if isinstance(imported, Dropped):
      return imported
    task, trajectory = imported
    variant = self.importer.variant

    # --- Filter. A row dropped here needs no copies, but is counted.
    verdict = FilterResult()
    if self.filters is not None and self.benchmarks is not None:
      verdict = examine(
        task, trajectory, variant, grade_known, self.filters, self.benchmarks
      )
    copies = []
    if verdict.fault is None:
      copies = augmented_copies([trajectory], variant, self.formats)

    # --- Write ids and lines.
    if self.tokenizer:
      _tokenizer(self.tokenizer).encode_trajectories([trajectory, *copies])
    return ImportedRow(
      task_id=trajectory.task_id,
      line="" if verdict.fault else json.dumps(trajectory.to_json()),
      stats=trajectory_stats(trajectory),
      lost=trajectory.meta.get("lost", ()),
      augmented=[json.dumps(copy.to_json()) for copy in copies],
      verdict=verdict,
    )


def trajectory_stats(trajectory: Trajectory) -> TrajectoryStats:
  """Measures the trajectory's length and counts its spans."""
  count: Counter[str] = Counter()
  num_chars = 0
  for segment in trajectory.segments:
    if segment.author != Author.PROMPT:
      num_chars += len(segment.text)
      if segment.role:  # white space alone has no role
        count[segment.role] += 1
  return TrajectoryStats(trajectory.num_tokens or num_chars, dict(count))


class ImportJob:
  """One pass over a source: `lines` runs the pass, `counts` has its statistics.

  If rows are divided among shards, each shard calls `write_part`, and `joined_lines`
  then yields the same lines as `lines`.
  """

  def __init__(self, pipeline: RowPipeline, workers: int = 0):
    """Takes the row pipeline, and a number of worker processes; 0 uses none."""
    self._pipeline = pipeline
    self._workers = workers
    self._funnel: Funnel | None = None
    if pipeline.filters:
      self._funnel = Funnel(pipeline.filters)
    self._dropped: Counter[str] = Counter()
    self._rows = 0
    self._lossy = 0
    self._augmented = 0

  def lines(
    self,
    records: Iterable[Record],
    on_dropped: Callable[[Dropped, Record], None] = lambda *_: None,
    on_imported: Callable[[ImportedRow, int], None] = lambda *_: None,
  ) -> Iterator[str]:
    """Yields every trajectory to write, as a JSON line, in row order.

    Rows are read as they are needed. `on_dropped` gets a dropped row's reason and
    record; `on_imported` gets any other row and its number of copies.
    """
    return self._admitted(self._results(records), on_dropped, on_imported)

  def write_part(
    self, path: str | os.PathLike[str], records: Iterable[Record], shard: Shard
  ) -> int:
    """Imports a shard's rows, each alone, into a file; returns their number."""
    own = itertools.islice(records, shard.index, None, shard.count)

    def values() -> Iterator[dict[str, Any]]:
      reasons = set()
      for record, result in self._results(own):
        if not isinstance(result, Dropped):
          yield {"imported": result.to_json()}
        elif result.reason in reasons:
          yield {"dropped": vars(result)}
        else:  # the first with this reason, for the hint
          reasons.add(result.reason)
          yield {"dropped": vars(result), "record": record}

    return parts.write_part(path, values(), shard)

  def joined_lines(
    self,
    path: str | os.PathLike[str],
    on_dropped: Callable[[Dropped, Record], None] = lambda *_: None,
    on_imported: Callable[[ImportedRow, int], None] = lambda *_: None,
  ) -> Iterator[str]:
    """Yields the same lines as `lines`, from all shards' joined files.

    `on_dropped` gets an empty record unless the reason is new in a shard.

    Raises:
      ValueError: rows are missing, or there twice.
    """

    def results() -> Iterator[tuple[Record, Dropped | ImportedRow]]:
      for value in parts.read_parts(path):
        number, where, row = value.get("record") or (value["place"], "", {})
        if "dropped" in value:
          yield (number, where, row), Dropped(**value["dropped"])
        else:
          yield (number, where, row), ImportedRow.from_json(value["imported"])

    return self._admitted(results(), on_dropped, on_imported)

  def _admitted(
    self,
    results: Iterable[tuple[Record, Dropped | ImportedRow]],
    on_dropped: Callable[[Dropped, Record], None],
    on_imported: Callable[[ImportedRow, int], None],
  ) -> Iterator[str]:
    for record, result in results:
      self._rows += 1
      if isinstance(result, Dropped):
        self._dropped[result.reason] += 1
        on_dropped(result, record)
        continue

      # --- Near duplicates and copies: only here are all rows seen, in order.
      self._lossy += bool(result.lost)
      copies = 1
      if self._funnel:
        copies = self._funnel.admit(result.verdict)
      on_imported(result, copies)
      if not copies:
        continue

      # --- The trajectory itself, its numbered copies, the copies in other tool
      # formats.
      yield result.line
      for number in range(1, copies):
        yield _numbered_line(result.line, number)
      self._augmented += len(result.augmented)
      yield from result.augmented

  def counts(self) -> dict[str, Any]:
    """Returns counts: rows read, dropped at import, with losses; copies; the funnel."""
    dropped = dict(sorted(self._dropped.items()))
    num_imported = self._rows - self._dropped.total()
    out: dict[str, Any] = {
      "rows": self._rows,
      "import": {"kept": num_imported, "dropped": dropped, "with_losses": self._lossy},
      "augmented": self._augmented,
    }
    if self._funnel:
      out["filters"] = self._funnel.report()
    return out

  def _results(
    self, records: Iterable[Record]
  ) -> Iterator[tuple[Record, Dropped | ImportedRow]]:
    # --- Chunks, read as needed; in this process if there are no workers.
    rows = iter(records)
    chunks = iter(lambda: list(itertools.islice(rows, CHUNK)), [])
    if not self._workers:
      for chunk in chunks:
        yield from zip(chunk, self._pipeline.work(chunk), strict=True)
      return
    # --- Worker processes; results keep the chunks' order. Spawned, not forked: library
    # threads do not survive a fork.
    pool = concurrent.futures.ProcessPoolExecutor(
      self._workers,
      multiprocessing.get_context("spawn"),
      initializer=_start_worker,
      initargs=(self._pipeline,),
    )
    pending: collections.deque[tuple[list[Record], concurrent.futures.Future]]
    pending = collections.deque()
    try:
      for chunk in chunks:
        # A chunk with a slow row delays later chunks, not the workers.
        pending.append((chunk, pool.submit(_work, chunk)))
        if len(pending) > 2 * self._workers:  # bounds the memory
          chunk, results = pending.popleft()
          yield from zip(chunk, results.result(), strict=True)
      while pending:
        chunk, results = pending.popleft()
        yield from zip(chunk, results.result(), strict=True)
    finally:
      pool.shutdown(cancel_futures=True)


def _numbered_line(line: str, number: int) -> str:
  row = json.loads(line)
  row["meta"]["copy"] = number
  return json.dumps(row)


# --- In a worker process.

_worker_pipeline: list[RowPipeline] = []  # the process's pipeline, set at its start


def _start_worker(pipeline: RowPipeline) -> None:
  _worker_pipeline[:] = [pipeline]


def _work(records: Sequence[Record]) -> list[Dropped | ImportedRow]:
  return _worker_pipeline[0].work(records)


@functools.cache  # once in every process
def _tokenizer(folder: str) -> Any:
  from coa_jax.protocol.tokens import Tokenizer  # takes seconds to import

  return Tokenizer.load(folder)

"""Trajectories and tasks in JSON lines or parquet, written as a stream.

In parquet, a row's plain and nested fields are typed columns; `meta` and `reward_parts`
are JSON text columns. ArrayRecord, the random-access format of grain and TensorFlow
Datasets, is read if each record is one JSON object (extra `data`).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from coa_jax.runtime.disk import atomic_path
from coa_jax.runtime.json_io import parse_object

_ROWS = 256  # rows in a row group, all in memory at once
_TEXT_COLUMNS = ("meta", "reward_parts")  # objects without a fixed shape


def write_lines(
  path: str | os.PathLike[str],
  rows: Iterable[str | dict[str, Any]],
  at_least_one: bool = False,
) -> int:
  """Writes rows to a file, which appears only when complete.

  Args:
    path: the file; its suffix selects the format: .jsonl or .parquet.
    rows: JSON objects, or JSON lines.
    at_least_one: leave no file if there are no rows.

  Returns:
    The number of rows.

  Raises:
    ValueError: the suffix is unknown.
    EOFError: `at_least_one` is True, and there are no rows.
  """
  path = os.fspath(path)
  write = _WRITERS[suffix_of(path)]
  with atomic_path(path) as unfinished:
    count = write(unfinished, rows)
    # Raised inside, so that no file appears.
    if at_least_one and not count:
      raise EOFError(path)
  return count


def suffix_of(path: str) -> str:
  """Returns a file's suffix if `write_lines` can write it.

  Raises:
    ValueError: the format cannot be written.
  """
  suffix = os.path.splitext(path)[1]
  if suffix not in _WRITERS:
    raise ValueError(
      f"{path}: unknown suffix {suffix!r}; accepted: {', '.join(_WRITERS)}"
    )
  return suffix


def read_parquet(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields ("FILE row N", row) for files from `write_lines` and other writers.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is not parquet, or is broken; the message names the row.
  """
  import pyarrow
  import pyarrow.parquet

  path = os.fspath(path)
  number = 0
  try:
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_ROWS):
      for row in batch.to_pylist():
        yield f"{path} row {number}", decoded(row)
        number += 1
  except FileNotFoundError:
    raise
  except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
    raise ValueError(f"{path} row {number}: cannot be read as parquet: {e}") from e


def count_rows(path: str | os.PathLike[str]) -> int:
  """Estimates a file's row count: empty lines count as rows.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is broken, or the package `array_record` is missing.
  """
  path = os.fspath(path)
  suffix = os.path.splitext(path)[1]
  # These two formats store the row count, so no row is read.
  if suffix == ".parquet":
    import pyarrow
    import pyarrow.parquet

    try:
      return pyarrow.parquet.read_metadata(path).num_rows
    except (pyarrow.ArrowException, OSError) as e:
      if isinstance(e, FileNotFoundError):
        raise
      raise ValueError(f"{path}: cannot be read as parquet: {e}") from e
  if suffix == ".array_record":
    with contextlib.closing(_array_records(path)) as reader:
      return reader.num_records()
  # Lines must be counted, a megabyte at a time.
  begin = gzip.open if suffix == ".gz" else open
  count = 0
  try:
    with begin(path, "rb") as f:
      while block := f.read(1 << 20):
        count += block.count(b"\n")
    return count
  except (gzip.BadGzipFile, EOFError, zlib.error) as e:
    raise ValueError(f"{path}: cannot be read: {e}") from e


def decoded(row: dict[str, Any]) -> dict[str, Any]:
  """Decodes a table's row: JSON text columns become objects again."""
  for name in _TEXT_COLUMNS:
    if isinstance(row.get(name), str):
      # In another writer's file, a column of this name may be plain text.
      with contextlib.suppress(ValueError, RecursionError):
        row[name] = json.loads(row[name])
  return row


def read_array_record(
  path: str | os.PathLike[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields ("FILE row N", row) for each record, a JSON object, in file order.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is not ArrayRecord, a record is not a JSON object, or the
      package `array_record` is missing.
  """
  path = os.fspath(path)
  with contextlib.closing(_array_records(path)) as reader:
    count = reader.num_records()
    for begin in range(0, count, _ROWS):
      end = min(begin + _ROWS, count)
      for number, record in enumerate(reader.read(begin, end), begin):
        where = f"{path} row {number}"
        yield where, parse_object(record, where)


def _array_records(path: str) -> Any:
  """Opens an ArrayRecord file for reading."""
  if not os.path.exists(path):
    raise FileNotFoundError(f"no file at {path}")
  if os.path.getsize(path) == 0:
    raise ValueError(f"{path}: not ArrayRecord (it is empty)")
  try:
    from array_record.python import array_record_module
  except ImportError as e:
    raise ValueError(f"{path}: needs `pip install array_record`") from e
  # Other file formats fail at one of three places, each with a different error.
  try:
    reader = array_record_module.ArrayRecordReader(path)
    if not reader.ok():
      reader.close()  # raises the format's error
    reader.num_records()
  except (RuntimeError, IndexError, OSError) as e:
    raise ValueError(f"{path}: not ArrayRecord ({e})") from e
  return reader


def _write_jsonl(path: str, rows: Iterable[str | dict[str, Any]]) -> int:
  count = 0
  with open(path, "w", encoding="ascii") as f:
    for row in rows:
      if not isinstance(row, str):
        row = json.dumps(row)
      f.write(row + "\n")
      count += 1
  return count


def _write_parquet(path: str, rows: Iterable[str | dict[str, Any]]) -> int:
  import pyarrow
  import pyarrow.parquet

  count = 0
  writer = None
  schema = None
  pending = iter(rows)
  try:
    while group := list(map(_columns, itertools.islice(pending, _ROWS))):
      # The first group decides all columns, and a field that it lacks, or has only as
      # null, would be lost. So trajectories have a fixed schema.
      if schema is None:
        schema = _schema(group[0])
      try:
        table = pyarrow.Table.from_pylist(group, schema)
      except UnicodeEncodeError:
        # JSON can hold a lone surrogate; it becomes "?", as in tokenizers.
        text = json.dumps(group, ensure_ascii=False).encode("utf-8", "replace")
        table = pyarrow.Table.from_pylist(json.loads(text), schema)
      schema = table.schema
      writer = writer or pyarrow.parquet.ParquetWriter(
        path, table.schema, compression="zstd"
      )
      writer.write_table(table)
      count += len(group)
    if writer is None:  # an empty file must be readable too
      pyarrow.parquet.write_table(pyarrow.table({}), path)
  finally:
    if writer is not None:
      writer.close()
  return count


def _columns(row: str | dict[str, Any]) -> dict[str, Any]:
  """Encodes a row as columns: JSON values become text. Inverts `decoded`."""
  columns = json.loads(row) if isinstance(row, str) else dict(row)
  for name in _TEXT_COLUMNS:
    if name in columns:
      columns[name] = json.dumps(columns[name])
  return columns


def _schema(row: dict[str, Any]) -> Any:
  """Returns a trajectory's schema; None (pyarrow infers it) for other rows.

  The schema is explicit because pyarrow infers types from values: an empty `ids` list
  or a `reward` of None has no type.
  """
  if "segments" not in row:
    return None
  import pyarrow as pa

  # --- Scalar types; ids and versions have 32 bits.
  text = pa.string()
  real = pa.float64()
  whole = pa.int64()

  # --- The nested records, with the fields in `trajectory`.
  segment = pa.struct(
    {
      "author": text,
      "role": text,
      "text": text,
      "ids": pa.list_(pa.int32()),
      "logps": pa.list_(real),
      "versions": pa.list_(pa.int32()),
    }
  )
  texts = ("name", "arguments", "result", "status")
  call = pa.struct({**dict.fromkeys(texts, text), "seconds": real})
  tokens = dict.fromkeys(("prompt", "cached", "generated", "observation"), whole)
  calls = dict.fromkeys(("tool_calls", "model_calls", "tool_turns"), whole)
  usage = pa.struct({**tokens, **calls, "seconds": real})

  # --- The row.
  return pa.schema(
    {
      "task_id": text,
      "segments": pa.list_(segment),
      "calls": pa.list_(call),
      "status": text,
      "reward": real,
      "reward_parts": text,
      "usage": usage,
      "sample": whole,
      "meta": text,
    }
  )


_WRITERS: Mapping[str, Callable[[str, Iterable[str | dict[str, Any]]], int]] = {
  ".jsonl": _write_jsonl,
  ".parquet": _write_parquet,
}

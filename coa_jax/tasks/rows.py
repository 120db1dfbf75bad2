"""Rows of a data set, one after the other, from a file or a source named by a URI.

  FILE.jsonl, FILE.json, FILE.parquet     by the file's suffix; JSON may be gzipped
    and FILE.array_record                 (FILE.jsonl.gz)
  json:FILE, parquet:FILE                 whatever the suffix; and array_record:FILE
  hf:NAME?split=S&config=C&revision=R     the Hugging Face hub, or a local folder (of
                                          files, or by `save_to_disk`), read as a stream
                                          through `datasets`
  hf:NAME?cache=DIR                       the same, prepared in a cache of `datasets`
                                          and read from there: without a network, with
                                          HF_HUB_OFFLINE=1, what is in it
  tfds:NAME?split=S&data_dir=D            TensorFlow Datasets, prepared as ArrayRecord,
                                          through `tfds.data_source` (no TensorFlow)

A split that is left out is `train`. Rows come in the source's own order, always the
same. `datasets` and `tensorflow_datasets` are asked for only where a URI names them.
"""

from __future__ import annotations

import gzip
import os
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coa_jax.json_io import parse_json
from coa_jax.protocol.storage import decoded, read_array_record, read_parquet
from coa_jax.protocol.trajectory import read_jsonl

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]


def read_rows(uri: str | os.PathLike[str]) -> Rows:
  """Yields ("where it stands", row) for every row of a source.

  All are streamed but a JSON list, which is read whole.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the kind of the file or the URI is unknown, its library is missing, or
      a row is no JSON object; the message names the source and the row.
  """
  path = os.fspath(uri)
  scheme, colon, rest = path.partition(":")
  if colon and scheme in _SCHEMES and not os.path.exists(path):
    yield from _SCHEMES[scheme](rest)
    return
  suffix = os.path.splitext(path.removesuffix(".gz"))[1]
  if suffix not in _SUFFIXES and os.path.exists(path):
    raise ValueError(
      f"{path}: unknown kind of task file {suffix!r}; accepted: "
      f"{', '.join(_SUFFIXES)}, or {', '.join(f'{s}:' for s in _SCHEMES)} before it"
    )
  yield from _SUFFIXES.get(suffix, _json)(path)


def _jsonl(path: str) -> Rows:
  _check_exists(path)
  yield from read_jsonl(path)


def _json(path: str) -> Rows:
  _check_exists(path)
  begin = gzip.open if path.endswith(".gz") else open
  try:
    with begin(path, "rb") as f:
      text = f.read()
  except (gzip.BadGzipFile, EOFError, zlib.error) as e:
    raise ValueError(f"{path}: cannot be read: {e}") from e
  try:
    rows = parse_json(text, path)
  except ValueError:
    if not text.lstrip().startswith(b"{"):
      raise
    yield from read_jsonl(path)  # one row per line; its errors name the line
    return
  rows = [rows] if isinstance(rows, dict) else rows
  if not isinstance(rows, list):
    raise ValueError(f"{path}: expected a list of rows, or one row per line")
  for number, row in enumerate(rows):
    yield _checked(f"{path} row {number}", row)


def _parquet(path: str) -> Rows:
  _check_exists(path)
  yield from read_parquet(path)


def _array_record(path: str) -> Rows:
  _check_exists(path)
  yield from read_array_record(path)


def _hf(rest: str) -> Rows:
  name, options = _query("hf", rest, ("split", "config", "revision", "cache"))
  try:
    import datasets
  except ImportError as e:
    raise ValueError(f"hf:{rest}: needs `pip install datasets`") from e
  split = options.get("split", "train")
  try:
    if _saved(name):
      rows = datasets.load_from_disk(name)
      if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
          raise ValueError(f"no split {split!r}; there are {', '.join(rows)}")
        rows = rows[split]
    else:
      rows = datasets.load_dataset(
        name,
        options.get("config"),
        split=split,
        revision=options.get("revision"),
        streaming="cache" not in options,
        cache_dir=options.get("cache") or None,
      )
    for number, row in enumerate(rows):
      where, row = _checked(f"hf:{rest} row {number}", row)
      yield where, decoded(row)
  except (OSError, ValueError) as e:
    raise ValueError(f"hf:{rest}: {e}") from e


def _saved(folder: str) -> bool:
  """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
  marks = ("state.json", "dataset_dict.json")
  return any(os.path.exists(os.path.join(folder, mark)) for mark in marks)


def _tfds(rest: str) -> Rows:
  name, options = _query("tfds", rest, ("split", "data_dir"))
  try:
    import tensorflow_datasets as tfds
  except ImportError as e:
    packages = "tensorflow-datasets array_record"
    raise ValueError(f"tfds:{rest}: needs `pip install {packages}`") from e
  # Never code to fetch: only what is prepared, by folder or by registered name.
  try:
    source = tfds.data_source(
      name,
      split=options.get("split", "train"),
      data_dir=options.get("data_dir"),
      download=False,
      try_gcs=False,
    )
  except (OSError, ValueError, AssertionError, NotImplementedError) as e:
    raise ValueError(f"tfds:{rest}: {e}") from e
  for number in range(len(source)):
    yield _checked(f"tfds:{rest} row {number}", _plain(source[number]))


_SUFFIXES: dict[str, Callable[[str], Rows]] = {
  ".jsonl": _jsonl,
  ".json": _json,
  ".parquet": _parquet,
  ".array_record": _array_record,
}
_SCHEMES: dict[str, Callable[[str], Rows]] = {
  "json": _json,
  "parquet": _parquet,
  "array_record": _array_record,
  "hf": _hf,
  "tfds": _tfds,
}


def _query(
  scheme: str, rest: str, known: tuple[str, ...]
) -> tuple[str, dict[str, str]]:
  """The name and the options of what stands after a scheme."""
  name, _, query = rest.partition("?")
  options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
  for option in options:
    if option not in known:
      raise ValueError(
        f"{scheme}:{rest}: unknown option {option!r}; accepted: {', '.join(known)}"
      )
  if not name:
    raise ValueError(f"{scheme}:{rest}: names no data set")
  return name, options


def _check_exists(path: str) -> None:
  if not os.path.exists(path):
    raise FileNotFoundError(f"no task file at {path}")


def _checked(where: str, row: Any) -> tuple[str, Row]:
  if not isinstance(row, dict):
    raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
  return where, row


def _plain(value: Any) -> Any:
  """Arrays as lists and bytes as text, all the way down."""
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

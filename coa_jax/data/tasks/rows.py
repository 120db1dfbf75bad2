"""Yields a data set's rows from files and other sources, named by a URI.

  FILE.jsonl, FILE.json, FILE.parquet,    by the file's suffix; JSON may be gzipped
    FILE.array_record, FILE.csv, FILE.tsv (FILE.jsonl.gz)
  A.jsonl,B.jsonl  DIR/*.jsonl  DIR       several files: a list, a glob, a whole folder
  hf:NAME?split=S&config=C&revision=R     the Hugging Face hub, or a local folder (data
                                          files, or from `save_to_disk`), streamed with
                                          `datasets`
  hf:NAME?cache=DIR                       the same, prepared in a `datasets` cache and
                                          read from there; with HF_HUB_OFFLINE=1 it
                                          works without a network
  tfds:NAME?split=S&data_dir=D            TensorFlow Datasets, prepared as ArrayRecord,
                                          through `tfds.data_source` (no TensorFlow)

The default split is `train`. Rows come in the source's own, fixed order. `datasets` and
`tensorflow_datasets` are imported only if a URI needs them.

budget: one reader for each kind of file, and their table.
"""

from __future__ import annotations

import csv
import glob
import gzip
import itertools
import os
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coa_jax.data.tasks.cells import listed
from coa_jax.data.tasks.task import Row
from coa_jax.protocol.storage import decoded, read_array_record, read_parquet
from coa_jax.protocol.trajectory import bounded_lines, read_jsonl
from coa_jax.runtime.json_io import parse_json

Rows = Iterator[tuple[str, Row]]
_MOST_OF_JSON = 1 << 31  # maximum bytes in a file read whole
_MOST_CELL = 1 << 24  # maximum characters in a text table's cell


def read_rows(uri: str | os.PathLike[str]) -> Rows:
  """Yields ("PLACE", row) for every row in a source.

  Rows are streamed, but a .json file is read whole.

  Raises:
    FileNotFoundError: the file does not exist, or a glob or folder has no files.
    ValueError: the file or URI has an unknown kind, its library is missing, or a row is
      not a JSON object; the message names the source and the row.
  """
  path = os.fspath(uri)
  uris = list_uris(path)
  if uris != [path]:
    for one in uris:
      yield from read_rows(one)
    return
  if not os.path.exists(path):
    scheme, _, rest = path.partition(":")
    if scheme not in _LIBRARIES:
      raise FileNotFoundError(f"no task file at {path}")
    yield from _LIBRARIES[scheme](rest)
    return
  suffix = _suffix(path)
  if suffix not in _SUFFIXES:
    raise ValueError(
      f"{path}: unknown kind of task file {suffix!r}; accepted: "
      f"{', '.join(_SUFFIXES)}, or {':, '.join(_LIBRARIES)}: and a data set's name"
    )
  yield from _SUFFIXES[suffix](path)


def list_uris(uri: str) -> list[str]:
  """Lists a URI's files and sources, each once in reading order.

  Files from a glob or a folder are sorted by name.

  Raises:
    FileNotFoundError: a glob or a folder names no file.
    ValueError: the URI is remote (`://`), or a name in a list is empty.
  """
  if os.path.isfile(uri) or not uri:
    return [uri]
  scheme = uri.partition(":")[0]
  if "," in uri and not os.path.exists(uri):
    names = [name.strip() for name in uri.split(",")]
    if not all(names):
      raise ValueError(f"{uri}: a name in the list is empty")
    found = [one for name in names for one in list_uris(name)]
    return list(dict.fromkeys(found))
  if ":" in uri and scheme in _LIBRARIES:
    return [uri]
  if "://" in uri:
    raise ValueError(
      f"{uri} is not a path; only a config's gs:// and s3:// files are fetched; fetch "
      "other files yourself"
    )
  if os.path.isdir(uri):
    if _saved(uri):
      return [f"hf:{uri}"]
    files = [os.path.join(uri, name) for name in sorted(os.listdir(uri))]
    files = [f for f in files if os.path.isfile(f) and _suffix(f) in _SUFFIXES]
    if not files:
      kinds = ", ".join(_SUFFIXES)
      raise FileNotFoundError(f"no task file in the folder {uri}; accepted: {kinds}")
    return files
  if not os.path.exists(uri) and glob.has_magic(uri):
    files = sorted(filter(os.path.isfile, glob.glob(uri, recursive=True)))
    if not files:
      raise FileNotFoundError(f"no task file matches {uri}")
    return files
  return [uri]


def _suffix(path: str) -> str:
  return os.path.splitext(path.removesuffix(".gz"))[1]


def _json(path: str) -> Rows:
  # --- The whole text: a JSON list must be read to its end.
  start = open
  if path.endswith(".gz"):
    start = gzip.open
  try:
    with start(path, "rb") as f:
      # In pieces: `read(n)` allocates n bytes at once.
      limit = _MOST_OF_JSON >> 20
      pieces = list(itertools.islice(iter(lambda: f.read(1 << 20), b""), limit + 1))
  except (gzip.BadGzipFile, EOFError, zlib.error) as e:
    raise ValueError(f"{path}: cannot be read: {e}") from e
  if len(pieces) > limit:
    raise ValueError(
      f"{path}: holds more than {_MOST_OF_JSON >> 30} GiB, the limit of a JSON list; "
      "write one row a line, as .jsonl"
    )
  text = b"".join(pieces)
  # --- A list, one row, or one row per line: JSON-lines files are often called .json.
  try:
    rows = parse_json(text, path)
  except ValueError:
    if not text.lstrip().startswith(b"{"):
      raise
    yield from read_jsonl(path)  # its errors name the line
    return
  if isinstance(rows, dict):
    rows = [rows]
  if not isinstance(rows, list):
    raise ValueError(f"{path}: expected a list of rows, or one row per line")
  for number, row in enumerate(rows):
    yield _checked(f"{path} row {number}", row)


def _csv(path: str) -> Rows:
  """Reads a text table with column names in the first row; skips empty cells."""
  csv.field_size_limit(_MOST_CELL)
  delimiter = "\t" if _suffix(path) == ".tsv" else ","
  start = gzip.open if path.endswith(".gz") else open
  try:
    with start(path, "rt", encoding="utf-8-sig", newline="") as f:
      lines = csv.reader(bounded_lines(f, path), delimiter=delimiter, strict=True)
      heading = enumerate(next(lines, []), 1)
      names = [name.strip() or f"column {number}" for number, name in heading]
      for name in names:  # one of the columns would be lost
        if names.count(name) > 1:
          raise ValueError(f"{path}: several columns are called {name!r}")
      for number, cells in enumerate(filter(None, lines)):
        where = f"{path} row {number}"
        if len(cells) != len(names):
          raise ValueError(f"{where}: has {len(cells)} cells, the heading {len(names)}")
        pairs = zip(names, cells, strict=True)
        yield where, {name: listed(text) for name, text in pairs if text}
  except (csv.Error, UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as e:
    raise ValueError(f"{path}: cannot be read: {e}") from e


def _hf(rest: str) -> Rows:
  name, options = _query("hf", rest, ("split", "config", "revision", "cache"))
  try:
    import datasets
  except ImportError as e:
    raise ValueError(f"hf:{rest}: needs `pip install datasets`") from e
  split = options.get("split", "train")
  try:
    # --- A folder from `save_to_disk` has its own loader.
    if _saved(name):
      rows = datasets.load_from_disk(name)
      if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
          raise ValueError(f"no split {split!r}; there are {', '.join(rows)}")
        rows = rows[split]
    # --- The hub or a folder of data files: streamed, unless the URI names a cache.
    else:
      rows = datasets.load_dataset(
        name,
        options.get("config"),
        split=split,
        revision=options.get("revision"),
        streaming="cache" not in options,
        cache_dir=options.get("cache") or None,
      )
    # Inside the `try`: a stream may fail during reading.
    for number, row in enumerate(rows):
      where, row = _checked(f"hf:{rest} row {number}", row)
      yield where, decoded(row)
  except (OSError, ValueError) as e:
    raise ValueError(f"hf:{rest}: {e}") from e


def _saved(folder: str) -> bool:
  """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
  one = os.path.join(folder, "state.json")
  several = os.path.join(folder, "dataset_dict.json")
  return os.path.exists(one) or os.path.exists(several)


def _tfds(rest: str) -> Rows:
  name, options = _query("tfds", rest, ("split", "data_dir"))
  try:
    import tensorflow_datasets as tfds
  except ImportError as e:
    packages = "tensorflow-datasets array_record"
    raise ValueError(f"tfds:{rest}: needs `pip install {packages}`") from e
  # Never download code: only prepared data, by folder or by registered name.
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
  ".jsonl": read_jsonl,
  ".json": _json,
  ".parquet": read_parquet,
  ".array_record": read_array_record,
  ".csv": _csv,
  ".tsv": _csv,
}
_LIBRARIES: dict[str, Callable[[str], Rows]] = {"hf": _hf, "tfds": _tfds}


def _query(
  scheme: str, rest: str, known: tuple[str, ...]
) -> tuple[str, dict[str, str]]:
  """Splits the part after a scheme into name and options."""
  name, _, query = rest.partition("?")
  options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
  # Refused, not ignored: a misspelt `split` would read another split.
  for option in options:
    if option not in known:
      raise ValueError(
        f"{scheme}:{rest}: unknown option {option!r}; accepted: {', '.join(known)}"
      )
  if not name:
    raise ValueError(f"{scheme}:{rest}: names no data set")
  return name, options


def _checked(where: str, row: Any) -> tuple[str, Row]:
  if not isinstance(row, dict):
    raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
  return where, row


def _plain(value: Any) -> Any:
  """Converts arrays to lists and bytes to text, recursively."""
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, list | tuple):
    return list(map(_plain, value))
  if isinstance(value, bytes):
    return value.decode("utf-8", "replace")
  return value

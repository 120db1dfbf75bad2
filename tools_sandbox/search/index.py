"""BM25 search over a corpus of titled pages: build, save, load, search.

Scores are Lucene's BM25 as computed by `bm25s`, over the text and the title (counted
twice, to weigh against a long text). A page with the query as its title comes first.

budget: one format, read, indexed, saved and searched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import sys
import types
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

# bm25s imports an installed jax and runs an op on import, which would claim the
# accelerator for this process. The replaced module has only a top-k, unused here.
sys.modules.setdefault("bm25s.selection", types.ModuleType("bm25s.selection"))
import bm25s  # noqa: E402

logging.getLogger("bm25s").setLevel(logging.WARNING)

FORMAT = 2  # the saved index's format; part of every cache key
_TITLE_WEIGHT = 2
_DOCUMENTS = "documents.jsonl"
_OFFSETS = "offsets.npy"
_TITLE_KEYS = "title_keys.npy"
_TITLE_ROWS = "title_rows.npy"
_WORD = re.compile(r"[^\W_]+")
# Kana and Chinese characters, which have no blanks between words.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_LETTER = re.compile(f"[{_UNSPACED}]")
_PART = re.compile(f"([{_UNSPACED}]+)|[^{_UNSPACED}]+")


@dataclasses.dataclass(frozen=True)
class Document:
  """One page of a corpus."""

  id: str
  title: str
  text: str


@dataclasses.dataclass(frozen=True)
class Hit:
  """One search result; a larger score (float, no unit, above 0) is a better match."""

  document: Document
  score: float


def tokenize(text: str) -> list[str]:
  """Splits text into words: runs of letters and digits, lower case, without accents.

  Chinese and Japanese characters become overlapping pairs, as in Lucene's CJKAnalyzer.
  """
  if text.isascii():
    return _WORD.findall(text.lower())
  # NFKD splits an accented letter into a letter and a mark; marks are left out.
  text = unicodedata.normalize("NFKD", text)
  text = "".join(c for c in text if not unicodedata.combining(c)).casefold()
  found = _WORD.findall(text.lower())
  if not _LETTER.search(text):
    return found
  words = []
  for word in found:
    for part in _PART.finditer(word):
      run = part[0]
      if part[1]:
        words += [run[i : i + 2] for i in range(max(1, len(run) - 1))]
      else:
        words.append(run)
  return words


def read_corpus(path: str | os.PathLike[str]) -> Iterator[Document]:
  """Yields the documents of a corpus file, in order.

  Args:
    path: `.jsonl` with rows {"id", "title", "text"}; in Search-R1's format {"id",
      "contents"} with contents = the title in quotes, a line end and the text; in
      BrowseComp-Plus's {"docid", "text"}, where the id is the title; or `.json` with a
      list of {"title", "text"} ("id" optional, else the position) or an object title ->
      list of sentences.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: another format, or two documents with one id; the message names the
      file, the line (or a `.json` file's entry) and the field.
  """
  path = os.fspath(path)
  if not os.path.isfile(path):
    raise FileNotFoundError(f"{path}: there is no such corpus file")
  ids = set()
  for where, document in _read_documents(path):
    if document.id in ids:
      raise ValueError(f"{where}: field 'id' is {document.id!r}, as in a row before")
    ids.add(document.id)
    yield document


def _read_documents(path: str) -> Iterator[tuple[str, Document]]:
  """Yields ("FILE:LINE", document) from a corpus file."""
  if path.endswith(".jsonl"):
    # Line by line, so that a message can name the wrong line.
    with open(path, "rb") as f:
      for number, line in enumerate(f, 1):
        if line.strip():
          row = _parse(line.rstrip(b"\n"), path, number)
          where = f"{path}:{number}"
          yield where, _from_row(row, where, None)
    return

  # --- One JSON value: a list of pages, or pages by their titles.
  if not path.endswith(".json"):
    raise ValueError(f"{path}: a corpus is a .jsonl or a .json file")
  with open(path, "rb") as f:
    corpus = _parse(f.read(), path, 1)
  if isinstance(corpus, list):
    for i, row in enumerate(corpus):
      where = f"{path}[{i}]"
      yield where, _from_row(row, where, str(i))
  elif isinstance(corpus, dict):
    for i, (title, sentences) in enumerate(corpus.items()):
      where = f"{path}[{title!r}]"
      if not isinstance(sentences, list):
        raise ValueError(f"{where}: expected a list of sentences")
      texts = [_string(s, f"{where}[{j}]") for j, s in enumerate(sentences)]
      yield where, Document(str(i), title, " ".join(t.strip() for t in texts))
  else:
    raise ValueError(f"{path}: expected a list or an object of documents")


def _parse(data: bytes, path: str, line: int) -> Any:
  try:
    return json.loads(data, object_pairs_hook=_unique)
  except json.JSONDecodeError as e:
    raise ValueError(f"{path}:{line + e.lineno - 1}: not JSON ({e.msg})") from e
  except UnicodeDecodeError as e:
    raise ValueError(f"{path}:{line}: not UTF-8 ({e.reason})") from e
  except (RecursionError, ValueError):  # the second: a number with thousands of digits
    raise ValueError(
      f"{path}:{line}: nested too deep, or with a number too long; a page is an object "
      "of texts"
    ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Checks that an object's field names differ: no page replaces another."""
  value = dict(pairs)
  if len(value) < len(pairs):
    raise json.JSONDecodeError("an object has the same field twice", "", 0)
  return value


def _string(value: Any, where: str) -> str:
  if not isinstance(value, str):
    raise ValueError(f"{where}: expected a string, got {type(value).__name__}")
  return value


def _from_row(row: Any, where: str, default_id: str | None) -> Document:
  if not isinstance(row, dict):
    raise ValueError(f"{where}: expected an object, got {type(row).__name__}")

  def field(name: str) -> str:
    if name not in row:
      raise ValueError(f"{where}: field {name!r} is missing")
    return _string(row[name], f"{where}: field {name!r}")

  # --- The id, which names the page in search results.
  name = row.get("id", row.get("docid", default_id))
  if name is None:
    raise ValueError(f"{where}: field 'id' is missing")
  if isinstance(name, bool) or not isinstance(name, (str, int)):
    raise ValueError(f"{where}: field 'id' is neither a string nor an integer")

  # --- Title and text: in one field, as in Search-R1's corpora, or in two.
  if "contents" in row:
    title, _, text = field("contents").partition("\n")
    return Document(str(name), title.removeprefix('"').removesuffix('"'), text)
  if "title" not in row and "docid" in row:
    return Document(str(name), str(name), field("text"))
  return Document(str(name), field("title"), field("text"))


class SearchIndex:
  """A searchable corpus. Immutable, so any number of threads may search it."""

  def __init__(
    self,
    bm25: bm25s.BM25,
    documents: Sequence[Document],
    title_keys: np.ndarray,
    title_rows: np.ndarray,
  ):
    """Use `build` or `load`.

    Args:
      bm25: the scores, over the vocabulary in its `vocab_dict`.
      documents: by row number.
      title_keys: [documents] int64, sorted: hashes of the titles' words.
      title_rows: [documents] int64: each key's row number.
    """
    self._bm25 = bm25
    self._documents = documents
    self._title_keys = title_keys
    self._title_rows = title_rows

  def __len__(self) -> int:
    """The number of documents."""
    return len(self._documents)

  @classmethod
  def build(cls, documents: Iterable[Document], name: str = "") -> SearchIndex:
    """Indexes documents in memory; equal scores rank in the documents' order.

    Args:
      documents: the documents to search.
      name: the documents' name in errors.

    Raises:
      ValueError: there is no document, or none has a word.
    """
    # --- Words become numbers, in order of first occurrence.
    documents = list(documents)
    vocabulary: dict[str, int] = {}
    rows = []
    titles = []
    for d in documents:
      title = tokenize(d.title)
      titles.append(title)
      words = title * _TITLE_WEIGHT + tokenize(d.text)
      rows.append([vocabulary.setdefault(w, len(vocabulary)) for w in words])
    if not vocabulary:
      raise ValueError(f"{name or 'documents'}: a corpus without a single word")

    # --- Every word's score in every document.
    bm25 = bm25s.BM25(method="lucene")
    bm25.index((rows, vocabulary), create_empty_token=False, show_progress=False)

    # --- Titles as sorted hashes, to look up a query; equal titles keep the corpus's
    # order.
    keys = np.array([_title_key(t) for t in titles], dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    return cls(bm25, documents, keys[order], order.astype(np.int64))

  def save(self, directory: str | os.PathLike[str]) -> None:
    """Writes the index into a new or empty directory, for `load`.

    Raises:
      OSError: the directory is not writable, or not empty.
    """
    directory = os.fspath(directory)
    os.makedirs(directory, exist_ok=True)
    if os.listdir(directory):
      raise FileExistsError(f"{directory}: not empty; save an index on its own")
    self._bm25.save(directory, show_progress=False)
    # Each document's offset, to read one without the others.
    offsets = [0]
    with open(os.path.join(directory, _DOCUMENTS), "wb") as f:
      for i in range(len(self)):
        row = dataclasses.asdict(self._documents[i])
        offsets.append(offsets[-1] + f.write(json.dumps(row).encode("ascii")))
    for name, array in (
      (_OFFSETS, np.array(offsets, dtype=np.int64)),
      (_TITLE_KEYS, self._title_keys),
      (_TITLE_ROWS, self._title_rows),
    ):
      np.save(os.path.join(directory, name), array, allow_pickle=False)

  @classmethod
  def load(cls, directory: str | os.PathLike[str]) -> SearchIndex:
    """Opens a saved index; documents stay on disk and are read when a search hits them.

    The arrays are memory-mapped: a large index starts at once, and processes share the
    memory pages.

    Args:
      directory: the folder written by `save`.

    Raises:
      FileNotFoundError: no index is saved there.
    """
    directory = os.fspath(directory)

    def read(name: str) -> np.ndarray:
      path = os.path.join(directory, name)
      return np.load(path, mmap_mode="r", allow_pickle=False)

    documents = _Documents(os.path.join(directory, _DOCUMENTS), read(_OFFSETS))
    bm25 = bm25s.BM25.load(directory, mmap=True, show_progress=False)
    return cls(bm25, documents, read(_TITLE_KEYS), read(_TITLE_ROWS))

  def search(self, query: str, k: int) -> list[Hit]:
    """Finds at most k documents, best first; ties in corpus order.

    A document without a query word is never returned: an empty query, or a query with
    only unknown words, gives [].

    Raises:
      ValueError: k is below 1.
    """
    if k < 1:
      raise ValueError(f"k must be at least 1, got {k!r}")
    # --- All documents' scores, from the query words in the index.
    words = tokenize(query)
    vocabulary = self._bm25.vocab_dict
    ids = [vocabulary[w] for w in words if w in vocabulary]
    if not ids:
      return []
    scores = self._bm25.get_scores_from_ids(ids)

    # --- A page with this title comes first; a title has only known words.
    if len(ids) == len(words):
      key = _title_key(words)
      low, high = (np.searchsorted(self._title_keys, key, s) for s in ("left", "right"))
      if low < high:  # lifted above every other, in their own order
        scores[self._title_rows[low:high]] += scores.max()

    # --- The best k. All documents with the k-th score take part in the stable sort:
    # ties keep the corpus's order for every k.
    floor = 0.0
    if k < len(scores):
      floor = np.partition(scores, -k)[-k]
    if floor > 0:
      rows = np.flatnonzero(scores >= floor)
    else:
      rows = np.flatnonzero(scores > 0)
    rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
    return [Hit(self._documents[row], float(scores[row])) for row in rows.tolist()]


class _Documents(Sequence[Document]):
  """A saved index's documents, read one at a time by position."""

  def __init__(self, path: str, offsets: np.ndarray):
    self._offsets = offsets
    self._bytes = np.memmap(path, np.uint8, "r")

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, row: int) -> Document:
    start = int(self._offsets[row])
    end = int(self._offsets[row + 1])
    return Document(**json.loads(self._bytes[start:end].tobytes()))


def _title_key(words: list[str]) -> int:
  hashed = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
  return int.from_bytes(hashed, "big", signed=True)

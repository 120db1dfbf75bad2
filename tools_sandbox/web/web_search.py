"""web_search: a Serper-compatible service with a cache shared between runs.

Offline, the same tool searches a local corpus: the caller passes a search function, and
hits have the same fields and rendering.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Callable, Collection
from typing import Any

from tools_sandbox.faults import BadCall
from tools_sandbox.http_client import Service, check_url, read_key
from tools_sandbox.search.index import Hit
from tools_sandbox.text import clean
from tools_sandbox.web.fetch import in_domains

# Hosts of benchmark questions with answers; the papers have the same rule.
BLOCKED = ("huggingface.co", "hf.co", "hf-mirror.com", "modelscope.cn", "kaggle.com")
_QUERY_CHARS = 2000
_FIELDS = ("title", "link", "snippet", "date")  # a row's fields, as in `WebHit`
_FIELD_CHARS = 1000  # characters per field
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WebConfig:
  """Section `web` of the tools: the search service of `web_search`.

  Attributes:
    endpoint: a URL with Serper's JSON API, e.g. "https://google.serper.dev/search";
      None to search the local corpus.
    key_file: a file with the API key, sent as X-API-KEY; None for none.
    results: the maximum number of hits.
    cache: a sqlite file for answers, kept between runs; None for no cache.
    per_second: the maximum requests per second; 0 for no limit.
  """

  endpoint: str | None = None
  key_file: str | None = None
  results: int = 10
  cache: str | None = None
  per_second: float = 0.0

  def __post_init__(self):
    if self.endpoint is not None:
      check_url("endpoint", self.endpoint)
    if self.endpoint is None and (self.cache or self.key_file):
      raise ValueError("cache and key_file need an endpoint")
    if self.results < 1:
      raise ValueError("results must be at least 1")
    if not self.per_second >= 0:  # so that NaN is refused too
      raise ValueError("per_second must be at least 0")


@dataclasses.dataclass(frozen=True)
class WebHit:
  """One result, as the service reports it; all fields are untrusted text."""

  title: str
  link: str
  snippet: str
  date: str = ""


class WebSearch:
  """The tool `web_search`. Thread-safe; close it after use."""

  def __init__(
    self,
    config: WebConfig,
    blocked: Collection[str] = BLOCKED,
    local: Callable[[str, int], list[Hit]] | None = None,
  ):
    """Opens the cache; sends nothing yet.

    Args:
      config: the service and its limits.
      blocked: domains never shown, subdomains included.
      local: searches a corpus (query, number of hits) if there is no endpoint.

    Raises:
      ValueError: there is neither endpoint nor corpus, the key file cannot be used, or
        the cache file is not a cache.
    """
    # --- The source: a local corpus, or a service behind a cache.
    self._config = config
    self._blocked = tuple(blocked)
    self._local = local
    self._service = self._cache = None
    if config.endpoint is None:
      if local is None:
        raise ValueError("web_search needs web.endpoint, or a corpus to search offline")
      return
    headers = {}
    if key := read_key(config.key_file):
      headers["X-API-KEY"] = key
    self._service = Service(
      "the search service",
      config.endpoint,
      headers,
      per_second=config.per_second,
    )
    if config.cache is not None:
      self._cache = Cache(config.cache)

  def close(self) -> None:
    """Closes the connections."""
    if self._service is not None:
      self._service.close()

  def __call__(self, content: str, seconds: float) -> str:
    """Lists the results, numbered, each with title, link, date and snippet.

    Raises:
      BadCall: the query is too long.
      ToolFault: the service refuses this query.
      Unavailable: the service is down, or replies in another format.
    """
    hits, num_blocked = self._find(content, seconds)
    if not hits and not num_blocked:
      return "no result"
    lines = []
    for number, hit in enumerate(hits, 1):
      date = ""
      if hit.date:
        date = f" ({hit.date})"
      lines.append(f"{number}. [{hit.title}]({hit.link}){date}\n{hit.snippet}".strip())
    if num_blocked:
      lines.append(f"(results on blocked sites, not shown: {num_blocked})")
    return "\n".join(lines)

  def hits(self, query: str, seconds: float) -> list[WebHit]:
    """Returns the results as records; raises as `__call__`."""
    return self._find(query, seconds)[0]

  def _find(self, query: str, seconds: float) -> tuple[list[WebHit], int]:
    """Returns the results, and how many others are on blocked sites."""
    query = " ".join(clean(query).split())
    if len(query) > _QUERY_CHARS:
      raise BadCall(f"a query has at most {_QUERY_CHARS} characters")
    hits = self._search(query, seconds)
    # Blocked here and not in the cache: the list may change between runs.
    shown = [hit for hit in hits if not self._is_blocked(hit.link)]
    return shown[: self._config.results], len(hits) - len(shown)

  def _search(self, query: str, seconds: float) -> list[WebHit]:
    # --- Offline: a corpus, with ids in place of links.
    count = self._config.results
    if self._service is None:
      pages = [hit.document for hit in self._local(query, count)]
      return [WebHit(page.title, page.id, page.text) for page in pages]

    # --- The cache, keyed by everything that affects the answer; then the service.
    body = {"q": query, "num": count}
    key = json.dumps([self._config.endpoint, body], sort_keys=True)
    rows = None
    if self._cache is not None:
      rows = self._cache.get(key)
    if rows is None:
      rows = self._read(self._service.ask(body, seconds))
      if self._cache is not None:
        self._cache.put(key, rows)
    return [WebHit(*row) for row in rows]

  def _read(self, reply: Any) -> list[list[str]]:
    """Returns a reply's rows, each [title, link, snippet, date]."""
    organic = None
    if isinstance(reply, dict):
      organic = reply.get("organic")
    if not isinstance(organic, list):
      raise self._service.broken("no list of results")
    rows = []
    for row in organic:
      if isinstance(row, dict) and isinstance(row.get("link"), str):
        rows.append([_line(row.get(name)) for name in _FIELDS])
    return rows

  def _is_blocked(self, link: str) -> bool:
    try:
      host = urllib.parse.urlsplit(link).hostname or ""
    except ValueError:
      return True  # not a usable link
    return in_domains(host, self._blocked)


def _line(text: Any) -> str:
  """Returns one line of clean text; "" for a value other than text."""
  if not isinstance(text, str):
    return ""
  # Cut first: cleaning a megabyte takes time.
  return " ".join(clean(text[:_FIELD_CHARS]).split())


class Cache:
  """Rows of strings by key, in a sqlite file shared between processes.

  Entries are JSON, read back as data only. A failing cache costs requests, never an
  answer.
  """

  def __init__(self, path: str):
    """Opens or makes the file.

    Raises:
      ValueError: the path cannot be written, or the file is something else.
    """
    self._path = path
    try:
      os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
      with self._open() as base:
        # Readers and a writer then do not wait for each other.
        base.execute("PRAGMA journal_mode=WAL")
        base.execute(
          "CREATE TABLE IF NOT EXISTS answers"
          " (key TEXT PRIMARY KEY, rows TEXT NOT NULL, at REAL NOT NULL)"
        )
    except (OSError, sqlite3.Error) as e:
      raise ValueError(f"cache {path}: {e}") from e

  @contextlib.contextmanager
  def _open(self):
    # Each use has its own connection: threads share none, and none stays open.
    with contextlib.closing(sqlite3.connect(self._path, timeout=2.0)) as base, base:
      yield base

  def get(self, key: str) -> list[list[str]] | None:
    """Returns a key's rows; None if missing."""
    try:
      with self._open() as base:
        row = base.execute(
          "SELECT rows FROM answers WHERE key = ?", (_hash_key(key),)
        ).fetchone()
      if row is None:
        return None
      # Another program may have written there: our rows have four strings each.
      rows = json.loads(row[0])
      if all(len(r) == 4 and all(isinstance(x, str) for x in r) for r in rows):
        return rows
    except (sqlite3.Error, ValueError, TypeError) as e:
      _log.warning("search cache: %s", e)
    return None

  def put(self, key: str, rows: list[list[str]]) -> None:
    """Stores rows under a key, in place of older ones."""
    try:
      with self._open() as base:
        base.execute(
          "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)",
          (_hash_key(key), json.dumps(rows), time.time()),
        )
    except sqlite3.Error as e:
      _log.warning("search cache: %s", e)


def _hash_key(key: str) -> str:
  # Fixed-length keys, and nobody's questions in plain view.
  return hashlib.blake2b(key.encode(), digest_size=20).hexdigest()

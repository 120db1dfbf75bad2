"""Retrieval on real questions: recall of their supporting passages, and speed.

  python -m experiments.bench.retrieval [--quick] [--out=FILE.json]

Asks the search behind `wiki_search` the questions of HotpotQA (994 passages) and
MuSiQue (1,890), over their own passages and over both with those of 2WikiMultihopQA
among them (9,003). One query per question is what a policy gets that looks up the whole
question at once; MuSiQue's own decomposition, earlier answers filled in, is what one
could get that plans its searches.

Beside it stands bm25s by itself: for recall and build time its own tokenizer with
English stop words over title and text, for speed its `retrieve` on the very index that
ours searches. CPU times, medians of interleaved rounds.

Expect (16 s): R@5 over the set's own passages 0.785 (HotpotQA), 0.540 (MuSiQue), 0.916
(MuSiQue by hop), with all passages 0.750, 0.541, 0.882; bm25s's own 0.01 to 0.05 lower;
queries/s 1.3 to 1.9 times those of bm25s, building takes 1.2 to 1.4 times as long (it
leaves out stop words). A `build_s` ratio above 1 is slower.

budget: three data sets, each with a reader of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import importlib
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bm25s
from absl import flags

from experiments.bench import program as bench
from experiments.launch import run_program
from tools_sandbox.client import Sandbox

_DATA = flags.DEFINE_string("data", "../shared/data", "Folder that holds mhqa/.")

CUTS = (1, 2, 3, 5)
_DEPTH = max(CUTS)
_COLUMNS = {
  "questions": "questions",
  "corpus": "corpus",
  "passages": "passages",
  **{f"recall@{k}": f"R@{k}" for k in CUTS},
  "all@5": "all@5",
  "bm25s recall@5": "bm25s R@5",
  "ceiling@1": "best R@1",
  "build_s": "build s",
  "bm25s build_s": "bm25s build s",
  "queries_per_s": "queries/s",
  "bm25s queries_per_s": "bm25s queries/s",
}


@dataclasses.dataclass(frozen=True)
class Page:
  """A passage; `id` is unique over all corpora."""

  id: str
  title: str
  text: str


@dataclasses.dataclass(frozen=True)
class Question:
  """A question and the ids of the passages that answer it."""

  text: str
  gold: frozenset[str]


def pages(folder: str, name: str) -> list[Page]:
  """The passages of a corpus: an object of title -> sentences, or a list of rows."""
  corpus = _read(folder, f"{name}_corpus.json")
  if isinstance(corpus, dict):
    corpus = [{"title": t, "text": "".join(s)} for t, s in corpus.items()]
  return [Page(f"{name}-{i}", r["title"], r["text"]) for i, r in enumerate(corpus)]


def hotpotqa(folder: str) -> tuple[list[Page], list[Question]]:
  """HotpotQA's passages and questions; a passage is named by its title."""
  corpus = pages(folder, "hotpotqa_train")
  ids = {p.title: p.id for p in corpus}
  questions = []
  for row in _read(folder, "hotpotqa_train.json"):
    gold = frozenset(ids[title] for title, _ in row["supporting_facts"])
    questions.append(Question(row["question"], gold))
  return corpus, questions


def musique(folder: str) -> tuple[list[Page], list[Question]]:
  """MuSiQue's; titles repeat there, so a passage is named by title and text."""
  corpus = pages(folder, "musique_train")
  ids = {(p.title, p.text): p.id for p in corpus}
  questions = []
  for row in _read(folder, "musique_train.json"):
    gold = set()
    for p in row["paragraphs"]:
      if p["is_supporting"]:
        gold.add(ids[p["title"], p["paragraph_text"]])
    questions.append(Question(row["question"], frozenset(gold)))
  return corpus, questions


def hops(folder: str) -> list[Question]:
  """MuSiQue's questions hop by hop, earlier answers filled in: what a planner asks."""
  ids = {(p.title, p.text): p.id for p in pages(folder, "musique_train")}
  out = []
  for row in _read(folder, "musique_train.json"):
    # "#1" stands for the answer of the first step.
    answers = [step["answer"] for step in row["question_decomposition"]]
    for step in row["question_decomposition"]:
      text = re.sub(
        r"#(\d)", lambda m, known=answers: known[int(m[1]) - 1], step["question"]
      )
      p = row["paragraphs"][step["paragraph_support_idx"]]
      out.append(Question(text, frozenset([ids[p["title"], p["paragraph_text"]]])))
  return out


def _read(folder: str, name: str) -> Any:
  with open(os.path.join(folder, name), encoding="utf-8") as f:
    return json.load(f)


def recall(ranking: Sequence[str], gold: frozenset[str], k: int) -> float:
  """The share of the gold passages among the first k of a ranking."""
  return len(gold.intersection(ranking[:k])) / len(gold)


def measure(
  name: str,
  corpus: Sequence[Page],
  sets: Mapping[str, Sequence[Question]],
  rounds: int,
) -> list[dict[str, Any]]:
  """Recall and speed over one corpus: a row of the table for each set of questions."""
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    # --- Building the index, theirs and ours by turns.
    path = os.path.join(folder, "pages.jsonl")
    with open(path, "w", encoding="utf-8") as f:
      f.writelines(json.dumps(dataclasses.asdict(page)) + "\n" for page in corpus)
    builds = _interleaved(rounds, lambda: _build(path), lambda: _build_bm25s(path))

    # --- The very index that ours searches, for bm25s's speed; its own, for its recall.
    cache = os.path.join(folder, "index")
    Sandbox(slots=1, corpus=path, index_cache=cache).close()
    (saved,) = glob.glob(os.path.join(cache, "*"))
    same = bm25s.BM25.load(saved)
    plain = _build_bm25s(path)

    # --- The questions, asked of an index in memory, as a Toolbox has it.
    with Sandbox(corpus=path, backend=None) as sandbox:
      for set_name, questions in sets.items():
        row = {
          "questions": set_name,
          "corpus": name,
          "passages": len(corpus),
          "build_s": builds[0],
          "bm25s build_s": builds[1],
        }
        row |= _recalls(sandbox, plain, corpus, questions)
        rows.append(row | _speeds(sandbox, same, questions, 3 * rounds))
  return rows


def _build(path: str) -> None:
  Sandbox(corpus=path, backend=None).close()


def _build_bm25s(path: str) -> bm25s.BM25:
  with open(path, encoding="utf-8") as f:
    rows = [json.loads(line) for line in f]
  texts = [f"{row['title']}\n{row['text']}" for row in rows]
  index = bm25s.BM25()
  index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
  return index


def _recalls(
  sandbox: Sandbox,
  theirs: bm25s.BM25,
  corpus: Sequence[Page],
  questions: Sequence[Question],
) -> dict[str, float]:
  """Mean recall at every cut, and how often all passages are among the first five."""
  figures: dict[str, list[float]] = collections.defaultdict(list)
  for q in questions:
    # --- Ours.
    ranking = [hit.document.id for hit in sandbox.search(q.text, _DEPTH)]
    for k in CUTS:
      figures[f"recall@{k}"].append(recall(ranking, q.gold, k))
    figures["all@5"].append(recall(ranking, q.gold, 5) == 1)

    # --- Theirs, and what nobody can do better: one passage is one of so many.
    words = bm25s.tokenize([q.text], return_ids=False, show_progress=False)
    (best,), _ = theirs.retrieve(words, k=_DEPTH, show_progress=False)
    figures["bm25s recall@5"].append(recall([corpus[i].id for i in best], q.gold, 5))
    figures["ceiling@1"].append(1 / len(q.gold))
  return {name: statistics.fmean(values) for name, values in figures.items()}


def _speeds(
  sandbox: Sandbox, index: bm25s.BM25, questions: Sequence[Question], rounds: int
) -> dict[str, float]:
  """Queries per second, one at a time, from text to the five best."""

  def ours() -> None:
    for q in questions:
      sandbox.search(q.text, _DEPTH)

  def theirs() -> None:
    for q in questions:
      words = bm25s.tokenize(
        [q.text], stopwords=None, return_ids=False, show_progress=False
      )
      index.retrieve(words, k=_DEPTH, show_progress=False, backend_selection="numpy")

  seconds = _interleaved(rounds, ours, theirs)
  return {
    "queries_per_s": len(questions) / seconds[0],
    "bm25s queries_per_s": len(questions) / seconds[1],
  }


def _interleaved(
  rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]
) -> tuple[float, float]:
  """Median CPU seconds of each, run by turns.

  Neither uses a second thread, so what else the machine does does not show.
  """

  def timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start

  own_seconds = []
  their_seconds = []
  for _ in range(rounds):
    own_seconds.append(timed(ours))
    their_seconds.append(timed(theirs))
  return statistics.median(own_seconds), statistics.median(their_seconds)


def _restore_topk() -> None:
  """Gives bm25s back its own top-k, which `tools_sandbox.search.index` does without."""
  if not hasattr(bm25s.selection_np, "topk"):
    sys.modules.pop("bm25s.selection", None)
    bm25s.selection_np = importlib.import_module("bm25s.selection")


def run(folder: str, rounds: int) -> dict[str, Any]:
  """Every row of the table, and ours over theirs.

  Args:
    folder: holds the files of HotpotQA, MuSiQue and 2WikiMultihopQA.
    rounds: of each timing.

  Raises:
    FileNotFoundError: a file is missing.
  """
  _restore_topk()
  hotpot_pages, hotpot_questions = hotpotqa(folder)
  musique_pages, musique_questions = musique(folder)
  every = [*hotpot_pages, *musique_pages, *pages(folder, "2wikimultihopqa")]
  by_hop = {"musique": musique_questions, "musique by hop": hops(folder)}
  table = [
    *measure("own", hotpot_pages, {"hotpotqa": hotpot_questions}, rounds),
    *measure("own", musique_pages, by_hop, rounds),
    *measure("all three", every, {"hotpotqa": hotpot_questions, **by_hop}, rounds),
  ]
  ratios = {}
  for row in table:
    name = f"{row['questions']}/{row['corpus']}".replace(" ", "_")
    for figure in ("queries_per_s", "recall@5", "build_s"):
      ratios[f"{figure}/{name}"] = row[figure] / row[f"bm25s {figure}"]
  return {"table": table, "ratios": ratios}


def main() -> None:
  """Measures, prints and writes, where the data is."""
  logging.getLogger("bm25s").setLevel(logging.WARNING)
  folder = os.path.join(_DATA.value, "mhqa")
  if not os.path.isdir(folder):
    print(f"skipped: no {folder}; --data=DIR names the folder that holds mhqa/")
    return
  rounds = 2 if bench.QUICK.value else 7
  note = "One query per question; CPU times, medians of interleaved rounds."
  bench.program(lambda: run(folder, rounds), "Retrieval", _COLUMNS, note)()


if __name__ == "__main__":
  run_program(main)

"""The retrieval benchmark: what it reads, what it computes, that it ends."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments.bench import retrieval

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"

# A bridge question and a comparison over six pages, as the two sets have them.
PAGES = {
  "Tarn Hollow": ["Tarn Hollow is a town.", " Its mayor is Mira Quill."],
  "Mira Quill": ["Mira Quill was born in Zedburg."],
  "Zedburg": ["Zedburg is a harbour."],
  "Old Mill": ["The Old Mill is a film of 1950."],
  "New Mill": ["The New Mill is a film of 1960."],
  "Harbour": ["A harbour is a place for ships."],
}


@pytest.fixture
def folder(tmp_path):
  """The five files in small, as mhqa/ of a data folder."""
  texts = [{"title": t, "text": "".join(s)} for t, s in PAGES.items()]
  twins = [{"title": "Twin", "text": "A town."}, {"title": "Twin", "text": "A river."}]
  supporting = [
    {"title": "Twin", "paragraph_text": "A river.", "is_supporting": True},
    {"title": "Twin", "paragraph_text": "A town.", "is_supporting": False},
  ]
  files = {
    "hotpotqa_train.json": [
      {
        "question": "Where was the mayor of Tarn Hollow born?",
        "supporting_facts": [["Tarn Hollow", 1], ["Mira Quill", 0], ["Mira Quill", 1]],
      },
      {
        "question": "Which film is older, Old Mill or New Mill?",
        "supporting_facts": [["Old Mill", 0], ["New Mill", 0]],
      },
    ],
    "hotpotqa_train_corpus.json": PAGES,
    "musique_train.json": [
      {
        "question": "Which river?",
        "paragraphs": supporting,
        "question_decomposition": [
          {"question": "A town?", "answer": "Ur (#2)", "paragraph_support_idx": 1},
          {"question": "#1 >> river", "answer": "Ub", "paragraph_support_idx": 0},
        ],
      }
    ],
    "musique_train_corpus.json": [*twins, *texts[3:]],
    "2wikimultihopqa_corpus.json": texts[:1] * 3,
  }
  (tmp_path / "mhqa").mkdir()
  for name, rows in files.items():
    (tmp_path / "mhqa" / name).write_text(json.dumps(rows))
  return str(tmp_path / "mhqa")


def test_wanted_passages_are_found_by_title_or_by_title_and_text(folder):
  pages, (bridge, comparison) = retrieval.hotpotqa(folder)
  assert [p.title for p in pages] == list(PAGES)
  assert pages[0].text == "Tarn Hollow is a town. Its mayor is Mira Quill."
  assert bridge.wanted == {"hotpotqa_train-0", "hotpotqa_train-1"}
  assert comparison.wanted == {"hotpotqa_train-3", "hotpotqa_train-4"}
  _, (river,) = retrieval.musique(folder)
  assert river.wanted == {"musique_train-1"}
  assert [(q.text, *q.wanted) for q in retrieval.hops(folder)] == [
    ("A town?", "musique_train-0"),
    ("Ur (#2) >> river", "musique_train-1"),
  ]


def test_recall_counts_what_is_wanted_among_the_first_k():
  found, wanted = ["c", "a", "d", "b"], frozenset("ab")
  shares = [retrieval.recall(found, wanted, k) for k in (1, 2, 3, 4, 9)]
  assert shares == [0, 0.5, 0.5, 1, 1]


def test_every_corpus_is_measured_and_compared(folder):
  figures = retrieval.run(folder, rounds=1)
  table = figures["table"]
  assert [(r["questions"], r["corpus"], r["passages"]) for r in table] == [
    ("hotpotqa", "own", 6),
    ("musique", "own", 5),
    ("musique by hop", "own", 5),
    ("hotpotqa", "all three", 14),
    ("musique", "all three", 14),
    ("musique by hop", "all three", 14),
  ]
  assert table[0]["recall@2"] == table[0]["all@5"] == 1.0
  assert table[0]["ceiling@1"] == 0.5 and table[1]["recall@1"] == 1.0
  assert len(figures["ratios"]) == 18
  assert all(ratio > 0 for ratio in figures["ratios"].values())
  json.dumps(figures)


def program(*flags: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "experiments.bench.retrieval", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )


def test_without_data_it_says_so_and_is_no_failure(tmp_path):
  done = program(f"--data={tmp_path}/gone", f"--out={tmp_path}/out.json")
  assert done.returncode == 0 and "skipped: no" in done.stdout
  assert not os.path.exists(tmp_path / "out.json")


def test_quick_over_the_real_passages(tmp_path):
  if not (SHARED / "mhqa").is_dir():
    pytest.skip(f"no {SHARED / 'mhqa'}")
  out = tmp_path / "out.json"
  done = program("--quick", f"--data={SHARED}", f"--out={out}")
  assert done.returncode == 0, done.stderr
  rows = json.loads(out.read_text())["table"]
  assert [row["passages"] for row in rows] == [994, 1890, 1890, 9003, 9003, 9003]
  # Recall is exact: the corpora, the questions and the ranking are fixed.
  found = [round(row["recall@5"], 3) for row in rows]
  assert found == [0.785, 0.54, 0.916, 0.75, 0.541, 0.882]
  assert all(row["recall@5"] >= row["bm25s recall@5"] for row in rows)

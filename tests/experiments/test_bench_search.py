"""The benchmarks of search, on small corpora."""

from __future__ import annotations

import json
import pathlib

import pytest
import real_weights

from experiments.bench import retrieval, search


def test_a_built_index_finds_the_page_of_every_query(tmp_path):
  built = search.build(str(tmp_path / "index"), 300, 50)
  asked = search.queries(300, 50)
  found = search.search(str(tmp_path / "index"), asked)
  assert len(asked) == 200 and found["found"] == 1
  assert built["index_gb"] > 0 and found["p99_ms"] >= found["p50_ms"] > 0


PAGES = {
  "Tarn Hollow": "Tarn Hollow is a town in the north. Its mayor is Mira Quill.",
  "Mira Quill": "Mira Quill flew mail planes before she was elected in 2009.",
  "Fell End": "The woollen mill of Fell End was built in 1788 and closed in 1963.",
  "Ure": "The Ure is a river that rises in the hills and reaches the sea.",
}
# No word of the page, but its meaning; then its words.
QUESTIONS = {
  "Which pilot became a politician?": "Mira Quill",
  "Tarn Hollow": "Tarn Hollow",
}


@pytest.mark.weights
def test_a_pretrained_retriever_finds_what_shares_no_word(request, tmp_path):
  pytest.importorskip("torch")
  model = request.config.cache.mkdir("real_weights") / "all-MiniLM-L6-v2"
  real_weights.make_embedder(model)
  rows = [
    {
      "_id": str(i),
      "question": question,
      "answer": title,
      "supporting_facts": [[title, 0]],
      "context": [],
    }
    for i, (question, title) in enumerate(QUESTIONS.items())
  ]
  path = tmp_path / "questions.json"
  path.write_text(json.dumps(rows))
  corpus = {title: [text] for title, text in PAGES.items()}
  pathlib.Path(tmp_path / "questions_corpus.json").write_text(json.dumps(corpus))
  bm25, dense = retrieval.measure([str(path)], str(model), quick=False)["table"]
  assert (bm25["recall_1"], dense["recall_1"]) == (0.5, 1.0)
  assert dense["recall_2"] == dense["recall_20"] == 1.0

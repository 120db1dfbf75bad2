"""SearchIndex: ranking, ties, persistence; corpus formats."""

import concurrent.futures
import json
import math
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from tools_sandbox.search.index import Document, SearchIndex, read_corpus, tokenize

PAGES = [
  Document("0", "Paris", "The capital of France."),
  Document("1", "France", "A country. Paris Paris Paris Paris Paris."),
  Document("2", "Lyon", "A city of France, third after Paris."),
  Document("3", "Beyonc\u00e9 Knowles", "A singer, born in Houston."),
  Document("4", "Lyon", "A surname."),
]


@pytest.fixture(scope="module")
def index():
  return SearchIndex.build(PAGES)


def _titles(hits):
  return [h.document.id for h in hits]


def test_the_page_of_that_title_comes_first(index):
  assert _titles(index.search("Paris", 5))[0] == "0"
  assert _titles(index.search("  france ", 5))[0] == "1"
  assert _titles(index.search("BEYONCE KNOWLES", 5)) == ["3"]
  assert _titles(index.search("lyon", 5)) == ["4", "2"]  # both; the shorter text first
  # Pages without any of the words are never returned.
  assert _titles(index.search("houston", 5)) == ["3"]
  assert _titles(index.search("houston zzzz", 1)) == ["3"]


@pytest.mark.parametrize("query", ["", "  ", "?!", "zzzz", "\0\ud800", "\u0301", "_"])
def test_queries_without_a_known_word(index, query):
  assert index.search(query, 3) == []


def test_ties_follow_corpus_order_for_every_k():
  pages = [Document(str(i), "same", "words here") for i in range(50)]
  index = SearchIndex.build(pages)
  for k in (1, 7, 49, 50, 99):
    for query in ("words", "same"):
      assert _titles(index.search(query, k)) == [str(i) for i in range(min(k, 50))]


def test_k_takes_the_top_of_the_full_ranking(index):
  for query in ("a city of France and Paris", "capital of France", "Paris", "a"):
    full = index.search(query, 5)
    scores = [h.score for h in full]
    assert scores == sorted(scores, reverse=True) and min(scores) > 0
    for k in range(1, 6):
      assert index.search(query, k) == full[:k]
  with pytest.raises(ValueError, match="k must be"):
    index.search("Paris", 0)


def test_scores_are_the_bm25_of_the_textbook(index):
  rows = [tokenize(p.title) * 2 + tokenize(p.text) for p in PAGES]
  mean = sum(map(len, rows)) / len(rows)
  expected = {}
  for page, words in zip(PAGES, rows, strict=True):
    counts = Counter(words)
    for word in ("city", "paris", "born"):
      df = sum(word in r for r in rows)
      idf = math.log(1 + (len(rows) - df + 0.5) / (df + 0.5))
      tf = counts[word]
      score = idf * tf / (tf + 1.5 * (0.25 + 0.75 * len(words) / mean))
      expected[page.id] = expected.get(page.id, 0.0) + score
  hits = index.search("city paris born", 5)
  assert [h.score for h in hits] == pytest.approx([expected[i] for i in _titles(hits)])
  assert len(hits) == sum(s > 0 for s in expected.values())


def test_saved_index_answers_alike_and_to_many_threads(index, tmp_path):
  with pytest.raises(FileNotFoundError):
    SearchIndex.load(tmp_path)
  index.save(tmp_path / "index")
  loaded = SearchIndex.load(tmp_path / "index")
  assert len(loaded) == len(PAGES)
  queries = ("Paris", "a city of France", "beyonce", "zzz")
  expected = [index.search(query, 3) for query in queries]
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    answers = threads.map(lambda _: [loaded.search(q, 3) for q in queries], range(400))
    assert all(answer == expected for answer in answers)
  with pytest.raises(FileExistsError):
    index.save(tmp_path / "index")
  loaded.save(tmp_path / "again")
  assert SearchIndex.load(tmp_path / "again").search("Paris", 1)


def test_a_corpus_without_words():
  for pages in ([], [Document("0", "", "")], [Document("0", "?", "!")]):
    with pytest.raises(ValueError, match="without a single word"):
      SearchIndex.build(pages)
  pages = [Document("0", "", ""), Document("1", "", "word")]
  assert _titles(SearchIndex.build(pages).search("word", 2)) == ["1"]


def test_quiet_and_without_jax(tmp_path):
  # bm25s imports jax if it can, and starts its backend.
  program = (
    "import sys\nfrom tools_sandbox import client\n"
    "from tools_sandbox.search import index as search\n"
    "index = search.SearchIndex.build([search.Document('0', 'a', 'b')])\n"
    f"index.save({str(tmp_path / 'i')!r})\n"
    f"search.SearchIndex.load({str(tmp_path / 'i')!r}).search('a', 1)\n"
    "print({m.split('.')[0] for m in sys.modules} & {'jax', 'coa_jax', 'torch'})"
  )
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=root, capture_output=True, text=True
  )
  assert (done.stdout, done.stderr) == ("set()\n", "")


def test_corpus_formats(tmp_path):
  expected = [Document("7", "A", "x y"), Document("b", 'B "q"', "z")]
  plain = tmp_path / "plain.jsonl"
  plain.write_text(
    '{"id": 7, "title": "A", "text": "x y"}\n\n'
    '{"id": "b", "title": "B \\"q\\"", "text": "z", "url": "u"}\n'
  )
  assert list(read_corpus(plain)) == expected
  search_r1 = tmp_path / "r1.jsonl"
  # BrowseComp-Plus has no titles.
  rows = [{"docid": d.id, "text": d.text, "url": "https://a.example"} for d in expected]
  plus = tmp_path / "plus.jsonl"
  plus.write_text("\n".join(map(json.dumps, rows)))
  assert list(read_corpus(plus)) == [Document(d.id, d.id, d.text) for d in expected]
  rows = [{"id": d.id, "contents": f'"{d.title}"\n{d.text}'} for d in expected]
  search_r1.write_text("".join(json.dumps(r) + "\n" for r in rows))
  assert list(read_corpus(search_r1)) == expected
  listed = tmp_path / "list.json"
  listed.write_text(json.dumps([{"title": d.title, "text": d.text} for d in expected]))
  assert [d.id for d in read_corpus(listed)] == ["0", "1"]
  mapped = tmp_path / "map.json"
  mapped.write_text(json.dumps({"A": ["One.", " Two.", "Three."], "B": []}))
  assert list(read_corpus(mapped)) == [
    Document("0", "A", "One. Two. Three."),
    Document("1", "B", ""),
  ]


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("c.jsonl", '{"id": 1, "title": "t", "text": ""}\n{', r"c\.jsonl:2: not JSON"),
    ("c.jsonl", '{"id": 1, "ti\n{}\n', r"c\.jsonl:1: not JSON"),
    ("c.jsonl", '\n{"id": 1, "title": "t"}', r"c\.jsonl:2: field 'text' is missing"),
    ("c.jsonl", '{"title": "t", "text": ""}', r"c\.jsonl:1: field 'id' is missing"),
    ("c.jsonl", '{"id": 1.5, "contents": ""}', r"c\.jsonl:1: field 'id' is neither"),
    ("c.jsonl", '{"id": 1, "contents": 2}', r"c\.jsonl:1: field 'contents': expected"),
    ("c.jsonl", "[]", r"c\.jsonl:1: expected an object"),
    ("c.json", '[{"title": "t"}]', r"c\.json\[0\]: field 'text' is missing"),
    ("c.json", '{"T": "text"}', r"c\.json\['T'\]: expected a list"),
    ("c.json", '{"T": ["a", 1]}', r"c\.json\['T'\]\[1\]: expected a string"),
    ("c.json", '[\n{"a"}]', r"c\.json:2: not JSON"),
    ("c.json", "3", r"c\.json: expected a list or an object"),
    ("c.txt", "", r"c\.txt: a corpus is"),
    (
      "c.jsonl",
      '{"id": 1, "contents": ""}\n' * 2,
      r"c\.jsonl:2: field 'id' is '1', as",
    ),
    (
      "c.json",
      '[{"id": 1, "contents": ""}, {"contents": ""}]',
      r"\[1\]: field 'id' is",
    ),
    ("c.json", '{"T": [], "T": []}', r"c\.json:1: .* the same field twice"),
    ("c.jsonl", "\n" + "[" * 100_000, r"c\.jsonl:2: nested too deep"),
    ("c.jsonl", '{"id": ' + "9" * 5000, r"c\.jsonl:1: .* number too long"),
    ("c.json", "[" * 100_000, r"c\.json:1: nested too deep"),
    ("c.jsonl", b"\n\xff", r"c\.jsonl:2: not UTF-8"),
    ("c.json", b'["\xff"]', r"c\.json:1: not UTF-8"),
  ],
)
def test_malformed_corpora_name_the_place(tmp_path, name, text, message):
  data = text if isinstance(text, bytes) else text.encode()
  (tmp_path / name).write_bytes(data)
  with pytest.raises(ValueError, match=message):
    list(read_corpus(tmp_path / name))


def test_chinese_and_japanese_are_searched_by_pairs():
  texts = ("\u5317\u4eac\u5927\u5b66", "\u6771\u4eac\u306f\u65e5\u672c", "river Seine")
  index = SearchIndex.build(Document(str(n), t, t) for n, t in enumerate(texts))
  for query, expected in (
    ("\u4e2d\u56fd\u5927\u5b66", "0"),
    ("\u65e5\u672c\u306e\u9996\u90fd", "1"),
    ("river", "2"),
  ):
    assert index.search(query, 1)[0].document.id == expected
  assert tokenize("x1\u5927 y") == ["x1", "\u5927", "y"]

"""web_search against a mock Serper server, which also misbehaves."""

from __future__ import annotations

import concurrent.futures
import logging
import sqlite3
import time

import pytest
from http_server import LONG, within

from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.search.index import Document, SearchIndex
from tools_sandbox.web.web_search import WebConfig, WebSearch

KEY = "sk-very-secret-0123456789"
ROWS = [
  {"title": "Ur", "link": "https://en.test/ur", "snippet": "A city.", "date": "2020"},
  {"title": "Leak", "link": "https://Sub.HuggingFace.co/datasets/x", "snippet": "42"},
  {"title": "Uruk", "link": "http://en.test/uruk", "snippet": "Kings\n\x00lived."},
]


@pytest.fixture
def server(server):
  server.actions["/search"] = lambda r: r.send_json({"organic": ROWS})
  return server


@pytest.fixture
def search(server, tmp_path):
  """Makes a `WebSearch` on the server, with changes to its config."""
  searches = []
  (tmp_path / "key").write_text(KEY + "\n")

  def make(**changes) -> WebSearch:
    values = {"endpoint": server.url + "/search", "key_file": str(tmp_path / "key")}
    searches.append(WebSearch(WebConfig(**{**values, **changes})))
    return searches[-1]

  yield make
  for one in searches:
    one.close()


def test_results_are_numbered_and_leaks_are_left_out(server, search):
  assert search()(" who   built Ur? ", LONG) == (
    "1. [Ur](https://en.test/ur) (2020)\nA city.\n"
    "2. [Uruk](http://en.test/uruk)\nKings lived.\n"
    "(results on blocked sites, not shown: 1)"
  )
  (request,) = server.requests
  assert request.json == {"q": "who built Ur?", "num": 10}
  assert request.headers["X-API-KEY"] == KEY
  assert len(search(results=1).hits("x", LONG)) == 1
  server.actions["/search"] = lambda r: r.send_json({"organic": []})
  assert search()("x", LONG) == "no result"


def test_the_cache_outlives_the_run_and_the_block_list(server, search, tmp_path):
  path = str(tmp_path / "new" / "cache.sqlite")
  first = search(cache=path)("Ur", LONG)
  server.actions.clear()  # the service is gone
  assert search(cache=path)("  Ur ", LONG) == first and len(server.requests) == 1
  config = WebConfig(endpoint=server.url + "/search", cache=path)
  assert len(WebSearch(config, blocked=()).hits("Ur", LONG)) == 3
  one = WebSearch(config, blocked=("en.test",))
  assert len(one.hits("Ur", LONG)) == 1
  assert one("Ur", LONG).endswith("\n(results on blocked sites, not shown: 2)")
  none = WebSearch(config, blocked=("test", "huggingface.co"))
  assert none("Ur", LONG) == "(results on blocked sites, not shown: 3)"
  with pytest.raises(Unavailable):
    search(cache=path)("something else", LONG)
  server.actions["/search"] = lambda r: r.send_json({"organic": ROWS})
  assert search(cache=path).hits("something else", LONG)  # the failure was not cached


@pytest.mark.parametrize("rows", ["{", "[1]", "null", "[[1, 2, 3, 4]]", '["abcd", 5]'])
def test_a_poisoned_entry_is_asked_for_again(server, search, tmp_path, rows: str):
  path = str(tmp_path / "cache.sqlite")
  one = search(cache=path)
  one("Ur", LONG)
  with sqlite3.connect(path) as base:
    base.execute("UPDATE answers SET rows = ?", (rows,))
  base.close()
  assert len(one.hits("Ur", LONG)) == 2 and len(server.requests) == 2
  assert len(one.hits("Ur", LONG)) == 2 and len(server.requests) == 2  # repaired


def test_a_file_that_is_no_cache_is_refused_and_kept(search, tmp_path):
  path = tmp_path / "notes.txt"
  path.write_text("my notes, long enough to be a page of something" * 100)
  with pytest.raises(ValueError, match=r"notes\.txt"):
    search(cache=str(path))
  assert path.read_text().startswith("my notes")
  one = search(cache=str(tmp_path / "c"))
  one("Ur", LONG)
  (tmp_path / "c").write_bytes(b"broken on the way" * 999)
  assert len(one.hits("Ur", LONG)) == 2


def test_threads_share_a_cache(server, search, tmp_path):
  one = search(cache=str(tmp_path / "cache.sqlite"))
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    counts = list(pool.map(lambda n: len(one.hits(f"q{n % 5}", LONG)), range(60)))
  assert counts == [2] * 60 and 5 <= len(server.requests) <= 40
  requests = len(server.requests)
  one.hits("q0", LONG)
  assert len(server.requests) == requests


@pytest.mark.parametrize("fault", [500, 503, 429, "cut", "garbage", "no json"])
def test_faults_that_pass_are_tried_again(server, search, fault):
  def once(r):
    server.actions["/search"] = lambda r: r.send_json({"organic": ROWS})
    if fault == "cut":
      r.raw(Content_Length="500")
    elif fault == "garbage":
      r.wfile.write(b"\x00\x01\x02 not http")
    elif fault == "no json":
      r.send(b"<html>it works!</html>")
    else:
      r.send_json({}, fault, Retry_After="0")

  server.actions["/search"] = once
  assert len(search().hits("Ur", LONG)) == 2 and len(server.requests) == 2


@pytest.mark.parametrize(
  "reply",
  [[], {}, "x", 5, None, {"organic": 5}, {"organic": {"a": 1}}, {"message": "x"}],
)
def test_json_that_is_not_serpers_is_the_services_fault(server, search, reply):
  server.actions["/search"] = lambda r: r.send_json(reply)
  with pytest.raises(Unavailable, match="no list of results"):
    search()("Ur", LONG)


def test_odd_rows_are_left_out_and_long_ones_cut(server, search):
  rows = [
    None,
    {"title": "no link"},
    {"link": 5},
    {"link": "http://[", "title": "no URL"},
    {"link": "http://a.test/", "title": None, "snippet": ["x"]},
    {"link": "http://b.test/", "snippet": "y" * 10**6},
  ]
  server.actions["/search"] = lambda r: r.send_json({"organic": rows})
  first, second = search().hits("x", LONG)
  assert (first.title, first.snippet) == ("", "") and len(second.snippet) == 1000


def test_floods_and_drips_end(server, search):
  def flood(r):
    r.raw(200, "application/json", Transfer_Encoding="chunked")
    while not server.stopped.is_set():
      r.wfile.write(b"10000\r\n" + b" " * 65536 + b"\r\n")

  in_time = within()
  server.actions["/search"] = flood
  with pytest.raises(Unavailable):
    search()("x", LONG)
  server.actions["/search"] = lambda r: (r.raw(Content_Length="999"), r.drip(b" "))
  with pytest.raises(Unavailable, match="no reply within"):
    search()("x", 0.5)
  in_time()


@pytest.mark.parametrize(
  ("status", "fault"),
  [(400, ToolFault), (401, Unavailable), (403, Unavailable), (429, Unavailable)],
)
def test_errors_say_whose_fault_it_is_and_hide_the_key(
  server, search, caplog, status, fault
):
  caplog.set_level(logging.DEBUG)
  reply = {"key": KEY}
  server.actions["/search"] = lambda r: r.send_json(reply, status, Retry_After="3600")
  in_time = within()
  with pytest.raises(fault, match=f"status {status}") as error:
    search()("Ur", LONG)
  in_time()
  assert len(server.requests) == 1  # a retry cannot help
  assert KEY not in str(error.value) and KEY not in caplog.text
  with pytest.raises(Unavailable, match="ConnectError"):
    search(endpoint="http://127.0.0.1:1/search")("Ur", LONG)


def test_requests_keep_the_pace(server, search):
  one = search(per_second=20.0)
  began = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor(7) as pool:
    list(pool.map(lambda n: one(f"q{n}", LONG), range(7)))
  assert time.monotonic() - began >= 0.3
  with pytest.raises(Unavailable, match="no reply within"):
    slow = search(per_second=0.001)
    slow("a", LONG)
    slow("b", 0.2)


def test_offline_the_corpus_answers_through_the_same_interface():
  pages = [
    Document("http://a.test/ur", "Ur", "A city."),
    Document("2", "Nile", "Water."),
  ]
  local = SearchIndex.build(pages).search
  one = WebSearch(WebConfig(), local=local)
  assert one("the city of Ur", 1.0) == "1. [Ur](http://a.test/ur)\nA city."
  assert one("zzz", 1.0) == "no result"
  one = WebSearch(WebConfig(), blocked=("a.test",), local=local)
  assert one("Ur", 1.0) == "(results on blocked sites, not shown: 1)"
  with pytest.raises(BadCall, match="2000 characters"):
    one("x" * 2001, 1.0)
  with pytest.raises(ValueError, match="needs web"):
    WebSearch(WebConfig())


@pytest.mark.parametrize("text", [None, "", "two words", "\u00e9"])
def test_key_files_that_hold_no_key_are_refused(tmp_path, text: str | None):
  path = tmp_path / "k"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match="key_file"):
    WebSearch(WebConfig(endpoint="http://a", key_file=str(path)))

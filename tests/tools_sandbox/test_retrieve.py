"""The /retrieve API over loopback: our client and server, together and apart."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import signal
import subprocess
import sys

import httpx
import pytest
from http_server import LONG, Server
from sandbox_server import serving_app

from tools_sandbox.client import Sandbox
from tools_sandbox.faults import Unavailable
from tools_sandbox.search import retrieve_server
from tools_sandbox.search.retrieve import Retriever

PAGES = [
  {"id": "1", "title": "Ur", "text": "Ur is a city.\nIts capital is Uruk."},
  {"id": "2", "title": 'The "Nile"', "text": "A river in Egypt."},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp("corpus") / "pages.jsonl"
  path.write_text("".join(json.dumps(page) + "\n" for page in PAGES))
  return str(path)


@pytest.fixture(scope="module")
def url(corpus: str):
  """URL of a server for the corpus, in a thread."""
  with (
    Sandbox(corpus=corpus, backend=None) as sandbox,
    serving_app(retrieve_server.make_app(sandbox)) as url,
  ):
    yield url


@contextlib.contextmanager
def retriever(url: str):
  client = Retriever(url)
  try:
    yield client
  finally:
    client.close()


@pytest.mark.parametrize("path", ["", "/", "/retrieve", "/retrieve/"])
def test_the_client_gets_what_the_index_finds(url: str, corpus: str, path: str):
  with retriever(url + path) as client, Sandbox(corpus=corpus, backend=None) as sandbox:
    for query in ("capital of Ur", "nile", "zzz", "a city", "", "\ud800 nile"):
      assert client.search(query, 2, LONG) == sandbox.search(query, 2)


def test_the_server_speaks_search_r1(url: str):
  body = {"queries": ["nile", "zzz"], "topk": 1, "return_scores": True}
  first, none = httpx.post(url + "/retrieve", json=body, timeout=LONG).json()["result"]
  document = {"id": "2", "contents": '"The "Nile""\nA river in Egypt.'}
  assert none == [] and first == [{"document": document, "score": first[0]["score"]}]
  body = {"queries": ["nile"]}
  assert httpx.post(url + "/retrieve", json=body, timeout=LONG).json() == {
    "result": [[document]]
  }
  assert httpx.get(url + "/health", timeout=LONG).json() == {"status": "ok"}


@pytest.mark.parametrize(
  ("body", "words"),
  [
    ([], "not an object"),
    ({}, "queries is missing"),
    ({"queries": "x"}, "queries must be"),
    ({"queries": [1]}, "queries[0] must be a string, got 1"),
    ({"queries": ["x"], "topk": 0}, "topk must be"),
    ({"queries": ["x"], "topk": True}, "topk must be"),
    ({"queries": ["x"], "topk": 1e9}, "topk must be"),
    ({"queries": ["x"] * 513}, "at most 512"),
  ],
)
def test_the_server_says_what_is_wrong_with_a_request(url: str, body, words: str):
  reply = httpx.post(url + "/retrieve", json=body, timeout=LONG)
  assert reply.status_code == 400 and words in reply.json()["error"]


def test_floods_and_pages_of_the_web_are_refused(url: str):
  for content, kind, status in (
    (b" " * 1_000_001, "application/json", 413),
    (b'{"queries": ["nile"]}', "text/plain", 415),
  ):
    headers = {"content-type": kind}
    reply = httpx.post(
      url + "/retrieve", content=content, headers=headers, timeout=LONG
    )
    assert reply.status_code == status
  host = {"host": "rebound.example"}
  assert httpx.get(url + "/health", headers=host, timeout=LONG).status_code == 400


def test_many_ask_at_once(url: str):
  with retriever(url) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
    results = list(pool.map(lambda _: client.search("nile", 1, LONG), range(100)))
  assert all(hits[0].document.id == "2" for hits in results)


def test_servers_without_scores_and_with_other_contents_are_read():
  bare = [{"contents": '"T"\nbody'}, {"id": 7, "contents": "no line end"}]
  with Server() as server, retriever(server.url) as client:
    server.actions["/retrieve"] = lambda r: r.send_json({"result": [bare]})
    first, second = client.search("x", 5, LONG)
    assert (first.document.title, first.document.text, first.score) == ("T", "body", 0)
    assert (second.document.id, second.document.title) == ("7", "no line end")
    assert len(client.search("x", 1, LONG)) == 1


@pytest.mark.parametrize(
  "reply",
  [
    [],
    {},
    {"result": 5},
    {"result": []},
    {"result": [[], []]},
    {"result": [[5]]},
    {"result": [[{}]]},
    {"result": [[{"contents": 5}]]},
    {"result": [[{"document": {"contents": "a"}, "score": "x"}]]},
    {"result": [[{"document": {"contents": "a"}, "score": 10**400}]]},
  ],
)
def test_json_of_another_kind_is_the_servers_fault(reply):
  with Server() as server, retriever(server.url) as client:
    server.actions["/retrieve"] = lambda r: r.send_json(reply)
    with pytest.raises(Unavailable, match="not a /retrieve result"):
      client.search("x", 1, LONG)


@contextlib.contextmanager
def program(*arguments: str):
  """Starts the server program; yields its process and first line of output."""
  command = [sys.executable, "-m", "tools_sandbox.search.retrieve_server", "--port=0"]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  with subprocess.Popen([*command, *arguments], text=True, **pipes) as running:
    try:
      yield running, running.stdout.readline()
    finally:
      running.terminate()
      assert running.wait(LONG) == 0


def test_the_program_serves_beyond_loopback_and_says_what_that_means(corpus: str):
  arguments = (f"--corpus={corpus}", "--host=0.0.0.0", "--allowed_hosts=wiki.local")
  with program(*arguments) as (running, line):
    url = "http://127.0.0.1:" + line.rstrip().rpartition(":")[2]
    for host, status in (("wiki.local", 200), ("rebound.example", 400)):
      reply = httpx.get(url + "/health", headers={"host": host}, timeout=LONG)
      assert reply.status_code == status
    with retriever(url) as client:
      assert client.search("nile", 1, 300.0)[0].document.id == "2"
    running.terminate()
    errors = running.stderr.read()
  assert "--host=0.0.0.0: there is no key" in errors and len(errors.splitlines()) == 1


def test_arguments_that_can_not_be_served_are_one_line(
  tmp_path, corpus: str, monkeypatch, capsys
):
  monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep pytest's handlers
  (tmp_path / "empty.jsonl").write_text("")
  (tmp_path / "deep.jsonl").write_text("\n" + "[" * 100_000 + "\n")
  for arguments, words in (
    ([f"--corpus={tmp_path}/none.jsonl"], "none.jsonl: there is no such corpus file"),
    ([f"--corpus={tmp_path}/empty.jsonl"], "empty.jsonl: a corpus without a single"),
    ([f"--corpus={tmp_path}/deep.jsonl"], "deep.jsonl:2: nested too deep"),
    ([f"--corpus={corpus}", "--topk=0"], "--topk=0: accepted are 1 to 100"),
    ([f"--corpus={corpus}", "--port=99999"], "--port=99999"),
  ):
    monkeypatch.setattr(sys, "argv", ["retrieve_server", *arguments])
    with pytest.raises(SystemExit) as end:
      retrieve_server.main()
    errors = capsys.readouterr().err
    assert end.value.code == 2 and words in errors, errors
    assert len(errors.splitlines()) == 1

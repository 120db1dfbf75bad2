"""A server of the Search-R1 `/retrieve` API over BM25 (see `retrieve`).

  python -m tools_sandbox.retrieve_server --corpus=pages.jsonl --port=8000

serves a corpus on loopback; `wiki_search` of any number of processes can ask it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tools_sandbox.client import Hit, Sandbox

_MAX_BODY = 1_000_000  # bytes of a request
_MAX_QUERIES = 512
_MAX_TOPK = 100


def make_app(sandbox: Sandbox, topk: int = 3) -> Starlette:
  """The server over a sandbox's corpus: POST /retrieve, GET /health.

  Args:
    sandbox: holds the corpus; it is not closed with the app.
    topk: documents where a request does not say how many.
  """

  def find(asked: _Asked) -> list[list[Any]]:
    return [
      [_row(hit, asked.scores) for hit in sandbox.search(query, asked.topk)]
      for query in asked.queries
    ]

  async def retrieve(request: Request) -> JSONResponse:
    data = bytearray()
    async for chunk in request.stream():
      data += chunk
      if len(data) > _MAX_BODY:
        return _error(f"a request has at most {_MAX_BODY} bytes", 413)
    try:
      asked = _read(bytes(data), topk)
    except ValueError as e:
      return _error(str(e), 400)
    return JSONResponse({"result": await run_in_threadpool(find, asked)})

  async def health(request: Request) -> JSONResponse:
    del request
    return JSONResponse({"status": "ok"})

  return Starlette(
    routes=[
      Route("/retrieve", retrieve, methods=["POST"]),
      Route("/health", health),
    ]
  )


@dataclasses.dataclass(frozen=True)
class _Asked:
  queries: list[str]
  topk: int
  scores: bool


def _read(data: bytes, topk: int) -> _Asked:
  """A request; a ValueError says what is wrong with it."""
  try:
    body = json.loads(data)
  except (ValueError, RecursionError):
    raise ValueError("the request is not JSON") from None
  if not isinstance(body, dict):
    raise ValueError("the request is not an object")
  queries, scores = body.get("queries"), body.get("return_scores", False)
  topk = topk if body.get("topk") is None else body["topk"]
  if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
    raise ValueError("queries must be a list of strings")
  if len(queries) > _MAX_QUERIES:
    raise ValueError(f"at most {_MAX_QUERIES} queries at once")
  if type(topk) is not int or not 1 <= topk <= _MAX_TOPK:
    raise ValueError(f"topk must be an integer from 1 to {_MAX_TOPK}")
  return _Asked(queries, topk, bool(scores))


def _row(hit: Hit, scores: bool) -> dict[str, Any]:
  d = hit.document
  document = {"id": d.id, "contents": f'"{d.title}"\n{d.text}'}
  if not scores:
    return document
  score = hit.score if math.isfinite(hit.score) else 0.0
  return {"document": document, "score": score}


def _error(message: str, status: int) -> JSONResponse:
  return JSONResponse({"error": message}, status)


def main() -> None:
  """Serves a corpus until it is told to stop (SIGTERM or Ctrl-C)."""
  import uvicorn  # here, for a client needs no server

  parser = argparse.ArgumentParser(description="Search-R1's /retrieve over BM25.")
  parser.add_argument("--corpus", required=True, help="see search.read_corpus")
  parser.add_argument("--index_cache", help="a folder that keeps the index")
  parser.add_argument("--host", default="127.0.0.1", help="loopback unless you say so")
  parser.add_argument("--port", type=int, default=8000)
  parser.add_argument("--topk", type=int, default=3)
  args = parser.parse_args()
  corpus, cache = args.corpus, args.index_cache
  try:
    sandbox = Sandbox(corpus=corpus, index_cache=cache, backend=None)
  except (OSError, ValueError) as e:
    parser.exit(2, f"{parser.prog}: {e}\n")
  with sandbox:
    app = make_app(sandbox, args.topk)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
  main()

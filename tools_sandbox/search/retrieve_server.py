"""Serves Search-R1's `/retrieve` API over a BM25 index (see `retrieve`).

  python -m tools_sandbox.search.retrieve_server --corpus=pages.jsonl --port=8000

serves a corpus on loopback for `wiki_search` in any number of processes. Requests need
JSON's content type, which JSON clients set. There is no key: a --host within others'
reach lets them search the corpus, and --allowed_hosts lists the accepted names (the
header Host).
"""

from __future__ import annotations

import argparse
from typing import Any

import pydantic
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tools_sandbox import http_server
from tools_sandbox.client import Sandbox
from tools_sandbox.search.index import Hit

_MAX_BODY = 1_000_000  # bytes of a request
_MAX_QUERIES = 512
_MAX_TOPK = 100
_GRACE_S = 5


def make_app(
  sandbox: Sandbox,
  topk: int = 3,
  hosts: tuple[str, ...] = http_server.LOOPBACK,
) -> Starlette:
  """Makes the web application for a sandbox's corpus: POST /retrieve, GET /health.

  Args:
    sandbox: has the corpus; not closed with the app.
    topk: the default number of documents.
    hosts: accepted values of the header Host; "*" for any.
  """

  def find(query: _Query) -> list[list[Any]]:
    found = [sandbox.search(text, query.topk or topk) for text in query.queries]
    return [[_row(hit, query.return_scores) for hit in hits] for hits in found]

  async def retrieve(request: Request) -> JSONResponse:
    body = await http_server.read_object(request, _MAX_BODY)
    try:
      query = http_server.read_fields(_Query, body)
    except ValueError as e:
      raise HTTPException(400, str(e)) from None
    # In a thread: a search takes CPU milliseconds, for which the event loop would stop.
    return JSONResponse({"result": await run_in_threadpool(find, query)})

  async def health(request: Request) -> JSONResponse:
    del request
    return JSONResponse({"status": "ok"})

  return Starlette(
    routes=[
      Route("/retrieve", retrieve, methods=["POST"]),
      Route("/health", health),
    ],
    middleware=[http_server.check_host(list(hosts))],
    exception_handlers={HTTPException: _http_error},
  )


class _Query(pydantic.BaseModel):
  """A request; Search-R1 clients may send other fields."""

  model_config = pydantic.ConfigDict(strict=True)
  queries: list[str] = pydantic.Field(max_length=_MAX_QUERIES)
  topk: int | None = pydantic.Field(None, ge=1, le=_MAX_TOPK)
  return_scores: bool = False


def _row(hit: Hit, scores: bool) -> dict[str, Any]:
  d = hit.document
  # As in Search-R1's own corpora: the title in quotes, a line end, the text.
  document = {"id": d.id, "contents": f'"{d.title}"\n{d.text}'}
  return {"document": document, "score": hit.score} if scores else document


async def _http_error(request: Request, e: HTTPException) -> JSONResponse:
  del request
  return JSONResponse({"error": e.detail}, e.status_code, e.headers)


def serve(args: argparse.Namespace) -> None:
  """Serves until a signal ends it.

  Raises:
    OSError, ValueError: an argument or the corpus cannot be used.
  """
  # --- Check the arguments first: reading a corpus may take minutes.
  if not 1 <= args.topk <= _MAX_TOPK:
    raise ValueError(f"--topk={args.topk}: accepted are 1 to {_MAX_TOPK}")

  # --- Take the address before reading the corpus; listen only afterwards.
  with (
    http_server.bind(args.host, args.port) as sock,
    Sandbox(corpus=args.corpus, index_cache=args.index_cache, backend=None) as sandbox,
  ):
    allowed = args.allowed_hosts.split(",") if args.allowed_hosts else []
    hosts = http_server.open_hosts(args.host, allowed, "search the corpus")
    server = http_server.Server(make_app(sandbox, args.topk, tuple(hosts)), _GRACE_S)
    print(f"{args.corpus} at {http_server.listen(sock, args.host)}", flush=True)
    server.run(sockets=[sock])


def main() -> None:
  """Serves a corpus until a signal to stop (SIGTERM or Ctrl-C)."""
  parser = argparse.ArgumentParser(
    prog="python -m tools_sandbox.search.retrieve_server",
    description="Search-R1's /retrieve over BM25.",
  )
  add = parser.add_argument
  add("--corpus", required=True, help="see search.read_corpus")
  add("--index_cache", help="a folder that keeps the index")
  add("--host", default="127.0.0.1", help="loopback unless you say so")
  add("--port", type=int, default=8000, help="0 for any that is free")
  add("--topk", type=int, default=3)
  add("--allowed_hosts", help="names that clients may call it by, with commas between")
  http_server.run_program(parser, serve)


if __name__ == "__main__":
  main()

"""Serves this project's HTTP applications with uvicorn, and guards loopback servers.

To keep out a web page's scripts, the guards check the header Host (a page can give our
address a name of its own) and the content type (a browser asks before it sends JSON to
another site). They also limit a body's size and time. Slow heads, slow readers and the
number of connections are a proxy's task: see "Behind a proxy" in README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pydantic
import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_QUEUE = 2048  # connections the kernel holds until they are accepted
_IDLE_S = 75  # until an idle connection is closed; our clients close theirs sooner
_BODY_S = 30.0  # seconds for a request's body


class Server(uvicorn.Server):
  """Serves an application without WebSockets; logs only errors."""

  def __init__(self, app: ASGIApp, grace_s: float):
    """Starts nothing yet.

    Args:
      app: the application.
      grace_s: seconds left for requests when the server is told to stop.
    """
    super().__init__(
      uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,  # keep the program's own logging
        log_level="error",  # strangers could fill a log with warnings
        access_log=False,
        server_header=False,
        backlog=_QUEUE,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=grace_s,
      )
    )


def run_program(
  parser: argparse.ArgumentParser,
  serve: Callable[[argparse.Namespace], None],
  argv: Sequence[str] | None = None,
) -> None:
  """Reads arguments, serves until SIGTERM or Ctrl-C, and exits with 0.

  An OSError, ValueError or RuntimeError from `serve` is for the user: the program
  prints one line and exits with 2.
  """
  args = parser.parse_args(argv)
  # uvicorn raises the signal again at its end; `sys.exit` lets context managers exit.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *unused: sys.exit(0))
  try:
    serve(args)
  except (OSError, ValueError, RuntimeError) as e:
    parser.exit(2, f"{parser.prog}: {e}\n")


def bind(host: str, port: int) -> socket.socket:
  """Binds a socket without listening yet.

  Raises:
    ValueError: the address cannot be bound.
  """
  sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  try:
    try:
      sock.bind((host, port))
    except OSError:
      # Connections of an ended server may linger on the port. Set only after the first
      # attempt: two servers that both set it could share a port until one listens.
      sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      sock.bind((host, port))
  except (OSError, OverflowError) as e:
    sock.close()
    raise ValueError(f"--host={host} --port={port}: {e}") from e
  return sock


def listen(sock: socket.socket, host: str) -> str:
  """Accepts connections, answered once the server runs; returns the URL."""
  sock.listen(_QUEUE)
  where = f"[{host}]" if ":" in host else host
  return f"http://{where}:{sock.getsockname()[1]}"


def open_hosts(host: str, allowed: list[str], risk: str) -> list[str]:
  """Lists the accepted Host headers of a server without a key.

  On loopback: loopback's names and `allowed`. Elsewhere, with a warning on standard
  error: the same if `allowed` has names, or else any name.

  Args:
    host: the address the server listens on.
    allowed: names from the user.
    risk: the warning's text after "can".
  """
  if host not in LOOPBACK:
    print(
      f"--host={host}: there is no key and no encryption, so whoever reaches this port "
      f"can {risk}",
      file=sys.stderr,
      flush=True,
    )
    if not allowed:
      return ["*"]
  return [*LOOPBACK, *allowed]


def check_host(names: list[str]) -> Middleware:
  """Makes middleware that refuses requests to other names (status 400)."""
  return Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)


class Body(pydantic.BaseModel):
  """A request's JSON object, checked strictly: no other fields and no conversions."""

  model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class BadField(ValueError):
  """A request's body does not fit its `Body`.

  Attributes:
    field: the field's path, like "messages[0].role"; "" for the whole body.
    is_unknown: whether there is no such field.
  """

  def __init__(self, message: str, field: str, is_unknown: bool = False):
    """Takes the attributes, and a one-line message."""
    super().__init__(message)
    self.field = field
    self.is_unknown = is_unknown


_Model = TypeVar("_Model", bound=pydantic.BaseModel)


def read_fields(cls: type[_Model], value: Any) -> _Model:
  """Builds the model from a decoded request.

  Raises:
    BadField: the first wrong field with its value, in one line.
  """
  try:
    return cls.model_validate(value)
  except pydantic.ValidationError as e:
    fault = e.errors(include_url=False)[0]

  # --- The path: names and positions, like ("messages", 0, "role").
  steps = (f"[{x}]" if isinstance(x, int) else f".{x}" for x in fault["loc"])
  field = "".join(steps).removeprefix(".")

  # --- The message: in this project's words instead of pydantic's.
  if fault["type"] == "extra_forbidden":
    accepted = ", ".join(sorted(cls.model_fields))
    message = f"unknown field {field!r:.100}; there are {accepted}"
    raise BadField(message, field, is_unknown=True)
  if fault["type"] == "missing":
    raise BadField(f"{field} is missing", field)
  rule = fault["msg"].replace("Input should be", "must be")
  rule = rule.replace("a valid integer", "an integer").replace("a valid ", "a ")
  value = repr(fault["input"])[:100]
  raise BadField(f"{field} {rule}, got {value}", field)


async def read_body(request: Request, most: int) -> bytes:
  """Reads a request's body; its content type must be JSON.

  Args:
    request: the request.
    most: the limit in bytes.

  Raises:
    HTTPException: 415 for another content type, 413 if too long, 408 if too slow, 499
      if the client has gone.
  """
  # --- Check the headers' type and length before reading the body.
  kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
  if kind != "application/json":
    raise HTTPException(415, "content-type must be application/json")
  too_long = HTTPException(413, f"a request has at most {most} bytes")
  length = request.headers.get("content-length", "")
  # Twenty digits already exceed the limit, whatever follows.
  if length.isdigit() and int(length[:20]) > most:
    raise too_long

  # --- Check the body's length too: the header may be false or missing.
  data = bytearray()
  try:
    async with asyncio.timeout(_BODY_S):  # the client may hold a place in a queue
      async for part in request.stream():
        data += part
        if len(data) > most:
          raise too_long
  except ClientDisconnect:
    raise HTTPException(499, "the client has hung up") from None
  except TimeoutError:
    message = f"the request took longer than {_BODY_S:g} s"
    raise HTTPException(408, message, {"connection": "close"}) from None
  return bytes(data)


async def read_object(request: Request, most: int) -> dict[str, Any]:
  """Reads a JSON object from a request's body; raises as `read_body`, and also 400."""
  data = await read_body(request, most)
  try:
    body = json.loads(data)
  except (ValueError, RecursionError):
    raise HTTPException(400, "the request is not JSON") from None
  if not isinstance(body, dict):
    raise HTTPException(400, "the request is not an object")
  return body

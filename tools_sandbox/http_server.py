"""A hardened uvicorn for every HTTP server of this project.

uvicorn waits without a limit for an unfinished head or body and for a client that does
not read, so a few hundred idle sockets can use up a process's descriptors. Here each
wait for a client has a timeout, and if there are too many connections, the one with the
longest wait is closed: an active client is served, however many others hold connections
open.

This module also has the checks against web pages' scripts: the header Host (a page can
give our address its own name) and the content type (a browser asks before sending JSON
to another site).

budget: the timeouts of all waits for a client, in one place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import resource
import socket
import sys
from typing import Any, TypeVar

import h11
import pydantic
import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_CONNECTIONS = 4096  # at once; each may hold a head of 16 KiB
_QUEUE = 2048  # pending connections in the kernel's queue
_ACCEPTED = 16  # of them at a time, before any other can be closed
_NEVER = 1e9  # seconds: uvicorn's own timer is not used


@dataclasses.dataclass(frozen=True)
class Waits:
  """Seconds that a server waits for its client.

  Attributes:
    head: for a request's head, from the connection or the head's first byte on.
    body: for the rest of the request.
    idle: for the next request, after an answer; longer than our clients keep an unused
      connection.
    reading: for a client that does not read its response.
  """

  head: float = 15.0
  body: float = 30.0
  idle: float = 75.0
  reading: float = 300.0


class Server(uvicorn.Server):
  """Serves an application; silent but for its errors, no WebSockets."""

  def __init__(
    self, app: ASGIApp, grace_s: float, capacity: int = 0, waits: Waits | None = None
  ):
    """Raises the descriptor limit if it is low; starts nothing yet.

    Args:
      app: the ASGI application.
      grace_s: seconds for running requests after the signal to stop.
      capacity: the application's concurrent requests, each with a connection.
      waits: for clients; None for `Waits()`.

    Raises:
      ValueError: `capacity` needs more descriptors than this process may have.
    """
    # uvicorn makes a protocol of its own arguments: ours are bound before.
    protocol = functools.partial(
      _Connection, waits or Waits(), _room_for_connections(capacity)
    )
    super().__init__(
      uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,  # the program's own
        log_level="error",  # strangers could fill a log with warnings
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED,
        timeout_keep_alive=_NEVER,
        timeout_graceful_shutdown=grace_s,
      )
    )

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    """Listens. See `uvicorn.Server`."""
    await super().startup(sockets)
    for sock in sockets or ():
      sock.listen(_QUEUE)  # asyncio knows one number for this and for `_ACCEPTED`


class _Connection(H11Protocol):
  """A uvicorn connection with the kind and start of its current wait.

  Attributes:
    since: the event loop's time since which it waits for its client; infinity while the
      client waits for us.
  """

  def __init__(self, waits: Waits, most: int, **uvicorn_arguments: Any):
    super().__init__(**uvicorn_arguments)
    self._waits = waits
    self._most = most
    self._phase = ""
    self._timer: asyncio.TimerHandle | None = None
    self.since = math.inf

  def connection_made(self, transport: asyncio.Transport) -> None:
    super().connection_made(transport)
    self._look()
    # Too many: close the connection with the longest wait for its client. While the
    # client waits for us, `since` is infinite, so it is closed last.
    if len(self.connections) > self._most:
      last = min(self.connections, key=lambda c: c.since)
      self.connections.discard(last)  # now: others may come before it is lost
      last.transport.abort()

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._look()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._look()

  def pause_writing(self) -> None:
    super().pause_writing()
    self._look()

  def resume_writing(self) -> None:
    super().resume_writing()
    self._look()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._unset_keepalive_if_required()
    if self._timer is not None:
      self._timer.cancel()

  def _look(self) -> None:
    """Resets the timer if the kind of wait has changed."""
    phase = self._waits_for()
    if phase == self._phase:
      return
    self._phase = phase
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    self.since = math.inf
    if phase:
      self.since = self.loop.time()
      self._timer = self.loop.call_later(getattr(self._waits, phase), self._late)

  def _waits_for(self) -> str:
    """A field of `Waits`; "" while the client waits for us."""
    # Our response is still being sent: the client has to read first.
    if self.transport.is_closing() or self.flow.write_paused:
      return "reading"
    if self.conn.their_state is h11.IDLE:
      # uvicorn's timer runs from an answer to the next byte.
      return "idle" if self.timeout_keep_alive_task is not None else "head"
    return "body" if self.conn.their_state is h11.SEND_BODY else ""

  def _late(self) -> None:
    if self._phase != "body" or self.conn.our_state is not h11.SEND_RESPONSE:
      self.transport.abort()
      return
    # The application still reads: tell it the client is gone, and tell the client the
    # reason.
    self.cycle.disconnected = True
    self.cycle.message_event.set()

    # Written past uvicorn, which would wait for the rest of the body.
    text = f"the request took longer than {self._waits.body:g} s"
    body = json.dumps({"error": text}).encode()
    headers = [
      (b"content-type", b"application/json"),
      (b"content-length", b"%d" % len(body)),
      (b"connection", b"close"),
    ]
    for event in (
      h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
      h11.Data(data=body),
      h11.EndOfMessage(),
    ):
      self.transport.write(self.conn.send(event))
    self.transport.close()
    self._look()


def _room_for_connections(capacity: int) -> int:
  """How many connections there may be; raises the limit of descriptors for them."""
  # As many as are hoped for, or as the hard limit lets this process have.
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  descriptors = 2 * max(_CONNECTIONS, 2 * capacity)
  unlimited = resource.RLIM_INFINITY
  if soft != unlimited and soft < descriptors:
    soft = descriptors if hard == unlimited else min(descriptors, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  if soft != unlimited:
    descriptors = min(descriptors, soft)
  most = descriptors // 2  # the others are for files, pipes and processes
  if most <= capacity:
    raise ValueError(
      f"{capacity} requests at once need more than {2 * capacity} descriptors, and "
      f"this process may have {soft}: raise `ulimit -n`, or let fewer wait"
    )
  return most


def bind(host: str, port: int) -> socket.socket:
  """Binds a socket without listening yet.

  Raises:
    ValueError: the address can not be had.
  """
  sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  try:
    try:
      sock.bind((host, port))
    except OSError:
      # Connections of an ended server may linger on the port. Set after the first
      # attempt: two servers that both set it could share a port until one listens.
      sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      sock.bind((host, port))
  except (OSError, OverflowError) as e:
    sock.close()
    raise ValueError(f"--host={host} --port={port}: {e}") from e
  return sock


def listen(sock: socket.socket, host: str) -> str:
  """Takes connections, which are answered once the server runs; the URL to tell of."""
  sock.listen(_QUEUE)
  where = f"[{host}]" if ":" in host else host
  return f"http://{where}:{sock.getsockname()[1]}"


def open_hosts(host: str, allowed: list[str], risk: str) -> list[str]:
  """Lists the accepted Host headers of a server without a key.

  On loopback, loopback's names; elsewhere any name, with a warning on standard error;
  `allowed` adds names, and elsewhere replaces "any".

  Args:
    host: the address it listens on.
    allowed: names from the user.
    risk: the risk, for the warning.
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
  """Refuses requests to other names (status 400)."""
  return Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)


class Body(pydantic.BaseModel):
  """A request's JSON object: fields of these types and no others; none is converted."""

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
    BadField: one line on the first wrong field, with its value.
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
    HTTPException: 415 of another content type, 413 too long, 499 the client has gone.
  """
  # --- Check the headers' type and length before reading the body.
  kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
  if kind != "application/json":
    raise HTTPException(415, "content-type must be application/json")
  too_long = HTTPException(413, f"a request has at most {most} bytes")
  length = request.headers.get("content-length", "")
  # Of twenty digits the number is too large whatever follows.
  if length.isdigit() and int(length[:20]) > most:
    raise too_long

  # --- Check the body's length too: the header may be false or missing.
  data = bytearray()
  try:
    async for part in request.stream():
      data += part
      if len(data) > most:
        raise too_long
  except ClientDisconnect:
    raise HTTPException(499, "the client has hung up") from None
  return bytes(data)


async def read_object(request: Request, most: int) -> dict[str, Any]:
  """Reads the JSON object of a request's body; raises as `read_body`, and 400."""
  data = await read_body(request, most)
  try:
    body = json.loads(data)
  except (ValueError, RecursionError):
    raise HTTPException(400, "the request is not JSON") from None
  if not isinstance(body, dict):
    raise HTTPException(400, "the request is not an object")
  return body

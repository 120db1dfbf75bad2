"""uvicorn, hardened: what every HTTP server of this project is served with.

uvicorn waits for ever for a head or a body that has begun, and for a client that does
not read, so that a few hundred idle sockets use up the descriptors of a process. Here
each wait for a client has an end, and where connections grow too many, the one that has
waited longest for its client is closed: a client that goes on with its request is
served however many others only hold connections open.

Beside it stand the checks that keep a web page's scripts out: of the header Host (a
page can give our address a name of its own) and of the content type (a browser sends
JSON to another site only after asking).

budget: each wait for a client that has an end, in one place.
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
_QUEUE = 2048  # connections that the kernel keeps until they are accepted
_ACCEPTED = 16  # of them at a time, before any other can be closed
_NEVER = 1e9  # seconds: uvicorn's own timer is not used


@dataclasses.dataclass(frozen=True)
class Waits:
  """Seconds that a server waits for its client.

  Attributes:
    head: for a request's head, from the connection or the head's first byte on.
    body: for the rest of the request.
    idle: for the next request, after an answer; longer than our clients keep a
      connection that they do not use.
    reading: for a client that does not read what it is sent.
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
    """Raises the limit of descriptors where it is low; starts nothing yet.

    Args:
      app: what answers.
      grace_s: seconds that requests have left when the server is told to stop.
      capacity: requests that the application may hold at once, each with a connection.
      waits: for clients; None for `Waits()`.

    Raises:
      ValueError: this process may not have the descriptors that `capacity` needs.
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
  """uvicorn's connection, which knows what it waits for and since when.

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
    # One too many: the one that has waited longest for its client goes. Where the
    # client waits for us `since` is infinite, and it goes last of all.
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
    """Sets the timer anew where it now waits for something else."""
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
    # Ours is still on the way out: whatever else comes, the client has to read first.
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
    # The application still reads: it is told that the client is gone, the client why.
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
  """Binds a socket that does not listen yet.

  Raises:
    ValueError: the address can not be had.
  """
  sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
  try:
    try:
      sock.bind((host, port))
    except OSError:
      # Connections of a server that has ended may linger there. Not asked for at once:
      # two that both do may share a port until one of them listens.
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
  """Lists the names that a server without a key may be called by, in the header Host.

  On loopback those of loopback; elsewhere any, and a line on standard error that says
  so; `allowed` adds names, and elsewhere stands in place of "any".

  Args:
    host: where it listens.
    allowed: names that its user gives.
    risk: what strangers can do, for the line.
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
  """A request that its `Body` does not take.

  Attributes:
    field: where, as "messages[0].role"; "" for all of it.
    is_unknown: whether there is no such field.
  """

  def __init__(self, message: str, field: str, is_unknown: bool = False):
    """Takes the attributes, and the line that says what is wrong."""
    super().__init__(message)
    self.field = field
    self.is_unknown = is_unknown


_Model = TypeVar("_Model", bound=pydantic.BaseModel)


def read_fields(cls: type[_Model], value: Any) -> _Model:
  """Builds the model from a decoded request.

  Raises:
    BadField: one line on the first field that is wrong, with its value.
  """
  try:
    return cls.model_validate(value)
  except pydantic.ValidationError as e:
    fault = e.errors(include_url=False)[0]

  # --- Where: a path of names and positions, as ("messages", 0, "role").
  steps = (f"[{x}]" if isinstance(x, int) else f".{x}" for x in fault["loc"])
  field = "".join(steps).removeprefix(".")

  # --- What: in this project's words where pydantic's speak of inputs.
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
  """Reads the body of a request, which must say that it is JSON.

  Args:
    request: as it came.
    most: bytes of it.

  Raises:
    HTTPException: 415 of another content type, 413 too long, 499 the client has gone.
  """
  # --- What it says of itself: kind and length, before any of it is read.
  kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
  if kind != "application/json":
    raise HTTPException(415, "content-type must be application/json")
  too_long = HTTPException(413, f"a request has at most {most} bytes")
  length = request.headers.get("content-length", "")
  # Of twenty digits the number is too large whatever follows.
  if length.isdigit() and int(length[:20]) > most:
    raise too_long

  # --- What it holds: the header may have lied, or there was none.
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

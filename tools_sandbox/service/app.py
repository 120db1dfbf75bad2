"""The routes of the sandbox service; "The service" in README.md describes each.

Any program result is a 200 with a verdict. Other statuses are about the request or the
service: 400 (a field, named), 401 (token), 408 (the request took too long), 409 (the
session runs another cell), 410 (the session does not exist, or has ended), 413 (too
long), 415 (not JSON), 503 with Retry-After (full, or stopping: retry, or ask another
service), 504 (no slot before the deadline; nothing has run).

budget: all routes of one service.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import time
import typing
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tools_sandbox import http_server
from tools_sandbox.host.session import CELLS_OF_CPU
from tools_sandbox.jail.wire import LARGEST, LEASE_S, MAX_INPUT, MAX_OUTPUT, Limits
from tools_sandbox.service.run_queue import Refused, RunQueue

_FIRST_LEASE_S = 1.0  # a shorter lease could end before the client knows the session
_RETRY_S = 1  # most programs take less
_STATUS = {
  "full": 503,
  "stopping": 503,
  "late": 504,
  "gone": 499,
  "ended": 410,
  "busy": 409,
}

_Handler = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
  """Limits on requests.

  Attributes:
    token: the bearer token in requests; "" for none.
    limits: a run's default limits.
    most: the maximum of each limit.
    wait_s: seconds that a run without a deadline waits for a slot.
    max_body: a request's maximum size in bytes.
    lease_s: the maximum idle seconds before a session is closed.
  """

  token: str = ""
  limits: Limits = dataclasses.field(default_factory=Limits)
  most: Limits = dataclasses.field(
    default_factory=lambda: Limits(
      wall_s=60.0,
      cpu_s=60.0,
      memory_mb=4096,
      output_bytes=MAX_OUTPUT,
      file_mb=1024,
      processes=1024,
      disk_mb=1024,
      inodes=65536,
    )
  )
  wait_s: float = 60.0
  max_body: int = 8 << 20
  lease_s: float = LEASE_S

  def __post_init__(self):
    # The defaults must be within the maximum.
    check_most(self.limits, self.most)
    # Written so that NaN is refused too.
    if not 0 < self.wait_s <= LARGEST:
      raise ValueError(f"wait_s must be positive and finite, got {self.wait_s!r}")
    if self.max_body < 1:
      raise ValueError(f"max_body must be above 0, got {self.max_body!r}")
    if not _FIRST_LEASE_S <= self.lease_s <= LARGEST:
      raise ValueError(
        f"lease_s must be at least {_FIRST_LEASE_S:g} and finite, got {self.lease_s!r}"
      )


@dataclasses.dataclass(frozen=True)
class RunRequest:
  """A request for a run or a session; `deadline_s` counts from its arrival."""

  program: str
  stdin: str
  limits: Limits
  deadline_s: float
  lease_s: float = LEASE_S


def make_app(queue: RunQueue, config: ServiceConfig) -> Starlette:
  """Makes the application.

  Args:
    queue: runs the programs; not closed with the app.
    config: the limits. Without a token, the header Host must be a loopback name, so
      that no web page can reach the service under the page's own name.
  """

  open_session, cell, close_session = _session_handlers(queue, config)

  # --- The routes' handlers.
  async def run(request: Request) -> Response:
    with queue.place():  # before reading the body, so that places bound the memory
      task = await _read_request(request, config, read_run)
      # A run starts only while its whole time fits before the deadline.
      start_by = task.deadline_s - task.limits.wall_s
      gone = _gone(request)
      result = await queue.run(task.program, task.stdin, task.limits, start_by, gone)
      return JSONResponse(result.to_json())

  async def health(request: Request) -> Response:
    del request
    status = "stopping" if queue.draining else "ok"
    counts = {"slots": queue.slots, "busy": queue.busy, "waiting": queue.waiting}
    code = 200
    if queue.draining:
      code = 503
    return JSONResponse({"status": status, **counts}, code)

  async def metrics(request: Request) -> Response:
    del request
    return Response(queue.metrics(), media_type="text/plain; version=0.0.4")

  # --- The token, on all routes except /health.
  def guarded(handler: _Handler) -> _Handler:
    async def handle(request: Request) -> Response:
      if config.token and not _bears(request, config.token):
        headers = {"www-authenticate": "Bearer"}
        return _error("this service needs its bearer token", 401, headers)
      return await handler(request)

    return handle

  hosts = list(http_server.LOOPBACK)
  if config.token:
    hosts = ["*"]
  return Starlette(
    routes=[
      Route("/run", guarded(run), methods=["POST"]),
      Route("/session", guarded(open_session), methods=["POST"]),
      Route("/session/{name}", guarded(cell), methods=["POST"]),
      Route("/session/{name}", guarded(close_session), methods=["DELETE"]),
      Route("/metrics", guarded(metrics)),
      Route("/health", health),
    ],
    middleware=[http_server.check_host(hosts)],
    exception_handlers={Refused: _refused, HTTPException: _http_error},
  )


def _session_handlers(
  queue: RunQueue, config: ServiceConfig
) -> tuple[_Handler, _Handler, _Handler]:
  """Returns the handlers to open a session, to run a cell and to close a session."""

  # --- Open a session, which waits for a slot like a run, and keeps the slot.
  async def open_session(request: Request) -> Response:
    with queue.place():
      task = await _read_request(request, config, read_session)
      start_by = task.deadline_s - task.limits.wall_s
      try:
        name = await queue.open(task.limits, start_by, task.lease_s, _gone(request))
      except ValueError as e:  # this back-end has no sessions
        raise HTTPException(400, str(e)) from None
      except RuntimeError as e:
        raise HTTPException(500, str(e)) from None
      return JSONResponse({"session": name, "lease_s": task.lease_s})

  # --- Run a cell, which needs no place, because the session has its slot.
  async def cell(request: Request) -> Response:
    with queue.cells(request.path_params["name"]) as session:
      task = await _read_request(request, config, read_cell)
      result = await queue.cell(session, task.program, task.stdin, _gone(request))
      return JSONResponse({**result.to_json(), "alive": session.alive})

  # --- Close a session; also succeeds for an ended or unknown session.
  async def close_session(request: Request) -> Response:
    await queue.close(request.path_params["name"])
    return JSONResponse({})

  return open_session, cell, close_session


class _CellBody(http_server.Body):
  program: str
  stdin: str = ""


class _TimesBody(http_server.Body):
  timeout_s: float | None = None
  deadline_s: float | None = None


# The limits by name; requests call `wall_s` timeout_s.
_HINTS = typing.get_type_hints(Limits)
_LIMITS = {name: (_HINTS[name] | None, None) for name in _HINTS if name != "wall_s"}
_LimitsBody = pydantic.create_model("_LimitsBody", __base__=_TimesBody, **_LIMITS)


class _RunBody(_CellBody, _LimitsBody):
  pass


class _SessionBody(_LimitsBody):
  lease_s: float | None = None


def read_run(body: dict[str, Any], config: ServiceConfig) -> RunRequest:
  """Decodes a /run request.

  Raises:
    ValueError: a field is wrong; the message has its name, value and accepted values.
  """
  fields = http_server.read_fields(_RunBody, body)
  limits, deadline_s = _read_times(fields, config, config.most)
  return RunRequest(fields.program, fields.stdin, limits, deadline_s)


def read_session(body: dict[str, Any], config: ServiceConfig) -> RunRequest:
  """Decodes a /session request; raises as `read_run`.

  The limits apply to all cells together, but `timeout_s` and `output_bytes` to each.
  """
  # --- A user who mixes up the two routes gets the right one's name.
  if "program" in body:
    raise ValueError("program is a cell's: POST it to /session/NAME")
  fields = http_server.read_fields(_SessionBody, body)

  # --- The lease, and limits over all cells together.
  lease_s = fields.lease_s
  if lease_s is None:
    lease_s = config.lease_s
  if not _FIRST_LEASE_S <= lease_s <= config.lease_s:
    raise ValueError(
      f"lease_s must be a number from {_FIRST_LEASE_S:g} to {config.lease_s:g}, got "
      f"{lease_s!r}"
    )
  most = dataclasses.replace(config.most, cpu_s=config.most.cpu_s * CELLS_OF_CPU)
  limits, deadline_s = _read_times(fields, config, most)
  return RunRequest("", "", limits, deadline_s, lease_s)


def read_cell(body: dict[str, Any], config: ServiceConfig) -> RunRequest:
  """Decodes a /session/NAME request; raises as `read_run`."""
  fields = http_server.read_fields(_CellBody, body)
  return RunRequest(fields.program, fields.stdin, config.limits, math.inf)


def _read_times(
  fields: Any, config: ServiceConfig, most: Limits
) -> tuple[Limits, float]:
  """Reads a request's limits, and its seconds from arrival to deadline."""
  # --- The request's own limits; `timeout_s` sets wall seconds, and CPU seconds unless
  # the request gives `cpu_s`.
  changes = fields.model_dump(include=set(_LIMITS), exclude_none=True)
  if fields.timeout_s is not None:
    changes = {"cpu_s": fields.timeout_s, **changes, "wall_s": fields.timeout_s}
  try:
    limits = dataclasses.replace(config.limits, **changes)
    check_most(limits, most)
  except ValueError as e:
    # With the request's names, not those in `Limits`.
    text = str(e).removeprefix("limits.").replace("wall_s", "timeout_s", 1)
    raise ValueError(text) from None

  # --- The deadline, in seconds from arrival.
  deadline_s = fields.deadline_s
  if deadline_s is None:
    deadline_s = limits.wall_s + config.wait_s
  if not limits.wall_s < deadline_s <= LARGEST:
    raise ValueError(
      f"deadline_s must be a number above timeout_s ({limits.wall_s:g}), for a run "
      f"starts only while its whole time fits; got {deadline_s!r}"
    )
  return limits, deadline_s


def check_most(limits: Limits, most: Limits) -> None:
  """Refuses limits above `most`.

  Raises:
    ValueError: a limit is too high; the message names the field.
  """
  for field in dataclasses.fields(Limits):
    value = getattr(limits, field.name)
    top = getattr(most, field.name)
    if None not in (value, top) and value > top:
      raise ValueError(f"limits.{field.name} must be at most {top:g}, got {value:g}")


async def _read_request(
  request: Request,
  config: ServiceConfig,
  read: Callable[[dict[str, Any], ServiceConfig], RunRequest],
) -> RunRequest:
  """Reads a request's body; converts its deadline to `time.monotonic()` seconds."""
  # Before the body is read: a slow client uses up its own time.
  arrived = time.monotonic()
  body = await http_server.read_object(request, config.max_body)
  try:
    task = read(body, config)
  except ValueError as e:
    raise HTTPException(400, str(e)) from None
  if len(task.program) + len(task.stdin) > MAX_INPUT:
    raise HTTPException(413, f"program and stdin exceed {MAX_INPUT} characters")
  return dataclasses.replace(task, deadline_s=arrived + task.deadline_s)


async def _gone(request: Request) -> None:
  while (await request.receive())["type"] != "http.disconnect":
    pass


def _bears(request: Request, token: str) -> bool:
  # Compared in constant time, which does not reveal how many letters match.
  header = request.headers.get("authorization", "").encode()
  return hmac.compare_digest(header, f"Bearer {token}".encode())


def _error(
  message: str, status: int, headers: dict[str, str] | None = None
) -> JSONResponse:
  # Close the connection: most errors leave a body unread, which may be endless.
  headers = {"connection": "close", **(headers or {})}
  return JSONResponse({"error": message}, status, headers)


async def _refused(request: Request, e: Refused) -> Response:
  status = _STATUS[e.reason]
  headers = None
  if status == 503:
    headers = {"retry-after": str(_RETRY_S)}
  return _error(str(e), status, headers)


async def _http_error(request: Request, e: HTTPException) -> Response:
  return _error(e.detail, e.status_code)

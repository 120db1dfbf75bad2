"""Back-end `remote`: runs programs on services over HTTP, ours or SandboxFusion's.

Errors by cause: any program result is a Result; if no service answered in time, the
Result has the verdict `infrastructure`; if a service refuses the request (a limit above
the service's own, a program too long), a ValueError.

A run without an answer is retried on the next replica until its deadline: a run leaves
nothing behind, so running twice is harmless. A session stays with its replica, and a
cell is sent only once: an unanswered cell may have run.

budget: runs and sessions share replicas, and their errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from tools_sandbox.faults import Refused, SessionEnded, Unavailable
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.session import CellRefused, Session
from tools_sandbox.http_client import (
  REFUSES_REQUEST,
  BadReply,
  check_url,
  exchange,
  read_key,
  retry_after,
)
from tools_sandbox.jail import wire
from tools_sandbox.jail.wire import MAX_FRAME, Limits, Result, Verdict
from tools_sandbox.service import sandbox_fusion

APIS = ("tools_sandbox", "sandbox_fusion")
_PATHS = {"tools_sandbox": "/run", "sandbox_fusion": "/run_code"}
_T = TypeVar("_T")
_SESSION_ENDED = 410
_REFUSES_US = (401, 403, 404, 405)  # a wrong token or URL: asking again won't help
_CONNECT_S = 3.0  # a replica that does not connect in this time is skipped
_ASIDE_S = 5.0  # and is asked last for so long
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0
_WAY_S = 1.0  # waiting time reserved for the answer's way back


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
  """Remote sandbox services.

  Attributes:
    urls: the replicas; asked in turn, and the next one after a failure.
    token_file: a file with the replicas' bearer token.
    api: `tools_sandbox`, or `sandbox_fusion`, which supports only time and memory
      limits, and does not report out-of-memory.
    wait_s: seconds beyond a run's own time before the run fails: for a free slot,
      restarting replicas, and the network.
  """

  urls: tuple[str, ...]
  token_file: str | None = None
  api: str = "tools_sandbox"
  wait_s: float = 8.0

  def __post_init__(self):
    if self.api not in APIS:
      raise ValueError(f"api {self.api!r}; accepted: {', '.join(APIS)}")
    if isinstance(self.urls, str) or not self.urls:
      raise ValueError(f"urls must be a list of one or more, got {self.urls!r}")
    for url in self.urls:
      check_url("urls:", url)
    if not 0 < self.wait_s < math.inf:
      raise ValueError(f"wait_s must be positive and finite, got {self.wait_s}")


class _NoAnswer(Exception):
  """A replica gave no result.

  `pause` is the replica's requested seconds before a retry; `final` means no retry will
  succeed.
  """

  def __init__(self, fault: str, pause: float = 0.0, final: bool = False):
    super().__init__(fault)
    self.pause = pause
    self.final = final


class RemotePool:
  """Like `pool.SandboxPool`, but on services. Thread-safe; close it after use."""

  def __init__(self, config: RemoteConfig, limits: Limits | None = None):
    """Runs an empty program, so that a wrong URL or token fails at once.

    Args:
      config: the services.
      limits: a run's default limits; None for `Limits()`.

    Raises:
      ValueError: the token file cannot be read.
      RuntimeError: no service runs the program within `wait_s`; the message says why.
    """
    # --- The replicas' URLs; a URL may include or omit the path.
    self.limits = limits or Limits()
    self._config = config
    self._path = _PATHS[config.api]
    self._urls = [url.rstrip("/").removesuffix(self._path) for url in config.urls]
    token = read_key(config.token_file, "token_file")
    # No limit on connections: the services decide how many programs run.
    self._client = httpx.Client(
      headers={"authorization": f"Bearer {token}"} if token else None,
      limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
      trust_env=False,
    )

    # --- The next replica, and the recently failed ones.
    self._lock = threading.Lock()
    self._next = 0
    self._aside: dict[str, float] = {}  # failed URL -> until when
    self._closed = False

    # --- Ask once: a wrong URL or token fails now and not in every run.
    try:
      result = self.run("")
      if result.verdict == Verdict.INFRASTRUCTURE:
        raise RuntimeError(result.stderr)
    except BaseException:
      self._client.close()
      raise

  def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Result:
    """Runs a program on a service; see `SandboxPool.run`.

    Raises:
      TypeError: program or stdin is not a string.
      ValueError: program and stdin are too long, or a service refuses the request
        (`Refused`).
      RuntimeError: the pool is closed.
    """
    wire.check_texts(program, stdin)
    limits = limits or self.limits
    try:
      return self._of_any(
        limits.wall_s, lambda url, left: self._run(url, program, stdin, limits, left)
      )
    except Unavailable as e:
      return wire.failure(str(e))

  def session(
    self, limits: Limits | None = None, lease_s: float = wire.LEASE_S
  ) -> Session:
    """Opens a session on a service; waits for a slot up to `wait_s`.

    A service failure ends the session; an unreachable service keeps the slot until the
    lease ends.

    Raises:
      ValueError: these services have no sessions, or refuse the request.
      TimeoutError: no service opened a session in time; the message has the reason.
      RuntimeError: the pool is closed.
    """
    if self._config.api != "tools_sandbox":
      raise ValueError(f"services of api {self._config.api!r} have no sessions")
    limits = limits or self.limits

    def ask(url: str, left: float) -> Session:
      body = {**_limits(limits, left), "lease_s": lease_s}
      reply = self._reply("POST", f"{url}/session", body, left)
      if not isinstance(reply.get("session"), str):
        raise _NoAnswer(f"not a reply of /session: {reply!r:.200}")
      slot = _RemoteSlot(self, f"{url}/session/{reply['session']}", limits.wall_s)
      return Session(slot, lease_s)

    try:
      return self._of_any(limits.wall_s, ask)
    except Unavailable as e:
      raise TimeoutError(str(e)) from None

  def _of_any(self, wall_s: float, ask: Callable[[str, float], _T]) -> _T:
    """Asks the replicas in turn; returns the first answer.

    Args:
      wall_s: the request's own seconds; they must fit before the deadline.
      ask: asks one replica, given its URL and the remaining seconds.

    Raises:
      Unavailable: no replica answered in time.
      RuntimeError: the pool is closed.
    """
    deadline = time.monotonic() + wall_s + self._config.wait_s
    replicas = self._in_turn()
    fault = "no time was left"
    attempt = 0
    while replicas:
      # --- Each replica once.
      pause = 0.0
      for url in list(replicas):
        left = deadline - time.monotonic()
        if left <= wall_s:  # a run could not reach its end
          raise _unavailable(fault)
        if self._closed:
          raise RuntimeError("the sandbox pool is closed")
        try:
          return ask(url, left)
        except _NoAnswer as e:
          fault = f"{url}: {e}"
          pause = max(pause, e.pause)
          if e.final:
            replicas.remove(url)

      # --- Then a pause: the longest requested by a replica, or our own. The random
      # factor keeps callers from returning all at once.
      own = min(_FIRST_PAUSE_S * 2**attempt, _LAST_PAUSE_S)
      pause = max(pause, own) * random.uniform(0.5, 1.0)
      attempt += 1
      if replicas:  # not beyond the last moment for a start
        left = deadline - wall_s - time.monotonic()
        time.sleep(min(pause, max(left, 0.0)))
    raise _unavailable(fault)

  def close(self) -> None:
    """Closes the connections; runs in flight end as `infrastructure`, or raise."""
    self._closed = True
    self._client.close()

  def _in_turn(self) -> list[str]:
    """Returns all replicas: the next in turn first, recently failed ones last."""
    with self._lock:
      first = self._next
      self._next = (first + 1) % len(self._urls)
    order = self._urls[first:] + self._urls[:first]
    now = time.monotonic()
    return sorted(order, key=lambda url: self._aside.get(url, 0.0) > now)

  def _run(
    self, url: str, program: str, stdin: str, limits: Limits, left: float
  ) -> Result:
    """Runs a program on one replica; raises as `_reply`."""
    # Each API has its own request and reply for the same run.
    ours = self._config.api == "tools_sandbox"
    if ours:
      body = {"program": program, "stdin": stdin, **_limits(limits, left)}
    else:
      body = sandbox_fusion.write_request(program, stdin, limits)
    reply = self._reply("POST", url + self._path, body, left)
    try:
      if ours:
        return Result.from_json(reply)
      return sandbox_fusion.read_reply(reply, limits)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as e:
      raise _NoAnswer(f"not a reply of {self._config.api}: {e!r:.200}") from e

  def _reply(self, method: str, url: str, body: Any, left: float) -> dict[str, Any]:
    """Asks one replica once; returns its JSON answer.

    Raises:
      _NoAnswer: the replica gave no answer.
      SessionEnded: the session does not exist, or has ended.
      ValueError: the replica refuses the request.
    """
    # --- The exchange; an unreachable replica is asked last for a while.
    try:
      status, headers, data = exchange(
        self._client, method, url, body, left, _CONNECT_S, MAX_FRAME
      )
    except (httpx.TransportError, httpx.DecodingError, TimeoutError) as e:
      base = url.removesuffix(self._path).partition("/session")[0]
      self._aside[base] = time.monotonic() + _ASIDE_S
      raise _NoAnswer(type(e).__name__) from e
    except BadReply as e:
      raise _NoAnswer(str(e)) from e

    # --- The status: the cause, and whether another replica may succeed.
    if status in REFUSES_REQUEST:
      raise Refused(f"{url} refuses the run: {data[:500].decode('utf-8', 'replace')}")
    if status == _SESSION_ENDED:
      raise SessionEnded("the session has ended; open another one")
    if status != 200:
      pause = retry_after(headers.get("retry-after", ""))
      raise _NoAnswer(f"status {status}", pause, status in _REFUSES_US)

    # --- The answer. A proxy may answer in the service's place: this counts as no
    # answer.
    try:
      reply = json.loads(data)
    except (ValueError, RecursionError) as e:
      raise _NoAnswer(f"not a reply of {self._config.api}: {e!r:.200}") from e
    if not isinstance(reply, dict):
      raise _NoAnswer(f"not a reply of {self._config.api}: {reply!r:.200}")
    return reply


class _RemoteSlot:
  """A session's slot on a service. See `session.SessionSlot`."""

  def __init__(self, pool: RemotePool, url: str, wall_s: float):
    self._pool = pool
    self._url = url
    self._wall_s = wall_s

  def run(self, program: str, stdin: str, cancel: Cancel | None) -> tuple[Result, bool]:
    # Ask once, and only this replica: the variables are there.
    body = {"program": program, "stdin": stdin}
    left = self._wall_s + self._pool._config.wait_s
    try:
      reply = self._pool._reply("POST", self._url, body, left)
      alive = reply.pop("alive", False) is True
      try:
        return Result.from_json(reply), alive
      except (ValueError, TypeError) as e:
        raise _NoAnswer(f"not a reply of /session: {e!r:.200}") from e
    except _NoAnswer as e:
      self.close()  # the session may live on there, and hold its slot
      return wire.failure(f"the session's service fails: {e}"), False
    except SessionEnded:
      raise
    except ValueError as e:
      raise CellRefused(str(e)) from e
    except BaseException:  # interrupted: the cell's effects are unknown
      self.close()
      raise

  def close(self) -> None:
    # Errors do not matter: the lease ends the session there.
    with contextlib.suppress(_NoAnswer, SessionEnded, ValueError, RuntimeError):
      self._pool._reply("DELETE", self._url, None, _CONNECT_S)


def _limits(limits: Limits, left: float) -> dict[str, Any]:
  """Returns the limits in our services' format."""
  # Without None values: older services do not know these fields.
  row = {name: value for name, value in limits.to_json().items() if value is not None}
  wall_s = row.pop("wall_s")
  # The service's deadline comes before ours, so that its refusal arrives in time.
  deadline_s = left - min(_WAY_S, (left - wall_s) / 2)
  return {**row, "timeout_s": wall_s, "deadline_s": deadline_s}


def _unavailable(fault: str) -> Unavailable:
  return Unavailable(f"no sandbox service answers; the last fault was {fault}")

"""Back-end `remote`: runs programs on services over HTTP, ours or SandboxFusion's.

Whose failure it is: whatever the program did comes back as a Result of its own; that no
service answered in time is a Result with verdict `infrastructure`; that a service
refuses what was asked (a limit above its own, a program too long) is a ValueError.

A run that got no answer is asked again, on the next replica, until its deadline: it
leaves nothing behind, so twice is as good as once.
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from typing import Any

import httpx

from tools_sandbox import sandbox_fusion
from tools_sandbox.service import read_key, retry_after
from tools_sandbox.wire import MAX_FRAME, MAX_INPUT, Limits, Result, Verdict

APIS = ("tools_sandbox", "sandbox_fusion")
_PATHS = {"tools_sandbox": "/run", "sandbox_fusion": "/run_code"}
_REFUSES_REQUEST = (400, 413, 415, 422)
_REFUSES_US = (401, 403, 404, 405)  # a wrong token or URL: asking again won't help
_CONNECT_S = 3.0  # a replica that does not pick up in this time is passed over
_ASIDE_S = 5.0  # and is asked last for so long
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_WAY_S = 1.0  # kept of a run's waiting time for the answer's way back


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
  """Services that run programs.

  Attributes:
    urls: of the replicas; asked in turn, the next one where one fails.
    token_file: a file with the word that they want to see.
    api: `tools_sandbox`, or `sandbox_fusion`, which knows of a run's limits only time
      and memory, and does not say that a program ran out of memory.
    wait_s: seconds beyond its own time that a run may take before it is given up: for
      a free slot, for replicas that come back, and for its way.
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
      if not url.startswith(("http://", "https://")):
        raise ValueError(f"urls: {url!r} must start with http:// or https://")
    if self.wait_s <= 0:
      raise ValueError(f"wait_s must be above 0, got {self.wait_s}")


class _NoAnswer(Exception):
  """A replica gave no result; `pause` are the seconds it wants to be left alone.

  `final` says that it never will.
  """

  def __init__(self, fault: str, pause: float = 0.0, final: bool = False):
    super().__init__(fault)
    self.pause, self.final = pause, final


class RemotePool:
  """As `pool.SandboxPool`, but on services. Thread-safe; close it after use."""

  def __init__(self, config: RemoteConfig, limits: Limits | None = None):
    """Runs an empty program, so that a wrong URL or token is known at once.

    Args:
      config: where.
      limits: what a run may use unless it says otherwise; None for `Limits()`.

    Raises:
      ValueError: the token's file cannot be read.
      RuntimeError: no service runs it within `wait_s`; the message says why.
    """
    self.limits = limits or Limits()
    self._config = config
    path = _PATHS[config.api]
    self._urls = [url.rstrip("/").removesuffix(path) + path for url in config.urls]
    token = read_key(config.token_file, "token_file")
    # As many connections as there are callers: how many run is the services' to say.
    self._client = httpx.Client(
      headers={"authorization": f"Bearer {token}"} if token else None,
      limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
      trust_env=False,
    )
    self._lock = threading.Lock()
    self._next = 0
    self._aside: dict[str, float] = {}  # URL -> until when
    self._closed = False
    try:
      result = self.run("")
    except BaseException:
      self._client.close()
      raise
    if result.verdict == Verdict.INFRASTRUCTURE:
      self._client.close()
      raise RuntimeError(result.stderr)

  def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Result:
    """Runs a program on one of the services; see `SandboxPool.run`.

    Raises:
      TypeError: program or stdin is not a string.
      ValueError: together they are too long, or a service refuses what is asked for.
      RuntimeError: this is closed.
    """
    for name, value in (("program", program), ("stdin", stdin)):
      if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    if len(program) + len(stdin) > MAX_INPUT:
      raise ValueError(f"program and stdin exceed {MAX_INPUT} characters")
    limits = limits or self.limits
    deadline = time.monotonic() + limits.wall_s + self._config.wait_s
    replicas, fault = self._in_turn(), "no time was left"
    attempt = 0
    while replicas:
      pause = 0.0
      for url in list(replicas):
        left = deadline - time.monotonic()
        if left <= limits.wall_s:  # it could not run to its end
          return _failure(fault)
        if self._closed:
          raise RuntimeError("the sandbox pool is closed")
        try:
          return self._ask(url, program, stdin, limits, left)
        except _NoAnswer as e:
          fault = f"{url}: {e}"
          pause = max(pause, e.pause)
          if e.final:
            replicas.remove(url)
      # Full pauses at once would bring all callers back at the same moment.
      own = min(_FIRST_PAUSE_S * 2**attempt, _LAST_PAUSE_S)
      pause = max(pause, own) * random.uniform(0.5, 1.0)
      attempt += 1
      if replicas:
        left = deadline - limits.wall_s - time.monotonic()
        time.sleep(min(pause, max(left, 0.0)))
    return _failure(fault)

  def close(self) -> None:
    """Closes the connections; runs in flight end as `infrastructure`, or raise."""
    self._closed = True
    self._client.close()

  def _in_turn(self) -> list[str]:
    """All replicas: the next in turn first, those that failed just now last."""
    with self._lock:
      first = self._next
      self._next = (first + 1) % len(self._urls)
    order = self._urls[first:] + self._urls[:first]
    now = time.monotonic()
    return sorted(order, key=lambda url: self._aside.get(url, 0.0) > now)

  def _ask(
    self, url: str, program: str, stdin: str, limits: Limits, left: float
  ) -> Result:
    """Asks one replica once.

    Raises:
      _NoAnswer: it gave no result.
      ValueError: it refuses the request.
    """
    ours = self._config.api == "tools_sandbox"
    if ours:
      row = limits.to_json()
      wall_s = row.pop("wall_s")
      deadline_s = left - min(_WAY_S, (left - wall_s) / 2)
      times = {"timeout_s": wall_s, "deadline_s": deadline_s}
      body = {"program": program, "stdin": stdin, **row, **times}
    else:
      body = sandbox_fusion.write_request(program, stdin, limits)
    try:
      status, headers, data = self._exchange(url, body, left)
    except (httpx.TransportError, httpx.DecodingError, TimeoutError) as e:
      self._aside[url] = time.monotonic() + _ASIDE_S
      raise _NoAnswer(type(e).__name__) from e
    if status in _REFUSES_REQUEST:
      raise ValueError(
        f"{url} refuses the run: {data[:500].decode('utf-8', 'replace')}"
      )
    if status != 200:
      pause = retry_after(headers.get("retry-after", ""))
      raise _NoAnswer(f"status {status}", pause, status in _REFUSES_US)
    try:
      reply = json.loads(data)
      if ours:
        return Result.from_json(reply)
      return sandbox_fusion.read_reply(reply, limits)
    except (ValueError, TypeError, KeyError, RecursionError) as e:
      raise _NoAnswer(f"not a reply of {self._config.api}: {e!r:.200}") from e

  def _exchange(
    self, url: str, body: dict[str, Any], left: float
  ) -> tuple[int, httpx.Headers, bytes]:
    deadline = time.monotonic() + left
    timeout = httpx.Timeout(left, connect=min(_CONNECT_S, left))
    content = json.dumps(body).encode("ascii")  # lone surrogates too
    headers = {"content-type": "application/json"}
    data = bytearray()
    with self._client.stream(
      "POST", url, content=content, headers=headers, timeout=timeout
    ) as response:
      for chunk in response.iter_bytes():
        data += chunk
        if time.monotonic() > deadline:
          raise TimeoutError
        if len(data) > MAX_FRAME:
          raise _NoAnswer(f"a reply of more than {MAX_FRAME} bytes")
      return response.status_code, response.headers, bytes(data)


def _failure(fault: str) -> Result:
  reason = f"no sandbox service answers; the last fault was {fault}"
  return Result("", reason, None, Verdict.INFRASTRUCTURE, 0.0)

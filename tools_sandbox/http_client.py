"""JSON over HTTP to a service that we run or pay for: retries, pace, one deadline.

Unlike pages, a service is trusted to be who the config says; it may still be down, slow
or broken, and that is never the model's fault.
"""

from __future__ import annotations

import email.utils
import json
import random
import threading
import time
from typing import Any

import httpx

from tools_sandbox.faults import ToolFault, Unavailable

_REFUSES_CONTENT = (400, 413, 415, 422)
_FIRST_PAUSE_S = 0.25
_MAX_BYTES = 16_000_000  # of a reply
_JSON = {"content-type": "application/json"}


def read_key(path: str | None, field: str = "key_file") -> str:
  """The key in a file, so that no config, log or record holds it; "" for no file.

  Args:
    path: of the file.
    field: what a message calls the option that names it.

  Raises:
    ValueError: the file cannot be read, or holds no single word.
  """
  if path is None:
    return ""
  try:
    with open(path, encoding="ascii") as f:
      words = f.read(4096).split()
  except (OSError, UnicodeDecodeError) as e:
    raise ValueError(f"{field} {path}: {type(e).__name__}") from None
  if len(words) != 1:
    raise ValueError(f"{field} {path} must hold one word, the key")
  return words[0]


class Service:
  """POSTs JSON to one URL. Thread-safe; close it after use."""

  def __init__(
    self,
    name: str,
    url: str,
    headers: dict[str, str] | None = None,
    retries: int = 3,
    per_second: float = 0.0,
  ):
    """Opens a connection pool; sends nothing yet.

    Args:
      name: what messages call it.
      url: where requests go.
      headers: of every request, keys among them; never logged or repeated in errors.
      retries: attempts beyond the first on 408, 409, 429, 5xx, cut connections and
        replies that are not JSON.
      per_second: requests sent per second at most; 0 for no limit.

    Raises:
      ValueError: the URL is not http or https.
    """
    if not url.startswith(("http://", "https://")):
      raise ValueError(f"{name}: {url!r} must start with http:// or https://")
    self._name, self._url, self._retries = name, url, retries
    self._gap = 1.0 / per_second if per_second > 0 else 0.0
    self._next, self._lock = 0.0, threading.Lock()
    self._client = httpx.Client(headers=headers, trust_env=False)

  def close(self) -> None:
    """Closes the connections."""
    self._client.close()

  def ask(self, body: dict[str, Any], seconds: float) -> Any:
    """The reply to a request, decoded.

    Args:
      body: sent as JSON.
      seconds: for all attempts and the pauses between them.

    Raises:
      ToolFault: the service refuses what this request asks for (status 400, 413, 415
        or 422).
      Unavailable: no usable reply; the message names the service and the last fault.
    """
    content = json.dumps(body).encode("ascii")  # lone surrogates too
    deadline = time.monotonic() + seconds
    attempt, fault = 0, "no time was left"
    while True:
      pause = 0.0
      try:
        self._wait_turn(deadline)
        status, headers, data = self._exchange(content, deadline)
        if status == 200:
          return json.loads(data)
        fault = f"status {status}"
        if status in _REFUSES_CONTENT:
          raise ToolFault(f"{self._name} refuses the request ({fault})")
        if status not in (408, 409, 429) and status < 500:
          break
        pause = retry_after(headers.get("retry-after", ""))
      except (httpx.TimeoutException, TimeoutError):
        fault = f"no reply within {seconds:.3g} s"
        break
      except httpx.RequestError as e:
        fault = type(e).__name__
      except (ValueError, RecursionError):
        fault = "a reply that is not JSON"
      attempt += 1
      # Full pauses at once would bring all callers back at the same moment.
      own = _FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
      pause = max(pause, own)
      if attempt > self._retries or time.monotonic() + pause >= deadline:
        break
      time.sleep(pause)
    raise Unavailable(f"{self._name} gives no usable reply: {fault}")

  def broken(self, what: str) -> Unavailable:
    """The error for a reply that is JSON but not the service's own."""
    return Unavailable(f"{self._name} gives no usable reply: {what}")

  def _wait_turn(self, deadline: float) -> None:
    with self._lock:
      now = time.monotonic()
      turn = max(now, self._next)
      if turn >= deadline:
        raise TimeoutError
      self._next = turn + self._gap
    time.sleep(turn - now)

  def _exchange(
    self, content: bytes, deadline: float
  ) -> tuple[int, httpx.Headers, bytes]:
    left = deadline - time.monotonic()
    if left <= 0:
      raise TimeoutError
    data = bytearray()
    with self._client.stream(
      "POST", self._url, content=content, headers=_JSON, timeout=left
    ) as response:
      for chunk in response.iter_bytes():
        data += chunk
        if time.monotonic() > deadline:
          raise TimeoutError
        if len(data) > _MAX_BYTES:
          raise ValueError("too long")
      return response.status_code, response.headers, bytes(data)


def retry_after(header: str) -> float:
  """Seconds that a Retry-After header asks for: a number or an HTTP date; 0 if none."""
  try:
    seconds = float(header)
    return seconds if seconds > 0 else 0.0
  except ValueError:
    pass
  try:
    when = email.utils.parsedate_to_datetime(header)
  except (ValueError, TypeError):
    return 0.0
  return max(when.timestamp() - time.time(), 0.0)

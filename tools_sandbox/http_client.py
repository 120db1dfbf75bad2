"""JSON over HTTP to a trusted service: retries, rate limit, one deadline.

Unlike a web page, the service is trusted. It may be down, slow or broken, which is
never the model's fault.

budget: retries, pace and deadline of a request depend on each other.
"""

from __future__ import annotations

import email.utils
import ipaddress
import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from tools_sandbox.faults import ToolFault, Unavailable

REFUSES_REQUEST = (400, 413, 415, 422)
_PASSING = (408, 409, 429)  # temporary, as are 500 and above
_MAX_BYTES = 16_000_000  # of a reply
_JSON = {"content-type": "application/json"}


class Fault(NamedTuple):
  """One attempt's failure: our message, and the service's text."""

  message: str
  detail: str = ""

  def __str__(self) -> str:
    return f"{self.message}: {self.detail}" if self.detail else self.message


class BadReply(ValueError):
  """A reply that cannot be used; its arguments are the fields of a `Fault`."""


class NoReply(Exception):
  """No usable reply came.

  Attributes:
    faults: the faults of all attempts, in order; at least one.
    refusal: the last status if a retry cannot change it, else 0.
    text: the refusal's body.
  """

  def __init__(self, faults: Sequence[Fault], refusal: int = 0, text: str = ""):
    """Takes the attributes."""
    super().__init__(str(faults[-1]))
    self.faults = tuple(faults)
    self.refusal = refusal
    self.text = text


def check_url(name: str, url: str) -> None:
  """Raises a ValueError, which begins with `name`, if a URL is not http or https."""
  if not url.startswith(("http://", "https://")):
    raise ValueError(f"{name} {url!r} must start with http:// or https://")


def read_key(path: str | None, field: str = "key_file") -> str:
  """Reads a key from a file, to keep it out of configs and logs; "" for no file.

  Args:
    path: the file.
    field: the option's name, for messages.

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
  # Several words mean a wrong file, whose text would go out in a header.
  if len(words) != 1 or not words[0].isprintable():
    raise ValueError(f"{field} {path} must hold one word, the key")
  return words[0]


def read_json(data: bytes) -> Any:
  """Reads the JSON value in a reply's body.

  Raises:
    BadReply: the body is not JSON.
  """
  try:
    return json.loads(data)
  except (ValueError, RecursionError):
    raise BadReply("a reply that is not JSON") from None


class Retries:
  """Records the faults of one request's attempts and decides when to retry.

  `Service` makes the attempts in its caller's thread. A client with many concurrent
  requests, which may be cancelled, can make them on an event loop by the same rules.

  Attributes:
    faults: the faults so far, in order.
  """

  def __init__(self, retries: int, backoff_s: float, max_pause_s: float = math.inf):
    """See `Service` for the arguments."""
    self.faults: list[Fault] = []
    self._retries = retries
    self._backoff_s = backoff_s
    self._max_pause_s = max_pause_s

  def refused(self, status: int, headers: httpx.Headers, text: str) -> float:
    """Notes a status other than 200; returns seconds to wait before the next attempt.

    Raises:
      NoReply: a retry cannot change the status, or as in `failed`.
    """
    # Only the start, as a literal: an error page may be long and span lines.
    fault = Fault(f"status {status}", repr(text[:200]))
    if status not in _PASSING and status < 500:
      raise NoReply([*self.faults, fault], status, text)
    return self.failed(fault, retry_after(headers.get("retry-after", "")))

  def failed(self, fault: Fault, requested_s: float = 0.0) -> float:
    """Notes a fault; returns seconds to wait before the next attempt.

    Args:
      fault: the attempt's failure.
      requested_s: the service's requested pause, in seconds.

    Raises:
      NoReply: no attempt is left, or the service asks for too long a pause.
    """
    if requested_s > self._max_pause_s:
      wish = f"it asks to wait {requested_s:.0f} s, "
      wish += f"the longest pause is {self._max_pause_s:.0f} s"
      fault = Fault(fault.message, f"{fault.detail}; {wish}")
    self.faults.append(fault)

    # --- Give up, or pause: twice as long after each fault.
    if requested_s > self._max_pause_s or len(self.faults) > self._retries:
      raise NoReply(self.faults)
    pause = self._backoff_s * 2.0 ** (len(self.faults) - 1)
    pause = min(pause, self._max_pause_s)
    # Random, because equal pauses would bring all callers back at the same moment.
    return max(requested_s, pause * random.uniform(0.5, 1.0))


class Service:
  """POSTs JSON to one URL. Thread-safe; close it after use."""

  def __init__(
    self,
    name: str,
    url: str,
    headers: dict[str, str] | None = None,
    retries: int = 3,
    per_second: float = 0.0,
    backoff_s: float = 0.25,
    max_pause_s: float = math.inf,
    timeout_s: float = math.inf,
    use_proxies: bool = False,
  ):
    """Opens a connection pool; sends nothing yet.

    Args:
      name: the service's name in messages.
      url: the URL for requests.
      headers: headers of every request, keys included; never logged or repeated in
        errors.
      retries: attempts beyond the first on 408, 409, 429, 5xx, timeouts, cut
        connections and unusable replies.
      per_second: the most requests per second; 0 for no limit.
      backoff_s: seconds before the first retry; doubled for each later retry.
      max_pause_s: the longest pause; if the service asks for a longer one, the request
        fails.
      timeout_s: seconds for one attempt.
      use_proxies: whether to use the environment's proxies; never used for loopback.

    Raises:
      ValueError: the URL is not http or https.
    """
    check_url(f"{name}:", url)
    # --- The address, and the attempts.
    self._name = name
    self._url = url
    self._retries = retries
    self._backoff_s = backoff_s
    self._max_pause_s = max_pause_s
    self._timeout_s = timeout_s

    # --- The pace: seconds between two requests, and when the next one may be sent.
    self._interval_s = 1.0 / per_second if per_second > 0 else 0.0
    self._next = 0.0
    self._lock = threading.Lock()

    # --- Without proxies httpx must not look for them in the environment.
    trust_env = use_proxies and not _is_loopback(url)
    self._client = httpx.Client(headers=headers, trust_env=trust_env)

  def close(self) -> None:
    """Closes the connections."""
    self._client.close()

  def ask(
    self, body: Any, seconds: float, read: Callable[[bytes], Any] = read_json
  ) -> Any:
    """Sends a tool's request: returns the reply, or raises an error with its cause.

    Raises:
      ToolFault: the service refuses this request (status 400, 413, 415 or 422).
      Unavailable: no usable reply; the message names the service and the last fault,
        and does not repeat the service's text.
    """
    try:
      return self.send(body, seconds, read)[0]
    except NoReply as e:
      message = e.faults[-1].message  # our words: a model reads them
      if e.refusal in REFUSES_REQUEST:
        raise ToolFault(f"{self._name} refuses the request ({message})") from None
      raise self.broken(message) from None

  def send(
    self,
    body: Any,
    seconds: float = math.inf,
    read: Callable[[bytes], Any] = read_json,
  ) -> tuple[Any, tuple[Fault, ...]]:
    """Returns the first usable reply, and the faults of earlier attempts.

    Args:
      body: sent as JSON.
      seconds: the time for all attempts and the pauses between them.
      read: converts a reply's body to a value, or raises BadReply for another attempt.

    Raises:
      NoReply: all attempts failed, the time is over, or the service refuses.
    """
    deadline = time.monotonic() + seconds
    retries = Retries(self._retries, self._backoff_s, self._max_pause_s)
    while True:
      # --- One attempt: wait for the rate limit, then use the remaining time.
      try:
        self._wait_turn(deadline)
        left = min(deadline - time.monotonic(), self._timeout_s)
        status, headers, data = exchange(self._client, "POST", self._url, body, left)
        if status == 200:
          return read(data), tuple(retries.faults)
        text = data.decode("utf-8", "replace")
        pause = retries.refused(status, headers, text)

      # --- The fault, and the pause before a retry; NoReply after the last attempt.
      except (httpx.TimeoutException, TimeoutError):
        limit = min(seconds, self._timeout_s)
        pause = retries.failed(Fault(f"no reply within {limit:.3g} s"))
      except httpx.RequestError as e:
        pause = retries.failed(Fault(type(e).__name__, str(e)))
      except BadReply as e:
        pause = retries.failed(Fault(*e.args))
      if time.monotonic() + pause >= deadline:  # no time for another attempt
        raise NoReply(retries.faults)
      time.sleep(pause)

  def broken(self, message: str) -> Unavailable:
    """Makes the error for a missing reply, or one without the service's fields."""
    return Unavailable(f"{self._name} gives no usable reply: {message}")

  def _wait_turn(self, deadline: float) -> None:
    # Each caller takes the next free moment, then sleeps until then without the lock.
    with self._lock:
      now = time.monotonic()
      turn = max(now, self._next)
      if turn >= deadline:
        raise TimeoutError
      self._next = turn + self._interval_s
    time.sleep(turn - now)


def exchange(
  client: httpx.Client,
  method: str,
  url: str,
  body: Any,
  seconds: float,
  connect_s: float = math.inf,
  most: int = _MAX_BYTES,
) -> tuple[int, httpx.Headers, bytes]:
  """Sends one request; returns the response's status, headers and body.

  Args:
    client: sends the request.
    method: the HTTP method.
    url: the address.
    body: sent as JSON.
    seconds: the time for the whole exchange, slow bodies included.
    connect_s: the time for the connection alone.
    most: the most bytes in the body.

  Raises:
    httpx.RequestError, TimeoutError: no whole response came.
    BadReply: the body is longer than `most`.
  """
  if seconds <= 0:
    raise TimeoutError
  deadline = time.monotonic() + seconds
  content = json.dumps(body).encode("ascii")  # ASCII: encodes lone surrogates too
  # httpx takes None for "no limit".
  waits = [None if s == math.inf else s for s in (seconds, min(connect_s, seconds))]
  timeout = httpx.Timeout(waits[0], connect=waits[1])
  # Total time and size are checked here: httpx's timeout applies to one read, so a slow
  # body never exceeds it, and an unpacked body can be much longer than its header says.
  data = bytearray()
  with client.stream(
    method, url, content=content, headers=_JSON, timeout=timeout
  ) as response:
    for chunk in response.iter_bytes():
      data += chunk
      if time.monotonic() > deadline:
        raise TimeoutError
      if len(data) > most:
        raise BadReply(f"a reply of over {most} bytes")
    return response.status_code, response.headers, bytes(data)


def retry_after(header: str) -> float:
  """Reads the seconds of a Retry-After header: a number or an HTTP date; 0 if none."""
  # --- A number; NaN and negative values mean no pause.
  try:
    seconds = float(header)
    if seconds > 0:
      return seconds
    return 0.0
  except ValueError:
    pass

  # --- A date, by this machine's clock.
  try:
    when = email.utils.parsedate_to_datetime(header)
  except (ValueError, TypeError):
    return 0.0
  return max(when.timestamp() - time.time(), 0.0)


def _is_loopback(url: str) -> bool:
  # Decided from the URL alone, without a DNS lookup.
  host = httpx.URL(url).host
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost" or host.endswith(".localhost")

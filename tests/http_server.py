"""A real HTTP server on loopback; a test sets the action for each path."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable


class Request(http.server.BaseHTTPRequestHandler):
  """One request; its responder may write any bytes."""

  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True  # otherwise replies wait for a delayed ACK

  def handle(self):
    server = self.server
    with server.lock:
      server.clients += 1
    try:
      with contextlib.suppress(OSError):  # clients hang up early on purpose
        super().handle()
    finally:
      with server.lock:
        server.clients -= 1

  def do_GET(self):
    server = self.server
    self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    self.close_connection = not server.keep_alive
    server.requests.append(copy.copy(self))  # self handles the next one too
    with contextlib.suppress(OSError):
      server.respond(self)

  do_POST = do_DELETE = do_PUT = do_HEAD = do_GET

  def wait_for_hangup(self, release: threading.Event) -> bool:
    """Waits until the client hangs up (True) or `release` is set (False)."""
    while not release.wait(0.02):
      readable, _, _ = select.select([self.connection], [], [], 0)
      if readable and not self.connection.recv(1, socket.MSG_PEEK):
        return True
    return False

  @property
  def json(self):
    """The request's body, decoded."""
    return json.loads(self.body or b"{}")

  def send(self, data: bytes, kind: str | None = "text/html", status=200, **headers):
    """Sends a complete reply; underscores in header names become hyphens."""
    self.raw(status, kind, Content_Length=str(len(data)), **headers)
    self.wfile.write(data)

  def send_json(self, value, status=200, **headers):
    """Sends a JSON reply."""
    self.send(json.dumps(value).encode(), "application/json", status, **headers)

  def raw(self, status=200, kind: str | None = "text/html", **headers):
    """Sends only a reply's status and headers."""
    self.send_response(status)
    if self.close_connection:
      # Announce it: a client that reuses the connection would lose its next request
      # if it comes before this thread hangs up.
      self.send_header("Connection", "close")
    if kind is not None:
      self.send_header("Content-Type", kind)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.end_headers()

  def cut(self):
    """Sends a reply shorter than its Content-Length."""
    self.close_connection = True
    self.raw(Content_Length="500")
    self.wfile.write(b"{")

  def drip(self, data: bytes, every: float = 0.05, count: int = 12_000):
    """Sends the same few bytes repeatedly."""
    for _ in range(count):
      self.wfile.write(data)
      self.wfile.flush()
      if self.server.stopped.wait(every):
        return

  def log_message(self, *unused):
    """Keeps requests out of a test's output."""


class Server(http.server.ThreadingHTTPServer):
  """Runs for the length of a `with` block.

  Attributes:
    url: its address.
    actions: path -> responder; other paths get 404.
    requests: every request, in order.
    clients: connections with a running handler.
    stopped: set at the end; waiting responders wait for this.
  """

  daemon_threads = True
  keep_alive = False

  def __init__(self, host: str = "127.0.0.1"):
    super().__init__((host, 0), Request)
    self.actions: dict[str, Callable[[Request], object]] = {}
    self.requests: list[Request] = []
    self.clients = 0
    self.lock, self.stopped = threading.Lock(), threading.Event()
    self.port = self.server_address[1]
    self.url = f"http://{host}:{self.port}"

  def respond(self, request: Request) -> None:
    """Answers a request."""
    action = self.actions.get(request.path.partition("?")[0])
    if action is None:
      request.send(b"no such page", status=404)
    else:
      action(request)

  def handle_error(self, request, address):
    if not isinstance(sys.exception(), OSError):
      super().handle_error(request, address)

  def __enter__(self):
    self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
    self._thread.start()
    return self

  def __exit__(self, *error):
    self.stopped.set()
    self.shutdown()
    self.server_close()
    self._thread.join()


NEVER = 600.0  # seconds of silence, or of dripping, instead of an answer
LONG = 60.0  # seconds; too long for anything healthy, even on a slow machine


def within() -> Callable[[], None]:
  """Returns a check that nothing has waited `NEVER` seconds since this call."""
  began = time.monotonic()

  def check() -> None:
    assert time.monotonic() - began < NEVER / 2

  return check

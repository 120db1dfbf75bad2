"""A real HTTP server on loopback whose every path does what a test gave it."""

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
  """One request; whoever responds to it writes what it likes."""

  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True  # else every reply waits for a delayed ACK

  def handle(self):
    server = self.server
    with server.lock:
      server.clients += 1
    try:
      with contextlib.suppress(OSError):  # clients here leave early, on purpose
        super().handle()
    finally:
      with server.lock:
        server.clients -= 1

  def do_GET(self):
    server = self.server
    self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    self.close_connection = not server.keep_alive
    server.requests.append(copy.copy(self))  # it takes the connection's next one, too
    with contextlib.suppress(OSError):
      server.respond(self)

  do_POST = do_DELETE = do_PUT = do_HEAD = do_GET

  def wait_for_hangup(self, release: threading.Event) -> bool:
    """Waits until the client has gone (True), or until `release` is set (False)."""
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
    """A whole, honest reply; underscores in names of headers stand for hyphens."""
    self.raw(status, kind, Content_Length=str(len(data)), **headers)
    self.wfile.write(data)

  def send_json(self, value, status=200, **headers):
    """A reply of JSON."""
    self.send(json.dumps(value).encode(), "application/json", status, **headers)

  def raw(self, status=200, kind: str | None = "text/html", **headers):
    """The head of a reply alone."""
    self.send_response(status)
    if self.close_connection:
      # Said, because it is done: a client that keeps the connection would lose the
      # next request on it, whenever that one is faster than this thread's hanging up.
      self.send_header("Connection", "close")
    if kind is not None:
      self.send_header("Content-Type", kind)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.end_headers()

  def cut(self):
    """A reply that ends before its length."""
    self.close_connection = True
    self.raw(Content_Length="500")
    self.wfile.write(b"{")

  def drip(self, data: bytes, every: float = 0.05, count: int = 12_000):
    """Sends the same few bytes again and again."""
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
    url: where it listens.
    actions: path -> what responds to its requests; others get 404.
    requests: every request, in order.
    clients: connections that are open, or of which a request is still to be read.
    stopped: set at the end; what waits, waits for this.
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


NEVER = 600.0  # seconds that what does not answer is silent, or drips
LONG = 60.0  # seconds that nothing healthy needs, on however slow a machine


def within() -> Callable[[], None]:
  """A check that what lasts `NEVER` was not waited for since now."""
  began = time.monotonic()

  def check() -> None:
    assert time.monotonic() - began < NEVER / 2

  return check

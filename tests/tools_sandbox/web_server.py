"""A real HTTP server on loopback whose every path does what a test gave it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator


class Reply(http.server.BaseHTTPRequestHandler):
  """One request; a test's action writes to it as it likes."""

  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True

  def do_GET(self):
    server = self.server
    self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    server.requests.append(self)
    self.close_connection = True
    action = server.actions.get(self.path.partition("?")[0])
    with contextlib.suppress(OSError):
      if action is None:
        self.send(b"no such page", status=404)
      else:
        action(self)

  do_POST = do_DELETE = do_GET

  @property
  def json(self):
    """The request's body, decoded."""
    return json.loads(self.body)

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
    # Said, because it is done: a client that keeps the connection would lose the next
    # request on it, whenever that one is faster than this thread's hanging up.
    self.send_header("Connection", "close")
    if kind is not None:
      self.send_header("Content-Type", kind)
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.end_headers()

  def drip(self, data: bytes, every: float = 0.05, count: int = 12_000):
    """Sends the same few bytes again and again."""
    for _ in range(count):
      self.wfile.write(data)
      self.wfile.flush()
      if self.server.stopped.wait(every):
        return

  def log_message(self, *unused):
    pass


class Server(http.server.ThreadingHTTPServer):
  """See `serve`."""

  daemon_threads = True

  def handle_error(self, *unused):
    """Clients here leave early, on purpose."""


@contextlib.contextmanager
def serve(host: str = "127.0.0.1") -> Iterator[Server]:
  """A server for the length of a `with` block; its `actions` say what paths do."""
  server = Server((host, 0), Reply)
  server.actions, server.requests = {}, []
  server.stopped = threading.Event()
  server.port = server.server_address[1]
  server.url = f"http://{host}:{server.port}"
  thread = threading.Thread(target=server.serve_forever, args=(0.02,))
  thread.start()
  try:
    yield server
  finally:
    server.stopped.set()
    server.shutdown()
    server.server_close()
    thread.join()


NEVER = 600.0  # seconds that what does not answer is silent, or drips
LONG = 60.0  # seconds that nothing healthy needs, on however slow a machine


def within() -> Callable[[], None]:
  """A check that what lasts `NEVER` was not waited for since now."""
  began = time.monotonic()

  def check() -> None:
    assert time.monotonic() - began < NEVER / 2

  return check

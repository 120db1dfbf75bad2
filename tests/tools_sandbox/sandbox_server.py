"""Starts a real `tools_sandbox.service.server` on loopback for a `with` block."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from tests.backend import BACKEND, BACKENDS
from tests.tools_sandbox import proc
from tools_sandbox import http_server
from tools_sandbox.host.pool import DEFAULT_PRELOAD, SandboxPool
from tools_sandbox.jail.wire import Limits
from tools_sandbox.service.remote import RemoteConfig, RemotePool

LONG = 60.0  # seconds; a healthy server needs less
# Starts the server with other imports in its slots.
_PRELOADING = """\
import functools
from tools_sandbox.service import server
server.pool.SandboxPool = functools.partial(server.pool.SandboxPool, preload={})
server.main()
"""


@dataclasses.dataclass
class Server:
  """A running server; `run` posts to /run."""

  url: str
  process: subprocess.Popen[str]
  token: str = ""

  def post(self, path: str, **more) -> httpx.Response:
    """Sends a POST with the token; further arguments are httpx's."""
    headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
    return httpx.post(self.url + path, headers=headers, timeout=LONG, **more)

  def run(self, program: str, **fields) -> httpx.Response:
    """Posts a program to /run."""
    return self.post("/run", json={"program": program, **fields})

  def send(self, path: str, body: dict) -> socket.socket:
    """Sends a POST on its own socket, so that the caller can hang up at any time."""
    url = httpx.URL(self.url)
    data = json.dumps(body).encode()
    head = (
      f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\n"
      f"Authorization: Bearer {self.token}\r\nContent-Type: application/json\r\n"
      f"Content-Length: {len(data)}\r\n\r\n"
    )
    sock = socket.create_connection((url.host, url.port), LONG)
    sock.sendall(head.encode() + data)
    return sock

  def health(self) -> dict:
    """Decoded reply of GET /health."""
    return httpx.get(self.url + "/health", timeout=LONG).json()

  def metric(self, name: str, **labels: str) -> float:
    """One sample from GET /metrics, read by Prometheus's own parser."""
    headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
    reply = httpx.get(self.url + "/metrics", headers=headers, timeout=LONG)
    samples = [s for f in text_string_to_metric_families(reply.text) for s in f.samples]
    (value,) = (s.value for s in samples if s.name == name and s.labels == labels)
    return value


@contextlib.contextmanager
def serving(
  *arguments: str,
  token: str = "",
  backend: str = BACKEND,
  preload: Sequence[str] | None = (),
) -> Iterator[Server]:
  """Starts a server on a free port; asserts that it exits with 0.

  Args:
    *arguments: the server's command-line arguments.
    token: the word in its token file, if it has one.
    backend: the back-end for its slots.
    preload: its slots' imports; None for the server's defaults, which take seconds.
  """
  module = ("-m", "tools_sandbox.service.server")
  if preload is not None:
    module = ("-c", _PRELOADING.format(preload))
  command = [sys.executable, *module, "--port=0", f"--backend={backend}", *arguments]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    line = process.stdout.readline()  # "" if it could not start
    assert " at http://" in line, line
    yield Server(line.split()[-1], process, token)
    process.terminate()
    assert process.wait(LONG) == 0
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


@contextlib.contextmanager
def serving_app(app: ASGIApp) -> Iterator[str]:
  """Serves an application in a thread; yields its URL."""
  with http_server.bind("127.0.0.1", 0) as sock:
    server = http_server.Server(app, grace_s=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
      soon(lambda: server.started)
      yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
      server.should_exit = True
      thread.join()


WHERE = (*BACKENDS, "remote")  # for `open_pool`


@contextlib.contextmanager
def open_pool(
  where: str,
  preload: Sequence[str] | None = (),
  slots: int = 1,
  limits: Limits | None = None,
) -> Iterator[SandboxPool | RemotePool]:
  """Opens a pool on a back-end in this process, or "remote", behind a service."""
  if where != "remote":
    imports = DEFAULT_PRELOAD if preload is None else preload
    with SandboxPool(slots, limits, imports, backend=where) as pool:
      yield pool
    return
  arguments = (f"--slots={slots}", "--max_timeout_s=300")
  with serving(*arguments, preload=preload) as server:
    config = RemoteConfig((server.url,), wait_s=LONG)
    with contextlib.closing(RemotePool(config, limits)) as pool:
      yield pool
    assert server.metric("sandbox_zygotes_replaced_total") == 0


def children(pid: int) -> dict[int, str]:
  """A process's children -> their command lines."""
  below = [child for child, parent in proc.parents().items() if parent == pid]
  return {child: " ".join(proc.command(child)) for child in below}


def soon(condition: Callable[[], object]) -> None:
  """Waits until the condition is true."""
  deadline = time.monotonic() + LONG
  while not condition():
    assert time.monotonic() < deadline, "it never came to hold"
    time.sleep(0.02)


def holds(gate: pathlib.Path) -> str:
  """A program that waits for a file, which only back-end subprocess can see."""
  return (
    "import os, time\n"
    f"while not os.path.exists({str(gate)!r}):\n  time.sleep(0.01)\nprint('open')"
  )


def marks(path: pathlib.Path) -> str:
  """A program that creates a file; for back-end subprocess only."""
  return f"open({str(path)!r}, 'w')"

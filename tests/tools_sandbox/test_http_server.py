"""The server that all others are: clients that hold connections open and say nothing.

Real sockets, and a small application in a thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sandbox_server import LONG, holds, serving, soon, with_descriptors
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from tools_sandbox import http_server
from tools_sandbox.http_server import Waits

SHORT = 0.3
HALF_HEADS = (b"", b"G", b"GET /page HTTP/1.1\r\nHost: localhost\r\nX-A: ")
PAGE = b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MANY = 8 << 20  # bytes, more than the kernel keeps of an answer


@contextlib.contextmanager
def running(waits: Waits | None = None) -> Iterator[tuple[tuple[str, int], Any]]:
  """The address of a server of /page and /echo, and the server."""

  async def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("x" * int(request.query_params.get("size", 4)))

  async def echo(request: Request) -> JSONResponse:
    return JSONResponse(await http_server.read_object(request, 1 << 20))

  app = Starlette(
    routes=[Route("/page", page), Route("/echo", echo, methods=["POST"])],
    middleware=[http_server.check_host(list(http_server.LOOPBACK))],
  )
  with http_server.bind("127.0.0.1", 0) as sock:
    server = http_server.Server(app, grace_s=1, waits=waits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    soon(lambda: server.started)
    try:
      yield sock.getsockname(), server
    finally:
      server.should_exit = True
      thread.join()


@pytest.fixture
def connect():
  """Opens connections, which end with the test."""
  with contextlib.ExitStack() as stack:

    def one(address: tuple[str, int], data: bytes = b"") -> socket.socket:
      sock = stack.enter_context(socket.create_connection(address, LONG))
      sock.sendall(data)
      return sock

    yield one


def rest(sock: socket.socket) -> bytes:
  """What still comes until the server closes the connection."""
  data = b""
  with contextlib.suppress(ConnectionResetError):
    while part := sock.recv(65536):
      data += part
  return data


@pytest.mark.parametrize("half", HALF_HEADS)
def test_a_head_that_does_not_end_is_given_up(connect, half: bytes):
  with running(Waits(head=SHORT)) as (address, _):
    assert rest(connect(address, half)) == b""


def test_a_head_that_drips_is_given_up(connect):
  with running(Waits(head=SHORT)) as (address, _):
    dripping = connect(address, HALF_HEADS[-1])
    with pytest.raises(OSError):
      while True:
        dripping.sendall(b"a")
        time.sleep(SHORT / 10)


def test_a_body_that_does_not_end_is_given_up_and_told_so(connect, caplog):
  with running(Waits(body=SHORT)) as (address, _):
    for half in (b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n"):
      status, _, body = rest(connect(address, POST + half)).partition(b"\r\n")
      assert status == b"HTTP/1.1 408 Request Timeout" and b"took longer than" in body
    # After an answer that did not wait for the body nobody reads it.
    early = connect(address, PAGE[:-2] + b"Content-Length: 9\r\n\r\n")
    assert rest(early).startswith(b"HTTP/1.1 200")
  assert not caplog.records


def test_a_connection_that_is_not_used_again_is_given_up(connect):
  with running(Waits(idle=SHORT)) as (address, _):
    used = connect(address, PAGE)
    assert rest(used).endswith(b"xxxx")


def test_a_client_that_does_not_read_is_given_up(connect):
  with running(Waits(reading=SHORT)) as (address, server):
    deaf = connect(address, PAGE.replace(b"/page", f"/page?size={MANY}".encode()))
    soon(lambda: server.server_state.total_requests)
    soon(lambda: not server.server_state.connections)
    assert len(rest(deaf)) < MANY


def test_a_client_that_hangs_up_in_its_body_is_nobodys_fault(connect, caplog):
  with running() as (address, _):
    with connect(address, POST + b"Content-Length: 9\r\n\r\n{"):
      pass
    reply = httpx.get("http://{}:{}/page".format(*address), timeout=LONG)
    assert reply.text == "xxxx"
  assert not caplog.records


def test_a_service_answers_however_many_only_hold_connections_open(connect, tmp_path):
  path = tmp_path / "token"
  path.write_text("word-of-27-random-letters")
  arguments = ("--slots=2", "--max_waiting=20", f"--token_file={path}")
  gate = tmp_path / "gate"
  with (
    serving(
      *arguments, token=path.read_text(), backend="subprocess", descriptors=128
    ) as service,
    concurrent.futures.ThreadPoolExecutor(1) as threads,
  ):
    address = ("127.0.0.1", httpx.URL(service.url).port)
    long = threads.submit(service.run, holds(gate), timeout_s=50)
    soon(lambda: service.health()["busy"] == 1)
    idle = []
    for _ in range(4):  # to more than twice what it has descriptors for
      for half in (*HALF_HEADS, POST + b"Content-Length: 9\r\n\r\n{") * 10:
        idle.append(connect(address, half))
      assert service.run("print(6 * 7)").json()["stdout"] == "42\n"
    # The first ones made room for others, long before their time was up; who waits for
    # an answer did not.
    assert rest(idle[0]) == b""
    gate.touch()
    assert long.result(LONG).json()["stdout"] == "open\n"


def test_places_without_descriptors_are_refused(tmp_path):
  arguments = ["--port=0", "--backend=subprocess", "--slots=1", "--max_waiting=200"]
  done = subprocess.run(
    with_descriptors(128, "-m", "tools_sandbox.service.server", *arguments),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2 and len(done.stderr.splitlines()) == 2
  assert "201 requests at once need more than 402 descriptors" in done.stderr


@pytest.mark.parametrize(
  ("host", "allowed", "names", "warned"),
  [
    ("127.0.0.1", [], http_server.LOOPBACK, False),
    ("::1", ["proxy"], (*http_server.LOOPBACK, "proxy"), False),
    ("0.0.0.0", [], ("*",), True),
    ("10.0.0.1", ["box"], (*http_server.LOOPBACK, "box"), True),
  ],
)
def test_who_may_call_a_server_by_which_name(capsys, host, allowed, names, warned):
  assert tuple(http_server.open_hosts(host, allowed, "read it")) == names
  errors = capsys.readouterr().err
  assert errors == "" if not warned else f"--host={host}: there is no key" in errors

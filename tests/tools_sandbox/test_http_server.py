"""`http_server`, the base of all our servers: stalled and lost clients, Host names.

Real sockets, with a small application in a thread.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest
from sandbox_server import LONG, serving_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from tools_sandbox import http_server

SHORT = 0.3
MOST = 1 << 20  # maximum body bytes
PAGE = b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def url() -> Iterator[str]:
  """URL of a server with /page and /echo."""

  async def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("xxxx")

  async def echo(request: Request) -> JSONResponse:
    return JSONResponse(await http_server.read_object(request, MOST))

  app = Starlette(
    routes=[Route("/page", page), Route("/echo", echo, methods=["POST"])],
    middleware=[http_server.check_host(list(http_server.LOOPBACK))],
  )
  with serving_app(app) as url:
    yield url


@pytest.fixture
def connect(url):
  """Opens connections; they close when the test ends."""
  with contextlib.ExitStack() as stack:

    def one(data: bytes) -> socket.socket:
      address = ("127.0.0.1", httpx.URL(url).port)
      sock = stack.enter_context(socket.create_connection(address, LONG))
      sock.sendall(data)
      return sock

    yield one


def rest(sock: socket.socket) -> bytes:
  """Reads until the server closes the connection."""
  data = b""
  with contextlib.suppress(ConnectionResetError):
    while part := sock.recv(65536):
      data += part
  return data


def test_a_body_that_does_not_end_is_given_up_and_told_so(connect, caplog, monkeypatch):
  monkeypatch.setattr(http_server, "_BODY_S", SHORT)
  for half in (b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n"):
    status, _, body = rest(connect(POST + half)).partition(b"\r\n")
    assert status == b"HTTP/1.1 408 Request Timeout" and b"took longer than" in body
  assert not caplog.records


def test_a_connection_that_is_not_used_again_is_given_up(monkeypatch, request):
  monkeypatch.setattr(http_server, "_IDLE_S", SHORT)
  connect = request.getfixturevalue("connect")  # starts the server, with this _IDLE_S
  assert rest(connect(PAGE)).endswith(b"xxxx")


def test_a_client_that_hangs_up_in_its_body_is_nobodys_fault(url, connect, caplog):
  with connect(POST + b"Content-Length: 9\r\n\r\n{"):
    pass
  assert httpx.get(url + "/page", timeout=LONG).text == "xxxx"
  assert not caplog.records


@pytest.mark.parametrize(
  ("changes", "body", "status", "words"),
  [
    ({}, b'{"a": 1}', 200, '{"a":1}'),
    ({}, b"", 400, "not JSON"),
    ({}, b"\xff\xfe", 400, "not JSON"),
    ({}, b"[" * 100_000, 400, "not JSON"),
    ({}, b"[]", 400, "not an object"),
    ({"host": "rebound.example"}, b"{}", 400, "Invalid host"),
    ({}, b" " * (MOST + 1), 413, f"at most {MOST} bytes"),
    # A form or fetch may send these to another site without a CORS preflight.
    ({"content-type": "text/plain"}, b"{}", 415, "must be application/json"),
    ({"content-type": ""}, b"{}", 415, "must be application/json"),
  ],
)
def test_only_json_of_bounded_size_to_a_known_name_is_read(
  url, changes, body, status, words
):
  headers = {"content-type": "application/json"} | changes
  reply = httpx.post(url + "/echo", content=body, headers=headers, timeout=LONG)
  assert reply.status_code == status and words in reply.text


@pytest.mark.parametrize(
  ("host", "allowed", "names", "warned"),
  [
    ("127.0.0.1", [], http_server.LOOPBACK, False),
    ("::1", ["proxy"], (*http_server.LOOPBACK, "proxy"), False),
    ("0.0.0.0", [], ("*",), True),
    ("10.0.0.1", ["box"], (*http_server.LOOPBACK, "box"), True),
  ],
)
def test_names_a_server_may_be_called_by(capsys, host, allowed, names, warned):
  assert tuple(http_server.open_hosts(host, allowed, "read it")) == names
  errors = capsys.readouterr().err
  assert errors == "" if not warned else f"--host={host}: there is no key" in errors

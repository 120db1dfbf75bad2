"""Fetcher: reachable addresses and hostile servers, on loopback."""

from __future__ import annotations

import gzip
import shutil
import socket
import ssl
import subprocess
import threading
import zlib

import pytest
from http_server import LONG, NEVER, Server, within

from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.web.fetch import FetchConfig, Fetcher, is_public

HERE = ("127.0.0.1/32",)
LIMITS = FetchConfig(max_bytes=100_000, allow=HERE)
TYPES = ("text/",)


def get(server, path="/", seconds=LONG, config=LIMITS, **more):
  return Fetcher(config, **more).get(server.url + path, seconds, TYPES)


def fails(server, words: str, fault=ToolFault, **more):
  with pytest.raises(fault, match=words):
    get(server, **more)


def test_a_page_comes_back_with_what_its_header_says(server):
  server.actions["/"] = lambda r: r.send(b"hi", 'Text/HTML; charset="UTF-8"; x=1')
  body = get(server, "/?q=a%20b")
  assert (body.data, body.content_type, body.charset) == (b"hi", "text/html", "utf-8")
  assert body.url == server.url + "/?q=a%20b" and not body.truncated
  (request,) = server.requests
  assert request.headers["User-Agent"] == "coa-jax" and "Cookie" not in request.headers
  assert request.headers["Host"] == f"127.0.0.1:{server.port}"


def test_the_charset_of_a_header(server):
  for header, charset in (
    ("text/html;Charset = 'Big5' ;x", "big5"),
    ("text/html; xcharset=a", ""),
    ("text/html; charset=", ""),
    ("text/html; a=b;CHARSET=koi8-r, text/html", "koi8-r"),
  ):
    server.actions["/"] = lambda r, h=header: r.send(b"hi", h)
    assert get(server, "/").charset == charset, header


PRIVATE = """
127.0.0.1 127.8.9.1 0.0.0.0 10.0.0.1 172.16.3.4 192.168.1.1 169.254.169.254 100.64.0.1
100.100.100.200 192.0.0.192 168.63.129.16 198.18.0.1 224.0.0.1 240.0.0.1
255.255.255.255 ::1 :: fe80::1 fe80::1%lo fc00::1 fd00:ec2::254 ff02::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:7f00:1::
2001:db8::1
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address: str):
  assert not is_public(address)
  for public in ("1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"):
    assert is_public(public)


@pytest.mark.parametrize(
  "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001"]
)
def test_loopback_is_not_reached_by_any_of_its_names(server, host: str):
  """Not even by a redirect from an allowed server."""
  server.actions["/secret"] = lambda r: r.send(b"secret")
  url = f"http://{host}:{server.port}/secret"
  fetcher = Fetcher(FetchConfig(allow=("127.0.0.2/32",)))
  with Server("127.0.0.2") as outside:
    outside.actions["/"] = lambda r: r.raw(302, Location=url, Content_Length="0")
    for target in (url, outside.url + "/"):
      with pytest.raises(ToolFault, match="may not be connected"):
        fetcher.get(target, LONG, TYPES)
  assert len(outside.requests) == 1 and not server.requests


def test_a_name_that_answers_differently_the_second_time(server):
  """DNS rebinding: a public address for the check, a private one for the connection."""
  answers = ["93.184.216.34", "127.0.0.1", "127.0.0.1"]
  names, connected = [], []

  def rebinding(name, port, **kw):
    names.append(name)
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

  server.actions["/"] = lambda r: r.send(b"secret")
  fetcher = Fetcher(FetchConfig(), resolve=rebinding)
  real = socket.create_connection
  with pytest.MonkeyPatch.context() as patch:

    def connect(address, *args, **kw):
      connected.append(address[0])
      if address[0].startswith("93."):
        raise ConnectionRefusedError
      return real(address, *args, **kw)

    patch.setattr(socket, "create_connection", connect)
    with pytest.raises(ToolFault):
      fetcher.get("http://rebind.test:8080/", LONG, TYPES)
    with pytest.raises(ToolFault, match="may not be connected"):
      fetcher.get("http://rebind.test:8080/", LONG, TYPES)
  assert names == ["rebind.test"] * 2 and connected == ["93.184.216.34"]
  assert not server.requests


def test_only_the_allowed_addresses_of_a_name_are_tried(server):
  def both(name, port, **kw):
    addresses = ("10.0.0.1", "127.0.0.1")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]

  server.actions["/"] = lambda r: r.send(b"hi")
  url = f"http://both.test:{server.port}/"
  assert Fetcher(LIMITS, resolve=both).get(url, LONG, TYPES).data == b"hi"


def test_odd_ports_of_public_addresses_are_not_connected_to():
  for port in (22, 25, 6379, 11211):
    with pytest.raises(ToolFault, match="may not be connected"):
      Fetcher(FetchConfig()).get(f"http://1.1.1.1:{port}/", LONG, TYPES)


@pytest.mark.parametrize(
  "url",
  [
    "",
    "x",
    "file:///etc/passwd",
    "ftp://a/",
    "gopher://127.0.0.1/",
    "http://",
    "http://user:pass@127.0.0.1/",
    "http://a\r\nX: y/",
    "http://[::1",
    "http://a:99999/",
    "http://" + "a" * 3000,
    "data:text/html,x",
    "//127.0.0.1/",
  ],
)
def test_a_malformed_url_is_the_models_fault(url: str):
  with pytest.raises(BadCall, match="not a URL"):
    Fetcher(LIMITS).get(url, LONG, TYPES)


@pytest.mark.parametrize(
  "to", ["file:///etc/passwd", "http://u:p@h/", "http://h:0/", "\x01"]
)
def test_a_redirect_to_what_is_no_url_is_the_servers(server, to: str):
  server.actions["/"] = lambda r: r.raw(302, Location=to, Content_Length="0")
  fails(server, "not a URL|status 404")


def test_a_redirect_may_be_written_in_utf_8(server):
  raw = "/caf\u00e9".encode().decode("latin-1")
  server.actions["/"] = lambda r: r.raw(302, Location=raw, Content_Length="0")
  server.actions["/caf%C3%A9"] = lambda r: r.send(b"there", Content_Type="text/plain")
  assert Fetcher(LIMITS).get(server.url + "/", LONG, TYPES).data == b"there"


def test_redirects_are_followed_and_loops_end(server):
  for n, status in enumerate((301, 302, 307, 303, 308)):
    server.actions[f"/{n}"] = lambda r, n=n, s=status: r.raw(
      s, Location=f"/{n + 1}", Content_Length="0"
    )
  server.actions["/5"] = lambda r: r.send(b"end")
  assert get(server, "/0").url.endswith("/5")
  server.actions["/5"] = lambda r: r.raw(308, Location="/5", Content_Length="0")
  fails(server, "more than 5 redirects", path="/5")


def test_blocked_domains_are_not_asked_even_after_a_redirect(server):
  fails(server, "blocked", blocked=("0.0.1",))  # a suffix matches whole labels only
  server.actions["/"] = lambda r: r.raw(302, Location="http://Sub.Leak.org./x")
  fails(server, "sub.leak.org. is blocked", blocked=("leak.org",))
  server.actions["/"] = lambda r: r.send(b"hi")
  assert get(server, blocked=(".0.1x", "27.0.0.1")).data == b"hi"


@pytest.mark.parametrize(
  "where", ["silence", "head", "status", "body", "chunked", "redirects"]
)
def test_silence_and_a_slow_drip_end_at_the_deadline(server, where: str):
  def silence(r):
    server.stopped.wait(NEVER)

  def head(r):
    r.wfile.write(b"HTTP/1.1 200 OK\r\n")
    r.drip(b"X-A: b\r\n")

  def status(r):
    r.wfile.write(b"HTTP/1.1 ")
    r.drip(b"2")

  def body(r):
    r.raw(Content_Length="100000")
    r.drip(b"x")

  def chunked(r):
    r.raw(Transfer_Encoding="chunked")
    r.drip(b"1\r\nx\r\n")

  def redirects(r):
    server.stopped.wait(0.4)
    r.raw(302, Location="/", Content_Length="0")

  server.actions["/"] = locals()[where]
  in_time = within()
  fails(server, "within 0.6 s|redirects", seconds=0.6)
  in_time()


def test_a_name_server_that_never_answers():
  stop = threading.Event()
  fetcher = Fetcher(LIMITS, resolve=lambda *_, **__: stop.wait(NEVER))
  in_time = within()
  with pytest.raises(ToolFault, match="within"):
    fetcher.get("http://slow.test/", 0.3, TYPES)
  in_time()
  stop.set()


@pytest.mark.parametrize("bomb", ["gzip", "deflate", "gzip of nothing", "endless"])
def test_a_bomb_is_not_unpacked_and_what_has_no_end_is_left(server, bomb: str):
  if bomb == "gzip":
    data = gzip.compress(bytes(200_000_000), 1)
  elif bomb == "deflate":
    data = zlib.compress(bytes(50_000_000))
  else:  # blocks without content: bytes go in, none come out
    data = gzip.compress(b"")[:10] + b"\x00\x00\x00\xff\xff" * 200_000

  def send(r):
    if bomb == "endless":
      r.raw(Transfer_Encoding="chunked")
      while not server.stopped.is_set():
        r.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    r.send(data, Content_Encoding=bomb.split()[0])

  server.actions["/"] = send
  body = get(server)
  assert body.truncated and len(body.data) in (0, LIMITS.max_bytes)


def _raw(data: bytes) -> bytes:
  packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
  return packer.compress(data) + packer.flush()


TEXT = b"".join(b"%d, " % n for n in range(500))
PACKED = {
  "gzip": ("gzip", gzip.compress(TEXT)),
  "members": ("gzip", gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:])),
  "padding": ("x-gzip", gzip.compress(TEXT) + bytes(99)),
  "deflate": ("deflate", zlib.compress(TEXT)),
  "raw deflate": ("deflate", _raw(TEXT)),
  "gzip that is called deflate": ("deflate", gzip.compress(TEXT)),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_packed_bodies_are_unpacked_whole(server, name: str, size: int):
  encoding, data = PACKED[name]

  def send(r):
    r.raw(Content_Encoding=encoding, Transfer_Encoding="chunked")
    for i in range(0, len(data), size):
      part = data[i : i + size]
      r.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    r.wfile.write(b"0\r\n\r\n")

  server.actions["/"] = send
  body = get(server)
  assert body.data == TEXT and not body.truncated


@pytest.mark.parametrize("name", [n for n in PACKED if n != "padding"])
@pytest.mark.parametrize("length", [1, 200, -1])
def test_a_packed_body_that_is_cut_short_says_so(server, name: str, length: int):
  encoding, data = PACKED[name]
  cut = data[:length]
  server.actions["/"] = lambda r: r.send(cut, Content_Encoding=encoding)
  body = get(server)
  assert body.truncated and TEXT.startswith(body.data)


NO_HTTP = "does not speak HTTP"


@pytest.mark.parametrize(
  ("headers", "data", "words"),
  [
    (b"Content-Length: 500", b"short", NO_HTTP),
    (b"Content-Length: -5", b"x", NO_HTTP),
    (b"Content-Length: x", b"x", NO_HTTP),
    (b"Transfer-Encoding: chunked", b"zz\r\nhello", NO_HTTP),
    (b"Content-Encoding: gzip\r\nContent-Length: 5", b"plain", "not packed"),
    (b"Content-Encoding: br\r\nContent-Length: 1", b"x", "'br' was not asked"),
    (b"Content-Encoding: gzip, gzip\r\nContent-Length: 1", b"x", "was not asked"),
    (b"X: " + b"y" * 300_000, b"", NO_HTTP),
    (b"no colon here", b"", NO_HTTP),
    # Not HTTP at all.
    (None, b"", f"{NO_HTTP}|cannot be reached"),
    (None, b"\x00\xff" * 50, NO_HTTP),
    (None, b"SSH-2.0-x\r\n", NO_HTTP),
    (None, b"HTTP/9 x\r\n", NO_HTTP),
  ],
)
def test_servers_that_lie_about_the_body(server, headers, data, words):
  def lie(r):
    if headers is not None:
      kind = b"Content-Type: text/html\r\n"
      r.wfile.write(b"HTTP/1.1 200 OK\r\n" + kind + headers + b"\r\n\r\n")
    r.wfile.write(data)

  server.actions["/"] = lie
  fails(server, words)


def test_a_length_that_is_too_small_cuts(server):
  server.actions["/"] = lambda r: (r.raw(Content_Length="2"), r.wfile.write(b"hello"))
  assert get(server).data == b"he"


def test_types_and_statuses_that_are_refused(server):
  server.actions["/"] = lambda r: r.send(b"x", "application/octet-stream")
  fails(server, "'application/octet-stream' cannot be read")
  server.actions["/"] = lambda r: r.send(b"x", None)
  assert get(server).content_type == ""
  for status in (204, 206, 304, 403, 404, 500, 503):
    server.actions["/"] = lambda r, s=status: r.send(b"x", status=s)
    fails(server, f"status {status}")
  server.actions["/"] = lambda r: r.raw(302, Content_Length="0")  # no Location
  fails(server, "status 302")


def test_a_closed_port_and_an_unknown_host():
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  with pytest.raises(ToolFault, match="cannot be reached"):
    Fetcher(LIMITS).get(f"http://127.0.0.1:{port}/", LONG, TYPES)

  def none(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "unknown")

  with pytest.raises(ToolFault, match=r"no host nowhere\.test"):
    Fetcher(LIMITS, resolve=none).get("http://nowhere.test/", LONG, TYPES)


def test_a_name_server_that_is_down_is_the_infrastructures_fault():
  def down(*_, **__):
    raise socket.gaierror(socket.EAI_AGAIN, "try again")

  with pytest.raises(Unavailable, match="no name server"):
    Fetcher(LIMITS, resolve=down).get("http://a.test/", LONG, TYPES)

  def theirs(name, port, **_):  # only the page's own name server is down
    if name != "example.com":
      raise socket.gaierror(socket.EAI_AGAIN, "try again")
    return []

  with pytest.raises(ToolFault, match="no host"):
    Fetcher(LIMITS, resolve=theirs).get("http://a.test/", LONG, TYPES)


def test_tls_is_checked_against_the_name_though_the_address_is_connected_to(
  server, tmp_path, monkeypatch
):
  if shutil.which("openssl") is None:
    pytest.skip("openssl makes the certificate")
  key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
  command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=good.test"
  command += f" -addext subjectAltName=DNS:good.test -keyout {key} -out {cert}"
  subprocess.run(command.split(), check=True, capture_output=True)
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.load_cert_chain(cert, key)
  names: list[str] = []
  context.sni_callback = lambda _, name, __: names.append(name)
  server.socket = context.wrap_socket(server.socket, server_side=True)
  server.actions["/"] = lambda r: r.send(b"hi")

  def here(name, port, **_):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

  url = f"https://good.test:{server.port}/"
  with pytest.raises(ToolFault, match=r"cannot be reached.*self.signed"):
    Fetcher(LIMITS, resolve=here).get(url, LONG, TYPES)
  monkeypatch.setenv("SSL_CERT_FILE", cert)
  fetcher = Fetcher(LIMITS, resolve=here)
  assert fetcher.get(url, LONG, TYPES).data == b"hi" and set(names) == {"good.test"}
  with pytest.raises(ToolFault, match=r"cannot be reached.*[Hh]ostname"):
    fetcher.get(url.replace("good", "evil"), LONG, TYPES)

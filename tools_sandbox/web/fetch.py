"""Fetches a model's URL from a possibly hostile server.

Limits apply to the whole request: seconds from the first look-up to the last byte,
bytes on the wire and unpacked, redirects, content types. Connections go only to public
addresses. Each connection looks the name up once and uses the checked address itself,
so a name that resolves differently the second time (DNS rebinding) gains nothing; a
redirect is a new URL and passes the same checks. httpcore, httpx's engine, is used
directly, because httpcore lets us replace the network layer.

budget: all checks of a URL in one place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import httpcore
import httpx

from tools_sandbox.faults import BadCall, ToolFault, Unavailable

_PORTS = (80, 443, 8080, 8443)  # allowed on public addresses
URL_CHARS = 2048
_CHARSET = re.compile(r";\s*charset\s*=([^;,]{0,99})", re.IGNORECASE)
_REDIRECTS = (301, 302, 303, 307, 308)
_HOPS = 5  # redirects after the first request
# Public by number, but they serve a machine's metadata (Azure, Oracle) or tunnel to any
# IPv4 address (6to4, Teredo); NAT64 is outside 2000::/3.
_SPECIAL = tuple(
  ipaddress.ip_network(n)
  for n in ("168.63.129.16/32", "192.0.0.0/24", "2002::/16", "2001::/32")
)
_UNICAST = ipaddress.ip_network("2000::/3")
_KNOWN_NAME = "example.com"  # a resolver that fails this look-up is down

Resolve = Callable[..., list[tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class FetchConfig:
  """Limits of a fetch.

  Attributes:
    max_bytes: the maximum body bytes, before and after unpacking; the rest is not read.
    allow: non-public networks ("127.0.0.1/32") to allow, on any port.
  """

  max_bytes: int = 2_000_000
  allow: tuple[str, ...] = ()

  def __post_init__(self):
    if self.max_bytes < 1:
      raise ValueError("max_bytes must be at least 1")
    for network in self.allow:
      ipaddress.ip_network(network)  # a ValueError names the network


@dataclasses.dataclass(frozen=True)
class PageBody:
  """A server's response; not trusted.

  Attributes:
    url: the last URL, after redirects.
    content_type: as the server says, lower case, without parameters; "" for none.
    charset: as the server says; "" for none.
    data: unpacked bytes, at most `max_bytes`.
    truncated: True if there was more, or the packed bytes end too early.
  """

  url: str
  content_type: str
  charset: str
  data: bytes
  truncated: bool


def is_public(address: str) -> bool:
  """Whether an IP address is on the public internet and not a metadata service."""
  # An IPv4 address inside IPv6 is checked as IPv4. In IPv6, only unicast is public.
  ip = ipaddress.ip_address(address)
  if isinstance(ip, ipaddress.IPv6Address):
    if ip.ipv4_mapped is not None:
      return is_public(str(ip.ipv4_mapped))
    if ip not in _UNICAST:
      return False
  elif ip.is_multicast:
    return False
  return ip.is_global and not any(ip in network for network in _SPECIAL)


def in_domains(host: str, domains: Iterable[str]) -> bool:
  """Whether a host is one of the domains or a subdomain."""
  host = host.rstrip(".").lower()
  return any(host == d or host.endswith(f".{d}") for d in domains)


class Fetcher:
  """Fetches URLs under limits. Thread-safe; holds no connection between fetches."""

  def __init__(
    self,
    config: FetchConfig,
    blocked: Collection[str] = (),
    resolve: Resolve = socket.getaddrinfo,
  ):
    """Sends nothing yet.

    Args:
      config: the limits.
      blocked: domains never contacted, subdomains included.
      resolve: `socket.getaddrinfo`; another function in tests.
    """
    self._config = config
    self._blocked = tuple(blocked)
    self._resolve = resolve
    self._tls = httpcore.default_ssl_context()

  def get(self, url: str, seconds: float, types: Collection[str]) -> PageBody:
    """Fetches a URL's body.

    Args:
      url: an http or https URL from a model.
      seconds: the time limit, redirects and look-ups included.
      types: content types to accept; an entry ending in "/" matches all subtypes. A
        response without a type is accepted.

    Raises:
      BadCall: the URL is invalid.
      ToolFault: the server fails, lies or is too slow, or the URL leads to a forbidden
        address.
      Unavailable: this machine has no network.
    """
    # --- Hop by hop. The first URL is the model's; redirects are the servers'.
    deadline = time.monotonic() + seconds
    target = _parse(url, BadCall)
    try:
      for _ in range(_HOPS + 1):
        answer = self._hop(target, deadline, types)
        if isinstance(answer, PageBody):
          return answer
        target = _parse(answer, ToolFault, target)

    # --- Network failures; cut short, because some words are the server's.
    except httpcore.TimeoutException:
      raise ToolFault(f"no whole answer within {seconds:.3g} s") from None
    except (httpcore.NetworkError, ssl.SSLError) as e:
      raise ToolFault(f"cannot be reached ({_short(e)})") from None
    except httpcore.ProtocolError as e:
      raise ToolFault(f"the server does not speak HTTP well ({_short(e)})") from None
    except zlib.error:
      raise ToolFault("the body is not packed as its header says") from None
    raise ToolFault(f"more than {_HOPS} redirects")

  def _hop(
    self, url: httpx.URL, deadline: float, types: Collection[str]
  ) -> PageBody | str:
    """Returns the body, or a redirect's target."""
    # --- The request: no cookies, no referrer, nothing kept from page to page.
    if in_domains(url.host, self._blocked):
      raise ToolFault(f"the site {url.host} is blocked")
    headers = {
      "Host": url.netloc.decode("ascii"),
      "User-Agent": "coa-jax",
      "Accept": "*/*",
      "Accept-Encoding": "gzip, deflate",
      "Connection": "close",
    }
    network = _Network(self._config.allow, self._resolve, deadline)
    target = httpcore.URL(
      scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )

    # --- The response's head: a redirect, a refusal, or a readable type.
    with (
      httpcore.ConnectionPool(self._tls, network_backend=network) as pool,
      pool.stream("GET", target, headers=headers) as response,
    ):
      fields = {}
      for key, value in response.headers:
        fields[key.decode("latin-1").lower()] = value.decode("latin-1")
      if response.status in _REDIRECTS and "location" in fields:
        # Servers write UTF-8 there, though headers are Latin-1.
        raw = fields["location"].encode("latin-1")
        with contextlib.suppress(UnicodeDecodeError):
          return raw.decode("utf-8")
        return fields["location"]
      if response.status != 200:
        raise ToolFault(f"the server answers with status {response.status}")
      kind, _, rest = fields.get("content-type", "").partition(";")
      kind = kind.strip().lower()
      if kind and not _is_of(kind, types):
        raise ToolFault(f"content of type {kind[:80]!r} cannot be read")

      # --- The body.
      unpack = _Unpacker(fields.get("content-encoding", ""))
      data, truncated = self._read(response.iter_stream(), unpack)
    charset = _CHARSET.search(f";{rest}")
    charset = charset[1].strip(" \"'").lower() if charset else ""
    return PageBody(str(url), kind, charset, data, truncated)

  def _read(self, chunks: Iterable[bytes], unpack: _Unpacker) -> tuple[bytes, bool]:
    # Both are bounded: received bytes, which may unpack to nothing, and unpacked bytes.
    limit = self._config.max_bytes
    wire = 0
    data = bytearray()
    for chunk in chunks:
      wire += len(chunk)
      # One byte above the limit shows that there is more.
      data += unpack(chunk, limit + 1 - len(data))
      if len(data) > limit or wire > limit:
        return bytes(data[:limit]), True
    return bytes(data), not unpack.whole


def _is_of(kind: str, types: Iterable[str]) -> bool:
  """Whether a content type is in `types`, or starts with an entry ending in "/"."""
  return any(kind == t or (t.endswith("/") and kind.startswith(t)) for t in types)


class _Unpacker:
  """Undoes a content encoding, never returning more bytes than requested."""

  def __init__(self, encoding: str):
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
      raise ToolFault(f"content encoding {encoding[:40]!r} was not asked for")
    self._packed = encoding not in ("", "identity")
    self._deflate = encoding == "deflate"
    self._head = b""  # too short to identify
    self._zlib: Any = None

  @property
  def whole(self) -> bool:
    """Whether the data is complete at the end."""
    return not self._head and (self._zlib is None or self._zlib.eof)

  def __call__(self, chunk: bytes, most: int) -> bytes:
    if not self._packed:
      return chunk[:most]
    out = bytearray()
    chunk = self._head + chunk
    self._head = b""
    while chunk and len(out) < most:
      # --- A member begins: its first two bytes tell the format.
      if self._zlib is None:
        if len(chunk) < 2:
          self._head = chunk
          break
        self._zlib = zlib.decompressobj(self._format(chunk))
      elif self._zlib.eof:
        if chunk[:1] != b"\x1f":  # padding
          break
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)  # gzip's next member

      # --- So much and no more: a bomb stays packed.
      out += self._zlib.decompress(chunk, most - len(out))
      chunk = self._zlib.unused_data
    return bytes(out)

  def _format(self, head: bytes) -> int:
    """Returns zlib's format code: many servers say deflate and omit zlib's header."""
    # A zlib header: method 8, and its two bytes are a multiple of 31 (RFC 1950).
    headed = head[0] & 15 == 8 and int.from_bytes(head[:2]) % 31 == 0
    bare = self._deflate and not headed and head[:2] != b"\x1f\x8b"
    if bare:
      return -zlib.MAX_WBITS
    return zlib.MAX_WBITS | 32  # either header


class _Network(httpcore.NetworkBackend):
  """Connects to allowed addresses only, and ends everything at one deadline."""

  def __init__(self, allow: Iterable[str], resolve: Resolve, deadline: float):
    self._allow = tuple(ipaddress.ip_network(n) for n in allow)
    self._resolve = resolve
    self._deadline = deadline
    self._below = httpcore.SyncBackend()

  def connect_tcp(
    self, host, port, timeout=None, local_address=None, socket_options=None
  ) -> httpcore.NetworkStream:
    """Looks the name up, checks every address, and connects to an allowed one."""
    # A name may have good and bad addresses: ignore the bad ones.
    addresses = [a for a in self._look_up(host, port) if self._may(a, port)]
    if not addresses:
      raise ToolFault(f"the address of {host[:80]} may not be connected to")
    for i, address in enumerate(addresses):
      try:
        # The address, not the name: nothing is looked up again.
        left = _left(self._deadline) / (len(addresses) - i)
        return _Stream(self._below.connect_tcp(address, port, left), self._deadline)
      except (httpcore.ConnectError, httpcore.ConnectTimeout) as e:
        failure = e
        no_way = getattr(e.__cause__, "errno", None) == errno.ENETUNREACH
        if no_way and ":" not in address:  # many machines have no IPv6
          raise Unavailable("this machine has no network") from None
    raise failure

  def _may(self, address: str, port: int) -> bool:
    ip = ipaddress.ip_address(address)
    if any(ip in network for network in self._allow):
      return True
    return port in _PORTS and is_public(address)

  def _look_up(self, host: str, port: int) -> list[str]:
    try:
      rows = self._resolve_within(host, port)
    except (socket.gaierror, UnicodeError) as e:
      if getattr(e, "errno", None) == socket.EAI_AGAIN:
        try:  # Their name server, or ours?
          self._resolve_within(_KNOWN_NAME, 80)
        except socket.gaierror:
          raise Unavailable("no name server answers this machine") from None
      raise ToolFault(f"there is no host {host[:80]}") from None
    return list(dict.fromkeys(row[4][0] for row in rows))

  def _resolve_within(self, host: str, port: int) -> list[tuple[Any, ...]]:
    """Runs `getaddrinfo`, which has no timeout, in a thread that may be abandoned."""
    answer: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
      try:
        answer.put(self._resolve(host, port, type=socket.SOCK_STREAM))
      except Exception as e:
        answer.put(e)

    # A daemon: an abandoned look-up must not delay Python's exit.
    threading.Thread(target=work, name="look-up", daemon=True).start()
    try:
      result = answer.get(timeout=_left(self._deadline))
    except queue.Empty:
      raise httpcore.ConnectTimeout("look-up") from None
    if isinstance(result, Exception):
      raise result
    return result


class _Stream(httpcore.NetworkStream):
  """A connection; all its waits end at the deadline."""

  def __init__(self, below: httpcore.NetworkStream, deadline: float):
    self._below = below
    self._deadline = deadline

  def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
    return self._below.read(max_bytes, _left(self._deadline))

  def write(self, buffer: bytes, timeout: float | None = None) -> None:
    self._below.write(buffer, _left(self._deadline))

  def close(self) -> None:
    self._below.close()

  def start_tls(self, ssl_context, server_hostname=None, timeout=None) -> _Stream:
    left = _left(self._deadline)
    # The certificate is checked against the name, not the connected address.
    below = self._below.start_tls(ssl_context, server_hostname, left)
    return _Stream(below, self._deadline)

  def get_extra_info(self, info: str) -> Any:
    return self._below.get_extra_info(info)


def _left(deadline: float) -> float:
  left = deadline - time.monotonic()
  if left <= 0:
    raise httpcore.ReadTimeout("deadline")
  return left


def _parse(
  url: str, fault: type[Exception], base: httpx.URL | None = None
) -> httpx.URL:
  """Parses and checks a URL; with `base`, a redirect's target."""
  # A user name is refused because "http://known.site@other.site/" misleads a reader.
  try:
    if len(url) > URL_CHARS:
      raise ValueError("too long")
    parsed = httpx.URL(url) if base is None else base.join(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
      raise ValueError("not http or https")
    if parsed.port is not None and not 0 < parsed.port < 65536:
      raise ValueError("no such port")
    if parsed.userinfo:
      raise ValueError("a user name in it")
  except (httpx.InvalidURL, ValueError, TypeError) as e:
    raise fault(f"not a URL to fetch: {url[:200]!r} ({_short(e)})") from None
  return parsed


def _short(error: Exception) -> str:
  return (str(error) or type(error).__name__)[:120]

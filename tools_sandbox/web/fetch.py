"""GET of a URL that a model wrote, from a server that may be hostile.

Limits hold for the whole of it: seconds from the first look-up to the last byte, bytes
on the wire and unpacked, redirects, content types. Only public addresses are connected
to. A name is looked up once per connection and the connection is made to the checked
address itself, so a name that answers differently the second time (DNS rebinding) wins
nothing; a redirect is a new URL and passes the same gate. httpcore, the engine of
httpx, is used directly, for there the network below HTTP can be replaced.

budget: every gate that a URL passes, in one place.
"""

from __future__ import annotations

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

_PORTS = (80, 443, 8080, 8443)  # of public addresses
URL_CHARS = 2048
_CHARSET = re.compile(r";\s*charset\s*=([^;,]{0,99})", re.IGNORECASE)
_REDIRECTS = (301, 302, 303, 307, 308)
# Public by number, but they answer a machine about itself (Azure, Oracle) or lead on to
# any IPv4 address (6to4, Teredo); NAT64 lies outside 2000::/3.
_SPECIAL = tuple(
  ipaddress.ip_network(n)
  for n in ("168.63.129.16/32", "192.0.0.0/24", "2002::/16", "2001::/32")
)
_UNICAST = ipaddress.ip_network("2000::/3")
_KNOWN_NAME = "example.com"  # a resolver that cannot find it is down

Resolve = Callable[..., list[tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class FetchConfig:
  """Limits of a fetch.

  Attributes:
    max_bytes: bytes of a body, before and after unpacking; the rest is not read.
    max_redirects: hops after the first request.
    allow: networks ("127.0.0.1/32") that may be connected to although they are not
      public, on any port.
    user_agent: what servers are told.
  """

  max_bytes: int = 2_000_000
  max_redirects: int = 5
  allow: tuple[str, ...] = ()
  user_agent: str = "coa-jax"

  def __post_init__(self):
    if self.max_bytes < 1 or self.max_redirects < 0:
      raise ValueError("max_bytes must be at least 1, max_redirects at least 0")
    for network in self.allow:
      ipaddress.ip_network(network)  # a ValueError names it


@dataclasses.dataclass(frozen=True)
class PageBody:
  """What a server sent; nothing in it is to be trusted.

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
  """Whether an IP address belongs to the internet at large, no metadata service."""
  # IPv4 in IPv6's clothes counts as what it is. Of IPv6 only unicast is the internet.
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
  """Whether a host is one of the domains or inside one."""
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
      blocked: domains that are never asked, their subdomains included.
      resolve: `socket.getaddrinfo`; another in tests.
    """
    self._config = config
    self._blocked = tuple(blocked)
    self._resolve = resolve
    self._tls = httpcore.default_ssl_context()

  def get(self, url: str, seconds: float, types: Collection[str]) -> PageBody:
    """Fetches the body behind a URL.

    Args:
      url: http or https, as a model wrote it.
      seconds: for all of it, redirects and look-ups included.
      types: content types to accept; one that ends in "/" stands for all below it. A
        server that names no type is believed to send the right one.

    Raises:
      BadCall: that is no URL.
      ToolFault: the server fails, lies or drips, or the URL leads where it may not.
      Unavailable: this machine has no network.
    """
    # --- Hop by hop. The first URL is the model's; where others lead, the servers'.
    deadline = time.monotonic() + seconds
    target = _parse(url, BadCall)
    try:
      for _ in range(self._config.max_redirects + 1):
        answer = self._hop(target, deadline, types)
        if isinstance(answer, PageBody):
          return answer
        target = _parse(answer, ToolFault, target)

    # --- What went wrong out there; cut short, for some words are the server's own.
    except httpcore.TimeoutException:
      raise ToolFault(f"no whole answer within {seconds:.3g} s") from None
    except (httpcore.NetworkError, ssl.SSLError) as e:
      raise ToolFault(f"cannot be reached ({_short(e)})") from None
    except httpcore.ProtocolError as e:
      raise ToolFault(f"the server does not speak HTTP well ({_short(e)})") from None
    except zlib.error:
      raise ToolFault("the body is not packed as its header says") from None
    raise ToolFault(f"more than {self._config.max_redirects} redirects")

  def _hop(
    self, url: httpx.URL, deadline: float, types: Collection[str]
  ) -> PageBody | str:
    """The body, or where a redirect leads."""
    # --- The request: no cookies, no referrer, nothing kept from page to page.
    if in_domains(url.host, self._blocked):
      raise ToolFault(f"the site {url.host} is blocked")
    headers = {
      "Host": url.netloc.decode("ascii"),
      "User-Agent": self._config.user_agent,
      "Accept": "*/*",
      "Accept-Encoding": "gzip, deflate",
      "Connection": "close",
    }
    network = _Network(self._config.allow, self._resolve, deadline)
    target = httpcore.URL(
      scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )

    # --- The head of the answer: a redirect, a refusal, or a type that can be read.
    with (
      httpcore.ConnectionPool(self._tls, network_backend=network) as pool,
      pool.stream("GET", target, headers=headers) as response,
    ):
      fields = {}
      for key, value in response.headers:
        fields[key.decode("latin-1").lower()] = value.decode("latin-1")
      if response.status in _REDIRECTS and "location" in fields:
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
    # Both are bounded: what comes in, for it may unpack to nothing, and what comes out.
    limit = self._config.max_bytes
    wire = 0
    data = bytearray()
    for chunk in chunks:
      wire += len(chunk)
      # One byte more than there may be tells that there is more.
      data += unpack(chunk, limit + 1 - len(data))
      if len(data) > limit or wire > limit:
        return bytes(data[:limit]), True
    return bytes(data), not unpack.whole


def _is_of(kind: str, types: Iterable[str]) -> bool:
  """Whether a content type is one of these, or below one that ends in "/"."""
  for accepted in types:
    if kind == accepted or (accepted.endswith("/") and kind.startswith(accepted)):
      return True
  return False


class _Unpacker:
  """Undoes a content encoding, never giving more bytes than it is asked for."""

  def __init__(self, encoding: str):
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
      raise ToolFault(f"content encoding {encoding[:40]!r} was not asked for")
    self._packed = encoding not in ("", "identity")
    self._deflate = encoding == "deflate"
    self._head = b""  # too short to tell what it is
    self._zlib: Any = None

  @property
  def whole(self) -> bool:
    """Whether nothing is missing at the end."""
    return not self._head and (self._zlib is None or self._zlib.eof)

  def __call__(self, chunk: bytes, most: int) -> bytes:
    if not self._packed:
      return chunk[:most]
    out = bytearray()
    chunk = self._head + chunk
    self._head = b""
    while chunk and len(out) < most:
      # --- A member begins: what packed it shows in its first two bytes.
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
    """What zlib is to expect: many servers say deflate and leave its header out."""
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
    """Looks the name up, checks every address, and connects to one that may be."""
    # A name may have good and bad addresses: the bad are as if they were not there.
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
    """`getaddrinfo`, which knows no time limit, in a thread that may be left behind."""
    answer: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
      try:
        answer.put(self._resolve(host, port, type=socket.SOCK_STREAM))
      except Exception as e:
        answer.put(e)

    # A daemon: one that is left behind must not hold up the end of Python.
    threading.Thread(target=work, name="look-up", daemon=True).start()
    try:
      result = answer.get(timeout=_left(self._deadline))
    except queue.Empty:
      raise httpcore.ConnectTimeout("look-up") from None
    if isinstance(result, Exception):
      raise result
    return result


class _Stream(httpcore.NetworkStream):
  """A connection whose every wait ends at the deadline."""

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
    # The certificate is checked against the name, though an address was connected to.
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
  """A URL that may be asked; with `base`, where a redirect from there leads."""
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

"""Calls an MCP server's tool as a CoA tool.

The official SDK (`pip install 'coa-jax[mcp]'`, version 2) speaks the protocol, over
stdio or streamable HTTP. The SDK is asynchronous, so each tool has a thread with an
event loop (anyio's portal) and one session; the next call reopens a broken session.

A server is trusted no more than a web page: its output is bounded in size and time, and
its schemas serve only to name parameters and to explain failed calls. (A `command` is
the user's own program.)

budget: one protocol, with its error handling in one place.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.http_client import check_url, read_key
from tools_sandbox.mcp_results import as_text
from tools_sandbox.text import clean

_FENCE = re.compile(r"\s*```(?:json)?[ \t]*[\r\n](.*?)```\s*", re.DOTALL)

_END_S = 5.0  # seconds for a server to end
_DEPTH = 64  # levels of nested parameters; the SDK fails at some hundreds
_PAGES = 100  # pages of a server's tool list
_MAX_BYTES = 16_000_000  # bytes per line over stdio, or per response over HTTP
_DESCRIPTION = 10_000  # characters of a tool description, which may enter a prompt
_NAMED = 20  # tools or parameters named in a message
# JSON Schema type -> whether a value has this type.
_KINDS: dict[str, Callable[[Any], bool]] = {
  "string": lambda v: isinstance(v, str),
  "integer": lambda v: _is_number(v) and v % 1 == 0,
  "number": lambda v: _is_number(v),
  "boolean": lambda v: isinstance(v, bool),
  "array": lambda v: isinstance(v, list),
  "object": lambda v: isinstance(v, dict),
  "null": lambda v: v is None,
}
_RELAY = pathlib.Path(__file__).with_name("mcp_relay.py")

# The SDK logs server faults with tracebacks; here the caller reports them.
logging.getLogger("mcp").setLevel(logging.CRITICAL)


@dataclasses.dataclass(frozen=True)
class McpConfig:
  """A tool's server and name.

  Attributes:
    tool: the tool's name on the server.
    command: a server program with its arguments, which speaks over stdio. It runs as
      this user and is trusted; its environment has only the SDK's few variables.
    env: additional variables. The config stores them: put a key in a file for the
      command instead.
    url: the URL of a streamable HTTP server, in place of `command`.
    key_file: a file with the server's bearer token.
    argument: the parameter filled by a plain-text call; None for the only required
      parameter. A JSON object gives all parameters by name.
    start_s: seconds for the server's start and greeting.
  """

  tool: str
  command: tuple[str, ...] = ()
  env: dict[str, str] = dataclasses.field(default_factory=dict)
  url: str | None = None
  key_file: str | None = None
  argument: str | None = None
  start_s: float = 20.0

  def __post_init__(self):
    if not self.tool or bool(self.command) == (self.url is not None):
      raise ValueError("a tool of MCP has a name, and either a command or a url")
    if self.url is not None:
      check_url("url", self.url)
    if self.url is None and self.key_file is not None:
      raise ValueError("key_file is for a url; give a command its key by env")
    if self.url is not None and self.env:
      raise ValueError("env is for a command, not for a url")
    if not 0 < self.start_s < math.inf:
      raise ValueError(f"start_s must be positive and finite, got {self.start_s!r}")


class McpTool:
  """One MCP tool. Thread-safe; calls may overlap; close it after use."""

  def __init__(self, config: McpConfig):
    """Opens a session and reads the tool's parameters.

    Raises:
      ValueError: the SDK is missing, the key file cannot be used, or the server lacks
        the tool.
      Unavailable: the server does not start, greet or list its tools.
    """
    try:
      import mcp  # here, because the package is an extra
    except ImportError as e:
      raise ValueError(f"MCP tools need `pip install 'coa-jax[mcp]'`: {e}") from e
    # --- The session's thread.
    self._key = read_key(config.key_file)
    self._config = config
    self._mcp = mcp
    self._session: _ClientSession | None = None
    self._lock = threading.Lock()
    self._thread = contextlib.ExitStack()
    self._portal = self._thread.enter_context(start_blocking_portal(name="mcp"))
    # An open portal would block Python's exit: the portal waits for its thread, which
    # no longer runs by then.
    atexit.register(self.close)

    # --- The server's description of the tool.
    try:
      tool = self._find()
      self._schema = tool.input_schema
      self.description = clean((tool.description or "")[:_DESCRIPTION])
      self._parameters, self._plain = _parameters(tool.input_schema, config.argument)
    except BaseException:
      self.close()
      raise

  def close(self) -> None:
    """Ends the session, and a server started here."""
    atexit.unregister(self.close)
    with self._lock:
      if self._session is not None:
        self._session.end()
        self._session = None
    with contextlib.suppress(RuntimeError):  # closed before
      self._portal.call(self._portal.stop, True)  # cancels hanging calls
    self._thread.close()

  def __call__(self, content: str, seconds: float) -> str:
    """Calls the tool and returns its text.

    Args:
      content: a JSON object of parameters, bare or in a fence, or plain text.
      seconds: the call's time limit; reopening a session adds `start_s`.

    Raises:
      BadCall: the parameters do not fit the tool.
      ToolFault: the tool reports a failure, or takes too long.
      Unavailable: the server is gone, or does not start again.
    """
    arguments = self._arguments(content)
    session = self._open()  # before the call's clock starts

    # --- Make the call; raise errors by their cause.
    try:
      result = self._run(
        seconds,
        session.client.call_tool,
        name=self._config.tool,
        arguments=arguments,
        read_timeout_seconds=seconds,
      )
    except TimeoutError:
      raise ToolFault(f"no answer within {seconds:.3g} s") from None
    except self._mcp.MCPError as e:
      code = e.error.code
      message = clean(e.error.message)[:300]
      if code == -32602:  # invalid parameters
        raise BadCall(message) from None
      if code in (408, -32001):  # the SDK's own time limit
        raise ToolFault(f"no answer within {seconds:.3g} s") from None
      if session.ended or code == -32000:  # the connection is closed
        self._drop(session)
        raise Unavailable(f"the MCP server is gone ({message})") from None
      raise ToolFault(message) from None
    except Exception as e:
      self._drop(session)
      raise Unavailable(f"the MCP server fails ({type(e).__name__})") from None

    # --- The tool's text or failure. Servers also report wrong parameters as a failure,
    # in their own words: the schema tells whether the call was wrong.
    text = _text(result)
    if result.is_error and not _fits(arguments, self._schema):
      raise BadCall(text or f"write a JSON object with {self._parameters}")
    if result.is_error:
      raise ToolFault(text or "the tool failed")
    return text or "no output"

  def _arguments(self, content: str) -> dict[str, Any]:
    match = _FENCE.fullmatch(content)
    text = content
    if match:
      text = match[1]
    text = text.strip()
    # Text that only begins like JSON is plain text: a query may start with a brace.
    value = None
    if text.startswith("{"):
      with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
    if value is not None:
      return _sendable(value)
    if self._plain is None:
      raise BadCall(f"write a JSON object with {self._parameters}")
    return _sendable({self._plain: text})

  def _server(self) -> Any:
    """Returns an SDK transport for one session."""
    config = self._config
    if config.url is None:
      args = ["-I", str(_RELAY), str(_MAX_BYTES), *config.command]
      program = self._mcp.StdioServerParameters(
        command=sys.executable, args=args, env=config.env or None
      )
      return as_text(self._mcp.stdio_client(program))
    return as_text(_over_http(config.url, self._key))

  def _find(self) -> Any:
    """Finds the tool in the server's list."""
    session = self._open()
    cursor: str | None = None
    names: list[str] = []
    deadline = time.monotonic() + self._config.start_s
    why = f"more than {_PAGES} pages"
    # --- Page by page until the tool is found; a hostile list may have no end.
    try:
      for _ in range(_PAGES):
        left = deadline - time.monotonic()
        page = self._run(left, session.client.list_tools, cursor=cursor)
        for tool in page.tools:
          if tool.name == self._config.tool:
            return tool
        names += [clean(tool.name[:100]) for tool in page.tools[:_NAMED]]
        cursor = page.next_cursor
        if not cursor:
          why = ""
          break
    except TimeoutError:
      why = f"no answer within {self._config.start_s:.3g} s"
    except self._mcp.MCPError as e:
      why = clean(e.error.message[:300])
    except Exception as e:
      why = type(e).__name__

    # --- The list is incomplete, or lacks the tool.
    if why:
      raise Unavailable(f"the MCP server does not list its tools ({why})")
    others = ", ".join(names[:_NAMED]) or "none"
    raise ValueError(f"no tool {self._config.tool!r} there; it has {others}")

  def _open(self) -> _ClientSession:
    with self._lock:
      if self._session is not None and not self._session.ended:
        return self._session
      # Under the lock: callers with a broken session share one new session.
      self._session = None
      session = _ClientSession(self._mcp.Client(self._server()), self._portal)
      if not session.is_greeted(self._config.start_s):
        fault = session.fault
        session.end()
        why = f" ({type(fault).__name__})" if fault else ""
        raise Unavailable(f"the MCP server does not start or greet{why}")
      self._session = session
      return session

  def _drop(self, session: _ClientSession) -> None:
    with self._lock:
      if self._session is session:  # otherwise another caller has opened a new one
        self._session = None
    session.end()

  def _run(self, seconds: float, function: Callable[..., Any], **arguments: Any) -> Any:
    """Runs a coroutine function in the event loop; cancels a late one.

    Raises:
      TimeoutError: the coroutine did not end in time.
    """
    future = self._portal.start_task_soon(functools.partial(function, **arguments))
    try:
      return future.result(seconds + 0.5)  # the SDK's own limit comes first
    except TimeoutError:
      future.cancel()
      raise


@contextlib.asynccontextmanager
async def _over_http(url: str, key: str) -> AsyncIterator[Any]:
  """Yields the SDK's transport to a URL: a key in every request, bounded responses."""
  import httpx2  # here, because both packages are extras
  from mcp.client import streamable_http

  # --- A stream that counts bytes: the SDK reads a body to its end.
  class Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any):
      self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
      size = 0
      async for part in self._stream:
        size += len(part)
        if size > _MAX_BYTES:
          raise httpx2.ReadError(f"a response of more than {_MAX_BYTES} bytes")
        yield part

    async def aclose(self) -> None:
      await self._stream.aclose()

  async def bound(response: Any) -> None:
    if "content-encoding" in response.headers:  # a small body may become a huge one
      raise httpx2.ReadError("a compressed response, which was not asked for")
    response.stream = Bounded(response.stream)

  # --- The client for the SDK.
  headers = {"accept-encoding": "identity"}
  if key:
    headers["authorization"] = f"Bearer {key}"
  async with streamable_http.create_mcp_http_client(headers) as client:
    client.event_hooks = {"response": [bound]}
    async with streamable_http.streamable_http_client(
      url, http_client=client
    ) as streams:
      yield streams


def _parameters(schema: dict[str, Any], argument: str | None) -> tuple[str, str | None]:
  """Returns the parameter names for a message, and the plain-text parameter, if any.

  Args:
    schema: the server's JSON Schema, in which any value may be anywhere.
    argument: the config's `argument`.
  """
  # --- The known and the required parameters.
  known = _known(schema)
  required = _texts(schema.get("required")) or list(known)
  plain = argument
  if not argument and len(required) == 1:
    plain = required[0]

  # Plain text is a string and cannot fill a parameter of another type.
  rule = known.get(plain)
  kinds = "string"
  if isinstance(rule, dict):
    kinds = rule.get("type", "string")
  if rule is False or (kinds != "string" and "string" not in _texts(kinds)):
    plain = None
  shown = [clean(name[:100]) for name in list(known)[:_NAMED]]
  return ", ".join(shown) or "no parameter", plain


def _fits(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
  """Whether parameters are complete and allowed, with the schema's types and values.

  Checks one level, which covers nearly every server; unknown rules are assumed to hold.

  Args:
    arguments: a call's parameters.
    schema: the server's JSON Schema, in which any value may be anywhere.
  """
  known = _known(schema)
  if not set(_texts(schema.get("required"))) <= set(arguments):
    return False
  if schema.get("additionalProperties") is False and not set(arguments) <= set(known):
    return False
  for name, value in arguments.items():
    rule = known.get(name)
    if not isinstance(rule, dict):
      continue
    kind = rule.get("type")
    kinds = [kind] if isinstance(kind, str) else _texts(kind)
    if kinds and all(k in _KINDS and not _KINDS[k](value) for k in kinds):
      return False
    among = rule.get("enum")
    if isinstance(among, list) and value not in among:
      return False
  return True


def _known(schema: dict[str, Any]) -> dict[str, Any]:
  known = schema.get("properties")
  return known if isinstance(known, dict) else {}


def _is_number(value: Any) -> bool:
  # True is an int in Python.
  return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(value: Any) -> list[str]:
  items = value if isinstance(value, list) else []
  return [item for item in items if isinstance(item, str)]


def _sendable(arguments: dict[str, Any]) -> dict[str, Any]:
  """Returns the arguments if the SDK can send them: others would end the session.

  Raises:
    BadCall: the arguments hold half a surrogate pair, NaN or Infinity, or are too deep.
  """
  if _deeper(arguments, _DEPTH):
    raise BadCall(f"parameters are nested at most {_DEPTH} deep")
  try:
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
  except ValueError:
    raise BadCall("parameters must be Unicode text and finite numbers") from None
  return arguments


def _deeper(value: Any, most: int) -> bool:
  if not isinstance(value, (dict, list)):
    return False
  if most == 0:
    return True
  # `most` also bounds the recursion, however deep the model has nested.
  inner = value
  if isinstance(value, dict):
    inner = value.values()
  return any(_deeper(v, most - 1) for v in inner)


class _ClientSession:
  """One open client, entered and left by a single task, as its scopes demand."""

  def __init__(self, client: Any, portal: BlockingPortal):
    self.client = client
    self._portal = portal
    self._greeted: concurrent.futures.Future[None] = concurrent.futures.Future()
    # Made in the loop's thread, which alone may touch them.
    self._leave = portal.call(anyio.Event)
    self._scope = portal.call(anyio.CancelScope)
    self._task = portal.start_task_soon(self._live)

  async def _live(self) -> None:
    with self._scope:
      async with self.client:
        # Results are not validated against the server's own schema: a regular
        # expression there can run for ever and would block every thread.
        self.client.session.validate_tool_result = _accept
        self._greeted.set_result(None)
        await self._leave.wait()

  @property
  def ended(self) -> bool:
    """Whether the session is over, on either side."""
    return self._task.done()

  @property
  def fault(self) -> BaseException | None:
    """The error that ended the session, if any."""
    if not self._task.done() or self._task.cancelled():
      return None
    return self._task.exception()

  def is_greeted(self, seconds: float) -> bool:
    """Waits for the server's greeting; returns whether it came in time."""
    concurrent.futures.wait((self._greeted, self._task), seconds, "FIRST_COMPLETED")
    return self._greeted.done()

  def end(self) -> None:
    """Leaves the session and waits for a stdio server to end."""
    if self.ended:
      return
    # Close politely if there is a session; then cancel it.
    if self._greeted.done():
      self._portal.start_task_soon(self._leave.set)
      concurrent.futures.wait((self._task,), _END_S)
    if not self._task.done():
      self._portal.start_task_soon(self._scope.cancel)
      concurrent.futures.wait((self._task,), _END_S)


async def _accept(*unused: Any) -> None:
  """Takes any result. See `mcp.ClientSession.validate_tool_result`."""


def _text(result: Any) -> str:
  """Joins a result's text; `as_text` has converted all blocks to text."""
  return clean("\n".join(block.text for block in result.content)).strip()

"""A tool of an MCP server, called as a CoA tool.

The official SDK (`pip install 'coa-jax[mcp]'`, version 2) speaks the protocol, over
stdio or streamable HTTP. It is asynchronous, so each server has a thread with an event
loop that holds one session; a session that broke is opened again by the next call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.page import clean
from tools_sandbox.service import read_key

_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)

_END_S = 5.0  # that a server may take to end
_DEPTH = 64  # of a call's parameters; the SDK fails on some hundreds


@dataclasses.dataclass(frozen=True)
class McpConfig:
  """Where a tool is, and which.

  Attributes:
    tool: its name on the server.
    command: a program and its arguments, started and spoken to over stdio. It runs as
      this user and is trusted; only the SDK's few variables are in its environment.
    env: variables that are there too. They stand in the config: a key is better put in
      a file that the command reads.
    url: or, the URL of a streamable HTTP server.
    key_file: a file with the bearer token that it wants to see.
    argument: the parameter that a plain-text call fills; None for the only required
      one. A call that is a JSON object gives all parameters by name.
    start_s: seconds that the server may take to start and greet.
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
    if self.url is not None and not self.url.startswith(("http://", "https://")):
      raise ValueError(f"url {self.url!r} must start with http:// or https://")
    if self.url is None and self.key_file is not None:
      raise ValueError("key_file is for a url; give a command its key by env")
    if self.url is not None and self.env:
      raise ValueError("env is for a command, not for a url")
    if self.start_s <= 0:
      raise ValueError("start_s must be above 0")


class McpTool:
  """The tool. Thread-safe; calls may overlap; close it after use."""

  def __init__(self, config: McpConfig):
    """Opens a session and reads the tool's parameters.

    Raises:
      ValueError: the SDK is missing, the key file cannot be used, or the server has no
        such tool.
      Unavailable: the server does not start or greet.
    """
    try:
      import mcp  # here, for it is an extra
    except ImportError as e:
      raise ValueError(f"MCP tools need `pip install 'coa-jax[mcp]'`: {e}") from e
    self._key = read_key(config.key_file)
    self._config, self._mcp = config, mcp
    self._session: _Session | None = None
    self._lock = threading.Lock()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="mcp", daemon=True
    )
    self._thread.start()
    try:
      self.description, self._schema = self._find()
    except BaseException:
      self.close()
      raise

  def close(self) -> None:
    """Ends the session, and the server if it was started here."""
    with self._lock:
      if self._session is not None:
        self._session.end()
        self._session = None
    if self._thread.is_alive():
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join(5.0)
    if not self._loop.is_running():
      self._loop.close()

  def __call__(self, content: str, seconds: float) -> str:
    """The text that the tool gives.

    Args:
      content: a JSON object of parameters, bare or in a fence, or plain text.
      seconds: for the call; a session that has to be opened again has `start_s` more.

    Raises:
      BadCall: the parameters do not fit the tool.
      ToolFault: the tool says that it failed, or takes too long.
      Unavailable: the server is gone and cannot be started again.
    """
    arguments = self._arguments(content)
    session = self._open()
    call = session.client.call_tool(
      self._config.tool, arguments, read_timeout_seconds=seconds
    )
    try:
      result = self._run(call, seconds)
    except TimeoutError:
      raise ToolFault(f"no answer within {seconds:.3g} s") from None
    except self._mcp.MCPError as e:
      code, message = e.error.code, clean(e.error.message)[:300]
      if code == -32602:  # invalid parameters
        raise BadCall(message) from None
      if code in (408, -32001):  # its own time limit
        raise ToolFault(f"no answer within {seconds:.3g} s") from None
      if session.ended or code == -32000:  # the connection is closed
        self._drop(session)
        raise Unavailable(f"the MCP server is gone ({message})") from None
      raise ToolFault(message) from None
    except Exception as e:
      self._drop(session)
      raise Unavailable(f"the MCP server fails ({type(e).__name__})") from None
    text = _text(result.content)
    if result.is_error:
      raise ToolFault(text or "the tool failed")
    return text or "no output"

  def _arguments(self, content: str) -> dict[str, Any]:
    match = _FENCE.fullmatch(content)
    text = (match[1] if match else content).strip()
    try:
      value = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
      value = None
    if isinstance(value, dict):
      return _sendable(value)
    known = self._schema.get("properties", {})
    name = self._config.argument
    if name is None:
      required = self._schema.get("required") or list(known)
      name = required[0] if len(required) == 1 else None
    if name is None or known.get(name, {}).get("type", "string") != "string":
      raise BadCall(f"write a JSON object with {', '.join(known) or 'no parameter'}")
    return _sendable({name: text})

  def _server(self) -> Any:
    """What the SDK connects to; a transport serves for one session."""
    config = self._config
    if config.url is None:
      program, *args = config.command
      return self._mcp.StdioServerParameters(
        command=program, args=args, env=config.env or None
      )
    return _bearing(config.url, self._key) if self._key else config.url

  def _find(self) -> tuple[str, dict[str, Any]]:
    client, cursor, names = self._open().client, None, []
    while True:
      page = self._run(client.list_tools(cursor=cursor), self._config.start_s)
      for tool in page.tools:
        if tool.name == self._config.tool:
          return clean(tool.description or ""), tool.input_schema
        names.append(tool.name)
      cursor = page.next_cursor
      if not cursor or len(names) > 10_000:
        there = ", ".join(names[:20])
        raise ValueError(f"no tool {self._config.tool!r} there; it has {there}")

  def _open(self) -> _Session:
    with self._lock:
      if self._session is not None and not self._session.ended:
        return self._session
      self._session = None
      session = _Session(self._mcp.Client(self._server()), self._loop)
      if not session.wait(self._config.start_s):
        session.end()
        why = f" ({type(session.fault).__name__})" if session.fault else ""
        raise Unavailable(f"the MCP server does not start or greet{why}")
      self._session = session
      return session

  def _drop(self, session: _Session) -> None:
    with self._lock:
      if self._session is session:
        self._session = None
    session.end()

  def _run(self, coroutine: Any, seconds: float) -> Any:
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    try:
      return future.result(seconds + 0.5)
    except (TimeoutError, concurrent.futures.TimeoutError):
      future.cancel()
      raise TimeoutError from None


@contextlib.asynccontextmanager
async def _bearing(url: str, key: str) -> AsyncIterator[Any]:
  """The SDK's transport to a URL, with a bearer token in every request."""
  from mcp.client import streamable_http  # here, for it is an extra

  headers = {"authorization": f"Bearer {key}"}
  async with (
    streamable_http.create_mcp_http_client(headers) as client,
    streamable_http.streamable_http_client(url, http_client=client) as streams,
  ):
    yield streams


def _sendable(arguments: dict[str, Any]) -> dict[str, Any]:
  """The arguments; what the SDK cannot send would end the session that others use.

  Raises:
    BadCall: they hold half of a surrogate pair, NaN or Infinity, or are too deep.
  """
  if _deeper(arguments, _DEPTH):
    raise BadCall(f"parameters are nested at most {_DEPTH} deep")
  try:
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
  except ValueError:
    raise BadCall("parameters must be Unicode text and finite numbers") from None
  return arguments


def _deeper(value: Any, most: int) -> bool:
  inner = value.values() if isinstance(value, dict) else value
  if not isinstance(value, (dict, list)):
    return False
  return most == 0 or any(_deeper(v, most - 1) for v in inner)


class _Session:
  """One open client. A single task enters and leaves it, as its scopes demand."""

  def __init__(self, client: Any, loop: asyncio.AbstractEventLoop):
    self.client, self.ended = client, False
    self.fault: Exception | None = None  # that ended it
    self._loop = loop
    self._greeted: concurrent.futures.Future[bool] = concurrent.futures.Future()
    self._leave, self._left = asyncio.Event(), threading.Event()
    self._task = asyncio.run_coroutine_threadsafe(self._live(), loop)

  async def _live(self) -> None:
    try:
      async with self.client:
        self._greeted.set_result(True)
        await self._leave.wait()
    except Exception as e:  # whoever waits or calls is told there
      self.fault = e
    finally:
      self.ended = True
      self._left.set()
      if not self._greeted.done():
        self._greeted.set_result(False)

  def wait(self, seconds: float) -> bool:
    """Whether the server greets in time."""
    try:
      return self._greeted.result(seconds)
    except (TimeoutError, concurrent.futures.TimeoutError):
      return False

  def end(self) -> None:
    """Leaves the session, and waits until a server on stdio has ended with it."""
    if self._greeted.done():
      self._loop.call_soon_threadsafe(self._leave.set)
    else:
      self._task.cancel()
    if not self._left.wait(_END_S):
      self._task.cancel()
      self._left.wait(_END_S)


def _text(content: list[Any]) -> str:
  """The text of a result's parts; other parts are named only."""
  parts = []
  for part in content:
    text = getattr(part, "text", None)
    parts.append(text if isinstance(text, str) else f"[{part.type}]")
  return clean("\n".join(parts)).strip()

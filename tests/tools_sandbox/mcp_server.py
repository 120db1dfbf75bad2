"""A real MCP server for the tests, written with the official SDK.

python mcp_server.py [--http PORT]
"""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def weather(city: str) -> str:
  """The weather of a city."""
  return f"rain in {city}\x00\x1b[0m"


@server.tool()
def add(a: int, b: int) -> int:
  """The sum of two integers."""
  return a + b


@server.tool()
def fail(why: str) -> str:
  """Fails."""
  raise RuntimeError(why)


@server.tool()
async def sleep(seconds: str) -> str:
  """Takes a while."""
  await asyncio.sleep(float(seconds))
  return "awake"


_met, _all_met = [], asyncio.Event()


@server.tool()
async def meet(count: str) -> str:
  """Returns once so many calls have come."""
  _met.append(count)
  if len(_met) >= int(count):
    _all_met.set()
  await _all_met.wait()
  return "met"


@server.tool()
def die(code: str) -> str:
  """Ends the server."""
  os._exit(int(code))


@server.tool()
def environment(name: str) -> str:
  """A variable of the server's environment."""
  return os.environ.get(name, "not set")


@server.tool()
def pid(unused: str = "") -> str:
  """The server's process."""
  return str(os.getpid())


if __name__ == "__main__":
  if "--http" in sys.argv:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[-1]))
  else:
    server.run()

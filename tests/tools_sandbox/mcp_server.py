"""A real MCP server for the tests, written with the official SDK.

python mcp_server.py [--http PORT]
"""

from __future__ import annotations

import asyncio
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def weather(city: str) -> str:
  """The weather of a city."""
  if city == "nowhere":
    raise RuntimeError("on purpose")
  return f"rain in {city}\x00\x1b[0m"


@server.tool()
def add(a: int, b: int) -> int:
  """The sum of two integers."""
  return a + b


_met, _all_met = [], asyncio.Event()


@server.tool()
async def meet(count: str) -> str:
  """Returns after `count` calls have arrived."""
  _met.append(count)
  if len(_met) >= int(count):
    _all_met.set()
  await _all_met.wait()
  return "met"


if __name__ == "__main__":
  if "--http" in sys.argv:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[-1]))
  else:
    server.run()

"""A faulty MCP server over stdio, written with the standard library.

python mcp_hostile.py JSON: an object with list, schema, output, call, result,
results (the next one for each call), letters, log, description
"""

from __future__ import annotations

import json
import os
import sys
import time

WORK = json.loads(sys.argv[1])
GREETING = {
  "protocolVersion": "2025-06-18",
  "capabilities": {"tools": {}},
  "serverInfo": {"name": "hostile", "version": "0"},
}


def send(**message) -> None:
  """Sends one line of JSON-RPC."""
  print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def act(fault: str | None, request: int) -> dict:
  """Acts out the fault, if any; returns a result."""
  if fault == "die":
    os._exit(3)
  while fault in ("endless line", "garbage", "flood", "hang"):
    if fault == "endless line":
      os.write(1, b"x" * 65536)
    elif fault == "garbage":
      os.write(1, b"{garbage}\n" * 100)
      time.sleep(0.01)
    elif fault == "flood":
      note = {"progressToken": request, "progress": 1}
      send(method="notifications/progress", params=note)
    else:
      time.sleep(1)
  text = WORK.get("letters", 0) * "a" or "fine"
  if fault == "self":  # the server's process and environment
    text = json.dumps([os.getpid(), dict(os.environ)])
    return {"content": [{"type": "text", "text": text}]}
  if "results" in WORK and request:  # a call; 0 is the list of tools
    WORK["results"].append(WORK["results"].pop(0))
    return WORK["results"][-1]
  return WORK.get("result", {"content": [{"type": "text", "text": text}] * 2})


def tools(cursor: str | None) -> dict:
  """A page of tools; in an endless list, each page has a next one."""
  fault = WORK.get("list")
  if fault == "endless":
    page = {"name": f"other{cursor}", "inputSchema": {"type": "object"}}
    return {"tools": [page], "nextCursor": f"{cursor}+"[-20:]}
  if fault == "no list":
    return {"tools": 5}
  if fault == "no schema":
    return {"tools": [{"name": "x"}]}
  if fault == "no properties":
    return {"tools": [{"name": "x", "inputSchema": {"properties": 5}}]}
  act(fault, 0)
  schema = WORK.get("schema", {"type": "object", "properties": {"q": {}}})
  tool = {"name": "x", "inputSchema": schema}
  if "description" in WORK:
    tool["description"] = "d" * WORK["description"]
  if "output" in WORK:
    tool["outputSchema"] = WORK["output"]
  return {"tools": [tool]}


sys.stderr.write("\x1b[2J" * (WORK.get("log", 0) // 4))
for line in sys.stdin:
  message = json.loads(line)
  method, request = message["method"], message.get("id")
  if method == "initialize":
    send(id=request, result=GREETING)
  elif method == "tools/list":
    send(id=request, result=tools(message.get("params", {}).get("cursor")))
  elif method == "tools/call":
    send(id=request, result=act(WORK.get("call"), request))
  elif request is not None:
    send(id=request, error={"code": -32601, "message": "no such method"})

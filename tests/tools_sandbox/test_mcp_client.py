"""Tools of a real MCP server, over stdio and over HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from http_server import LONG, Server, within

pytest.importorskip("mcp", reason="the MCP SDK is an extra: pip install '.[mcp]'")

from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.mcp_client import McpConfig, McpTool

SERVER = str(pathlib.Path(__file__).with_name("mcp_server.py"))
STDIO = (sys.executable, SERVER)
HOSTILE = str(pathlib.Path(__file__).with_name("mcp_hostile.py"))


def hostile(**work) -> dict:
  """A server with a fault; see `mcp_hostile`."""
  return {"command": (sys.executable, HOSTILE, json.dumps(work))}


@pytest.fixture(scope="module")
def url():
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  quiet = subprocess.DEVNULL
  program = subprocess.Popen([*STDIO, "--http", str(port)], stderr=quiet, stdout=quiet)
  deadline = time.monotonic() + LONG
  while True:
    try:
      socket.create_connection(("127.0.0.1", port), 1).close()
      break
    except OSError:
      assert time.monotonic() < deadline
      time.sleep(0.1)
  yield f"http://127.0.0.1:{port}/mcp"
  program.kill()
  program.wait()


@pytest.fixture(params=["stdio", "http"])
def where(request) -> dict:
  """How the server is reached."""
  if request.param == "http":
    return {"url": request.getfixturevalue("url")}
  return {"command": STDIO}


@contextlib.contextmanager
def tool(name: str, where: dict, **more):
  one = McpTool(McpConfig(name, **where, start_s=120.0, **more))
  try:
    yield one
  finally:
    one.close()


def test_a_plain_call_and_a_json_call(where):
  with tool("weather", where) as weather:
    assert weather.description == "The weather of a city."
    for call in (" Ur ", '{"city": "Ur"}', '```json\n{"city": "Ur"}\n```'):
      assert weather(call, LONG) == "rain in Ur[0m"  # control characters are gone
  with tool("add", where) as add:
    assert add('{"a": 2, "b": 40}', LONG) == "42"
    with pytest.raises(BadCall, match="a JSON object with a, b"):
      add("2 40", LONG)


def test_a_tool_that_fails_is_the_tools_fault(where):
  with tool("fail", where) as fail, pytest.raises(ToolFault):
    fail("on purpose", LONG)
  with tool("fail", where) as fail, pytest.raises(ToolFault):
    fail('{"why": "on purpose", "more": 1}', LONG)


@pytest.mark.parametrize(
  "call", ['{"a": "x", "b": 1}', '{"a": 1}', '{"c": 1}', '{"a": [1], "b": 1}']
)
def test_parameters_that_a_tool_does_not_take_are_the_models_fault(where, call):
  """The SDK's server answers them as a tool's failure, in words."""
  with tool("add", where) as add:
    with pytest.raises(BadCall, match=r"Error executing tool add: .*validation error"):
      add(call, LONG)
    # What the server takes is no fault, whatever the schema says of it.
    assert add('{"a": "2", "b": 40.0}', LONG) == "42"


FAILED = {"content": [{"type": "text", "text": "no"}], "isError": True}


@pytest.mark.parametrize(
  ("schema", "call", "fault"),
  [
    ({"properties": {"q": {"enum": ["a", 1]}}}, '{"q": "b"}', BadCall),
    ({"properties": {"q": {"enum": ["a", 1]}}}, '{"q": "a"}', ToolFault),
    ({"properties": {}, "additionalProperties": False}, '{"q": 1}', BadCall),
    ({"properties": {}, "additionalProperties": {}}, '{"q": 1}', ToolFault),
    ({"properties": {"q": {"type": ["null", "integer"]}}}, '{"q": 1.5}', BadCall),
    ({"properties": {"q": {"type": ["null", "integer"]}}}, '{"q": null}', ToolFault),
    ({"properties": {"q": {"type": "number"}}}, '{"q": true}', BadCall),
    # Rules that nobody knows hold.
    ({"properties": {"q": {"type": "date"}}}, '{"q": 1}', ToolFault),
    ({"properties": {"q": {"type": {"a": 1}}}}, '{"q": 1}', ToolFault),
    ({"properties": {"q": True}}, '{"q": 1}', ToolFault),
  ],
)
def test_whose_fault_a_failure_is_the_schema_tells(schema, call, fault):
  work = hostile(schema={"type": "object", **schema}, result=FAILED)
  with tool("x", work, argument="q") as one, pytest.raises(fault, match="no"):
    one(call, LONG)


def test_a_slow_tool_is_given_up_and_the_session_goes_on(where):
  with tool("sleep", where) as sleep:
    in_time = within()
    with pytest.raises(ToolFault, match="no answer within"):
      sleep("600", 0.5)
    in_time()
    assert sleep("0", LONG) == "awake"


def test_calls_overlap(where):
  with tool("meet", where) as meet, concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda _: meet("8", LONG), range(8))) == ["met"] * 8


def test_a_server_that_dies_is_infrastructure_and_starts_again():
  with tool("die", {"command": STDIO}) as die:
    in_time = within()
    for _ in range(2):
      with pytest.raises(Unavailable):
        die("3", LONG)
    in_time()


def test_the_server_has_none_of_our_environment_and_ends_with_us(monkeypatch):
  monkeypatch.setenv("SECRET_KEY", "sk-1")
  with tool("environment", {"command": STDIO}) as environment:
    assert environment("SECRET_KEY", LONG) == "not set"
  with tool("pid", {"command": STDIO}) as pid:
    number = int(pid("{}", LONG))
    os.kill(number, 0)
  deadline = time.monotonic() + LONG
  with pytest.raises(ProcessLookupError):
    while time.monotonic() < deadline:
      os.kill(number, 0)
      time.sleep(0.05)


def test_a_command_gets_the_variables_of_its_config():
  where = {"command": STDIO, "env": {"CITY": "Ur"}}
  with tool("environment", where) as environment:
    assert environment("CITY", LONG) == "Ur"


def test_a_key_is_borne_and_never_said(tmp_path):
  (tmp_path / "key").write_text("sk-mcp-0123456789")
  config = McpConfig("x", url="http://a", key_file=str(tmp_path / "none"))
  with pytest.raises(ValueError, match="key_file"):
    McpTool(config)
  with Server() as server:
    where = {"url": f"{server.url}/mcp", "key_file": str(tmp_path / "key")}
    with pytest.raises(Unavailable) as e:
      McpTool(McpConfig("x", **where, start_s=LONG))
    assert server.requests[0].headers["Authorization"] == "Bearer sk-mcp-0123456789"
  assert "0123456789" not in str(e.value)


@pytest.mark.parametrize(
  "call",
  [
    '{"unused": "\\ud800"}',
    "half a pair: \ud800",
    '{"\\ud800": "x"}',
    '{"unused": NaN}',
    '{"unused": -1e999}',
    f'{{"unused": {"[" * 80}{"]" * 80}}}',
    f'{{"unused": {"[" * 400}{"]" * 400}}}',
  ],
)
def test_what_cannot_be_sent_is_the_models_fault_and_the_session_stays(call: str):
  with tool("pid", {"command": STDIO}, argument="unused") as pid:
    before = pid("{}", LONG)
    with pytest.raises(BadCall):
      pid(call, LONG)
    assert pid("{}", LONG) == before  # another server would have another number


def test_servers_that_are_not_there(tmp_path):
  silent = f"cd {tmp_path}; echo $$ > written; mv written pid; exec sleep 600"
  for where in (
    {"url": "http://127.0.0.1:1/mcp"},
    {"command": ("/no/such/program",)},
    {"command": (sys.executable, "-c", "print('hello')")},
    {"command": ("/bin/sh", "-c", silent)},
  ):
    with pytest.raises(Unavailable, match="does not start or greet"):
      McpTool(McpConfig("x", **where, start_s=2.5))
  with pytest.raises(ProcessLookupError):  # it is not left behind
    os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
  ("fault", "why"),
  [
    ("endless", "more than 100 pages"),
    ("hang", "no answer within 6 s"),
    ("flood", "no answer within 6 s"),
    ("garbage", "no answer within 6 s"),
    ("endless line", ""),
    ("die", ""),
    ("no list", ""),
    ("no schema", ""),
    ("no properties", ""),
  ],
)
def test_a_list_of_tools_that_is_none_is_infrastructure(fault: str, why: str, capfd):
  in_time = within()
  with pytest.raises(Unavailable, match=rf"does not list its tools \(.*{why}"):
    McpTool(McpConfig("x", **hostile(list=fault), start_s=6.0 if why else LONG))
  in_time()
  assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
  ("schema", "plain"),
  [
    ({"properties": {"q": True}}, True),
    ({"properties": {"q": False}}, False),
    ({"properties": {"q": {"type": ["null", "string"]}}}, True),
    ({"properties": {"q": {"$ref": "#/properties/q"}}, "required": ["q"]}, True),
    ({"properties": {"q": {"type": {"a": 1}}}}, False),
    ({"properties": {"x" * 9999: {}, "\x1b[2J": {}}}, False),
  ],
)
def test_a_schema_may_be_anything(schema: dict, plain: bool):
  with tool("x", hostile(schema={"type": "object", **schema})) as one:
    assert one('{"q": "text"}', LONG) == "fine\nfine"
    if plain:
      assert one("text", LONG) == "fine\nfine"
    else:
      with pytest.raises(BadCall, match="write a JSON object") as e:
        one("text", LONG)
      assert len(str(e.value)) < 999 and str(e.value).isprintable()


@pytest.mark.parametrize(
  ("work", "fault"),
  [
    ({"call": "die"}, Unavailable),
    ({"call": "endless line"}, Unavailable),
    ({"call": "flood"}, ToolFault),
    ({"call": "garbage"}, ToolFault),
    ({"result": {"content": 5}}, Unavailable),
    ({"result": {"content": [], "isError": True}}, ToolFault),
  ],
)
def test_a_call_that_is_not_answered(work: dict, fault: type[Exception], capfd):
  with tool("x", hostile(**work)) as one:
    in_time = within()
    with pytest.raises(fault):
      one("text", 3.0 if fault is ToolFault else LONG)
    in_time()
  assert "Traceback" not in capfd.readouterr().err


def test_results_that_are_no_text_or_too_much():
  image = {"type": "image", "data": "eA==", "mimeType": "image/png"}
  structure = {"content": [], "structuredContent": {"a": 1}}
  bomb = {"type": "object", "properties": {"a": {"pattern": "(x+x+)+y"}}}
  result = {"content": [], "structuredContent": {"a": "x" * 64}}
  for work, expected in (
    ({"result": {"content": [image]}}, "[image image/png 1 bytes]"),
    ({"letters": 2_000_000}, "a" * 1_000_000),
    ({"result": structure}, '{"a": 1}'),
    ({"result": result, "output": bomb}, json.dumps(result["structuredContent"])),
  ):
    with tool("x", hostile(**work)) as one:
      assert one("text", LONG) == expected


TEXT = {"type": "text", "text": "seen"}


@pytest.mark.parametrize(
  ("blocks", "expected"),
  [
    (
      [TEXT, {"type": "resource", "resource": {"uri": "file:///a.md", "text": "# T"}}],
      "seen\n[resource file:///a.md]\n# T",
    ),
    (
      [{"type": "resource", "resource": {"uri": "a:b", "blob": "eHh4eA=="}}],
      "[resource a:b 4 bytes]",
    ),
    (
      [{"type": "resource_link", "uri": "file:///b.md", "name": "b.md", "size": 7}],
      "[resource_link b.md file:///b.md 7 bytes]",
    ),
    ([{"type": "audio", "data": "eHg=", "mimeType": "a/b"}], "[audio a/b 2 bytes]"),
    ([{"type": "chart", "data": 1}, TEXT], "[chart]\nseen"),
    ([{"type": "chart", "text": "t", "x": {}}], "t"),
    ([{"type": "resource", "resource": 5}, TEXT], "[resource]\nseen"),
    (
      [{"type": "text"}, 5, None, [], {}, TEXT],
      "[text]\n" + "[block of an unknown type]\n" * 4 + "seen",
    ),
    ([{**TEXT, "annotations": 5, "_meta": 6}], "seen"),
    ([{"type": "x" * 9999, "uri": "\x1b[2J", "name": 5}], f"[{'x' * 2000} [2J]"),
  ],
)
def test_every_block_of_a_result_is_text_or_named(blocks: list, expected: str):
  with tool("x", hostile(result={"content": blocks, "_meta": 5})) as one:
    assert one("text", LONG) == expected
    assert one("text", LONG) == expected  # in the same session
  with tool("x", hostile(result={"content": blocks, "isError": True})) as one:
    with pytest.raises(ToolFault) as e:
      one("text", LONG)
    assert str(e.value) == expected


@pytest.mark.parametrize(
  ("result", "expected"),
  [
    ({"structuredContent": {"a": 1}}, '{"a": 1}'),
    ({"structuredContent": [1]}, "[1]"),
    ({"structuredContent": {"a": 1}, "content": [TEXT]}, "seen"),
    ({"structuredContent": {"a": 1}, "content": [{"type": "c"}]}, '[c]\n{"a": 1}'),
  ],
)
def test_a_structure_is_shown_where_no_block_has_a_text(result: dict, expected: str):
  with tool("x", hostile(result=result)) as one:
    assert one("text", LONG) == expected


def test_the_log_of_a_server_is_bounded():
  command = hostile(log=5_000_000, description=99_999)["command"]
  code = (
    "from tools_sandbox.mcp_client import McpConfig, McpTool\n"
    f"tool = McpTool(McpConfig('x', command={command!r}))\n"
    "print(len(tool.description), tool('text', 60))\ntool.close()"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG
  )
  assert done.stdout == "10000 fine\nfine\n"
  log = done.stderr
  assert 65_000 < len(log) < 70_000 and "\x1b" not in log
  assert log.count("the rest of its standard error is left out") == 1
  assert max(map(len, log.splitlines())) <= 1000


def test_a_response_over_http_has_an_end():
  def endless(reply) -> None:
    reply.raw(kind="application/json")
    while True:
      reply.wfile.write(b" " * (1 << 20))

  def packed(reply) -> None:
    reply.send(b"x", "application/json", Content_Encoding="gzip")

  for action in (endless, packed):
    with Server() as server, pytest.raises(Unavailable):
      server.actions["/mcp"] = action
      McpTool(McpConfig("x", url=f"{server.url}/mcp", start_s=LONG))


def test_a_tool_that_is_not_there_is_named(where):
  with pytest.raises(ValueError, match=r"no tool 'telescope' there"):
    McpTool(McpConfig("telescope", **where))


def test_a_program_that_leaves_one_open_ends_all_the_same():
  program = (
    "from tools_sandbox.mcp_client import McpConfig, McpTool\n"
    f"tool = McpTool(McpConfig('x', command={hostile()['command']!r}))"
  )
  done = subprocess.run([sys.executable, "-c", program], timeout=LONG)
  assert done.returncode == 0

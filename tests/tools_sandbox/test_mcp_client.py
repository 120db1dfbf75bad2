"""MCP tools of real and hostile servers, over stdio and HTTP."""

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

from tools_sandbox import mcp_client
from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.mcp_client import McpConfig, McpTool

SERVER = str(pathlib.Path(__file__).with_name("mcp_server.py"))
STDIO = (sys.executable, SERVER)
HOSTILE = str(pathlib.Path(__file__).with_name("mcp_hostile.py"))


def hostile(**work) -> dict:
  """A faulty server's command; see `mcp_hostile`."""
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
  """The server's command or URL."""
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


def test_a_call_of_a_real_server_and_whose_fault_its_failure_is(where):
  with tool("weather", where) as weather:
    assert weather.description == "The weather of a city."
    for call in (" Ur ", '{"city": "Ur"}', '```json\n{"city": "Ur"}\n```'):
      assert weather(call, LONG) == "rain in Ur[0m"  # control characters are gone
    for call in ("nowhere", '{"city": "nowhere", "more": 1}'):
      with pytest.raises(ToolFault):
        weather(call, LONG)
  with tool("add", where) as add:
    assert add('{"a": 2, "b": 40}', LONG) == "42"
    with pytest.raises(BadCall, match="a JSON object with a, b"):
      add("2 40", LONG)
    # The SDK's server reports wrong parameters as a tool failure, in text.
    for call in ('{"a": "x", "b": 1}', '{"a": 1}', '{"c": 1}', '{"a": [1], "b": 1}'):
      with pytest.raises(BadCall, match=r"executing tool add: .*validation error"):
        add(call, LONG)
    # Parameters accepted by the server are not a fault, even against the schema.
    assert add('{"a": "2", "b": 40.0}', LONG) == "42"


def test_a_slow_call_is_given_up_and_later_ones_of_its_session_overlap(where):
  with tool("meet", where) as meet, concurrent.futures.ThreadPoolExecutor(8) as pool:
    in_time = within()
    with pytest.raises(ToolFault, match="no answer within"):
      meet("999", 0.5)
    in_time()
    assert list(pool.map(lambda _: meet("9", LONG), range(8))) == ["met"] * 8


FAILED = {"content": [{"type": "text", "text": "no"}], "isError": True}
ENUM = {"properties": {"q": {"enum": ["a", 1]}}}


@pytest.mark.parametrize(("call", "fault"), [("b", BadCall), ("a", ToolFault)])
def test_the_schema_decides_whose_fault_a_failure_is(call, fault):
  work = hostile(schema={"type": "object", **ENUM}, result=FAILED)
  with tool("x", work, argument="q") as one, pytest.raises(fault, match="no"):
    one(json.dumps({"q": call}), LONG)


@pytest.mark.parametrize(
  ("schema", "arguments", "fits"),
  [
    (ENUM, {"q": "b"}, False),
    (ENUM, {"q": "a"}, True),
    ({"properties": {}, "additionalProperties": False}, {"q": 1}, False),
    ({"properties": {}, "additionalProperties": {}}, {"q": 1}, True),
    ({"properties": {"q": {"type": ["null", "integer"]}}}, {"q": 1.5}, False),
    ({"properties": {"q": {"type": ["null", "integer"]}}}, {"q": None}, True),
    ({"properties": {"q": {"type": "number"}}}, {"q": True}, False),
    # Unknown rules count as satisfied.
    ({"properties": {"q": {"type": "date"}}}, {"q": 1}, True),
    ({"properties": {"q": {"type": {"a": 1}}}}, {"q": 1}, True),
    ({"properties": {"q": True}}, {"q": 1}, True),
  ],
)
def test_parameters_that_fit_a_schema(schema, arguments, fits):
  assert mcp_client._fits(arguments, schema) == fits


def test_the_server_has_the_environment_of_its_config_and_ends_with_us(monkeypatch):
  monkeypatch.setenv("SECRET_KEY", "sk-1")
  with tool("x", hostile(call="self"), env={"CITY": "Ur"}) as one:
    number, environment = json.loads(one("text", LONG))
    assert environment["CITY"] == "Ur" and "SECRET_KEY" not in environment
    os.kill(number, 0)
  deadline = time.monotonic() + LONG
  with pytest.raises(ProcessLookupError):
    while time.monotonic() < deadline:
      os.kill(number, 0)
      time.sleep(0.05)


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


def test_an_unsendable_call_is_the_models_fault_and_the_session_stays():
  with tool("x", hostile(call="self")) as one:
    number, _ = json.loads(one("{}", LONG))
    for call in (
      '{"q": "\\ud800"}',
      "half a pair: \ud800",
      '{"\\ud800": "x"}',
      '{"q": NaN}',
      '{"q": -1e999}',
      f'{{"q": {"[" * 80}{"]" * 80}}}',
      f'{{"q": {"[" * 400}{"]" * 400}}}',
    ):
      with pytest.raises(BadCall):
        one(call, LONG)
      # Another server process would have another pid.
      assert json.loads(one("{}", LONG))[0] == number, call


@pytest.mark.slow
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
  with pytest.raises(ProcessLookupError):  # the process is gone
    os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fault", "why"),
  [
    ("endless", "more than 100 pages"),
    ("flood", "no answer within 6 s"),  # as from a hanging server
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


def test_a_server_that_dies_is_infrastructure_and_starts_again():
  with tool("x", hostile(call="die")) as one:
    in_time = within()
    for _ in range(2):
      with pytest.raises(Unavailable):
        one("text", LONG)
    in_time()


@pytest.mark.parametrize(
  ("work", "fault"),
  [
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
      one("text", 1.0 if fault is ToolFault else LONG)
    in_time()
  assert "Traceback" not in capfd.readouterr().err


TEXT = {"type": "text", "text": "seen"}
IMAGE = {"type": "image", "data": "eA==", "mimeType": "image/png"}
FILE = {"uri": "file:///a.md", "text": "# T"}
STRUCTURE = {"structuredContent": {"a": 1}}
LINK = {"type": "resource_link", "uri": "file:///b.md", "name": "b.md", "size": 7}
# A result's content blocks, or the whole result -> its text.
RESULTS = [
  ([IMAGE], "[image image/png 1 bytes]"),
  (
    [TEXT, {"type": "resource", "resource": FILE}],
    "seen\n[resource file:///a.md]\n# T",
  ),
  (
    [{"type": "resource", "resource": {"uri": "a:b", "blob": "eHh4eA=="}}],
    "[resource a:b 4 bytes]",
  ),
  ([LINK], "[resource_link b.md file:///b.md 7 bytes]"),
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
  # Structured content is shown if no block has text.
  ({**STRUCTURE, "content": []}, '{"a": 1}'),
  (STRUCTURE, '{"a": 1}'),
  ({"structuredContent": [1]}, "[1]"),
  ({**STRUCTURE, "content": [TEXT]}, "seen"),
  ({**STRUCTURE, "content": [{"type": "c"}]}, '[c]\n{"a": 1}'),
]


def test_every_block_of_a_result_is_text_or_named():
  rows = [
    (result if isinstance(result, dict) else {"content": result, "_meta": 5}, text)
    for result, text in RESULTS
  ]
  failures = [({**result, "isError": True}, text) for result, text in rows]
  results = [result for result, _ in rows + failures]
  with tool("x", hostile(results=results)) as one:  # all in one session
    for result, text in rows:
      assert one("text", LONG) == text, result
    for result, text in failures:
      with pytest.raises(ToolFault) as e:
        one("text", LONG)
      assert str(e.value) == text, result


def test_results_that_are_too_much_or_against_their_schema():
  bomb = {"type": "object", "properties": {"a": {"pattern": "(x+x+)+y"}}}
  result = {"content": [], "structuredContent": {"a": "x" * 64}}
  for work, expected in (
    ({"letters": 2_000_000}, "a" * 1_000_000),
    ({"result": result, "output": bomb}, json.dumps(result["structuredContent"])),
  ):
    with tool("x", hostile(**work)) as one:
      assert one("text", LONG) == expected


def test_a_servers_log_is_bounded_and_a_program_ends_that_leaves_a_tool_open():
  command = hostile(log=5_000_000, description=99_999)["command"]
  code = (
    "from tools_sandbox.mcp_client import McpConfig, McpTool\n"
    f"tool = McpTool(McpConfig('x', command={command!r}))\n"
    "print(len(tool.description), tool('text', 60))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG
  )
  assert done.returncode == 0 and done.stdout == "10000 fine\nfine\n"
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


def test_a_tool_that_is_not_there_is_named(url):
  with pytest.raises(ValueError, match=r"no tool 'telescope' there"):
    McpTool(McpConfig("telescope", url=url))

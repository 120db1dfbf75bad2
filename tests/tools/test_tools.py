"""Every tool, configured in one toolbox, with mock servers on loopback."""

from __future__ import annotations

import dataclasses
import inspect
import sys

import ml_collections
import pytest
from http_server import Request, Server

from coa_jax.protocol import prompts, roles
from coa_jax.protocol.tools import SPECS
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rewards.code.grader import CodeConfig
from coa_jax.runtime.config import ConfigError, read_config
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.tools import TOOLS
from tests.backend import BACKEND
from tools_sandbox.client import Sandbox
from tools_sandbox.faults import NoJail
from tools_sandbox.host.pool import SandboxPool

KEY = "sk-0123456789-secret"
OK, MODEL, TOOL = CallStatus.OK, CallStatus.MODEL, CallStatus.TOOL
DOWN = CallStatus.INFRASTRUCTURE
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + b"\x00\x00\x00\x02" * 2 + bytes(9)
HIT = {"title": "Ur", "link": "http://a.test/", "snippet": "A city."}
REPLIES = {
  "/search": {"organic": [HIT]},
  "/retrieve": {"result": [[{"document": {"id": "1", "contents": '"Ur"\nA city.'}}]]},
  "/v1/chat/completions": {"choices": [{"message": {"content": "a red box"}}]},
  "/run": {
    "stdout": "42\n",
    "stderr": "",
    "exit_code": 0,
    "verdict": "ok",
    "seconds": 0.01,
    "truncated": False,
  },
}
IMAGE = '```json\n{"file_path": "a.png"}\n```'
CALLS = {
  "wiki_search": ("Ur", "1. Ur: A city."),
  "web_search": ("Ur", "1. [Ur](http://a.test/)\nA city."),
  "visual_inspector": (IMAGE, "a red box"),
  "code": ("```py\nprint(6 * 7)\n```", "42"),
}


class Services(Server):
  """A mock server for all services; with `down` they fail."""

  down = False

  def respond(self, request: Request) -> None:
    status = 503 if self.down else 200
    if request.command == "POST":
      request.send_json(REPLIES[request.path], status)
    else:
      request.send(b"<html><p>Ur was a city of Sumer.</p></html>", status=status)


@pytest.fixture
def server():
  with Services() as running:
    yield running


@pytest.fixture
def config(server, tmp_path) -> ml_collections.ConfigDict:
  (tmp_path / "key").write_text(KEY)
  (tmp_path / "a.png").write_bytes(PNG)
  fetch = dict(allow=["127.0.0.1/32"])
  chat = dict(base_url=server.url + "/v1", model="eyes", key_file=str(tmp_path / "key"))
  tools = dict(
    tools=tuple(CALLS),
    sandbox=BACKEND,
    retriever=server.url,
    timeout_s=60.0,
    web=dict(
      endpoint=server.url + "/search",
      key_file=str(tmp_path / "key"),
      cache=str(tmp_path / "cache.sqlite"),
    ),
    crawl=dict(fetch=fetch, page_chars=1000),
    vision=dict(chat=chat, folder=str(tmp_path), fetch=fetch),
  )
  return ml_collections.ConfigDict(dict(tools=tools))


def toolbox(config, **changes) -> Toolbox:
  config.tools.update(changes)
  return Toolbox(read_config(config.tools, ToolsConfig, "tools"))


def test_every_row_of_the_protocol_has_a_class():
  assert set(TOOLS) == set(SPECS)


def test_every_tool_answers(config, caplog):
  with toolbox(config) as box:
    for name, (content, result) in CALLS.items():
      call = box.call(name, content)
      assert (call.status, call.result) == (OK, result), name
  assert KEY not in caplog.text and KEY not in config.to_json()


def test_a_service_that_is_down_is_nobodys_wrong_answer(server, config):
  server.down = True
  with toolbox(config, timeout_s=0.6) as box:
    for name, (content, _) in CALLS.items():
      if name != "code":
        call = box.call(name, content)
        assert (call.status, call.result) == (DOWN, "error: the tool is unavailable")


@pytest.mark.slow
def test_programs_run_on_a_service_and_its_failure_is_not_theirs(server, config):
  remote = dict(urls=[server.url], wait_s=2.5)
  config.tools.remote = ml_collections.ConfigDict(remote)
  with toolbox(config, tools=("code",), sandbox="remote", timeout_s=3.0) as box:
    call = box.call("code", CALLS["code"][0])
    assert (call.status, call.result) == (OK, "42")
    server.down = True
    call = box.call("code", CALLS["code"][0])
    assert (call.status, call.result) == (DOWN, "error: the sandbox is unavailable")
  with pytest.raises(ValueError, match=r"tools.sandbox='remote'.*status 503"):
    toolbox(config)


@pytest.mark.slow
def test_pages_are_read_and_their_failures_are_the_tools(server, config):
  pytest.importorskip("trafilatura", reason="crawl_page's extraction is not installed")
  with toolbox(config, tools=("crawl_page",)) as box:
    call = box.call("crawl_page", server.url + "/")
    assert (call.status, call.result) == (OK, "Ur was a city of Sumer.")
    server.down = True
    call = box.call("crawl_page", server.url + "/")
    assert (call.status, call.result[:6]) == (TOOL, "error:")
    call = box.call("crawl_page", "http://127.0.0.2/")
    assert call.status == TOOL and "may not be connected" in call.result
    assert box.call("crawl_page", "what I mean").status == MODEL
    assert box.call("crawl_page", "http://huggingface.co/x").status == TOOL


def test_malformed_calls_are_the_models(config):
  with toolbox(config) as box:
    assert box.call("visual_inspector", "a.png").status == MODEL
    assert box.call("visual_inspector", IMAGE.replace("a.p", "b.p")).status == MODEL
    assert box.call("web_search", "x" * 3000).status == MODEL


def test_offline_the_corpus_answers_both_searches(config, tmp_path):
  (tmp_path / "c.jsonl").write_text('{"id": "7", "title": "Ur", "text": "A city."}\n')
  config.tools.web = ml_collections.ConfigDict()
  config.tools.retriever = None
  searches = ("wiki_search", "web_search")
  with toolbox(config, tools=searches, corpus=str(tmp_path / "c.jsonl")) as box:
    assert box.call("wiki_search", "ur").result == "1. Ur: A city."
    assert box.call("web_search", "ur").result == "1. [Ur](7)\nA city."


def test_an_mcp_server_answers_a_tag(config):
  pytest.importorskip("mcp", reason="the MCP SDK is an extra: pip install '.[mcp]'")
  server = "tests/tools_sandbox/mcp_hostile.py"
  entry = dict(command=[sys.executable, server, "{}"], tool="x")
  with toolbox(config, tools=("web_search",), mcp=dict(web_search=entry)) as box:
    assert box.call("web_search", "Ur").result == "fine\nfine"
    assert box.call("web_search", '{"q": NaN}').status == MODEL
    assert box.call("web_search", " ").result == "error: <web_search> is empty"
  with pytest.raises(ConfigError, match=r"no field 'comand'.*'command'"):
    toolbox(config, mcp=dict(web_search=dict(tool="x", comand=["y"])))


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"corpus": "c"}, "either a corpus or a retriever"),
    ({"retriever": None}, "wiki_search needs"),
    ({"web": {}}, "web_search needs web.endpoint"),
    ({"vision": None}, "visual_inspector needs"),
    ({"timeouts": {"code": 0.0}}, "above 0"),
    ({"timeouts": {"telescope": 1.0}}, "timeouts: no tool 'telescope'"),
    ({"mcp": {"code": {"tool": "x"}}}, "either a command or a url"),
    ({"sandbox": "remote"}, "remote: the services of sandbox='remote'"),
    ({"remote": {"urls": ["http://a"]}}, "and of no other"),
    (
      {"sandbox": "remote", "remote": {"urls": ["http://a"], "wait_s": 11.0}},
      "wait_s=11 must be below grace_s=10",
    ),
    ({"descriptions": {"code": "ends </code>"}}, "one line without a tag"),
    ({"web": {"endpont": "x"}}, "did you mean 'endpoint'"),
  ],
)
def test_impossible_configs_are_refused(config, changes, words: str):
  with pytest.raises(ConfigError, match=words):
    values = {**config.tools.to_dict(), **changes}
    read_config(ml_collections.ConfigDict(values), ToolsConfig, "tools")


def test_a_description_reaches_the_prompt(config):
  config.tools.descriptions = dict(web_search="ask for the weather; write a city")
  tools = read_config(config.tools, ToolsConfig, "tools")
  variant = roles.get_variant("unified").with_tools(tools.tool_descriptions)
  text = prompts.instructions(variant)
  assert "ask for the weather; write a city." in text
  assert "search the web" not in text and "run a Python program" in text


def test_needs_of_a_tool_are_checked_first(config, tmp_path):
  tools = read_config(config.tools, ToolsConfig, "tools")
  (tmp_path / "key").unlink()
  with pytest.raises(ValueError, match="tool web_search: key_file"):
    Toolbox(tools)
  with Toolbox(dataclasses.replace(tools, enabled=False)) as box:
    for name in CALLS:
      call = box.call(name, "x")
      assert (call.status, call.result) == (TOOL, "tools are off")


def test_the_default_is_the_jail_and_nothing_weaker_is_taken_unasked():
  assert ToolsConfig(tools=("code",)).sandbox == CodeConfig().sandbox == "jail"
  for opener in (Sandbox, SandboxPool):
    assert inspect.signature(opener).parameters["backend"].default == "jail"


@pytest.mark.parametrize(
  ("fault", "advised"),
  [(NoJail("no unshare"), True), (RuntimeError("the probe failed"), False)],
)
def test_the_weaker_wall_is_advised_only_where_there_can_be_no_jail(
  monkeypatch, fault, advised
):
  def refuse(**unused):
    raise fault

  monkeypatch.setattr("coa_jax.tools.toolbox.Sandbox", refuse)
  with pytest.raises(ValueError, match=f"tools.sandbox='jail': {fault}") as e:
    Toolbox(ToolsConfig(tools=("code",)))
  assert ("--config.tools.sandbox=subprocess" in str(e.value)) == advised

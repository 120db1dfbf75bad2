"""Tools added by config alone: a real MCP server and a function, called by name."""

from __future__ import annotations

import re
import sys

import ml_collections
import pytest

from coa_jax.data.tasks.task import Task
from coa_jax.protocol import parser, prompts, roles, tool_bodies
from coa_jax.protocol.grammar.language import compile_grammar
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.rollout.types import Attempt
from coa_jax.runtime.config import ConfigError, read_config
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.types import CallContext, CallRequest
from tests import toy

SERVER = dict(command=[sys.executable, "tests/tools_sandbox/mcp_server.py"])
ADD = dict(description="the sum of integers a and b", mcp=dict(tool="add", **SERVER))
ROUND = dict(description="cuts x to an integer", function="math:floor")
SHOUT = dict(
  description="text in capitals", function="tests.tools.test_functions:shout"
)


def shout(text: str) -> str:
  return text.upper()


async def later(text: str) -> str:
  return text


def tools(**functions) -> ToolsConfig:
  values = dict(tools=[], functions=functions)
  return read_config(ml_collections.ConfigDict(values), ToolsConfig, "tools")


@pytest.fixture(scope="module")
def config() -> ToolsConfig:
  return tools(add=ADD, shout=SHOUT)


@pytest.fixture(scope="module")
def dialect(config) -> roles.Variant:
  return roles.get_variant("unified").with_tools(config.tool_descriptions)


@pytest.fixture(scope="module")
def grammar(dialect):
  return compile_grammar(dialect)


def accepts(grammar, text: str) -> bool:
  state = 0
  for b in text.encode():
    state = grammar.next_SX[state, b]
    if state < 0:
      return False
    if grammar.resume_S[state] >= 0:
      state = grammar.resume_S[state]
  return bool(grammar.ends_S[state])


def test_a_trajectory_calls_a_real_mcp_server_by_name(config, dialect, grammar):
  pytest.importorskip("mcp", reason="the MCP SDK is an extra: pip install '.[mcp]'")
  with Toolbox(config) as box:
    setting = EpisodeConfig(dialect, "full", max_calls=8, tool_seconds=120.0)
    task = Task("t", "What is 2 + 40?", ("42",))
    attempt = Attempt(task, 0, 0, 0, 1.0)
    playing = CoAEpisode(attempt, toy.tokenizer(), box, setting)
    think = roles.wrap("think", "t")
    calls = [
      roles.wrap("tool", tool_bodies.render_function_call("add", {"a": 2, "b": 40})),
      roles.wrap("tool", tool_bodies.render_function_call("shout", {"text": "done"})),
    ]
    end = roles.wrap("suggested_answer", "42") + roles.wrap("double_check", "4")
    answer = end + roles.wrap("answer", "42")
    out = toy.drive(playing, [*(think + c for c in calls), answer])
  assert [(c.status, c.result) for c in out.calls] == [
    (CallStatus.OK, "42"),
    (CallStatus.OK, "DONE"),
  ]
  text = "".join(s.text for s in out.segments if s.author != "prompt")
  assert parser.parse(text, dialect).ok
  assert "<observation> 42</observation>" in text
  prompt = prompts.instructions(dialect)
  assert "- add: the sum of integers a and b." in prompt and "shout" in prompt
  # The grammar allows the policy's text.
  own = re.sub("<observation>.*?</observation>", "", text)
  assert accepts(grammar, own)


def whose(text: str, context: CallContext | None) -> str:
  return f"{text} {context}"


def test_a_function_may_ask_for_the_trajectory():
  path = f"{__name__}:whose"
  config = tools(whose=dict(description="its argument is text", function=path))
  call = tool_bodies.render_function_call("whose", {"text": "of"})
  context = CallContext("task 7", 2, 5)
  with Toolbox(config) as box:
    made = box.start(CallRequest("tool", call, context=context)).result()
    assert made.result == f"of {context}"
    assert box.call("tool", call).result == "of None"
    # The model can not set it.
    arguments = {"text": "of", "context": "mine"}
    call = tool_bodies.render_function_call("whose", arguments)
    assert box.call("tool", call).status == CallStatus.MODEL


def test_calls_that_do_not_fit_are_the_models():
  with Toolbox(tools(shout=SHOUT, cut=ROUND)) as box:
    for body in (
      "shout",
      '{"name": "shout"}',
      '{"name": "shout", "arguments": [1]}',
      '{"name": "whisper", "arguments": {}}',
      '{"name": "shout", "arguments": {"words": "a"}}',
      '{"name": "shout", "arguments": {"text": "a"}, "more": 1}',
    ):
      call = box.call("tool", body)
      assert call.status == CallStatus.MODEL, (body, call)
    assert box.call("code", "x").status == CallStatus.MODEL
    broken = box.call("tool", '{"name": "shout", "arguments": {"text": 1}}')
    assert broken.status == CallStatus.INFRASTRUCTURE  # the function itself failed


@pytest.mark.parametrize(
  ("body", "fits"),
  [
    ('{"name": "add", "arguments": {"a": 1, "b": -20}}', True),
    ('{"name": "add", "arguments": {}}', True),
    ('{"name":"add","arguments":{"text":"x y","yes":true}}', True),
    ('{"name": "sub", "arguments": {}}', False),
    ('{"name": "add", "arguments": {"a": 01}}', False),
    ('{"name": "add", "arguments": {"a": 1,}}', False),
    ('{"name": "add"}', False),
    ("add", False),
  ],
)
def test_the_grammar_allows_only_what_the_parser_takes(dialect, grammar, body, fits):
  text = roles.wrap("think", "t") + roles.wrap("tool", body)
  tail = roles.wrap("suggested_answer", "1") + roles.wrap("double_check", "4")
  tail += roles.wrap("answer", "1")
  assert accepts(grammar, text + tail) == fits
  if fits:
    whole = text + roles.wrap("observation", "o") + tail
    assert parser.parse(whole, dialect).ok


@pytest.mark.parametrize(
  ("functions", "words"),
  [
    ({"a b": ROUND}, "must match"),
    ({"x": dict(description="d")}, "either mcp or function"),
    ({"x": dict(description="d", function="os.system")}, "module:name"),
    ({"x": dict(description="two\nlines", function="a:b")}, "one line"),
    ({"x": dict(descripton="d")}, "did you mean 'description'"),
  ],
)
def test_bad_entries_are_refused(functions, words):
  with pytest.raises(ConfigError, match=words):
    tools(**functions)


def test_a_missing_function_is_reported_at_the_start():
  paths = ("no_such_module:f", "math:no_such_function", "math:pi", f"{__name__}:later")
  for path in paths:
    config = tools(x=dict(description="d", function=path))
    with pytest.raises(ValueError, match=r"functions\.x: function"):
      Toolbox(config)
  with pytest.raises(ValueError, match="'tool' needs an entry"):
    ToolsConfig(tools=("tool",))
  with pytest.raises(ValueError, match="no tool 'tool'"):
    roles.get_variant("mhqa").with_tools({"tool:add": "d"})


def test_names_do_not_change_other_dialects():
  plain = roles.get_variant("unified").with_tools(("code",))
  assert "tool" not in plain.tags and not plain.functions
  assert "called by name" not in prompts.instructions(plain)

"""Several calls in one `tool` span: made together, read in call order."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import pytest
import toy

from coa_jax.data.tasks.task import Task
from coa_jax.protocol import parser, prompts, roles
from coa_jax.protocol.grammar.automaton import compile_constraint
from coa_jax.protocol.trajectory import CallStatus, Status, Trajectory
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.rollout.types import Attempt
from coa_jax.tools.functions import FunctionTool
from coa_jax.tools.journal import ToolJournal
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from tests.backend import BACKEND

MOST = 3
TASK = Task("t", "Which is the largest?", ("Ur",))
together = threading.Barrier(2)


def wait(seconds: float, text: str) -> str:
  time.sleep(seconds)
  return text


def meet(text: str) -> str:
  """Returns once two calls run at the same time."""
  together.wait(timeout=20)
  return text


def tools(**fields) -> ToolsConfig:
  functions = {
    name: FunctionTool("its arguments are in the task", function=f"{__name__}:{name}")
    for name in ("wait", "meet")
  }
  return ToolsConfig(
    tools=("code",), sandbox=BACKEND, functions=functions, parallel=MOST, **fields
  )


def variant(config: ToolsConfig) -> roles.Variant:
  out = roles.get_variant("unified").with_tools(config.tool_descriptions)
  return dataclasses.replace(out, parallel=config.parallel)


def calls(*items: tuple[str, dict]) -> str:
  body = json.dumps([{"name": name, "arguments": given} for name, given in items])
  return roles.wrap(roles.THINK, "on") + roles.wrap("tool", body)


def play(turns: list[str], toolbox, config=None, **limits) -> Trajectory:
  limits = {"max_calls": 8, "tool_seconds": 60.0} | limits
  settings = EpisodeConfig(variant(config or tools()), "brief", **limits)
  episode = CoAEpisode(Attempt(TASK, 0, 0, 0, 1.0), toy.tokenizer(), toolbox, settings)
  return toy.drive(episode, turns)


@pytest.fixture(scope="module")
def toolbox():
  with Toolbox(tools()) as box:
    yield box


PROGRAM = "```py\nprint(6 * 7)\n```"
BOTH = calls(("meet", {"text": "a"}), ("meet", {"text": "b"}))


def test_calls_run_together_and_are_read_in_their_order(toolbox):
  slow = ("wait", {"seconds": 0.3, "text": "slow"})
  mixed = calls(
    slow, ("code", {"input": PROGRAM}), ("wait", {"seconds": 0, "text": "x"})
  )
  t = play([BOTH, mixed, toy.end("Ur")], toolbox)
  assert [c.result for c in t.calls] == ["a", "b", "slow", "42", "x"]
  assert [c.name for c in t.calls] == ["tool", "tool", "tool", "code", "tool"]
  assert {c.status for c in t.calls} == {CallStatus.OK}
  texts = [s.text for s in t.segments if s.role == roles.OBSERVATION]
  assert texts[1] == "<observation> 1. slow\n2. 42\n3. x</observation>"
  assert (t.usage.tool_calls, t.usage.tool_turns, t.reward) == (5, 2, 1)
  assert parser.parse(t.text, variant(tools())).ok


def test_mistakes_in_one_call_leave_the_others(toolbox):
  wrong = calls(("code", {"program": "1"}), ("meat", {}), ("code", {"input": PROGRAM}))
  many = calls(*[("wait", {"seconds": 0, "text": "x"})] * (MOST + 1))
  single = calls(("code", {"input": PROGRAM})).replace("[", "").replace("]", "")
  t = play([wrong, many, single, toy.end("Ur")], toolbox)
  model, ok = CallStatus.MODEL, CallStatus.OK
  assert [c.status for c in t.calls] == [model, model, ok, model, ok]
  assert "takes the argument input" in t.calls[0].result
  assert t.calls[3].result == f"error: more than {MOST} calls at once"


def test_each_call_counts(toolbox):
  t = play([BOTH], toolbox, max_calls=1)
  assert (t.status, t.calls) == (Status.TURN_LIMIT, [])
  # Seconds are those that the trajectory waited.
  t = play([BOTH, toy.end("Ur")], toolbox, max_calls=2, tool_seconds=30.0)
  assert t.status == Status.ENDED


def test_long_results_share_the_room(toolbox):
  long = ("wait", {"seconds": 0, "text": "word " * 400})
  t = play([calls(long, long), toy.end("Ur")], toolbox, observation_tokens=200)
  (observation,) = [s for s in t.segments if s.role == roles.OBSERVATION]
  assert len(observation.ids) <= 200
  assert observation.text.count("characters cut") >= 2
  assert "2. word" in observation.text


def test_tools_with_a_state_are_called_alone():
  config = tools(session=BACKEND == "jail")
  if not config.session:
    pytest.skip("sessions need the jail")
  with Toolbox(config) as box:
    t = play(
      [
        calls(("code", {"input": PROGRAM}), ("code", {"input": PROGRAM})),
        calls(("code", {"input": PROGRAM})),
        toy.end("Ur"),
      ],
      box,
      config,
    )
  assert [c.result for c in t.calls] == ["error: code is called alone"] * 2 + ["42"]


def test_a_resumed_run_makes_no_call_twice(toolbox, tmp_path):
  def run() -> Trajectory:
    journalled = ToolJournal(str(tmp_path)).tools(toolbox, 0, ("a",))
    return play([BOTH, toy.end("Ur")], journalled)

  whole = run()
  together.abort()  # a call made again would fail
  try:
    assert run().calls == whole.calls
  finally:
    together.reset()


def test_the_grammar_allows_a_list_up_to_the_limit():
  dialect = variant(tools())
  tokenizer = toy.tokenizer()
  constraint = compile_constraint(dialect, tokenizer, tokenizer.vocab_size)

  def allowed(text: str) -> bool:
    return constraint.states(tokenizer.encode(text))[-1] >= 0

  one = ("code", {"input": "x"})
  two = ("wait", {"text": "y"})
  assert allowed(calls(one)) and allowed(calls(one, two, two))
  assert not allowed(calls(one, two, two, two))
  assert not allowed(calls(("other", {})))
  assert allowed(calls(one).replace("[", "").replace("]", ""))
  assert not allowed(calls(one).replace("]", ""))
  assert parser.content_fault("tool", json.dumps([{"name": "a", "arguments": {}}]))
  assert "Up to 3 calls" in prompts.instructions(dialect)

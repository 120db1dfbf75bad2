"""Calls made together are imported as one span, with their results in call order."""

from __future__ import annotations

import dataclasses
import json

import foreign
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from imported import ENDS, UNIFIED, WHOLE, asks, read

from coa_jax.data.teacher.convert import Dropped
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.tool_bodies import parse_function_calls
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.rollout.types import Attempt
from coa_jax.tools.functions import FunctionTool
from coa_jax.tools.toolbox import Toolbox, ToolsConfig

THREE = dataclasses.replace(UNIFIED, parallel=3)
TOOLS = {"say": FUNCTION_TAG, "search": "web_search"}
MADE = [("say", {"text": "a"}), ("search", {"query": "q\n<x>"}), ("say", {"text": "c"})]
RESULTS = ["a", "</observation>", "c"]
BLOCKS = "\n".join(
  f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>"
  for n, a in MADE
)


def openai(made=tuple(MADE), answered=(2, 0, 1), ids=True) -> dict:
  """A row whose results come in another order, told apart by id."""
  calls = []
  for n, (name, arguments) in enumerate(made):
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls.append({"id": f"c{n}" if ids else None, "function": function})
  results = [
    {"role": "tool", "content": RESULTS[n % 3]}
    | ({"tool_call_id": f"c{n}"} if ids else {})
    for n in answered
  ]
  said = {"role": "assistant", "content": "go", "tool_calls": calls}
  return asks(said, *results, ENDS)


def hermes(*responses: str) -> dict:
  said = {"role": "assistant", "content": f"go\n{BLOCKS}"}
  blocks = "".join(f"<tool_response>\n{r}\n</tool_response>\n" for r in responses)
  return asks(said, {"role": "user", "content": blocks}, ENDS)


def turns(trajectory: Trajectory, variant=THREE) -> list[list[tuple[str, dict]]]:
  """The calls in each `tool` span."""
  parsed = parse(trajectory.text, variant)
  assert parsed.ok, parsed
  spans = [s.content for s in parsed.spans if s.role == FUNCTION_TAG]
  return [[(c.name, c.arguments) for c in parse_function_calls(s)] for s in spans]


WRITTEN = [("say", {"text": "a"}), ("web_search", {"input": "q\n<x>"})]
WRITTEN += [("say", {"text": "c"})]


@pytest.mark.parametrize(
  "row", [openai(), openai(answered=(0, 1, 2), ids=False), hermes(*RESULTS)]
)
def test_calls_of_one_message_are_one_span(row):
  _, t = read("chat", row, variant=THREE, tools=TOOLS)
  assert turns(t) == [WRITTEN]
  assert [c.result for c in t.calls] == RESULTS
  assert [c.name for c in t.calls] == ["tool", "web_search", "tool"]
  made = [s for s in t.segments if s.role == FUNCTION_TAG]
  (observed,) = [s for s in t.segments if s.role == roles.OBSERVATION]
  assert [s.author for s in made] == [Author.POLICY]
  assert observed.author == Author.TOOL  # never trained on
  shown = roles.escape("1. a\n2. </observation>\n3. c")
  assert observed.text == roles.wrap(roles.OBSERVATION, shown)


def test_a_dialect_of_single_calls_gets_one_after_the_other():
  _, t = read("chat", openai(), tools=TOOLS)
  assert [len(turn) for turn in turns(t, UNIFIED)] == [1, 1]
  spans = [s.role for s in parse(t.text, UNIFIED).spans]
  assert spans.count(roles.OBSERVATION) == 3
  # More calls than the dialect's limit fill several spans.
  many = openai((MADE * 2)[:5], range(5))
  two = dataclasses.replace(UNIFIED, parallel=2)
  _, t = read("chat", many, variant=two, tools=TOOLS)
  assert [len(turn) for turn in turns(t, two)] == [2, 2]
  assert "<web_search> q\n<x></web_search>" in t.text  # the fifth call is alone
  assert len(t.calls) == 5


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    (openai(answered=(0, 2)), "no_result"),
    (openai(answered=(0,), ids=False), "shared_observation"),
    (openai(answered=(0, 1, 2, 1)), "stray_result"),
    (openai(answered=(0, 1, 2, 2), ids=False), "stray_result"),
    (hermes("a", "b"), "no_result"),
    (hermes("all"), "shared_observation"),
    (hermes("a", "b", "c", "d"), "stray_result"),
  ],
)
def test_a_wrong_number_of_results_is_refused(row, reason):
  dropped = read("chat", row, variant=THREE, tools=TOOLS)
  assert isinstance(dropped, Dropped) and dropped.reason == reason


def test_a_tool_outside_the_dialect_is_refused_in_a_list_too():
  less = dataclasses.replace(UNIFIED.with_tools(("code", "tool")), parallel=3)
  dropped = read("chat", openai(), variant=less, tools=TOOLS)
  assert (dropped.reason, "<web_search>" in dropped.detail) == ("unknown_tool", True)


@settings(max_examples=60, deadline=None)
@given(foreign.chat(), st.integers(1, 8))
def test_every_call_and_every_result_is_kept_for_any_limit(drawn, most):
  variant = dataclasses.replace(UNIFIED, parallel=most)
  _, t = read("chat", drawn.row, variant=variant)
  parsed = parse(t.text, variant)
  assert parsed.ok
  assert [(c.name, c.arguments, c.result) for c in t.calls] == drawn.calls
  written = []
  for span in parsed.spans:
    if span.role == FUNCTION_TAG:
      calls = parse_function_calls(span.content)
      assert 1 < len(calls) <= most
      written += [(c.name, c.arguments["input"]) for c in calls]
    elif span.role in variant.tools:
      written.append((span.role, span.content))
  assert written == [call[:2] for call in drawn.calls]


def say(text: str) -> str:
  return text


def test_our_loop_writes_what_the_importer_writes():
  functions = {"say": FunctionTool("says", function=f"{__name__}:say")}
  config = ToolsConfig(tools=(), functions=functions, parallel=3)
  variant = roles.get_variant("unified").with_tools(config.tool_descriptions)
  variant = dataclasses.replace(variant, parallel=3)
  row = openai([MADE[0], MADE[2]], (0, 2))
  row["messages"][3]["tool_call_id"] = "c1"
  task, t = read("chat", row, variant=variant, tools=TOOLS, convert=WHOLE)
  texts: list[str] = [""]  # the policy's turns
  for s in t.segments:
    if s.author == Author.POLICY:
      texts[-1] += s.text
    elif s.author == Author.TOOL:
      texts.append("")
  with Toolbox(config) as box:
    limits = EpisodeConfig(variant, "brief", max_calls=4, tool_seconds=30.0)
    attempt = Attempt(task, 0, 0, 0, 1.0)
    played = toy.drive(CoAEpisode(attempt, toy.tokenizer(), box, limits), texts)
  assert played.text == t.text
  assert [c.result for c in played.calls] == [c.result for c in t.calls] == ["a", "c"]

"""A team whose search agent makes several calls at the same time."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.agents import TeamConfig, solve
from coa_jax.data.teacher.backend import Reply
from coa_jax.data.teacher.convert import ConvertConfig, convert
from coa_jax.data.teacher.journal import Journal
from coa_jax.data.teacher.prompts import PROMPTS
from coa_jax.data.teacher.runs import Run
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.tool_bodies import parse_function_calls
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall

TOOLS = ("wiki_search", "web_search")
TASK = Task("t", "Whose town is larger?", ("Ada",))
VARIANT = roles.get_variant("unified").with_tools([*TOOLS, "tool"])
TWO = "TOOL: wiki_search\nQUERY: Ur\n\nTOOL: web_search\nQUERY: Uruk\nits size"


class Team:
  """Replies in order for the search agent; the same one for each other agent."""

  def __init__(self, *searches: str):
    self.searches = list(searches)
    self.seen: dict[str, str] = {}

  def __call__(self, agent, messages):
    self.seen[agent] = messages[0].content
    if agent == runs.SEARCH:
      return Reply(self.searches.pop(0))
    if agent == runs.ORCHESTRATOR:
      legal = messages[-1].content.rpartition("[choose]\n")[2].split(", ")
      planned = any("[plan]" in m.content for m in messages)
      work = runs.SEARCH if self.searches and planned else legal[-1]
      return Reply(f"NEXT: {work}\nREASON: on")
    return Reply({"solver": "ANSWER: Ada", "verifier": "SCORE: 4"}.get(agent, "fine"))


def echo(name: str, arguments: str) -> ToolCall:
  return ToolCall(name, arguments, f"{name} of {arguments}")


def play(team: Team, call=echo, parallel=3, **limits) -> Run:
  config = TeamConfig(parallel=parallel, **limits)
  return solve(TASK, team, call, TOOLS, config, str.split)


def test_calls_meet_and_become_one_span():
  together = threading.Barrier(2)

  def meet(name, arguments):
    together.wait(timeout=20)
    return echo(name, arguments)

  team = Team(TWO)
  run = play(team, meet)
  assert run.status == Status.ENDED
  made = [("wiki_search", "Ur"), ("web_search", "Uruk\nits size")]
  assert [(c.name, c.arguments) for c in run.calls] == made
  kinds = [e.kind for e in run.events]
  at = kinds.index(runs.CALL)
  assert kinds[at : at + 5] == [*[runs.CALL] * 2, *[runs.OBSERVATION] * 2, "reflection"]
  assert sum(e.prompt > 0 for e in run.events) == run.usage.model_calls
  assert "at most 3 times" in team.seen[runs.SEARCH]

  # --- One span where the dialect has such spans, else one call after the other.
  for most, per_turn in ((3, [2]), (1, [1, 1])):
    variant = dataclasses.replace(VARIANT, parallel=most)
    t = convert(run, TASK, variant, [], ConvertConfig(missing_think="Go on."))
    spans = parse(t.text, variant)
    assert spans.ok and t.calls == run.calls
    calls = [s.content for s in spans.spans if s.role in VARIANT.tools]
    assert [len(parse_function_calls(c) or [0]) for c in calls] == per_turn
  assert (
    "1. wiki_search of Ur\n2. web_search"
    in convert(run, TASK, dataclasses.replace(VARIANT, parallel=3), []).text
  )


def test_a_team_of_single_calls_is_asked_as_before():
  team = Team("QUERY: Ur\nTOOL: web_search")
  run = play(team, parallel=1)
  assert team.seen[runs.SEARCH] == PROMPTS[runs.SEARCH]
  assert team.seen[runs.ORCHESTRATOR] == PROMPTS[runs.ORCHESTRATOR]
  assert [c.arguments for c in run.calls] == ["Ur\nTOOL: web_search"]


@pytest.mark.parametrize(
  ("reply", "why"),
  [
    ("QUERY: a\nQUERY: b\nQUERY: c", "at most 2 calls at once"),
    ("QUERY: a\nQUERY: a", "one call is there twice"),
    ("TOOL: code\nQUERY: a", "TOOL must be one of wiki_search, web_search"),
    ("QUERY: a\nQUERY:", "expected a line 'QUERY: <query>'"),
    ("look", "expected a line 'QUERY: <query>'"),
  ],
)
def test_a_malformed_list_is_asked_for_again(reply, why):
  run = play(Team(reply, "Well.\nTOOL: web_search\nQUERY: a\nQUERY: b"), max_calls=2)
  (bad,) = (e for e in run.events if e.kind == runs.MALFORMED)
  assert bad.detail == why
  assert [(c.name, c.arguments) for c in run.calls] == [
    ("web_search", "a"),
    ("web_search", "b"),
  ]


def test_one_unavailable_tool_ends_the_run():
  def down(name, arguments):
    status = CallStatus.INFRASTRUCTURE if name == "web_search" else CallStatus.OK
    return ToolCall(name, arguments, "x", status)

  run = play(Team(TWO), down)
  assert (run.status, run.error) == (Status.INFRASTRUCTURE, "tool web_search: x")


def test_a_journal_answers_every_call(tmp_path):
  def run(call) -> Run:
    journal = Journal(str(tmp_path / "calls.jsonl"))
    return play(Team(TWO), journal.tools(call, ("t", 0)))

  whole = run(echo)
  assert run(None) == whole  # no call is made again

"""The scripted backend with the real tools: each fault and privilege, then all."""

from __future__ import annotations

import collections
import re

import pytest

from coa_jax.data.tasks.task import Task
from coa_jax.data.tasks.world.pages import NAME_WORDS
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.agents import TeamConfig, solve
from coa_jax.data.teacher.backend import Message
from coa_jax.data.teacher.scripted import Rates, ScriptedBackend, ScriptedConfig
from coa_jax.protocol import tool_bodies
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rewards import grade
from tools_sandbox.search.index import read_corpus

PERFECT = dict(
  wrong_query=0, buggy_program=0, premature=0, caught=1, recall=0, mental=0, slip=0
)


def work(tasks, toolbox, sample=0, seed=0, **rates):
  backend = ScriptedBackend(tasks, ScriptedConfig(seed), sample, Rates(**rates))
  tools = ("wiki_search", "code")
  return [
    solve(t, backend, toolbox.call, tools, TeamConfig(), str.split, sample)
    for t in tasks
  ]


def right(tasks, done) -> float:
  return sum(grade(t, r.prediction) for t, r in zip(tasks, done, strict=True)) / len(
    tasks
  )


def has(run, kind, part) -> bool:
  return any(e.kind == kind and part in e.content for e in run.events)


@pytest.mark.slow
def test_without_faults_every_task_is_solved_with_one_call_per_page(tasks, toolbox):
  done = work(tasks, toolbox, **PERFECT)
  assert right(tasks, done) == 1.0
  for task, run in zip(tasks, done, strict=True):
    program, values = task.meta["program"], task.meta["values"]
    pages = {
      values[int(s["entity"][1:])] if s["entity"].startswith("$") else s["entity"]
      for s in program
      if s["op"] == "lookup"
    }
    searches = [c.arguments for c in run.calls if c.name == "wiki_search"]
    assert len(searches) == len(pages) and set(searches) == pages
    computes = any(s["op"] != "lookup" for s in program)
    assert sum(c.name == "code" for c in run.calls) == computes


def test_wrong_queries_are_sent_noticed_and_mended(tasks, toolbox):
  done = work(tasks[:40], toolbox, **{**PERFECT, "wrong_query": 1})
  assert right(tasks[:40], done) == 1.0
  noticed = 0
  for run in done:
    queries = [c.arguments for c in run.calls if c.name == "wiki_search"]
    wanted = [
      e.content.split("look up ")[1] for e in run.events if "look up" in e.content
    ]
    for i, (query, name) in enumerate(zip(queries, wanted, strict=True)):
      if name in wanted[:i]:
        assert query == name
      else:
        assert query != name and set(query.split()) & set(name.split())
    noticed += has(run, runs.REFLECTION, "wrong page")
  assert noticed > 25


def test_questions_and_wrong_answers_are_of_the_same_split(tasks, toolbox, world_files):
  """Otherwise training text would hold names from held-out worlds."""
  rates = dict(wrong_query=1, caught=0, recall=0.5, slip=1)
  pairs = set()
  for run in work(tasks, toolbox, **{**PERFECT, **rates}):
    text = "\n".join(e.content for e in run.events)
    pairs.update(re.findall(r"(?=\b([A-Z][a-z]+ [A-Z][a-z]+)\b)", text))
  names = {
    pair
    for pair in pairs
    for first, second in NAME_WORDS.values()
    if pair.split()[0] in first and pair.split()[1] in second
  }
  titles = {page.title for page in read_corpus(world_files["corpus"])}
  assert len(names) > 100 and names <= titles


def test_buggy_programs_are_run_noticed_and_mended(tasks, toolbox):
  done = work(tasks[:60], toolbox, **{**PERFECT, "buggy_program": 1})
  assert right(tasks[:60], done) == 1.0
  outcomes = collections.Counter()
  for run in done:
    programs = [c for c in run.calls if c.name == "code"]
    assert len(programs) in (0, 2)
    assert all(tool_bodies.parse_code(c.arguments) is not None for c in programs)
    if programs:
      outcomes[programs[0].status] += 1
      assert has(run, runs.REFLECTION, "Poor")
  assert outcomes[CallStatus.OK] and outcomes[CallStatus.MODEL]


def test_premature_answers_fail_the_check_and_are_mended(tasks, toolbox):
  done = work(tasks, toolbox, **{**PERFECT, "premature": 1})
  assert right(tasks, done) == 1.0
  for task, run in zip(tasks, done, strict=True):
    scores = [e.detail for e in run.events if e.kind == runs.VERDICT]
    program = task.meta["program"]
    looked_up = len(program) > 1 and program[0]["op"] == "lookup"
    lucky = looked_up and len(set(task.meta["values"][-2:])) == 1
    short = looked_up and not lucky and program[-1]["op"] != "compare"
    assert len(scores) == 1 + short and scores[-1] == "4"
    assert not short or scores[0] in "12"


def test_uncaught_faults_end_wrong(tasks, toolbox):
  chains = [t for t in tasks if t.family in ("two_hop", "three_hop")]
  done = work(chains, toolbox, **{**PERFECT, "premature": 1, "caught": 0})
  assert right(chains, done) == 0.0


def test_privileges_replace_tools(tasks, toolbox):
  tasks = tasks[:60]
  recalled = work(tasks, toolbox, **{**PERFECT, "recall": 1})
  assert right(tasks, recalled) == 1.0
  assert {c.name for r in recalled for c in r.calls} == {"code"}
  assert all(
    has(r, runs.DECISION, f"recall {t.meta['program'][0]['relation']} ")
    for t, r in zip(tasks, recalled, strict=True)
    if t.family.endswith("hop")
  )
  mental = work(tasks, toolbox, **{**PERFECT, "mental": 1})
  assert right(tasks, mental) == 1.0
  assert {c.name for r in mental for c in r.calls} == {"wiki_search"}


def sign(task) -> str:
  """The comparison sign that holds if the first of two entities is the answer."""
  return "<" if task.meta["program"][-1]["name"] == "min" else ">"


def holds(task) -> bool:
  left, right_ = map(int, task.meta["values"][:2])
  return left < right_ if sign(task) == "<" else left > right_


def test_comparisons_are_made_by_a_program_or_in_the_head(tasks, toolbox):
  chosen = [t for t in tasks if t.meta["program"][-1]["op"] == "compare"]
  assert len(chosen) > 5
  for task, run in zip(chosen, work(chosen, toolbox, **PERFECT), strict=True):
    left, right_ = task.meta["values"][:2]
    assert has(run, runs.DECISION, f"compare {left} {sign(task)} {right_}")
    assert [c.result for c in run.calls if c.name == "code"] == [str(holds(task))]
  head = work(chosen, toolbox, **{**PERFECT, "mental": 1.0})
  for task, run in zip(chosen, head, strict=True):
    left, right_ = task.meta["values"][:2]
    claim = f"{left} {sign(task)} {right_} is {holds(task)}"
    assert has(run, runs.DECISION, claim)


def test_the_default_team_is_good_and_not_perfect(tasks, toolbox):
  done = work(tasks, toolbox)
  assert 0.75 <= right(tasks, done) <= 0.97
  assert any(has(r, runs.REFLECTION, "Poor") for r in done)
  assert any(e.detail in "12" for r in done for e in r.events if e.kind == "verdict")


def test_samples_and_seeds_differ_and_are_reproducible(tasks, toolbox):
  def text(done):
    return [[(e.kind, e.content) for e in r.events] for r in done]

  first = text(work(tasks[:30], toolbox))
  assert first == text(work(tasks[:30], toolbox))
  assert first != text(work(tasks[:30], toolbox, sample=1))
  assert first != text(work(tasks[:30], toolbox, seed=1))
  # A run does not depend on the other tasks.
  assert first[7:8] == text(work(tasks[7:8], toolbox))


def test_refusals():
  with pytest.raises(ValueError, match=r"task 't' has no meta\['program'\]"):
    ScriptedBackend([Task("t", "q", ("a",))], ScriptedConfig())
  backend = ScriptedBackend([], ScriptedConfig())
  messages = [Message("system", ""), Message("user", "Question: who?")]
  with pytest.raises(ValueError, match="does not have"):
    backend("planner", messages)

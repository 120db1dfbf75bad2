"""Foreign runs become complete trajectories, or are dropped with a reason.

budget: one law for all formats, and each format's special cases.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

import foreign
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imported import (
  ENDS,
  GAVE,
  UNIFIED,
  WHOLE,
  asks,
  calls,
  calls_in,
  lost,
  read,
  row_of,
  search,
)

from coa_jax.data.importers.importers import FORMATS, Importer, detect, records
from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.convert import Dropped
from coa_jax.data.teacher.runs import Run
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.storage import write_lines
from coa_jax.protocol.trajectory import Author, Status


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(foreign.ALL)
def test_every_call_and_every_observation_is_kept_in_order(drawn):
  assert detect(drawn.row) == drawn.format
  task, trajectory = read(drawn.format, drawn.row)
  assert calls_in(trajectory) == drawn.calls
  mine = [(c.name, c.arguments, c.result) for c in trajectory.calls]
  spaced = [(n, a, r.removeprefix(" ")) for n, a, r in mine]
  assert (spaced if drawn.format == "alpaca" else mine) == drawn.calls
  assert parse(trajectory.text, UNIFIED).ok
  # Authorship: the tool wrote exactly the observations.
  tool = [s for s in trajectory.segments if s.author == Author.TOOL]
  assert len(tool) == len(drawn.calls)
  assert all(s.role == roles.OBSERVATION for s in tool)
  assert task.question == "Who?"
  assert trajectory.segments[0].author == Author.PROMPT


@settings(max_examples=100, deadline=None)
@given(foreign.ALL)
def test_our_own_records_read_back_unchanged(drawn):
  _, trajectory = read(drawn.format, drawn.row)
  row = trajectory.to_json()
  assert detect(row) == "trajectories"
  _, again = read("trajectories", row)
  assert again == trajectory


@settings(max_examples=100, deadline=None)
@given(foreign.oagents(), st.integers(16, 40))
def test_shortening_is_recorded_and_leaves_the_calls(drawn, limit):
  config = dataclasses.replace(WHOLE, observation_chars=limit)
  _, trajectory = read("oagents", drawn.row, convert=config)
  assert [c[:2] for c in calls_in(trajectory)] == [c[:2] for c in drawn.calls]
  cut = dict(trajectory.meta.get("shortened", {}).get("calls", ()))
  for n, (_, _, observation) in enumerate(drawn.calls):
    now = calls_in(trajectory)[n][2]
    if n not in cut:
      assert now == observation and len(now) <= limit
      continue
    assert cut[n] == len(observation) > limit
    head, tail = limit - limit // 2, limit // 2
    assert now.startswith(observation[:head]) and now.endswith(observation[-tail:])
    assert f"[{cut[n] - limit} characters cut]" in now


@settings(max_examples=150, deadline=None)
@given(
  foreign.ALL,
  st.lists(st.integers(0, 400), min_size=1, max_size=3),
  st.sampled_from(["drop", "none", "number", "text"]),
)
def test_broken_rows_are_dropped_and_never_crash(drawn, picks, how):
  row = json.loads(json.dumps(drawn.row))
  for pick in picks:
    slots = list(_slots(row))
    parent, key = slots[pick % len(slots)]
    broken = {"none": None, "number": 7, "text": "Thought: <answer>"}
    if how == "drop":
      del parent[key]
    else:
      parent[key] = broken[how]
    if not row:
      break
  result = read(drawn.format, row)
  if isinstance(result, Dropped):
    assert result.reason and result.task_id
  else:
    assert parse(result[1].text, UNIFIED).ok


def _slots(value):
  """Yields (container, key) for every nested value."""
  pairs = value.items() if isinstance(value, dict) else enumerate(value)
  for key, inner in list(pairs):
    yield value, key
    if isinstance(inner, dict | list):
      yield from _slots(inner)


FILE = pathlib.Path(__file__).parents[1] / "fixtures" / "dropped_rows.jsonl"
DROPPED = [json.loads(line) for line in FILE.read_text().splitlines()]


@pytest.mark.parametrize(
  "case", DROPPED, ids=[f"{case['format']}: {case['detail'][:60]}" for case in DROPPED]
)
def test_a_row_that_cannot_be_mapped_is_dropped_with_the_reason(case):
  for keep_illegal in (False, True):
    result = read(case["format"], case["row"], keep_illegal=keep_illegal)
    assert isinstance(result, Dropped), result
    assert result.reason == case["reason"] and case["detail"] in result.detail


def test_an_oagents_run_becomes_the_spans_of_the_paper():
  critique = "fine information_conflict: Good tool_effectiveness: Fair "
  critique += "trajectory_monitoring: Good"
  candidate = {
    "tool_calls": [{"name": "suggested_answer", "arguments": {"answer": "x"}}]
  }
  row = row_of(search(evaluate_thought=critique, score=7), candidate)
  importer = Importer("oagents", roles.get_variant("web"), convert=WHOLE)
  task, t = importer.read(0, "f:1", row)
  assert [s.role for s in t.segments[1:]] == [
    *("think", "plan", "think", "web_search", "observation", "think", "reflection"),
    *("think", "suggested_answer", "think", "double_check", "answer"),
  ]
  assert t.segments[7].text.startswith("<reflection> information_conflict : Good tool")
  assert critique in t.segments[6].text
  assert t.meta["lost"] == ["step 1: score 7 of the step"]
  assert t.meta["scored"] is True and t.meta["filled"] == 2
  assert task.answers == ("x",)


def test_what_a_row_has_beyond_a_trajectory_is_named():
  year = {"name": "google_search", "arguments": {"query": "q", "filter_year": 2020}}
  ends = {"tool_calls": [{"name": "final_answer", "arguments": {"answer": "x"}}]}
  row = row_of(search(tool_calls=[year], mood="glad"), ends, weather="rain")
  _, trajectory = read("oagents", row)
  assert trajectory.meta["lost"] == [
    "row: field 'weather' is not read",
    "step 1: field 'mood' is not read",
    "step 1: argument filter_year=2020 of google_search",
  ]


def test_an_error_is_part_of_what_the_agent_saw():
  row = row_of(search(error={"type": "E", "message": "no such page"}))
  _, trajectory = read("oagents", row)
  assert [c.result for c in trajectory.calls] == ["o\nno such page"]
  assert trajectory.calls[0].status == "model"


def test_tools_are_renamed_by_a_table():
  row = asks(calls("Lookup"), {**GAVE, "tool_call_id": "Lookup"}, ENDS)
  _, trajectory = read("chat", row, tools={"lookup": "wiki_search"})
  assert calls_in(trajectory) == [("wiki_search", "q", "o")]
  with pytest.raises(ValueError, match="tools: 'a' is 'b'; accepted: wiki_search"):
    Importer("chat", UNIFIED, tools={"a": "b"})


ROUND = "Thought: t\nAction: search[q]\nObservation: o\n"


def test_runs_find_their_tasks():
  _, t = read("oagents", row_of(search()))
  run = Run("a", calls=t.calls, status=Status.ENDED, prediction="x")
  row = run.to_json()
  assert detect(row) == "runs"
  assert read("runs", row).reason == "unknown_task"
  result = read("runs", row, tasks={"a": Task("a", "Who?", ("x",))})
  assert result.reason == "unclosed"  # without events and answer, but read
  assert read("runs", {**row, "status": "odd"}).reason == "bad_record"


def test_formats(tmp_path):
  assert detect({"prompt": [], "reward_model": {}}) == "rl"
  with pytest.raises(ValueError, match="are those of no format") as refused:
    detect({"a": 1})
  assert all(f"{name} (" in str(refused.value) for name in FORMATS)
  with pytest.raises(ValueError, match="format 'x'"):
    Importer("x", UNIFIED)
  path = tmp_path / "t.jsonl"
  path.write_text("")
  with pytest.raises(ValueError, match="holds no row"):
    records(str(path))
  path.write_text(json.dumps(row_of(search())) + "\n" + json.dumps(row_of()) + "\n")
  found, rows = records(str(path))
  assert found == "oagents" and [n for n, _, _ in rows] == [0, 1]


DEEP = "[" * 100_000


def block(inner: str) -> dict:
  """A chat row with a call in the first reply's text."""
  reply = {"role": "assistant", "content": f"<tool_call>{inner}</tool_call>"}
  return asks(reply, {"role": "tool", "content": "o"}, ENDS)


@pytest.mark.parametrize(
  ("format_", "row", "reason"),
  [
    ("chat", asks(calls("search", content=DEEP), GAVE, ENDS), ""),
    ("chat", block("{" * 50_000), "bad_call"),
    ("chat", block(DEEP), "bad_call"),
    ("chat", block("{<tool_call>" * 9_000), "bad_call"),
    ("oagents", row_of(search(model_output="\n" * 300_000, observations="o")), ""),
    ("oagents", row_of({"tool_calls": [{"name": "code", "arguments": DEEP}]}), ""),
    ("oagents", row_of(search(observations="\ud800 half")), ""),
    (
      "react",
      {"question": "Who?", "text": f"{ROUND}Thought: t\nAction: a{DEEP}"},
      "unknown_tool",
    ),
    ("search_r1", {"question": "Who?", "text": "<search>" * 20_000}, "unclosed"),
  ],
  ids=range(9),
)
def test_hostile_rows_are_read_or_dropped_in_linear_time(format_, row, reason):
  """`reason` is "" for a row that is kept; quadratic time would be minutes."""
  began = time.process_time()
  result = read(format_, row)
  assert time.process_time() - began < 5
  assert (result.reason if isinstance(result, Dropped) else "") == reason
  assert reason or parse(result[1].text, UNIFIED).ok


@pytest.mark.parametrize("arguments", [DEEP, "9" * 5000, "NaN", "[1]", "{"])
def test_arguments_that_are_no_object_are_the_body(arguments):
  row = asks(calls("search", arguments=arguments), GAVE, ENDS)
  _, trajectory = read("chat", row)
  assert calls_in(trajectory) == [("web_search", arguments, "o")]


@pytest.mark.parametrize(
  "content", ["<think>\nhm\n</think>\n\nx", "hm</think>x", "\n<think>hm</think> x"]
)
def test_a_think_block_in_content_is_a_thought(content):
  row = asks(calls("search"), GAVE, {"role": "assistant", "content": content})
  _, trajectory = read("chat", row)
  assert "<think> hm</think>" in trajectory.text
  assert trajectory.text.endswith("<answer> x</answer>")
  twice = asks({**calls("search"), "content": content, "reasoning": "hm"}, GAVE, ENDS)
  assert read("chat", twice)[1].text.count("hm") == 1
  row["messages"][-1]["content"] = f"so <think>{content}"
  assert read("chat", row).reason == "nested"


def test_what_a_chat_row_has_beside_is_named():
  thinks = calls("search", reasoning_content=[{"text": "r1"}], reasoning="r2")
  row = {**asks(thinks, GAVE, ENDS), "conversation": [1], "tools": [{}]}
  row["messages"][0]["mood"] = "glad"
  assert "<think> r1\ngo</think>" in read("chat", row)[1].text
  assert lost("chat", row) == [
    "row: field 'conversation' is not read, but 'messages'",
    "row: the list of tools; ours takes its place",
    "message 0: field 'mood' is not read",
    "message 1: reasoning 'r2' beside another",
  ]


def test_of_several_texts_the_react_one_is_read_and_the_others_named():
  text = "Question: What?\n" + ROUND + "Thought: t\nFinal Answer: x"
  row = {"question": "Who?", "trajectory": "notes", "output": text, "text": "more"}
  assert lost("react", {**row, "answer": "x"}) == [
    "row: field 'trajectory' is not read",
    "row: field 'text' is not read",
    "block 0: the question 'What?' beside the row's",
  ]


def test_a_table_is_what_its_columns_hold():
  chat = asks(calls("search"), GAVE, ENDS)
  assert detect({"steps": None, "intermediate_steps": [], **chat}) == "chat"
  assert detect({**row_of(search()), "messages": None, "segments": None}) == "oagents"
  assert detect({"messages": None, "text": ROUND}) == "react"


def test_attempts_at_one_task_are_numbered(tmp_path):
  chat = asks(calls("search"), GAVE, ENDS)
  fields = [{"id": "a"}, {}, {"id": "b"}, {"id": "a"}, {"id": "a", "sample": 9}]
  path = tmp_path / "t.jsonl"
  path.write_text("".join(json.dumps({**chat, **row}) + "\n" for row in fields))
  found, rows = records(str(path))
  importer = Importer(found, UNIFIED, stem="t", convert=WHOLE)
  read_ = [importer.read(*record)[1] for record in rows]
  names = [(t.task_id, t.sample) for t in read_]
  assert names == [("a", 0), ("t-1", 0), ("b", 0), ("a", 1), ("a", 9)]
  assert not any("lost" in t.meta for t in read_)


def test_our_own_table_can_be_imported_again(tmp_path):
  _, trajectory = read("chat", asks(calls("search"), GAVE, ENDS))
  trajectory.reward_parts = {"answer": 1.0}
  path = str(tmp_path / "t.parquet")
  write_lines(path, [trajectory.to_json()])
  found, rows = records(path)
  (record,) = rows
  assert Importer(found, UNIFIED).read(*record)[1] == trajectory

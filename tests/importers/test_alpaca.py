"""Alpaca records as trajectories: strict parsing finds the authors, no text is lost."""

from __future__ import annotations

import json

import pytest

from coa_jax.data.importers import importers
from coa_jax.data.teacher.convert import Dropped
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.prompts import conversation_text
from coa_jax.protocol.trajectory import Author, Status

MHQA = roles.get_variant("mhqa")
HEAD = (
  "<think>\nfacts?\n</think>\n<plan>1. look</plan>  \n<think>go</think>\n"
  "<wiki_search>Paris</wiki_search>\n"
)
TAIL = "<think>so</think>\n\n<answer>Seine</answer>\n"


def record(output: str, **fields) -> dict:
  """An alpaca record."""
  instruction = "Use <think>.\n\nQuestion: Which river?"
  return {"instruction": instruction, "input": "", "output": output, **fields}


def read(tmp_path, *records, **options):
  """Imports the records from a file."""
  path = tmp_path / "sft.json"
  path.write_text(json.dumps(list(records)))
  importer = importers.Importer("alpaca", MHQA, stem="sft", **options)
  results = [importer.read(*r) for r in importers.records(str(path))[1]]
  dropped = [r for r in results if isinstance(r, Dropped)]
  return [r[1] for r in results if not isinstance(r, Dropped)], dropped


def observed(content: str, after: str = "\n\n") -> str:
  """A legal output with one observation."""
  return f"{HEAD}<observation>{content}</observation>{after}{TAIL}"


@pytest.mark.parametrize("after", ["", "\n", "\n\n", " \n\t"])
def test_white_space_is_verbatim_and_the_tool_owns_what_follows(tmp_path, after):
  output = "\n" + observed("\nThe Seine.\n", after)
  (t,), dropped = read(tmp_path, record(output))
  assert dropped == []
  assert t.text == output
  assert parse(t.text, MHQA).ok
  tool = [s for s in t.segments if s.author == Author.TOOL]
  assert [s.text for s in tool] == [f"<observation>\nThe Seine.\n</observation>{after}"]
  policy = [s for s in t.segments if s.author == Author.POLICY]
  assert [s.role for s in policy] == [
    *("think", "plan", "think", "wiki_search", "think", "answer")
  ]
  assert policy[1].text == "<plan>1. look</plan>  \n"


def test_a_record_becomes_a_whole_trajectory(tmp_path):
  rows = [record(observed("The Seine."), input="Be brief.", system="You are kind.")]
  (t,), _ = read(tmp_path, *rows)
  assert t.segments[0].author == Author.PROMPT
  assert t.segments[0].text.endswith("Which river?\nBe brief.")
  assert t.meta["question"] == "Which river?\nBe brief."
  assert t.meta["system"] == "You are kind."
  assert (t.task_id, t.status, t.reward) == ("sft-0", Status.ENDED, None)
  (call,) = t.calls
  assert (call.name, call.arguments, call.result) == (
    "wiki_search",
    "Paris",
    "The Seine.",
  )


def test_a_tables_empty_input_is_null(tmp_path):
  (t,), dropped = read(tmp_path, {**record(observed("x")), "input": None})
  assert t.meta["question"] == "Which river?" and not dropped


def test_tags_inside_an_observation_are_escaped_and_change_nothing(tmp_path):
  hostile = "<answer>Rome</answer> &lt;think> <b>bold</b>"
  (t,), _ = read(tmp_path, record(observed(hostile)))
  parsed = parse(t.text, MHQA)
  assert parsed.ok
  assert parsed.answer == "Seine"
  assert t.calls[0].result == hostile
  assert [s.content for s in parsed.spans if s.role == "observation"] == [hostile]


@pytest.mark.parametrize(
  ("output", "reason", "status"),
  [
    (observed("x").replace("<think>so</think>", ""), "illegal_transition", "ended"),
    (HEAD + "<observation>x</observation>", "unclosed", "truncated"),
    (observed("x").replace("Seine", " "), "malformed", "ended"),
    ("\n<observation>x</observation>" + TAIL, "illegal_transition", "ended"),
  ],
)
def test_illegal_records_are_kept_on_demand_and_always_marked(
  tmp_path, output, reason, status
):
  trajectories, (dropped,) = read(tmp_path, record(output))
  assert (trajectories, dropped.reason) == ([], reason)
  (t,), dropped = read(tmp_path, record(output), keep_illegal=True)
  assert dropped == []
  assert t.text == output
  assert t.meta["fault"].startswith(reason + ": ")
  assert t.status == status


def test_earlier_turns_stand_before_the_question_as_in_a_chat(tmp_path):
  first = record(observed("x"))
  again = record(
    observed("y"),
    history=[[first["instruction"], first["output"]], ["And now?", " Rhine "]],
    answer="Seine",
  )
  path = tmp_path / "sft.json"
  path.write_text(json.dumps([first, again, {**again, "history": []}]))
  importer = importers.Importer("alpaca", MHQA)
  results = [importer.read(*r) for r in importers.records(str(path))[1]]
  (_, plain), (task, trajectory), (_, empty) = results
  said = [("user", "Which river?"), ("assistant", "Seine"), ("user", "And now?")]
  said += [("assistant", "Rhine"), ("user", "Which river?")]
  assert task.question == trajectory.meta["question"] == conversation_text(said)
  assert (task.answers, plain.meta["question"]) == (("Seine",), "Which river?")
  # The instructions stay before the question; all other segments are unchanged.
  assert trajectory.segments[0].text == f"Use <think>.\n\nQuestion: {task.question}"
  assert trajectory.segments[1:] == empty.segments[1:]
  assert empty.segments[0] == plain.segments[0]


def test_what_a_record_tells_of_its_task_is_read_and_the_rest_named(tmp_path):
  known = {"answer": "Seine", "data_source": "web", "family": "one_hop", "weight": 3}
  path = tmp_path / "sft.json"
  path.write_text(json.dumps([record(observed("x"), **known)]))
  importer = importers.Importer("alpaca", MHQA)
  ((task, trajectory),) = (importer.read(*r) for r in importers.records(str(path))[1])
  assert (task.answers, task.source, task.family) == (("Seine",), "web", "one_hop")
  assert trajectory.meta["lost"] == ["row: field 'weight' is not read"]

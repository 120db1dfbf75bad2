"""OAgents and smolagents runs: delegation order, endings, and reported losses."""

from __future__ import annotations

import pytest
from imported import calls_in, lost, read, row_of, search

from coa_jax.protocol.trajectory import Status


def program(text: str, **fields) -> dict:
  """A step with the program `text`."""
  called = {"name": "python_interpreter", "arguments": text}
  return {"tool_calls": [called], "observations": "o", **fields}


def queries(*programs: str) -> list[str]:
  """The search agent's queries, in the order in which the programs delegate them."""
  names = ("Find X", "Find X and Y", "Task one", "Task two")
  actions = {
    name: {
      "answer": "a",
      "tool_calls": [{"name": "search", "args": {"query": name}, "observation": "o"}],
    }
    for name in names
    if any(name in text for text in programs)
  }
  row = row_of(*map(program, programs), search_agent_actions=actions)
  return [body for _, body, _ in calls_in(read("oagents", row)[1])]


@pytest.mark.parametrize(
  ("programs", "order"),
  [
    (["search_agent('Find X and Y')", "search_agent('Find X')"], [1, 0]),
    (["b=search_agent('Task two'); a=search_agent('Task one')"], [3, 2]),
    (["print(search_agent(task='Task two'), search_agent(task='Task one'))"], [3, 2]),
    (["t = 'Task two'\nsearch_agent(t)", "search_agent('Task one')"], [3, 2]),
    (["for t in ['Task two', 'Task one']:\n  search_agent(t)"], [3, 2]),
  ],
)
def test_sub_tasks_are_played_in_the_order_of_the_program(programs, order):
  names = ("Find X", "Find X and Y", "Task one", "Task two")
  assert queries(*programs) == [names[i] for i in order]


def test_what_a_delegating_program_does_beside_is_named():
  call = {"name": "search", "args": {"query": "q"}, "observation": "o", "seen": 1}
  record = {"answer": "a", "tool_calls": [call]}
  text = "t = f'{1}'\na = search_agent(t)\nprint(visualizer('i.png'), 12*7)"
  row = row_of(program(text), search_agent_actions={"A": record})
  assert lost("oagents", row) == [
    "step 1: a sub-task that is not written out; taken is 'A'",
    "step 1: field 'seen' is not read",
    "step 1: 2 statements beside the delegation: \"t = f'{1}'\"",
    "step 1: the report of the search_agent: 'o'",
  ]
  text = "search_agent('A')\nsearch_agent('B')"
  row = row_of(program(text), search_agent_actions={"A": record})
  assert lost("oagents", row)[1] == "step 1: no record of the sub-task 'B'"
  row = row_of(program("search_agent('A ...')"), search_agent_actions={"A": record})
  assert read("oagents", row).reason == "unplaced_subtask"


def test_tools_that_a_program_calls_are_named():
  row = row_of(program("r = web_search(query='x')\nprint(r, len(r))"))
  assert lost("oagents", row) == ["step 1: the program calls their web_search"]


@pytest.mark.parametrize(
  "ends",
  [
    program("final_answer(42)"),
    program("x = 6 * 7\nfinal_answer(x)", action_output=42),
    program("print(6 * 7)", action_output=42, is_final_answer=True),
    {"tool_calls": [{"name": "final_answer", "arguments": {"answer": 42}}]},
  ],
)
@pytest.mark.parametrize("null", [{"prediction": None}, {}])
def test_a_run_without_a_prediction_ends_with_its_own_answer(ends, null):
  row = row_of(search(), ends, true_answer="42")
  del row["prediction"]
  _, trajectory = read("oagents", {**row, **null})
  assert trajectory.text.endswith("<answer> 42</answer>")
  failed = {**ends, "error": "no", "is_final_answer": False}
  if ends["tool_calls"][0]["name"] != "final_answer":
    assert read("oagents", {**row, "intermediate_steps": [failed]}).reason == (
      Status.TURN_LIMIT.value
    )


def test_what_an_oagents_step_says_beside_its_call_is_named():
  output = "Thought: t\n```py\nprint(1)\n```\nAND MORE"
  fields = {"action_output": {"k": 7}, "code_action": "print(2)"}
  row = row_of(program("print(1)", model_output=output, **fields), prediction="x")
  row["intermediate_steps"].append(program("final_answer('y')"))
  assert lost("oagents", row) == [
    "step 1: text beside the call: 'AND MORE'",
    "step 1: code_action 'print(2)' beside the call",
    "step 1: action_output {'k': 7} beside the observation",
    "step 2: the result of the final answer: 'o'",
    "row: the run's own answer 'y'",
  ]


def test_a_step_of_a_table_is_what_its_fields_hold():
  kinds = {"facts": None, "plan": None, "task": None, "system_prompt": None}
  table = [{**kinds, **step} for step in row_of(search())["intermediate_steps"]]
  row = row_of() | {"intermediate_steps": None, "steps": table}
  assert calls_in(read("oagents", row)[1]) == [("web_search", "q1", "o")]

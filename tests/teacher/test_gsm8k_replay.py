"""GSM8K replay: notes become programs, claims are checked, drops have a reason."""

from __future__ import annotations

import collections
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.data.teacher.agents import TeamConfig, solve
from coa_jax.data.teacher.backend import Unsolvable
from coa_jax.data.teacher.convert import Dropped, convert
from coa_jax.data.teacher.gsm8k_replay import Gsm8kReplay, arithmetic, read_solution
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Author, ToolCall, Trajectory

ROWS = pathlib.Path(__file__).parents[1] / "fixtures/gsm8k.jsonl"
MATH = get_variant("math")
CLIPS = (
  "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
  "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n"
  "#### 72"
)


def task(solution: str, question: str = "How many?\nAnswer: a number.") -> Task:
  return Task("t", question, ("?",), Kind.MATH, meta={"solution": solution})


def play(solution: str, call) -> Trajectory | Dropped:
  """Plays one row and converts the run, as distillation does."""
  row = task(solution)
  run = solve(row, Gsm8kReplay([row]), call, ("code",), TeamConfig(), str.split)
  return convert(run, row, MATH, prompt_segments(MATH, row.question, "brief"))


def printing(output: str):
  """A code tool that prints the same for every program."""
  return lambda name, body: ToolCall(name, body, output)


def contents(trajectory: Trajectory) -> list[tuple[str, str]]:
  return [(s.role, s.content.strip()) for s in parse(trajectory.text, MATH).spans]


def test_a_solution_becomes_a_team_at_work_with_a_real_tool(run_code):
  trajectory = play(CLIPS, run_code)
  assert contents(trajectory) == [
    ("plan", "clips in May ; clips altogether in April and May"),
    ("think", "Natalia sold"),
    ("code", "```py\nprint(48/2)\n```"),
    ("observation", "24.0"),
    ("reflection", "24 clips in May"),
    ("think", "Natalia sold"),
    ("code", "```py\nprint(48+24)\n```"),
    ("observation", "72"),
    ("reflection", "72 clips altogether in April and May"),
    ("think", "all steps done"),
    ("answer", "72"),
  ]
  assert [c.result for c in trajectory.calls] == ["24.0", "72"]
  prompt = [s.text for s in trajectory.segments if s.author == Author.PROMPT]
  assert prompt == ["How many?\nAnswer: a number."]


@pytest.mark.parametrize(
  ("before", "thought"),
  [
    ("She earns $20 - $5 = $", "She earns"),
    ("In 3 boxes, 4 x 5 =", "In 3 boxes,"),
    ("Bags hold 7 pens * 6 bags =", "Bags hold 7 pens * 6 bags"),
    ("Half of 1,000 * (3) =", "Half of"),
    ("Let x be it.\n\nThen  box 2+2 =", "Let x be it.\nThen  box"),
    ("He eats 6 because 2*3 =", "He eats ?"),
    ("He eats 6 because", "He eats ?"),
    ("He eats 16 since there are 6 dogs", "He eats 16 since there are 6 dogs"),
    ("2 * 3 =", "legs to feed"),
  ],
)
def test_a_thought_has_neither_the_calculation_nor_its_result(before, thought):
  (step,) = read_solution(f"{before} <<2*3=6>>6 legs to feed.\n#### 6").steps
  assert step.thought == thought
  unit = "$" if before.endswith("$") else ""
  assert (step.program, step.finding) == ("2*3", unit + "6 legs to feed")


def test_text_goes_to_the_note_that_it_belongs_to():
  solution = read_solution(
    "There are 7 days.\nSo 7*2=<<7*2=14>>14 and 14+1 = <<14+1=15.00>>15.00% in all.\n"
    "Note <<16=16>>16.\nMr. Fox, at last, has 15/5=$<<15/5=3>>3\nThat is it.\n#### 3.0"
  )
  assert [(s.thought, s.finding) for s in solution.steps] == [
    ("There are 7 days.\nSo", "14"),
    ("and", "15% in all"),
    ("Note 16.\nMr. Fox, at last, has", "$3"),
  ]
  assert [s.goal for s in solution.steps] == ["So", "% in all", "at last"]
  assert solution.rest == "That is it."


@pytest.mark.parametrize(
  ("solution", "reason"),
  [
    ("It is 16.\n#### 16", "no_program"),
    ("It is <<16=16>>16.\n#### 16", "no_program"),
    ("It is <<2*8>>16.\n#### 16", "broken_note"),
    ("It is <<2*8=many>>16.\n#### 16", "broken_note"),
    ("It is <<2*8=16.\n#### 16", "broken_note"),
    ("It is <<2*x=16>>16.\n#### 16", "not_arithmetic"),
    ("It is <<2*8=16>>16, so 17.\n#### 17", "answer_not_computed"),
    ("It is <<2*8=16>>16.", "answer_not_computed"),
    ("It is <<2*8=17>>17.\n#### 17", "other_value"),
    ("It is <<1/3=33>>33.\n#### 33", "other_value"),
    ("It is <<1.6+0.038=1.60>>1.60.\n#### 1.6", "other_value"),
    ("It is <<2/0=0>>0.\n#### 0", "program_failed"),
  ],
)
def test_an_unplayable_solution_is_dropped_under_its_own_reason(
  run_code, solution, reason
):
  dropped = play(solution, run_code)
  assert isinstance(dropped, Dropped) and dropped.reason == reason
  assert dropped.detail


@pytest.mark.parametrize(
  ("claim", "output", "ok"),
  [
    ("63", "63.00000000000001", True),
    ("63", "63.0001", False),
    ("3.33", "3.3333333333333335", True),
    ("3.33", "3.336", False),
    ("1,000", "1000", True),
    (".5", "0.5", True),
    ("5/2", "2.5", True),
    ("1000000", "1e+06", True),
    ("2", "2\n2", False),
    ("2", "error: NameError", False),
    ("2", "inf", False),
  ],
)
def test_a_claim_is_compared_exactly_but_for_what_was_rounded(claim, output, ok):
  outcome = play(f"So <<1+1={claim}>>{claim} it is.\n#### {claim}", printing(output))
  assert isinstance(outcome, Trajectory) == ok


@pytest.mark.parametrize(
  ("written", "program"),
  [
    ("1,000*2", "1000*2"),
    ("$5+$.5", "5+.5"),
    ("007+1", "7+1"),
    ("10.05 + 0.5", "10.05 + 0.5"),
    ("3 x (4)", "3*(4)"),
    ("8\u00f72\u00d73", "8/2*3"),
    ("20%*50", "(20/100)*50"),
    ("-(3)//2", "-(3)//2"),
    ("100+10%", None),
    ("7%3", None),
    ("2**9", None),
    ("2^9", None),
    ("5(3)", None),
    ("1 1/2", None),
    ("abs(3)", None),
    ("__import__('os')", None),
    ("'a'*9", None),
    ("1+1j", None),
    ("True+1", None),
    ("1+" * 200 + "1", None),
    ("(", None),
    ("", None),
    ("\x00", None),
  ],
)
def test_only_notations_with_one_reading_become_programs(written, program):
  assert arithmetic(written) == program


@given(st.text(alphabet="0123456789.,+-*/()%$ x=\n<>#ab&;\u00d7", max_size=60))
def test_any_text_is_read_or_refused_and_what_is_read_is_a_legal_trajectory(text):
  try:
    steps = read_solution(text).steps
  except Unsolvable as e:
    assert e.reason
    return
  assert all(s.thought and s.goal and s.finding for s in steps)


@given(
  st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1),
  st.text(alphabet="ab 12=$x*.,;\n<think>/[]", max_size=30),
)
def test_every_solution_that_is_played_is_a_legal_trajectory(pairs, words):
  lines = [f"{words} {a}+{b} = <<{a}+{b}={a + b}>>{a + b} {words}" for a, b in pairs]
  solution = "\n".join(lines[:8]) + f"\n#### {sum(pairs[:8][-1])}"

  def call(name: str, body: str) -> ToolCall:
    left, right = body[len("```py\nprint(") : -len(")\n```")].split("+")
    return ToolCall(name, body, str(int(left) + int(right)))

  outcome = play(solution, call)
  if isinstance(outcome, Dropped):  # the words spell a tag or a broken note
    assert roles.find_tag(solution) or outcome.reason == "broken_note"
  else:
    assert parse(outcome.text, MATH).ok
    assert len(outcome.calls) == len(lines[:8])


def test_tasks_without_solutions_are_refused():
  with pytest.raises(ValueError, match=r"'t' has no meta\['solution'\]"):
    Gsm8kReplay([Task("t", "q", ("a",))])


def test_rows_in_the_data_sets_layout(run_code):
  results = []
  for row in load_tasks(ROWS):
    assert "<<" not in row.question and "####" not in row.question
    results.append(play(row.meta["solution"], run_code))
  reasons = collections.Counter(r.reason for r in results if isinstance(r, Dropped))
  assert reasons == {"answer_not_computed": 2, "no_program": 1}
  assert sum(isinstance(r, Trajectory) for r in results) == 17

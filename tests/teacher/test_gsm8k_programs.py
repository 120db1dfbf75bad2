"""GSM8K with one program per question: lines, names, orders, and new numbers."""

from __future__ import annotations

import fractions
import pathlib
import random

import pytest

from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.data.teacher.agents import TeamConfig, solve
from coa_jax.data.teacher.convert import Dropped, convert
from coa_jax.data.teacher.gsm8k_numbers import FAMILY, with_new_numbers
from coa_jax.data.teacher.gsm8k_programs import (
  Gsm8kPrograms,
  program_lines,
  program_text,
  reordered,
)
from coa_jax.data.teacher.gsm8k_replay import read_solution
from coa_jax.data.teacher.settings import TeacherConfig
from coa_jax.protocol.parser import parse
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import ToolCall, Trajectory

ROWS = pathlib.Path(__file__).parents[1] / "fixtures/gsm8k.jsonl"
REACT = get_variant("unified-plan-reflection-suggested_answer-double_check").with_tools(
  ("code",)
)
CLIPS = Task(
  "clips",
  "Natalia sold clips to 48 friends in April, half as many in May. How many in all?",
  ("72",),
  Kind.MATH,
  meta={
    "solution": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
  },
)


def play(task: Task, sample: int, call) -> Trajectory | Dropped:
  """Plays a task and converts the run, as distillation does."""
  backend = Gsm8kPrograms([task], sample)
  run = solve(task, backend, call, ("code",), TeamConfig(), str.split)
  return convert(run, task, REACT, prompt_segments(REACT, task.question, "brief"))


def spans(trajectory: Trajectory) -> list[tuple[str, str]]:
  return [(s.role, s.content.strip()) for s in parse(trajectory.text, REACT).spans]


def test_the_samples_of_a_question_are_a_bare_and_a_commented_program(run_code):
  played = [spans(play(CLIPS, sample, run_code)) for sample in (0, 1)]
  bare, commented = sorted(played, key=str, reverse=True)
  end = [("observation", "72.0"), ("answer", "72")]
  assert bare == [
    ("think", "Calculate clips in May, then clips altogether in April and May."),
    (
      "code",
      "```py\nclips_may = 48 / 2\nanswer = 48 + clips_may\nprint(answer)\n```",
    ),
    *end,
  ]
  assert commented == [
    ("think", "Calculate clips altogether in April and May."),
    (
      "code",
      "```py\n# Natalia sold ? clips in May\nclips_may = 48 / 2\n"
      "# Natalia sold ? clips altogether in April and May\n"
      "answer = 48 + clips_may\nprint(answer)\n```",
    ),
    *end,
  ]


def test_every_row_and_copy_is_played_and_right(run_code):
  tasks = with_new_numbers(load_tasks(ROWS), 2)
  reasons = []
  for task in tasks:
    trajectory = play(task, 1, run_code)
    if isinstance(trajectory, Dropped):
      assert task.family != FAMILY
      reasons.append(trajectory.reason)
      continue
    role, answer = spans(trajectory)[-1]
    assert role == "answer"
    assert fractions.Fraction(answer) == fractions.Fraction(
      task.answers[0].replace(",", "")
    )
  assert sorted(reasons) == [
    "answer_not_computed",
    "answer_not_computed",
    "no_program",
    "other_value",
  ]


def test_a_program_that_prints_another_value_gives_no_trajectory():
  dropped = play(CLIPS, 0, lambda name, body: ToolCall(name, body, "71"))
  assert isinstance(dropped, Dropped) and dropped.reason == "other_value"


def lines_of(question: str, *notes: str) -> list[str]:
  answer = notes[-1].partition("=")[2]
  text = "\n".join(f"So <<{note}>>{note.partition('=')[2]} things." for note in notes)
  solution = read_solution(f"{text}\n#### {answer}")
  return program_text(program_lines(solution, question), False).split("\n")


@pytest.mark.parametrize(
  ("question", "notes", "lines"),
  [
    # An earlier result is used once, then the question's own number.
    ("6 and 2", ("2+4=6", "6*6=36"), ["things = 2 + 4", "answer = things * 6"]),
    ("5 and 2", ("2+4=6", "6*6=36"), ["things = 2 + 4", "answer = things * things"]),
    # "half" gives the number 2, even if an earlier result is 2 too.
    ("half of 6", ("6-4=2", "2+2=4"), ["things = 6 - 4", "answer = things + 2"]),
    # Lines not needed for the answer are left out; names are unique.
    (
      "1 2 3",
      ("1+2=3", "2+2=4", "4*5=20"),
      ["things_2 = 2 + 2", "answer = things_2 * 5"],
    ),
    ("a half", ("1-0.75=0.25",), ["answer = 1 - 0.75"]),
  ],
)
def test_numbers_become_names_of_earlier_results(question, notes, lines):
  assert lines_of(question, *notes)[: len(lines)] == lines


def test_an_order_keeps_every_line_after_those_it_needs():
  solution = read_solution(
    "A <<2+3=5>>5 red.\nB <<4+4=8>>8 blue.\nC <<5+8=13>>13 all.\n#### 13"
  )
  lines = program_lines(solution, "How many?")
  orders = {
    tuple(line.name for line in reordered(lines, random.Random(i))) for i in range(20)
  }
  assert orders == {("red", "blue", "answer"), ("blue", "red", "answer")}


def test_new_numbers_stand_in_question_solution_and_answer():
  original, *copies = with_new_numbers([CLIPS], 2)
  assert original is CLIPS and len(copies) == 2
  assert len({copy.question for copy in copies}) == 2
  for copy in copies:
    april = int(copy.question.split()[4])
    assert april != 48 and april % 2 == 0
    assert copy.question == CLIPS.question.replace("48", str(april))
    assert copy.answers == (str(april + april // 2),)
    may = f"<<{april}/2={april // 2}>>{april // 2} clips in May"
    assert may in copy.meta["solution"]
    assert copy.family == FAMILY
  assert [t.id for t in copies] == ["clips-new_numbers-1", "clips-new_numbers-2"]


@pytest.mark.parametrize(
  ("question", "note"),
  [
    ("Half of it", "8/2=4"),  # the 8 is not in the question
    ("8 and 8 again", "8/2=4"),  # ambiguous: two of them
    ("In 1/8 of a year", "8*12=96"),  # a part of a fraction
    ("Since 1990", "1990+10=2000"),  # a year
    ("7 days a week", "7*3=21"),  # a week always has 7
    ("3.5 of 9", "9/3.5=2.57"),  # rounded
    ("5 and 5.0", "5-5=0"),
    ("9 a day", "9+40=49"),  # the 40 may be a result without a note
  ],
)
def test_numbers_that_may_mean_something_else_stay(question, note):
  value = note.partition("=")[2]
  solution = f"It is <<{note}>>{value}.\n#### {value}"
  task = Task("t", question, (value,), Kind.MATH, meta={"solution": solution})
  assert with_new_numbers([task], 3) == [task]


def test_other_backends_refuse_new_numbers():
  with pytest.raises(ValueError, match="new_numbers asks for backend"):
    TeacherConfig(backend="gsm8k_replay", new_numbers=1)

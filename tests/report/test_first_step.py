"""Config faults revealed by a run's first attempts."""

from __future__ import annotations

import pytest
import toy

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.protocol.trajectory import Status
from coa_jax.report.first_step import warnings
from coa_jax.rewards.grader import Grader, RewardConfig

SENTENCE = "The mayor of the town was born in 1901."
TOOLS = ("code",)


def attempt(answer: str, gold: str, calls: bool = True, right: float = 0.0):
  task = Task(gold, "2 + 3", (gold,), Kind.QA)
  turns = [toy.code("print(2+3)")] * calls + [toy.end(answer)]
  t = toy.drive(toy.episode(task, toy.TableToolbox()), turns)
  t.reward_parts = {"answer": right, "format": 1.0}
  return task, t


def found(*attempts, tools=TOOLS, exact=True) -> list[str]:
  tasks, played = zip(*attempts, strict=True)
  grader = Grader(RewardConfig(match="every" if exact else "f1"))
  return warnings(played, tasks, tools, grader)


def test_attempts_without_calls_are_reported_once():
  silent = attempt("5", "5", calls=False, right=1.0)
  calling = attempt("5", "5", right=1.0)
  (line,) = found(silent, silent)
  assert line.startswith("none of 2 attempts called a tool (code).")
  assert "tools.tools" in line and "\n" not in line
  assert found(silent, calling) == []
  assert found(silent, tools=()) == []
  down = attempt("5", "5", calls=False)
  down[1].status = Status.INFRASTRUCTURE  # says nothing about the policy
  assert found(down) == []


@pytest.mark.parametrize(
  ("answer", "gold", "right", "reported"),
  [
    (SENTENCE, "1901", 0.0, True),
    ("1901", SENTENCE, 0.0, True),
    (SENTENCE, SENTENCE, 1.0, True),
    ("word " * 12, "1901", 0.0, True),
    ("1901", "1901", 1.0, False),
    ("1902", "1901", 0.0, False),
    ("Washington D.C.", "Rome", 0.0, False),
    ("The Hitchhiker's Guide to the Galaxy", "Dune", 0.0, False),
    ("", "1901", 0.0, False),
  ],
)
def test_exact_match_of_sentences_is_reported(answer, gold, right, reported):
  one = attempt(answer, gold, right=right)
  lines = found(one)
  assert len(lines) == reported
  if reported:
    assert lines[0].startswith("exact match compares whole sentences in 1 of 1 attem")
    assert "reward.graders={'qa': 'judge'}" in lines[0] and "\n" not in lines[0]
  assert found(one, exact=False) == []
  short = attempt("1901", "1901", right=1.0)
  assert found(one, short) == []  # half of the attempts are too few

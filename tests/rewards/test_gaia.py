"""GAIA's quasi-exact match on hand-made cases; the rule is beside each."""

from __future__ import annotations

import pytest

from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rewards.gaia import quasi_exact_match
from coa_jax.rewards.grader import Grader, RewardConfig

# Prediction, answer, verdict.
CASES = [
  # Numbers: compared in value, units and thousands of the prediction aside.
  ("17", "17", True),
  ("17.0", "17", True),
  ("$1,234.50", "1234.5", True),
  ("89%", "89", True),
  ("0.89", "89", False),
  ("1e3", "1000", True),
  ("17 apples", "17", False),
  ("seventeen", "17", False),
  ("", "17", False),
  ("-3", "3", False),
  (" 3 ", "3", True),
  # Texts: without white space, punctuation and case.
  ("St. Petersburg", "saint petersburg", False),
  ("St. Petersburg", "st petersburg", True),
  ("the Beatles", "Beatles", False),
  ("New York", "newyork", True),
  ("rock-n-roll", "rocknroll", True),
  ("Right.", "right", True),
  ("", "x", False),
  ("100000000", "A", False),
  ("caf\u00e9", "cafe", False),
  # Lists: item by item, in order, as many items; an answer with a comma is a list.
  ("a, b", "a,b", True),
  ("a; b", "a, b", True),
  ("b, a", "a, b", False),
  ("a, b, c", "a, b", False),
  ("a", "a, b", False),
  ("1, 2.0, three", "1,2,three", True),
  ("$1, 2%", "1, 2", True),
  ("a., b", "a, b", False),  # in a list, punctuation counts
  ("A , B", "a,b", True),
  ("1234", "1,234", False),  # such an answer is a list of two
  ("1,234", "1,234", True),
  ("Paris, France", "Paris", False),
]


@pytest.mark.parametrize(("prediction", "answer", "right"), CASES)
def test_a_case(prediction, answer, right):
  assert quasi_exact_match(prediction, [answer]) is right


def test_the_grader_takes_it_by_source():
  task = Task("1", "How much?", ("1234.5",), source="gaia")
  with Grader(RewardConfig(graders={"gaia": "gaia"})) as grader:
    grader.check([task], 64)
    graded = [
      grader.answer(task, a, Trajectory("1")) for a in ("$1,234.50", "no", None)
    ]
  assert [g.answer for g in graded] == [1.0, 0.0, 0.0]

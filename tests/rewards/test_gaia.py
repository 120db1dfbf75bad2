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
  ("1 000", "1000", False),  # a space is no separator of thousands
  ("1.000,5", "1000.5", False),  # commas are removed, points are not
  ("10,0", "100", True),  # wherever a comma stands
  ("$", "0", False),  # nothing is left of it
  ("1/2", "0.5", False),  # no arithmetic
  ("\u20ac5", "5", False),  # of the currencies only the dollar
  ("5 %", "5", True),
  ("0.1", "0.10000001", False),  # no tolerance
  ("1e400", "1000", False),
  ("17", "17.0", True),  # the answer is a number, too
  ("17.", "17", True),
  ("+17", "17", True),
  ("(17)", "17", False),
  ("17", "$17", True),  # such an answer is a text, without punctuation
  ("17.5", "$175", True),  # and so is every prediction for it
  ("no number", "inf", False),
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
  ("\u201cRight\u201d", "right", False),  # only ASCII punctuation is removed
  ("New\u00a0York", "new york", True),  # any white space
  ("AC/DC", "acdc", True),
  ("c++", "c", True),
  ("stra\u00dfe", "STRASSE", False),  # lower case is no case folding
  ("right, of course", "right", False),  # a comma in the prediction makes no list
  ("a,b", "ab", True),
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
  ("a,b,", "a,b", False),  # an empty item is an item
  ("a,,b", "a,b", False),
  ("a, b, a", "a, a, b", False),  # order counts
  ("1,200.50", "1,200.5", True),  # in value, item by item
  ("1;2", "1,2;3", False),
  ("a b, c", "ab, c", True),  # white space inside an item
  ("$1,234", "1234, 5", False),
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

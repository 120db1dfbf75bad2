"""Numbers as people write them; hostile ones cost no time."""

from __future__ import annotations

import fractions

import pytest

from coa_jax.rewards import notation, votes


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("-1/2", fractions.Fraction(-1, 2)),
    ("-\\frac{1}{2}", fractions.Fraction(-1, 2)),
    (".5", fractions.Fraction(1, 2)),
    ("1,234.5", fractions.Fraction(2469, 2)),
    ("1 234 1/2", fractions.Fraction(2469, 2)),
    ("-2 1/2", fractions.Fraction(-5, 2)),
    ("2\\frac{3}{2}", None),
    ("5 4/3", None),
    ("1 2 1/2", None),
    ("1 234/5", fractions.Fraction(1234, 5)),
    ("3.141 592", fractions.Fraction(392699, 125000)),
    ("0.1666...", fractions.Fraction(1, 6)),
    ("3.14...", None),
    ("10^{-2}", fractions.Fraction(1, 100)),
    ("1,2", None),
    ("1 2", None),
    ("1/0", None),
    ("0 1/0", None),
    ("x", None),
  ],
)
def test_number(text: str, value: fractions.Fraction | None):
  assert notation.number(text) == value


@pytest.mark.parametrize("text", ["9" * 5000, "1e999999999", "10^{99999}"])
def test_a_number_without_measure_is_none_and_may_be_voted_for(text: str):
  assert notation.number(text) is None
  assert votes.vote_key(text) == votes.vote_key(text)


def test_equal_numbers_are_one_vote_and_fields_of_digits_two():
  assert votes.vote_key("2 1/2") == votes.vote_key("2.5")
  assert votes.vote_key("1 000") == votes.vote_key("1,000") == votes.vote_key("1e3")
  assert votes.vote_key("1 2") != votes.vote_key("12")


def test_formulas_inside_text_are_spelled_out():
  spelled = notation.spelled_out("x = 2 1/2 and 1\\,000")
  assert spelled == "x = \\frac{5}{2} and 1000"
  assert notation.spelled_out("\\frac 1 2") == "\\frac{1}{2}"
  assert notation.spelled_out("1\\\\ 2") == "1\\\\ 2"  # matrix rows

"""Equality of numbers and formulas inside math-verify, relative to their size.

math-verify compares by absolute differences (1e-15, for decimals six decimal places),
so any two small numbers are equal. Here exact numbers are compared exactly, or to many
digits, and decimals by `notation.same_decimal`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import sympy
from math_verify import grader
from sympy.core.evalf import PrecisionExhausted
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import (
  InverseTrigonometricFunction,
  TrigonometricFunction,
)

from coa_jax.rewards import notation

# Two exact numbers are equal if they agree to this many digits, or to more if digits
# are cheap: with too few, 1 - 2^{-2005} would equal 1 - 2^{-2006}.
_DIGITS = 300
_CHEAP_DIGITS = 2500
_CHEAP = (
  sympy.exp,
  sympy.log,
  sympy.Abs,
  TrigonometricFunction,
  InverseTrigonometricFunction,
  HyperbolicFunction,
)
_UNEVALUATED = (
  sympy.Integral,
  sympy.Sum,
  sympy.Product,
  sympy.Limit,
  sympy.Derivative,
)
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def replace_comparison() -> None:
  """Makes math-verify compare all numbers by `_same_value`."""
  for name, function in (("sympy_numeric_eq", _same_value), ("solve", _solve)):
    if not hasattr(grader, name):
      raise RuntimeError(f"this version of math-verify has no {name}")
    setattr(grader, name, function)


def _solve(*args: object) -> list:
  """Returns sympy's solutions; no solution is an error, not an equal empty list."""
  found = sympy.solve(*args)
  if not found:
    raise ValueError("no solution")
  return found


def _same_value(gold: Any, prediction: Any, *_: object) -> bool:
  """Whether two values are equal, term by term; False also if undecided."""
  try:
    if isinstance(gold, sympy.MatrixBase | sympy.MatrixExpr):
      return _same_matrix(gold.doit(), prediction.doit())
    return _same_percentage(gold, prediction)
  except Exception:  # sympy raises anything at all over hostile text
    return False


def _same_matrix(gold: sympy.MatrixBase, prediction: sympy.MatrixBase) -> bool:
  if gold.shape != prediction.shape:
    return False
  entries = zip(gold.flat(), prediction.flat(), strict=True)
  return all(_same_value(a, b) for a, b in entries)


def _same_percentage(gold: sympy.Expr, prediction: sympy.Expr) -> bool:
  """50% is 50% and 0.5; also 50, since a question may ask for percent."""
  one, one_percent = _without_percent(gold)
  other, other_percent = _without_percent(prediction)
  if one_percent == other_percent:
    return _same_expression(one, other)
  if _same_expression(gold.doit(), prediction.doit()):
    return True
  # Below 1 a number is more likely a share: 0.5% is not 0.5.
  is_share = one.is_number and not one.is_Integer and abs(one) < 1
  return not is_share and one.is_Number and _same_expression(one, other)


def _without_percent(value: sympy.Expr) -> tuple[sympy.Expr, bool]:
  if value.is_Mul and len(value.args) == 2 and value.args[1] == _PERCENT:
    return value.args[0], True
  return value, False


def _same_expression(one: sympy.Expr, other: sympy.Expr) -> bool:
  has_decimal = bool(one.has(sympy.Float) or other.has(sympy.Float))
  one = _exact(one)
  other = _exact(other)
  if one == other:
    return True
  if not (one.free_symbols or other.free_symbols):
    return _same_number(one.doit(), other.doit(), has_decimal)
  # Each coefficient in a formula is compared with its counterpart.
  ours = _terms(one)
  theirs = _terms(other)
  return ours.keys() == theirs.keys() and all(
    _same_number(coefficient, theirs[rest], has_decimal)
    for rest, coefficient in ours.items()
  )


def _exact(value: sympy.Expr) -> sympy.Expr:
  """Replaces each decimal by its exact fraction."""
  return value.xreplace({f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)})


def _terms(value: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
  """Returns a sum's parts with variables -> their coefficients."""
  terms: dict[sympy.Expr, sympy.Expr] = {}
  for term in sympy.Add.make_args(value):
    coefficient, rest = term.as_independent(*value.free_symbols, as_Add=False)
    terms[rest] = terms.get(rest, 0) + coefficient
  return {rest: c.doit() for rest, c in terms.items() if c != 0}


def _same_number(one: sympy.Expr, other: sympy.Expr, has_decimal: bool) -> bool:
  if one == other:
    return True
  rational = (one.is_Rational, other.is_Rational)
  if has_decimal and any(rational):
    return notation.same_decimal(_fraction(one), _fraction(other))
  return not all(rational) and _is_zero(one - other)


def _fraction(value: sympy.Expr) -> Fraction:
  """Returns a real number's value to 40 digits; raises TypeError for other values."""
  rational = sympy.Rational(value.evalf(40)) if not value.is_Rational else value
  return Fraction(int(rational.p), int(rational.q))


def _is_zero(value: sympy.Expr) -> bool:
  """Whether a number is 0; its parts decide how many digits are compared."""
  digits = _DIGITS
  if value.has(*_UNEVALUATED):
    digits = 15
  elif all(isinstance(f, _CHEAP) for f in value.atoms(sympy.Function)):
    digits = _CHEAP_DIGITS
  try:
    # Twice: at few digits sympy takes the logarithm of 1 + 10^{-20} for 0.
    return all(value.evalf(n, maxn=digits, strict=True) == 0 for n in (2, digits))
  except PrecisionExhausted:  # the terms cancel to the last digit
    return True

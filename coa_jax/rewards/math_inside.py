"""The child process of the math grader: math-verify (sympy) behind one pipe.

It compares what `math` could not compare by looks. Whatever the answer makes sympy do
is bounded by the limits on CPU and memory that this process sets on itself.
"""

from __future__ import annotations

import json
import re
import resource
import sys

import math_verify
import sympy
from math_verify.grader import is_assignment_relation, take_last_relation
from sympy.core.relational import Relational

from coa_jax.rewards import notation

_MEMORY_BYTES = 4 << 30
_INEQUALITY = re.compile(r"[<>]|\\(?:leq?|geq?|neq?|leqslant|geqslant|lt|gt)(?![a-z])")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b|\\lor\b|\\vee\b|\\cup\b")
_AND = re.compile(r"\\text\s*\{\s*and\s*\}|\band\b|\\land\b|\\wedge\b|\\cap\b")


def serve() -> None:
  """Answers one line [prediction, gold, CPU seconds] by one boolean, without end."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  print("ready", flush=True)
  for line in sys.stdin:
    # The kernel counts from the start of the process, so the limit moves with it.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    prediction, gold, seconds = json.loads(line)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    print(json.dumps(same(prediction, gold)), flush=True)


def same(prediction: str, gold: str) -> bool:
  """math-verify's verdict, or that both are the same set of solutions."""
  # A bare formula has no anchor that math-verify would find; a box gives it one.
  # In prose math-verify finds the formula by itself.
  if notation.is_prose(prediction):
    ours = _parsed(prediction)
  else:
    ours = _parsed_formula(prediction)
  return _verified(_parsed_formula(gold), ours) or _same_solutions(prediction, gold)


def _parsed_formula(text: str) -> list:
  return _parsed(f"\\boxed{{{text}}}")


# The CPU limit bounds the work, so math-verify's own signals are off (None).
def _parsed(text: str) -> list:
  return math_verify.parse(text, parsing_timeout=None)


def _verified(gold: object, prediction: object) -> bool:
  return bool(math_verify.verify(gold, prediction, timeout_seconds=None))


def _same_solutions(prediction: str, gold: str) -> bool:
  """Whether an inequality and another, or an interval, have the same solutions.

  math-verify is less strict here already, but only where the gold answer is one
  inequality and the prediction a set: `(3,\\infty)` for `x>3`, and not the reverse.
  """
  if not (_INEQUALITY.search(prediction) or _INEQUALITY.search(gold)):
    return False
  try:
    ours = _solutions(prediction)
    theirs = _solutions(gold)
    if ours is None or theirs is None:
      return False
    # An interval names no variable and fits any; `x>3` and `y>3` are two statements.
    variables = ours[0] | theirs[0]
    return len(variables) == 1 and _verified(theirs[1], ours[1])
  except Exception:  # sympy raises anything at all over hostile text
    return False


def _solutions(text: str) -> tuple[set, sympy.Set] | None:
  """The variables and the values of a statement such as `x<1 or 2<x\\le 3`."""
  variables = set()
  union = sympy.EmptySet
  # `and` binds closer than `or`: a union of intersections.
  for alternative in _OR.split(text):
    intersection = sympy.S.Reals
    for part in _AND.split(alternative):
      parsed = _parsed_formula(part.strip())
      if not parsed:
        return None
      bounds = _bounds(parsed[0])
      if bounds is None:
        return None
      variables |= bounds[0]
      intersection = sympy.Intersection(intersection, bounds[1])
    union = sympy.Union(union, intersection)
  return variables, union


def _bounds(parsed: object) -> tuple[set, sympy.Set] | None:
  if is_assignment_relation(parsed):  # x \in (3,\infty)
    parsed = take_last_relation(parsed).rhs
  if isinstance(parsed, sympy.Set) and not parsed.has(Relational):
    return set(), parsed
  # math-verify reads `2<x\le 3` as two relations that both hold.
  relations = (parsed,)
  if isinstance(parsed, sympy.And):
    relations = parsed.args
  variables = set()
  values = sympy.S.Reals
  for relation in relations:
    # The bare variable has to stand alone on its side: `x^2>4` only repeats a question
    # whose answer is `x<-2 or x>2`.
    if not isinstance(relation, Relational):
      return None
    left = relation.lhs
    right = relation.rhs
    has_variable = left.is_Symbol or right.is_Symbol
    has_number = left.is_number or right.is_number
    if not (has_variable and has_number):
      return None
    variables |= relation.free_symbols
    values = sympy.Intersection(values, relation.doit().as_set())
  return variables, values

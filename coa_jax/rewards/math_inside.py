"""The child process of the math grader: math-verify (sympy) behind one pipe.

It compares formulas, sets and intervals that `math` cannot compare as text. The process
limits its own CPU time and memory, and so bounds sympy's work on any answer.

`same` is math-verify with number comparison by `math_numbers`; `same_bare` is
math-verify as published.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from typing import Any

import math_verify
import sympy
from math_verify.grader import is_assignment_relation, take_last_relation
from sympy.core.relational import Relational

from coa_jax.rewards import math_numbers, notation

_MEMORY_BYTES = 4 << 30
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b|\\lor\b|\\vee\b|\\cup\b")
_AND = re.compile(r"\\text\s*\{\s*and\s*\}|\band\b|\\land\b|\\wedge\b|\\cap\b")


def serve(bare: bool = False) -> None:
  """Answers each line [prediction, gold, CPU seconds] with one boolean.

  `bare` selects math-verify's verdicts as published.
  """
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  compare = same_bare
  if not bare:
    compare = same
    math_numbers.replace_comparison()
  print("ready", flush=True)
  for line in sys.stdin:
    # The kernel counts CPU time from the process start, so each line moves the limit.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    prediction, gold, seconds = json.loads(line)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    try:
      verdict = compare(prediction, gold)
    except Exception:  # sympy raises anything at all over hostile text
      verdict = False
    print(json.dumps(verdict), flush=True)


def same(prediction: str, gold: str) -> bool:
  """Whether math-verify, with exact numbers, or the solutions agree."""
  # math-verify finds a bare formula only with an anchor; a box provides one. In prose,
  # math-verify finds the formula itself.
  if notation.is_prose(prediction):
    ours = _parsed(prediction)
  else:
    ours = _parsed_formula(prediction)
  theirs = _parsed_formula(gold)
  letters = _letters(ours + theirs)
  ours = [_with_letters(part, letters) for part in ours]
  theirs = [_with_letters(part, letters) for part in theirs]
  return _verified(theirs, ours) or _same_solutions(prediction, gold)


def same_bare(prediction: str, gold: str) -> bool:
  """Returns the verdict of math-verify's `parse` and `verify` with default arguments.

  Text without a box or `$` is put into a box, as verl does with gold answers; without a
  box `parse` reads `2\\sqrt{3}` as 2.
  """
  return _verified(_parsed(_anchored(gold)), _parsed(_anchored(prediction)))


def _anchored(text: str) -> str:
  if "\\boxed" in text or notation.is_prose(text):
    return text
  return f"\\boxed{{{text}}}"


def _parsed_formula(text: str) -> list:
  return _parsed(f"\\boxed{{{text}}}")


# The CPU limit bounds the work, so math-verify's own signals are off (None).
def _parsed(text: str) -> list:
  return math_verify.parse(text, parsing_timeout=None)


def _verified(gold: object, prediction: object) -> bool:
  return bool(math_verify.verify(gold, prediction, timeout_seconds=None))


# ---- the letter i ------------------------------------------------------------------


def _letters(parsed: list) -> dict:
  """Returns symbol replacements: i is the imaginary unit unless it is a variable.

  math-verify reads i as a symbol; then the formula's other symbols are not real, and so
  differ from the symbols in a formula without i.
  """
  formulas = [part for part in parsed if isinstance(part, sympy.Basic)]
  symbols = {s for part in formulas for s in part.atoms(sympy.Symbol)}
  units = [s for s in symbols if s.name == "i"]
  if not units and all(s.is_real for s in symbols):
    return {}
  letters = {s: sympy.Symbol(s.name) for s in symbols}
  letters[sympy.I] = sympy.Symbol("capital I")  # math-verify reads a capital letter so
  if not any(_is_variable(s, formulas) for s in units) and not any(
    s.name == "j"
    for s in symbols  # unit vectors
  ):
    letters.update(dict.fromkeys(units, sympy.I))
  return letters


def _is_variable(symbol: sympy.Symbol, formulas: list) -> bool:
  """Whether a symbol is an index, assigned to or compared: `i = 3`, `i > 3`."""
  for formula in formulas:
    if formula.has(symbol) and symbol not in formula.free_symbols:
      return True
    for relation in formula.atoms(Relational):
      if not isinstance(relation, sympy.Eq) and relation.has(symbol):
        return True
      if relation.lhs == symbol:
        return True
  return False


def _with_letters(part: Any, letters: dict) -> Any:
  if not letters or not isinstance(part, sympy.Basic):
    return part
  # The `args` of such types have lost the order.
  unsorted = getattr(part, "_unsorted_args", None)
  if unsorted is not None:
    return part.func(*[_with_letters(arg, letters) for arg in unsorted])
  if isinstance(part, Relational):  # evaluated, x = {i, -i} would be false
    sides = [_with_letters(side, letters) for side in (part.lhs, part.rhs)]
    return part.func(*sides, evaluate=False)
  if isinstance(part, sympy.Interval):  # (1, i) is a pair
    ends = [_with_letters(end, letters) for end in (part.start, part.end)]
    if not all(end.is_extended_real for end in ends):
      return sympy.Tuple(*ends)
  return part.xreplace(letters)


# ---- inequalities ------------------------------------------------------------------


def _same_solutions(prediction: str, gold: str) -> bool:
  """Whether an inequality has the same solutions as another, or as an interval.

  math-verify has a looser comparison, but only if the gold answer is one inequality and
  the prediction a set: `(3,\\infty)` for `x>3`, and not the reverse.
  """
  if not (notation.RELATION.search(prediction) or notation.RELATION.search(gold)):
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
  """Returns a statement's variables and values, e.g. for `x<1 or 2<x\\le 3`."""
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
  # math-verify reads `2<x\le 3` as a conjunction of two relations.
  relations = (parsed,)
  if isinstance(parsed, sympy.And):
    relations = parsed.args
  variables = set()
  values = sympy.S.Reals
  for relation in relations:
    # The bare variable must be alone on its side: `x^2>4` only repeats the question
    # that `x<-2 or x>2` answers.
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

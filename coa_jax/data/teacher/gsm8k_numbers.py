"""Makes new tasks from GSM8K's: the same questions with other numbers.

A number is changed if it occurs in the solution's notes and exactly once in the
question: a new value is drawn, the notes are calculated again, and question and
solution are rewritten. Numbers written as words ("half", "a week") stay. A question
gets no copies if its notes use a constant missing from the question. A draw is refused
if a result is no longer positive, or an integer result no longer an integer.
"""

from __future__ import annotations

import ast
import dataclasses
import fractions
import operator
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.backend import Unsolvable
from coa_jax.data.teacher.gsm8k_programs import said_in_words
from coa_jax.data.teacher.gsm8k_replay import NUMBER, Solution, read_solution, value_of

FAMILY = "new_numbers"  # the new tasks' family
_DRAWS = 60  # attempts to draw new numbers for one task
_FINAL = re.compile(r"(\n#### *)(.*?)\s*$")
# Characters beside a number inside a larger token: 1/2, 5th, 3:30, 10-12, 2x4.
_PART = re.compile(r"[\w/:.-]")
_YEARS = range(1800, 2101)
_OPERATIONS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
}
_Numbers = dict[fractions.Fraction, fractions.Fraction]  # old -> new


def with_new_numbers(tasks: Iterable[Task], copies: int) -> list[Task]:
  """Adds up to `copies` copies with other numbers after each task with a solution."""
  out = []
  for task in tasks:
    out.append(task)
    if copies:
      out += _copies(task, copies)
  return out


def _copies(task: Task, copies: int) -> list[Task]:
  """Makes up to `copies` different copies of a task, each with newly drawn numbers."""
  text = task.meta.get("solution")
  try:
    solution = read_solution(text) if isinstance(text, str) else None
  except Unsolvable:
    return []
  if solution is None:
    return []
  changing = _changing(task.question, solution)
  if not changing:
    return []
  found: dict[str, Task] = {}
  for draw in range(_DRAWS):
    numbers = _drawn(changing, task.question, random.Random(f"{task.id} {draw}"))
    numbers = _recalculated(solution, numbers, task.question)
    if numbers is not None:
      copy = _rewritten(task, numbers, changing, len(found) + 1)
      if copy.question != task.question:
        found.setdefault(copy.question, copy)
    if len(found) == copies:
      break
  return list(found.values())


def _changing(question: str, solution: Solution) -> list[fractions.Fraction]:
  """Returns the notes' changeable numbers: each occurs once in the question."""
  results = {fractions.Fraction(step.value) for step in solution.steps}
  used = {value for step in solution.steps for value in _constants(step.program)}
  counts = Counter(value_of(match[0]) for match in NUMBER.finditer(question))
  changing = []
  for match in NUMBER.finditer(question):
    value = value_of(match[0])
    around = question[max(0, match.start() - 1) : match.start()]
    around += re.sub(r"^[.,:](?!\d)", "", question[match.end() : match.end() + 2])[:1]
    if value is None or counts[value] > 1 or value not in used - results:
      continue
    if value in (0, 1) or value in _YEARS or said_in_words(value, question):
      continue
    if not _PART.search(around):
      changing.append(value)
  return changing


def _constants(program: str) -> list[fractions.Fraction]:
  return [
    fractions.Fraction(repr(node.value))
    for node in ast.walk(ast.parse(program, mode="eval"))
    if isinstance(node, ast.Constant)
  ]


def _drawn(
  changing: Iterable[fractions.Fraction], question: str, rng: random.Random
) -> _Numbers:
  """Draws a new value for each number: half to double its size, and as round."""
  numbers = {}
  for value in changing:
    unit = fractions.Fraction(1)
    while value % unit:
      unit /= 10
    for rounder in (5, 10, 50, 100, 500, 1000, 10000):
      if value % rounder == 0 and value > rounder:
        unit = fractions.Fraction(rounder)
    count = value / unit
    drawn = rng.randint(max(2, int(count / 2)), int(count * 2)) * unit
    shown = _shown(value)
    if re.search(rf"(?<![\d.,]){re.escape(shown)} ?(?:%|percent)", question):
      drawn = min(drawn, fractions.Fraction(95))
    numbers[value] = drawn
  return numbers


def _recalculated(
  solution: Solution, numbers: _Numbers, question: str
) -> _Numbers | None:
  """Adds every note's new result; None if a result or a constant is unsuitable.

  Every number has one new value, so that text can be rewritten number by number. A
  constant must be in the question, in digits or words, or be an earlier result.
  Otherwise it may be a result without a note, which new numbers would make wrong.
  """
  numbers = dict(numbers)
  kept: set[fractions.Fraction] = set()
  results: set[fractions.Fraction] = set()
  for step in solution.steps:
    old = fractions.Fraction(step.value)
    if _calculated(step.program, {}) != old:
      return None  # rounded
    kept.update(value for value in _constants(step.program) if value not in numbers)
    new = _calculated(step.program, numbers)
    if new is None or new <= 0 or numbers.setdefault(old, new) != new:
      return None
    # Integers stay integers; other results may have cents but no more decimals.
    if (new * (1 if old.denominator == 1 else 100)).denominator != 1:
      return None
    results.add(old)
  asked = {value_of(number) for number in NUMBER.findall(question)}
  if not all(value in asked or said_in_words(value, question) for value in kept):
    return None
  # A kept number must not equal a changed one: rewriting could not tell them apart.
  if any(numbers.get(value, value) != value for value in kept):
    return None
  return numbers


def _calculated(program: str, numbers: Mapping) -> fractions.Fraction | None:
  """Evaluates plain arithmetic exactly with other numbers; None on division by 0."""

  def value(node: ast.expr) -> fractions.Fraction:
    if isinstance(node, ast.BinOp):
      operation = _OPERATIONS[type(node.op)]
      return fractions.Fraction(operation(value(node.left), value(node.right)))
    if isinstance(node, ast.UnaryOp):
      inner = value(node.operand)
      return -inner if isinstance(node.op, ast.USub) else inner
    constant = fractions.Fraction(repr(node.value))
    return numbers.get(constant, constant)

  try:
    return value(ast.parse(program, mode="eval").body)
  except ZeroDivisionError:
    return None


def _rewritten(
  task: Task, numbers: _Numbers, changing: Iterable[fractions.Fraction], copy: int
) -> Task:
  """Returns the task with new numbers in its question, solution and answer."""
  asked = {value: numbers[value] for value in changing}
  solution = _replaced(task.meta["solution"], numbers)
  return dataclasses.replace(
    task,
    id=f"{task.id}-{FAMILY}-{copy}",
    question=_replaced(task.question, asked),
    answers=(_FINAL.search(solution)[2].replace(",", ""),),
    family=FAMILY,
    meta={**task.meta, "solution": solution},
  )


def _replaced(text: str, numbers: _Numbers) -> str:

  def new(match: re.Match[str]) -> str:
    value = value_of(match[0])
    if value not in numbers:
      return match[0]
    return _shown(numbers[value], "," in match[0])

  return NUMBER.sub(new, text)


def _shown(value: fractions.Fraction, commas: bool = False) -> str:
  """Writes a number with at most six decimals, as people do."""
  form = ",f" if commas else "f"
  text = f"{float(value):{form}}"
  return text.rstrip("0").rstrip(".") if "." in text else text

"""Plays GSM8K's worked solutions as one program each.

`gsm8k_replay` runs a program for every calculator note. Here a solution's notes are the
lines of one program, with a name for every result, so a trajectory is short: a thought
about the calculation, one call, the answer. Two styles (lines with and without
comments) and the valid line orders give several trajectories per question.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import fractions
import keyword
import random
import re
from collections.abc import Collection, Iterable, Sequence

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.gsm8k_replay import (
  NUMBER,
  Gsm8kReplay,
  Solution,
  Step,
  check_output,
  value_of,
)
from coa_jax.protocol import tool_bodies

ANSWER = "answer"  # the last result's name
_MAX_NAME_WORDS = 3
_MAX_COMMENT_WORDS = 20
_DIGIT = re.compile(r"\d")
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z])|\n")
_WORD = re.compile(r"[a-z]+", re.ASCII)
_FILLERS = re.compile(
  r"(?:a|all|an|and|are|at|be|by|each|for|from|had|has|have|he|her|his|if|in|is|it|its|"
  r"of|on|or|per|she|so|that|the|their|there|they|this|to|was|were|which|will|with)"
)
# Names forbidden in a program.
_TAKEN = frozenset((*keyword.kwlist, *keyword.softkwlist, *dir(builtins), ANSWER))
# Number -> words for it in a question.
_WORDS = {
  2: r"half|halves|twice|doubl|pair|couple|both|two",
  3: r"third|triple|thrice|three",
  4: r"quarter|fourth|four",
  5: r"fifth|nickel|weekday|five",
  6: r"six",
  7: r"week|seven",
  8: r"eight",
  9: r"nine",
  10: r"dime|ten\b|tenth|decade",
  12: r"dozen|year|month|feet|foot|noon|twelve",
  24: r"day",
  25: r"quarter",
  30: r"month|half an hour|thirty",
  60: r"hour|minute",
  100: r"%|percent|cent|dollar|\$|meter|century|hundred",
}


@dataclasses.dataclass(frozen=True)
class Line:
  """A program line: its result's name, a Python expression, the calculator note.

  `needs` has the names of the earlier results in its expression.
  """

  name: str
  expression: str
  needs: frozenset[str]
  step: Step


class Gsm8kPrograms(Gsm8kReplay):
  """Plays every agent, for its own tasks; see `backend.ModelBackend`."""

  def __init__(self, tasks: Iterable[Task], sample: int):
    """Takes the tasks and the sample number of its runs; see `Gsm8kReplay`."""
    super().__init__(tasks)
    self._sample = sample

  def _reply(
    self, agent: str, question: str, solution: Solution, replies: int, output: str
  ) -> str:
    """Returns the agent's next reply, by its reply count and the program's output."""
    last = solution.steps[-1]
    if agent == runs.REFLECTOR:
      check_output(last, output)
      return last.finding
    if agent == runs.SOLVER:
      return f"ANSWER: {last.value}"
    if agent == runs.VERIFIER:
      return "SCORE: 4"  # the program's output is the answer
    if agent == runs.ORCHESTRATOR and replies:
      return f"NEXT: {runs.SOLVER}"
    # A question's samples alternate in style; all but the first may have another line
    # order.
    first = random.Random(question).randrange(2)
    commented = (first + self._sample) % 2 == 1
    lines = program_lines(solution, question)
    if self._sample:
      lines = reordered(lines, random.Random(f"{self._sample} {question}"))
    if agent == runs.ORCHESTRATOR:
      return f"NEXT: {runs.CODE}\nREASON: {thought(lines, commented)}"
    return tool_bodies.render_code(program_text(lines, commented))


def program_lines(solution: Solution, question: str) -> list[Line]:
  """Makes a line from each note needed for the answer.

  A number in a note stands for an earlier result with the same value: the newest
  unused result or, unless the question has this number, the newest.
  """
  values = [fractions.Fraction(value_of(step.value) or 0) for step in solution.steps]
  asked = {value_of(number) for number in NUMBER.findall(question)}
  asked |= {number for number in _WORDS if said_in_words(number, question)}
  untaken = set(range(len(values)))
  names = _names(solution.steps)
  lines = []
  for i, step in enumerate(solution.steps):
    tree = ast.parse(step.program, mode="eval")
    linked = _Linked(values[:i], names, asked, untaken)
    tree = linked.visit(tree)
    lines.append(Line(names[i], ast.unparse(tree), frozenset(linked.needs), step))
  return _needed(lines)


class _Linked(ast.NodeTransformer):
  """Replaces numbers by the names of equal earlier results."""

  def __init__(
    self,
    values: Sequence[fractions.Fraction],
    names: Sequence[str],
    asked: Collection[fractions.Fraction | None],
    untaken: set[int],
  ):
    self.needs: set[str] = set()
    self._values = values
    self._names = names
    self._asked = asked
    self._untaken = untaken

  def visit_Constant(self, node: ast.Constant) -> ast.expr:
    value = fractions.Fraction(repr(node.value))
    equal = [i for i, earlier in enumerate(self._values) if earlier == value]
    chosen = [i for i in equal if i in self._untaken]
    if not chosen and value not in self._asked:
      chosen = equal
    if not chosen:
      return node
    name = self._names[chosen[-1]]
    self.needs.add(name)
    self._untaken.discard(chosen[-1])
    return ast.Name(name)


def said_in_words(number: fractions.Fraction | int, question: str) -> bool:
  """Whether a question may write the number as words: "half" is 2, "a week" 7."""
  words = _WORDS.get(number)
  return words is not None and bool(re.search(words, question, re.IGNORECASE))


def _needed(lines: Sequence[Line]) -> list[Line]:
  """Returns the lines that the last one depends on."""
  needed = {ANSWER}
  for line in reversed(lines):
    if line.name in needed:
      needed |= line.needs
  return [line for line in lines if line.name in needed]


def _names(steps: Sequence[Step]) -> list[str]:
  """Names each step's result after the step's goal; the last is `ANSWER`."""
  names: list[str] = []
  for step in steps[:-1]:
    words = [w for w in _WORD.findall(step.goal.lower()) if not _FILLERS.fullmatch(w)]
    name = "_".join(words[:_MAX_NAME_WORDS]) or "result"
    number = 1
    unique = name
    while unique in names or unique in _TAKEN:
      number += 1
      unique = f"{name}_{number}"
    names.append(unique)
  return [*names, ANSWER]


def reordered(lines: Sequence[Line], rng: random.Random) -> list[Line]:
  """Draws an order with every line after its dependencies."""
  order: list[Line] = []
  left = list(lines)
  while left:
    done = {line.name for line in order}
    chosen = rng.choice([line for line in left if line.needs <= done])
    left.remove(chosen)
    order.append(chosen)
  return order


def thought(lines: Sequence[Line], commented: bool) -> str:
  """Describes the calculation: every goal, or the last if comments give the rest."""
  goals = [_goal(line) for line in lines]
  if commented:
    return f"Calculate {goals[-1]}."
  return f"Calculate {', then '.join(goals)}."


def _goal(line: Line) -> str:
  """Returns a line's goal without numbers, which only the program may produce."""
  goal = line.step.goal
  if _DIGIT.search(goal):
    return line.name.replace("_", " ")
  return goal


def program_text(lines: Sequence[Line], commented: bool) -> str:
  """Writes the program: a line for each result, then `print(answer)`."""
  results = {value_of(line.step.value) for line in lines}
  text = []
  for line in lines:
    if commented:
      comment = _sentence(line.step)
      told = {value_of(number) for number in NUMBER.findall(comment)}
      # A comment must not reveal results that the program has yet to calculate.
      if len(comment.split()) > _MAX_COMMENT_WORDS or told & results:
        comment = _goal(line)
      text.append(f"# {comment}")
    text.append(f"{line.name} = {line.expression}")
  text.append(f"print({_shown(lines[-1].step)})")
  return "\n".join(text)


def _sentence(step: Step) -> str:
  """Returns the last sentence around a note, with `?` for its value."""
  before = _SENTENCE_END.split(step.thought)[-1]
  after = step.finding.removeprefix("$").removeprefix(step.value)
  if before == step.goal:
    return before
  return " ".join(f"{before} ? {after}".split())


def _shown(step: Step) -> str:
  """Returns the expression to print: the answer, rounded if its note rounds it."""
  decimals = step.value.partition(".")[2]
  if decimals and len(decimals) <= 2:
    return f"round({ANSWER}, 2)"
  return ANSWER

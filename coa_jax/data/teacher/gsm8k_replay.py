"""Replays GSM8K's worked solutions as a team with real tools.

The solutions (arXiv 2110.14168) have calculator notes: `48/2 = <<48/2=24>>24 clips in
May.` Each note becomes one team round: the text before the note is the orchestrator's
reason, its expression the code agent's program, and its value with the text after it
the reflector's review. The planner lists the notes' goals; the solver gives the last
value. A program's output must equal the note's value.

The replay keeps no state: an agent's reply count gives its current step.

budget: reading a solution's notes and playing them share every convention.
"""

from __future__ import annotations

import ast
import dataclasses
import decimal
import fractions
import re
from collections.abc import Iterable, Sequence

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.backend import Message, Reply, Unsolvable
from coa_jax.protocol import tool_bodies

_OBSERVED = f"[{runs.OBSERVATION} {runs.CODE}]\n"
_QUESTION = re.compile(r"^Question: (.*)\nTools: ", re.DOTALL)
_NOTE = re.compile(r"<<([^<>\n]*)>>")
_FINAL = re.compile(r"\n?#### *(.*?)\s*$")
NUMBER = re.compile(r"(?<![\d.,])(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
_WRITTEN = re.compile(r"\s*[-$]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
_BECAUSE = re.compile(r" (?:because|since)\b( .+)?$")
_VALUE = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?|[+-]?\d+/\d+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_CLAUSE_END = re.compile(r"(?<!Mr)(?<!Mrs)(?<!Ms)(?<!Dr)[,;:.]+(?:\s|$)|\n")
# A calculation at a text's end: numbers and signs only.
_CALCULATION = re.compile(
  r"(?<![\w.,])[$(]*[\d.](?:[\d.\s()+\-*/x\u00d7\u00f7$%]|,(?=\d{3}))*$"
)
# A calculation that continues after the text's end.
_OPEN_END = re.compile(r"(?:[-+*/\u00d7\u00f7(]|\bx)$")

# Unambiguous notations and their Python form; all others are refused.
_NOTATIONS = (
  (re.compile(r"\s+"), " "),
  (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),  # 1,000
  (re.compile(r"\$(?=[\d.])"), ""),  # $5
  (re.compile(r"(?<=[\d)])\s*[x\u00d7]\s*(?=[\d(.])"), "*"),
  (re.compile(r"\u00f7"), "/"),
  (re.compile(r"(?<![\d.])0+(?=\d)"), ""),  # 007 is not a number in Python
)
_PERCENT = re.compile(r"(\d+\.?\d*|\.\d+)%")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv)
_MAX_CHARS = 200  # a longer expression is not a calculator note
_MAX_GOAL_WORDS = 8
# A float's repr may be off by this much, relative to the value.
_FLOAT_ERROR = fractions.Fraction(1, 10**9)
_UNKNOWN = "?"
_DONE = "all steps done"


@dataclasses.dataclass(frozen=True)
class Step:
  """One calculator note.

  Attributes:
    thought: the text before the note, without the calculation and its result.
    program: the expression, as Python.
    value: the expression's claimed value, as a plain decimal.
    rounding: the claim's tolerance: half a unit in its last decimal, 0 for an integer.
    finding: the value and the text after the note.
    goal: the note's purpose, in a few words.
  """

  thought: str
  program: str
  value: str
  rounding: fractions.Fraction
  finding: str
  goal: str


@dataclasses.dataclass(frozen=True)
class Solution:
  """A worked solution: its steps, and the text after the last one ("" for none)."""

  steps: tuple[Step, ...]
  rest: str


class Gsm8kReplay:
  """Plays every agent, for its own tasks."""

  def __init__(self, tasks: Iterable[Task]):
    """Reads each task's `meta["solution"]`; only these tasks can be played.

    Raises:
      ValueError: a task has no solution.
    """
    self._solutions: dict[str, Solution | Unsolvable] = {}
    for task in tasks:
      text = task.meta.get("solution")
      if not isinstance(text, str):
        raise ValueError(
          f"task {task.id!r} has no meta['solution']: backend 'gsm8k_replay' plays "
          "worked solutions with calculator notes, such as GSM8K's training rows"
        )
      try:
        self._solutions[task.question] = read_solution(text)
      except Unsolvable as e:
        self._solutions[task.question] = e

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """Replies with the agent's part of the solution; see `backend.ModelBackend`.

    Raises:
      Unsolvable: the solution cannot be played (with a reason of `read_solution`); or,
        with the reason "program_failed" or "other_value", the tool's output is not a
        number or not the note's value.
    """
    question = _QUESTION.match(messages[1].content)
    solution = None
    if question:
      solution = self._solutions.get(question[1])
    if solution is None:
      raise ValueError("the GSM8K replay was asked about a task that it does not have")
    if isinstance(solution, Unsolvable):
      raise Unsolvable(solution.reason, solution.detail)
    replies = sum(m.role == "assistant" for m in messages)
    output = messages[-1].content.rpartition(_OBSERVED)[2].strip()
    return Reply(self._reply(agent, question[1], solution, replies, output))

  def _reply(
    self, agent: str, question: str, solution: Solution, replies: int, output: str
  ) -> str:
    """Returns the agent's next reply, by its reply count and a program's output."""
    del question
    steps = solution.steps
    if agent == runs.PLANNER:
      return " ; ".join(step.goal for step in steps)
    if agent == runs.CODE:
      return tool_bodies.render_code(f"print({steps[replies].program})")
    if agent == runs.REFLECTOR:
      check_output(steps[replies], output)
      return steps[replies].finding
    if agent == runs.SOLVER:
      return f"ANSWER: {steps[-1].value}"
    if agent == runs.VERIFIER:
      return "SCORE: 4"  # `read_solution` has checked the answer
    # The orchestrator calls the planner, the code agent once per note, and the solver.
    if replies == 0:
      return f"NEXT: {runs.PLANNER}"
    if replies <= len(steps):
      return f"NEXT: {runs.CODE}\nREASON: {steps[replies - 1].thought}"
    return f"NEXT: {runs.SOLVER}\nREASON: {solution.rest or _DONE}"


def check_output(step: Step, output: str) -> None:
  """Raises Unsolvable unless a program's output is the value of the step's note."""
  value = value_of(output)
  if value is None:
    raise Unsolvable("program_failed", f"print({step.program}): {output[-200:]}")
  claimed = fractions.Fraction(step.value)
  if abs(value - claimed) > max(step.rounding, _FLOAT_ERROR * abs(claimed)):
    detail = f"{step.program} is {output}, the solution says {step.value}"
    raise Unsolvable("other_value", detail)


@dataclasses.dataclass(frozen=True)
class _Note:
  """The note `<<program=value>>` at `text[start:end]`; the value as written."""

  start: int
  end: int
  program: str
  value: str


def read_solution(text: str) -> Solution:
  """Reads a worked solution with calculator notes and a last line `#### answer`.

  Notes without an operator (`<<16=16>>16`) calculate nothing and are read as text.

  Raises:
    Unsolvable: with a reason: "no_program" (no note calculates), "broken_note" (a note
      is not `<<expression=value>>`), "not_arithmetic" (`arithmetic` refuses an
      expression) or "answer_not_computed" (the final answer is not the last note's
      value).
  """
  final = _FINAL.search(text)
  body = text
  answer = ""
  if final:
    body = text[: final.start()]
    answer = final[1]

  # --- The notes with a calculation.
  notes = []
  for match in _NOTE.finditer(body):
    expression, equals, value = match[1].rpartition("=")
    if not equals or value_of(value) is None:
      raise Unsolvable("broken_note", match[0])
    if "/" not in expression and value_of(expression) is not None:
      continue
    program = arithmetic(expression)
    if program is None:
      raise Unsolvable("not_arithmetic", match[0])
    notes.append(_Note(*match.span(), program, value))

  # --- Check that all notes can be played and the last one gives the answer.
  if re.search("<<|>>", _NOTE.sub("", body)):
    raise Unsolvable("broken_note", "a note that is not closed")
  if not notes:
    raise Unsolvable("no_program", "no note holds a calculation")
  if value_of(answer) != value_of(notes[-1].value):
    detail = f"the answer is {answer!r}, the last value {notes[-1].value}"
    raise Unsolvable("answer_not_computed", detail)
  return _solution(body, notes)


def _solution(body: str, notes: Sequence[_Note]) -> Solution:
  """Divides the text between notes: the rest of a line belongs to the note before."""
  steps = []
  before = body[: notes[0].start]
  ends = [note.start for note in notes[1:]] + [len(body)]
  for note, end in zip(notes, ends, strict=True):
    between = body[note.end : end]
    # The solutions write a value in the note and again after it.
    repeated = _WRITTEN.match(between)  # `<<2*3=6>>6 eggs`
    if repeated and value_of(repeated[0]) == value_of(note.value):
      between = between[repeated.end() :]
    after, newline, rest = between.partition("\n")
    if end < len(body) and not newline:  # the next note is on the same line
      after = ""
      rest = between
    steps.append(_step(_tidy(before), note, _tidy(after)))
    before = rest
  return Solution(tuple(steps), _tidy(before))


def _tidy(text: str) -> str:
  """Removes notes, blank lines, and spaces at both ends of each line."""
  lines = map(str.strip, _NOTE.sub("", text).splitlines())
  return "\n".join(filter(None, lines))


def _step(before: str, note: _Note, after: str) -> Step:
  """Makes a step from a note and the texts before and after it."""
  # --- The thought: the text before the note, without numbers that only the program may
  # give.
  after = after.rstrip(" .")
  *earlier, line = _without_calculation(before).split("\n")
  line = _without_result(line, note.value)
  goal = _goal(line, after) or note.program
  thought = "\n".join([*earlier, line])
  if not _WORD.search(thought):
    thought = goal

  # --- The finding: the value with its unit, "$12" or "24 clips in May".
  value = _plain(note.value)
  finding = value
  if before.endswith("$"):
    finding = f"${value}"
  if after and (after[0].isalnum() or after[0] in "($"):
    finding += " "
  finding += after
  return Step(
    thought=thought,
    program=note.program,
    value=value,
    rounding=_rounding(note.value),
    finding=finding,
    goal=goal,
  )


def _without_calculation(text: str) -> str:
  """Removes the calculation before a note, which the note repeats."""
  text = text.rstrip("=$: \n")
  bare = _CALCULATION.sub("", text).rstrip("=$: \n")
  if _OPEN_END.search(bare):  # only half a calculation: one number has a unit
    return text
  return bare


def _without_result(line: str, value: str) -> str:
  """Hides a result stated before its note: `They eat 6 because` -> `They eat ?`."""
  match = _BECAUSE.search(line)
  if match is None:
    return line
  claimed = value_of(value)

  def hide(number: re.Match[str]) -> str:
    return _UNKNOWN if value_of(number[0]) == claimed else number[0]

  claim = NUMBER.sub(hide, line[: match.start()])
  return claim + match[0] if match[1] else claim


def _goal(line: str, after: str) -> str:
  """Returns a few words from the clause after a note, or else from the one before."""

  def num_words(clause: str) -> int:
    return len(_WORD.findall(clause))

  following = _CLAUSE_END.split(after)[0]
  if num_words(following) > 1:
    return " ".join(following.split()[:_MAX_GOAL_WORDS])
  # A single word after the note is only a unit: put the last clause before the note in
  # front, preferably a clause with several words.
  clauses = [clause for clause in _CLAUSE_END.split(line) if num_words(clause)]
  telling = [clause for clause in clauses if num_words(clause) > 1]
  preceding = (telling or clauses or [""])[-1]
  return " ".join(f"{preceding} {following}".split()[-_MAX_GOAL_WORDS:])


def arithmetic(expression: str) -> str | None:
  """Returns an expression as Python if it is plain arithmetic; None otherwise.

  Plain arithmetic has numbers, + - * / //, signs and parentheses. Other unambiguous
  notations are accepted: 1,000 and $5 and 007, `x` between numbers, and a percent sign
  without an addition (`100+10%` is ambiguous).
  """
  if len(expression) > _MAX_CHARS:
    return None
  text = expression.strip()
  for pattern, plain in _NOTATIONS:
    text = pattern.sub(plain, text)
  if "%" in text and not re.search(r"[+-]", text):
    text = _PERCENT.sub(r"(\1/100)", text)
  # --- Python must read the text and find only arithmetic.
  try:
    tree = ast.parse(text, mode="eval").body
  except (SyntaxError, ValueError):
    return None
  if not _plain_tree(tree):
    return None
  return text


def _plain_tree(node: ast.expr) -> bool:
  if isinstance(node, ast.Constant):
    return type(node.value) in (int, float)
  if isinstance(node, ast.UnaryOp):
    return isinstance(node.op, ast.USub | ast.UAdd) and _plain_tree(node.operand)
  if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
    return _plain_tree(node.left) and _plain_tree(node.right)
  return False


def value_of(text: str) -> fractions.Fraction | None:
  """Returns a number's exact value from human or Python notation; None otherwise."""
  text = text.strip().removeprefix("$").replace(",", "")
  if not _VALUE.fullmatch(text):  # `Fraction` reads more: 1_000, other scripts' digits
    return None
  try:
    return fractions.Fraction(text)
  except ZeroDivisionError:
    return None


def _rounding(value: str) -> fractions.Fraction:
  """Returns half a unit in a number's last decimal; 0 for integers and fractions."""
  decimals = value.strip().partition(".")[2]
  return fractions.Fraction(bool(decimals), 2 * 10 ** len(decimals))


def _plain(value: str) -> str:
  """Writes a number as a decimal without needless zeros; a fraction stays one."""
  exact = value_of(value)
  try:
    shown = decimal.Decimal(value.strip().removeprefix("$").replace(",", ""))
  except decimal.InvalidOperation:
    return str(exact)
  return f"{shown.normalize():f}"

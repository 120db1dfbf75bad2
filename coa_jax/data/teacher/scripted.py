"""The offline backend: a scripted policy that plays every agent in the seeded world.

The script gets the same messages as a language model and reads everything from them:
the question identifies the task and its program, decisions and reviews give the known
values, observations are parsed as pages. It is stateless, so it also works behind an
HTTP endpoint, and every choice is a function of (seed, task, sample, occasion).

The script makes a real team's mistakes (wrong queries, programs with bugs, answers one
hop short) and notices most of them. It has two advantages over a small student: it
knows some facts by heart and does some arithmetic in its head.

budget: all agents share one convention for writing and reading facts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.data.tasks.world.pages import read_pages
from coa_jax.data.tasks.world.questions import evaluate, resolve
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.backend import Message, Reply


@dataclasses.dataclass(frozen=True)
class ScriptedConfig:
  """Config section `scripted`.

  Attributes:
    seed: the seed for every choice.
  """

  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Rates:
  """Probabilities of the script's errors and shortcuts.

  Attributes:
    wrong_query: a search uses a wrong query.
    buggy_program: a program computes something else or fails.
    premature: a question with several steps is answered one step short.
    caught: one of these three mistakes is noticed, if not obvious.
    recall: a fact is known by heart, so nothing is searched.
    mental: arithmetic is done in the head, so no program is run.
    slip: a recalled fact or a mental result is wrong, unnoticed.
  """

  wrong_query: float = 0.15
  buggy_program: float = 0.20
  premature: float = 0.12
  caught: float = 0.80
  recall: float = 0.25
  mental: float = 0.50
  slip: float = 0.10


@dataclasses.dataclass(frozen=True)
class _Entry:
  """An event shown to the agent, or (kind "own") the agent's own earlier reply."""

  kind: str
  content: str


class ScriptedBackend:
  """Plays every agent, for its own tasks."""

  def __init__(
    self,
    tasks: Iterable[Task],
    config: ScriptedConfig,
    sample: int = 0,
    rates: Rates = Rates(),
  ):
    """Takes the tasks; the script follows their `meta["program"]`.

    Raises:
      ValueError: a task has no program.
    """
    self._tasks = {task.question: task for task in tasks}
    for task in self._tasks.values():
      if "program" not in task.meta:
        raise ValueError(
          f"task {task.id!r} has no meta['program']: the scripted backend can only "
          "answer tasks of the generated world; use an LLM endpoint"
        )
    self._config = config
    self._rates = rates
    self._sample = sample

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """Returns the scripted reply; see `backend.ModelBackend`."""
    question = _QUESTION.search(messages[1].content)
    task = None
    if question:
      task = self._tasks.get(question[1])
    if task is None:
      raise ValueError("the scripted backend was asked about a task it does not have")
    mind = _Mind(task, self._config.seed, self._rates, self._sample)
    return Reply(mind.reply(agent, messages))


_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)
_HEADER = re.compile(r"^\[(\w+)(?: \w+)?\]\n", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+")
_DECISION = re.compile(r"NEXT: \w+(?:\nREASON: (.*))?")
_PROGRAMS = ("compute ", "compare ")  # the first word in a code assignment
_STEP_WORDS = {"+": "sum", "-": "difference", "*": "product"}
_STEP_WORDS |= {"min": "smaller", "max": "larger"}
# Operator -> its replacement in a wrong program.
_WRONG = {"+": "-", "-": "+", "*": "+", "<": ">", ">": "<", "min": "max", "max": "min"}


def _entries(agent: str, messages: Sequence[Message]) -> list[_Entry]:
  entries = []
  for message in messages[1:]:
    if message.role == "assistant":
      # Own replies are remembered like other agents' reports.
      decision = _DECISION.match(message.content)
      if decision:
        entries.append(_Entry(runs.DECISION, decision[1] or ""))
      elif agent == runs.REFLECTOR:
        entries.append(_Entry(runs.REFLECTION, message.content))
      else:
        entries.append(_Entry("own", message.content))
      continue
    # Text, then headers and contents in turn: see `runs.render`.
    parts = _HEADER.split(message.content)
    for kind, content in zip(parts[1::2], parts[2::2], strict=True):
      entries.append(_Entry(kind, content.removesuffix("\n")))
  return entries


class _Mind:
  """Makes one reply: reads the messages, forms beliefs, plays the agent."""

  def __init__(self, task: Task, seed: int, rates: Rates, sample: int):
    self.rates = rates
    self.program = task.meta["program"]
    self.truth = task.meta["values"]
    self.namesakes = task.meta.get("namesakes", {})
    self.key = f"{seed}/{task.id}/{sample}/"
    self.entries: list[_Entry] = []
    self.known: dict[int, str] = {}  # step -> its believed value
    self.assignment = ""  # the last "look up X" or "compute EXPRESSION"

  def reply(self, agent: str, messages: Sequence[Message]) -> str:
    self.entries = _entries(agent, messages)
    for entry in self.entries:
      self._learn(entry)
    return getattr(self, f"_{agent}")()

  def chance(self, *occasion: object) -> float:
    """Returns a number in [0, 1), determined by the run and the occasion alone."""
    text = self.key + "/".join(map(str, occasion))
    hashed = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(hashed, "big") / 2**48

  # --- The known values.

  def _learn(self, entry: _Entry) -> None:
    if entry.kind == runs.DECISION:
      # "recall RELATION VALUE ; EXPRESSION = VALUE ; look up ENTITY", as `_next_step`
      # writes it.
      for part in entry.content.split(" ; "):
        if part.startswith("recall "):
          _, relation, value = part.split(" ", 2)
          self._set(relation, value)
        elif part.startswith(("look up ", *_PROGRAMS)):
          self.assignment = part
        elif " = " in part:
          self._computed(part.split(" = ")[1])
    elif entry.kind == runs.REFLECTION and "Poor" not in entry.content:
      # "RELATION VALUE ; ..." from a looked-up page, or "result VALUE".
      entity = self.assignment.removeprefix("look up ")
      for part in entry.content.split(" ; "):
        relation, value = part.split(" ", 1)
        if relation == "result":
          self._computed(value)
        else:
          self._set(relation, value, entity)

  def _set(self, relation: str, value: str, entity: str | None = None) -> None:
    for i, step in enumerate(self.program):
      is_open = i not in self.known and step.get("relation") == relation
      if is_open and entity in (None, self._entity(i)):
        self.known[i] = value
        return

  def _computed(self, value: str) -> None:
    """Sets every computed step to `value`: one program runs all computations."""
    for i, step in enumerate(self.program):
      if step["op"] != "lookup":
        self.known[i] = value

  def _entity(self, i: int) -> str | None:
    """Returns look-up i's entity; None if it is not known yet."""
    entity = self.program[i]["entity"]
    if not entity.startswith("$"):
      return entity
    return self.known.get(int(entity[1:]))  # "$2" is step 2's value

  def _last(self, *kinds: str) -> _Entry | None:
    return next((e for e in reversed(self.entries) if e.kind in kinds), None)

  def _mentions(self, text: str) -> int:
    return sum(text in entry.content for entry in self.entries)

  def _open(self) -> list[int]:
    return [i for i in range(len(self.program)) if i not in self.known]

  def _expression(self, argument: str) -> str:
    """Writes a computation in infix form, with the looked-up values in it."""
    if not argument.startswith("$"):
      return argument
    step = self.program[int(argument[1:])]
    if step["op"] == "lookup":
      return resolve(argument, self.known)
    name = step["name"]
    left, right = map(self._expression, step["args"])
    if name in ("min", "max"):
      return f"{name}({left}, {right})"
    if name == "*":
      left = _bracketed(left)
      right = _bracketed(right)
    return f"{left} {name} {right}"

  # --- The agents.

  def _orchestrator(self) -> str:
    last = self._last(runs.PLAN, runs.REFLECTION, runs.VERDICT, runs.CANDIDATE)
    if last is None:
      return _decide(runs.PLANNER, self._task_in_words())
    if last.kind == runs.REFLECTION and "Poor" in last.content:
      if self.assignment.startswith(_PROGRAMS):
        return _decide(runs.PLANNER, "fix program")
      return _decide(runs.PLANNER, "search again")
    if last.kind == runs.VERDICT:
      return _decide(runs.PLANNER, f"still to find {_goal(self.program[-1])}")
    return self._next_step()

  def _next_step(self) -> str:
    """Goes through the open steps until one needs an agent; then the solver follows."""
    facts: list[str] = []  # values found without an agent
    for i in self._open():
      step = self.program[i]
      if self._stops_short(i):
        break

      # --- A page to look up, or a fact known by heart.
      if step["op"] == "lookup":
        entity = self._entity(i)
        # Memory has no facts about a mistaken entity.
        misled = entity != resolve(step["entity"], self.truth)
        if misled or self.chance("recall", i) >= self.rates.recall:
          if self._mentions(f"look up {entity}") >= 3:
            break  # the page cannot be found
          return _decide(runs.SEARCH, *facts, f"look up {entity}")
        self.known[i] = self._from_memory(self.truth[i], i)
        facts.append(f"recall {step['relation']} {self.known[i]}")

      # --- A comparison, by a program or in the head.
      elif step["op"] == "compare":
        left, right = (resolve(a, self.known) for a in step["args"])
        # The claim is true if the first entity is the answer.
        sign = "<" if step["name"] == "min" else ">"
        claim = f"{left} {sign} {right}"
        if self.chance("mental") >= self.rates.mental:
          return _decide(runs.CODE, *facts, f"compare {claim}")
        self.known[i] = self._result()
        facts.append(f"{claim} is {self.known[i] == step['of'][0]}")

      # --- Arithmetic: all remaining steps in one expression.
      else:
        expression = self._expression(f"${len(self.program) - 1}")
        if self.chance("mental") >= self.rates.mental:
          return _decide(runs.CODE, *facts, f"compute {expression}")
        result = self._from_memory(self._result(), "mental")
        facts.append(f"{expression} = {result}")
        break
    return _decide(runs.SOLVER, *facts)

  def _stops_short(self, i: int) -> bool:
    """Whether the script forgets the last step, on its first attempt."""
    if i != len(self.program) - 1 or self.program[i]["op"] == "compare":
      return False
    if i == 0 or self.program[0]["op"] != "lookup":
      return False
    if self._last(runs.VERDICT):  # a check has pointed it out
      return False
    return self.chance("short") < self.rates.premature

  def _result(self) -> str:
    """Computes the last step's value from the believed look-ups."""
    return evaluate(self.program, {}, self.known)[-1]

  def _task_in_words(self) -> str:
    lookups = [step for step in self.program if step["op"] == "lookup"]
    if not lookups:
      return "only arithmetic"
    relations = [step["relation"] for step in lookups]
    entities = [step["entity"] for step in lookups]
    # A chain, each page named by the page before; or pages side by side.
    if len(lookups) == 1 or any(entity.startswith("$") for entity in entities):
      return "find " + " then ".join(
        [f"{relations[0]} of {entities[0]}", *relations[1:]]
      )
    return f"find {relations[0]} of {' and '.join(entities)}"

  def _planner(self) -> str:
    words = []
    for i in self._open():
      step = self.program[i]
      if step["op"] == "lookup":
        words.append(f"{step['relation']} of {self._entity(i) or 'it'}")
      else:
        words.append(_goal(step))
    return " ; ".join(words) or "check again"

  def _search(self) -> str:
    entity = self.assignment.removeprefix("look up ")
    if not self._tried(entity) and self._slips(entity):
      entity = self._wrong_name(entity)
    return f"QUERY: {entity}"

  def _slips(self, entity: str) -> bool:
    return self.chance("query", entity) < self.rates.wrong_query

  def _tried(self, entity: str) -> bool:
    """Whether an earlier assignment had this entity."""
    return self._mentions(f"look up {entity}") > 1

  def _wrong_name(self, entity: str) -> str:
    """Returns half the name, or another entity's name with a word in common."""
    which = self.chance("which word", entity)
    namesakes = self.namesakes.get(entity, ())
    if which < 0.25 or not namesakes:
      return entity.split(" ")[0]
    if which < 0.5:
      return namesakes[0]
    return namesakes[-1]

  def _from_memory(self, value: str, occasion: object) -> str:
    """Returns the value or, on a memory slip, a similar number or name."""
    if self.chance("slip", occasion) >= self.rates.slip:
      return value
    if value.isdecimal():
      error = (1, 2, 10, 100)[int(self.chance("by", occasion) * 4)]
      return str(int(value) + error)
    namesakes = self.namesakes.get(value)
    if not namesakes:  # no similar name: no slip
      return value
    return namesakes[-1]

  def _code(self) -> str:
    verb, rest = self.assignment.split(" ", 1)
    is_first = self._mentions(f"{verb} ") <= 1  # a second program has no bug
    program = f"print({rest})"
    if is_first and self.chance("bug") < self.rates.buggy_program:
      program = self._bug(rest)
    return f"```py\n{program}\n```"

  def _bug(self, expression: str) -> str:
    which = self.chance("which bug")
    if which < 0.5:  # a wrong operator
      operator = re.compile(r"(?<= )[-+*<>](?= )|min|max")
      return f"print({operator.sub(lambda m: _WRONG[m[0]], expression, count=1)})"
    if which < 0.7:
      return f"prin({expression})"
    if which < 0.85:
      return f"print({_NUMBER.sub('n', expression, count=1)})"
    return expression  # nothing is printed

  def _reflector(self) -> str:
    text = self._last(runs.OBSERVATION).content
    if self.assignment.startswith(_PROGRAMS):
      return self._review_program(text.strip())

    # --- The requested page, or a namesake's.
    entity = self.assignment.removeprefix("look up ")
    pages = read_pages(text)
    page = pages.get(entity)
    missed = self.chance("caught", entity) >= self.rates.caught
    if page is None and missed and not self._tried(entity) and self._slips(entity):
      page = next(iter(pages.values()), None)

    # --- The page's facts for the entity's open steps.
    findings = []
    for i in self._open():
      if self.program[i]["op"] == "lookup" and self._entity(i) == entity:
        relation = self.program[i]["relation"]
        if page is None or relation not in page:
          return "wrong page tool_effectiveness : Poor"
        findings.append(f"{relation} {page[relation]}")
    if page is None:
      return "wrong page tool_effectiveness : Poor"
    return " ; ".join(findings)

  def _review_program(self, output: str) -> str:
    truth = self._result()
    result = output
    if self.assignment.startswith("compare "):
      # The program prints whether the first is the answer; the result is a name.
      first, second = self.program[-1]["of"]
      truth = str(truth == first)
      result = first if output == "True" else second
    if output not in ("True", "False") and not _NUMBER.fullmatch(output):
      return "no result tool_effectiveness : Poor"
    if output != truth and self.chance("caught program") < self.rates.caught:
      return "wrong result tool_effectiveness : Poor"
    return f"result {result}"

  def _solver(self) -> str:
    if self.program[-1]["op"] == "compare" and len(self._open()) == 1:
      self.known[len(self.program) - 1] = self._result()
    if not self.known:
      return "ANSWER: unknown"
    return f"ANSWER: {self.known[max(self.known)]}"  # the last known step's value

  def _verifier(self) -> str:
    is_right = self._last(runs.CANDIDATE).content == self.truth[-1]
    last = self.program[-1]
    # Only an answer one step short is noticed: a wrong value looks like a right one.
    is_short = len(self.program) - 1 in self._open() and last["op"] != "compare"
    if is_right or not is_short or self.chance("caught short") >= self.rates.caught:
      return "SCORE: 4"
    score = 1 if self.chance("score") < 0.5 else 2  # either fails the check
    return f"SCORE: {score}\nWHY: {_goal(last)} is missing"


def _bracketed(expression: str) -> str:
  """Formats a factor, in parentheses if it is a sum."""
  if "+" in expression or "-" in expression:
    return f"({expression})"
  return expression


def _goal(step: Mapping[str, Any]) -> str:
  """Returns a step's purpose in a word."""
  return step.get("relation") or _STEP_WORDS.get(step["name"], "compare")


def _decide(agent: str, *facts: str) -> str:
  if not facts:
    return f"NEXT: {agent}"
  return f"NEXT: {agent}\nREASON: {' ; '.join(facts)}"

"""Questions over a seeded world, each with a program that computes the answer.

A program is a list of steps (see `evaluate`): look-ups in pages, operations on whole
numbers, a comparison. Families differ in the number and kind of steps.

budget: a family's words and its program are read together.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.world.pages import LINKS, World

# Phrases for a link inside a longer question; {} is the entity or another link.
_PHRASES = {
  "mayor": ("the mayor of {}",),
  "birthplace": ("the birthplace of {}", "the town where {} was born"),
  "director": ("the director of {}", "the person who directed {}"),
  "headquarters": ("the headquarters of {}", "the town where {} is based"),
  "founder": ("the founder of {}", "the person who founded {}"),
}
_QUESTIONS = {
  "region": ("In which region is {}?", "Which region is {} in?"),
  "founded": ("When was {} founded?", "In which year was {} founded?"),
  "population": ("What is the population of {}?", "How many people live in {}?"),
  "mayor": ("Who is the mayor of {}?", "Name the mayor of {}."),
  "occupation": ("What is the occupation of {}?", "What does {} work as?"),
  "born": ("When was {} born?", "In which year was {} born?"),
  "birthplace": ("Where was {} born?", "What is the birthplace of {}?"),
  "released": ("When was {} released?", "In which year did {} come out?"),
  "director": ("Who directed {}?", "Name the director of {}."),
  "headquarters": ("Where is {} based?", "In which town is {} based?"),
  "founder": ("Who founded {}?", "Name the founder of {}."),
}
# (kind, relation, "min" or "max", question for one of the two names)
_COMPARISONS = (
  ("town", "founded", "min", "Which was founded earlier, {a} or {b}?"),
  ("town", "founded", "max", "Which was founded later, {a} or {b}?"),
  ("company", "founded", "min", "Which was founded earlier, {a} or {b}?"),
  ("company", "founded", "max", "Which was founded later, {a} or {b}?"),
  ("town", "population", "max", "Which has more people, {a} or {b}?"),
  ("town", "population", "min", "Which has fewer people, {a} or {b}?"),
  ("person", "born", "min", "Who was born earlier, {a} or {b}?"),
  ("person", "born", "max", "Who is younger, {a} or {b}?"),
  ("film", "released", "min", "Which came out earlier, {a} or {b}?"),
  ("film", "released", "max", "Which came out later, {a} or {b}?"),
)
# (kind, relation, "min" or "max", question for the number itself)
_EXTREMES = (
  ("town", "founded", "min", "When was the older of {a} and {b} founded?"),
  ("town", "founded", "max", "When was the newer of {a} and {b} founded?"),
  ("company", "founded", "min", "When was the older of {a} and {b} founded?"),
  ("company", "founded", "max", "When was the newer of {a} and {b} founded?"),
  ("town", "population", "max", "How many people live in the larger of {a} and {b}?"),
  ("town", "population", "min", "How many people live in the smaller of {a} and {b}?"),
  ("person", "born", "min", "When was the older of {a} and {b} born?"),
  ("person", "born", "max", "When was the younger of {a} and {b} born?"),
  ("film", "released", "min", "When did the older of {a} and {b} come out?"),
  ("film", "released", "max", "When did the newer of {a} and {b} come out?"),
)
# (kind, relation, operation, question); differences are positive: {a} has the smaller
# number and {b} the larger.
_ARITHMETIC = (
  ("town", "founded", "-", "How many years after {a} was founded was {b} founded?"),
  ("town", "founded", "-", "How many years older is the town {a} than {b}?"),
  ("company", "founded", "-", "How many years after {a} was {b} founded?"),
  ("town", "population", "+", "What is the total population of {a} and {b}?"),
  ("town", "population", "+", "How many people live in {a} and {b} together?"),
  ("town", "population", "-", "How many more people live in {b} than in {a}?"),
  ("person", "born", "-", "How many years older is {a} than {b}?"),
  ("film", "released", "-", "How many years after {a} did {b} come out?"),
)
# Reverse Polish programs over a, b, c, d.
_COMPUTATION = (
  ("a b * c -", "A shop has {a} {box} of {b} {thing} and sells {c} {thing}."),
  ("a b * c +", "A farm packs {a} {box} of {b} {thing} and {c} loose {thing}."),
  ("b c + a *", "Each of {a} {box} holds {b} old {thing} and {c} new {thing}."),
  ("a b * c d * +", "{a} {box} hold {b} {thing} each and {c} hold {d} {thing} each."),
  ("a b * c d * -", "A shop buys {a} {box} of {b} {thing} and sells {c} of {d}."),
)
_ASK = ("How many {thing} is that?", "How many {thing} are there now?")
_BOXES = ["boxes", "bags", "crates", "trays", "sacks", "carts", "rooms", "shelves"]
_THINGS = [
  "apples",
  "eggs",
  "nuts",
  "pens",
  "books",
  "cups",
  "lamps",
  "coins",
  "seeds",
  "plates",
  "keys",
  "bricks",
]

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
  "+": operator.add,
  "-": operator.sub,
  "*": operator.mul,
  "min": min,
  "max": max,
}
_HOPS = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "four_hop": 4}
FAMILIES = (*_HOPS, "comparison", "arithmetic", "computation", "age")
HELD_OUT = ("four_hop", "age")  # never in training


def evaluate(
  program: Sequence[Mapping[str, Any]],
  facts: Mapping[str, Mapping[str, str]],
  known: Mapping[int, str] | None = None,
) -> list[str]:
  """Returns each step's value; the last value is the answer.

  A step is one of
    {"op": "lookup", "entity": NAME or "$k", "relation": R}
    {"op": "compute", "name": one of _OPERATIONS, "args": [number or "$k", ...]}
    {"op": "compare", "name": "min" or "max", "args": ["$i", "$j"], "of": [A, B]}
  where "$k" is the value from step k; a comparison gives the picked number's entity.
  Values in `known` (step -> value) override computed values.

  Raises:
    KeyError: the facts lack an entity or relation.
  """
  values: list[str] = []
  for i, step in enumerate(program):
    # A wrong known value also changes the later steps, as a real slip does.
    if known and i in known:
      values.append(known[i])
      continue
    # Facts.
    if step["op"] == "lookup":
      values.append(facts[resolve(step["entity"], values)][step["relation"]])
      continue
    # Numbers: literals or earlier results.
    left, right = step["args"]
    numbers = [int(resolve(left, values)), int(resolve(right, values))]
    result = _OPERATIONS[step["name"]](*numbers)
    if step["op"] == "compute":
      values.append(str(result))
    elif numbers[0] != numbers[1] and numbers[0] == result:
      values.append(step["of"][0])
    else:  # equal numbers give the second; no question has them
      values.append(step["of"][1])
  return values


def resolve(argument: str, values: Sequence[str]) -> str:
  """Returns a step's argument: step k's value for "$k", else the argument itself."""
  if argument.startswith("$"):
    return values[int(argument[1:])]
  return argument


def _lookup(entity: str, relation: str) -> dict[str, Any]:
  return {"op": "lookup", "entity": entity, "relation": relation}


def _chain(world: World, hops: int, rng: random.Random) -> tuple[str, list[dict]]:
  """Makes a question over `hops` relations, with all entities different."""
  while True:
    kind = rng.choice(tuple(LINKS))
    entity = rng.choice(world.names(kind))
    phrase = entity  # grows around the first name: "the mayor of X"
    argument = entity  # the first step looks up a name, a later step the last result
    program = []
    seen = {entity}
    for hop in range(hops):
      facts = world.facts[entity]
      # Earlier hops follow links; the last hop asks for any fact, in its own words.
      if hop < hops - 1:
        relations = list(LINKS[facts["kind"]])
        forms = _PHRASES
      else:
        relations = [r for r in facts if r != "kind"]
        forms = _QUESTIONS
      relation = rng.choice(relations)
      program.append(_lookup(argument, relation))
      argument = f"${hop}"
      phrase = rng.choice(forms[relation]).format(phrase)
      entity = facts[relation]
      if entity in seen:
        break  # the chain has come back: try another chain
      seen.add(entity)
    else:
      return phrase, program


def _pair(
  world: World, kind: str, relation: str, rng: random.Random
) -> tuple[str, str, list[dict]]:
  """Picks two entities with different numbers (smaller first), and their look-ups."""
  while True:
    pair = rng.sample(world.names(kind), 2)
    smaller, larger = sorted(pair, key=lambda name: int(world.facts[name][relation]))
    if int(world.facts[smaller][relation]) < int(world.facts[larger][relation]):
      return smaller, larger, [_lookup(smaller, relation), _lookup(larger, relation)]


def _comparison(world: World, rng: random.Random) -> tuple[str, list[dict]]:
  """Makes a comparison: half the questions ask for the entity, half for its number."""
  by_name = rng.random() < 0.5
  questions = _EXTREMES
  if by_name:
    questions = _COMPARISONS
  kind, relation, pick, question = rng.choice(questions)
  smaller, larger, program = _pair(world, kind, relation, rng)
  pair = [smaller, larger]
  if rng.random() < 0.5:  # the order must not reveal the answer
    pair.reverse()
    program.reverse()
  step = {"op": "compute", "name": pick, "args": ["$0", "$1"]}
  if by_name:
    step = {**step, "op": "compare", "of": pair}
  program.append(step)
  return question.format(a=pair[0], b=pair[1]), program


def _arithmetic(world: World, rng: random.Random) -> tuple[str, list[dict]]:
  """Asks for a sum, or for a positive difference: larger number minus smaller."""
  kind, relation, name, question = rng.choice(_ARITHMETIC)
  smaller, larger, program = _pair(world, kind, relation, rng)
  # Look up in the question's order, which decides the larger number's place.
  larger_first = question.find("{b}") < question.find("{a}")
  if larger_first:
    program.reverse()
  args = ["$0", "$1"]
  if larger_first == (name == "+"):
    args = ["$1", "$0"]
  program.append({"op": "compute", "name": name, "args": args})
  return question.format(a=smaller, b=larger), program


def _computation(rng: random.Random) -> tuple[str, list[dict]]:
  """Makes a story about boxes and things, and converts its Polish notation."""
  # Always draw four numbers, so that all stories consume the same random numbers.
  polish, story = rng.choice(_COMPUTATION)
  numbers = {name: str(rng.randint(12, 99)) for name in "abcd"}
  if polish.endswith("-"):  # the shop must buy more than it sells
    numbers.update(a=str(rng.randint(50, 99)), b=str(rng.randint(50, 99)))
    numbers.update(c=str(rng.randint(12, 49)), d=str(rng.randint(12, 49)))
  # The stack has numbers, or "$k" for step k's result.
  program: list[dict] = []
  stack: list[str] = []
  for token in polish.split():
    if token in numbers:
      stack.append(numbers[token])
      continue
    right = stack.pop()
    left = stack.pop()
    stack.append(f"${len(program)}")  # the next step
    program.append({"op": "compute", "name": token, "args": [left, right]})
  words = dict(box=rng.choice(_BOXES), thing=rng.choice(_THINGS))
  return f"{story} {rng.choice(_ASK)}".format(**numbers, **words), program


def _age(world: World, rng: random.Random) -> tuple[str, list[dict]]:
  kind, role, year, question = rng.choice(
    (
      ("film", "director", "released", "the director of {0} when {0} was released"),
      ("company", "founder", "founded", "the founder of {0} when {0} was founded"),
    )
  )
  # `make_facts` lets nobody direct or found before 21, so the age is positive.
  name = rng.choice(world.names(kind))
  program = [_lookup(name, year), _lookup(name, role), _lookup("$1", "born")]
  program.append({"op": "compute", "name": "-", "args": ["$0", "$2"]})
  return f"How old was {question.format(name)}?", program


def ask(world: World, family: str, rng: random.Random) -> tuple[str, list[dict]]:
  """Makes a question from a family over a world, and its program."""
  if family in _HOPS:
    return _chain(world, _HOPS[family], rng)
  if family == "computation":
    return _computation(rng)
  makers = {"comparison": _comparison, "arithmetic": _arithmetic, "age": _age}
  return makers[family](world, rng)

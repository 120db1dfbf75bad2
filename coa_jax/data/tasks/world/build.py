"""An offline seeded world of one-line encyclopaedia pages, and questions over it.

Towns, people, films and companies refer to one another, so a question is a chain of
look-ups, an operation on looked-up numbers, or pure arithmetic. Every name is a word
pair unique to one world: names in held-out worlds are unseen, but made from words in
training worlds, so a model must read an answer and cannot remember it.

Each task has `meta["program"]`, the steps to its answer (see `evaluate`),
`meta["values"]`, each step's value, and `meta["namesakes"]`, similar names from its own
split. The scripted teacher follows the steps and makes mistakes with the namesakes; a
test recomputes every answer from the pages alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.data.tasks.world.pages import (
  NAME_WORDS,
  World,
  filler,
  make_facts,
  page_text,
)
from coa_jax.data.tasks.world.questions import FAMILIES, ask, evaluate
from coa_jax.protocol.trajectory import write_jsonl

Mix = tuple[tuple[str, float], ...]
# The training mix. Hard families are more frequent than in evaluation: a small
# model miscopies two-digit operands until it has seen thousands.
TRAIN_MIX: Mix = (
  ("one_hop", 0.10),
  ("two_hop", 0.20),
  ("three_hop", 0.20),
  ("comparison", 0.14),
  ("arithmetic", 0.18),
  ("computation", 0.18),
)


@dataclasses.dataclass(frozen=True)
class WorldConfig:
  """World sizes, the number of worlds per split, and the question mix.

  Attributes:
    towns: town pages in a world; likewise people, films and companies.
    train_worlds: worlds numbered 0.. in split "train"; likewise dev and test.
    mix: (family, weight) pairs. A comparison by name can be guessed, so it weighs
      little.
    filler: words without facts at each page's end, for longer observations.
  """

  towns: int = 300
  people: int = 500
  films: int = 100
  companies: int = 100
  train_worlds: int = 28
  dev_worlds: int = 4
  test_worlds: int = 4
  mix: Mix = (
    ("one_hop", 0.18),
    ("two_hop", 0.30),
    ("three_hop", 0.20),
    ("comparison", 0.06),
    ("arithmetic", 0.20),
    ("computation", 0.06),
  )
  filler: int = 0

  def __post_init__(self):
    for kind, size in self.sizes.items():
      room = math.prod(map(len, NAME_WORDS[kind]))  # first words times second words
      needed = size * sum(self.splits.values())
      if size < 2 or needed > room:
        raise ValueError(
          f"{size} names of kind {kind!r} in each world make {needed}; a world needs "
          f"at least 2, and there are {room} for all worlds together"
        )
    for family, weight in self.mix:
      if family not in FAMILIES or weight < 0:
        raise ValueError(
          f"mix holds {family!r}: {weight}; families are {', '.join(FAMILIES)}"
        )

  @property
  def sizes(self) -> dict[str, int]:
    """Kind -> number of pages in a world."""
    counts = (self.towns, self.people, self.films, self.companies)
    return dict(zip(NAME_WORDS, counts, strict=True))

  @property
  def splits(self) -> dict[str, int]:
    """Split -> number of worlds."""
    return dict(train=self.train_worlds, dev=self.dev_worlds, test=self.test_worlds)


def make_world(
  seed: int, config: WorldConfig, split: str = "train", number: int = 0
) -> World:
  """Makes world `number` in a split.

  The seed decides the facts. Names depend only on split and number, so two splits
  never share a name, whatever the seeds.

  Raises:
    ValueError: the split is unknown, or the world's number is too large.
  """
  splits = config.splits
  if split not in splits or not 0 <= number < splits[split]:
    raise ValueError(f"no world {number} in split {split!r}; worlds: {splits}")
  # --- Names: all splits' worlds are numbered in one sequence, and each world takes its
  # part from one shuffled list. The caller's seed does not move the parts.
  before = list(splits).index(split)
  slot = sum(list(splits.values())[:before]) + number
  deck = {}
  for kind, size in config.sizes.items():
    names = [" ".join(words) for words in itertools.product(*NAME_WORDS[kind])]
    random.Random(f"coa-jax names of {kind}").shuffle(names)
    deck[kind] = names[slot * size : (slot + 1) * size]
  # --- Facts and a page for each name.
  name = f"{split}-{number:02d}"
  facts = make_facts(deck, random.Random(f"{seed}/{name}"))
  pages = []
  for i, (title, row) in enumerate(facts.items()):
    text = page_text(title, row)
    if config.filler:
      text += f" {filler(config.filler, random.Random(f'{seed}/{title}'))}"
    pages.append({"id": f"{name}-{i:04d}", "title": title, "text": text})
  return World(name, facts, tuple(pages))


def world_tasks(
  worlds: Sequence[World], n: int, mix: Mix, seed: int, name: str = "task"
) -> list[Task]:
  """Makes `n` tasks with different questions; each family has exactly its share.

  Ids are NAME-00000 and so on. Namesakes come from these worlds, all in one split.

  Raises:
    ValueError: the worlds are too small for n different questions.
  """
  rng = random.Random(f"{seed}/tasks of {','.join(w.name for w in worlds)}")
  # --- Each task's family. Rounding cumulative counts, not each weight, gives n in
  # total.
  total = sum(weight for _, weight in mix)
  families: list[str] = []
  reached = 0.0
  for family, weight in mix:
    reached += weight
    families += [family] * (round(n * reached / total) - len(families))
  rng.shuffle(families)
  # --- A question for each task; drawn again if asked before.
  names = _names_by_word(worlds)
  tasks: list[Task] = []
  seen: set[str] = set()
  for number, family in enumerate(families):
    for _ in range(200):  # after that, no question may be left
      world = rng.choice(worlds)
      question, program = ask(world, family, rng)
      if question not in seen:
        break
    else:
      raise ValueError(f"no {family} question left after {number}; ask for fewer")
    seen.add(question)
    # --- The answer, and the scripted teacher's data.
    values = evaluate(program, world.facts)
    namesakes = {}
    for entity in _entities(program, values, world):
      # One generator per entity: an entity has the same namesakes in every task.
      kind = world.facts[entity]["kind"]
      entity_rng = random.Random(f"{seed}/{entity}")
      namesakes[entity] = _namesakes(entity, kind, names, entity_rng)
    meta = {
      "program": program,
      "values": values,
      "world": world.name,
      "namesakes": namesakes,
    }
    tasks.append(
      Task(
        id=f"{name}-{number:05d}",
        question=question,
        answers=(values[-1],),
        source="world",
        family=family,
        meta=meta,
      )
    )
  return tasks


# A kind, a place in the name (0 or 1), and the word at this place.
_NamePart = tuple[str, int, str]


def _names_by_word(worlds: Sequence[World]) -> dict[_NamePart, list[str]]:
  """Groups names by shared word: (kind, place, word) -> names, in page order."""
  names: dict[_NamePart, list[str]] = {}
  for world in worlds:
    for name, facts in world.facts.items():
      for place, word in enumerate(name.split(" ")):
        names.setdefault((facts["kind"], place, word), []).append(name)
  return names


def _entities(
  program: Sequence[Mapping[str, Any]], values: Sequence[str], world: World
) -> list[str]:
  """Lists a task's entity names, including the answer, each once."""
  # A dict keeps the order: with a set, the file would differ between runs. "$k" and
  # numbers have no facts.
  mentioned = [step["entity"] for step in program if step["op"] == "lookup"]
  return [name for name in dict.fromkeys((*mentioned, *values)) if name in world.facts]


def _namesakes(
  entity: str, kind: str, names: Mapping[_NamePart, list[str]], rng: random.Random
) -> list[str]:
  """Draws same-kind names: one with the same second word, one with the same first."""
  words = entity.split(" ")
  groups = [names[kind, place, words[place]] for place in (1, 0)]
  others = [[name for name in group if name != entity] for group in groups]
  return [rng.choice(some) for some in others if some]


def write_world(
  directory: str | os.PathLike[str],
  split: str,
  n: int,
  config: WorldConfig,
  seed: int = 0,
  task_seed: int = 0,
  name: str = "",
) -> dict[str, str]:
  """Writes a split's pages and `n` tasks as JSON lines.

  Args:
    directory: the output folder.
    split: "train", "dev" or "test".
    n: the number of tasks.
    config: sizes and mix.
    seed: the seed for the facts, and so for the pages.
    task_seed: the seed for the questions.
    name: the task file's name, so that several files can share the pages; by default
      the split.

  Returns:
    Paths: "corpus" (DIR/SPLIT_pages.jsonl) and "tasks" (DIR/NAME_tasks.jsonl).

  Raises:
    ValueError: `n` exceeds the number of questions.
  """
  name = name or split
  worlds = [make_world(seed, config, split, i) for i in range(config.splits[split])]
  tasks = world_tasks(worlds, n, config.mix, task_seed, name)
  paths = {
    "corpus": os.path.join(os.fspath(directory), f"{split}_pages.jsonl"),
    "tasks": os.path.join(os.fspath(directory), f"{name}_tasks.jsonl"),
  }
  pages = itertools.chain.from_iterable(world.pages for world in worlds)
  write_jsonl(paths["corpus"], pages)
  write_jsonl(paths["tasks"], map(Task.to_json, tasks))
  return paths

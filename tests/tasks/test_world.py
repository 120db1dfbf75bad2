"""The seeded world: invariants for every world and every question."""

from __future__ import annotations

import collections
import dataclasses
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.world.build import (
  WorldConfig,
  make_world,
  world_tasks,
  write_world,
)
from coa_jax.data.tasks.world.pages import read_pages
from coa_jax.data.tasks.world.questions import FAMILIES, HELD_OUT, evaluate
from coa_jax.runtime.lock import InUseError, hold
from experiments.make_world import make_world as make_world_files
from tools_sandbox.search.index import read_corpus

SMALL = WorldConfig(
  towns=40, people=60, films=20, companies=20, train_worlds=3, dev_worlds=1
)
ONE = make_world(0, SMALL, "train", 0)
EVERY = tuple((family, 1.0) for family in FAMILIES)


def worlds(config: WorldConfig, split: str, seed: int = 0):
  return [make_world(seed, config, split, i) for i in range(config.splits[split])]


def test_the_same_seed_gives_the_same_world_and_questions():
  first = worlds(SMALL, "train")
  second = worlds(SMALL, "train")
  assert first == second
  state = random.getstate()
  tasks = world_tasks(first, 80, SMALL.mix, seed=3)
  assert tasks == world_tasks(second, 80, SMALL.mix, seed=3)
  assert tasks != world_tasks(first, 80, SMALL.mix, seed=4)
  assert first[0].pages != make_world(1, SMALL, "train", 0).pages
  assert random.getstate() == state  # the global generator is unchanged


def test_no_id_is_in_two_sets_of_tasks(tmp_path):
  make_world_files(str(tmp_path), seed=0, train=40, rl=40, held_out=40)
  files = sorted(tmp_path.glob("*_tasks.jsonl"))
  ids = [task.id for file in files for task in load_tasks(str(file))]
  assert len(files) == 5 and len(set(ids)) == len(ids) == 200


def test_two_do_not_write_into_one_folder(tmp_path):
  with hold(str(tmp_path)), pytest.raises(InUseError, match="works there"):
    make_world_files(str(tmp_path), seed=0, train=1, rl=1, held_out=1)
  assert not list(tmp_path.glob("*.jsonl"))


def test_no_name_is_in_two_worlds_whatever_the_seeds_but_every_held_out_word_is():
  config = WorldConfig()
  seen: dict[str, str] = {}
  words = collections.defaultdict(set)
  for seed, (split, count) in enumerate(config.splits.items()):
    for number in range(count):
      world = make_world(seed, config, split, number)
      assert len(world.pages) == sum(config.sizes.values())
      for name in world.facts:
        assert name not in seen, f"{name} is in {seen.get(name)} and {world.name}"
        seen[name] = world.name
        words[split].update(name.split())
  assert words["dev"] | words["test"] <= words["train"]


def test_the_vocabulary_of_pages_and_questions_fits_a_small_tokenizer():
  config = WorldConfig()
  some = [make_world(0, config, "train", i) for i in range(3)]
  text = [p["text"] for w in some for p in w.pages]
  text += [t.question for t in world_tasks(some, 1000, EVERY, seed=0)]
  assert len(set(re.findall(r"[A-Za-z]+", "\n".join(text)))) < 620
  assert max(len(n) for n in re.findall(r"\d+", "\n".join(text))) <= 4
  assert max(len(re.findall(r"\w+|[^\w\s]", t)) for t in text) <= 28


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_every_answer_follows_from_the_pages_alone(split):
  some = worlds(SMALL, split)
  facts = {}
  for world in some:
    for page in world.pages:
      assert page["text"].startswith(page["title"])
      facts.update(read_pages(page["text"]))
  tasks = world_tasks(some, 300, EVERY, seed=1)
  for task in tasks:
    values = evaluate(task.meta["program"], facts)
    assert values == task.meta["values"]
    (answer,) = task.answers
    assert answer == values[-1]
    # Answers are short, and numbers positive.
    assert re.fullmatch(r"[A-Z][a-z]+ [A-Z][a-z]+|[A-Za-z]+|[1-9]\d{0,4}", answer)
  assert {t.family for t in tasks} == set(FAMILIES)


def test_no_question_twice_and_families_in_their_shares():
  tasks = world_tasks(worlds(SMALL, "train"), 500, SMALL.mix, seed=0)
  assert len({t.question for t in tasks}) == len({t.id for t in tasks}) == 500
  counts = collections.Counter(t.family for t in tasks)
  assert counts == {family: round(500 * weight) for family, weight in SMALL.mix}
  assert not set(counts) & set(HELD_OUT)


def test_chains_never_come_back_to_an_entity():
  mix = (("three_hop", 1.0), ("four_hop", 1.0))
  for task in world_tasks(worlds(SMALL, "train"), 300, mix, seed=0):
    chain = [task.meta["program"][0]["entity"], *task.meta["values"]]
    assert len(set(chain)) == len(chain)


def test_a_comparison_cannot_be_answered_by_position():
  tasks = world_tasks(worlds(SMALL, "train"), 400, (("comparison", 1.0),), seed=0)
  last = [(t.answers[0], t.meta["program"][-1], t.meta["values"]) for t in tasks]
  by_name = [answer == step["of"][0] for answer, step, _ in last if "of" in step]
  by_number = [answer == v[0] for answer, step, v in last if "of" not in step]
  for first in (by_name, by_number):
    assert 150 < len(first) < 250
    assert 0.35 < sum(first) / len(first) < 0.65


def test_programs_by_hand():
  facts = {"A": {"born": "1900"}, "B": {"born": "1875", "director": "A"}}
  program = [
    {"op": "lookup", "entity": "B", "relation": "director"},
    {"op": "lookup", "entity": "$0", "relation": "born"},
    {"op": "lookup", "entity": "B", "relation": "born"},
    {"op": "compute", "name": "-", "args": ["$1", "$2"]},
    {"op": "compute", "name": "*", "args": ["$3", "4"]},
    {"op": "compare", "name": "max", "args": ["$1", "$2"], "of": ["A", "B"]},
  ]
  assert evaluate(program, facts) == ["A", "1900", "1875", "25", "100", "A"]
  assert evaluate(program, facts, known={1: "1880"})[3] == "5"
  with pytest.raises(KeyError):
    evaluate(program, {"A": {}})


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80), st.text(max_size=80), st.integers(0, 139))
def test_pages_are_read_out_of_any_text(before, after, which):
  page = ONE.pages[which]
  read = read_pages(f"{before}\n{page['text']}\n{after}")
  assert read[page["title"]] == ONE.facts[page["title"]]
  assert read_pages("Tarn Hollow is a village. Mayor Ivo Strand.") == {}


def test_written_files_are_read_by_the_loaders_of_users_files(tmp_path):
  paths = write_world(tmp_path, "dev", 50, SMALL, seed=5, task_seed=1, name="some")
  world = make_world(5, SMALL, "dev", 0)
  tasks = world_tasks([world], 50, SMALL.mix, seed=1, name="some")
  assert load_tasks(paths["tasks"]) == tasks
  assert paths["tasks"].endswith("some_tasks.jsonl")
  pages = [dataclasses.asdict(d) for d in read_corpus(paths["corpus"])]
  assert tuple(pages) == world.pages


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: make_world(0, SMALL, "dev", 9), "no world 9 in split 'dev'"),
    (lambda: make_world(0, SMALL, "tset", 0), "no world 0 in split 'tset'"),
    (lambda: WorldConfig(mix=(("two_hops", 1.0),)), r"mix holds 'two_hops'"),
    (lambda: WorldConfig(films=1000), "3600 for all worlds"),
    (lambda: world_tasks([ONE], 5000, (("one_hop", 1.0),), 0), "no one_hop question"),
  ],
)
def test_refusals_say_what_is_wrong(make, message):
  with pytest.raises(ValueError, match=message):
    make()

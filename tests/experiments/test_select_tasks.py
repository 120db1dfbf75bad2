"""Difficulty selection end to end: a toy policy plays, is interrupted, and resumes."""

from __future__ import annotations

import json

import ml_collections
import pytest
import toy
from programs import small_evaluation

from coa_jax.cli import select_tasks
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.protocol.storage import write_lines
from coa_jax.protocol.trajectory import (
  Status,
  Trajectory,
  read_trajectories,
  write_jsonl,
)
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.runtime.config import ConfigError

SAMPLES = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  config = small_evaluation(tmp_path_factory.mktemp("select"))
  config.eval = dict(greedy=False, samples=SAMPLES, temperature=1.0)
  config.select = dict(all_wrong=True, all_right=True)
  return config


def read(path) -> dict:
  return json.loads(path.read_text())


@pytest.mark.slow
def test_an_interrupted_estimate_goes_on_and_comes_out_the_same(config, tmp_path):
  config = config.copy_and_resolve_references()
  config.lock()  # like a config from the command line
  whole = select_tasks.run(config, str(tmp_path / "whole"))
  play = RolloutWorker.generate

  def stops(self, *args, **kwargs):
    for number, item in enumerate(play(self, *args, **kwargs)):
      if number == 5:
        raise KeyboardInterrupt
      stops.played.append((item[0], item[1].sample))
      yield item

  stops.played = []
  cut = tmp_path / "cut"
  with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(RolloutWorker, "generate", stops)
    select_tasks.run(config, str(cut))
  with open(cut / "sampled.part.jsonl", "ab") as f:
    f.write(b'[0, {"task_')  # a line cut off by a kill
  before = stops.played

  def counts(self, *args, skip=(), **kwargs):
    assert set(before) == skip
    for item in play(self, *args, skip=skip, **kwargs):
      assert (item[0], item[1].sample) not in before
      yield item

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(RolloutWorker, "generate", counts)
    select_tasks.run(config, str(cut))
  assert len(before) == 5
  assert read(cut / "selection.json") == read(tmp_path / "whole" / "selection.json")
  assert not (cut / "sampled.part.jsonl").exists()
  results = [read(w / "results.json") for w in (tmp_path / "whole", cut)]
  seconds = [result["usage"].pop("seconds") for result in results]
  assert results[0] == results[1] and results[0]["usage"]["generated"] > 0
  first, second = (
    read_trajectories(tmp_path / w / "sampled.jsonl") for w in ("whole", "cut")
  )
  for played, expected in zip((first, second), seconds, strict=True):
    assert sum(t.usage.seconds for t in played) == pytest.approx(expected)
  for t in (*first, *second):
    t.usage.seconds = 0.0
    for call in t.calls:
      call.seconds = 0.0
  assert first == second and len(first) == len(toy.TASKS) * SAMPLES
  assert whole["in"] == whole["out"] == len(toy.TASKS)
  assert whole["attempts"] == len(first) and whole["tokens"] > 0
  kept = load_tasks(tmp_path / "whole" / "tasks.jsonl")
  for task in kept:
    mine = [t for t in first if t.task_id == task.id]
    rate = sum(t.reward_parts["answer"] >= 1 for t in mine) / SAMPLES
    assert task.meta == {"pass_rate": rate, "attempts": SAMPLES}


def attempt(task: str, right: int, status=Status.ENDED) -> Trajectory:
  return Trajectory(task, status=status, reward_parts={"answer": float(right)})


def test_attempts_made_before_are_enough(config, tmp_path):
  easy, hard, some, odd = (t.id for t in toy.TASKS)
  rows = [attempt(easy, 1)] * 4 + [attempt(hard, 0)] * 4 + [attempt(some, 1)]
  rows += [attempt(some, 0)] * 3
  rows += [attempt(odd, 0, Status.INFRASTRUCTURE), attempt(odd, 1), attempt(odd, 0)]
  write_jsonl(tmp_path / "teacher.jsonl", rows)
  config = config.copy_and_resolve_references()
  for name in ("init", "rollout", "tools", "eval"):
    del config[name]
  config.select = dict(played=(str(tmp_path / "teacher.jsonl"),))
  results = select_tasks.run(config, str(tmp_path / "out"))
  assert (results["all_right"], results["all_wrong"], results["ungraded"]) == (1, 1, 1)
  kept = load_tasks(tmp_path / "out" / "tasks.jsonl")
  assert [(t.id, t.meta["pass_rate"]) for t in kept] == [(some, 0.25), (odd, 0.5)]
  assert read(tmp_path / "out" / "selection.json")["rates"] == {
    "0/4": 1,
    "1/2": 1,
    "1/4": 1,
    "4/4": 1,
  }
  used = tmp_path / "sft.jsonl"
  write_jsonl(used, [attempt(some, 1)])
  config.select.without = (str(used),)
  select_tasks.run(config, str(tmp_path / "out"))
  assert [t.id for t in load_tasks(tmp_path / "out" / "tasks.jsonl")] == [odd]
  # An equal id with another question is another task; without one, the id decides.
  for question, left in (("another?", [some, odd]), (None, [odd])):
    used.write_text(json.dumps({"id": some, "question": question}) + "\n")
    select_tasks.run(config, str(tmp_path / "out"))
    kept = load_tasks(tmp_path / "out" / "tasks.jsonl")
    assert [t.id for t in kept] == left
  used = tmp_path / "sft.parquet"
  write_lines(str(used), iter([attempt(some, 1).to_json()]))
  config.select.without = (str(used),)
  select_tasks.run(config, str(tmp_path / "out"))
  assert [t.id for t in load_tasks(tmp_path / "out" / "tasks.jsonl")] == [odd]
  config.select.at_least = 0.9
  with pytest.raises(ValueError, match=r"no task is left of 4: [^{]*\d \w+ \(see sel"):
    select_tasks.run(config, str(tmp_path / "out"))


def test_pass_rates_need_samples(config, tmp_path):
  config = config.copy_and_resolve_references()
  config.eval = dict(greedy=True, samples=0)
  with pytest.raises(ConfigError, match=r"eval\.samples must be at least 1"):
    select_tasks.run(config, str(tmp_path))

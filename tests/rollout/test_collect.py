"""Batches for RL steps: bounded token age, and every group taken exactly once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import random
import threading
import types
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import CFG, keep_all, threads, versions
from scripted_vllm import ScriptedVllm, vllm_worker
from toy import eventually

from coa_jax.data.tasks.sampling import TaskSampler, make_task_sampler
from coa_jax.learner.advantages import has_reward_variance
from coa_jax.learner.update import rewards_of
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.collect import RolloutCollector, ages, steps_until
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig, SamplingConfig
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tools.journal import ToolJournal

SEED = 3
CONFIG = RolloutConfig(style="brief", slots=6, window=8, max_len=toy.MAX_LEN)
STEPS = 5
SAMPLING = SamplingConfig(
  prompts=2,
  samples=2,
  rounds=2,
  filter_groups=True,
  staleness=1,
)


@pytest.fixture(scope="module")
def own() -> RolloutWorker:
  """A worker on our own sampler."""
  return make_worker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS)


@pytest.fixture(scope="module", params=["own", "vllm"])
def worker(request, own, tmp_path_factory) -> Iterator[RolloutWorker]:
  """A worker on each engine; requests to the scripted vLLM have six tokens."""
  if request.param == "own":
    yield own
    return
  with ScriptedVllm(toy.tokenizer()) as server:
    folder = tmp_path_factory.mktemp("vllm")
    yield vllm_worker(server, folder, 6, CFG, slots=6)


def is_idle() -> bool:
  return not threads() and not threads("vllm engine")


def louder(params: dict, by: float) -> dict:
  """A policy with scaled logits, and bit-identical keys and values."""
  return {**params, "final_norm": jax.tree.map(lambda x: x * by, params["final_norm"])}


def make(worker: RolloutWorker, toolbox, keep=keep_all, **changes) -> RolloutCollector:
  """Makes a collector for toy tasks; `changes` override its options or SAMPLING."""
  options = {"steps": STEPS}
  for name in ("step", "steps", "cursor"):
    if name in changes:
      options[name] = changes.pop(name)
  tasks = make_task_sampler(changes.get("task_sampler", "uniform"), toy.TASKS, SEED, 1)
  config = dataclasses.replace(SAMPLING, **changes)
  return RolloutCollector(worker, tasks, toolbox, config, keep, seed=SEED, **options)


def keep_some(groups: list) -> np.ndarray:
  """Keeps about half the groups: a step takes two to four."""
  return np.array([len(group[0].text) % 2 == 0 for group in groups], bool)


def rewards_differ(groups: list) -> np.ndarray:
  return has_reward_variance(rewards_of(groups))


def keep_none(groups: list) -> np.ndarray:
  return np.zeros(len(groups), bool)


def names(groups: list[list[Trajectory]]) -> list[str]:
  for group in groups:
    assert [t.sample for t in group] == list(range(len(group)))
    assert len({t.task_id for t in group}) == 1
  return [group[0].task_id for group in groups]


def expected(n: int) -> list[str]:
  task_sampler = TaskSampler(toy.TASKS, SEED)
  return [task_sampler.task(i, 0).id for i in range(n)]


@settings(max_examples=200, deadline=None)
@given(
  prompts=st.integers(1, 4),
  size=st.integers(1, 9),
  rounds=st.integers(1, 3),
  seed=st.integers(0, 10**6),
)
def test_no_group_is_taken_later_than_was_said(prompts, size, rounds, seed):
  """Whatever is kept, a group's predicted step never grows, and is finally right."""
  config = SamplingConfig(prompts=prompts, round_prompts=size, rounds=rounds)
  most = rounds * size
  rng = random.Random(seed)
  latest = [10**9] * 30
  step = num_kept = num_taken = 0
  for n in range(30):
    for m in range(n, 30):
      at = step + steps_until(m - n, prompts - num_kept, most - num_taken, config)
      assert step <= at <= latest[m]
      latest[m] = at
    assert latest[n] == step
    num_taken += 1
    num_kept += rng.random() < 0.5
    if num_kept == prompts or num_taken == most:
      step, num_kept, num_taken = step + 1, 0, 0


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "slow"), [(1, "tools"), (2, "learner")])
def test_no_token_is_older_than_allowed_and_every_group_is_taken_once(
  worker, novice, staleness, slow
):
  rng = random.Random(5)
  latency = (lambda: rng.random() * 0.1) if slow == "tools" else (lambda: 0.0)
  tools = toy.TableToolbox(latency=latency)
  before = worker.engine.counters
  seen, oldest = [], 0
  with make(worker, tools, keep_some, staleness=staleness) as collector:
    for step in range(STEPS):
      batch = collector.next(novice, step)
      played = grouped(batch.played)
      groups = [g for g, good in zip(played, keep_some(played), strict=True) if good]
      assert batch.groups == groups and batch.num_groups == len(played)
      assert len(batch.groups) == 2 or batch.num_groups == 4
      seen += played
      oldest = max([oldest, *ages(played, step)])
      assert batch.figures["learner_waited"] >= batch.spent["rollout"] >= 0
      assert batch.figures["rollouts_waited"] >= 0
      if slow == "learner":  # until the staleness limit stops the rollouts
        eventually(is_idle)
  assert 1 <= oldest <= staleness
  assert names(seen) == expected(len(seen))
  # No wasted sampling: every token belongs to a taken trajectory.
  sampled = worker.engine.counters.since(before).sampled_tokens
  assert sampled == sum(t.usage.generated for g in seen for t in g)
  eventually(is_idle)


def grouped(played: list[Trajectory]) -> list[list[Trajectory]]:
  """Splits trajectories into groups of two, in order."""
  return [played[i : i + 2] for i in range(0, len(played), 2)]


def test_a_running_trajectory_goes_on_with_the_newer_policy(own, novice):
  """Each token carries its policy version and this policy's log-prob."""
  gate = threading.Event()
  called = threading.Event()

  def reply(name: str, body: str) -> str:
    called.set()
    gate.wait(60)
    return "5"

  policies = [novice, louder(novice, 1.7)]
  with make(own, toy.TableToolbox(reply), steps=2) as collector:
    collector.set_policy(policies[0], 0)
    assert called.wait(60)
    collector.set_policy(policies[1], 1)
    gate.set()
    played = collector.next(policies[1], 1).played
  dated = [versions(t) for t in played]
  assert all(v == sorted(v) and set(v) <= {0, 1} for v in dated)
  assert any(set(v) == {0, 1} for v in dated)
  logps = [toy.logps_of(CFG, params, played) for params in policies]
  for i, t in enumerate(played):
    sampled = toy.sampled_logps(t)
    assert len(sampled) == len(dated[i])
    for n, version in enumerate(dated[i]):
      assert sampled[n] == pytest.approx(logps[version][i][n], abs=2e-5)
  logp_diff = max(abs(a - b).max() for a, b in zip(*logps, strict=True))
  assert logp_diff > 0.1  # the two policies clearly differ


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_tokens_are_those_of_the_numbered_groups_whatever_the_tools_take(
  worker, novice, staleness
):
  """With one policy under all versions only seed and group number matter."""

  def run(latency) -> list:
    tools, how = toy.TableToolbox(latency=latency), dict(staleness=staleness)
    with make(worker, tools, keep_some, round_prompts=1, **how) as collector:
      batches = [collector.next(novice, step) for step in range(3)]
    return [played for batch in batches for played in tokens(batch)]

  first = run(lambda: 0.0)
  assert first == run(toy.shuffled_latency(1))
  # No task is skipped, however many rounds a step needs.
  assert [task for task, *_ in first[::2]] == expected(len(first) // 2)


def tokens(batch) -> list:
  return [(t.task_id, t.sample, toy.sampled_ids(t)) for t in batch.played]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_is_as_one_alone(worker, novice, staleness):
  """Rollouts running at the same time do not change it."""
  tools = toy.TableToolbox()
  alone = worker.generate_groups(novice, toy.TASKS, tools, 1, 0.0, 0, evaluation=True)
  slow = toy.TableToolbox(latency=toy.shuffled_latency(2))
  with make(worker, slow, staleness=staleness) as collector:
    collector.next(toy.params(layers=1), 0)
    played = collector.evaluate(novice, 1, toy.TASKS, tools)
    batch = collector.next(novice, 1)
  assert [t.task_id for t in played] == [t.id for t in toy.TASKS]
  for mine, (theirs,) in zip(played, alone, strict=True):
    assert toy.sampled_ids(mine) == toy.sampled_ids(theirs)
    assert toy.sampled_logps(mine) == toy.sampled_logps(theirs)
    assert mine.reward == theirs.reward
  assert names(grouped(batch.played)) == expected(4)[2:]


@pytest.mark.parametrize(
  ("task_sampler", "staleness"),
  [pytest.param("uniform", 0, marks=pytest.mark.slow), ("learnability", 2)],
)
def test_a_run_goes_on_from_a_cursor(worker, novice, task_sampler, staleness):
  """One policy under all versions, so the trajectories must be the same."""
  how = dict(task_sampler=task_sampler, staleness=staleness, filter_groups=False)
  with make(worker, toy.TableToolbox(), **how) as whole:
    batches = [whole.next(novice, step) for step in range(4)]
  assert all(len(b.groups) == 2 and b.num_groups == 2 for b in batches)
  cursor = json.loads(json.dumps(batches[1].cursor))
  assert cursor["group"] == 4 and bool(cursor["unfinished"]) == bool(staleness)
  with make(worker, toy.TableToolbox(), step=2, cursor=cursor, **how) as resumed:
    rest = [resumed.next(novice, step) for step in (2, 3)]
  assert [tokens(b) for b in rest] == [tokens(b) for b in batches[2:]]


@pytest.mark.parametrize("task_sampler", ["uniform", "learnability"])
def test_processes_play_the_tasks_of_one(monkeypatch, task_sampler):
  class Started:
    """A worker whose groups never end."""

    engine = types.SimpleNamespace(batch=contextlib.nullcontext)

    def __init__(self):
      self.groups: dict[int, str] = {}

    def episode(self, attempt, toolbox, key, within):
      self.groups[key[0]] = attempt.task.id

    def submit(self, episode, group):
      return concurrent.futures.Future()

  def started(process: int, processes: int) -> dict[int, str]:
    monkeypatch.setattr("jax.process_index", lambda: process)
    monkeypatch.setattr("jax.process_count", lambda: processes)
    worker = Started()
    collector = make(
      worker, None, prompts=5, samples=1, staleness=0, task_sampler=task_sampler
    )
    collector._version = 0
    collector._submit_allowed()
    return worker.groups

  assert {**started(0, 2), **started(1, 2)} == started(0, 1)
  assert started(0, 2).keys() == {0, 2, 4}


def test_a_task_that_is_gone_is_named(own):
  cursor = {"group": 4, "unfinished": ["nobody"], "draw": {}}
  with pytest.raises(ValueError, match="'nobody' was begun"):
    make(own, toy.TableToolbox(), cursor=cursor)


def test_a_resumed_run_asks_no_call_again_that_was_answered(own, novice, tmp_path):
  """Even if its groups restart under a newer version; here the policy is the same."""

  def playing(tools, **where) -> RolloutCollector:
    journal = ToolJournal(str(tmp_path / "calls"))
    kept = make_worker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS, journal=journal)
    return make(kept, tools, staleness=2, **where)

  whole, first, second = (toy.TableToolbox() for _ in range(3))
  with make(own, whole) as collector:
    expected = [collector.next(novice, step) for step in range(STEPS)]
  with playing(first) as collector:
    seen = [collector.next(novice, 0)]
    eventually(is_idle)
    seen.append(collector.next(novice, 1))
    eventually(is_idle)
  with playing(second, step=2, cursor=seen[1].cursor) as collector:
    seen += [collector.next(novice, step) for step in range(2, STEPS)]
  for mine, theirs in zip(seen, expected, strict=True):
    assert [t.text for t in mine.played] == [t.text for t in theirs.played]
  assert sorted(first.calls + second.calls) == sorted(whole.calls)
  assert len(seen[1].cursor["unfinished"]) >= 2 and second.calls


def test_groups_that_another_process_had_not_begun_are_drawn(worker, novice):
  other = next(t.id for t in toy.TASKS if t.id != expected(4)[3])
  cursor = {"group": 2, "unfinished": [None, other], "draw": {}}
  with make(worker, toy.TableToolbox(), step=1, cursor=cursor) as collector:
    batch = collector.next(novice, 1)
  assert names(grouped(batch.played)) == [expected(3)[2], other]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_failure_of_tools_or_graders_is_raised(
  worker, novice, monkeypatch, staleness
):
  class Broken(toy.TableToolbox):
    def start(self, request):
      raise OSError("no tools here")

  with (
    pytest.raises(OSError, match="no tools here"),
    make(worker, Broken(), staleness=staleness) as collector,
  ):
    collector.next(novice, 0)
  eventually(is_idle)

  def grade(*args):
    raise ValueError("no grade for that")

  monkeypatch.setattr(worker.grader, "grade", grade)
  with (
    pytest.raises(ValueError, match="no grade for that"),
    make(worker, toy.TableToolbox(), staleness=staleness) as collector,
  ):
    collector.next(novice, 0)
  eventually(is_idle)


def test_it_ends_though_tools_hang(worker, novice):
  gate, called = threading.Event(), threading.Event()

  def reply(name: str, body: str) -> str:
    called.set()
    gate.wait(60)
    return "5"

  try:
    with make(worker, toy.TableToolbox(reply)) as collector:
      collector.set_policy(novice, 0)
      assert called.wait(60)
    eventually(is_idle)
  finally:
    gate.set()
  # The engine is free again; a collector that never started closes too.
  with make(worker, toy.TableToolbox()):
    pass
  assert (
    len(worker.generate_groups(novice, toy.TASKS, toy.TableToolbox(), 1, 1.0, 0)) == 4
  )


@pytest.mark.parametrize(("staleness", "size"), [(0, 2), (0, 1), (0, 5), (1, 2)])
@pytest.mark.parametrize("keep", [rewards_differ, keep_none])
def test_dynamic_sampling_keeps_groups_that_differ_up_to_the_batch(
  own, novice, keep, staleness, size
):
  """A round may be larger or smaller than a batch; a step has two rounds at most."""
  how = dict(staleness=staleness, round_prompts=size)
  with make(own, toy.TableToolbox(), keep, **how) as collector:
    for step in range(4):
      batch = collector.next(novice, step)
      assert not batch.groups or keep(batch.groups).all()
      assert len(batch.groups) == min(2, batch.num_varied)
      assert len(batch.groups) == 2 or batch.num_groups == 2 * size
      assert len(batch.played) == 2 * batch.num_groups
      if staleness:
        assert batch.figures["staleness_max"] <= 1
      else:
        assert batch.num_groups in (size, 2 * size)

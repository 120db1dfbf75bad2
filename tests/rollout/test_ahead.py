"""Rollouts ahead of the learner: how old a token may be, and nothing lost or twice."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time

import jax
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.ahead import Ahead, Plan, ages
from coa_jax.rollout.player import Player
from coa_jax.rollout.types import RolloutConfig
from coa_jax.tasks.sampling import Draw
from coa_jax.tools.journal import ToolJournal

CFG = toy.MODEL
CONFIG = RolloutConfig(style="brief", slots=6, window=8, max_len=toy.MAX_LEN)
PLAN = Plan(steps=5, prompts=2, most=4, samples=2, temperature=1.0, staleness=1)


@pytest.fixture(scope="module")
def player() -> Player:
  return Player(CFG, toy.tokenizer(), CONFIG, toy.TOOLS)


@pytest.fixture(scope="module")
def novice() -> dict:
  return toy.actor(60).params


def louder(params: dict, by: float) -> dict:
  """A policy of other logits whose keys and values are the same, bit for bit."""
  return {**params, "final_norm": jax.tree.map(lambda x: x * by, params["final_norm"])}


def make(player: Player, toolbox, keep=lambda group: True, **changes) -> Ahead:
  """`Ahead` over the toy tasks; changes go to the plan, or are its cursor and step."""
  where = {k: changes.pop(k) for k in ("step", "cursor") if k in changes}
  plan = dataclasses.replace(PLAN, **changes)
  return Ahead(player, Draw(toy.TASKS, 0), toolbox, plan, 3, keep, **where)


def threads() -> list[threading.Thread]:
  return [t for t in threading.enumerate() if t.name == "ahead"]


def names(groups: list[list[Trajectory]]) -> list[str]:
  for group in groups:
    assert [t.sample for t in group] == list(range(len(group)))
    assert len({t.task_id for t in group}) == 1
  return [group[0].task_id for group in groups]


def expected(n: int) -> list[str]:
  draw = Draw(toy.TASKS, 0)
  return [draw.task(i, 0).id for i in range(n)]


@settings(max_examples=200, deadline=None)
@given(prompts=st.integers(1, 4), most=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_no_group_is_taken_later_than_was_said(prompts, most, seed):
  """Whatever is kept: what is said of a group never grows, and comes true."""
  plan = dataclasses.replace(PLAN, prompts=prompts, most=most)
  rng = random.Random(seed)
  said = [10**9] * 30
  step = kept = taken = 0
  for n in range(30):
    for m in range(n, 30):
      latest = step + plan.latest(m - n, kept, taken)
      assert step <= latest <= said[m]
      said[m] = latest
    assert said[n] == step
    taken += 1
    kept += rng.random() < 0.5
    if kept == prompts or taken == most:
      step, kept, taken = step + 1, 0, 0


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("slow", ["learner", "tools"])
def test_no_token_is_older_than_allowed_and_every_group_is_taken_once(
  player, novice, staleness, slow
):
  rng = random.Random(5)
  latency = (lambda: rng.random() * 0.1) if slow == "tools" else (lambda: 0.0)
  tools = toy.TableToolbox(latency=latency)
  seen, oldest, before = [], 0, player.engine.counters
  # Every second group is not kept: a step takes two to four of them.
  keep = lambda group: len(group[0].text) % 2 == 0  # noqa: E731
  with make(player, tools, keep, staleness=staleness) as ahead:
    for step in range(PLAN.steps):
      taken = ahead.next(novice, step)
      assert [g for g in taken.played if keep(g)] == taken.kept
      assert len(taken.kept) == 2 or len(taken.played) == 4
      seen += taken.played
      oldest = max([oldest, *ages(taken.played, step)])
      if slow == "learner":  # until the rollouts may not go on
        wait(lambda: not ahead._running and not ahead._may_begin())
    assert taken.learner_waited >= 0 and taken.rollouts_waited >= 0
  assert 1 <= oldest <= staleness
  assert names(seen) == expected(len(seen))
  # Nothing was played in vain: every token was of a trajectory that was taken.
  sampled = player.engine.counters.since(before).sampled_tokens
  assert sampled == sum(t.usage.generated for g in seen for t in g)
  assert not threads()


def wait(done) -> None:
  deadline = time.monotonic() + 60
  while not done():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_a_running_trajectory_goes_on_with_the_newer_policy(player, novice):
  """Its tokens carry the version that sampled them, and that one's log-probs."""
  gate = threading.Event()
  called = threading.Event()

  def reply(name: str, body: str) -> str:
    called.set()
    gate.wait(60)
    return "5"

  policies = [novice, louder(novice, 1.7)]
  with make(player, toy.TableToolbox(reply), steps=2) as ahead:
    ahead.hand_over(policies[0], 0)
    assert called.wait(60)
    ahead.hand_over(policies[1], 1)
    gate.set()
    taken = ahead.next(policies[1], 1)
  played = [t for group in taken.played for t in group]
  versions = [[v for s in t.segments for v in s.versions] for t in played]
  assert all(v == sorted(v) and set(v) <= {0, 1} for v in versions)
  assert any(set(v) == {0, 1} for v in versions)
  logps = [toy.logps_of(CFG, params, played) for params in policies]
  for i, t in enumerate(played):
    sampled = toy.sampled_logps(t)
    assert len(sampled) == len(versions[i])
    for n, version in enumerate(versions[i]):
      assert sampled[n] == pytest.approx(logps[version][i][n], abs=2e-5)
  gap = max(abs(a - b).max() for a, b in zip(*logps, strict=True))
  assert gap > 0.1  # so the policies can be told apart


def test_tokens_are_those_of_the_numbered_stream_whatever_the_tools_take(
  player, novice
):
  """With one policy under many versions: the seed and the number say everything."""

  def run(latency) -> list:
    with make(player, toy.TableToolbox(latency=latency)) as ahead:
      taken = [ahead.next(novice, step) for step in range(3)]
    played = [t for x in taken for g in x.played for t in g]
    return [(t.task_id, t.sample, toy.sampled_ids(t)) for t in played]

  first = run(lambda: 0.0)
  assert first == run(toy.shuffled_latency(1))
  assert len(first) == 12


def test_an_evaluation_among_rollouts_is_as_one_alone(player, novice):
  alone = player.groups(novice, toy.TASKS, toy.TableToolbox(), 1, 0.0, 0)
  other = toy.params()
  with make(player, toy.TableToolbox(latency=toy.shuffled_latency(2))) as ahead:
    ahead.next(other, 0)
    played = ahead.evaluate(novice, 1, toy.TASKS, toy.TableToolbox())
    taken = ahead.next(novice, 1)
  assert [t.task_id for t in played] == [t.id for t in toy.TASKS]
  for mine, (theirs,) in zip(played, alone, strict=True):
    assert toy.sampled_ids(mine) == toy.sampled_ids(theirs)
    assert toy.sampled_logps(mine) == toy.sampled_logps(theirs)
    assert mine.reward == theirs.reward
  assert names(taken.played) == expected(4)[2:]


def test_what_was_begun_is_played_again_by_a_resumed_run(player, novice):
  tools = toy.TableToolbox()
  with make(player, tools, staleness=2) as ahead:
    first = ahead.next(novice, 0)
    wait(lambda: ahead._begun > ahead._head)
    second = ahead.next(novice, 1)
  cursor = json.loads(json.dumps(second.cursor))
  assert cursor["group"] == 4
  resumed = Draw(toy.TASKS, 0)
  unfinished = cursor["unfinished"]
  assert unfinished == [resumed.task(4 + i, 0).id for i in range(len(unfinished))]
  with make(player, tools, staleness=2, step=2, cursor=cursor) as ahead:
    rest = [ahead.next(novice, step) for step in range(2, PLAN.steps)]
  seen = [g for x in (first, second, *rest) for g in x.played]
  assert names(seen) == expected(2 * PLAN.steps)
  gone = {**cursor, "unfinished": ["nobody"]}
  with pytest.raises(ValueError, match="'nobody' was begun"):
    make(player, tools, cursor=gone)


def test_a_resumed_run_asks_no_call_again_that_was_answered(player, novice, tmp_path):
  """Though its groups begin under a newer policy: here one that says the same."""

  def playing(tools, **where) -> Ahead:
    journal = ToolJournal(str(tmp_path / "calls"))
    means = Player(CFG, toy.tokenizer(), CONFIG, toy.TOOLS, journal=journal)
    return make(means, tools, staleness=2, **where)

  whole, first, second = (toy.TableToolbox() for _ in range(3))
  with make(player, whole) as ahead:
    expected = [ahead.next(novice, step) for step in range(PLAN.steps)]
  with playing(first) as ahead:
    seen = [ahead.next(novice, 0)]
    wait(lambda: ahead._begun == 6 and not ahead._running)
    seen.append(ahead.next(novice, 1))
    wait(lambda: ahead._begun == 8 and not ahead._running)
  with playing(second, step=2, cursor=seen[1].cursor) as ahead:
    seen += [ahead.next(novice, step) for step in range(2, PLAN.steps)]
  for mine, theirs in zip(seen, expected, strict=True):
    for group, other in zip(mine.played, theirs.played, strict=True):
      assert [t.text for t in group] == [t.text for t in other]
  assert sorted(first.calls + second.calls) == sorted(whole.calls)
  assert len(seen[1].cursor["unfinished"]) >= 2 and second.calls


def test_groups_that_another_process_had_not_begun_are_drawn(player, novice):
  other = next(t.id for t in toy.TASKS if t.id != expected(4)[3])
  cursor = {"group": 2, "unfinished": [None, other], "draw": {}}
  with make(player, toy.TableToolbox(), step=1, cursor=cursor) as ahead:
    taken = ahead.next(novice, 1)
  assert names(taken.played) == [expected(3)[2], other]


def test_a_failure_of_the_thread_is_the_learners(player, novice, monkeypatch):
  class Broken(toy.TableToolbox):
    def submit(self, *args):
      raise OSError("no tools here")

  with (
    pytest.raises(OSError, match="no tools here"),
    make(player, Broken()) as ahead,
  ):
    ahead.next(novice, 0)
  assert not threads()

  def grade(*args):
    raise ValueError("no grade for that")

  monkeypatch.setattr(player.grader, "grade", grade)
  with (
    pytest.raises(ValueError, match="no grade for that"),
    make(player, toy.TableToolbox()) as ahead,
  ):
    ahead.next(novice, 0)
  assert not threads()


def test_it_ends_at_once_though_tools_hang(player, novice):
  gate, called = threading.Event(), threading.Event()

  def reply(name: str, body: str) -> str:
    called.set()
    gate.wait(60)
    return "5"

  try:
    with make(player, toy.TableToolbox(reply)) as ahead:
      ahead.hand_over(novice, 0)
      assert called.wait(60)
    assert not threads()
  finally:
    gate.set()
  # The engine is free again, and one that never began ends too.
  with make(player, toy.TableToolbox()):
    pass
  assert len(player.groups(novice, toy.TASKS, toy.TableToolbox(), 1, 1.0, 0)) == 4

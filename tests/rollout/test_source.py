"""What a step learns from, on-policy and ahead: the same to who asks, and resumable."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy

from coa_jax.learner.advantages import informative
from coa_jax.learner.algorithms import AlgoConfig
from coa_jax.learner.update import rewards_of
from coa_jax.rollout.player import Player
from coa_jax.rollout.source import Asking, Source, open_source
from coa_jax.rollout.types import RolloutConfig
from coa_jax.tasks.sampling import make_draw

CONFIG = RolloutConfig(style="brief", slots=6, window=8, max_len=toy.MAX_LEN)
SEED, STEPS = 3, 4


@pytest.fixture(scope="module")
def player() -> Player:
  return Player(toy.MODEL, toy.tokenizer(), CONFIG, toy.TOOLS)


def source(player, step=0, cursor=None, how="uniform", **changes) -> Source:
  algo = AlgoConfig(
    **{
      **dict(steps=STEPS, prompts=2, samples=2, rounds=2, importance_cap=2.0),
      **dict(filter_groups=False, draw=how),
      **changes,
    }
  )
  draw = make_draw(how, toy.TASKS, SEED, 1)
  asking = Asking(
    player,
    draw,
    toy.TableToolbox(),
    algo,
    lambda groups: informative(rewards_of(groups)),
    SEED,
  )
  return open_source(asking, step, cursor or {})


def tokens(rollouts) -> list:
  return [(t.task_id, t.sample, toy.sampled_ids(t)) for t in rollouts.played]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("how", ["uniform", "learnability"])
def test_a_source_goes_on_from_a_cursor(player, how, staleness):
  """One policy under all versions: so what is played must be the same."""
  params = toy.actor(60).params
  with source(player, how=how, staleness=staleness) as whole:
    all_of_it = [whole.next(params, step) for step in range(STEPS)]
  assert all(len(r.groups) == 2 and r.asked == 2 for r in all_of_it)
  cursor = json.loads(json.dumps(all_of_it[1].cursor))
  with source(player, 2, cursor, how=how, staleness=staleness) as resumed:
    rest = [resumed.next(params, step) for step in (2, 3)]
  if staleness and how == "learnability":  # when a task is drawn is a matter of time
    begun = cursor["unfinished"]
    again = [t.task_id for r in rest for t in r.played[::2]]
    assert again[: len(begun)] == begun
  else:
    assert [tokens(r) for r in rest] == [tokens(r) for r in all_of_it[2:]]


def test_dynamic_sampling_ahead_keeps_groups_that_differ(player):
  params = toy.actor(60).params
  with source(player, staleness=1, filter_groups=True) as ahead:
    for step in range(STEPS):
      out = ahead.next(params, step)
      kept = informative(rewards_of(out.groups)) if out.groups else np.zeros(0)
      assert kept.all() and len(out.groups) == min(2, out.informative)
      assert len(out.groups) == 2 or out.asked == 4
      assert len(out.played) == 2 * out.asked
      assert out.figures["staleness_max"] <= 1


def test_both_evaluate_alike(player):
  params = toy.actor(60).params
  played = []
  for staleness in (0, 1):
    with source(player, staleness=staleness) as each:
      each.next(toy.params(), 0)
      done = each.evaluate(params, 1, toy.TASKS, toy.TableToolbox())
      played.append([(t.task_id, toy.sampled_ids(t), t.reward) for t in done])
  assert played[0] == played[1] and len(played[0]) == len(toy.TASKS)

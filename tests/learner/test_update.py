"""One RL step: changed and unchanged parameters, the reference and the old policy."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from coa_jax.learner.algorithms import BatchConfig, LossConfig, preset
from coa_jax.learner.optim import OptimConfig
from coa_jax.learner.update import PolicyUpdate, rewards_of
from coa_jax.model.distribution import NO_TRUNCATION
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol.trajectory import Author, Trajectory

CFG = toy.ONE_LAYER
LOSS = LossConfig(critic_lr=0.01)
BATCH = BatchConfig(rows=2, length=128)


def groups() -> list[list[Trajectory]]:
  """The toy scripts as two groups with rewards, sampled by the initial policy."""
  out = toy.trajectories()
  for t, own in zip(out, toy.logps_of(CFG, toy.params(layers=1), out), strict=True):
    logps = iter(own.tolist())
    for s in t.segments:
      if s.author == Author.POLICY:
        s.logps = [next(logps) for _ in s.ids]
  for t, reward in zip(out, (1.0, 0.0, 0.25, 0.75), strict=True):
    t.reward = reward
  return [out[:2], out[2:]]


def build(lora: LoraConfig | None = None, lr: float = 0.003, teachers=None, **changes):
  """An update for the toy model, its initial state, and the frozen parameters."""
  shape = {k: changes.pop(k) for k in ("epochs", "minibatches") if k in changes}
  optim = OptimConfig(lr=lr, schedule="constant")
  update = PolicyUpdate(
    CFG,
    dataclasses.replace(LOSS, **changes),
    dataclasses.replace(BATCH, **shape),
    optim,
    lora,
    ONE_DEVICE,
    NO_TRUNCATION,
    steps=8,
    prompts=2,
    samples=2,
    teachers=teachers,
  )
  params = jax.tree.map(jnp.array, toy.params(layers=1))
  return update, *update.init(params, seed=0)


def host(tree):
  return jax.tree.map(np.asarray, tree)


def moved(a, b) -> bool:
  return any(
    (x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_the_reference_is_where_training_began(lora):
  update, state, frozen = build(lora, kl_coef=0.1)
  # With adapters the frozen base is the reference already.
  assert (frozen["reference"] is None) == (lora is not None)
  kls = []
  for step in range(3):
    state, values = update(state, frozen, groups())
    assert int(state.step) == step + 1
    kls.append(values["reference_kl"])
  assert abs(kls[0]) < 1e-9 < 1e-6 < kls[1] < kls[2]
  reference = frozen["reference"] or frozen["base"]
  assert not moved(host(reference), host(toy.params(layers=1)))
  assert moved(host(update.policy(state, frozen)), host(reference))


def test_without_a_kl_nothing_is_copied():
  _, _, frozen = build()
  assert frozen == {"base": None, "reference": None}


@pytest.mark.slow
def test_a_kl_in_the_reward_pulls_back_to_the_reference():
  """Rewards are equal; only the KL distinguishes trajectories."""
  update, state, frozen = build(**preset("rloo")["loss"] | {"kl_coef": 5.0})
  even = groups()
  for t in (t for group in even for t in group):
    t.reward = 0.5
  # Sampler and reference agree up to the last digit: nothing to pull back.
  state, values = update(state, frozen, even)
  assert values["grad_norm"] < 1e-3
  for s in even[0][0].segments:  # drifted: likelier than under the reference
    s.logps = [x + 0.1 for x in s.logps]
  _, values = update(state, frozen, even)
  assert values["grad_norm"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_critic_learns_returns_and_leaves_the_policy_alone(lora):
  fields = preset("ppo")["loss"] | {"value_clip": 10.0, "kl_coef": 0.0}
  update, state, frozen = build(lora, lr=0.0, **fields)
  assert not state.params["critic"]["value_head"].any()
  before = host(state.params)
  log = []
  for _ in range(8):
    state, values = update(state, frozen, groups())
    log.append(values)
  # At first every value is 0, so the loss is half the mean square of the returns.
  counts = [sum(len(s.logps) for s in t.segments) for g in groups() for t in g]
  square = np.average(np.array([1.0, 0.0, 0.25, 0.75]) ** 2 / 2, weights=counts)
  assert log[0]["value"] == 0
  assert log[0]["value_loss"] == pytest.approx(square, rel=1e-6)
  assert log[-1]["value_loss"] < 0.6 * log[0]["value_loss"]
  assert log[-1]["value"] > 0.1
  after = host(state.params)
  assert not moved(before["policy"], after["policy"])
  assert moved(before["critic"]["trunk"], after["critic"]["trunk"])


def test_on_policy_the_first_update_has_ratio_one():
  update, state, frozen = build()
  _, values = update(state, frozen, groups())
  assert values["ratio"] == pytest.approx(1, abs=1e-6) and values["clipped"] == 0


@pytest.mark.slow
def test_later_updates_of_a_step_have_other_ratios():
  update, state, frozen = build(epochs=2, minibatches=2, lr=0.05)
  state, values = update(state, frozen, groups())
  assert int(state.step) == 1
  assert abs(values["ratio"] - 1) > 1e-3 and values["clipped"] > 0
  assert values["logp_diff"] < 1e-5  # sampler vs. learner before the first update


@pytest.mark.slow
def test_decoupled_the_old_policy_is_the_learner_before_the_steps_first_update():
  off = groups()
  for group in off:
    for t in group:
      for s in t.segments:
        s.logps = [x - 0.3 for x in s.logps]  # sampled by another program
  update, state, frozen = build(is_clip=2.0)
  _, values = update(state, frozen, off)
  assert values["ratio"] == 1.0  # exactly
  assert values["importance"] == pytest.approx(np.exp(0.3), rel=1e-5)
  update, state, frozen = build(is_clip=2.0, epochs=2, lr=1e-6)
  _, values = update(state, frozen, off)
  assert values["ratio"] == pytest.approx(1, abs=1e-4)
  assert values["importance"] == pytest.approx(np.exp(0.3), rel=1e-4)


def test_a_failure_of_infrastructure_is_no_row_and_no_group_is_no_update():
  with_failure = groups()
  failed = copy.deepcopy(with_failure[0][0])
  failed.reward = None
  with_failure[0].append(failed)
  assert np.isnan(rewards_of(with_failure)).sum() == 2  # and one padding entry
  outcomes = []
  update, state, frozen = build()
  for played in (groups(), with_failure):
    state, _ = update.init(jax.tree.map(jnp.array, toy.params(layers=1)), seed=0)
    outcomes.append(update(state, frozen, played)[1])
  assert outcomes[0] == outcomes[1]
  state, _ = update.init(jax.tree.map(jnp.array, toy.params(layers=1)), seed=0)
  before = host(state.params)
  state, values = update(state, frozen, [])
  assert int(state.step) == 1 and values == {}
  assert not moved(before, host(state.params))

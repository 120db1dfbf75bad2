"""Surrogates by hand; loss weights and token advantages by formula."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.learner import advantages
from coa_jax.learner import batch as batching
from coa_jax.learner.algorithms import LossConfig
from coa_jax.learner.batch import Batch
from coa_jax.learner.policy_loss import policy_loss

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28)


def one_row(**fields) -> Batch:
  """A one-row batch with these values."""
  values = {k: np.array([v], np.float32) for k, v in fields.items()}
  return batching.empty(1, len(fields["loss_mask_BT"])).replace(**values)


def value_and_grad(config: LossConfig, batch: Batch, logp):
  """The loss, its sums, and its gradient in the row's log-probs."""

  def loss(x):
    return policy_loss(config, x, batch)

  (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(
    jnp.asarray([logp], jnp.float32)
  )
  return float(value), {k: float(x) for k, x in sums.items()}, np.asarray(grad[0])


# ratio, advantage -> surrogate, whether the bound is active; clip_low 0.2, high 0.28.
BRANCHES = [
  (1.0, 2.0, 2.0, False),
  (1.0, -2.0, -2.0, False),
  (1.1, 2.0, 2.2, False),
  (0.9, -2.0, -1.8, False),
  (1.5, 2.0, 2.56, True),  # above, to be raised: bounded by 1.28
  (1.5, -2.0, -3.0, False),  # above, to be lowered: free
  (0.5, 2.0, 1.0, False),  # below, to be raised: free
  (0.5, -2.0, -1.6, True),  # below, to be lowered: bounded by 0.8
  (1.27, 1.0, 1.27, False),
  (1.29, 1.0, 1.28, True),
  (0.81, -1.0, -0.81, False),
  (0.79, -1.0, -0.8, True),
  (3.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "surrogate", "bounded"), BRANCHES)
def test_the_surrogate_by_hand(ratio, advantage, surrogate, bounded):
  """Only the first token counts: the second is not the policy's."""
  batch = one_row(loss_mask_BT=[1, 0], advantage_BT=[advantage, 5], logp_BT=[-1.5, -1])
  value, sums, grad = value_and_grad(CONFIG, batch, [-1.5 + np.log(ratio), 1.2])
  assert value == pytest.approx(-surrogate, abs=1e-6)
  assert sums["clipped"] == bounded
  assert sums["ratio"] == pytest.approx(ratio, rel=1e-6)
  assert sums["kl"] == pytest.approx(ratio - 1 - np.log(ratio), abs=1e-6)
  # d(-r A)/d log p = -r A if free, and 0 if bounded.
  expected = 0.0 if bounded else -ratio * advantage
  assert grad == pytest.approx([expected, 0], abs=1e-6)


def test_one_impossible_token_can_not_overflow():
  batch = one_row(
    loss_mask_BT=[1.0, 1.0], advantage_BT=[-1.0, 1.0], logp_BT=[-90.0, 0.0]
  )
  logp = jnp.array([[0.0, -90.0]])
  value, sums = policy_loss(CONFIG, logp, batch)
  assert float(value) == pytest.approx(np.exp(20), rel=1e-6)
  assert np.isfinite(float(sums["kl"]))


# Token weights if the sampler is another program: learner / sampler, capped at 2.
@pytest.mark.parametrize(
  ("mismatch", "advantage", "weight"),
  [(1.0, 2.0, 1.0), (1.7, -3.0, 1.7), (0.4, 2.0, 0.4), (5.0, 2.0, 2.0), (5.0, -1, 2.0)],
)
def test_a_token_weighs_as_its_capped_importance(mismatch, advantage, weight):
  batch = one_row(loss_mask_BT=[1], advantage_BT=[advantage], logp_BT=[-1.5])
  config = dataclasses.replace(CONFIG, is_clip=2.0)
  value, sums, grad = value_and_grad(config, batch, [-1.5 + np.log(mismatch)])
  # The ratio to the learner itself is 1: no bound is ever active.
  assert sums["ratio"] == 1 and sums["clipped"] == 0
  assert [value, *grad] == pytest.approx([-weight * advantage] * 2, rel=1e-6)
  assert sums["importance"] == pytest.approx(weight, rel=1e-6)
  assert sums["importance_capped"] == (mismatch > 2)
  assert sums["kl"] == pytest.approx(mismatch - 1 - np.log(mismatch), abs=1e-6)


def test_a_cap_that_is_never_active_changes_no_gradient():
  """With a weight or with a ratio, a token's gradient is p / p_sampled times A."""
  rng = np.random.default_rng(0)
  sampled = rng.normal(scale=0.5, size=12) - 2
  batch = one_row(
    loss_mask_BT=[1.0] * 12, advantage_BT=rng.normal(size=12), logp_BT=sampled
  )
  logp = sampled + rng.normal(scale=0.3, size=12)

  def grad(cap):
    # With such wide bounds the unweighted surrogate is free too.
    config = dataclasses.replace(CONFIG, clip_low=1.0, clip_high=1e6, is_clip=cap)
    return value_and_grad(config, batch, logp)[2]

  np.testing.assert_allclose(grad(1e6), grad(0.0), rtol=1e-6)
  assert np.abs(grad(0.9) - grad(0.0)).max() > 1e-3


@given(st.lists(st.lists(st.floats(-3, 3), max_size=6), min_size=1, max_size=6))
def test_whitened_numbers_have_mean_zero_and_deviation_one(parts):
  out = np.concatenate(advantages.whiten([np.array(p) for p in [*parts, [0.5, -0.5]]]))
  assert out.mean() == pytest.approx(0, abs=1e-6)
  assert np.std(out, ddof=1) == pytest.approx(1, abs=1e-6)


@given(
  st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=8),
  st.floats(0, 1),
  st.floats(0, 1),
)
def test_gae_is_the_sum_of_discounted_differences(steps, gamma, lam):
  reward_T, value_T = (np.array(x) for x in zip(*steps, strict=True))
  advantage_T, return_T = advantages.gae(reward_T, value_T, gamma, lam)
  delta_T = reward_T + gamma * np.append(value_T[1:], 0) - value_T
  for t in range(len(steps)):
    left = delta_T[t:]
    expected = np.sum(left * (gamma * lam) ** np.arange(len(left)))
    assert advantage_T[t] == pytest.approx(expected, abs=1e-9)
  np.testing.assert_allclose(return_T, advantage_T + value_T)

"""GRPO's advantage against its definition; trajectories with several contexts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coa_jax.learner.advantages import group_relative, has_reward_variance
from coa_jax.learner.algorithms import LossConfig
from coa_jax.learner.policy_loss import aggregation_weights, token_advantages

NAN = float("nan")


_GROUP = st.lists(
  st.floats(-3, 3, allow_subnormal=False) | st.just(NAN), min_size=1, max_size=9
)


# Advantage 0: equal rewards, a single reward, no reward.
@example([1.0, 1.0, 1.0], True)
@example([1.0, NAN, NAN], True)
@example([NAN, NAN], False)
@given(_GROUP, st.booleans())
def test_the_definition_over_the_samples_that_are_left(group, standardise: bool):
  reward_1K = np.array([group])
  out = group_relative(reward_1K, standardise)[0]
  left = reward_1K[0][~np.isnan(reward_1K[0])]
  assert not out[np.isnan(reward_1K[0])].any()
  if len(left):
    expected = left - left.mean()
    if standardise:
      deviation = np.std(left, ddof=1) if len(left) > 1 else 0.0
      expected = expected / (deviation + 1e-6)
    mine = out[~np.isnan(reward_1K[0])]
    np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-7)


def test_groups_do_not_see_each_other():
  rewards = np.random.default_rng(0).normal(size=(5, 4))
  together = group_relative(rewards)
  for g in range(5):
    np.testing.assert_array_equal(
      together[g : g + 1], group_relative(rewards[g : g + 1])
    )


def test_groups_that_teach_are_those_whose_rewards_differ():
  differ = [[0.0, 1.0, 0.0], [1.0, NAN, 0.0]]
  same = [[0.0, 0.0, 0.0], [1.0, NAN, 1.0], [1.0, NAN, NAN], [NAN, NAN, NAN]]
  with np.errstate(all="raise"):
    assert has_reward_variance(np.array(differ)).all()
    assert not has_reward_variance(np.array(same)).any()


def test_rounding_is_no_difference():
  noise = np.array([[0.1 + 0.2, 0.3, 0.3], [-0.3, -0.1 - 0.2, NAN], [1e6, 1e6, 1e6]])
  noise[2, 0] += 1e-4
  single = np.float32([[0.1, 0.1, np.nextafter(np.float32(0.1), np.float32(1))]])
  small = np.array([[0.0, 1e-9, 0.0], [1e-12, 2e-12, 1e-12], [-1e-9, 1e-9, 0.0]])
  assert not has_reward_variance(noise).any()
  assert not has_reward_variance(single).any()
  assert has_reward_variance(small).all()  # relative to the rewards' size


@pytest.mark.parametrize(
  ("aggregation", "right", "wrong"),
  [("token-mean", 1 / 8, -1 / 8), ("seq-mean-token-mean", 1 / 12, -1 / 4)],
)
def test_a_trajectory_counts_once_however_many_contexts_it_has(
  aggregation, right, wrong
):
  """Reward 1: contexts with 2 and 1 tokens. Reward 0: one context with 1 token."""
  config = LossConfig(advantage="dr_grpo", aggregation=aggregation)
  counts, owners = [2, 1, 1], [0, 0, 1]
  advantage, _ = token_advantages(config, np.array([[1.0, 0.0]]), counts, owners=owners)
  weights = aggregation_weights(config, counts, 8, owners)
  terms = [w * a / sum(counts) for w, a in zip(weights, advantage, strict=True)]
  expected = [[right, right], [right], [wrong]]
  for term, values in zip(terms, expected, strict=True):
    np.testing.assert_allclose(term, values, rtol=1e-12)

"""GRPO's advantage against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.learner.advantages import group_relative, has_reward_variance

NAN = float("nan")


def test_by_hand():
  # Mean 0.25, deviation sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5.
  out = group_relative(np.array([[1.0, 0.0, 0.0, 0.0]]))
  np.testing.assert_allclose(out, [[1.5, -0.5, -0.5, -0.5]], rtol=3e-6)
  out = group_relative(np.array([[1.0, 0.0, 0.0, 0.0]]), standardise=False)
  np.testing.assert_array_equal(out, [[0.75, -0.25, -0.25, -0.25]])


_GROUP = st.lists(
  st.floats(-3, 3, allow_subnormal=False) | st.just(NAN), min_size=1, max_size=9
)


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


@pytest.mark.parametrize("standardise", [False, True])
def test_nothing_to_compare_is_advantage_zero(standardise: bool):
  rewards = np.array([[1.0, 1.0, 1.0], [1.0, NAN, NAN], [NAN, NAN, NAN]])
  out = group_relative(rewards, standardise)
  np.testing.assert_array_equal(out, np.zeros((3, 3)))


def test_groups_do_not_see_each_other():
  rewards = np.random.default_rng(0).normal(size=(5, 4))
  together = group_relative(rewards)
  for g in range(5):
    np.testing.assert_array_equal(
      together[g : g + 1], group_relative(rewards[g : g + 1])
    )


def test_groups_that_teach_are_those_whose_rewards_differ():
  rewards = np.array(
    [
      [0.0, 1.0, 0.0],
      [0.0, 0.0, 0.0],
      [1.0, 1.0, 1.0],
      [1.0, NAN, 1.0],
      [1.0, NAN, 0.0],
      [1.0, NAN, NAN],
      [NAN, NAN, NAN],
    ]
  )
  with np.errstate(all="raise"):
    keep = has_reward_variance(rewards)
  assert keep.tolist() == [True, False, False, False, True, False, False]

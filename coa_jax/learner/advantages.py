"""Advantages of trajectories, in numpy: one number per trajectory."""

from __future__ import annotations

import numpy as np

# verl 0.9.1 and tunix 0.1.7 add this to the deviation; TRL 1.16 adds 1e-4.
_EPSILON = 1e-6


def group_relative(reward_GK: np.ndarray, standardise: bool = True) -> np.ndarray:
  """GRPO's advantage: (R - mean of the group) / (deviation of the group + 1e-6).

  DeepSeekMath, arXiv 2402.03300, section 4.1; the deviation is Bessel-corrected as in
  verl. A group of one, or without variance, has advantage 0.

  Args:
    reward_GK: rewards of G groups of K samples; NaN for a sample that left its group
      (an infrastructure failure).
    standardise: False leaves out the deviation (Dr.GRPO, arXiv 2503.20783).

  Returns:
    advantage_GK, 0 where the reward is NaN.
  """
  present_GK = ~np.isnan(reward_GK)
  count_G1 = present_GK.sum(1, keepdims=True)
  value_GK = np.where(present_GK, reward_GK, 0.0)
  mean_G1 = value_GK.sum(1, keepdims=True) / np.maximum(count_G1, 1)
  centred_GK = np.where(present_GK, value_GK - mean_G1, 0.0)
  if not standardise:
    return centred_GK
  variance_G1 = (centred_GK**2).sum(1, keepdims=True) / np.maximum(count_G1 - 1, 1)
  return centred_GK / (np.sqrt(variance_G1) + _EPSILON)


def informative(reward_GK: np.ndarray) -> np.ndarray:
  """keep_G: True for groups whose rewards differ (DAPO's dynamic sampling).

  A group in which all samples earn the same has advantage 0 and teaches nothing
  (arXiv 2503.14476, section 3.2). NaN rewards are left out.
  """
  low_G = np.nanmin(np.where(np.isnan(reward_GK), np.inf, reward_GK), axis=1)
  high_G = np.nanmax(np.where(np.isnan(reward_GK), -np.inf, reward_GK), axis=1)
  return high_G > low_G

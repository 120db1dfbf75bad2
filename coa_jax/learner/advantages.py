"""Computes advantages in numpy, per trajectory or per policy token.

Token-level estimators read only policy tokens, so prompts and observations cost no
discount and have no value. Formulas and constants follow verl 0.9.1; tests compare the
results with verl, TRL and tunix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coa_jax.runtime.processes import gather_json

# verl 0.9.1 and tunix 0.1.7 add this to the deviation; TRL 1.16 adds 1e-4.
_EPSILON = 1e-6
# verl and tunix add this to the variance when they whiten.
_WHITEN = 1e-8
# Relative tolerance for equal rewards, which may be float32 sums.
_ROUNDING = 1e-6


class Share:
  """This process's trajectories in a batch.

  Attributes:
    own: their indices in the batch.
  """

  def __init__(self, own: Sequence[int], count: int):
    """Takes this process's indices, and the batch's number of trajectories."""
    self.own = own
    self._count = count

  def gather(self, values: Sequence[float]) -> list[float]:
    """Gathers one number per trajectory from all processes; a collective."""
    out = [0.0] * self._count
    for part in gather_json(list(zip(self.own, values, strict=True))):
      for i, value in part:
        out[i] = value
    return out


def group_relative(reward_GK: np.ndarray, standardise: bool = True) -> np.ndarray:
  """Computes GRPO's advantage, (R - group mean) / (group deviation + 1e-6).

  DeepSeekMath, arXiv 2402.03300, section 4.1; the deviation is Bessel-corrected as in
  verl. A group of one, or without variance, has advantage 0.

  Args:
    reward_GK: rewards for G groups of K samples; NaN for a sample that left its group
      (an infrastructure failure).
    standardise: False leaves out the deviation (Dr.GRPO, arXiv 2503.20783).

  Returns:
    advantage_GK, 0 where the reward is NaN.
  """
  centred_GK, count_G1 = _centred(reward_GK)
  if not standardise:
    return centred_GK
  # A missing sample is 0 here, and adds nothing.
  variance_G1 = (centred_GK**2).sum(1, keepdims=True) / np.maximum(count_G1 - 1, 1)
  return centred_GK / (np.sqrt(variance_G1) + _EPSILON)


def leave_one_out(reward_GK: np.ndarray) -> np.ndarray:
  """Computes RLOO's advantage, R - mean of the group's other rewards.

  arXiv 2402.14740, eq. 8. For the group's n present samples this is n / (n - 1)
  (R - group mean). A group of one has advantage 0 (in verl: R).
  """
  # R is n / (n - 1) times as far from the others' mean as from the group mean.
  centred_GK, count_G1 = _centred(reward_GK)
  return centred_GK * count_G1 / np.maximum(count_G1 - 1, 1)


def _centred(reward_GK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns rewards minus their group's mean (0 for NaN), and each group's size."""
  present_GK = ~np.isnan(reward_GK)
  count_G1 = present_GK.sum(1, keepdims=True)
  value_GK = np.where(present_GK, reward_GK, 0.0)
  mean_G1 = value_GK.sum(1, keepdims=True) / np.maximum(count_G1, 1)
  return np.where(present_GK, value_GK - mean_G1, 0.0), count_G1


def has_reward_variance(reward_GK: np.ndarray) -> np.ndarray:
  """Returns keep_G, True for groups with differing rewards (DAPO's dynamic sampling).

  A group with equal rewards has advantage 0 and teaches nothing (arXiv 2503.14476,
  section 3.2). NaN rewards are left out. Differences up to 1e-6 times the larger
  absolute reward count as rounding.
  """
  # NaN becomes an infinity of either sign, so an all-NaN group has no variance.
  low_G = np.nanmin(np.where(np.isnan(reward_GK), np.inf, reward_GK), axis=1)
  high_G = np.nanmax(np.where(np.isnan(reward_GK), -np.inf, reward_GK), axis=1)
  return high_G - low_G > _ROUNDING * np.maximum(abs(high_G), abs(low_G))


def reward_to_go(reward_T: np.ndarray, gamma: float = 1.0) -> np.ndarray:
  """Sums gamma^(u - t) reward_u over u >= t, for each of T policy tokens."""
  # GAE with lambda 1 and no critic.
  zeros = np.zeros(len(reward_T))
  return gae(reward_T, zeros, gamma, 1.0)[0]


def gae(
  reward_T: np.ndarray, value_T: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
  """Estimates one trajectory's generalised advantages (arXiv 1506.02438, eq. 16).

  A_t = d_t + gamma lam A_(t+1), d_t = reward_t + gamma V_(t+1) - V_t; after the last
  token V is 0.

  Args:
    reward_T: reward per policy token.
    value_T: the critic's value before each policy token.
    gamma: discount per token.
    lam: 1 for returns minus values, 0 for one-step differences.

  Returns:
    advantage_T, not whitened, and return_T = advantage_T + value_T.
  """
  advantage_T = np.zeros(len(reward_T))
  next_advantage = 0.0
  next_value = 0.0
  # Backward: each token needs its successor's values.
  for t in range(len(reward_T) - 1, -1, -1):
    delta = reward_T[t] + gamma * next_value - value_T[t]
    next_advantage = delta + gamma * lam * next_advantage
    advantage_T[t] = next_advantage
    next_value = value_T[t]
  return advantage_T, advantage_T + value_T


def whiten(
  values: Sequence[np.ndarray], share: Share | None = None
) -> list[np.ndarray]:
  """Whitens values: (x - mean) / sqrt(variance + 1e-8) over the whole batch.

  The variance is Bessel-corrected, as in verl. A single entry becomes 0.

  Args:
    values: an array for each trajectory on this process.
    share: their indices in the batch; None if this process has all.
  """
  share = share or Share(range(len(values)), len(values))
  # Trajectory sums are added exactly: bit-identical for any split over processes.
  n = sum(share.gather([len(x) for x in values]))
  mean = math.fsum(share.gather([float(x.sum()) for x in values])) / max(n, 1)
  squares = share.gather([float(((x - mean) ** 2).sum()) for x in values])
  scale = 1 / math.sqrt(math.fsum(squares) / max(n - 1, 1) + _WHITEN)
  return [(x - mean) * scale for x in values]

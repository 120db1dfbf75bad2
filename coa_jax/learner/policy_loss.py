"""RL's loss over policy tokens: advantages, aggregation weights, and the loss."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.learner import advantages, surrogates
from coa_jax.learner.advantages import Share
from coa_jax.learner.algorithms import TOKEN_ADVANTAGES, LossConfig
from coa_jax.learner.batch import Batch


def token_advantages(
  config: LossConfig,
  reward_GK: np.ndarray,
  counts: Sequence[int],
  kl: Sequence[np.ndarray] | None = None,
  value: Sequence[np.ndarray] | None = None,
  share: Share | None = None,
  owners: Sequence[int] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
  """Computes the advantages of a batch's policy tokens, by `config.advantage`.

  Args:
    config: chooses the estimator.
    reward_GK: rewards for G groups of K samples; NaN for a missing sample. The N
      others, row by row, are the trajectories.
    counts: policy tokens per context, trajectory by trajectory.
    kl: with `kl_in="reward"`, KL estimates at each policy token in `share`.
    value: for gae, the critic's value at each policy token in `share`.
    share: this process's contexts; None for all.
    owners: each context's trajectory; None if each trajectory has one context.

  Returns:
    An array over policy tokens for each context in `share`; and for gae the returns
    likewise, else None.
  """
  share = share or Share(range(len(counts)), len(counts))
  owners = owners or range(len(counts))
  present_GK = ~np.isnan(reward_GK)
  if kl is not None:
    penalty = [-config.kl_coef * x for x in kl]
  else:
    penalty = [np.zeros(counts[i]) for i in share.own]

  # --- Token-level estimators: the last token gets the reward.
  if config.advantage in TOKEN_ADVANTAGES:
    earned_N = reward_GK[present_GK]
    assert len(earned_N) == len(counts), "one context per trajectory"
    reward = []
    for i, penalty_T in zip(share.own, penalty, strict=True):
      reward_T = penalty_T.astype(np.float64)
      reward_T[-1:] += earned_N[i]  # nowhere, if the policy wrote no token
      reward.append(reward_T)
    if config.advantage == "reinforce++":
      to_go = [advantages.reward_to_go(r, config.gamma) for r in reward]
      return advantages.whiten(to_go, share), None
    advantage = []
    returns = []
    for reward_T, value_T in zip(reward, value, strict=True):
      advantage_T, return_T = advantages.gae(
        reward_T, value_T.astype(np.float64), config.gamma, config.lam
      )
      advantage.append(advantage_T)
      returns.append(return_T)
    # Advantages are whitened; returns, which the critic learns, keep their scale.
    return advantages.whiten(advantage, share), returns

  # --- Group-relative estimators: one number for all of a trajectory's tokens.
  reward_GK = reward_GK.copy()  # the caller's array stays
  penalties = share.gather([float(p.sum()) for p in penalty])
  reward_GK[present_GK] += np.bincount(owners, penalties)
  if config.advantage == "rloo":
    advantage_GK = advantages.leave_one_out(reward_GK)
  else:
    advantage_GK = advantages.group_relative(reward_GK, config.advantage == "grpo")
  advantage_N = advantage_GK[present_GK]
  advantage = [np.full(counts[i], advantage_N[owners[i]]) for i in share.own]
  if config.advantage == "reinforce++_baseline":
    advantage = advantages.whiten(advantage, share)
  return advantage, None


def aggregation_weights(
  config: LossConfig,
  counts: Sequence[int],
  length: int,
  owners: Sequence[int] | None = None,
) -> list[float]:
  """Computes each context's weight per token in one update's loss.

  For every aggregation, the loss sums weight times term over all n policy tokens, and
  divides by n. So no split into micro-batches, rows, devices or contexts can change the
  loss. Trajectories without policy tokens are not counted, as in verl.

  Args:
    config: chooses the aggregation.
    counts: policy tokens per context of the update.
    length: tokens per row; the divisor of sums if `config.horizon` is 0.
    owners: each context's trajectory; None if each trajectory has one context.
  """
  n = sum(counts)
  owners = owners or range(len(counts))
  whole = np.bincount(owners, counts)  # policy tokens per trajectory
  present = max(1, np.count_nonzero(whole))
  # The factor n in each weight cancels the loss's later division.
  if config.aggregation == "token-mean":
    return [1.0] * len(counts)
  if config.aggregation == "seq-mean-token-mean":
    weights = []
    for c in whole[list(owners)].tolist():
      weights.append(n / (present * c) if c else 0.0)
    return weights
  # Sums over a trajectory: tokens count alike, so long trajectories count more.
  norm = 1.0
  if config.aggregation == "seq-mean-token-sum-norm":
    norm = config.horizon or length
  return [n / (present * norm)] * len(counts)


def policy_loss(
  config: LossConfig, logp_BT: jax.Array, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Sums the weighted policy loss over policy tokens.

  The ratio's old policy is the sampler, whose log-probs came with the tokens. With
  `is_clip` the old policy is the learner before the step's first update
  (`batch.old_BT`; None for the learner now: the ratio's value is 1), and each token's
  term is multiplied by the importance p_old / p_sampler. This is decoupled PPO (arXiv
  2505.24298, eq. 5), and in a step with one update truncated importance sampling.

  Args:
    batch: with advantages, the sampler's log-probs, and the reference's if the KL is in
      the loss.

  Returns:
    The loss; and sums over policy tokens: ratio, clipped (1 if a bound is active) and
    kl (k3's estimate of KL(sampler || policy)); reference_kl with a KL in the loss; and
    with `is_clip` importance (the weight) and importance_capped (1 if `is_mode` changed
    the weight).
  """
  mask_BT = batch.loss_mask_BT
  sums = {}

  # --- The old policy, and importance weights.
  old_BT = batch.logp_BT
  importance_BT = 1.0
  if config.is_clip:
    old_BT = batch.old_BT
    if old_BT is None:
      # A step of one update: the old policy is the learner now.
      old_BT = jax.lax.stop_gradient(logp_BT)
    importance_BT, changed_BT = surrogates.importance(
      old_BT - batch.logp_BT,
      mask_BT,
      batch.segment_BT,
      is_level=config.is_level,
      is_mode=config.is_mode,
      is_clip=config.is_clip,
      is_min=config.is_min,
    )
    sums["importance"] = jnp.sum(mask_BT * importance_BT)
    sums["importance_capped"] = jnp.sum(mask_BT * changed_BT)

  # --- Each token's term, to be raised.
  if config.ratio == "sequence":
    ratio_BT = surrogates.sequence_ratio(logp_BT, old_BT, mask_BT, batch.segment_BT)
  else:
    ratio_BT = surrogates.token_ratio(logp_BT, old_BT)
  if config.surrogate == "cispo":
    term_BT, active_BT = surrogates.cispo(
      logp_BT, ratio_BT, batch.advantage_BT, config.clip_low, config.clip_high
    )
  else:
    term_BT, active_BT = surrogates.clip(
      ratio_BT, batch.advantage_BT, config.clip_low, config.clip_high, config.dual_clip
    )
  loss_BT = -importance_BT * term_BT

  # --- The KL to the reference, unless it is in the reward.
  if config.kl_coef and config.kl_in == "loss":
    kl_BT = surrogates.kl(logp_BT, batch.reference_BT, config.kl_estimator)
    loss_BT += config.kl_coef * kl_BT
    sums["reference_kl"] = jnp.sum(mask_BT * kl_BT)

  # --- Figures. The KL between sampler and policy measures how off-policy the batch is.
  log_ratio_BT = surrogates.bounded(logp_BT - batch.logp_BT)
  sums["ratio"] = jnp.sum(mask_BT * ratio_BT)
  sums["clipped"] = jnp.sum(mask_BT * active_BT)
  sums["kl"] = jnp.sum(mask_BT * (jnp.exp(log_ratio_BT) - 1 - log_ratio_BT))

  weight_BT = mask_BT if batch.loss_weight_BT is None else batch.loss_weight_BT
  return jnp.sum(weight_BT * loss_BT), sums

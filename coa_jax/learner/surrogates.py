"""Computes a policy loss's parts per token; `policy_loss.policy_loss` combines them.

Pure functions on packed rows, [B, T]. Log-ratios are clamped to +-20, as in verl 0.9.1
and tunix 0.1.7, so that one token can not overflow.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LOG_RATIO_BOUND = 20.0
# For a sequence's ratio (verl and tunix), and for k3 (verl).
_LOG_SEQUENCE_RATIO_BOUND = 10.0
_K3_BOUND = 10.0


def bounded(log_ratio: jax.Array) -> jax.Array:
  """Clamps a log-ratio to +-20."""
  return jnp.clip(log_ratio, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)


def sum_of_trajectory(
  x_BT: jax.Array, loss_mask_BT: jax.Array, segment_BT: jax.Array
) -> jax.Array:
  """Sums x over each token's trajectory where the mask is 1; [B, T]."""

  def row(x_T: jax.Array, segment_T: jax.Array) -> jax.Array:
    # Room for as many segments as tokens, and for padding, which is segment 0.
    total = jax.ops.segment_sum(x_T, segment_T, num_segments=x_T.shape[0] + 1)
    return total[segment_T]

  return jax.vmap(row)(x_BT * loss_mask_BT, segment_BT)


def mean_of_trajectory(
  x_BT: jax.Array, loss_mask_BT: jax.Array, segment_BT: jax.Array
) -> jax.Array:
  """Averages x over each token's trajectory where the mask is 1; 0 if none is."""
  # At least 1: padding has no policy token.
  count_BT = sum_of_trajectory(jnp.ones_like(x_BT), loss_mask_BT, segment_BT)
  return sum_of_trajectory(x_BT, loss_mask_BT, segment_BT) / jnp.maximum(count_BT, 1)


def token_ratio(logp_BT: jax.Array, old_BT: jax.Array) -> jax.Array:
  """Computes each token's p / p_old."""
  return jnp.exp(bounded(logp_BT - old_BT))


def sequence_ratio(
  logp_BT: jax.Array, old_BT: jax.Array, loss_mask_BT: jax.Array, segment_BT: jax.Array
) -> jax.Array:
  """Computes GSPO's ratio, a trajectory's p / p_old to the power 1 / policy tokens.

  All tokens of a trajectory have the same value, but each its own gradient (GSPO-token,
  arXiv 2507.18071, eq. 13), as in verl and tunix.
  """
  mean_BT = mean_of_trajectory(logp_BT - old_BT, loss_mask_BT, segment_BT)
  stop = jax.lax.stop_gradient
  # In value the mean; in gradient the token's own log-prob.
  log_BT = logp_BT - stop(logp_BT) + stop(mean_BT)
  return jnp.exp(jnp.minimum(log_BT, _LOG_SEQUENCE_RATIO_BOUND))


def clip(
  ratio_BT: jax.Array,
  advantage_BT: jax.Array,
  clip_low: float,
  clip_high: float,
  dual_clip: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Computes PPO's term min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to be raised.

  arXiv 1707.06347, eq. 7, with DAPO's separate upper bound (arXiv 2503.14476, eq. 10).

  Args:
    dual_clip: c; if A < 0 the term is at least c A (arXiv 1912.09729, eq. 5); 0 for no
      bound. verl always has one, 3 by default; TRL (delta) and tunix (epsilon_c) have
      none by default.

  Returns:
    term_BT, and True where a bound is active.
  """
  free_BT = ratio_BT * advantage_BT
  term_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high) * advantage_BT
  active_BT = term_BT < free_BT
  term_BT = jnp.minimum(free_BT, term_BT)
  # The minimum has no lower bound if A < 0 and the ratio is large.
  if dual_clip:
    least_BT = dual_clip * advantage_BT
    below_BT = (advantage_BT < 0) & (term_BT < least_BT)
    term_BT = jnp.where(below_BT, least_BT, term_BT)
    active_BT |= below_BT
  return term_BT, active_BT


def cispo(
  logp_BT: jax.Array,
  ratio_BT: jax.Array,
  advantage_BT: jax.Array,
  clip_low: float,
  clip_high: float,
) -> tuple[jax.Array, jax.Array]:
  """Computes CISPO's term stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p.

  arXiv 2506.13585, eq. 4 and 5. Every token keeps its gradient. As in verl; TRL has no
  lower bound (clip_low 1), and its epsilon_high is 1 + clip_high.

  Returns:
    term_BT, to be raised, and True where a bound is active.
  """
  clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
  # The ratio is a weight only; the gradient goes through log p.
  term_BT = jax.lax.stop_gradient(clipped_BT) * advantage_BT * logp_BT
  return term_BT, clipped_BT != ratio_BT


def importance(
  log_ratio_BT: jax.Array,
  loss_mask_BT: jax.Array,
  segment_BT: jax.Array,
  is_level: str,
  is_mode: str,
  is_clip: float,
  is_min: float,
) -> tuple[jax.Array, jax.Array]:
  """Computes weights for tokens not sampled by the old policy, without gradients.

  Truncated (Ionides 2008; https://fengyao.notion.site/off-policy-rl): min(w, is_clip).
  Masked (IcePop, TRL's sequence_mask): w where is_min <= w <= is_clip, else 0.

  Args:
    log_ratio_BT: log p_old - log p_sampler.
    loss_mask_BT: 1 for policy tokens, 0 for others.
    segment_BT: trajectory number in the row.
    is_level: "token"; or "sequence", the product over a trajectory's policy tokens.
    is_mode: "truncate" or "mask".
    is_clip: a token's maximum weight.
    is_min: with "mask", the minimum w kept.

  Returns:
    w_BT by that mode, and True where the mode changed it.
  """
  if is_level == "sequence":
    # The product of ratios, as a sum of logs.
    log_ratio_BT = sum_of_trajectory(log_ratio_BT, loss_mask_BT, segment_BT)
  whole_BT = jnp.exp(bounded(jax.lax.stop_gradient(log_ratio_BT)))
  # Truncated, a token counts less than it should; masked, not at all.
  if is_mode == "truncate":
    return jnp.minimum(whole_BT, is_clip), whole_BT > is_clip
  outside_BT = (whole_BT > is_clip) | (whole_BT < is_min)
  return jnp.where(outside_BT, 0.0, whole_BT), outside_BT


def kl(logp: jax.Array, reference: jax.Array, estimator: str) -> jax.Array:
  """Estimates KL(policy || reference) from each sampled policy token.

  With d = log p - log p_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
  (Schulman 2020, http://joschu.net/blog/kl-approx.html). As in verl, k3 clamps d
  to +-20, and its value to 10.
  """
  d = logp - reference
  if estimator == "k1":
    return d
  if estimator == "k2":
    return d * d / 2
  # Never below 0, and with less variance than k1; the exponential needs bounds.
  d = bounded(d)
  return jnp.clip(jnp.exp(-d) - 1 + d, -_K3_BOUND, _K3_BOUND)


def value_loss(
  value_BT: jax.Array, old_BT: jax.Array, return_BT: jax.Array, value_clip: float
) -> tuple[jax.Array, jax.Array]:
  """Computes PPO's max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2.

  As in verl, TRL and tunix.

  Returns:
    Each token's loss, and True where the clipped loss is larger.
  """
  # The larger of two losses: a value gains nothing by moving further than the clip.
  near_BT = jnp.clip(value_BT, old_BT - value_clip, old_BT + value_clip)
  free_BT = (value_BT - return_BT) ** 2
  clipped_BT = (near_BT - return_BT) ** 2
  return jnp.maximum(free_BT, clipped_BT) / 2, clipped_BT > free_BT

"""Losses as pure functions over packed batches.

All are sums over tokens; the caller divides by a denominator counted over the *global*
batch, so micro-batching, packing and padding can not change a loss. Formulas and
constants follow verl 0.9.1 unless a docstring says otherwise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from coa_jax.learner.batch import Batch
from coa_jax.model import distribution
from coa_jax.model.qwen import Qwen, QwenConfig

# The ratio's logarithm is clamped, as in verl and tunix, so one token can not overflow.
_LOG_RATIO_BOUND = 20.0


def token_logps(
  cfg: QwenConfig, params, batch: Batch, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """Log p of every token given those before it in its segment, and the entropy there.

  Args:
    cfg: the model.
    params: its parameters.
    batch: packed rows.
    temperature: of the sampling distribution.

  Returns:
    logp_BT and entropy_BT (nats, float32); a segment's first token has 0 in both.
  """
  model = Qwen(cfg)
  hidden_BTD, _ = model.apply(
    {"params": params}, batch.tokens_BT, batch.position_BT, batch.segment_BT
  )
  logits_BUV = model.apply({"params": params}, hidden_BTD[:, :-1], method="logits")
  logp_BUV = distribution.log_probs(logits_BUV, temperature)
  target_BU1 = batch.tokens_BT[:, 1:, None]
  logp_BU = jnp.take_along_axis(logp_BUV, target_BU1, axis=-1)[..., 0]
  entropy_BU = -jnp.sum(jnp.exp(logp_BUV) * logp_BUV, axis=-1)
  # What stands before a segment's first token is another segment's last.
  given_BU = batch.position_BT[:, 1:] > 0
  first = ((0, 0), (1, 0))
  return jnp.pad(logp_BU * given_BU, first), jnp.pad(entropy_BU * given_BU, first)


def nll(logp_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
  """Sum of negative log-likelihoods over weighted tokens (nats)."""
  return -jnp.sum(weight_BT * logp_BT)


def policy_gradient(
  logp_BT: jax.Array,
  batch: Batch,
  clip_low: float,
  clip_high: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The clipped surrogate, summed over policy tokens.

  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_sampled: PPO
  (arXiv 1707.06347, eq. 7) with DAPO's separate upper bound (arXiv 2503.14476, eq. 10).
  The log-probs of the sampler are the old policy's: nothing is recomputed. No dual
  clip.

  Args:
    logp_BT: log-probs under the policy being trained.
    batch: with advantages and the sampler's log-probs.
    clip_low: the ratio's lower bound is 1 - clip_low.
    clip_high: its upper bound is 1 + clip_high.

  Returns:
    The sum, and sums over tokens of: ratio, clipped (share where the bound was active),
    and kl (the k3 estimate of KL(sampled || policy), Schulman 2020).
  """
  bound = _LOG_RATIO_BOUND
  log_ratio_BT = jnp.clip(logp_BT - batch.logp_BT, -bound, bound)
  ratio_BT = jnp.exp(log_ratio_BT)
  free_BT = ratio_BT * batch.advantage_BT
  bounded_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high) * batch.advantage_BT
  weight_BT = batch.weight_BT
  loss = -jnp.sum(weight_BT * jnp.minimum(free_BT, bounded_BT))
  sums = {
    "ratio": jnp.sum(weight_BT * ratio_BT),
    "clipped": jnp.sum(weight_BT * (bounded_BT < free_BT)),
    "kl": jnp.sum(weight_BT * (ratio_BT - 1 - log_ratio_BT)),
  }
  return loss, sums

"""The sampling distribution: one function for the sampler and the learner.

If the two computed it in two places, policy ratios would be wrong before training
began; so both call these.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def log_probs(logits: jax.Array, temperature: jax.Array | float) -> jax.Array:
  """Log-probabilities over the last axis at a temperature, in float32.

  Args:
    logits: [..., V].
    temperature: scalar, or of shape logits.shape[:-1]; where 0 (greedy) the
      distribution reported is that of temperature 1.
  """
  t = jnp.asarray(temperature, jnp.float32)[..., None]
  return jax.nn.log_softmax(logits.astype(jnp.float32) / jnp.where(t > 0, t, 1.0))


def sample(
  logp_BV: jax.Array, key_B: jax.Array, temperature_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Draws one token per row, by inversion of the cumulative distribution.

  One uniform number a row instead of V Gumbel draws: on a CPU the draws would cost as
  much as a small model.

  Args:
    logp_BV: log-probabilities from `log_probs`.
    key_B: one PRNG key per row.
    temperature_B: 0 takes the most likely token.

  Returns:
    token_B, and logp_B of the token drawn.
  """
  u_B = jax.vmap(lambda k: jax.random.uniform(k))(key_B)
  cumulative_BV = jnp.cumsum(jnp.exp(logp_BV), axis=-1)
  # Scaled by the sum, so rounding can not push u past the last token.
  below_BV = cumulative_BV <= u_B[:, None] * cumulative_BV[:, -1:]
  drawn_B = jnp.minimum(below_BV.sum(-1), logp_BV.shape[-1] - 1)
  token_B = jnp.where(temperature_B > 0, drawn_B, jnp.argmax(logp_BV, axis=-1))
  token_B = token_B.astype(jnp.int32)
  return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]

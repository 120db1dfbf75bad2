"""What losses are made of: log-probs and values of the tokens of packed batches.

Losses are sums over tokens; the caller divides by a denominator counted over the
*global* batch, so micro-batching, packing and padding can not change a loss. RL's is in
`objective.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learner.batch import Batch
from coa_jax.model import distribution
from coa_jax.model.architecture import QwenConfig
from coa_jax.model.distribution import NO_TRUNCATION, Constraint, Truncation
from coa_jax.model.qwen import Qwen
from coa_jax.model.sharding import Layout


def token_logps(
  cfg: QwenConfig,
  params: Any,
  batch: Batch,
  temperature: float = 1.0,
  layout: Layout | None = None,
  truncation: Truncation = NO_TRUNCATION,
  constraint: Constraint | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log p of every token given those before it in its segment, and the entropy there.

  With `cfg.logit_chunk` the vocabulary's axis exists for that many tokens of a row at
  once; the backward pass computes it again.

  Args:
    cfg: the model.
    params: its parameters.
    batch: packed rows.
    temperature: of the sampling distribution.
    layout: the mesh that all of this is split over.
    truncation: of the sampling distribution.
    constraint: the grammar that policy tokens were sampled under.

  Returns:
    logp_BT and entropy_BT (nats, float32); a segment's first token has 0 in both.
  """
  model = Qwen(cfg, layout)
  hidden_BTD, _ = model.apply(
    {"params": params}, batch.tokens_BT, batch.position_BT, batch.segment_BT
  )

  # Once for all chunks: on a mesh it is gathered here. As float32, in which the chunks'
  # gradients then add up.
  output_DV = model.apply({"params": params}, method="output").astype(jnp.float32)

  def head(
    hidden_BCD: jax.Array, target_BC: jax.Array, grammar_BC: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    logits_BCV = model.apply(
      {"params": params}, hidden_BCD, output_DV.astype(cfg.dtype), method="logits"
    )
    allowed_BCV = constraint.allowed(grammar_BC) if constraint else None
    return distribution.taken_log_probs(
      logits_BCV, target_BC, temperature, truncation, allowed_BCV
    )

  # What follows each token; the last of a row predicts nothing that is used.
  target_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
  grammar_BT = jnp.roll(batch.grammar_BT, -1, axis=1)
  T, pieces = target_BT.shape[1], layout.ways("T") if layout else 1
  chunks = _chunks(T // pieces, cfg.logit_chunk)
  if chunks == 1:
    logp_BT, entropy_BT = head(hidden_BTD, target_BT, grammar_BT)
  else:

    def split(x: jax.Array) -> jax.Array:
      """[B, T, ...] to [chunks, B, pieces * C, ...]: of every device's piece a part."""
      x = x.reshape(x.shape[0], pieces, chunks, -1, *x.shape[2:])
      x = jnp.moveaxis(x, 2, 0)
      return x.reshape(chunks, x.shape[1], -1, *x.shape[4:])

    def join(x: jax.Array) -> jax.Array:
      x = x.reshape(chunks, x.shape[1], pieces, -1)
      return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], T)

    again = jax.checkpoint(head, prevent_cse=False)
    whole = (hidden_BTD, target_BT, grammar_BT)
    parts = jax.lax.map(lambda x: again(*x), tuple(map(split, whole)))
    logp_BT, entropy_BT = map(join, parts)
  # What stands before a segment's first token is another segment's last.
  given_BT = batch.position_BT > 0
  logp_BT, entropy_BT = (jnp.roll(x, 1, axis=1) for x in (logp_BT, entropy_BT))
  return logp_BT * given_BT, entropy_BT * given_BT


def _chunks(length: int, most: int) -> int:
  """How many equal parts of at most `most` tokens (0: any number) make `length`."""
  if not most:
    return 1
  return next(n for n in range(-(-length // most), length + 1) if length % n == 0)


def token_values(
  cfg: QwenConfig,
  params: Any,
  head_D1: jax.Array,
  batch: Batch,
  layout: Layout | None = None,
) -> jax.Array:
  """A critic's value of what stands before each token of its segment.

  Args:
    cfg: the critic's trunk.
    params: the trunk's parameters.
    head_D1: from the final hidden state to a value.
    batch: packed rows.
    layout: the mesh that all of this is split over.

  Returns:
    value_BT, float32; a segment's first token has 0.
  """
  hidden_BTD, _ = Qwen(cfg, layout).apply(
    {"params": params}, batch.tokens_BT, batch.position_BT, batch.segment_BT
  )
  value_BT = (hidden_BTD.astype(jnp.float32) @ head_D1)[..., 0]
  return jnp.roll(value_BT, 1, axis=1) * (batch.position_BT > 0)


def nll(logp_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
  """Sum of negative log-likelihoods over weighted tokens (nats)."""
  return -jnp.sum(weight_BT * logp_BT)

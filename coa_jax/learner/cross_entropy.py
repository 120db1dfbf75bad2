"""SFT's loss: cross-entropy with gradients computed in the forward pass.

Source: Liger Kernel (arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learner.batch import Batch
from coa_jax.learner.log_probs import (
  hidden_states,
  logits_at_once,
  nll,
  token_logps,
  whole_tiles,
)
from coa_jax.model import distribution, transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.model.transformer import Transformer


def cross_entropy(
  cfg: ModelConfig, params: Any, batch: Batch, partitioner: Partitioner = ONE_DEVICE
) -> jax.Array:
  """Sums weighted negative log-likelihoods over tokens, in nats.

  Equals `nll` of `token_logps`, and is computed that way on a mesh that splits
  parameters or a row's tokens. On one device, or if devices split only rows, logits are
  computed only for weighted tokens, a chunk at a time, together with their gradients:
  prompts and observations cost nothing, and no logits are kept for the backward pass or
  computed twice. Weights must be known beforehand; RL's come from log-probs, so RL can
  not use this.

  Args:
    cfg: the model. A chunk is `cfg.logit_chunk` tokens per row; if 0, a quarter of a
      device's tokens, or half a gigabyte of logits if less.
    batch: packed rows; a token's weight is its `loss_mask_BT`.
  """
  # --- If devices split more than rows, the head works as in token_logps.
  if max(map(partitioner.ways, "DTV")) > 1:
    logp_BT, *_ = token_logps(cfg, params, batch, partitioner=partitioner)
    return nll(logp_BT, batch.loss_mask_BT)

  # --- Hidden states, targets, and weights.
  model = Transformer(cfg, partitioner)
  hidden_BTD = hidden_states(model, params, batch)
  output_DV = model.apply({"params": params}, method="output").astype(jnp.float32)
  # The target is the next token; a segment's first token is not predicted.
  weight_BT = batch.loss_mask_BT * (batch.position_BT > 0)
  target_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
  weight_BT = jnp.roll(weight_BT, -1, axis=1)

  # --- Each device's loss over its rows.
  of_rows = functools.partial(_rows_cross_entropy, cfg)
  if partitioner.mesh.size > 1:
    # Each device sums over its own rows; the sums are added up below.
    of_rows = jax.shard_map(
      of_rows,
      mesh=partitioner.mesh,
      in_specs=(
        partitioner.spec("BT."),
        partitioner.spec(".."),
        partitioner.spec("BT"),
        partitioner.spec("BT"),
      ),
      out_specs=partitioner.spec("B"),
      check_vma=False,
    )
  return of_rows(hidden_BTD, output_DV, target_BT, weight_BT).sum()


def _rows_cross_entropy(
  cfg: ModelConfig,
  hidden_BTD: jax.Array,
  output_DV: jax.Array,
  target_BT: jax.Array,
  weight_BT: jax.Array,
) -> jax.Array:
  """Returns the sum over one device's rows, [1]."""
  B, T, D = hidden_BTD.shape
  # At most a quarter: with few weighted tokens, whole chunks are skipped.
  few = min(-(-B * T // 4), logits_at_once(cfg.vocab_size))
  chunk = min(B * T, B * whole_tiles(cfg.logit_chunk) or few)
  total = _cross_entropy(
    hidden_BTD.reshape(B * T, D),
    output_DV,
    target_BT.ravel(),
    weight_BT.ravel(),
    cfg.dtype,
    chunk,
  )
  return total[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(
  hidden_ND: jax.Array,
  output_DV: jax.Array,
  target_N: jax.Array,
  weight_N: jax.Array,
  dtype: str,
  chunk: int,
) -> jax.Array:
  """Sums weight * -log softmax(hidden @ output)[target] over N."""

  def add(total, hidden_CD, target_C, weight_C, place_C):
    del place_C  # only the gradient needs it
    return total + _chunk_loss(hidden_CD, output_DV, target_C, weight_C, dtype)

  return _fold_weighted(add, jnp.float32(0), hidden_ND, target_N, weight_N, chunk)


def _cross_entropy_forward(hidden_ND, output_DV, target_N, weight_N, dtype, chunk):
  # Each chunk's value comes with its gradient for a cotangent of 1, so no logits are
  # computed twice.
  def add(carry, hidden_CD, target_C, weight_C, place_C):
    total, d_hidden_ND, d_output_DV = carry
    value, (d_hidden_CD, d_chunk_DV) = jax.value_and_grad(_chunk_loss, (0, 1))(
      hidden_CD, output_DV, target_C, weight_C, dtype
    )
    d_hidden_ND = d_hidden_ND.at[place_C].add(d_hidden_CD, mode="drop")
    return total + value, d_hidden_ND, d_output_DV + d_chunk_DV

  start = (jnp.float32(0), jnp.zeros_like(hidden_ND), jnp.zeros_like(output_DV))
  total, d_hidden_ND, d_output_DV = _fold_weighted(
    add, start, hidden_ND, target_N, weight_N, chunk
  )
  return total, (d_hidden_ND, d_output_DV)


def _cross_entropy_backward(dtype, chunk, gradients, g):
  # The forward pass made gradients for a cotangent of 1; targets and weights have none.
  d_hidden_ND, d_output_DV = gradients
  return d_hidden_ND * g.astype(d_hidden_ND.dtype), d_output_DV * g, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _chunk_loss(
  hidden_CD: jax.Array,
  output_DV: jax.Array,
  target_C: jax.Array,
  weight_C: jax.Array,
  dtype: str,
) -> jax.Array:
  logits_CV = transformer.project(hidden_CD, output_DV.astype(dtype)).astype(
    jnp.float32
  )
  logp_C, _ = distribution.taken_log_probs(logits_CV, target_C, 1.0)
  return nll(logp_C, weight_C)


def _fold_weighted(
  add: Callable[..., Any],
  carry: Any,
  hidden_ND: jax.Array,
  target_N: jax.Array,
  weight_N: jax.Array,
  chunk: int,
) -> Any:
  """Folds `add` over N's weighted places, `chunk` at a time.

  Args:
    add: (carry, hidden_CD, target_C, weight_C, place_C) to the next carry; padding in
      the last chunk has weight 0 and a place past the end.
  """
  N = weight_N.shape[0]
  counts_N = weight_N != 0
  # Weighted places come first, in their order; N means none.
  order_N = jnp.argsort(~counts_N, stable=True)
  order_N = jnp.where(jnp.arange(N) < counts_N.sum(), order_N, N)
  order_N = jnp.pad(order_N, (0, -N % chunk), constant_values=N)

  def body(c, carry):
    place_C = jax.lax.dynamic_slice_in_dim(order_N, c * chunk, chunk)
    hidden_CD = hidden_ND.at[place_C].get(mode="fill", fill_value=0)
    target_C = target_N.at[place_C].get(mode="fill", fill_value=0)
    weight_C = weight_N.at[place_C].get(mode="fill", fill_value=0)
    return add(carry, hidden_CD, target_C, weight_C, place_C)

  # Only as many chunks as weighted places need: this saves the work.
  return jax.lax.fori_loop(0, -(-counts_N.sum() // chunk), body, carry)

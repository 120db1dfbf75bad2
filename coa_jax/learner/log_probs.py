"""Computes the losses' inputs: token log-probs and values of packed batches.

Losses are sums over tokens; the caller divides by a denominator counted over the
*global* batch, so micro-batching, packing and padding can not change a loss. RL's loss
is in `policy_loss.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learner.batch import Batch
from coa_jax.model import distribution
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import NO_TRUNCATION, TokenMask, Truncation
from coa_jax.model.moving import moved, straight, zigzag
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.model.transformer import Transformer

# Float32 logits at once: some 880 tokens with a vocabulary of 152,000, enough for any
# matrix product.
_LOGIT_BYTES = 2**29
# Tokens per tile of a TPU array. Other chunk sizes cost 1.6 % more cycles in a step of
# Qwen2.5-7B on 32k tokens, and 2 % in Qwen3-8B's on 8k (v5p, v6e, by the compiler).
_TILE = 128


def token_logps(
  cfg: ModelConfig,
  params: Any,
  batch: Batch,
  temperature: float = 1.0,
  partitioner: Partitioner = ONE_DEVICE,
  truncation: Truncation = NO_TRUNCATION,
  constraint: TokenMask | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes each policy token's log-prob, given the previous tokens in its segment.

  Logits exist for `cfg.logit_chunk` tokens per row at once; the backward pass
  recomputes them, unless the chunk is the whole row. Chunks without a policy token are
  skipped: prompts and observations cost nothing.

  Returns:
    logp_BT and entropy_BT (nats, float32), and removed_BT, the probability
    excluded by the grammar; 0 for a segment's first token and all tokens that the
    policy did not write (`loss_mask_BT` is 0).
  """
  # --- Hidden states, and the output head.
  hidden_BTD = hidden_states(Transformer(cfg, partitioner), params, batch)
  model = Transformer(cfg, partitioner.over_vocabulary(cfg.vocab_size))
  # Once for all chunks: on a mesh the head moves here. In float32, so that the chunks'
  # gradients are summed in float32.
  output_DV = model.apply({"params": params}, method="output").astype(jnp.float32)
  head = functools.partial(
    _head,
    model,
    params,
    output_DV,
    partitioner,
    temperature=temperature,
    truncation=truncation,
    constraint=constraint,
  )

  # --- Each place's target: the next token, in the hidden states' order. The place
  # before a segment's first token belongs to another segment.
  counts_BT = (batch.position_BT > 0) & (batch.loss_mask_BT > 0)
  row_devices = partitioner.ways("T")
  target_BT, grammar_BT, targeted_BT = (
    zigzag(jnp.roll(x, -1, axis=1), row_devices)
    for x in (batch.tokens_BT, batch.grammar_BT, counts_BT)
  )

  # --- Log-probs, a chunk of every device's tokens at a time.
  rows, T = target_BT.shape
  rows //= partitioner.ways("B")
  own_V = cfg.vocab_size // partitioner.ways("V")
  most = cfg.logit_chunk or logits_at_once(own_V) // rows
  chunks, C = _chunks(T // row_devices, max(1, most))
  if chunks == 1:
    by_place = head(hidden_BTD, target_BT, grammar_BT)
  else:
    arrays = (hidden_BTD, target_BT, grammar_BT)
    by_place = _by_chunks(head, arrays, targeted_BT, row_devices, chunks, C)

  # --- Move results from places to target tokens.
  logp_BT, entropy_BT, removed_BT = (
    jnp.roll(straight(x, row_devices), 1, axis=1) * counts_BT for x in by_place
  )
  return logp_BT, entropy_BT, removed_BT


def hidden_states(model: Transformer, params: Any, batch: Batch) -> jax.Array:
  """Computes packed rows' final hidden states; on a mesh in `zigzag` order."""
  row_devices = model.partitioner.ways("T")
  hidden_BTD, _ = model.apply(
    {"params": params},
    zigzag(batch.tokens_BT, row_devices),
    zigzag(batch.position_BT, row_devices),
    zigzag(batch.segment_BT, row_devices),
  )
  return hidden_BTD


def _head(
  model: Transformer,
  params: Any,
  output_DV: jax.Array,
  partitioner: Partitioner,
  hidden_BCD: jax.Array,
  target_BC: jax.Array,
  grammar_BC: jax.Array,
  *,
  temperature: float,
  truncation: Truncation,
  constraint: TokenMask | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes the targets' log-probs, entropy and removed mass; [B, C] each.

  `partitioner` splits the hidden states, `model.partitioner` the logits.
  """
  of_tokens = partitioner.sharding("BT.")
  hidden_BCD = moved(hidden_BCD, of_tokens, model.partitioner.sharding("BT."))
  logits_BCV = model.apply(
    {"params": params}, hidden_BCD, output_DV.astype(model.cfg.dtype), method="logits"
  )
  allowed_BCV = None
  if constraint:
    allowed_BCV = constraint.allowed(grammar_BC)
  removed_BC = distribution.removed_mass(logits_BCV, temperature, allowed_BCV)
  logp_BC, entropy_BC = distribution.taken_log_probs(
    logits_BCV, target_BC, temperature, truncation, allowed_BCV
  )
  return logp_BC, entropy_BC, removed_BC


def _by_chunks(
  head: Callable[..., tuple[jax.Array, ...]],
  arrays: tuple[jax.Array, ...],
  targeted_BT: jax.Array,
  row_devices: int,
  chunks: int,
  C: int,
) -> Iterable[jax.Array]:
  """Applies `head` in chunks: C tokens of each device's row part at a time.

  Args:
    head: maps some places of `arrays` to several float32 arrays of [B, places].
    arrays: [B, T, ...] each.
    targeted_BT: places whose results are used; chunks without one are skipped.
  """
  # Each device's part of a row is cut separately: chunk c is every part's c-th piece,
  # so all devices work on it and no token moves between them.
  B, T = targeted_BT.shape
  own = T // row_devices
  # Used places first, in their order, so that the last chunks have none.
  order_BPT = jnp.argsort(~targeted_BT.reshape(B, row_devices, own), stable=True)
  back_BPT = jnp.argsort(order_BPT)

  def split(x: jax.Array) -> jax.Array:
    """Reorders [B, T, ...] and returns [chunks, B, row_devices * C, ...]."""
    x = _permuted(x.reshape(B, row_devices, own, *x.shape[2:]), order_BPT, back_BPT)
    lacks = [(0, 0)] * x.ndim
    lacks[2] = (0, chunks * C - own)
    x = jnp.pad(x, lacks)
    x = jnp.moveaxis(x.reshape(B, row_devices, chunks, C, *x.shape[3:]), 2, 0)
    return x.reshape(chunks, B, row_devices * C, *x.shape[4:])

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(chunks, B, row_devices, C), 0, 2)
    x = x.reshape(B, row_devices, chunks * C)[:, :, :own]
    return _permuted(x, back_BPT, order_BPT).reshape(B, T)

  # A chunk's logits are recomputed for the gradient: keeping all chunks' logits would
  # save no memory.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def chunk(
    arrays: tuple[jax.Array, ...], targeted_BC: jax.Array
  ) -> tuple[jax.Array, ...]:
    none = tuple(jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(head, *arrays))
    return jax.lax.cond(targeted_BC.any(), head, lambda *_: none, *arrays)

  parts = (tuple(map(split, arrays)), split(targeted_BT))
  return map(join, jax.lax.map(lambda part: chunk(*part), parts))


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
  """Orders axis 2 of [B, P, T, ...] by `order`, whose inverse is `back`."""
  order = order.reshape(*order.shape, *[1] * (x.ndim - 3))
  return jnp.take_along_axis(x, order, axis=2)


def _permuted_forward(x, order, back):
  return _permuted(x, order, back), (order, back)


def _permuted_backward(orders, gradient):
  # A gather by the inverse: a scatter would be slower.
  order, back = orders
  return _permuted(gradient, back, order), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def logits_at_once(vocabulary: int) -> int:
  """Returns how many tokens per device have logits at once, by default."""
  return whole_tiles(max(1, _LOGIT_BYTES // (4 * vocabulary)))


def whole_tiles(tokens: int) -> int:
  """Rounds down to whole tiles; less than one tile is unchanged."""
  return tokens - tokens % _TILE if tokens > _TILE else tokens


def _chunks(length: int, most: int) -> tuple[int, int]:
  """Divides `length` into parts of at most `most` tokens, in whole tiles if possible.

  Returns:
    The number of parts, and tokens per part; the last may have fewer.
  """
  most = whole_tiles(most)
  chunks = -(-length // most)
  C = -(-length // chunks)
  if chunks > 1 and most >= _TILE:
    C += -C % _TILE
  return -(-length // C), C


def token_values(
  cfg: ModelConfig,
  params: Any,
  head_D1: jax.Array,
  batch: Batch,
  partitioner: Partitioner = ONE_DEVICE,
) -> jax.Array:
  """Computes a critic's value before each token.

  Returns:
    value_BT, float32; a segment's first token has 0.
  """
  model = Transformer(cfg, partitioner)
  hidden_BTD = hidden_states(model, params, batch)
  value_BT = (hidden_BTD.astype(jnp.float32) @ head_D1)[..., 0]
  value_BT = straight(value_BT, partitioner.ways("T"))
  # Place t has read token t: its output is the value before token t + 1.
  return jnp.roll(value_BT, 1, axis=1) * (batch.position_BT > 0)


def nll(logp_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
  """Sums weighted negative log-likelihoods over tokens (nats)."""
  return -jnp.sum(weight_BT * logp_BT)

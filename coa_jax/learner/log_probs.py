"""Inputs of losses: log-probs and values of packed batches' tokens.

Losses are sums over tokens; the caller divides by a denominator counted over the
*global* batch, so micro-batching, packing and padding can not change a loss. RL's is in
`policy_loss.py`.

budget: one head over the vocabulary, in chunks, for RL's log-probs and for SFT's loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learner.batch import Batch
from coa_jax.model import distribution, transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import NO_TRUNCATION, TokenMask, Truncation
from coa_jax.model.moving import moved, straight, zigzag
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.model.transformer import Transformer

# Of float32 logits; some 880 tokens of a vocabulary of 152,000, enough for any product.
_LOGIT_BYTES = 2**29
# Tokens of a tile of a TPU's arrays. Chunks of other sizes cost a step of Qwen2.5-7B of
# 32k tokens 1.6 % more cycles, and Qwen3-8B's of 8k 2 % (v5p, v6e, by the compiler).
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
  """Computes log p of every token given the previous ones in its segment.

  budget: the arguments' shapes and the formula are most of it.

  Logits exist for `cfg.logit_chunk` tokens of a row at once; the backward pass
  recomputes them, unless the chunk is the whole row.

  Args:
    cfg: the model.
    params: its parameters.
    batch: packed rows.
    temperature: of the sampling distribution.
    partitioner: the mesh that all of this is split over.
    truncation: of the sampling distribution.
    constraint: the policy tokens' sampling grammar.

  Returns:
    logp_BT and entropy_BT (nats, float32), and removed_BT, the probability of tokens
    excluded by the grammar; a segment's first token has 0 in all.
  """
  # --- Hidden states, and the output head.
  hidden_BTD = _hidden(Transformer(cfg, partitioner), params, batch)
  model = Transformer(cfg, partitioner.over_vocabulary(cfg.vocab_size))
  # Once for all chunks: on a mesh it moves here. In float32, so that the chunks'
  # gradients are summed in it.
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

  # --- The target of each place: the next token. A row's last prediction is unused.
  target_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
  grammar_BT = jnp.roll(batch.grammar_BT, -1, axis=1)
  # In the order of the hidden states.
  row_devices = partitioner.ways("T")
  target_BT = zigzag(target_BT, row_devices)
  grammar_BT = zigzag(grammar_BT, row_devices)

  # --- Log-probs, a chunk of every device's tokens at a time.
  rows, T = target_BT.shape
  rows //= partitioner.ways("B")
  own_V = cfg.vocab_size // partitioner.ways("V")
  most = cfg.logit_chunk or _logits_at_once(own_V) // rows
  chunks, C = _chunks(T // row_devices, max(1, most))
  if chunks == 1:
    by_place = head(hidden_BTD, target_BT, grammar_BT)
  else:
    by_place = _by_chunks(
      head, hidden_BTD, target_BT, grammar_BT, row_devices, chunks, C
    )

  # --- From places to their target tokens. Before a segment's first token is another
  # segment's last.
  predicted_BT = batch.position_BT > 0
  logp_BT, entropy_BT, removed_BT = (
    jnp.roll(straight(x, row_devices), 1, axis=1) * predicted_BT for x in by_place
  )
  return logp_BT, entropy_BT, removed_BT


def _hidden(model: Transformer, params: Any, batch: Batch) -> jax.Array:
  """Final hidden states of packed rows; on a mesh in the order of `zigzag`."""
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
  """Log p of the targets, entropy and removed mass after hidden states; [B, C] each.

  Hidden states come split as `partitioner` has it, logits are as `model` has it.
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
  hidden_BTD: jax.Array,
  target_BT: jax.Array,
  grammar_BT: jax.Array,
  row_devices: int,
  chunks: int,
  C: int,
) -> Iterable[jax.Array]:
  """Applies `head` to C tokens of every device's part of a row at a time.

  Args:
    head: from the three arrays, of some tokens, to several of [B, tokens].
    hidden_BTD: final hidden states.
    target_BT: what they predict.
    grammar_BT: the state of the grammar there.
    row_devices: devices that split a row.
    chunks: of each device's part.
    C: tokens of each chunk.
  """
  # Each device's part of a row is cut by itself: chunk c is the c-th piece of every
  # part, so all devices work on it and no token moves between them.
  B, T = target_BT.shape
  own = T // row_devices

  def split(x: jax.Array, fill: int) -> jax.Array:
    """[B, T, ...] to [chunks, B, row_devices * C, ...]; `fill` is what a last lacks."""
    x = x.reshape(B, row_devices, own, *x.shape[2:])
    lacks = [(0, 0)] * x.ndim
    lacks[2] = (0, chunks * C - own)
    x = jnp.pad(x, lacks, constant_values=fill)
    x = jnp.moveaxis(x.reshape(B, row_devices, chunks, C, *x.shape[3:]), 2, 0)
    return x.reshape(chunks, B, row_devices * C, *x.shape[4:])

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(chunks, B, row_devices, C), 0, 2)
    return x.reshape(B, row_devices, chunks * C)[:, :, :own].reshape(B, T)

  # A chunk's logits are recomputed for the gradient: keeping all chunks' logits would
  # defeat their purpose.
  again = jax.checkpoint(head, prevent_cse=False)

  def chunk(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    hidden_BCD, target_BC, grammar_BC = arrays
    return again(hidden_BCD, target_BC, grammar_BC)

  no_grammar = -1
  arrays = (split(hidden_BTD, 0), split(target_BT, 0), split(grammar_BT, no_grammar))
  return map(join, jax.lax.map(chunk, arrays))


def _logits_at_once(vocabulary: int) -> int:
  """Returns the default number of tokens per device with logits at once."""
  return _whole_tiles(max(1, _LOGIT_BYTES // (4 * vocabulary)))


def _whole_tiles(tokens: int) -> int:
  """Rounds down to whole tiles; less than one tile is unchanged."""
  return tokens - tokens % _TILE if tokens > _TILE else tokens


def _chunks(length: int, most: int) -> tuple[int, int]:
  """Divides `length` into parts of at most `most` tokens, of whole tiles if possible.

  Returns:
    Their number, and the tokens of each; the last may have fewer.
  """
  most = _whole_tiles(most)
  chunks = -(-length // most)
  C = -(-length // chunks)
  if chunks > 1 and most >= _TILE:
    C += -C % _TILE
  return -(-length // C), C


def cross_entropy(
  cfg: ModelConfig, params: Any, batch: Batch, partitioner: Partitioner = ONE_DEVICE
) -> jax.Array:
  """Sums negative log-likelihoods of tokens, each by its weight.

  The same as `nll` of `token_logps`, and so computed on a mesh that splits parameters
  or tokens of a row. On one device, and if devices split only rows, logits are computed
  only for tokens with a weight, a few at a time, together with their gradients: prompts
  and observations cost nothing, no logits are kept for the backward pass and none are
  computed twice. This needs the weights beforehand; RL computes its weights from
  log-probs, so it has none.

  Source: gradients in the forward pass as in Liger Kernel (arXiv 2410.10989, 3.2).

  Args:
    cfg: the model; a chunk is `cfg.logit_chunk` tokens of every row. If 0, a quarter of
      a device's tokens, or half a gigabyte of logits if less.
    params: its parameters.
    batch: packed rows; a token's weight is its `loss_mask_BT`.
    partitioner: the mesh that all of this is split over.

  Returns:
    The sum, in nats.
  """
  # --- Split over more than rows, the head works as in token_logps.
  if max(map(partitioner.ways, "DTV")) > 1:
    logp_BT, *_ = token_logps(cfg, params, batch, partitioner=partitioner)
    return nll(logp_BT, batch.loss_mask_BT)

  # --- Hidden states, targets, and weights.
  model = Transformer(cfg, partitioner)
  hidden_BTD = _hidden(model, params, batch)
  output_DV = model.apply({"params": params}, method="output").astype(jnp.float32)
  # The next token, unless it begins a segment: that one is not predicted.
  weight_BT = batch.loss_mask_BT * (batch.position_BT > 0)
  target_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
  weight_BT = jnp.roll(weight_BT, -1, axis=1)

  # --- The loss of each device's rows.
  of_rows = functools.partial(_rows_cross_entropy, cfg)
  if partitioner.mesh.size > 1:
    # Each device sums over its own rows; one number of each is added up below.
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
  """The sum over one device's rows, [1]."""
  B, T, D = hidden_BTD.shape
  # At most a quarter: with few weighted tokens, whole chunks are skipped.
  few = min(-(-B * T // 4), _logits_at_once(cfg.vocab_size))
  chunk = min(B * T, B * _whole_tiles(cfg.logit_chunk) or few)
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
  """Sum over N of weight times -log softmax(hidden @ output) at target."""

  def add(total, hidden_CD, target_C, weight_C, place_C):
    del place_C  # of use to the gradient alone
    return total + _chunk_loss(hidden_CD, output_DV, target_C, weight_C, dtype)

  return _fold_weighted(add, jnp.float32(0), hidden_ND, target_N, weight_N, chunk)


def _cross_entropy_forward(hidden_ND, output_DV, target_N, weight_N, dtype, chunk):
  # The gradient for a cotangent of 1 is made with the value, chunk by chunk: so no
  # chunk's logits are made twice.
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
  # The forward pass made them for a cotangent of 1. Targets and weights have none.
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
    carry: its initial value.
    hidden_ND: final hidden states.
    target_N: their targets.
    weight_N: each prediction's weight.
    chunk: C.
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


def token_values(
  cfg: ModelConfig,
  params: Any,
  head_D1: jax.Array,
  batch: Batch,
  partitioner: Partitioner = ONE_DEVICE,
) -> jax.Array:
  """Computes a critic's value before each token of its segment.

  Args:
    cfg: the critic's trunk.
    params: the trunk's parameters.
    head_D1: from the final hidden state to a value.
    batch: packed rows.
    partitioner: the mesh that all of this is split over.

  Returns:
    value_BT, float32; a segment's first token has 0.
  """
  model = Transformer(cfg, partitioner)
  hidden_BTD = _hidden(model, params, batch)
  value_BT = (hidden_BTD.astype(jnp.float32) @ head_D1)[..., 0]
  value_BT = straight(value_BT, partitioner.ways("T"))
  # Place t has read token t: it has the value before token t + 1.
  return jnp.roll(value_BT, 1, axis=1) * (batch.position_BT > 0)


def nll(logp_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
  """Sums negative log-likelihoods over weighted tokens (nats)."""
  return -jnp.sum(weight_BT * logp_BT)

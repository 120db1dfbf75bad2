"""What losses are made of: log-probs and values of the tokens of packed batches.

Losses are sums over tokens; the caller divides by a denominator counted over the
*global* batch, so micro-batching, packing and padding can not change a loss. RL's is in
`policy_loss.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learner.batch import Batch
from coa_jax.model import distribution, transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import NO_TRUNCATION, TokenMask, Truncation
from coa_jax.model.sharding import Partitioner
from coa_jax.model.transformer import Transformer

# Of float32 logits; some 880 tokens of a vocabulary of 152,000, enough for any product.
_LOGIT_BYTES = 2**29


def token_logps(
  cfg: ModelConfig,
  params: Any,
  batch: Batch,
  temperature: float = 1.0,
  partitioner: Partitioner | None = None,
  truncation: Truncation = NO_TRUNCATION,
  constraint: TokenMask | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log p of every token given those before it in its segment, and what is known there.

  The vocabulary's axis exists for `cfg.logit_chunk` tokens of a row at once; the
  backward pass computes it again, unless those are all.

  Args:
    cfg: the model.
    params: its parameters.
    batch: packed rows.
    temperature: of the sampling distribution.
    partitioner: the mesh that all of this is split over.
    truncation: of the sampling distribution.
    constraint: the grammar that policy tokens were sampled under.

  Returns:
    logp_BT and entropy_BT (nats, float32), and removed_BT, the probability that the
    grammar took from other tokens; a segment's first token has 0 in all.
  """
  model = Transformer(cfg, partitioner)
  hidden_BTD, _ = model.apply(
    {"params": params}, batch.tokens_BT, batch.position_BT, batch.segment_BT
  )

  # Once for all chunks: on a mesh it is gathered here. As float32, in which the chunks'
  # gradients then add up.
  output_DV = model.apply({"params": params}, method="output").astype(jnp.float32)

  def head(
    hidden_BCD: jax.Array, target_BC: jax.Array, grammar_BC: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    logits_BCV = model.apply(
      {"params": params}, hidden_BCD, output_DV.astype(cfg.dtype), method="logits"
    )
    allowed_BCV = constraint.allowed(grammar_BC) if constraint else None
    removed_BC = distribution.removed_mass(logits_BCV, temperature, allowed_BCV)
    return *distribution.taken_log_probs(
      logits_BCV, target_BC, temperature, truncation, allowed_BCV
    ), removed_BC

  # What follows each token; the last of a row predicts nothing that is used.
  target_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
  grammar_BT = jnp.roll(batch.grammar_BT, -1, axis=1)
  T, pieces = target_BT.shape[1], partitioner.ways("T") if partitioner else 1
  rows = target_BT.shape[0] // (partitioner.ways("B") if partitioner else 1)
  own_V = cfg.vocab_size // (partitioner.ways("V") if partitioner else 1)
  most = cfg.logit_chunk or _logits_at_once(own_V) // rows
  chunks, C = _chunks(T // pieces, max(1, most))
  given = (hidden_BTD, target_BT, grammar_BT)
  if chunks == 1:
    out = head(*given)
  else:  # what a last chunk lacks has no grammar
    out = _map(head, given, (0, 0, -1), pieces, chunks, C)
  # What stands before a segment's first token is another segment's last.
  given_BT = batch.position_BT > 0
  logp_BT, entropy_BT, removed_BT = (jnp.roll(x, 1, axis=1) * given_BT for x in out)
  return logp_BT, entropy_BT, removed_BT


def cross_entropy(
  cfg: ModelConfig, params: Any, batch: Batch, partitioner: Partitioner | None = None
) -> jax.Array:
  """Sum of negative log-likelihoods of the tokens that count, each by its weight.

  The same as `nll` of `token_logps`, and so computed on a mesh that splits parameters
  or tokens of a row. On one device, and where devices split rows alone, logits are made
  for tokens with a weight alone, a few at a time, and at once their gradients: what a
  prompt or an observation would cost is saved, no logits are kept for the backward pass
  and none are made twice. That needs the weights beforehand, which RL, whose weights
  are made of log-probs, does not have.

  Source: gradients in the forward pass as in Liger Kernel (arXiv 2410.10989, 3.2).

  Args:
    cfg: the model; a piece is `cfg.logit_chunk` tokens of every row. Where that is 0 it
      is a quarter of a device's tokens, or what half a gigabyte holds if that is less.
    params: its parameters.
    batch: packed rows.
    partitioner: the mesh that all of this is split over.

  Returns:
    The sum, in nats.
  """
  if partitioner and any(partitioner.ways(letter) > 1 for letter in "DTV"):
    logp_BT, *_ = token_logps(cfg, params, batch, partitioner=partitioner)
    return nll(logp_BT, batch.weight_BT)
  model = Transformer(cfg, partitioner)
  hidden_BTD, _ = model.apply(
    {"params": params}, batch.tokens_BT, batch.position_BT, batch.segment_BT
  )
  output_DV = model.apply({"params": params}, method="output").astype(jnp.float32)
  # What follows each place, unless it begins a segment: nothing foretells that one.
  given_BT = batch.weight_BT * (batch.position_BT > 0)
  target_BT, weight_BT = (jnp.roll(x, -1, axis=1) for x in (batch.tokens_BT, given_BT))

  def of_rows(hidden_BTD, output_DV, target_BT, weight_BT) -> jax.Array:
    B, T, D = hidden_BTD.shape
    few = min(-(-B * T // 4), _logits_at_once(cfg.vocab_size))
    piece = min(B * T, B * cfg.logit_chunk or few)
    given = (
      hidden_BTD.reshape(B * T, D),
      output_DV,
      target_BT.ravel(),
      weight_BT.ravel(),
    )
    return _cross_entropy(*given, cfg.dtype, piece)[None]

  if partitioner:
    of_rows = jax.shard_map(
      of_rows,
      mesh=partitioner.mesh,
      in_specs=(*map(partitioner.spec, ("BT.", "..", "BT", "BT")),),
      out_specs=partitioner.spec("B"),
      check_vma=False,
    )
  return of_rows(hidden_BTD, output_DV, target_BT, weight_BT).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(
  hidden_ND: jax.Array,
  output_DV: jax.Array,
  target_N: jax.Array,
  weight_N: jax.Array,
  dtype: str,
  piece: int,
) -> jax.Array:
  """Sum over N of weight times -log softmax(hidden @ output) at target."""

  def add(total, hidden_CD, target_C, weight_C, _):
    return total + _piece(hidden_CD, output_DV, target_C, weight_C, dtype)

  given = hidden_ND, target_N, weight_N
  return _over_weighted(add, jnp.float32(0), given, piece)


def _cross_entropy_forward(hidden_ND, output_DV, target_N, weight_N, dtype, piece):
  def add(carry, hidden_CD, target_C, weight_C, place_C):
    total, d_hidden_ND, d_output_DV = carry
    value, (d_hidden_CD, d_piece_DV) = jax.value_and_grad(_piece, (0, 1))(
      hidden_CD, output_DV, target_C, weight_C, dtype
    )
    d_hidden_ND = d_hidden_ND.at[place_C].add(d_hidden_CD, mode="drop")
    return total + value, d_hidden_ND, d_output_DV + d_piece_DV

  start = jnp.float32(0), jnp.zeros_like(hidden_ND), jnp.zeros_like(output_DV)
  given = hidden_ND, target_N, weight_N
  total, d_hidden_ND, d_output_DV = _over_weighted(add, start, given, piece)
  return total, (d_hidden_ND, d_output_DV)


def _cross_entropy_backward(dtype, piece, kept, g):
  d_hidden_ND, d_output_DV = kept
  return d_hidden_ND * g.astype(d_hidden_ND.dtype), d_output_DV * g, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _piece(
  hidden_CD: jax.Array,
  output_DV: jax.Array,
  target_C: jax.Array,
  weight_C: jax.Array,
  dtype: str,
) -> jax.Array:
  logits_CV = transformer.project(hidden_CD, output_DV.astype(dtype)).astype(
    jnp.float32
  )
  return nll(distribution.taken_log_probs(logits_CV, target_C, 1.0)[0], weight_C)


def _over_weighted(add: Any, carry: Any, given: tuple[jax.Array, ...], piece: int):
  """Folds `add` over the places of N that have a weight, `piece` of them at a time.

  Args:
    add: (carry, hidden_CD, target_C, weight_C, place_C) to the next carry; what the
      last piece lacks has weight 0 and a place past the end.
    carry: what it starts from.
    given: hidden_ND, target_N and weight_N.
    piece: C.
  """
  weight_N = given[-1]
  N = weight_N.shape[0]
  counts_N = weight_N != 0
  order_N = jnp.argsort(~counts_N, stable=True)
  order_N = jnp.where(jnp.arange(N) < counts_N.sum(), order_N, N)
  order_N = jnp.pad(order_N, (0, -N % piece), constant_values=N)

  def body(c, carry):
    place_C = jax.lax.dynamic_slice_in_dim(order_N, c * piece, piece)
    parts = (x.at[place_C].get(mode="fill", fill_value=0) for x in given)
    return add(carry, *parts, place_C)

  return jax.lax.fori_loop(0, -(-counts_N.sum() // piece), body, carry)


def _map(
  head: Any,
  given: tuple[jax.Array, ...],
  fills: tuple[int, ...],
  pieces: int,
  chunks: int,
  C: int,
) -> Any:
  """`head` of C tokens of every device's piece of a row at a time.

  Args:
    head: from arrays [B, T', ...] to several of [B, T'].
    given: the arrays [B, T, ...].
    fills: for each of them, what stands where the last chunk lacks tokens.
    pieces: devices that split a row.
    chunks: of each device's piece.
    C: tokens of each chunk.
  """
  B, T = given[0].shape[:2]
  own = T // pieces

  def split(x: jax.Array, fill: int) -> jax.Array:
    """[B, T, ...] to [chunks, B, pieces * C, ...]."""
    x = x.reshape(B, pieces, own, *x.shape[2:])
    lacks = [(0, 0)] * x.ndim
    lacks[2] = (0, chunks * C - own)
    x = jnp.pad(x, lacks, constant_values=fill)
    x = jnp.moveaxis(x.reshape(B, pieces, chunks, C, *x.shape[3:]), 2, 0)
    return x.reshape(chunks, B, pieces * C, *x.shape[4:])

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x.reshape(chunks, B, pieces, C), 0, 2)
    return x.reshape(B, pieces, chunks * C)[:, :, :own].reshape(B, T)

  again = jax.checkpoint(head, prevent_cse=False)
  parts = jax.lax.map(lambda x: again(*x), tuple(map(split, given, fills)))
  return map(join, parts)


def _logits_at_once(vocabulary: int) -> int:
  """Of how many tokens a device holds the logits, where nobody says."""
  return max(1, _LOGIT_BYTES // (4 * vocabulary))


def _chunks(length: int, most: int) -> tuple[int, int]:
  """How many parts of at most `most` tokens hold `length`.

  Returns:
    The fewest there can be, and the tokens of each; the last may lack some.
  """
  chunks = -(-length // most)
  return chunks, -(-length // chunks)


def token_values(
  cfg: ModelConfig,
  params: Any,
  head_D1: jax.Array,
  batch: Batch,
  partitioner: Partitioner | None = None,
) -> jax.Array:
  """A critic's value of what stands before each token of its segment.

  Args:
    cfg: the critic's trunk.
    params: the trunk's parameters.
    head_D1: from the final hidden state to a value.
    batch: packed rows.
    partitioner: the mesh that all of this is split over.

  Returns:
    value_BT, float32; a segment's first token has 0.
  """
  hidden_BTD, _ = Transformer(cfg, partitioner).apply(
    {"params": params}, batch.tokens_BT, batch.position_BT, batch.segment_BT
  )
  value_BT = (hidden_BTD.astype(jnp.float32) @ head_D1)[..., 0]
  return jnp.roll(value_BT, 1, axis=1) * (batch.position_BT > 0)


def nll(logp_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
  """Sum of negative log-likelihoods over weighted tokens (nats)."""
  return -jnp.sum(weight_BT * logp_BT)

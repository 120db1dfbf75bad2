"""Attention over long packed rows block by block, in plain XLA.

Scores exist for one block of queries and one of keys at a time, forward and backward,
and blocks that hold none of the queries' segments are never visited: the work is that
of the segments, not of the row. For platforms that have no such kernel of their own.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_MASKED = -1e30


class _Blocks(NamedTuple):
  """Keys' side of a row, and which blocks of keys each block of queries visits.

  Attributes:
    segment_nBU: of the queries.
    segment_mBU: of the keys.
    first_n: the first block of keys to visit.
    end_n: the block after the last.
  """

  segment_nBU: jax.Array
  segment_mBU: jax.Array
  first_n: jax.Array
  end_n: jax.Array


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  window: int,
  name: str,
  block: int = 64,
) -> jax.Array:
  """Causal attention inside segments; the queries are the last T of S places.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    segment_BS: int segment number of each place; a segment's places stand together.
    window: places that a query sees, its own included; 0 for all.
    name: under which a checkpoint policy may keep what the backward pass needs.
    block: U, queries and keys that meet at once.

  Returns:
    out_BTNH in q's dtype.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  U, before = block, S - T
  # Places after the end are segments of their own, which nothing else reads.
  q_BTNH = jnp.pad(q_BTNH * H**-0.5, ((0, 0), (0, -T % U), (0, 0), (0, 0)))
  n = q_BTNH.shape[1] // U
  m = -(-(before + n * U) // U)
  segment_BS = jnp.pad(
    segment_BS, ((0, 0), (0, m * U - S)), constant_values=jnp.iinfo("int32").max
  )

  def keys(x_BSKH: jax.Array) -> jax.Array:
    x = jnp.pad(x_BSKH, ((0, 0), (0, m * U - S), (0, 0), (0, 0)))
    return x.reshape(B, m, U, K, H).transpose(1, 0, 3, 4, 2)  # mBKHU

  first_BS = _starts(segment_BS, window)
  blocks = _Blocks(
    _split(segment_BS[:, before : before + n * U], U),
    _split(segment_BS, U),
    _split(first_BS[:, before : before + n * U], U).min((1, 2)) // U,
    (before + (jnp.arange(n) + 1) * U - 1) // U + 1,
  )
  q = q_BTNH.reshape(B, n, U, K, N // K, H).transpose(1, 0, 3, 4, 2, 5)
  q_nBKRH = q.reshape(n, B, K, -1, H)  # R: the rows of a kv head's query heads
  out_nBKRH = _attend(q_nBKRH, keys(k_BSKH), keys(v_BSKH), blocks, before, window, name)
  out = out_nBKRH.reshape(n, B, K, N // K, U, H).transpose(1, 0, 4, 2, 3, 5)
  return out.reshape(B, n * U, N, H)[:, :T]


def _split(x_BS: jax.Array, U: int) -> jax.Array:
  """[B, S] to [S / U, B, U]."""
  return x_BS.reshape(x_BS.shape[0], -1, U).swapaxes(0, 1)


def _starts(segment_BS: jax.Array, window: int) -> jax.Array:
  """The first place that each place may see."""
  place_S = jnp.arange(segment_BS.shape[1])
  new_BS = segment_BS != jnp.roll(segment_BS, 1, axis=1)
  start_BS = jax.lax.cummax(jnp.where(new_BS, place_S, 0), axis=1)
  return jnp.maximum(start_BS, place_S - window + 1) if window else start_BS


def _score(
  q_BKRH: jax.Array,
  k_BKHU: jax.Array,
  blocks: _Blocks,
  i: jax.Array,
  j: jax.Array,
  before: int,
  window: int,
) -> jax.Array:
  """score_BKRU in float32, masked, of queries i and keys j."""
  (B, K, R, _), U = q_BKRH.shape, k_BKHU.shape[-1]
  place_Q = before + i * U + jnp.arange(U)[:, None]
  place_U = j * U + jnp.arange(U)
  seen_QU = place_U <= place_Q
  if window:
    seen_QU &= place_U > place_Q - window
  same = blocks.segment_nBU[i][:, :, None] == blocks.segment_mBU[j][:, None]
  score = jnp.einsum(
    "BKRH,BKHU->BKRU", q_BKRH, k_BKHU, preferred_element_type=jnp.float32
  )
  by_head = score.reshape(B, K, R // U, U, U)
  return jnp.where((same & seen_QU)[:, None, None], by_head, _MASKED).reshape(
    score.shape
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q, k, v, blocks: _Blocks, before: int, window: int, name: str) -> Any:
  return _forward(q, k, v, blocks, before, window)[0]


def _forward(q, k, v, blocks: _Blocks, before: int, window: int) -> Any:
  """out_nBKRH, and the logarithm of each row's sum of exponentials."""

  def queries(i: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_BKRH = q[i]

    def visit(j, carry):
      most_BKR, total_BKR, out_BKRH = carry
      s_BKRU = _score(q_BKRH, k[j], blocks, i, j, before, window)
      new_BKR = jnp.maximum(most_BKR, s_BKRU.max(-1))
      p_BKRU = jnp.exp(s_BKRU - new_BKR[..., None])
      kept_BKR = jnp.exp(most_BKR - new_BKR)
      more_BKRH = jnp.einsum(
        "BKRU,BKHU->BKRH",
        p_BKRU.astype(v.dtype),
        v[j],
        preferred_element_type=jnp.float32,
      )
      total_BKR = total_BKR * kept_BKR + p_BKRU.sum(-1)
      return new_BKR, total_BKR, out_BKRH * kept_BKR[..., None] + more_BKRH

    rows = q_BKRH.shape[:-1]
    start = jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros(q_BKRH.shape)
    bounds = blocks.first_n[i], blocks.end_n[i]
    most_BKR, total_BKR, out_BKRH = jax.lax.fori_loop(*bounds, visit, start)
    out_BKRH = (out_BKRH / total_BKR[..., None]).astype(q.dtype)
    return out_BKRH, most_BKR + jnp.log(total_BKR)

  return jax.lax.map(queries, jnp.arange(q.shape[0]))


def _forward_rule(q, k, v, blocks, before, window, name):
  out, lse = _forward(q, k, v, blocks, before, window)
  out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
  return out, (q, k, v, blocks, out, lse)


def _backward_rule(before, window, name, kept, d_out):
  q, k, v, blocks, out, lse = kept
  delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

  def queries(carry, i):
    q_BKRH, do_BKRH = q[i], d_out[i]

    def visit(j, carry):
      dq_BKRH, dk, dv = carry
      s_BKRU = _score(q_BKRH, k[j], blocks, i, j, before, window)
      p_BKRU = jnp.exp(s_BKRU - lse[i][..., None])
      dp_BKRU = jnp.einsum(
        "BKRH,BKHU->BKRU", do_BKRH, v[j], preferred_element_type=jnp.float32
      )
      ds_BKRU = (p_BKRU * (dp_BKRU - delta[i][..., None])).astype(q.dtype)
      # Positions last in both: products along contiguous memory, three times faster
      # on a CPU than with the keys' and values' other layout.
      dv_BKHU = jnp.einsum("BKRH,BKRU->BKHU", do_BKRH, p_BKRU.astype(q.dtype))
      dk_BKHU = jnp.einsum("BKRH,BKRU->BKHU", q_BKRH, ds_BKRU)
      dq_BKRH += jnp.einsum("BKRU,BKHU->BKRH", ds_BKRU, k[j])
      return dq_BKRH, dk.at[j].add(dk_BKHU), dv.at[j].add(dv_BKHU)

    start = (jnp.zeros(q_BKRH.shape, jnp.float32), *carry)
    bounds = blocks.first_n[i], blocks.end_n[i]
    dq_BKRH, *carry = jax.lax.fori_loop(*bounds, visit, start)
    return tuple(carry), dq_BKRH.astype(q.dtype)

  # Sums over blocks of queries, in float32.
  zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  (dk, dv), dq = jax.lax.scan(queries, zeros, jnp.arange(q.shape[0]))
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward_rule, _backward_rule)

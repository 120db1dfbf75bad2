"""Blockwise attention over long packed rows, in plain XLA.

Forward and backward, only a few query blocks have scores at a time, each against one
key block. Key blocks without the queries' segments are skipped, so the cost depends on
segment lengths, not on row lengths. For platforms without a flash kernel.

Query blocks with similar numbers of key blocks are grouped across rows, and walk back
through their keys together. So no row waits for another row's longer segments, and
operations are larger with little waste.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The attention output's name for checkpoint policies, in all kernels.
OUT = "attention_out"
# Query blocks per operation.
_TOGETHER = 4
# Finite, so that a fully masked row of scores gives no NaN.
_MASKED = -1e30


class _Plan(NamedTuple):
  """Groups of query blocks: g groups of C blocks each, the busiest first.

  All rows together have M query blocks and J key blocks of U places.

  Attributes:
    segment_MU: the queries' segments.
    segment_JU: the keys' segments.
    newest_M: each query block's last visible key block.
    block_gC: each group's query blocks; block 0 pads the last group.
    visits_gC: number of key blocks to visit, from the newest back; 0 for padding.
    place_M: each query block's index among all groups' blocks.
  """

  segment_MU: jax.Array
  segment_JU: jax.Array
  newest_M: jax.Array
  block_gC: jax.Array
  visits_gC: jax.Array
  place_M: jax.Array


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  block: int = 0,
) -> jax.Array:
  """Attends causally inside segments; the queries are the last T of S places.

  Args:
    segment_BS: int segment number per place; a segment's places are contiguous.
    block: U, queries and keys per block; 0 for 64 on a CPU, where small blocks stay in
      its cache, else 512.
  """
  # --- Sizes: n query blocks and m key blocks per row.
  B, T, N, H = q_BTNH.shape
  _, S, K, _ = k_BSKH.shape
  U = block or (64 if jax.default_backend() == "cpu" else 512)
  before = S - T
  n = -(-T // U)
  near = _near(before, U)
  m = near + n

  # --- Rows padded to whole blocks.
  q_BTNH = jnp.pad(q_BTNH * H**-0.5, ((0, 0), (0, n * U - T), (0, 0), (0, 0)))
  # Padding is a segment of its own, which other segments do not read.
  segment_BS = jnp.pad(
    segment_BS, ((0, 0), (0, m * U - S)), constant_values=jnp.iinfo("int32").max
  )

  # --- Each query block's range of key blocks, and its group.
  of_queries = slice(before, before + n * U)
  first_Bn = starts(segment_BS)[:, of_queries].reshape(B, n, U).min(2) // U
  newest_Bn = near + jnp.arange(n) + jnp.zeros_like(first_Bn)
  plan = _group(
    segment_MU=segment_BS[:, of_queries].reshape(B * n, U),
    segment_JU=segment_BS.reshape(B * m, U),
    newest_M=(newest_Bn + m * jnp.arange(B)[:, None]).ravel(),
    visits_M=(newest_Bn - first_Bn + 1).ravel(),
    C=min(_TOGETHER, B * n),
  )

  # --- All rows' blocks on one axis; R = G U: a kv head's query rows.
  def key_blocks(x_BSKH: jax.Array) -> jax.Array:
    x = jnp.pad(x_BSKH, ((0, 0), (0, m * U - S), (0, 0), (0, 0)))
    return x.reshape(B * m, U, K, H).transpose(0, 2, 3, 1)  # JKHU

  q = q_BTNH.reshape(B * n, U, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q_MKRH = q.reshape(B * n, K, -1, H)
  k_JKHU = key_blocks(k_BSKH)
  v_JKHU = key_blocks(v_BSKH)
  out = _attend(q_MKRH, k_JKHU, v_JKHU, plan, before)

  # --- Back to rows.
  out = out.reshape(B * n, K, N // K, U, H).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, n * U, N, H)[:, :T]


def _near(before: int, U: int) -> int:
  """Returns the key block of the first query block's last place."""
  return (before + U - 1) // U


def starts(segment_BS: jax.Array) -> jax.Array:
  """Returns each place's first visible place, int [B, S]; segments are contiguous."""
  place_S = jnp.arange(segment_BS.shape[1])
  new_BS = segment_BS != jnp.roll(segment_BS, 1, axis=1)
  # The last segment start at or before each place.
  return jax.lax.cummax(jnp.where(new_BS, place_S, 0), axis=1)


def _group(
  segment_MU: jax.Array,
  segment_JU: jax.Array,
  newest_M: jax.Array,
  visits_M: jax.Array,
  C: int,
) -> _Plan:
  """Groups blocks with similar numbers of visits."""
  order_M = jnp.argsort(-visits_M, stable=True)
  # Block 0 pads the last group, and makes no visits there.
  lacking = -len(order_M) % C
  return _Plan(
    segment_MU=segment_MU,
    segment_JU=segment_JU,
    newest_M=newest_M,
    block_gC=jnp.pad(order_M, (0, lacking)).reshape(-1, C),
    visits_gC=jnp.pad(visits_M[order_M], (0, lacking)).reshape(-1, C),
    place_M=jnp.argsort(order_M),
  )


def _take(x: jax.Array, at_C: jax.Array) -> jax.Array:
  """Returns x[at_C], by slices, which a CPU copies faster than it gathers."""
  return jnp.stack([x[i] for i in at_C])


def _add(total: jax.Array, more: jax.Array, at_C: jax.Array) -> jax.Array:
  for i, x in zip(at_C, more, strict=True):
    total = total.at[i].add(x)
  return total


def _score(
  q_CKRH: jax.Array,
  k_CKHU: jax.Array,
  same_CUU: jax.Array,
  apart: jax.Array,
) -> jax.Array:
  """Returns the masked score_CKRU in float32.

  Args:
    same_CUU: whether query and key share a segment.
    apart: places from a block's first key to its first query.
  """
  # --- The causal mask, by distance.
  U = k_CKHU.shape[-1]
  back_UU = apart + jnp.arange(U)[:, None] - jnp.arange(U)
  seen_UU = back_UU >= 0

  # --- One product, masked alike for all G query heads: R = G U.
  score = jnp.einsum(
    "CKRH,CKHU->CKRU", q_CKRH, k_CKHU, preferred_element_type=jnp.float32
  )
  by_head = score.reshape(*score.shape[:2], -1, U, U)
  return jnp.where((same_CUU & seen_UU)[:, None, None], by_head, _MASKED).reshape(
    score.shape
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
  q_MKRH: jax.Array,
  k_JKHU: jax.Array,
  v_JKHU: jax.Array,
  plan: _Plan,
  before: int,
) -> jax.Array:
  """Returns out_MKRH: each query block attends to its visible key blocks."""
  return _forward(q_MKRH, k_JKHU, v_JKHU, plan, before)[0]


def _meeting(
  k_JKHU: jax.Array,
  v_JKHU: jax.Array,
  plan: _Plan,
  before: int,
  g: jax.Array,
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
  """Makes group g's function (queries, blocks back) -> (at_C, keys, values, scores)."""
  U = k_JKHU.shape[-1]
  block_C = plan.block_gC[g]
  segment_CU = _take(plan.segment_MU, block_C)
  newest_C = _take(plan.newest_M, block_C)

  def meet(q_CKRH: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
    seen_C = back < plan.visits_gC[g]
    # A finished query block stays at its newest key block, and sees nothing there.
    at_C = newest_C - jnp.where(seen_C, back, 0)
    k_CKHU = _take(k_JKHU, at_C)
    v_CKHU = _take(v_JKHU, at_C)
    same_CUU = segment_CU[:, :, None] == _take(plan.segment_JU, at_C)[:, None]
    same_CUU &= seen_C[:, None, None]
    apart = before - (_near(before, U) - back) * U
    return at_C, k_CKHU, v_CKHU, _score(q_CKRH, k_CKHU, same_CUU, apart)

  return meet


def _forward(
  q_MKRH: jax.Array,
  k_JKHU: jax.Array,
  v_JKHU: jax.Array,
  plan: _Plan,
  before: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_MKRH, and lse_MKR: each query row's log-sum-exp of scores."""

  def queries(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_CKRH = _take(q_MKRH, plan.block_gC[g])
    meet = _meeting(k_JKHU, v_JKHU, plan, before, g)

    # The softmax so far: maximum, sum, and weighted values.
    def visit(back, carry):
      max_CKR, sum_CKR, out_CKRH = carry
      _, _, v_CKHU, s_CKRU = meet(q_CKRH, back)
      # Older sums are rescaled to the new maximum.
      new_max_CKR = jnp.maximum(max_CKR, s_CKRU.max(-1))
      p_CKRU = jnp.exp(s_CKRU - new_max_CKR[..., None])
      rescale_CKR = jnp.exp(max_CKR - new_max_CKR)
      more_CKRH = jnp.einsum(
        "CKRU,CKHU->CKRH",
        p_CKRU.astype(v_JKHU.dtype),
        v_CKHU,
        preferred_element_type=jnp.float32,
      )
      sum_CKR = sum_CKR * rescale_CKR + p_CKRU.sum(-1)
      return new_max_CKR, sum_CKR, out_CKRH * rescale_CKR[..., None] + more_CKRH

    CKR = q_CKRH.shape[:-1]
    start = (jnp.full(CKR, _MASKED), jnp.zeros(CKR), jnp.zeros(q_CKRH.shape))
    end = jax.lax.fori_loop(0, plan.visits_gC[g, 0], visit, start)
    max_CKR, sum_CKR, out_CKRH = end
    out_CKRH = (out_CKRH / sum_CKR[..., None]).astype(q_MKRH.dtype)
    return out_CKRH, max_CKR + jnp.log(sum_CKR)

  return _in_place(jax.lax.map(queries, jnp.arange(len(plan.visits_gC))), plan)


def _in_place(grouped: Any, plan: _Plan) -> Any:
  """Reorders [groups, C, ...] to [M, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[plan.place_M], grouped)


def _forward_rule(q_MKRH, k_JKHU, v_JKHU, plan, before):
  out_MKRH, lse_MKR = _forward(q_MKRH, k_JKHU, v_JKHU, plan, before)
  # A checkpoint policy may keep this name, so that the forward pass runs only once.
  out_MKRH = checkpoint_name(out_MKRH, OUT)
  lse_MKR = checkpoint_name(lse_MKR, OUT)
  return out_MKRH, (q_MKRH, k_JKHU, v_JKHU, plan, out_MKRH, lse_MKR)


def _backward_rule(before, residuals, d_out_MKRH):
  q_MKRH, k_JKHU, v_JKHU, plan, out_MKRH, lse_MKR = residuals
  # The softmax normalization's term in each row's gradient (D in the paper).
  delta_MKR = jnp.sum(
    out_MKRH.astype(jnp.float32) * d_out_MKRH.astype(jnp.float32), axis=-1
  )

  def queries(carry, g):
    # --- A group's queries, and their results from the forward pass.
    block_C = plan.block_gC[g]
    q_CKRH = _take(q_MKRH, block_C)
    do_CKRH = _take(d_out_MKRH, block_C)
    lse_CKR = _take(lse_MKR, block_C)
    delta_CKR = _take(delta_MKR, block_C)
    # Rows last, transposed once for all visits: otherwise the products are slower.
    q_CKHR = q_CKRH.swapaxes(2, 3)
    do_CKHR = do_CKRH.swapaxes(2, 3)
    meet = _meeting(k_JKHU, v_JKHU, plan, before, g)

    # --- Their gradients, and their share of the keys' and values' gradients.
    def visit(back, carry):
      dq_CKRH, dk_JKHU, dv_JKHU = carry
      # The probabilities again, from scores and the forward pass's log-sum-exp.
      at_C, k_CKHU, v_CKHU, s_CKRU = meet(q_CKRH, back)
      p_CKRU = jnp.exp(s_CKRU - lse_CKR[..., None])
      dp_CKRU = jnp.einsum(
        "CKRH,CKHU->CKRU", do_CKRH, v_CKHU, preferred_element_type=jnp.float32
      )
      ds_CKRU = (p_CKRU * (dp_CKRU - delta_CKR[..., None])).astype(q_MKRH.dtype)
      dv_CKHU = jnp.einsum("CKHR,CKRU->CKHU", do_CKHR, p_CKRU.astype(q_MKRH.dtype))
      dk_CKHU = jnp.einsum("CKHR,CKRU->CKHU", q_CKHR, ds_CKRU)
      dq_CKRH += jnp.einsum("CKRU,CKHU->CKRH", ds_CKRU, k_CKHU)
      dk_JKHU = _add(dk_JKHU, dk_CKHU, at_C)
      dv_JKHU = _add(dv_JKHU, dv_CKHU, at_C)
      return dq_CKRH, dk_JKHU, dv_JKHU

    dk_JKHU, dv_JKHU = carry
    start = (jnp.zeros(q_CKRH.shape, jnp.float32), dk_JKHU, dv_JKHU)
    dq_CKRH, dk_JKHU, dv_JKHU = jax.lax.fori_loop(0, plan.visits_gC[g, 0], visit, start)
    return (dk_JKHU, dv_JKHU), dq_CKRH.astype(q_MKRH.dtype)

  # Sums over query blocks, in float32.
  start = (jnp.zeros(k_JKHU.shape, jnp.float32), jnp.zeros(v_JKHU.shape, jnp.float32))
  groups = jnp.arange(len(plan.visits_gC))
  (dk_JKHU, dv_JKHU), dq = jax.lax.scan(queries, start, groups)
  dq_MKRH = _in_place(dq, plan)
  dk_JKHU = dk_JKHU.astype(k_JKHU.dtype)
  dv_JKHU = dv_JKHU.astype(v_JKHU.dtype)
  return dq_MKRH, dk_JKHU, dv_JKHU, None


_attend.defvjp(_forward_rule, _backward_rule)

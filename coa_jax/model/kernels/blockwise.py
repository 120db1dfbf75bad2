"""Attention over long packed rows block by block, in plain XLA.

Scores exist for a few blocks of queries at a time, each against one block of keys,
forward and backward, and blocks without the queries' segments are not visited: the cost
follows the segments, not the rows. For platforms without their own flash kernel.

Blocks of queries with equally many blocks of keys are grouped across rows, and walk
back through their keys in step: no row waits for another's longer segments, and
operations are larger with little waste.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.

budget: one kernel, forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Finite, so that a fully masked row of scores has no NaN.
_MASKED = -1e30


class _Plan(NamedTuple):
  """Groups of blocks: g groups of C blocks of queries, the busiest first.

  M counts the blocks of queries of all rows, J their blocks of keys; U places each.

  Attributes:
    segment_MU: the queries' segments.
    segment_JU: the keys' segments.
    newest_M: the last block of keys seen by a block of queries.
    block_gC: a group's blocks; block 0 again pads the last group.
    visits_gC: blocks of keys to visit, from the newest back; 0 for padding.
    place_M: each block's index among all groups' blocks.
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
  name: str,
  block: int = 64,
  together: int = 4,
) -> jax.Array:
  """Attends causally inside segments; the queries are the last T of S places.

  budget: the arguments' shapes are most of it.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    segment_BS: int segment number of each place; a segment's places stand together.
    name: the backward pass's inputs for checkpoint policies.
    block: U, queries and keys per block.
    together: C, blocks of queries per operation.

  Returns:
    out_BTNH in q's dtype.
  """
  # --- Sizes: n blocks of queries and m blocks of keys in a row.
  B, T, N, H = q_BTNH.shape
  _, S, K, _ = k_BSKH.shape
  U = block
  before = S - T
  n = -(-T // U)
  near = _near(before, U)
  m = near + n

  # --- Rows filled up to whole blocks.
  q_BTNH = jnp.pad(q_BTNH * H**-0.5, ((0, 0), (0, n * U - T), (0, 0), (0, 0)))
  # Places after the end are separate segments, not read by others.
  segment_BS = jnp.pad(
    segment_BS, ((0, 0), (0, m * U - S)), constant_values=jnp.iinfo("int32").max
  )

  # --- Each block's range of key blocks, and its group.
  of_queries = slice(before, before + n * U)
  first_Bn = starts(segment_BS)[:, of_queries].reshape(B, n, U).min(2) // U
  newest_Bn = near + jnp.arange(n) + jnp.zeros_like(first_Bn)
  plan = _group(
    segment_MU=segment_BS[:, of_queries].reshape(B * n, U),
    segment_JU=segment_BS.reshape(B * m, U),
    newest_M=(newest_Bn + m * jnp.arange(B)[:, None]).ravel(),
    visits_M=(newest_Bn - first_Bn + 1).ravel(),
    C=min(together, B * n),
  )

  # --- Blocks of all rows in one axis; R: the rows of a kv head's query heads.
  def key_blocks(x_BSKH: jax.Array) -> jax.Array:
    x = jnp.pad(x_BSKH, ((0, 0), (0, m * U - S), (0, 0), (0, 0)))
    return x.reshape(B * m, U, K, H).transpose(0, 2, 3, 1)  # JKHU

  q = q_BTNH.reshape(B * n, U, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q_MKRH = q.reshape(B * n, K, -1, H)
  k_JKHU = key_blocks(k_BSKH)
  v_JKHU = key_blocks(v_BSKH)
  out = _attend(q_MKRH, k_JKHU, v_JKHU, plan, before, name)

  # --- Back to rows.
  out = out.reshape(B * n, K, N // K, U, H).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, n * U, N, H)[:, :T]


def _near(before: int, U: int) -> int:
  """Returns the key block of the first query block's last place."""
  return (before + U - 1) // U


def starts(segment_BS: jax.Array) -> jax.Array:
  """Returns the first place seen by each place, int [B, S].

  Args:
    segment_BS: segment number of each place; a segment's places stand together.
  """
  place_S = jnp.arange(segment_BS.shape[1])
  new_BS = segment_BS != jnp.roll(segment_BS, 1, axis=1)
  # The last segment start up to each place.
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
  """x[at_C]; as slices, which a CPU copies faster than it gathers."""
  return jnp.stack([x[i] for i in at_C])


def _add(total: jax.Array, more: jax.Array, at_C: jax.Array) -> jax.Array:
  """total, and `more` added at at_C."""
  for i, x in zip(at_C, more, strict=True):
    total = total.at[i].add(x)
  return total


def _score(
  q_CKRH: jax.Array,
  k_CKHU: jax.Array,
  same_CUU: jax.Array,
  apart: jax.Array,
) -> jax.Array:
  """score_CKRU in float32, masked.

  Args:
    q_CKRH: queries.
    k_CKHU: their keys.
    same_CUU: whether query and key share a segment.
    apart: places from a block's first key to its first query.
  """
  # --- The mask, by distance.
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
  q_MKRH: jax.Array,
  k_JKHU: jax.Array,
  v_JKHU: jax.Array,
  plan: _Plan,
  before: int,
  name: str,
) -> jax.Array:
  """out_MKRH: every block of queries over its visible blocks of keys."""
  return _forward(q_MKRH, k_JKHU, v_JKHU, plan, before)[0]


def _meeting(
  k_JKHU: jax.Array,
  v_JKHU: jax.Array,
  plan: _Plan,
  before: int,
  g: jax.Array,
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
  """Of group g: (queries, how far back) to at_C, keys and values there, scores."""
  U = k_JKHU.shape[-1]
  block_C = plan.block_gC[g]
  segment_CU = _take(plan.segment_MU, block_C)
  newest_C = _take(plan.newest_M, block_C)

  def meet(q_CKRH: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
    seen_C = back < plan.visits_gC[g]
    # A finished block stays at its newest block, and sees nothing there.
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
  """out_MKRH, and lse_MKR: the logarithm of each row's sum of exponentials."""

  def queries(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_CKRH = _take(q_MKRH, plan.block_gC[g])
    meet = _meeting(k_JKHU, v_JKHU, plan, before, g)

    # The softmax so far: its maximum, its sum, and the values under both.
    def visit(back, carry):
      max_CKR, sum_CKR, out_CKRH = carry
      _, _, v_CKHU, s_CKRU = meet(q_CKRH, back)
      # A larger maximum than before: older sums are rescaled.
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
  """[groups, C, ...] to [M, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[plan.place_M], grouped)


def _forward_rule(q_MKRH, k_JKHU, v_JKHU, plan, before, name):
  out_MKRH, lse_MKR = _forward(q_MKRH, k_JKHU, v_JKHU, plan, before)
  # Under this name a checkpoint policy keeps them, and the forward pass runs once.
  out_MKRH = checkpoint_name(out_MKRH, name)
  lse_MKR = checkpoint_name(lse_MKR, name)
  return out_MKRH, (q_MKRH, k_JKHU, v_JKHU, plan, out_MKRH, lse_MKR)


def _backward_rule(before, name, residuals, d_out_MKRH):
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
    # Rows last, once for all visits: else these products would be slower ones.
    q_CKHR = q_CKRH.swapaxes(2, 3)
    do_CKHR = do_CKRH.swapaxes(2, 3)
    meet = _meeting(k_JKHU, v_JKHU, plan, before, g)

    # --- Their gradient, and their share of the keys' and values' gradients.
    def visit(back, carry):
      dq_CKRH, dk_JKHU, dv_JKHU = carry
      # Probabilities again, from the scores and the forward pass's sums.
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

  # Sums over blocks of queries, in float32.
  start = (jnp.zeros(k_JKHU.shape, jnp.float32), jnp.zeros(v_JKHU.shape, jnp.float32))
  groups = jnp.arange(len(plan.visits_gC))
  (dk_JKHU, dv_JKHU), dq = jax.lax.scan(queries, start, groups)
  dq_MKRH = _in_place(dq, plan)
  dk_JKHU = dk_JKHU.astype(k_JKHU.dtype)
  dv_JKHU = dv_JKHU.astype(v_JKHU.dtype)
  return dq_MKRH, dk_JKHU, dv_JKHU, None


_attend.defvjp(_forward_rule, _backward_rule)

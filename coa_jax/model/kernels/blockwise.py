"""Attention over long packed rows block by block, in plain XLA.

Scores exist for a few blocks of queries at a time, each against one block of keys,
forward and backward, and blocks that hold none of the queries' segments are not
visited: the work is that of the segments, not of the rows. For platforms that have no
such kernel of their own.

Blocks of queries that see as many blocks of keys go together, of whatever row they are,
and go back through their keys in step: no row waits for another's longer segments, and
operations are larger at little work in vain.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_MASKED = -1e30


class _Plan(NamedTuple):
  """Which blocks go together: g groups of C blocks of queries, the busiest first.

  Attributes:
    segment_MU: of the queries.
    segment_JU: of the keys.
    newest_M: the last block of keys that a block of queries sees.
    asking_gC: the blocks of a group; block 0 again in place of those that the last
      group lacks.
    visits_gC: blocks of keys to visit, from the newest back; 0 for who is there again.
    place_M: of each block among those of all groups.
  """

  segment_MU: jax.Array
  segment_JU: jax.Array
  newest_M: jax.Array
  asking_gC: jax.Array
  visits_gC: jax.Array
  place_M: jax.Array


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  window: int,
  name: str,
  block: int = 64,
  together: int = 4,
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
    together: C, blocks of queries of an operation.

  Returns:
    out_BTNH in q's dtype.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  U, before = block, S - T
  n = -(-T // U)
  near = _near(before, U)
  m = near + n
  q_BTNH = jnp.pad(q_BTNH * H**-0.5, ((0, 0), (0, n * U - T), (0, 0), (0, 0)))
  # Places after the end are segments of their own, which nothing else reads.
  segment_BS = jnp.pad(
    segment_BS, ((0, 0), (0, m * U - S)), constant_values=jnp.iinfo("int32").max
  )
  # M: all rows' blocks of queries; J: of keys.
  of_queries = slice(before, before + n * U)
  first_Bn = _starts(segment_BS, window)[:, of_queries].reshape(B, n, U).min(2) // U
  newest_Bn = near + jnp.arange(n) + jnp.zeros_like(first_Bn)
  plan = _group(
    segment_BS[:, of_queries].reshape(B * n, U),
    segment_BS.reshape(B * m, U),
    (newest_Bn + m * jnp.arange(B)[:, None]).ravel(),
    (newest_Bn - first_Bn + 1).ravel(),
    min(together, B * n),
  )

  def keys(x_BSKH: jax.Array) -> jax.Array:
    x = jnp.pad(x_BSKH, ((0, 0), (0, m * U - S), (0, 0), (0, 0)))
    return x.reshape(B * m, U, K, H).transpose(0, 2, 3, 1)  # JKHU

  q = q_BTNH.reshape(B * n, U, K, N // K, H).transpose(0, 2, 3, 1, 4)
  q_MKRH = q.reshape(B * n, K, -1, H)  # R: the rows of a kv head's query heads
  out = _attend(q_MKRH, keys(k_BSKH), keys(v_BSKH), plan, before, window, name)
  out = out.reshape(B * n, K, N // K, U, H).transpose(0, 3, 1, 2, 4)
  return out.reshape(B, n * U, N, H)[:, :T]


def _near(before: int, U: int) -> int:
  """The block of keys that holds the last place of the first block of queries."""
  return (before + U - 1) // U


def _starts(segment_BS: jax.Array, window: int) -> jax.Array:
  """The first place that each place may see."""
  place_S = jnp.arange(segment_BS.shape[1])
  new_BS = segment_BS != jnp.roll(segment_BS, 1, axis=1)
  start_BS = jax.lax.cummax(jnp.where(new_BS, place_S, 0), axis=1)
  return jnp.maximum(start_BS, place_S - window + 1) if window else start_BS


def _group(
  segment_MU: jax.Array,
  segment_JU: jax.Array,
  newest_M: jax.Array,
  visits_M: jax.Array,
  C: int,
) -> _Plan:
  """Those together that have about as many visits to make."""
  order_M = jnp.argsort(-visits_M, stable=True)
  lacking = -len(order_M) % C
  return _Plan(
    segment_MU,
    segment_JU,
    newest_M,
    jnp.pad(order_M, (0, lacking)).reshape(-1, C),
    jnp.pad(visits_M[order_M], (0, lacking)).reshape(-1, C),
    jnp.argsort(order_M),
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
  window: int,
) -> jax.Array:
  """score_CKRU in float32, masked.

  Args:
    q_CKRH: queries.
    k_CKHU: the keys that they meet.
    same_CUU: whether the query's segment, which is visited, is the key's.
    apart: places from a block's first key to its first query.
    window: as in `attend_segments`.
  """
  U = k_CKHU.shape[-1]
  back_UU = apart + jnp.arange(U)[:, None] - jnp.arange(U)
  seen_UU = back_UU >= 0
  if window:
    seen_UU &= back_UU < window
  score = jnp.einsum(
    "CKRH,CKHU->CKRU", q_CKRH, k_CKHU, preferred_element_type=jnp.float32
  )
  by_head = score.reshape(*score.shape[:2], -1, U, U)
  return jnp.where((same_CUU & seen_UU)[:, None, None], by_head, _MASKED).reshape(
    score.shape
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q, k, v, plan: _Plan, before: int, window: int, name: str) -> Any:
  return _forward(q, k, v, plan, before, window)[0]


def _meeting(k, v, plan: _Plan, before: int, window: int, g: jax.Array) -> Any:
  """Of group g: (queries, how far back) to at_C, keys and values there, scores."""
  U = k.shape[-1]
  asking_C = plan.asking_gC[g]
  segment_CU, newest_C = (_take(x, asking_C) for x in (plan.segment_MU, plan.newest_M))

  def meet(q_CKRH: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
    seen_C = back < plan.visits_gC[g]
    # Who has visited all of its own stays at its newest, and sees nothing there.
    at_C = newest_C - jnp.where(seen_C, back, 0)
    k_CKHU, v_CKHU = _take(k, at_C), _take(v, at_C)
    same_CUU = segment_CU[:, :, None] == _take(plan.segment_JU, at_C)[:, None]
    same_CUU &= seen_C[:, None, None]
    apart = before - (_near(before, U) - back) * U
    return at_C, k_CKHU, v_CKHU, _score(q_CKRH, k_CKHU, same_CUU, apart, window)

  return meet


def _forward(q, k, v, plan: _Plan, before: int, window: int) -> Any:
  """out_MKRH, and the logarithm of each row's sum of exponentials."""

  def queries(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_CKRH = _take(q, plan.asking_gC[g])
    meet = _meeting(k, v, plan, before, window, g)

    def visit(back, carry):
      most_CKR, total_CKR, out_CKRH = carry
      _, _, v_CKHU, s_CKRU = meet(q_CKRH, back)
      new_CKR = jnp.maximum(most_CKR, s_CKRU.max(-1))
      p_CKRU = jnp.exp(s_CKRU - new_CKR[..., None])
      kept_CKR = jnp.exp(most_CKR - new_CKR)
      more_CKRH = jnp.einsum(
        "CKRU,CKHU->CKRH",
        p_CKRU.astype(v.dtype),
        v_CKHU,
        preferred_element_type=jnp.float32,
      )
      total_CKR = total_CKR * kept_CKR + p_CKRU.sum(-1)
      return new_CKR, total_CKR, out_CKRH * kept_CKR[..., None] + more_CKRH

    rows = q_CKRH.shape[:-1]
    start = jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros(q_CKRH.shape)
    end = jax.lax.fori_loop(0, plan.visits_gC[g, 0], visit, start)
    most_CKR, total_CKR, out_CKRH = end
    out_CKRH = (out_CKRH / total_CKR[..., None]).astype(q.dtype)
    return out_CKRH, most_CKR + jnp.log(total_CKR)

  return _in_place(jax.lax.map(queries, jnp.arange(len(plan.visits_gC))), plan)


def _in_place(grouped: Any, plan: _Plan) -> Any:
  """[groups, C, ...] to [M, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[plan.place_M], grouped)


def _forward_rule(q, k, v, plan, before, window, name):
  out, lse = _forward(q, k, v, plan, before, window)
  out, lse = checkpoint_name(out, name), checkpoint_name(lse, name)
  return out, (q, k, v, plan, out, lse)


def _backward_rule(before, window, name, kept, d_out):
  q, k, v, plan, out, lse = kept
  delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

  def queries(carry, g):
    asking_C = plan.asking_gC[g]
    q_CKRH, do_CKRH = _take(q, asking_C), _take(d_out, asking_C)
    lse_CKR, delta_CKR = _take(lse, asking_C), _take(delta, asking_C)
    # Rows last, once for all visits: else these products would be slower ones.
    q_CKHR, do_CKHR = q_CKRH.swapaxes(2, 3), do_CKRH.swapaxes(2, 3)
    meet = _meeting(k, v, plan, before, window, g)

    def visit(back, carry):
      dq_CKRH, dk, dv = carry
      at_C, k_CKHU, v_CKHU, s_CKRU = meet(q_CKRH, back)
      p_CKRU = jnp.exp(s_CKRU - lse_CKR[..., None])
      dp_CKRU = jnp.einsum(
        "CKRH,CKHU->CKRU", do_CKRH, v_CKHU, preferred_element_type=jnp.float32
      )
      ds_CKRU = (p_CKRU * (dp_CKRU - delta_CKR[..., None])).astype(q.dtype)
      dv_CKHU = jnp.einsum("CKHR,CKRU->CKHU", do_CKHR, p_CKRU.astype(q.dtype))
      dk_CKHU = jnp.einsum("CKHR,CKRU->CKHU", q_CKHR, ds_CKRU)
      dq_CKRH += jnp.einsum("CKRU,CKHU->CKRH", ds_CKRU, k_CKHU)
      return dq_CKRH, _add(dk, dk_CKHU, at_C), _add(dv, dv_CKHU, at_C)

    start = (jnp.zeros(q_CKRH.shape, jnp.float32), *carry)
    dq_CKRH, *carry = jax.lax.fori_loop(0, plan.visits_gC[g, 0], visit, start)
    return tuple(carry), dq_CKRH.astype(q.dtype)

  # Sums over blocks of queries, in float32.
  zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  (dk, dv), dq = jax.lax.scan(queries, zeros, jnp.arange(len(plan.visits_gC)))
  return _in_place(dq, plan), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward_rule, _backward_rule)

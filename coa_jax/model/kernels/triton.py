"""GPU attention over long packed rows, and over a decoder's pages.

Pallas kernels for Triton; all but `attend_tokens` are JAX's own. They compute the
scores of one query block and one key block at a time, and skip keys after the queries
and other rows' pages.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from coa_jax.model.kernels.blockwise import OUT

# Places per read in the paged kernels: a core's memory is the limit.
_PLACES = 64
# Maximum parallel parts of a one-token row; their sums are added in the queries' dtype.
_PARTS = 4
# Queries per kv head and block, if a row has several tokens.
_QUERIES = 128
# Finite, so that a fully masked block of scores gives no NaN.
_MASKED = -1e30


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """Attends causally inside segments; the queries are the last T of S places.

  Args:
    k_BSKH: keys; S is a multiple of 128.
    segment_BS: int segment number per place.
    interpret: runs the kernel without a GPU, slowly.
  """
  # Imported here: without Triton bindings, as without a GPU, only calls fail.
  from jax.experimental.pallas.ops.gpu import attention as library

  T, N, H = q_BTNH.shape[1:]
  S, K = k_BSKH.shape[1:3]

  def kernel(q_BSNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    return library.mha(
      q_BSNH,
      k_BSNH,
      v_BSNH,
      segment_BS,
      sm_scale=H**-0.5,
      causal=True,
      interpret=interpret,
    )

  # The kernel needs as many queries as keys, and a kv head for each query head.
  q_BSNH = jnp.pad(q_BTNH, ((0, 0), (S - T, 0), (0, 0), (0, 0)))
  k_BSNH = jnp.repeat(k_BSKH, N // K, axis=2)
  v_BSNH = jnp.repeat(v_BSKH, N // K, axis=2)
  return _named(kernel)(q_BSNH, k_BSNH, v_BSNH)[:, S - T :]


def _named(kernel: Any) -> Any:
  """Returns the kernel with names on its gradient's inputs: its output and its sums.

  With a name on the output alone, only the output would be kept, and the kernel would
  run again for the sums.
  """
  run = jax.custom_vjp(kernel)

  def forward(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    out, backward = jax.vjp(kernel, *inputs)
    known = {id(x): x for x in inputs}

    def named(x: jax.Array) -> jax.Array:
      return known.setdefault(id(x), checkpoint_name(x, OUT))

    return named(out), jax.tree.map(named, backward)

  run.defvjp(forward, lambda backward, d_out: backward(d_out))
  return run


def takes_pages(keys_KJPH: jax.Array, values_KJPH: jax.Array) -> bool:
  """Returns whether `attend_pages` and `attend_tokens` can read these pages."""
  P, H = values_KJPH.shape[2:]
  power_of_two = H >= 16 and H & (H - 1) == 0
  return power_of_two and P % _PLACES == 0 and keys_KJPH.dtype == jnp.bfloat16


def attend_pages(
  q_B1NH: jax.Array,
  keys_KJPH: jax.Array,
  values_KJPH: jax.Array,
  table_BC: jax.Array,
  position_B1: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """Attends from one token per row to the row's pages, up to the token's position.

  Args:
    keys_KJPH: J pages of P places.
    values_KJPH: likewise.
    table_BC: int page per block of a row; -1 if it has none; zeros come out for a row
      without pages.
    interpret: runs the kernel without a GPU, slowly.
  """
  from jax.experimental.pallas.ops.gpu import paged_attention as library

  page_BC, pools = _in_parts(table_BC, keys_KJPH, values_KJPH)
  length_B = jnp.where(table_BC[:, 0] >= 0, position_B1[:, 0] + 1, 0)
  # One grid for all rows.
  out_BNH = library.paged_attention(
    q_B1NH[:, 0] * q_B1NH.shape[3] ** -0.5,
    *pools,
    page_BC,
    length_B.astype(jnp.int32),
    pages_per_compute_block=1,
    k_splits=math.gcd(page_BC.shape[1], _PARTS),
    interpret=interpret,
  )
  return out_BNH[:, None]


def attend_tokens(
  q_BTNH: jax.Array,
  keys_KJPH: jax.Array,
  values_KJPH: jax.Array,
  table_BC: jax.Array,
  position_BT: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """Attends causally from each row's tokens to the row's pages.

  Scores never leave a core: a query block meets its readable places a few at a time,
  and sums are rescaled as the highest score grows. Source: Dao 2023, arXiv 2307.08691
  (FlashAttention-2).

  Args:
    keys_KJPH: J pages of P places.
    values_KJPH: likewise.
    table_BC: int page per block of a row; -1 if it has none; zeros come out for a row
      without pages.
    position_BT: each query's position; consecutive within a row.
    interpret: runs the kernel without a GPU, slowly.
  """
  # Imported here: without Triton bindings, as without a GPU, only calls fail.
  from jax.experimental.pallas import triton as pallas_triton

  # --- Queries by kv head, padded to whole blocks; token by token, G heads each.
  B, T, N, H = q_BTNH.shape
  K = keys_KJPH.shape[0]
  G = N // K
  R = T * G
  rows = min(_QUERIES, pl.next_power_of_2(max(R, 16)))
  q_BKRH = q_BTNH.reshape(B, T, K, G, H).swapaxes(1, 2).reshape(B, K, R, H)
  q_BKRH = jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, -R % rows), (0, 0)))

  # --- One program per block. A row without pages starts before all places.
  page_BC, pools = _in_parts(table_BC, keys_KJPH, values_KJPH)
  start_B = jnp.where(table_BC[:, 0] >= 0, position_BT[:, 0], -q_BKRH.shape[2])
  block = pl.BlockSpec((None, None, rows, H), lambda r, k, b: (b, k, r, 0))
  pool = pl.BlockSpec((None, *pools[0].shape[1:]), lambda r, k, b: (k, 0, 0, 0))
  pages = pl.BlockSpec((None, page_BC.shape[1]), lambda r, k, b: (b, 0))
  start = pl.BlockSpec((1,), lambda r, k, b: (b,))
  out_BKRH = pl.pallas_call(
    functools.partial(_attend_block, queries=G),
    grid=(q_BKRH.shape[2] // rows, K, B),
    in_specs=[block, pool, pool, pages, start],
    out_specs=block,
    out_shape=jax.ShapeDtypeStruct(q_BKRH.shape, q_BKRH.dtype),
    compiler_params=pallas_triton.CompilerParams(num_warps=8, num_stages=2),
    interpret=interpret,
    name="attend_tokens",
  )(q_BKRH, *pools, page_BC, start_B.astype(jnp.int32))
  out_BKTGH = out_BKRH[:, :, :R].reshape(B, K, T, G, H)
  return out_BKTGH.swapaxes(1, 2).reshape(B, T, N, H)


def _attend_block(
  q_ref: Any,
  keys_ref: Any,
  values_ref: Any,
  page_ref: Any,
  start_ref: Any,
  out_ref: Any,
  *,
  queries: int,
) -> None:
  """Attends from one query block in one row and kv head; see `attend_tokens`.

  Args:
    q_ref: [R, H].
    keys_ref: [pages, places, H].
    values_ref: likewise.
    page_ref: the row's pages in order.
    start_ref: [1]; the position of the row's first token.
    out_ref: [R, H].
    queries: queries per token, next to each other.
  """
  R, H = q_ref.shape
  q_RH = q_ref[...]
  scale = H**-0.5 * math.log2(math.e)  # for exp2 in place of exp
  dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)

  # --- The block's readable places.
  first = pl.program_id(0) * R
  position_R = start_ref[0] + jax.lax.div(first + jnp.arange(R), queries)
  last = start_ref[0] + jax.lax.div(first + R - 1, queries)
  end = jax.lax.div(jnp.maximum(last + _PLACES, 0), _PLACES)
  end = jnp.minimum(end, page_ref.shape[0])

  def add(c: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    out_RH, sum_R, max_R = sums
    page = page_ref[c]
    score_RP = dot(q_RH, keys_ref[page].T) * scale
    behind_RP = position_R[:, None] - (c * _PLACES + jnp.arange(_PLACES))
    mask_RP = behind_RP >= 0
    score_RP = jnp.where(mask_RP, score_RP, _MASKED)
    # A query's sums before its first readable place are scaled to zero.
    higher_R = jnp.maximum(max_R, score_RP.max(-1))
    e_RP = jnp.exp2(score_RP - higher_R[:, None])
    shrink_R = jnp.exp2(max_R - higher_R)
    values_PH = values_ref[page]
    more_RH = dot(e_RP.astype(values_PH.dtype), values_PH)
    out_RH = out_RH * shrink_R[:, None] + more_RH
    return out_RH, sum_R * shrink_R + e_RP.sum(-1), higher_R

  # --- A few places at a time.
  sums = (
    jnp.zeros((R, H), jnp.float32),
    jnp.zeros(R, jnp.float32),
    jnp.full(R, _MASKED, jnp.float32),
  )
  out_RH, sum_R, _ = jax.lax.fori_loop(0, end, add, sums)
  sum_R = jnp.maximum(sum_R, 1e-30)  # for a row without pages
  out_ref[...] = (out_RH / sum_R[:, None]).astype(out_ref.dtype)


def _in_parts(
  table_BC: jax.Array, *pools: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
  """Splits pages into pages of _PLACES places, in the rows' tables and the pools."""
  K, J, P, H = pools[0].shape
  parts = P // _PLACES
  page_BC = jnp.maximum(table_BC, 0)[..., None] * parts + jnp.arange(parts)
  page_BC = page_BC.reshape(len(table_BC), -1).astype(jnp.int32)
  return page_BC, [x.reshape(K, J * parts, _PLACES, H) for x in pools]

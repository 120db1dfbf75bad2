"""Attention of decoders over pages on a TPU: JAX's own ragged paged attention.

One kernel for rows of one token and of many: it reads only the rows' pages, and keeps
no scores. Source: Jiang et al. 2026, arXiv 2604.15464.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
  ragged_paged_attention,
)

# Bytes of pages in the kernel's buffer, held twice. It reads whole blocks of this size:
# larger ones read more in vain.
_BLOCK_BYTES = 2**20
# Queries per block. A block's queries meet the keys of all its rows, so it is small if
# every row has one query.
_DECODING = 8
_GIVEN = 64


def takes(dtype: str, page_size: int) -> bool:
  """Tells whether the kernel can read pages with these places and dtype."""
  return page_size % 16 == 0 and jnp.dtype(dtype) == jnp.bfloat16


def head_size(head_dim: int) -> int:
  """Returns a head's size in a page: the kernel reads multiples of 128."""
  return -(-head_dim // 128) * 128


def attend(
  q_BTNH: jax.Array,
  pool_JPKH: jax.Array,
  table_BC: jax.Array,
  position_BT: jax.Array,
) -> jax.Array:
  """Attends with each row's tokens over its pages, up to their own places.

  Args:
    q_BTNH: queries.
    pool_JPKH: each head's keys before its values, 2 K heads; zeros after H of each.
    table_BC: int page of each block of a row; -1 where it has none.
    position_BT: each query's position; a row's are consecutive.

  Returns:
    out_BTNH in q's dtype.
  """
  B, T, N, H = q_BTNH.shape
  C = table_BC.shape[1]
  # Tokens past a row's last are computed in vain; a row without pages reads one too.
  length_B = jnp.where(table_BC[:, 0] >= 0, position_BT[:, -1] + 1, T)
  page_bytes = pool_JPKH[0].size * pool_JPKH.dtype.itemsize
  q_XNH = q_BTNH.reshape(B * T, N, H)
  out_XNH = ragged_paged_attention(
    jnp.pad(q_XNH, ((0, 0), (0, 0), (0, pool_JPKH.shape[3] - H))),
    pool_JPKH,
    length_B.astype(jnp.int32),
    jnp.maximum(table_BC, 0),
    T * jnp.arange(B + 1, dtype=jnp.int32),
    jnp.array([B], jnp.int32),
    sm_scale=H**-0.5,
    num_kv_pages_per_block=_pages_at_once(C, page_bytes),
    num_queries_per_block=min(_GIVEN if T > 1 else _DECODING, B * T),
  )
  return out_XNH[..., :H].reshape(B, T, N, H)


def pages_read(
  rows: int, tokens: int, places: float, page_size: int, blocks: int, page_bytes: int
) -> float:
  """Counts the pages read by `attend`, for programs compiled but not run.

  Args:
    rows: the call's rows.
    tokens: T, per row.
    places: average places per row; half a block more is read.
    page_size: places of a page.
    blocks: pages of a row at most, C.
    page_bytes: bytes per page of one layer on one device.
  """
  half = _pages_at_once(blocks, page_bytes) / 2
  times = -(-tokens // _GIVEN)  # all of a row for every so many of its queries
  return rows * times * min(blocks, places / page_size + half)


def _pages_at_once(blocks: int, page_bytes: int) -> int:
  """Returns the pages per kernel block, for rows of N pages."""
  return max(1, min(blocks, _BLOCK_BYTES // page_bytes))

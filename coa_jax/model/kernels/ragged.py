"""A decoder's attention over pages on a TPU: JAX's own ragged paged attention.

One kernel serves rows of one token and of many. It reads only the rows' own pages and
stores no scores. Source: Jiang et al. 2026, arXiv 2604.15464.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
  ragged_paged_attention,
)

# Page bytes per kernel buffer; there are two. The kernel reads whole blocks of this
# size, so larger blocks read more in vain.
_BLOCK_BYTES = 2**20
# Queries per block. Each query meets the keys of all rows in its block, so blocks are
# small if every row has one query.
_DECODING = 8
_GIVEN = 64


def takes(dtype: str, page_size: int) -> bool:
  """Returns whether the kernel can read pages of this size and dtype."""
  return page_size % 16 == 0 and jnp.dtype(dtype) == jnp.bfloat16


def head_size(head_dim: int) -> int:
  """Returns a head's padded size in a page: the kernel reads multiples of 128."""
  return -(-head_dim // 128) * 128


def attend(
  q_BTNH: jax.Array,
  pool_JPKH: jax.Array,
  table_BC: jax.Array,
  position_BT: jax.Array,
) -> jax.Array:
  """Attends causally from each row's tokens to the row's pages.

  Args:
    pool_JPKH: 2 K heads, each head's keys before its values; zeros after H of each.
    table_BC: int page per block of a row; -1 if it has none.
    position_BT: each query's position, consecutive within a row.
  """
  B, T, N, H = q_BTNH.shape
  C = table_BC.shape[1]
  # Padding tokens are computed in vain, and a row without pages reads page 0.
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
  """Estimates the pages that `attend` reads, for programs compiled but not run.

  Args:
    rows: rows per call.
    tokens: T, tokens per row.
    places: average places per row; the kernel reads half a block more.
    page_size: places per page.
    blocks: C, the maximum pages per row.
    page_bytes: bytes per page of one layer on one device.
  """
  half = _pages_at_once(blocks, page_bytes) / 2
  times = -(-tokens // _GIVEN)  # each block of queries reads the whole row
  return rows * times * min(blocks, places / page_size + half)


def _pages_at_once(blocks: int, page_bytes: int) -> int:
  """Returns the pages per kernel block, for rows of at most `blocks` pages."""
  return max(1, min(blocks, _BLOCK_BYTES // page_bytes))

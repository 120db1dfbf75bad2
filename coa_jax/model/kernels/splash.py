"""The TPU's splash attention over packed rows: blocks that nobody sees are not visited.

jax's kernels walk a list of blocks that is made before the program is compiled: of a
causal mask, the lower triangle. Here the list is made for each row, on the device, from
where its segments begin: a block of another segment's keys is neither fetched nor
multiplied.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as library

from coa_jax.model.kernels import blockwise

# The most places of a block of queries or keys: what the kernels' memory of a core has
# room for without a flag.
_BLOCK = 1024
# One backward kernel for two takes a third less time, but writes the queries' gradient
# once for each block of keys, which are summed after it. So its blocks are of twice as
# many keys; in rows of more of them than this memory is spared instead.
_FUSED_UP_TO = 16


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  window: int,
  name: str,
  interpret: bool = False,
) -> jax.Array:
  """Attends causally inside segments; the queries are the last T of S places.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    segment_BS: int segment number of each place; a segment's places stand together.
    window: places that a query sees, its own included; 0 for all.
    name: under which a checkpoint policy may keep what the backward pass needs.
    interpret: runs the kernels without a TPU, slowly.

  Returns:
    out_BTNH in q's dtype.

  Raises:
    ValueError: T or S is no multiple of 128.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  if T % 128 or S % 128:
    raise ValueError(
      f"splash attention needs rows of a multiple of 128 tokens, got {T} of {S}; set "
      "the row length so, or model.attention='xla'"
    )

  # --- The kernel's layout: heads before places, one call for each kv head of each row.
  q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  k_BKSH = k_BSKH.swapaxes(1, 2)
  v_BKSH = v_BSKH.swapaxes(1, 2)
  sizes = block_sizes(T, S)
  start_BS = blockwise.starts(segment_BS, window)

  def row(q_KGTH, k_KSH, v_KSH, segment_S, start_S):
    ids = library.SegmentIds(q=segment_S[S - T :], kv=segment_S)
    kernel = _kernel(T, S, N // K, sizes, window, name, interpret)
    walk = _with_blocks(
      kernel,
      visited(start_S, T, sizes.block_q, sizes.block_kv),
      visited(start_S, T, sizes.block_q_dkv, sizes.block_kv_dkv),
    )
    return jax.vmap(walk, in_axes=(0, 0, 0, None))(q_KGTH, k_KSH, v_KSH, ids)

  out_BKGTH = jax.vmap(row)(q_BKGTH, k_BKSH, v_BKSH, segment_BS, start_BS)
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _kernel(
  T: int,
  S: int,
  G: int,
  sizes: library.BlockSizes,
  window: int,
  name: str,
  interpret: bool,
) -> Any:
  """The library's kernel for G query heads of a kv head, in rows without segments."""
  if window:
    mask = library.LocalMask((T, S), (window - 1, 0), offset=S - T)
  else:
    mask = library.CausalMask((T, S), offset=S - T)
  return library.make_splash_mqa_single_device(
    library.MultiHeadMask([mask] * G),
    block_sizes=sizes,
    interpret=interpret,
    # Named inside the kernel's own gradient: there alone a checkpoint policy can keep
    # what the backward kernels read, and the forward one does not run again.
    residual_checkpoint_name=name,
  )


def block_sizes(T: int, S: int) -> library.BlockSizes:
  """Chooses the blocks of T queries and S keys, and the kernels of the way back."""
  q = _divisor(T, _BLOCK)
  kv = _divisor(S, _BLOCK)
  back = _divisor(S, 2 * _BLOCK)
  fused = S // back <= _FUSED_UP_TO
  return library.BlockSizes(
    block_q=q,
    block_kv=kv,
    block_q_dkv=q,
    block_kv_dkv=back if fused else kv,
    block_kv_dkv_compute=_divisor(S, _BLOCK // 2),  # at once, of those
    block_q_dq=None if fused else q,
    block_kv_dq=None if fused else kv,
    use_fused_bwd_kernel=fused,
  )


def _divisor(n: int, most: int) -> int:
  """The largest power of two of at most `most` that divides n."""
  return min(most, n & -n)


def visited(start_S: jax.Array, T: int, q: int, kv: int) -> jax.Array:
  """Says which blocks of keys each block of queries sees any place of, bool [i, j].

  Args:
    start_S: the first place that each place sees; none sees less than the one before.
    T: queries, the last of the S places.
    q: queries of a block, i of them in a row.
    kv: keys of a block, j of them.
  """
  S = len(start_S)
  first_i = start_S[S - T :: q] // kv
  last_i = jnp.arange(S - T + q - 1, S, q) // kv
  block_j = jnp.arange(S // kv)
  return (first_i[:, None] <= block_j) & (block_j <= last_i[:, None])


def _with_blocks(kernel: Any, seen_ij: jax.Array, back_ij: jax.Array) -> Any:
  """The kernel, to visit these blocks instead of those of its static mask.

  Args:
    kernel: the library's.
    seen_ij: what `visited` says of the blocks of the kernels of out and dq.
    back_ij: of those of the kernel of dk and dv.
  """

  def info(static: Any, seen_ij: jax.Array, data_next_ij: jax.Array) -> Any:
    return static._replace(
      data_next=data_next_ij[None].astype(jnp.int32),
      block_mask=seen_ij[None].astype(jnp.int32),
    )

  # The kernels of out and dq walk keys within queries, that of dk and dv the other way.
  keys_ij = _fetched(seen_ij)
  queries_ij = _fetched(back_ij.T).T
  dq = kernel.dq_mask_info
  return type(kernel)(
    info(kernel.fwd_mask_info, seen_ij, keys_ij),
    dq and info(dq, seen_ij, keys_ij),
    info(kernel.dkv_mask_info, back_ij, queries_ij),
    **kernel.kwargs,
  )


def _fetched(seen_xy: jax.Array) -> jax.Array:
  """The block that each step y within x holds: y where it is visited, else the next.

  So nothing is fetched for a step that visits nothing.
  """
  first_x = jnp.argmax(seen_xy, axis=1)[:, None]
  last_x = first_x + seen_xy.sum(axis=1, keepdims=True) - 1
  y = jnp.arange(seen_xy.shape[1])
  return jnp.where(y > last_x, jnp.roll(first_x, -1, axis=0), jnp.maximum(y, first_x))

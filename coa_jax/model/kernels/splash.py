"""The TPU's splash attention over packed rows: unseen blocks are not visited.

jax's kernels walk a list of blocks made before compilation: the lower triangle for a
causal mask. Here the device makes the list for each row from its segments' starts: a
block of another segment's keys is neither fetched nor multiplied. The backward kernel
runs separately for each block of keys, because XLA sums the queries' gradients of
several calls in a sixth of the time needed for one call's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from coa_jax.model.kernels import blockwise

# Maximum places per block of queries or keys: a core's kernel memory without a flag.
_BLOCK = 1024
# One backward kernel instead of two takes a third less time, but writes the queries'
# gradient once for each block of keys, summed afterwards. So its blocks have twice as
# many keys; rows with more blocks than this save memory instead.
_FUSED_UP_TO = 16

# The library's lists of visited blocks: for out, for dq (None with one backward
# kernel), for dk and dv.
Blocks = tuple[Any, Any, Any]


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  name: str,
  interpret: bool = False,
) -> jax.Array:
  """Attends causally inside segments; the queries are the last T of S places.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    segment_BS: int segment number of each place; a segment's places stand together.
    name: under which a checkpoint policy may keep what the backward pass needs.
    interpret: runs the kernels without a TPU, slowly.

  Returns:
    out_BTNH in q's dtype.

  Raises:
    ValueError: T or S is not a multiple of 128.
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
  sizes = block_sizes(T, S, H)
  kernel = _kernel(T, S, N // K, sizes, interpret)
  start_BS = blockwise.starts(segment_BS)

  def row(q_KGTH, k_KSH, v_KSH, segment_S, start_S):
    ids = library.SegmentIds(q=segment_S[S - T :], kv=segment_S)
    blocks = _blocks(
      kernel,
      visited(start_S, T, sizes.block_q, sizes.block_kv),
      visited(start_S, T, sizes.block_q_dkv, sizes.block_kv_dkv),
    )
    attend = jax.vmap(_attention(kernel, name), in_axes=(None, 0, 0, 0, None))
    return attend(blocks, q_KGTH, k_KSH, v_KSH, ids)

  out_BKGTH = jax.vmap(row)(q_BKGTH, k_BKSH, v_BKSH, segment_BS, start_BS)
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _kernel(
  T: int,
  S: int,
  G: int,
  sizes: library.BlockSizes,
  interpret: bool,
) -> Any:
  """The library's kernel for G query heads of a kv head, in rows without segments."""
  mask = library.CausalMask((T, S), offset=S - T)
  return library.make_splash_mqa_single_device(
    library.MultiHeadMask([mask] * G),
    block_sizes=sizes,
    interpret=interpret,
  )


def _attention(kernel: Any, name: str) -> Callable[..., jax.Array]:
  """Makes a function of blocks, q_GTH, k_SH, v_SH and segments of the kernel.

  Args:
    kernel: the library's.
    name: under which a checkpoint policy may keep what the backward pass needs.

  Returns:
    A function that gives out_GTH, with a gradient in q, k and v.
  """

  @jax.custom_vjp
  def attend(blocks, q_GTH, k_SH, v_SH, ids):
    return type(kernel)(*blocks, **kernel.kwargs)(q_GTH, k_SH, v_SH, ids)

  def forward(blocks, q_GTH, k_SH, v_SH, ids):
    settings = kernel.kwargs | {"save_residuals": True}
    out_GTH, (lse_GT,) = type(kernel)(*blocks, **settings)(q_GTH, k_SH, v_SH, ids)
    # Named inside the gradient: only there can a checkpoint policy keep the backward
    # kernels' inputs, so that the forward kernel does not run again.
    out_GTH = checkpoint_name(out_GTH, name)
    lse_GT = checkpoint_name(lse_GT, name)
    return out_GTH, (blocks, q_GTH, k_SH, v_SH, ids, out_GTH, lse_GT)

  def backward(saved, d_out_GTH):
    return None, *_gradients(kernel.kwargs, *saved, d_out_GTH), None

  attend.defvjp(forward, backward)
  return attend


def _gradients(
  settings: dict[str, Any],
  blocks: Blocks,
  q_GTH: jax.Array,
  k_SH: jax.Array,
  v_SH: jax.Array,
  ids: library.SegmentIds,
  out_GTH: jax.Array,
  lse_GT: jax.Array,
  d_out_GTH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes the gradients of queries, keys and values.

  The joint kernel returns the queries' gradient once for each block of keys. Its
  library sums them as one array, by a reduction of 24M cycles a layer (Qwen2.5-7B, 32k,
  v5p, by the compiler); separate arrays take 4M. So it runs once per block.
  """
  _, dq_blocks, dkv_blocks = blocks
  S = len(k_SH)
  sizes = settings["block_sizes"]
  piece = sizes.block_kv_dkv if sizes.use_fused_bwd_kernel else S
  dq_GTH = jnp.zeros(q_GTH.shape, jnp.float32)
  dk_pieces = []
  dv_pieces = []
  for first in range(0, S, piece):
    block = slice(first // sizes.block_kv_dkv, (first + piece) // sizes.block_kv_dkv)
    keys = slice(first, first + piece)
    of_piece = dkv_blocks._replace(
      data_next=dkv_blocks.data_next[..., block],
      block_mask=dkv_blocks.block_mask[..., block],
      q_sequence=dkv_blocks.q_sequence - first,  # the piece's first key is at 0
    )
    residuals = (
      q_GTH,
      k_SH[keys],
      v_SH[keys],
      library.SegmentIds(q=ids.q, kv=ids.kv[keys]),
      None,  # no sinks
      out_GTH,
      lse_GT,
      dq_blocks,
      of_piece,
    )
    # Private: the library has no other way to the gradients of some keys.
    *_, dq, dk, dv, _, _ = splash_attention_kernel._splash_attention_bwd(
      **settings, res=residuals, do=d_out_GTH
    )
    dq_GTH += dq.astype(jnp.float32)
    dk_pieces.append(dk)
    dv_pieces.append(dv)
  dk_SH = jnp.concatenate(dk_pieces)
  dv_SH = jnp.concatenate(dv_pieces)
  return dq_GTH.astype(q_GTH.dtype), dk_SH, dv_SH


def block_sizes(T: int, S: int, H: int = 128) -> library.BlockSizes:
  """Chooses the blocks of T queries and S keys of H, and the backward kernels."""
  q = _divisor(T, _BLOCK)
  kv = _divisor(S, _BLOCK)
  # With heads of 256 (Qwen3.5) whole blocks exceed v5e's and v5p's kernel memory.
  back_block = _BLOCK if H <= 128 else _BLOCK // 2
  back_q = _divisor(T, back_block)
  back = _divisor(S, 2 * back_block)
  fused = S // back <= _FUSED_UP_TO
  # Around the kernels XLA keeps places after a head's elements, for the rotation:
  # transposing blocks in the kernels costs less than copying arrays in XLA.
  layout = splash_attention_kernel.QKVLayout.SEQ_MINOR
  return library.BlockSizes(
    block_q=q,
    block_kv=kv,
    block_q_dkv=back_q,
    block_kv_dkv=back if fused else kv,
    block_kv_dkv_compute=_divisor(S, _BLOCK // 2),  # at once, of those
    block_q_dq=None if fused else q,
    block_kv_dq=None if fused else kv,
    use_fused_bwd_kernel=fused,
    q_layout=layout,
    k_layout=layout,
    v_layout=layout,
  )


def _divisor(n: int, most: int) -> int:
  """The largest power of two of at most `most` that divides n."""
  return min(most, n & -n)


def visited(start_S: jax.Array, T: int, q: int, kv: int) -> jax.Array:
  """Returns the key blocks seen by each query block, bool [i, j].

  Args:
    start_S: the first place seen by each place; never decreasing.
    T: queries, the last of the S places.
    q: queries of a block, i of them in a row.
    kv: keys of a block, j of them.
  """
  S = len(start_S)
  first_i = start_S[S - T :: q] // kv
  last_i = jnp.arange(S - T + q - 1, S, q) // kv
  block_j = jnp.arange(S // kv)
  return (first_i[:, None] <= block_j) & (block_j <= last_i[:, None])


def _blocks(kernel: Any, seen_ij: jax.Array, back_ij: jax.Array) -> Blocks:
  """Lists these blocks for the kernel, in place of its static mask's.

  Args:
    kernel: the library's.
    seen_ij: `visited` for the blocks of the out and dq kernels.
    back_ij: likewise for the dk and dv kernel.
  """

  def info(static: Any, seen_ij: jax.Array, data_next_ij: jax.Array) -> Any:
    return static._replace(
      data_next=data_next_ij[None].astype(jnp.int32),
      block_mask=seen_ij[None].astype(jnp.int32),
    )

  # The out and dq kernels walk keys within queries, the dk and dv kernel the reverse.
  keys_ij = _fetched(seen_ij)
  queries_ij = _fetched(back_ij.T).T
  dq = kernel.dq_mask_info
  return (
    info(kernel.fwd_mask_info, seen_ij, keys_ij),
    dq and info(dq, seen_ij, keys_ij),
    info(kernel.dkv_mask_info, back_ij, queries_ij),
  )


def _fetched(seen_xy: jax.Array) -> jax.Array:
  """Returns the block held by each step y within x: y if visited, else the next.

  So a step without a visit fetches nothing.
  """
  first_x = jnp.argmax(seen_xy, axis=1)[:, None]
  last_x = first_x + seen_xy.sum(axis=1, keepdims=True) - 1
  y = jnp.arange(seen_xy.shape[1])
  return jnp.where(y > last_x, jnp.roll(first_x, -1, axis=0), jnp.maximum(y, first_x))

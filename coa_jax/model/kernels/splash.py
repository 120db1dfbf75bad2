"""The TPU's splash attention over packed rows; unseen blocks are skipped.

JAX's kernels walk a list of blocks made before compilation: for a causal mask, the
lower triangle. Here the device makes each row's list from its segment starts, so key
blocks of other segments are neither fetched nor multiplied. The backward kernel runs
once per key block, because XLA sums several calls' query gradients in a sixth of the
time needed for one call's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from coa_jax.model.kernels.blockwise import OUT, starts

# Maximum places per query or key block: a core's kernel memory limits them, unless a
# flag raises it.
_BLOCK = 1024
# One fused backward kernel takes a third less time than two, but writes one query
# gradient per key block, to be summed afterwards. So its blocks have twice as many
# keys; rows with more blocks than this use two kernels to save memory.
_FUSED_UP_TO = 16

# The library's lists of visited blocks: for out, for dq (None with the fused backward
# kernel), for dk and dv.
Blocks = tuple[Any, Any, Any]


def attend_segments(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """Attends causally inside segments; the queries are the last T of S places.

  T and S are multiples of 128.

  Args:
    segment_BS: int segment number per place; a segment's places are contiguous.
    interpret: runs the kernels without a TPU, slowly.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]

  # --- The kernel's layout: heads before places, one call per row and kv head.
  q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
  k_BKSH = k_BSKH.swapaxes(1, 2)
  v_BKSH = v_BSKH.swapaxes(1, 2)
  sizes = block_sizes(T, S, H)
  kernel = _kernel(T, S, N // K, sizes, interpret)
  start_BS = starts(segment_BS)

  def row(q_KGTH, k_KSH, v_KSH, segment_S, start_S):
    ids = library.SegmentIds(q=segment_S[S - T :], kv=segment_S)
    blocks = _blocks(
      kernel,
      visited(start_S, T, sizes.block_q, sizes.block_kv),
      visited(start_S, T, sizes.block_q_dkv, sizes.block_kv_dkv),
    )
    attend = jax.vmap(_attention(kernel), in_axes=(None, 0, 0, 0, None))
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
  """Makes the library's kernel for a kv head's G query heads, without segments."""
  mask = library.CausalMask((T, S), offset=S - T)
  return library.make_splash_mqa_single_device(
    library.MultiHeadMask([mask] * G),
    block_sizes=sizes,
    interpret=interpret,
  )


def _attention(kernel: Any) -> Callable[..., jax.Array]:
  """Returns the library's kernel with gradients in q, k and v."""

  @jax.custom_vjp
  def attend(blocks, q_GTH, k_SH, v_SH, ids):
    return type(kernel)(*blocks, **kernel.kwargs)(q_GTH, k_SH, v_SH, ids)

  def forward(blocks, q_GTH, k_SH, v_SH, ids):
    settings = kernel.kwargs | {"save_residuals": True}
    out_GTH, (lse_GT,) = type(kernel)(*blocks, **settings)(q_GTH, k_SH, v_SH, ids)
    # Named inside the gradient: only there can a checkpoint policy keep the backward
    # kernels' inputs, so that the forward kernel does not run again.
    out_GTH = checkpoint_name(out_GTH, OUT)
    lse_GT = checkpoint_name(lse_GT, OUT)
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

  The fused kernel returns one query gradient per key block. The library sums them as
  one array, which takes 24M cycles a layer (Qwen2.5-7B, 32k, v5p, by the compiler);
  separate arrays take 4M. So the kernel runs once per key block.
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
    # Private: the library has no public function for some keys' gradients.
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
  """Chooses blocks and backward kernels for T queries, S keys and head size H."""
  q = _divisor(T, _BLOCK)
  kv = _divisor(S, _BLOCK)
  # At head size 256 (Qwen3.5), whole blocks exceed v5e's and v5p's kernel memory.
  back_block = _BLOCK if H <= 128 else _BLOCK // 2
  back_q = _divisor(T, back_block)
  back = _divisor(S, 2 * back_block)
  fused = S // back <= _FUSED_UP_TO
  # For the rotation XLA keeps places as the last axis around the kernels. Transposing
  # blocks in the kernels costs less than copying arrays in XLA.
  layout = splash_attention_kernel.QKVLayout.SEQ_MINOR
  return library.BlockSizes(
    block_q=q,
    block_kv=kv,
    block_q_dkv=back_q,
    block_kv_dkv=back if fused else kv,
    block_kv_dkv_compute=_divisor(S, _BLOCK // 2),  # keys at once
    block_q_dq=None if fused else q,
    block_kv_dq=None if fused else kv,
    use_fused_bwd_kernel=fused,
    q_layout=layout,
    k_layout=layout,
    v_layout=layout,
  )


def _divisor(n: int, most: int) -> int:
  """Returns the largest power of two, at most `most`, that divides n."""
  return min(most, n & -n)


def visited(start_S: jax.Array, T: int, q: int, kv: int) -> jax.Array:
  """Returns which key blocks each query block sees, bool [i, j].

  Args:
    start_S: each place's first visible place; never decreasing.
    T: queries, the last of the S places.
    q: queries per block; a row has i blocks.
    kv: keys per block; a row has j blocks.
  """
  S = len(start_S)
  first_i = start_S[S - T :: q] // kv
  last_i = jnp.arange(S - T + q - 1, S, q) // kv
  block_j = jnp.arange(S // kv)
  return (first_i[:, None] <= block_j) & (block_j <= last_i[:, None])


def _blocks(kernel: Any, seen_ij: jax.Array, back_ij: jax.Array) -> Blocks:
  """Makes the kernel's lists of these blocks, in place of its static mask's lists.

  Args:
    seen_ij: `visited` for the blocks of the out and dq kernels.
    back_ij: likewise for the dk and dv kernel.
  """

  def info(static: Any, seen_ij: jax.Array, data_next_ij: jax.Array) -> Any:
    return static._replace(
      data_next=data_next_ij[None].astype(jnp.int32),
      block_mask=seen_ij[None].astype(jnp.int32),
    )

  # The out and dq kernels walk keys within queries, the dk and dv kernel the opposite.
  keys_ij = _fetched(seen_ij)
  queries_ij = _fetched(back_ij.T).T
  dq = kernel.dq_mask_info
  return (
    info(kernel.fwd_mask_info, seen_ij, keys_ij),
    dq and info(dq, seen_ij, keys_ij),
    info(kernel.dkv_mask_info, back_ij, queries_ij),
  )


def _fetched(seen_xy: jax.Array) -> jax.Array:
  """Returns the block held at each step y of x: y if visited, else the next.

  So a skipped step fetches nothing.
  """
  first_x = jnp.argmax(seen_xy, axis=1)[:, None]
  last_x = first_x + seen_xy.sum(axis=1, keepdims=True) - 1
  y = jnp.arange(seen_xy.shape[1])
  return jnp.where(y > last_x, jnp.roll(first_x, -1, axis=0), jnp.maximum(y, first_x))

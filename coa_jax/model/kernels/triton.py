"""The GPU's attention over long packed rows, and of decoders over pages.

The kernels are jax's own, in Pallas for Triton: scores of a block of queries and a
block of keys at a time, none of keys after the queries or of pages of other rows.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Places that the kernel of pages reads at once, and the most parts into which it cuts a
# row to compute them beside each other; their sums are added in the queries' dtype.
_PLACES = 64
_PARTS = 4


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
    k_BSKH: keys; S is a multiple of 128.
    v_BSKH: values.
    segment_BS: int segment number of each place.
    name: under which a checkpoint policy may keep what the backward pass needs.
    interpret: runs the kernel without a GPU, slowly.

  Returns:
    out_BTNH in q's dtype.
  """
  # Where there are no Triton bindings, as without a GPU, only calls of it fail.
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

  # The kernel wants as many queries as keys, and a kv head for each query head.
  q_BSNH = jnp.pad(q_BTNH, ((0, 0), (S - T, 0), (0, 0), (0, 0)))
  k_BSNH = jnp.repeat(k_BSKH, N // K, axis=2)
  v_BSNH = jnp.repeat(v_BSKH, N // K, axis=2)
  return _named(kernel, name)(q_BSNH, k_BSNH, v_BSNH)[:, S - T :]


def _named(kernel: Any, name: str) -> Any:
  """The kernel, what its gradient reads having a name: its output and its sums.

  A name put on the output alone would keep the output, and the kernel would run again
  for the sums.
  """
  run = jax.custom_vjp(kernel)

  def forward(*inputs: jax.Array) -> tuple[jax.Array, Any]:
    out, backward = jax.vjp(kernel, *inputs)
    known = {id(x): x for x in inputs}

    def named(x: jax.Array) -> jax.Array:
      return known.setdefault(id(x), checkpoint_name(x, name))

    return named(out), jax.tree.map(named, backward)

  run.defvjp(forward, lambda backward, d_out: backward(d_out))
  return run


def takes_pages(keys_KJPH: jax.Array, values_KJPH: jax.Array) -> bool:
  """Tells whether `attend_pages` can read these pages."""
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
  """Attends with one token of each row over its pages, up to its own place.

  Args:
    q_B1NH: queries.
    keys_KJPH: J pages of P places.
    values_KJPH: likewise.
    table_BC: int page of each block of a row; -1 where it has none.
    position_B1: of each query.
    interpret: runs the kernel without a GPU, slowly.

  Returns:
    out_B1NH in q's dtype; of rows without pages zeros.
  """
  from jax.experimental.pallas.ops.gpu import paged_attention as library

  # --- Pages of fewer places, which a core's memory has room for.
  K, J, P, H = keys_KJPH.shape
  parts = P // _PLACES
  fewer = (K, J * parts, _PLACES, H)
  page_BC = jnp.maximum(table_BC, 0)[..., None] * parts + jnp.arange(parts)
  page_BC = page_BC.reshape(len(table_BC), -1)

  # --- One grid for all rows.
  length_B = jnp.where(table_BC[:, 0] >= 0, position_B1[:, 0] + 1, 0)
  out_BNH = library.paged_attention(
    q_B1NH[:, 0] * H**-0.5,
    keys_KJPH.reshape(fewer),
    values_KJPH.reshape(fewer),
    page_BC.astype(jnp.int32),
    length_B.astype(jnp.int32),
    pages_per_compute_block=1,
    k_splits=math.gcd(page_BC.shape[1], _PARTS),
    interpret=interpret,
  )
  return out_BNH[:, None]

"""The GPU's attention over long packed rows: no array of queries by keys.

The kernel is jax's own, in Pallas for Triton: scores of a block of queries and a block
of keys at a time, none of keys after the queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


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

"""Blockwise attention and the GPU's kernel for long rows, against plain attention.

The GPU's kernel is interpreted, and lowered for CUDA. The TPU's: test_splash.py.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import attention
from coa_jax.model.kernels import blockwise, triton


def packed(T: int, S: int, K: int = 2, H: int = 32, dtype=jnp.float32):
  """Two rows: queries at the last T of S places, keys, values, segments."""
  keys = jax.random.split(jax.random.key(T), 3)
  q = jax.random.normal(keys[0], (2, T, 2 * K, H), dtype)
  k, v = (jax.random.normal(key, (2, S, K, H), dtype) for key in keys[1:])
  segment = np.sort(np.random.default_rng(S).integers(0, 4, (2, S)), axis=1)[:, ::-1]
  return q, k, v, jnp.asarray(segment.copy())


def plain(q, k, v, segment_BS):
  """Attention with all scores at once."""
  mask_BTS = attention._visible(segment_BS, q.shape[1])
  return jax.nn.dot_product_attention(q, k, v, mask=mask_BTS[:, None])


def by_blocks(q, k, v, segment_BS, block: int = 64):
  return blockwise.attend_segments(q, k, v, segment_BS, block)


def interpreted(q, k, v, segment_BS):
  return triton.attend_segments(q, k, v, segment_BS, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("attend", "T", "S"),
  [
    (by_blocks, 1, 1),
    (by_blocks, 128, 128),
    (functools.partial(by_blocks, block=16), 70, 70),
    (by_blocks, 130, 300),  # queries at the last T of S places
    (functools.partial(by_blocks, block=16), 64, 200),
    (interpreted, 256, 256),
    (interpreted, 128, 256),
  ],
)
def test_values_and_gradients_are_those_of_plain_attention(attend, T: int, S: int):
  q, k, v, segment = packed(T, S)
  weight = jnp.cos(jnp.arange(q.size)).reshape(q.shape)

  def both(attend):
    def total(q, k, v):
      out = attend(q, k, v, segment)
      return jnp.sum(out * weight), out

    value = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), gradients = value(q, k, v)
    return out, *gradients

  for a, b in zip(both(attend), both(plain), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.slow
def test_blocks_of_other_segments_are_never_read():
  q, k, v, _ = packed(256, 256, K=1, H=4)
  segment_BS = jnp.repeat(jnp.array([[1, 2]] * 2), 128, axis=1)
  spoilt = k.at[:, :128].set(jnp.nan), v.at[:, :128].set(jnp.nan)

  def last_half(k, v):
    return by_blocks(q, k, v, segment_BS)[:, 128:]

  np.testing.assert_array_equal(last_half(*spoilt), last_half(k, v))


@pytest.mark.slow
def test_half_precision_keeps_sums_in_float32():
  *half, _ = packed(256, 256, K=1, H=8, dtype=jnp.bfloat16)
  segment_BS = jnp.ones((2, 256), jnp.int32)
  out = by_blocks(*half, segment_BS)
  assert out.dtype == jnp.bfloat16
  exact = plain(*(x.astype(jnp.float32) for x in half), segment_BS)
  np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-2)


@pytest.mark.usefixtures("gpu_described")
@pytest.mark.parametrize(("kept", "forward"), [("", 2), (attention.OUT, 1)])
def test_a_gpus_kernels_make_no_array_of_queries_by_keys(kept: str, forward: int):
  """Two scanned layers; a saved output avoids the second forward kernel."""
  q, k, v, segment = packed(256, 256, dtype=jnp.bfloat16)
  policy = jax.checkpoint_policies.save_only_these_names(kept)

  def total(q, k, v, segment):
    def layer(q, _):
      return q + triton.attend_segments(q, k, v, segment), None

    out, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), q, length=2)
    return out.astype(jnp.float32).sum()

  gradients = jax.jit(jax.grad(total, (0, 1, 2)))
  checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
  export = jax.export.export(gradients, platforms=["cuda"], disabled_checks=checks)
  text = export(q, k, v, segment).mlir_module()
  kernels = re.findall(r'name = "(mha_forward|mha_backward)"', text)
  assert sorted(kernels) == ["mha_backward"] + ["mha_forward"] * forward
  assert not re.search(r"tensor<(\d+x)*256x256x", text)

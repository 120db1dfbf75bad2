"""Attention block by block: values, gradients, and what is never looked at."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import attention
from coa_jax.model.kernels import blockwise


def heads(seed: int, B: int, T: int, S: int, N: int, K: int, H: int):
  keys = jax.random.split(jax.random.key(seed), 3)
  return (
    jax.random.normal(keys[0], (B, T, N, H)),
    jax.random.normal(keys[1], (B, S, K, H)),
    jax.random.normal(keys[2], (B, S, K, H)),
  )


def plain(q, k, v, segment_BS):
  """The same with all scores at once."""
  mask_BTS = attention._visible(segment_BS, q.shape[1])
  return jax.nn.dot_product_attention(q, k, v, mask=mask_BTS[:, None])


@pytest.mark.parametrize(
  ("T", "S", "block"),
  [
    (1, 1, 64),
    (128, 128, 64),
    (70, 70, 16),
    (130, 300, 64),  # the queries are the last of more places
    (64, 200, 16),
  ],
)
def test_values_and_gradients_are_those_of_plain_attention(T, S, block):
  q, k, v = heads(T, 2, T, S, 4, 2, 6)
  rng = np.random.default_rng(S)
  segment_BS = jnp.asarray(np.sort(rng.integers(0, 4, (2, S)), axis=1)[:, ::-1].copy())

  def value(f):
    def total(q, k, v):
      out = f(q, k, v)
      return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    both = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), grads = both(q, k, v)
    return out, *grads

  ours = value(lambda *x: blockwise.attend_segments(*x, segment_BS, "out", block))
  theirs = value(lambda *x: plain(*x, segment_BS))
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=3e-5)


def test_blocks_of_other_segments_are_never_read():
  U = 64
  q, k, v = heads(0, 1, 4 * U, 4 * U, 2, 1, 4)
  segment_BS = jnp.repeat(jnp.array([[1, 2]]), 2 * U, axis=1)
  spoilt = k.at[:, : 2 * U].set(jnp.nan), v.at[:, : 2 * U].set(jnp.nan)

  def last_half(k, v):
    return blockwise.attend_segments(q, k, v, segment_BS, "out")[:, 2 * U :]

  np.testing.assert_array_equal(last_half(*spoilt), last_half(k, v))


def test_half_precision_keeps_sums_in_float32():
  q, k, v = (x.astype(jnp.bfloat16) for x in heads(3, 1, 256, 256, 2, 1, 8))
  segment_BS = jnp.ones((1, 256), jnp.int32)
  out = blockwise.attend_segments(q, k, v, segment_BS, "out")
  exact = plain(*(x.astype(jnp.float32) for x in (q, k, v)), segment_BS)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-2)

"""The TPU's attention kernel, interpreted, beside plain attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import attention


def packed(T: int, H: int):
  """Queries of the last T of 256 places, keys, values, cotangents, segments."""
  keys = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(keys[0], (1, T, 2, H))
  k, v = (jax.random.normal(key, (1, 256, 1, H)) for key in keys[1:3])
  segment = jnp.asarray([[1] * 100 + [2] * 130 + [0] * 26])
  return q, k, v, jax.random.normal(keys[3], (1, T, 2, H)), segment


@pytest.mark.parametrize(("T", "H", "window"), [(128, 64, 0), (256, 128, 150)])
def test_splash_is_the_same_attention(T: int, H: int, window: int):
  """The TPU's kernel, interpreted."""
  q, k, v, _, segment = packed(T, H)
  ours = attention._splash(q, k, v, segment, window, interpret=True)
  np.testing.assert_allclose(
    ours, attention._xla(q, k, v, segment, window), atol=2e-5 * math.sqrt(H)
  )


@pytest.mark.slow
@pytest.mark.parametrize(("T", "H", "window"), [(128, 64, 0), (256, 128, 150)])
def test_splash_has_the_same_gradients(T: int, H: int, window: int):
  q, k, v, weight, segment = packed(T, H)

  def gradients(kernel, **options):
    def total(q, k, v):
      return jnp.sum(kernel(q, k, v, segment, window, **options) * weight)

    return jax.grad(total, (0, 1, 2))(q, k, v)

  theirs = gradients(attention._xla)
  for a, b in zip(gradients(attention._splash, interpret=True), theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * math.sqrt(H))

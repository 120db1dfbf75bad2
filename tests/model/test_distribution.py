"""The one sampling distribution of sampler and learner."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import distribution


def test_log_probs_are_a_float32_softmax_at_a_temperature():
  logits = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
  for t in (0.5, 1.0, 2.0):
    scaled = logits.astype(np.float64) / t
    expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    out = distribution.log_probs(jnp.asarray(logits), t)
    np.testing.assert_allclose(out, expected, atol=2e-6)
  assert distribution.log_probs(jnp.ones((2, 3), jnp.bfloat16), 1.0).dtype == "float32"


def test_each_row_has_its_own_temperature_and_greedy_reports_temperature_one():
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)))
  rows = distribution.log_probs(logits, jnp.array([0.0, 1.0, 3.0]))
  for row, t in enumerate((1.0, 1.0, 3.0)):
    one = distribution.log_probs(logits[row], t)
    np.testing.assert_allclose(rows[row], one, atol=1e-7)


def test_samples_follow_the_distribution():
  n, p = 40_000, np.array([0.5, 0.0, 0.25, 0.15, 0.1])
  logp_BV = jnp.broadcast_to(jnp.log(p), (n, 5))
  keys = jax.random.split(jax.random.key(0), n)
  token_B, logp_B = distribution.sample(logp_BV, keys, jnp.ones(n))
  share = np.bincount(token_B, minlength=5) / n
  # Five standard deviations; an impossible token is never drawn.
  np.testing.assert_allclose(share, p, atol=5 * np.sqrt(0.25 / n))
  assert share[1] == 0
  np.testing.assert_array_equal(logp_B, jnp.log(p)[token_B])


def test_temperature_zero_takes_the_most_likely_token():
  logp_BV = jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]))
  keys = jax.random.split(jax.random.key(3), 2)
  token_B, logp_B = distribution.sample(logp_BV, keys, jnp.zeros(2))
  assert token_B.tolist() == [1, 0]
  np.testing.assert_allclose(logp_B, np.log([0.5, 0.6]), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_draw_depends_on_its_own_key_alone(rows: int):
  logp_V = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (11,)))
  key = jax.random.key(42)
  alone, _ = distribution.sample(logp_V[None], key[None], jnp.ones(1))
  keys = jnp.concatenate([jax.random.split(jax.random.key(9), rows - 1), key[None]])
  others = jax.random.normal(jax.random.key(2), (rows - 1, 11))
  logp_BV = jnp.concatenate([jax.nn.log_softmax(others), logp_V[None]])
  token_B, _ = distribution.sample(logp_BV, keys, jnp.ones(rows))
  assert token_B[-1] == alone[0]

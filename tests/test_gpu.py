"""Tests for a GPU only: its kernels, and rollouts in bfloat16.

  JAX_PLATFORMS=cuda python -m pytest -n 0 tests/test_gpu.py

All tests are skipped on other machines.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rollout.playing import engine, play

from coa_jax.model import attention, decode_params
from coa_jax.model.cache import KVCache
from coa_jax.model.kernels import paged, triton
from coa_jax.rollout import sampler

pytestmark = pytest.mark.skipif(
  jax.default_backend() != "gpu", reason="this machine has no GPU that JAX sees"
)
# Relative error of a whole array in bfloat16 (epsilon 2 ** -8) against float32.
_CLOSE = 1e-2
# The head size of Qwen2.5-0.5B.
MODEL = dataclasses.replace(toy.MODEL, head_dim=64, dtype="bfloat16")


def apart(a: jax.Array, b: jax.Array) -> float:
  """Returns |a - b| / |b| in float64."""
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("kernel", ["cudnn", "triton", "xla"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("T", "S"), [(2048, 2048), (512, 2048)])
def test_a_kernel_is_plain_attention_in_float32(kernel, head_dim, T, S):
  """Values and gradients for queries at the last T of S positions."""
  # --- Grouped heads; rows with a few segments and padding.
  keys = jax.random.split(jax.random.key(T + head_dim), 4)
  q = jax.random.normal(keys[0], (2, T, 8, head_dim))
  k, v = (jax.random.normal(key, (2, S, 2, head_dim)) for key in keys[1:3])
  weight = jax.random.normal(keys[3], q.shape)
  segment = np.sort(np.random.default_rng(S).integers(0, 4, (2, S)), axis=1)[:, ::-1]
  segment = jnp.asarray(segment.copy())

  def both(attend, *inputs):
    def total(q, k, v):
      out = attend(q, k, v, segment)
      return (out.astype(jnp.float32) * weight).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(
      *inputs
    )
    return out, *grads

  def plain(q, k, v, segment):
    mask_BTS = attention._visible(segment, T)
    return jax.nn.dot_product_attention(q, k, v, mask=mask_BTS[:, None])

  # --- Both get the same inputs, rounded to bfloat16.
  half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
  ours = both(attention._KERNELS[kernel], *half)
  with jax.default_matmul_precision("highest"):
    theirs = both(plain, *(x.astype(jnp.float32) for x in half))
  names = ("out", "dq", "dk", "dv")
  errors = {n: apart(a, b) for n, a, b in zip(names, ours, theirs, strict=True)}
  print(kernel, head_dim, T, S, errors)
  assert max(errors.values()) < _CLOSE


@pytest.mark.parametrize("head_dim", [64, 128])
def test_decoding_over_pages_is_attention_over_rows(head_dim):
  """Rows with various lengths, one without pages, and a page shared by two rows."""
  K, J, P, B, C = 2, 40, 256, 5, 6
  keys = jax.random.split(jax.random.key(head_dim), 3)
  q = jax.random.normal(keys[0], (B, 1, 14, head_dim), jnp.bfloat16)
  pools = [
    jax.random.normal(key, (K, J, P, head_dim), jnp.bfloat16) for key in keys[1:]
  ]
  table = np.full((B, C), -1)
  position = np.array([0, 255, 256, 1500, 7])[:, None]
  free = iter(np.random.default_rng(0).permutation(J))
  for row in range(B - 1):
    for block in range(position[row, 0] // P + 1):
      table[row, block] = next(free)
  table[3, 0] = table[2, 0]
  assert triton.takes_pages(*pools)
  ours = triton.attend_pages(q, *pools, jnp.asarray(table), jnp.asarray(position))
  assert not np.asarray(ours[-1], np.float32).any()
  rows = paged.RowPages(jnp.asarray(table))
  wide = [x.astype(jnp.float32) for x in (q, *pools)]
  with jax.default_matmul_precision("highest"):
    theirs = paged.attend(*wide, rows, jnp.asarray(position), False)
  error = apart(ours[:-1], theirs[:-1])
  print(head_dim, error)
  assert error < _CLOSE


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("T", [16, 512])
def test_given_tokens_over_pages_are_attention_over_rows(T, head_dim):
  """Rows with various start positions, and one without pages."""
  K, J, P, B, C = 2, 40, 256, 5, 8
  keys = jax.random.split(jax.random.key(head_dim), 3)
  q = jax.random.normal(keys[0], (B, T, 14, head_dim), jnp.bfloat16)
  pools = [
    jax.random.normal(key, (K, J, P, head_dim), jnp.bfloat16) for key in keys[1:]
  ]
  start = np.array([0, 200, 256, 1500, 7])
  table = np.random.default_rng(0).permutation(J).reshape(B, C)
  table[-1] = -1
  rows = (jnp.asarray(table), jnp.asarray(start[:, None] + np.arange(T)))
  ours = jax.jit(triton.attend_tokens)(q, *pools, *rows)
  assert not np.asarray(ours[-1], np.float32).any()
  wide = [x.astype(jnp.float32) for x in (q, *pools)]
  with jax.default_matmul_precision("highest"):
    theirs = paged.attend(*wide, paged.RowPages(rows[0]), rows[1], False)
  error = apart(ours[:-1], theirs[:-1])
  print(T, head_dim, error)
  assert error < _CLOSE


@pytest.fixture(scope="module")
def novice() -> dict:
  """Float32 weights of a tool-calling policy, trained on this GPU."""
  return toy.train(toy.trajectories(), 60, MODEL).params


def test_log_probs_are_the_learners_up_to_rounding(novice):
  played = play(novice, range(16), on=engine(MODEL))
  played = [played[n] for n in sorted(played)]
  assert sum(len(t.calls) for t in played) >= 8
  theirs = np.concatenate(toy.logps_of(MODEL, novice, played))
  mine = np.concatenate([toy.sampled_logps(t) for t in played])
  diff = np.abs(mine - theirs)
  print(f"{diff.size} tokens: mean {diff.mean():.4f}, largest {diff.max():.3f} nats")
  assert diff.mean() < 0.02 and diff.max() < 0.5


def test_given_tokens_take_less_than_a_layers_keys(novice):
  """If keys were read in another layout, XLA would transpose or copy all pages."""
  cfg = engine(MODEL).model
  cache = jax.eval_shape(lambda: KVCache.empty(cfg, 4096, 256))
  (view,) = decode_params.decoding_views(cfg, novice)
  for rows in (1, 4):
    row_R = jnp.zeros(rows, int)
    lowered = sampler.prefill.lower(
      cfg,
      view,
      cache,
      jnp.zeros((rows, 8), int),
      jnp.zeros((rows, 32), int),
      row_R,
      row_R,
    )
    taken = lowered.compile().memory_analysis().temp_size_in_bytes
    layer = cache.layers[0][0]
    assert taken < layer.size * layer.dtype.itemsize / 2

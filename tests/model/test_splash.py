"""The TPU's attention kernel, interpreted, against plain attention."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import attention
from coa_jax.model.kernels import blockwise, splash


def packed(T: int, H: int):
  """Queries at the last T of 512 places, keys, values, cotangents, segments."""
  keys = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(keys[0], (1, T, 2, H))
  k, v = (jax.random.normal(key, (1, 512, 1, H)) for key in keys[1:3])
  segment = jnp.asarray([[1] * 100 + [2] * 330 + [0] * 82])
  return q, k, v, jax.random.normal(keys[3], (1, T, 2, H)), segment


def interpreted(q, k, v, segment):
  return splash.attend_segments(q, k, v, segment, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "H"), [(256, 64), (512, 128)])
def test_splash_is_the_same_attention(T: int, H: int, monkeypatch):
  """The interpreted kernel skips some of the blocks."""
  monkeypatch.setattr(splash, "_BLOCK", 128)
  q, k, v, _, segment = packed(T, H)
  np.testing.assert_allclose(
    interpreted(q, k, v, segment),
    blockwise.attend_segments(q, k, v, segment),
    atol=2e-5 * math.sqrt(H),
  )


@pytest.mark.parametrize("fused", [0, 16])
@pytest.mark.parametrize(
  ("T", "H"),
  [
    pytest.param(256, 64, marks=pytest.mark.slow),
    pytest.param(512, 128, marks=pytest.mark.soak),
    pytest.param(256, 256, marks=pytest.mark.slow),
  ],
)
def test_splash_has_the_same_gradients(T: int, H: int, fused: int, monkeypatch):
  # A block has at least 128 places; the backward pass halves it for large heads.
  monkeypatch.setattr(splash, "_BLOCK", 128 if H <= 128 else 256)
  monkeypatch.setattr(splash, "_FUSED_UP_TO", fused)
  q, k, v, weight, segment = packed(T, H)

  def gradients(kernel):
    def total(q, k, v):
      return jnp.sum(kernel(q, k, v, segment) * weight)

    return jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)

  theirs = gradients(blockwise.attend_segments)
  for a, b in zip(gradients(interpreted), theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * math.sqrt(H))


@pytest.mark.parametrize(("kept", "forward"), [(blockwise.OUT, 1), ("another", 2)])
def test_the_forward_kernel_runs_once_where_its_name_is_kept(
  kept: str, forward: int, monkeypatch
):
  """It runs twice if the checkpoint policy saves another name."""
  monkeypatch.setattr(splash, "_BLOCK", 128)
  q, k, v, weight, segment = packed(512, 64)
  policy = jax.checkpoint_policies.save_only_these_names(kept)

  def total(q, k, v):
    attend = functools.partial(interpreted, segment=segment)
    return jnp.sum(jax.checkpoint(attend, policy=policy)(q, k, v) * weight)

  program = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(q, k, v))
  backward = 512 // splash.block_sizes(512, 512).block_kv_dkv
  assert program.count("pallas_call[") == forward + backward


@pytest.mark.parametrize(("T", "S"), [(512, 512), (256, 512)])
def test_blocks_are_visited_that_hold_something_seen(T: int, S: int):
  """Exactly those blocks, according to the full mask."""
  rng = np.random.default_rng(0)
  for _ in range(20):
    segment_S = np.sort(rng.integers(0, rng.integers(1, 9), S))[::-1]
    segment_BS = jnp.asarray(segment_S.copy())[None]
    mask_TS = np.asarray(attention._visible(segment_BS, T))[0]
    for q, kv in ((64, 64), (128, 32)):
      start_S = blockwise.starts(segment_BS)[0]
      expected = mask_TS.reshape(T // q, q, S // kv, kv).any((1, 3))
      np.testing.assert_array_equal(splash.visited(start_S, T, q, kv), expected)


def test_other_segments_cost_no_visits():
  """Eight 4k trajectories in a 32k row."""
  T = 32_768
  sizes = splash.block_sizes(T, T)
  alone, packed = (
    splash.visited(blockwise.starts(segment)[0], T, sizes.block_q, sizes.block_kv)
    for segment in (jnp.ones((1, T), int), jnp.arange(T)[None] // 4096)
  )
  # With blocks of 1,024: 32 x 33 / 2, and 8 x 4 x 5 / 2.
  assert (alone.sum(), packed.sum()) == (528, 80)


def test_each_block_is_fetched_once():
  """A step without a visit already holds the block of the next visit."""
  seen = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], bool)
  fetched = splash._fetched(seen)
  assert fetched.tolist() == [[0, 0, 0, 0], [0, 1, 2, 2], [2, 2, 2, 2], [2, 2, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_spoilt_keys_of_other_segments_are_not_read(rows: int, monkeypatch):
  """Each row has its own block list: its first segment ends at another place."""
  monkeypatch.setattr(splash, "_BLOCK", 128)
  keys = jax.random.split(jax.random.key(1), 3)
  q, k, v = (jax.random.normal(key, (rows, 384, 1, 64)) for key in keys)
  end = 128 * (1 + jnp.arange(rows)[:, None])
  segment = jnp.where(jnp.arange(384) < end, 1, 2)
  gone = (segment == 1)[..., None, None]
  spoilt = jnp.where(gone, jnp.nan, k), jnp.where(gone, jnp.nan, v)
  out = interpreted(q, k, v, segment)
  read = interpreted(q, *spoilt, segment)
  np.testing.assert_array_equal(jnp.where(gone, 0, read), jnp.where(gone, 0, out))
  assert jnp.isnan(jnp.where(gone, read, 0)).any()


@pytest.mark.parametrize(
  ("S", "fused"), [(4096, True), (32_768, True), (65_536, False)]
)
def test_one_kernel_goes_back_where_blocks_are_few(S: int, fused: bool):
  assert splash.block_sizes(S, S).use_fused_bwd_kernel == fused


def test_blocks_divide_rows():
  sizes = splash.block_sizes(384, 1536)
  assert (sizes.block_q, sizes.block_kv) == (128, 512)

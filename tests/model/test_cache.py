"""The cache of keys and values against the definition of attention; how it resizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import by_definition, heads

from coa_jax.model import cache as caching
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig


def model(K: int, H: int, layers: int = 1) -> ModelConfig:
  return ModelConfig(vocab_size=9, layers=layers, heads=4, kv_heads=K, head_dim=H)


def filled(k_BSKH: jax.Array, v_BSKH: jax.Array, size: int = 0) -> KVCache:
  """A cache of one layer that holds these, with room for `size` places."""
  B, S, K, H = k_BSKH.shape
  cache = KVCache.empty(model(K, H), B, size or S)
  place_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
  write = cache.write(place_BS, jnp.ones((B, S), bool))
  return cache.append(0, k_BSKH, v_BSKH, write)


@functools.partial(jax.jit, static_argnames="window")
def attend(cache: KVCache, q_BTNH, position_BT, window: int = 0) -> jax.Array:
  write = cache.write(position_BT, jnp.zeros(position_BT.shape, bool))
  return cache.attend(0, q_BTNH, write, window)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_each_query_head_reads_its_kv_head_up_to_its_own_place(K: int, window: int):
  q, k, v = heads(0, 2, 5, 4, K, 6)
  position_BT = jnp.array([[0, 1, 2, 3, 4], [4, 4, 0, 2, 1]])
  out = attend(filled(k, v), q, position_BT, window)
  behind_BTS = np.asarray(position_BT)[:, :, None] - np.arange(5)
  mask = (behind_BTS >= 0) & (behind_BTS < (window or 5))
  np.testing.assert_allclose(out, by_definition(q, k, v, mask), atol=2e-6)


def test_places_that_nothing_reads_change_no_bit():
  """So a cache may grow, whatever the neighbours of a row make it."""
  q, k, v = heads(3, 8, 4096, 4, 2, 16)
  position_BT = jnp.asarray(np.random.default_rng(0).integers(100, 500, (8, 1)))
  small = attend(filled(k[:, :512], v[:, :512]), q[:, :1], position_BT)
  for S in (1024, 2048, 4096):
    large = attend(filled(k[:, :S], v[:, :S]), q[:, :1], position_BT)
    np.testing.assert_array_equal(small, large)
    empty = attend(filled(k[:, :512], v[:, :512], S), q[:, :1], position_BT)
    np.testing.assert_array_equal(small, empty)
  mask_BTS = np.arange(512) <= np.asarray(position_BT)[..., None]
  expected = by_definition(q[:, :1], k[:, :512], v[:, :512], mask_BTS)
  np.testing.assert_allclose(small, expected, atol=2e-6)


def by_block(q_BTNH, k_BSKH, v_BSKH, position_BT) -> np.ndarray:
  """Attention with the keys of all blocks at once, each step a program of its own.

  Within one program XLA would make a single product of all blocks' sums.
  """
  B, S, K, H = k_BSKH.shape
  C = S // caching.BLOCK_SIZE
  k_BKCHP = k_BSKH.reshape(B, C, -1, K, H).transpose(0, 3, 1, 4, 2)
  v_BKCPH = v_BSKH.reshape(B, C, -1, K, H).transpose(0, 3, 1, 2, 4)
  mask_BTS = jnp.arange(S) <= position_BT[:, :, None]
  score_BKCRP = jax.jit(caching._scores)(q_BTNH, k_BKCHP, mask_BTS)
  weighted = jax.jit(caching._weighted)
  sum_BKCR, out_BKCRH = weighted(score_BKCRP, score_BKCRP.max((2, 4)), v_BKCPH)
  return caching._normalized(q_BTNH, sum_BKCR.sum(2), out_BKCRH.sum(2))


@pytest.mark.parametrize("places_last", [True, False])
def test_given_tokens_read_block_after_block_and_the_size_changes_no_bit(places_last):
  """What a long cache is extended by has the bits of dense attention by blocks."""
  q, k, v = heads(7, 3, 2048, 4, 2, 16)
  q = q[:, :64]
  for first in (0, 130, 400):  # in the first block, over an edge, in the second
    position_BT = first + jnp.arange(64) + jnp.array([[0], [3], [-first]])
    outs = []
    for S in (256, 512, 1024, 2048):
      if first + 67 > S:
        continue
      keys, values = filled(k[:, :S], v[:, :S]).layers[0]
      if not places_last:
        keys = keys.swapaxes(3, 4)
      cache = KVCache(((keys, values),), places_last, long=True)
      outs.append(attend(cache, q, position_BT))
      np.testing.assert_array_equal(
        outs[-1], by_block(q, k[:, :S], v[:, :S], position_BT)
      )
      np.testing.assert_array_equal(outs[-1], outs[0])


def test_what_is_extended_takes_memory_that_the_size_does_not_change():
  cfg = model(2, 16)
  q_BTNH = jax.ShapeDtypeStruct((4, 512, 4, 16), jnp.float32)
  position_BT = jax.ShapeDtypeStruct((4, 512), jnp.int32)
  bytes_of = []
  for S in (2048, 16384):
    cache = jax.eval_shape(lambda S=S: KVCache.empty(cfg, 4, S))
    compiled = attend.lower(cache, q_BTNH, position_BT).compile()
    bytes_of.append(compiled.memory_analysis().temp_size_in_bytes)
  # Scores with all places would be 512 MiB and more.
  assert bytes_of[0] == bytes_of[1] < 2**26


@pytest.mark.parametrize("P", [2, 3, 6])
def test_blocks_of_a_cache_are_one_attention(monkeypatch, P: int):
  monkeypatch.setattr(caching, "BLOCK_SIZE", P)
  q, k, v = heads(4, 2, 6, 4, 2, 8)
  out = attend(filled(k, v), q, jnp.arange(6) + jnp.zeros((2, 1), int))
  mask = np.tril(np.ones((2, 6, 6), bool))
  np.testing.assert_allclose(out, by_definition(q, k, v, mask), atol=2e-6)


def test_a_token_that_may_read_nothing_is_finite():
  q, k, v = heads(2, 1, 3, 2, 1, 4)
  out = attend(filled(k, v), q, jnp.full((1, 3), -1))
  assert jnp.isfinite(out).all()


def test_rows_in_any_order_are_written_and_read_and_those_past_the_last_dropped():
  q, k, v = heads(5, 3, 4, 4, 2, 8)
  cache = KVCache.empty(model(2, 8), 5, 4)
  place_BT = jnp.arange(4) + jnp.zeros((3, 1), int)
  row_B = jnp.array([3, 5, 0])  # 5 is past the last
  write = cache.write(place_BT, jnp.ones((3, 4), bool), row_B)
  cache = cache.append(0, k, v, write)
  out = cache.attend(0, q, write)
  mask = np.tril(np.ones((3, 4, 4), bool))
  expected = by_definition(q, k, v, mask)
  for row in (0, 2):
    np.testing.assert_allclose(out[row], expected[row], atol=2e-6)
  for x in jax.tree.leaves(cache):
    assert not np.asarray(x)[[1, 2, 4]].any()
    assert np.asarray(x)[[0, 3]].any()


def test_shared_rows_read_what_the_others_hold():
  q, k, v = heads(6, 4, 5, 4, 2, 8)
  position_BT = jnp.arange(5) + jnp.zeros((4, 1), int)
  before = attend(filled(k, v), q, position_BT)
  # Row 2 becomes row 0, row 3 row 2 as it was; 4 is past the last.
  shared = filled(k, v).share(jnp.array([0, 2, 1]), jnp.array([2, 3, 4]))
  q = q.at[2].set(q[0]).at[3].set(q[2])
  after = attend(shared, q, position_BT)
  np.testing.assert_array_equal(after, before[jnp.array([0, 1, 0, 2])])


def test_a_cache_doubles_and_shrinks_once_a_quarter_would_do(monkeypatch):
  monkeypatch.setattr(caching, "BLOCK_SIZE", 16)
  cfg, most = model(2, 8, layers=2), 128
  cache = KVCache.one_block(cfg, 3, most)
  cache = jax.tree.map(lambda x: x + 1.0, cache)
  sizes = []
  for places in (16, 17, 100, 90, 33, 32, 9, 8):
    cache = cache.resize(places, most)
    sizes.append(cache.size)
  assert sizes == [16, 32, 128, 128, 128, 64, 32, 32]
  for x in jax.tree.leaves(cache):  # the first 16 places were kept throughout
    assert (x == 1).sum() == (x == 0).sum() == x.size // 2
  assert KVCache.one_block(cfg, 3, most).resize(100, 100).size == 112  # 7 blocks
  assert caching.row_bytes(cfg, 16) == 2 * 2 * 2 * 8 * 4 * 16


def test_a_freed_cache_is_one_block_again(monkeypatch):
  monkeypatch.setattr(caching, "BLOCK_SIZE", 16)
  cfg = model(2, 8, layers=2)
  cache = KVCache.empty(cfg, 3, 64)
  freed = cache.free()
  assert all(x.is_deleted() for x in jax.tree.leaves(cache))
  like = KVCache.one_block(cfg, 3, 64)
  assert jax.tree.map(jnp.shape, freed) == jax.tree.map(jnp.shape, like)
  assert freed.free() is freed


def test_a_cache_may_be_smaller_than_a_block():
  cache = KVCache.one_block(model(2, 8), 3, 20)
  assert cache.size == 20
  assert cache.resize(20, 20) is cache and cache.free() is cache

"""The paged key-value cache against the definition of attention."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library
from test_attention import by_definition, heads

from coa_jax.model import cache as caching
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.kernels import paged, ragged, triton
from coa_jax.model.kernels.paged import RowPages


def model(K: int, H: int, layers: int = 1) -> ModelConfig:
  return ModelConfig(vocab_size=9, layers=layers, heads=4, kv_heads=K, head_dim=H)


def table(rows: int, blocks: int, pages: int = 0, seed: int = 0) -> np.ndarray:
  """A page table for rows: random pages, among others that stay free."""
  pages = pages or rows * blocks + 3
  order = np.random.default_rng(seed).permutation(pages)
  return order[: rows * blocks].reshape(rows, blocks).astype(np.int32)


def filled(
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  P: int,
  table_BC: np.ndarray,
  pages: int = 0,
  dtype: str = "float32",
) -> KVCache:
  """A cache with these keys and values in its one layer; the rest is noise."""
  B, S, K, H = k_BSKH.shape
  cfg = dataclasses.replace(model(K, H), dtype=dtype)
  empty = KVCache.empty(cfg, pages or int(table_BC.max()) + 1, P)
  rng = np.random.default_rng(1)
  noise = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), empty)
  if noise.layout == "joined":  # the padding after a head is always zero
    noise = jax.tree.map(lambda x: x.at[..., H:].set(0.0), noise)
  place_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
  write = noise.write(RowPages(jnp.asarray(table_BC)), place_BS, place_BS >= 0)
  return noise.append(0, k_BSKH, v_BSKH, write)


@jax.jit
def attend(cache: KVCache, table_BC, q_BTNH, position_BT) -> jax.Array:
  """Attention outputs for several tokens of each row."""
  nothing = jnp.zeros(position_BT.shape, bool)
  write = cache.write(RowPages(table_BC), position_BT, nothing)
  return cache.attend(0, q_BTNH, write)


@jax.jit
def decode(cache: KVCache, table_BC, q_B1NH, position_B) -> jax.Array:
  """Attention outputs for one token of each row."""
  rows = cache.decoding_rows(table_BC, position_B >= 0)
  nothing = jnp.zeros((len(position_B), 1), bool)
  write = cache.write(rows, position_B[:, None], nothing)
  return cache.attend(0, q_B1NH, write)


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("P", [2, 3, 6])
def test_each_query_head_reads_its_kv_head_up_to_its_own_place(P, K):
  q, k, v = heads(0, 2, 6, 4, K, 6)
  position_BT = jnp.array([[0, 1, 2, 3, 4, 5], [4, 5, 0, 2, 1, 3]])
  pages = table(2, 6 // P)
  cache = filled(k, v, P, pages)
  out = attend(cache, pages, q, position_BT)
  behind_BTS = np.asarray(position_BT)[:, :, None] - np.arange(6)
  expected = by_definition(q, k, v, behind_BTS >= 0)
  np.testing.assert_allclose(out, expected, atol=2e-6)
  for t in range(6):  # one token per row, which reads pages in place
    one = decode(cache, pages, q[:, t : t + 1], position_BT[:, t])
    np.testing.assert_allclose(one, expected[:, t : t + 1], atol=2e-6)


@pytest.mark.parametrize("P", [64, 256])
def test_paged_is_dense_bit_for_bit(P: int):
  """Independent of page numbers, pool size and other readers."""
  q, k, v = heads(3, 8, 1024, 4, 2, 16)
  q = q[:, :1]
  position_B = jnp.asarray(np.random.default_rng(0).integers(0, 1024, 8))
  blocks = 1024 // P
  # Dense: each row's pages in order, and no free pages.
  rows = np.arange(8 * blocks, dtype=np.int32).reshape(8, blocks)
  expected = decode(filled(k, v, P, rows), rows, q, position_B)
  for seed, more in enumerate((0, 1, 50)):
    pages = table(8, blocks, 8 * blocks + more, seed)
    cache = filled(k, v, P, pages, 8 * blocks + more)
    np.testing.assert_array_equal(decode(cache, pages, q, position_B), expected)
  # Unread blocks need no page, and the table may be wider.
  needed_B = np.asarray(position_B) // P + 1
  few = np.where(np.arange(blocks) < needed_B[:, None], pages, -1)
  wide = np.pad(few, ((0, 0), (0, 5)), constant_values=-1)
  np.testing.assert_array_equal(decode(cache, wide, q, position_B), expected)
  # Rows that do not read do not change the others.
  some_B = jnp.where(jnp.arange(8) % 3 > 0, position_B, -1)
  out = decode(cache, wide, q, some_B)
  np.testing.assert_array_equal(out[some_B >= 0], expected[some_B >= 0])


def by_block(q_BTNH, k_BSKH, v_BSKH, position_BT, P: int) -> np.ndarray:
  """Attention over all blocks' keys at once, with one program per step.

  In a single program XLA would compute the sums of all blocks as one product.
  """
  B, S, K, H = k_BSKH.shape
  k_BKCHP = k_BSKH.reshape(B, S // P, P, K, H).transpose(0, 3, 1, 4, 2)
  v_BKCPH = v_BSKH.reshape(B, S // P, P, K, H).transpose(0, 3, 1, 2, 4)
  mask_BTS = jnp.arange(S) <= position_BT[:, :, None]
  score_BKCRP = jax.jit(paged._scores, static_argnums=3)(
    q_BTNH, k_BKCHP, mask_BTS, True
  )
  weighted = jax.jit(paged._weighted)
  max_BK1R = score_BKCRP.max((2, 4))[:, :, None]
  sum_BKCR, out_BKCRH = weighted(score_BKCRP, max_BK1R, v_BKCPH)
  return paged._normalized(q_BTNH, sum_BKCR.sum(2), out_BKCRH.sum(2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["places_last", "heads_first"])
def test_long_rows_are_read_block_after_block_and_their_number_changes_no_bit(
  layout: str, monkeypatch
):
  """Extending a long cache is bit-identical to dense attention by blocks."""
  monkeypatch.setattr(paged, "SHORT", 128)  # even the shortest row is read by blocks
  monkeypatch.setattr(caching, "_layout", lambda *_: layout)
  q, k, v = heads(7, 3, 2048, 4, 2, 16)
  q = q[:, :64]
  for first in (0, 130, 400):  # 0 and 130: in the first block; 400: in the second
    position_BT = first + jnp.arange(64) + jnp.array([[0], [3], [-first]])
    outs = []
    for S in (256, 512, 1024, 2048):
      if first + 67 > S:
        continue
      pages = table(3, S // 256, seed=S)
      outs.append(attend(filled(k[:, :S], v[:, :S], 256, pages), pages, q, position_BT))
      np.testing.assert_array_equal(
        outs[-1], by_block(q, k[:, :S], v[:, :S], position_BT, 256)
      )
      np.testing.assert_array_equal(outs[-1], outs[0])


def test_memory_of_an_extension_does_not_depend_on_the_length():
  cfg = model(2, 16)
  q_BTNH = jax.ShapeDtypeStruct((4, 512, 4, 16), jnp.float32)
  position_BT = jax.ShapeDtypeStruct((4, 512), jnp.int32)
  bytes_of = []
  for S in (2048, 16384):
    cache = jax.eval_shape(lambda: KVCache.empty(cfg, 64, 256))
    table_BC = jax.ShapeDtypeStruct((4, S // 256), jnp.int32)
    compiled = attend.lower(cache, table_BC, q_BTNH, position_BT).compile()
    bytes_of.append(compiled.memory_analysis().temp_size_in_bytes)
  # Scores over all 16,384 places would take 512 MiB.
  assert abs(bytes_of[0] - bytes_of[1]) < 2**16 and bytes_of[0] < 2**26


def test_a_token_that_may_read_nothing_is_finite():
  q, k, v = heads(2, 1, 3, 2, 1, 4)
  pages = table(1, 1)
  cache = filled(k, v, 3, pages)
  assert jnp.isfinite(attend(cache, pages, q, jnp.full((1, 3), -1))).all()
  assert jnp.isfinite(decode(cache, pages, q[:, :1], jnp.array([-1]))).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["places_last", "heads_first", "joined"])
def test_only_pages_of_tokens_that_count_are_written(layout: str, monkeypatch):
  monkeypatch.setattr(caching, "_layout", lambda *_: layout)
  _, k, v = heads(5, 3, 4, 4, 2, 8)
  cache = KVCache.empty(model(2, 8), 6, 2)
  table_BC = jnp.array([[4, 1], [-1, -1], [0, -1]])
  place_BT = jnp.arange(4) + jnp.zeros((3, 1), int)
  valid_BT = place_BT < jnp.array([[3], [4], [4]])
  cache = cache.append(0, k, v, cache.write(RowPages(table_BC), place_BT, valid_BT))
  for x in jax.tree.leaves(cache):
    x = np.asarray(x)
    if layout == "heads_first":
      x = np.moveaxis(x, 1, 0)
    x = np.moveaxis(x, {"joined": 1}.get(layout, 2), 1)
    if layout == "places_last" and x.shape[1] != 2:
      x = np.moveaxis(x, 3, 1)
    written = x.reshape(6, 2, -1).any(-1)
    assert written.tolist() == [
      [True] * 2,
      [True, False],
      *[[False] * 2] * 2,
      [True] * 2,
      [False] * 2,
    ]


@pytest.mark.slow
def test_pages_are_copied_grown_and_kept_on_the_host():
  q, k, v = heads(6, 2, 40, 4, 2, 8)
  pages = table(2, 5)
  cache = filled(k, v, 8, pages)
  position_BT = jnp.broadcast_to(jnp.arange(40), (2, 40))
  before = attend(cache, pages, q, position_BT)
  # Copies a row's pages to free pages; a target past the last page is dropped.
  more = cache.grow(30)
  assert more.pages == 30 and all(x.is_deleted() for x in jax.tree.leaves(cache))
  other = np.array([[20, 25, 21, 27, 29]])
  onto = np.concatenate([other[0], [30]])
  cache = more.copy(np.append(pages[0], pages[1, 0]), onto)
  np.testing.assert_array_equal(
    attend(cache, other, q[:1], position_BT[:1]), before[:1]
  )
  np.testing.assert_array_equal(attend(cache, pages, q, position_BT), before)
  # Moves pages to the host and back to other pages; the rest is unchanged.
  held = cache.to_host(pages[1].tolist())
  back = np.array([[23, 22, 28, 24, 26]])
  cache = cache.from_host(back[0].tolist(), held)
  np.testing.assert_array_equal(attend(cache, back, q[1:], position_BT[1:]), before[1:])
  np.testing.assert_array_equal(attend(cache, pages, q, position_BT), before)


def test_pages_of_short_rows_are_no_larger_than_they():
  assert [caching.page_size(n) for n in (20, 256, 300)] == [20, 256, 256]
  assert [caching.num_blocks(n, 300) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]
  assert caching.row_bytes(model(2, 8, layers=2), 16) == 2 * 2 * 2 * 8 * 4 * 16


@pytest.mark.slow
@pytest.mark.parametrize("H", [128, 64])
def test_a_tpus_kernel_is_given_what_its_reference_reads(H: int, monkeypatch):
  """The kernel runs only on a TPU, so its library's reference runs instead."""
  q, k, v = heads(8, 3, 96, 4, 2, H)
  monkeypatch.setattr(caching, "_layout", lambda *_: "joined")
  pages = table(3, 3)
  cache = filled(k, v, 32, pages)
  assert cache.layers[0][0].shape[3] == 128  # smaller heads are padded
  given = []

  def reference(*args, num_kv_pages_per_block, num_queries_per_block, **options):
    given.append((num_kv_pages_per_block, num_queries_per_block))
    library.dynamic_validate_inputs(*args, **options)
    return library.ref_ragged_paged_attention(*args, **options)

  monkeypatch.setattr(ragged, "ragged_paged_attention", reference)
  for first in (0, 30):
    position_BT = first + jnp.arange(64) + jnp.zeros((3, 1), int)
    write = cache.write(RowPages(jnp.asarray(pages)), position_BT, position_BT < 0)
    out = cache.attend(0, q[:, :64], write)
    mask = np.asarray(position_BT)[:, :, None] >= np.arange(96)
    np.testing.assert_allclose(out, by_definition(q[:, :64], k, v, mask), atol=2e-5)
  position_B = jnp.array([5, -1, 95])
  rows = cache.decoding_rows(jnp.asarray(pages), position_B >= 0)
  write = cache.write(rows, position_B[:, None], position_B[:, None] < 0)
  one = cache.attend(0, q[:, :1], write)
  mask = np.asarray(position_B)[:, None, None] >= np.arange(96)
  expected = by_definition(q[:, :1], k, v, mask)
  np.testing.assert_allclose(one[::2], expected[::2], atol=2e-5)
  assert given[0] == (3, 64) and given[-1] == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("P", "T", "G"),
  [
    *((64, 1, 1), (64, 1, 3), (256, 1, 4)),
    *((64, 150, 1), (64, 150, 3), (256, 40, 1), (256, 40, 3)),
  ],
)
def test_a_gpus_kernel_gives_tokens_what_the_definition_does(P, T, G, monkeypatch):
  """Interpreted; rows start at different places, and one reads nothing."""
  q, k, v = (x.astype(jnp.bfloat16) for x in heads(9, 4, 512, 2 * G, 2, 64))
  q = q[:, :T]
  monkeypatch.setattr(caching, "_layout", lambda *_: "heads_first")
  for name in ("attend_pages", "attend_tokens"):
    interpreted = functools.partial(getattr(triton, name), interpret=True)
    monkeypatch.setattr(triton, name, interpreted)
  monkeypatch.setattr(paged, "attend", None)  # fails if the XLA path runs
  pages = table(4, 512 // P)
  cache = filled(k, v, P, pages, dtype="bfloat16")
  position_BT = jnp.array([0, 300, 0, 512 - T])[:, None] + jnp.arange(T)
  without = pages.copy()
  without[2] = -1
  outs = [attend(cache, without, q, position_BT)]
  if T == 1:
    outs.append(decode(cache, pages, q, position_BT[:, 0].at[2].set(-1)))
  some = np.array([0, 1, 3])
  mask = np.asarray(position_BT)[some, :, None] >= np.arange(512)
  expected = by_definition(*(x[some].astype(jnp.float32) for x in (q, k, v)), mask)
  for out in outs:
    np.testing.assert_allclose(out[some].astype(jnp.float32), expected, atol=0.02)
    assert not np.asarray(out[2]).any()


@pytest.mark.usefixtures("gpu_described")
@pytest.mark.parametrize("T", [1, 32])
def test_on_a_gpu_pages_are_read_by_a_kernel(T, monkeypatch):
  """Lowered for CUDA without a GPU, in bfloat16."""
  monkeypatch.setattr(caching, "_layout", lambda *_: "heads_first")
  cfg = dataclasses.replace(model(2, 64), dtype="bfloat16")
  cache = jax.eval_shape(lambda: KVCache.empty(cfg, 100, 256))
  table_BC = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  q_BTNH = jax.ShapeDtypeStruct((4, T, 4, 64), jnp.bfloat16)
  position_BT = jax.ShapeDtypeStruct((4, T), jnp.int32)
  call = "__gpu$xla.gpu.triton"
  export = jax.export.export(
    jax.jit(attend.__wrapped__),
    platforms=["cuda"],
    disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(call)],
  )
  text = export(cache, table_BC, q_BTNH, position_BT).mlir_module()
  assert text.count(f"@{call}(") == 1

"""A decoder's attention over keys and values in pages, in plain XLA.

Each page has its own products and sums, which are added in the row's block order. So
unread places add exact zeros at the end, and results are bit-identical for any pool
size, page numbers and other rows (float32, CPU).

This file's axis letters: J pages of P places; C blocks per row; R = G T query rows.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

# Maximum places per row for which several tokens read all blocks at once on a CPU.
SHORT = 1024
# Finite, so that a token without readable places gives no NaN.
_MASKED = -1e30


@flax.struct.dataclass
class RowPages:
  """The pages of a call's rows; all layers share them.

  Attributes:
    table_BC: int page per block of a row; -1 if it has none.
    owner_J: the row that reads each page, any row for an unread page; None unless rows
      of one token read pages in place.
    block_J: each page's block number in its row; C for an unread page.
    slot_B: each row's slot, which holds its linear-attention states; past the last slot
      for unused rows; None if the rows are all slots in order.
  """

  table_BC: jax.Array
  owner_J: jax.Array | None = None
  block_J: jax.Array | None = None
  slot_B: jax.Array | None = None


def decoding_rows(table_BC: jax.Array, active_B: jax.Array, pages: int) -> RowPages:
  """Prepares rows of one token each; see `KVCache.decoding_rows`."""
  B, C = table_BC.shape
  table_BC = jnp.where(active_B[:, None], table_BC, -1)
  # A negative index would count from the end.
  page_BC = jnp.where(table_BC >= 0, table_BC, pages)
  owner_J = jnp.zeros(pages, int).at[page_BC].set(jnp.arange(B)[:, None], mode="drop")
  block_J = jnp.full(pages, C).at[page_BC].set(jnp.arange(C), mode="drop")
  return RowPages(table_BC, owner_J, block_J)


def attend(
  q_BTNH: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  rows: RowPages,
  position_BT: jax.Array,
  places_last: bool,
) -> jax.Array:
  """Attends causally from each row's tokens to the row's pages.

  If `rows` has page owners, each row has one token, and the whole pool is read in
  place. Several tokens would have large scores in a long row, so they read block after
  block up to their last readable block, with memory independent of the row's length.
  On a CPU, short rows read all blocks at once.

  Args:
    keys: [J, K, H, P] with `places_last`, else [K, J, P, H].
    values: [J, K, P, H] with `places_last`, else [K, J, P, H].
    places_last: the layout of keys and values.
  """
  # --- One token per row: no page is moved.
  if rows.owner_J is not None:
    return _attend_in_place(q_BTNH, keys, values, rows, position_BT[:, 0])

  # --- Several tokens: gather each row's pages, all at once or block after block.
  P = values.shape[2]
  K = values.shape[1 if places_last else 0]
  C = rows.table_BC.shape[1]
  page_BC = jnp.maximum(rows.table_BC, 0)  # page 0 in place of a missing page

  def blocks(first: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns keys [B, K, c, H, P] (or P, H) and values [B, K, c, P, H]."""
    page_Bc = jax.lax.dynamic_slice_in_dim(page_BC, first, count, axis=1)
    axis = 0 if places_last else 1
    k = jnp.take(keys, page_Bc, axis=axis, mode="clip")
    v = jnp.take(values, page_Bc, axis=axis, mode="clip")
    if places_last:
      return k.swapaxes(1, 2), v.swapaxes(1, 2)
    # Keys stay untransposed: XLA would transpose the whole pool for one row's keys.
    return jnp.moveaxis(k, 0, 1), jnp.moveaxis(v, 0, 1)

  if places_last and C * P <= SHORT:
    mask_BTS = _mask(position_BT[..., None], jnp.arange(C * P))
    return _attend(q_BTNH, *blocks(0, C), mask_BTS)
  shape = (K, C, P)
  return _attend_by_block(q_BTNH, blocks, position_BT, shape, places_last)


def _mask(position: jax.Array, place: jax.Array) -> jax.Array:
  """Returns True where a token reads a place: up to its own position."""
  return place <= position


def _attend_in_place(
  q_B1NH: jax.Array,
  k_JKHP: jax.Array,
  v_JKPH: jax.Array,
  rows: RowPages,
  position_B: jax.Array,
) -> jax.Array:
  """Attends from one token per row: one product of all pages with their rows' tokens.

  No page is moved, and no page may have two readers.
  """
  B, _, N, H = q_B1NH.shape
  _, K, _, P = k_JKHP.shape
  q_BKGH = (q_B1NH * H**-0.5).reshape(B, K, N // K, H)

  def by_row(x_J: jax.Array, filler: float) -> jax.Array:
    """Gathers each row's own pages: [J, K, G, ...] to [B, K, C, G, ...]."""
    x_BC = jnp.take(x_J, jnp.maximum(rows.table_BC, 0), axis=0, mode="clip")
    there_BC = jnp.expand_dims(rows.table_BC >= 0, range(2, x_BC.ndim))
    return jnp.where(there_BC, x_BC, filler).swapaxes(1, 2)

  # --- Scores of all pages; places past the row's position are masked.
  score_JKGP = jnp.matmul(
    q_BKGH[rows.owner_J], k_JKHP, preferred_element_type=jnp.float32
  )
  place_JP = rows.block_J[:, None] * P + jnp.arange(P)
  mask_JP = _mask(position_B[rows.owner_J][:, None], place_JP)
  score_JKGP = jnp.where(mask_JP[:, None, None], score_JKGP, _MASKED)

  # --- One maximum over a row's blocks, and each block's own sums.
  max_BKG = by_row(score_JKGP.max(-1), _MASKED).max(2)
  sum_JKG, out_JKGH = _weighted(score_JKGP, max_BKG[rows.owner_J], v_JKPH)
  sum_BKG = by_row(sum_JKG, 0.0).sum(2)
  sum_BKG = jnp.maximum(sum_BKG, 1e-30)  # for a row without pages
  return _normalized(q_B1NH, sum_BKG, by_row(out_JKGH, 0.0).sum(2))


def _attend(
  q_BTNH: jax.Array, k_BKCHP: jax.Array, v_BKCPH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
  """Scaled dot-product attention; query head n reads kv head n // (N // K).

  Source: Ainslie et al. 2023, arXiv 2305.13245 (GQA).
  """
  score_BKCRP = _scores(q_BTNH, k_BKCHP, mask_BTS, places_last=True)
  # One maximum over all blocks, and each block's own sum.
  max_BKR = score_BKCRP.max((2, 4))
  sum_BKCR, out_BKCRH = _weighted(score_BKCRP, max_BKR[:, :, None], v_BKCPH)
  return _normalized(q_BTNH, sum_BKCR.sum(2), out_BKCRH.sum(2))


def _attend_by_block(
  q_BTNH: jax.Array,
  blocks: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]],
  position_BT: jax.Array,
  shape: tuple[int, int, int],
  places_last: bool,
) -> jax.Array:
  """Attends like `_attend`, but one block after another; sums in block order.

  A first pass finds the maximum over all blocks, so scores are computed twice: a
  running maximum would rescale, and so round, earlier sums.

  Args:
    blocks: maps (first block, count) to the rows' keys and values.
    shape: K kv heads, C blocks, P places per block.
  """
  K, C, P = shape
  B, T, N, H = q_BTNH.shape
  R = T * (N // K)

  def scored(c: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys, v_BK1PH = blocks(c, 1)
    mask_BTP = _mask(position_BT[..., None], c * P + jnp.arange(P))
    return _scores(q_BTNH, keys, mask_BTP, places_last), v_BK1PH

  def highest(c: jax.Array, max_BKR: jax.Array) -> jax.Array:
    return jnp.maximum(max_BKR, scored(c)[0].max((2, 4)))

  def summed(
    c: jax.Array, sums: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    score_BK1RP, v_BK1PH = scored(c)
    sum_BK1R, out_BK1RH = _weighted(score_BK1RP, max_BKR[:, :, None], v_BK1PH)
    return sums[0] + sum_BK1R[:, :, 0], sums[1] + out_BK1RH[:, :, 0]

  # Blocks past every query's position would add exact zeros. The barrier hides the
  # count: for a single block XLA would drop the loops and choose other kernels, with
  # other rounding.
  count = jnp.clip(position_BT.max() // P + 1, 1, C)
  count = jax.lax.optimization_barrier(count)
  max_BKR = jnp.full((B, K, R), _MASKED, jnp.float32)
  max_BKR = jax.lax.fori_loop(0, count, highest, max_BKR)
  # Zeros that depend on the queries: else a GPU allocates all layers' zeros at once.
  zero = (q_BTNH[0, 0, 0, 0] > jnp.inf).astype(jnp.float32)
  sums = (jnp.full((B, K, R), zero), jnp.full((B, K, R, H), zero))
  sum_BKR, out_BKRH = jax.lax.fori_loop(0, count, summed, sums)
  return _normalized(q_BTNH, sum_BKR, out_BKRH)


def _scores(
  q_BTNH: jax.Array, keys: jax.Array, mask_BTS: jax.Array, places_last: bool
) -> jax.Array:
  """Returns all blocks' score_BKCRP in float32; R = G T: a kv head's query rows."""
  B, T, N, H = q_BTNH.shape
  K, C = keys.shape[1:3]
  P = keys.shape[4 if places_last else 3]
  G = N // K
  # One matrix product per kv head, for all G query heads together. Queries are repeated
  # for each block: a product over all blocks at once would move the keys.
  q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
  q_BKCRH = jnp.broadcast_to(q_BKGTH.reshape(B, K, 1, G * T, H), (B, K, C, G * T, H))
  score_BKCRP = jnp.einsum(
    "BKCRH,BKCHP->BKCRP" if places_last else "BKCRH,BKCPH->BKCRP",
    q_BKCRH,
    keys,
    preferred_element_type=jnp.float32,
  )
  score_BKCGTP = score_BKCRP.reshape(B, K, C, G, T, P)
  mask_BCTP = mask_BTS.reshape(B, T, C, P).swapaxes(1, 2)
  score_BKCGTP = jnp.where(mask_BCTP[:, None, :, None], score_BKCGTP, _MASKED)
  return score_BKCGTP.reshape(B, K, C, G * T, P)


def _weighted(
  score: jax.Array, highest: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns each block's sum of weights and weighted values, float32.

  Args:
    score: [..., R, P].
    highest: subtracted from the scores, [..., R].
    values: [..., P, H].
  """
  e = jnp.exp(score - highest[..., None])
  # Otherwise XLA would merge the sums over places and over blocks.
  total = jax.lax.optimization_barrier(e.sum(-1))
  out = jnp.matmul(e.astype(values.dtype), values, preferred_element_type=jnp.float32)
  return total, out


def _normalized(
  q_BTNH: jax.Array, sum_BKR: jax.Array, out_BKRH: jax.Array
) -> jax.Array:
  """Returns out_BTNH in q's dtype; the division comes last, where it is cheapest."""
  B, T, N, H = q_BTNH.shape
  K = sum_BKR.shape[1]
  out_BKGTH = (out_BKRH / sum_BKR[..., None]).reshape(B, K, N // K, T, H)
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)

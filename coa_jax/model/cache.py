"""The cache of keys and values: the one type that knows how they are laid out.

A decoder appends a call's keys and values, attends over what is there, shares a row's
with other rows, resizes the cache as trajectories grow, and frees it. In which axes and
blocks they lie is known in this file alone.

Two letters of its own: C blocks of P places each; S = C P.

budget: the layout and the two ways to attend over it are one secret.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner

# The most places of a block; a cache of more has several blocks.
BLOCK_SIZE = 256
# The most places of a row over which several tokens attend at once.
SHORT = 1024
# Finite, so that a token that may read nothing stays free of NaN.
_MASKED = -1e30


@flax.struct.dataclass
class CacheWrite:
  """Where the tokens of a call stand; the same for every layer.

  Attributes:
    position_BT: the position of each in its own sequence.
    place_BT: the place that its key and value are written to; past the last one for a
      token that is not to be written.
    row_B: the cache's row of each row of tokens; None where they are in order.
  """

  position_BT: jax.Array
  place_BT: jax.Array
  row_B: jax.Array | None


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer, for rows of S places.

  The place of a token is its position in its own sequence. What stands in places that
  nothing reads changes no bit of what is computed (float32, CPU), and neither does S.

  Attributes:
    layers: of each its keys [B, K, C, H, P] and values [B, K, C, P, H].
    places_last: whether keys lie so, on a CPU: few queries' scores then run along
      contiguous memory (decoding takes half the time). Elsewhere keys are
      [B, K, C, P, H] as values are: a TPU would turn all of a cache that lies
      otherwise, at both ends of every call.
    long: whether rows may come to have more than SHORT places; see `attend`.
  """

  layers: tuple[tuple[jax.Array, jax.Array], ...]
  places_last: bool = flax.struct.field(pytree_node=False, default=True)
  long: bool = flax.struct.field(pytree_node=False, default=False)

  @classmethod
  def empty(
    cls, cfg: ModelConfig, rows: int, size: int, partitioner: Partitioner | None = None
  ) -> KVCache:
    """Makes a cache for `rows` sequences, in the dtype of activations.

    It has `size` places; above BLOCK_SIZE as many more as fill the last block.
    """
    C = -(-size // BLOCK_SIZE)
    P = min(size, BLOCK_SIZE)
    H = cfg.head_dim
    places_last = _device_of(partitioner).platform == "cpu"
    key_axes = (H, P) if places_last else (P, H)
    # Each an array of its own: their memory is donated and freed one by one.
    layers = []
    for _ in range(cfg.layers):
      keys = _zeros((rows, cfg.kv_heads, C, *key_axes), cfg.dtype, partitioner)
      values = _zeros((rows, cfg.kv_heads, C, P, H), cfg.dtype, partitioner)
      layers.append((keys, values))
    return cls(tuple(layers), places_last, long=size > SHORT)

  @classmethod
  def one_block(
    cls, cfg: ModelConfig, rows: int, most: int, partitioner: Partitioner | None = None
  ) -> KVCache:
    """Makes a cache to begin with: one block, or `most` places where that is less."""
    cache = cls.empty(cfg, rows, min(most, BLOCK_SIZE), partitioner)
    return cache.replace(long=most > SHORT)

  @property
  def size(self) -> int:
    """Counts the places of a row: S."""
    C, P = self.layers[0][1].shape[2:4]
    return C * P

  def write(
    self,
    position_BT: jax.Array,
    valid_BT: jax.Array,
    row_B: jax.Array | None = None,
  ) -> CacheWrite:
    """Says where a call's tokens go: what `append` and `attend` of every layer take.

    Args:
      position_BT: int position of each token in its own sequence.
      valid_BT: True for tokens to be written.
      row_B: the cache's row of each row of tokens, where they are not in order; no two
        write to one. What points past the last row is dropped.
    """
    return CacheWrite(position_BT, jnp.where(valid_BT, position_BT, self.size), row_B)

  def append(
    self,
    layer: int,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    write: CacheWrite,
    partitioner: Partitioner | None = None,
  ) -> KVCache:
    """Writes a call's keys and values into one layer; returns the new cache."""
    keys, v_BKCPH = self.layers[layer]
    B, _, K, _ = k_BTKH.shape
    P = v_BKCPH.shape[3]
    row_B = jnp.arange(B) if write.row_B is None else write.row_B
    # Tokens that are not to be written point past the end, and are dropped. With the
    # head's index left out, XLA would keep a window's cache in another layout and copy
    # all of it at both ends.
    row = row_B[:, None, None]
    head = jnp.arange(K)
    block = write.place_BT[..., None] // P
    place = write.place_BT[..., None] % P
    if self.places_last:
      keys = keys.at[row, head, block, :, place].set(k_BTKH, mode="drop")
    else:
      keys = keys.at[row, head, block, place].set(k_BTKH, mode="drop")
    v_BKCPH = v_BKCPH.at[row, head, block, place].set(v_BTKH, mode="drop")
    layers = list(self.layers)
    layers[layer] = (_shard(keys, partitioner), _shard(v_BKCPH, partitioner))
    return self.replace(layers=tuple(layers))

  def attend(
    self, layer: int, q_BTNH: jax.Array, write: CacheWrite, window: int = 0
  ) -> jax.Array:
    """Attends with a call's tokens over one layer, after `append`.

    Tokens of a short cache, and one token of each row in any, read all blocks at once.
    Several tokens' scores with all places of a long one would be large: they read block
    after block, up to the last that any of them may read, in memory that S does not
    change. A cache keeps to its way as it grows: none depends on S in any bit (float32,
    CPU).

    Args:
      layer: its number.
      q_BTNH: queries; a token reads places up to its own.
      write: of the call.
      window: places that a token reads, its own included; 0 for all.

    Returns:
      out_BTNH in q's dtype.
    """
    keys, v_BKCPH = self.layers[layer]

    def blocks(first: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array]:
      """Keys [B, K, c, H, P] and values [B, K, c, P, H] of the call's rows."""
      k = jax.lax.dynamic_slice_in_dim(keys, first, count, axis=2)
      v = jax.lax.dynamic_slice_in_dim(v_BKCPH, first, count, axis=2)
      if write.row_B is not None:
        k = jnp.take(k, write.row_B, axis=0, mode="clip")
        v = jnp.take(v, write.row_B, axis=0, mode="clip")
      return (k if self.places_last else k.swapaxes(3, 4)), v

    _, K, C, P, _ = v_BKCPH.shape
    if not self.long or q_BTNH.shape[1] == 1:
      mask_BTS = _mask(write.position_BT, jnp.arange(C * P), window)
      return _attend(q_BTNH, *blocks(0, C), mask_BTS)
    return _attend_by_block(q_BTNH, blocks, write.position_BT, (K, C, P), window)

  def share(
    self, from_R: jax.Array, to_R: jax.Array, partitioner: Partitioner | None = None
  ) -> KVCache:
    """Copies rows to other rows; the arrays of this cache are gone.

    Args:
      from_R: rows to read, all before any is written.
      to_R: rows to write; what points past the last row is dropped.
      partitioner: of the sampler, on several devices.
    """
    return _share(self, from_R, to_R, partitioner)

  def resize(
    self, needed: int, most: int, partitioner: Partitioner | None = None
  ) -> KVCache:
    """Makes room for `needed` places: doubles, or cuts once a quarter would do.

    Where the size changes, the arrays of this one are gone.

    Args:
      needed: places that rows need.
      most: places that they may ever need; the cache grows no further.
      partitioner: of the sampler, on several devices.
    """
    # A power of two of blocks, so that few sizes are ever compiled.
    blocks = 1
    while blocks * BLOCK_SIZE < needed:
      blocks *= 2
    if self.size >= 4 * blocks * BLOCK_SIZE:
      blocks *= 2  # to half, not to the least: it may grow again
    elif self.size >= needed:
      return self
    blocks = min(blocks, -(-most // BLOCK_SIZE))
    layers = []
    for layer in self.layers:
      layers.append(_resize(layer, blocks, partitioner))
      for x in layer:  # so that one layer at a time is there twice
        x.delete()
    return self.replace(layers=tuple(layers))

  def free(self, partitioner: Partitioner | None = None) -> KVCache:
    """Makes a cache of one block whose rows nothing has been written to.

    Gives back the memory of a larger one, whose arrays are gone then. One of a single
    block stays as it is: what is left in it, nothing reads.
    """
    if self.size <= BLOCK_SIZE:
      return self
    layers = []
    for layer in self.layers:
      one_block = []
      for x in layer:
        shape = (*x.shape[:2], 1, *x.shape[3:])
        x.delete()  # first, so that both are never there at once
        one_block.append(_zeros(shape, x.dtype, partitioner))
      layers.append(tuple(one_block))
    return self.replace(layers=tuple(layers))


def row_bytes(cfg: ModelConfig, size: int) -> int:
  """Counts the bytes of so many places of one row, in all layers."""
  scalars = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim
  return size * scalars * jnp.dtype(cfg.dtype).itemsize


def _device_of(partitioner: Partitioner | None) -> jax.Device:
  """Returns a device of the sampler: all of them are of one kind."""
  return partitioner.mesh.devices.flat[0] if partitioner else jax.devices()[0]


def _zeros(
  shape: tuple[int, ...], dtype: jnp.dtype, partitioner: Partitioner | None
) -> jax.Array:
  sharding = partitioner.sharding("BK...") if partitioner else None
  return jnp.zeros(shape, dtype, device=sharding)


def _shard(x: jax.Array, partitioner: Partitioner | None) -> jax.Array:
  """Constrains keys or values to the mesh, where there is one; inside a jit."""
  return partitioner.shard(x, "BK...") if partitioner else x


@functools.partial(jax.jit, static_argnames="partitioner", donate_argnames="cache")
def _share(
  cache: KVCache,
  from_R: jax.Array,
  to_R: jax.Array,
  partitioner: Partitioner | None = None,
) -> KVCache:
  def copied(x: jax.Array) -> jax.Array:
    x = x.at[to_R].set(jnp.take(x, from_R, axis=0, mode="clip"), mode="drop")
    return _shard(x, partitioner)

  return jax.tree.map(copied, cache)


@functools.partial(jax.jit, static_argnames=("blocks", "partitioner"))
def _resize(
  layer: tuple[jax.Array, jax.Array], blocks: int, partitioner: Partitioner | None
) -> tuple[jax.Array, jax.Array]:
  """One layer with so many blocks: empty ones added, or the last left out."""

  def sized(x: jax.Array) -> jax.Array:
    more = max(0, blocks - x.shape[2])
    x = jnp.pad(x[:, :, :blocks], ((0, 0), (0, 0), (0, more), (0, 0), (0, 0)))
    return _shard(x, partitioner)

  return jax.tree.map(sized, layer)


def _mask(position_BT: jax.Array, place_S: jax.Array, window: int) -> jax.Array:
  """mask_BTS, True where a token reads a place: those up to its own."""
  mask_BTS = place_S <= position_BT[:, :, None]
  if window:
    mask_BTS &= place_S > position_BT[:, :, None] - window
  return mask_BTS


def _attend(
  q_BTNH: jax.Array, k_BKCHP: jax.Array, v_BKCPH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
  """Scaled dot-product attention; query head n reads kv head n // (N // K).

  Each block has products and sums of its own, of a size that C does not change; so
  places that nothing reads add exact zeros at the end, and a larger cache changes no
  bit (float32, CPU). Source: Ainslie et al. 2023, arXiv 2305.13245 (GQA).
  """
  score_BKCRP = _scores(q_BTNH, k_BKCHP, mask_BTS)
  # One maximum of all blocks, and each block's own sum.
  max_BKR = score_BKCRP.max((2, 4))
  sum_BKCR, out_BKCRH = _weighted(score_BKCRP, max_BKR, v_BKCPH)
  return _normalized(q_BTNH, sum_BKCR.sum(2), out_BKCRH.sum(2))


def _attend_by_block(
  q_BTNH: jax.Array,
  blocks: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]],
  position_BT: jax.Array,
  shape: tuple[int, int, int],
  window: int,
) -> jax.Array:
  """Attends as `_attend` does, one block after the other; sums in their order.

  The maximum is found first, over all blocks: a running one would scale sums that are
  there already, and so round them. The scores are computed twice for it.

  Args:
    q_BTNH: queries.
    blocks: (the first block, how many) to keys and values of the call's rows.
    position_BT: of each query.
    shape: kv heads K, blocks C and places P of each.
    window: places that a token reads; 0 for all.

  Returns:
    out_BTNH in q's dtype.
  """
  K, C, P = shape
  B, T, N, H = q_BTNH.shape
  R = T * (N // K)

  def scored(c: jax.Array) -> tuple[jax.Array, jax.Array]:
    k_BK1HP, v_BK1PH = blocks(c, 1)
    mask_BTP = _mask(position_BT, c * P + jnp.arange(P), window)
    return _scores(q_BTNH, k_BK1HP, mask_BTP), v_BK1PH

  def highest(c: jax.Array, max_BKR: jax.Array) -> jax.Array:
    return jnp.maximum(max_BKR, scored(c)[0].max((2, 4)))

  def summed(
    c: jax.Array, sums: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    score_BK1RP, v_BK1PH = scored(c)
    sum_BK1R, out_BK1RH = _weighted(score_BK1RP, max_BKR, v_BK1PH)
    return sums[0] + sum_BK1R[:, :, 0], sums[1] + out_BK1RH[:, :, 0]

  # Blocks past every query's place would add exact zeros. XLA may not know of a single
  # block: without the loops it would compute with other kernels, of other bits.
  count = jnp.clip(position_BT.max() // P + 1, 1, C)
  count = jax.lax.optimization_barrier(count)
  zero_BKR = jnp.zeros((B, K, R), jnp.float32)
  max_BKR = jax.lax.fori_loop(0, count, highest, zero_BKR + _MASKED)
  sums = (zero_BKR, jnp.zeros((B, K, R, H), jnp.float32))
  sum_BKR, out_BKRH = jax.lax.fori_loop(0, count, summed, sums)
  return _normalized(q_BTNH, sum_BKR, out_BKRH)


def _scores(q_BTNH: jax.Array, k_BKCHP: jax.Array, mask_BTS: jax.Array) -> jax.Array:
  """score_BKCRP of all blocks, float32. R: the G T rows of a kv head's queries."""
  B, T, N, H = q_BTNH.shape
  _, K, C, _, P = k_BKCHP.shape
  G = N // K
  # One matrix product per kv head, with the rows of its G query heads together. The
  # queries are repeated: a product over all blocks at once would move the keys.
  q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
  q_BKCRH = jnp.broadcast_to(q_BKGTH.reshape(B, K, 1, G * T, H), (B, K, C, G * T, H))
  score_BKCRP = jnp.matmul(q_BKCRH, k_BKCHP, preferred_element_type=jnp.float32)
  score_BKCGTP = score_BKCRP.reshape(B, K, C, G, T, P)
  mask_BCTP = mask_BTS.reshape(B, T, C, P).swapaxes(1, 2)
  score_BKCGTP = jnp.where(mask_BCTP[:, None, :, None], score_BKCGTP, _MASKED)
  return score_BKCGTP.reshape(B, K, C, G * T, P)


def _weighted(
  score_BKCRP: jax.Array, max_BKR: jax.Array, v_BKCPH: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Each block's sum_BKCR of weights and out_BKCRH of weighted values, float32."""
  e_BKCRP = jnp.exp(score_BKCRP - max_BKR[:, :, None, :, None])
  # XLA would join the sum over places with that over blocks.
  sum_BKCR = jax.lax.optimization_barrier(e_BKCRP.sum(-1))
  e_BKCRP = e_BKCRP.astype(v_BKCPH.dtype)
  return sum_BKCR, jnp.matmul(e_BKCRP, v_BKCPH, preferred_element_type=jnp.float32)


def _normalized(
  q_BTNH: jax.Array, sum_BKR: jax.Array, out_BKRH: jax.Array
) -> jax.Array:
  """out_BTNH in q's dtype; the division comes last, where it is cheapest."""
  B, T, N, H = q_BTNH.shape
  K = sum_BKR.shape[1]
  out_BKGTH = (out_BKRH / sum_BKR[..., None]).reshape(B, K, N // K, T, H)
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)

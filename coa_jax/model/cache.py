"""The cache of keys and values: the one type that knows how they are laid out.

A decoder appends a call's keys and values, attends over what is there, shares a row's
with other rows, resizes the cache as trajectories grow, and frees it. In which axes and
blocks they lie is known in this file alone.

Two letters of its own: C blocks of P places each; S = C P.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp

from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner

# The most places of a block; a cache of more has several blocks.
BLOCK_SIZE = 256
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
    layers: of each its keys [B, K, C, H, P] and values [B, K, C, P, H]. Positions come
      last in the keys: few queries' scores then run along contiguous memory (decoding
      on a CPU takes half the time).
  """

  layers: tuple[tuple[jax.Array, jax.Array], ...]

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
    # Each an array of its own: their memory is donated and freed one by one.
    layers = []
    for _ in range(cfg.layers):
      keys = _zeros((rows, cfg.kv_heads, C, H, P), cfg.dtype, partitioner)
      values = _zeros((rows, cfg.kv_heads, C, P, H), cfg.dtype, partitioner)
      layers.append((keys, values))
    return cls(tuple(layers))

  @classmethod
  def one_block(
    cls, cfg: ModelConfig, rows: int, most: int, partitioner: Partitioner | None = None
  ) -> KVCache:
    """Makes a cache to begin with: one block, or `most` places where that is less."""
    return cls.empty(cfg, rows, min(most, BLOCK_SIZE), partitioner)

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
    k_BKCHP, v_BKCPH = self.layers[layer]
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
    k_BKCHP = k_BKCHP.at[row, head, block, :, place].set(k_BTKH, mode="drop")
    v_BKCPH = v_BKCPH.at[row, head, block, place].set(v_BTKH, mode="drop")
    layers = list(self.layers)
    layers[layer] = (_shard(k_BKCHP, partitioner), _shard(v_BKCPH, partitioner))
    return KVCache(tuple(layers))

  def attend(
    self, layer: int, q_BTNH: jax.Array, write: CacheWrite, window: int = 0
  ) -> jax.Array:
    """Attends with a call's tokens over one layer, after `append`.

    Args:
      layer: its number.
      q_BTNH: queries; a token reads places up to its own.
      write: of the call.
      window: places that a token reads, its own included; 0 for all.

    Returns:
      out_BTNH in q's dtype.
    """
    k_BKCHP, v_BKCPH = self.layers[layer]
    if write.row_B is not None:
      k_BKCHP = jnp.take(k_BKCHP, write.row_B, axis=0, mode="clip")
      v_BKCPH = jnp.take(v_BKCPH, write.row_B, axis=0, mode="clip")
    mask_BTS = _mask(write.position_BT, self.size, window)
    return _attend(q_BTNH, k_BKCHP, v_BKCPH, mask_BTS)

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
    return KVCache(tuple(layers))

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
    return KVCache(tuple(layers))


def row_bytes(cfg: ModelConfig, size: int) -> int:
  """Counts the bytes of so many places of one row, in all layers."""
  scalars = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim
  return size * scalars * jnp.dtype(cfg.dtype).itemsize


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


def _mask(position_BT: jax.Array, size: int, window: int) -> jax.Array:
  """mask_BTS, True where a token reads a place: those up to its own."""
  place_S = jnp.arange(size)
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
  B, T, N, H = q_BTNH.shape
  _, K, C, _, P = k_BKCHP.shape
  G = N // K

  # --- Scores. R: the G T rows of a kv head's queries.
  # One matrix product per kv head, with the rows of its G query heads together. The
  # queries are repeated: a product over all blocks at once would move the keys.
  q_BKGTH = (q_BTNH * H**-0.5).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
  q_BKCRH = jnp.broadcast_to(q_BKGTH.reshape(B, K, 1, G * T, H), (B, K, C, G * T, H))
  score_BKCRP = jnp.matmul(q_BKCRH, k_BKCHP, preferred_element_type=jnp.float32)
  score_BKCGTP = score_BKCRP.reshape(B, K, C, G, T, P)
  mask_BCTP = mask_BTS.reshape(B, T, C, P).swapaxes(1, 2)
  score_BKCGTP = jnp.where(mask_BCTP[:, None, :, None], score_BKCGTP, _MASKED)

  # --- Softmax: one maximum of all blocks, and each block's own sum.
  e_BKCGTP = jnp.exp(score_BKCGTP - score_BKCGTP.max((2, 5), keepdims=True))
  # XLA would join the sum over places with that over blocks.
  sum_BKCGT = jax.lax.optimization_barrier(e_BKCGTP.sum(-1))

  # --- Values; the division comes last, where it is cheapest.
  e_BKCRP = e_BKCGTP.astype(v_BKCPH.dtype).reshape(B, K, C, G * T, P)
  out_BKRH = jnp.matmul(e_BKCRP, v_BKCPH, preferred_element_type=jnp.float32).sum(2)
  out_BKGTH = out_BKRH.reshape(B, K, G, T, H) / sum_BKCGT.sum(2)[..., None]
  return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)

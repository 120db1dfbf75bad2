"""The cache of keys and values: the only type that knows their layout.

A replica has one pool of pages for all its rows. Every call passes each row's pages in
their order: the pool itself knows no rows. Several rows may share a page (a group's
prompt), and it is free once they have ended; the host allocates pages
(`rollout.pages`).

Letters of its own: J pages of P places each; C blocks, the pages of one row.

budget: three layouts, and their operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.config import ModelConfig
from coa_jax.model.kernels import paged, ragged, triton
from coa_jax.model.kernels.paged import RowPages
from coa_jax.model.sharding import ONE_DEVICE, Partitioner

# Maximum places per page.
PAGE_SIZE = 256
# Pages moved between device and host by one call, so that it uses little device memory
# beside the pool.
_MOVED = 8


@flax.struct.dataclass
class CacheWrite:
  """Positions and pages of a call's tokens; the same for every layer.

  Attributes:
    rows: the pages read by each row.
    position_BT: each token's position in its own sequence.
    page_BT: the page for its key and value; past the last page if the token is not
      written.
    place_BT: the place in that page.
  """

  rows: RowPages
  position_BT: jax.Array
  page_BT: jax.Array
  place_BT: jax.Array


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer in J pages.

  A token's place is its position in its own sequence. Results are bit-identical
  (float32, CPU) whatever is in unread places, whichever pages a row has, however many
  there are, and whoever else reads them.

  Attributes:
    layers: keys and values per layer; see `layout`.
    layout: their layout.
      places_last: keys [J, K, H, P] and values [J, K, P, H], on a CPU: few queries'
        scores run along contiguous memory, and decoding takes half the time.
      heads_first: keys and values [K, J, P, H], as the GPU's kernel reads them
        (`kernels.triton`).
      joined: one array [J, P, 2 K, H], each head's key before its value, as the TPU's
        kernel reads them (`kernels.ragged`); zeros pad H to its size.
  """

  layers: tuple[tuple[jax.Array, ...], ...]
  layout: str = flax.struct.field(pytree_node=False)

  @classmethod
  def empty(
    cls,
    cfg: ModelConfig,
    pages: int,
    page_size: int,
    partitioner: Partitioner = ONE_DEVICE,
  ) -> KVCache:
    """Makes a pool of N empty pages, in the activations' dtype."""
    layout = _layout(cfg, page_size, partitioner)
    K, H, P = cfg.kv_heads, cfg.head_dim, page_size
    axes = {
      "places_last": [(pages, K, H, P), (pages, K, P, H)],
      "heads_first": [(K, pages, P, H)] * 2,
      "joined": [(pages, P, 2 * K, ragged.head_size(H))],
    }
    # Separate arrays: their memory is donated and freed one by one.
    layers = []
    for _ in range(cfg.layers):
      layer = [_zeros(shape, cfg.dtype, layout, partitioner) for shape in axes[layout]]
      layers.append(tuple(layer))
    return cls(tuple(layers), layout)

  @property
  def pages(self) -> int:
    """Counts the pages: J."""
    return self.layers[0][0].shape[_page_axis(self.layout)]

  @property
  def page_size(self) -> int:
    """Counts the places per page: P."""
    return self.layers[0][-1].shape[1 if self.layout == "joined" else 2]

  @property
  def shared(self) -> bool:
    """Whether a page may have several readers; otherwise each needs its own copy."""
    return self.layout != "places_last"

  def decoding_rows(self, table_BC: jax.Array, active_B: jax.Array) -> RowPages:
    """Prepares rows for calls of one token each; once for all calls of a window.

    Args:
      table_BC: int page of each block of a row; -1 for none.
      active_B: True for reading rows; others compute garbage.
    """
    if self.layout == "places_last":
      return paged.decoding_rows(table_BC, active_B, self.pages)
    return RowPages(jnp.where(active_B[:, None], table_BC, -1))

  def write(
    self, rows: RowPages, position_BT: jax.Array, valid_BT: jax.Array
  ) -> CacheWrite:
    """Returns the places of a call's tokens, for every layer's `append` and `attend`.

    Args:
      rows: `RowPages(table_BC)`, or for one token of each row `decoding_rows`.
      position_BT: int position of each token in its own sequence.
      valid_BT: True for tokens to be written; their rows have pages for them.
    """
    C = rows.table_BC.shape[1]
    block_BT = jnp.clip(position_BT // self.page_size, 0, C - 1)
    page_BT = jnp.take_along_axis(rows.table_BC, block_BT, axis=1)
    valid_BT &= page_BT >= 0
    return CacheWrite(
      rows,
      position_BT,
      jnp.where(valid_BT, page_BT, self.pages),
      position_BT % self.page_size,
    )

  def append(
    self,
    layer: int,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    write: CacheWrite,
    partitioner: Partitioner = ONE_DEVICE,
  ) -> KVCache:
    """Writes a call's keys and values into one layer; returns the new cache."""
    B, T, K, H = k_BTKH.shape
    # Unwritten tokens point past the last page, and are dropped.
    if self.layout == "joined":
      (pool,) = self.layers[layer]
      kv = jnp.stack([k_BTKH, v_BTKH], axis=3).reshape(B, T, 2 * K, H)
      kv = jnp.pad(kv, ((0, 0),) * 3 + ((0, pool.shape[3] - H),))
      arrays = [pool.at[write.page_BT, write.place_BT].set(kv, mode="drop")]
    else:
      keys, values = self.layers[layer]
      # With the head's index left out, XLA would keep a window's cache in another
      # layout and copy all of it at both ends.
      page = write.page_BT[..., None]
      place = write.place_BT[..., None]
      head = jnp.arange(K)
      if self.layout == "places_last":
        keys = keys.at[page, head, :, place].set(k_BTKH, mode="drop")
        values = values.at[page, head, place].set(v_BTKH, mode="drop")
      else:
        keys = keys.at[head, page, place].set(k_BTKH, mode="drop")
        values = values.at[head, page, place].set(v_BTKH, mode="drop")
      arrays = [keys, values]
    layers = list(self.layers)
    layers[layer] = tuple(partitioner.shard(x, letters(self.layout)) for x in arrays)
    return self.replace(layers=tuple(layers))

  def attend(
    self,
    layer: int,
    q_BTNH: jax.Array,
    write: CacheWrite,
    partitioner: Partitioner = ONE_DEVICE,
  ) -> jax.Array:
    """Attends with a call's tokens over one layer, after `append`.

    Args:
      layer: its number.
      q_BTNH: queries; a token reads places of its row up to its own.
      write: of the call.
      partitioner: of the sampler.

    Returns:
      out_BTNH in q's dtype.
    """
    rows = write.rows
    position_BT = write.position_BT
    pools = self.layers[layer]
    # --- The device's kernel, if it has one for these pages; otherwise plain XLA.
    if self.layout == "joined":
      kernel = ragged.attend
    elif self.layout == "heads_first" and triton.takes_pages(*pools):
      kernel = triton.attend_pages if q_BTNH.shape[1] == 1 else triton.attend_tokens
    else:
      places_last = self.layout == "places_last"
      return paged.attend(q_BTNH, *pools, rows, position_BT, places_last)
    # --- XLA can not split a kernel: each device runs it on its own heads. On a mesh of
    # one, too: a kernel asks the mesh for its kind of device.
    args = (q_BTNH, *pools, rows.table_BC, position_BT)
    if partitioner.is_default:
      return kernel(*args)
    axes = ["..N.", *[letters(self.layout)] * len(pools), "..", ".."]
    specs = [partitioner.spec(x) for x in axes]
    return jax.shard_map(
      kernel,
      mesh=partitioner.mesh,
      in_specs=tuple(specs),
      out_specs=specs[0],
      check_vma=False,
    )(*args)

  def copy(
    self, from_X: jax.Array, to_X: jax.Array, partitioner: Partitioner = ONE_DEVICE
  ) -> KVCache:
    """Copies pages onto other pages; this cache's arrays are deleted.

    Args:
      from_X: pages to read, all before any is written.
      to_X: pages to write; those past the last page are dropped.
      partitioner: of the sampler.
    """
    return _copy(self, from_X, to_X, partitioner)

  def grow(self, pages: int, partitioner: Partitioner = ONE_DEVICE) -> KVCache:
    """Grows the pool to N pages; this cache's arrays are deleted."""
    layers = []
    for layer in self.layers:
      layers.append(_grow(layer, pages, self.layout, partitioner))
      for x in layer:  # so that only one layer at a time exists twice
        x.delete()
    return self.replace(layers=tuple(layers))

  def to_host(self, pages: Sequence[int]) -> list[list[np.ndarray]]:
    """Returns the pages' contents for `from_host`: all arrays of every few pages."""
    out = []
    for i in range(0, len(pages), _MOVED):
      arrays = _read(self, _padded(pages[i : i + _MOVED], 0))
      out.append(jax.device_get(jax.tree.leaves(arrays)))
    return out

  def from_host(
    self,
    pages: Sequence[int],
    contents: Sequence[Sequence[np.ndarray]],
    partitioner: Partitioner = ONE_DEVICE,
  ) -> KVCache:
    """Writes `to_host`'s result into as many pages; this cache's arrays are deleted."""
    cache = self
    for i, arrays in enumerate(contents):
      to_X = _padded(pages[i * _MOVED : (i + 1) * _MOVED], self.pages)
      cache = _write(cache, to_X, arrays, partitioner)
    return cache


def page_size(max_len: int) -> int:
  """Returns the places per page for rows of at most N places."""
  return min(max_len, PAGE_SIZE)


def num_blocks(places: int, max_len: int) -> int:
  """Counts the pages of a row's first places."""
  return -(-places // page_size(max_len))


def row_bytes(cfg: ModelConfig, size: int) -> int:
  """Counts the bytes of N places of one row, in all layers."""
  scalars = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim
  return size * scalars * jnp.dtype(cfg.dtype).itemsize


def page_bytes(cfg: ModelConfig, page_size: int, partitioner: Partitioner) -> int:
  """Counts a page's bytes on each device, in its layout."""
  page = jax.eval_shape(lambda: KVCache.empty(cfg, 1, page_size, partitioner))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page))
  return size // partitioner.ways("K")


def _layout(cfg: ModelConfig, page_size: int, partitioner: Partitioner) -> str:
  """Returns the layout of keys and values on the current devices."""
  if partitioner.platform == "cpu":
    return "places_last"
  if partitioner.platform == "tpu" and ragged.takes(cfg.dtype, page_size):
    return "joined"
  return "heads_first"


def letters(layout: str) -> str:
  """Returns the letters of a pool's axes, for `Partitioner.sharding`."""
  return {"places_last": ".K..", "heads_first": "K...", "joined": "..K."}[layout]


def _page_axis(layout: str) -> int:
  return 1 if layout == "heads_first" else 0


def _pages_of(x: jax.Array, page_X: jax.Array, layout: str) -> jax.Array:
  return jnp.take(x, page_X, axis=_page_axis(layout), mode="clip")


def _with_pages(
  x: jax.Array, page_X: jax.Array, new: jax.Array, layout: str
) -> jax.Array:
  """Returns a pool with new contents in some pages; those past the last are dropped."""
  where = (slice(None), page_X) if layout == "heads_first" else page_X
  return x.at[where].set(new, mode="drop")


def _zeros(
  shape: tuple[int, ...],
  dtype: jnp.dtype,
  layout: str,
  partitioner: Partitioner,
) -> jax.Array:
  return jnp.zeros(shape, dtype, device=partitioner.sharding(letters(layout)))


def _padded(pages: Sequence[int], filler: int) -> np.ndarray:
  """Pads to the number of pages moved by a call."""
  out = np.full(_MOVED, filler, np.int32)
  out[: len(pages)] = pages
  return out


@functools.partial(jax.jit, static_argnames="partitioner", donate_argnames="cache")
def _copy(
  cache: KVCache,
  from_X: jax.Array,
  to_X: jax.Array,
  partitioner: Partitioner = ONE_DEVICE,
) -> KVCache:
  def copied(x: jax.Array) -> jax.Array:
    x = _with_pages(x, to_X, _pages_of(x, from_X, cache.layout), cache.layout)
    return partitioner.shard(x, letters(cache.layout))

  return jax.tree.map(copied, cache)


@functools.partial(jax.jit, static_argnames=("pages", "layout", "partitioner"))
def _grow(
  layer: tuple[jax.Array, ...],
  pages: int,
  layout: str,
  partitioner: Partitioner,
) -> tuple[jax.Array, ...]:
  """Returns one layer with N pages, the new ones empty."""

  def grown(x: jax.Array) -> jax.Array:
    axis = _page_axis(layout)
    more = [(0, 0)] * x.ndim
    more[axis] = (0, pages - x.shape[axis])
    x = jnp.pad(x, more)
    return partitioner.shard(x, letters(layout))

  return jax.tree.map(grown, layer)


@jax.jit
def _read(cache: KVCache, from_X: jax.Array) -> KVCache:
  return jax.tree.map(lambda x: _pages_of(x, from_X, cache.layout), cache)


@functools.partial(jax.jit, static_argnames="partitioner", donate_argnames="cache")
def _write(
  cache: KVCache,
  to_X: jax.Array,
  arrays: Sequence[jax.Array],
  partitioner: Partitioner = ONE_DEVICE,
) -> KVCache:
  leaves, tree = jax.tree.flatten(cache)
  written = []
  for x, new in zip(leaves, arrays, strict=True):
    x = _with_pages(x, to_X, new, cache.layout)
    written.append(partitioner.shard(x, letters(cache.layout)))
  return jax.tree.unflatten(tree, written)

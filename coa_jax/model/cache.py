"""The decoder's cache; only `KVCache` knows its layout.

Attention layers keep keys and values in pages. A replica has one page pool for all its
rows. The pool knows no rows, so every call passes each row's pages in order. Several
rows may share a page (a group's prompt); the page is free once all these rows have
ended. The host allocates pages (`rollout.pages`).

A linear-attention layer instead keeps, for each slot, a constant-size state and its
convolution's last inputs. Slots cannot share them; extra rows hold snapshots, taken at
the ends of prompts that several slots begin with.

This file's axis letters: J pages of P places; C blocks, one row's pages.

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

# Each layer's arrays.
Layers = tuple[tuple[jax.Array, ...], ...]
# Maximum places per page.
PAGE_SIZE = 256
# Axis letters of a layer's states and last inputs.
STATES = (".Z..", "..Y.")
# Pages that one call moves between device and host: few, so that the call needs little
# device memory beside the pool.
_MOVED = 8


@flax.struct.dataclass
class CacheWrite:
  """A call's token positions and pages, the same for every layer.

  Attributes:
    rows: the pages read by each row.
    position_BT: each token's position in its own sequence.
    page_BT: the page for the token's key and value; past the last page for an
      unwritten token.
    place_BT: the place in that page.
    valid_BT: True for tokens to write.
  """

  rows: RowPages
  position_BT: jax.Array
  page_BT: jax.Array
  place_BT: jax.Array
  valid_BT: jax.Array


@flax.struct.dataclass
class KVCache:
  """Each layer's cache: keys and values in J pages, or states by slot.

  A token's place is its position in its own sequence. Results are bit-identical
  (float32, CPU) whatever the contents of unread places, the page numbers, the pool size
  and the other readers.

  Attributes:
    layers: keys and values per layer; see `layout`. () for linear attention.
    layout: the key and value layout.
      places_last: keys [J, K, H, P] and values [J, K, P, H], for CPUs: a few queries'
        scores run along contiguous memory, which halves decoding time.
      heads_first: keys and values [K, J, P, H], as the GPU kernel reads them
        (`kernels.triton`).
      joined: one array [J, P, 2 K, H], each head's key before its value, as the TPU
        kernel reads them (`kernels.ragged`); zeros pad H to the kernel's head size.
    states: per linear-attention layer: states [S, Z, M, U], float32, and last inputs
      [S, W - 1, Y, E]; () for attention. S rows: slots, then snapshots.
  """

  layers: Layers
  layout: str = flax.struct.field(pytree_node=False)
  states: Layers = ()

  @classmethod
  def empty(
    cls,
    cfg: ModelConfig,
    pages: int,
    page_size: int,
    partitioner: Partitioner = ONE_DEVICE,
    slots: int = 0,
  ) -> KVCache:
    """Makes `pages` empty pages, in the activations' dtype, and the slots' states."""
    layout = _layout(cfg, page_size, partitioner)
    K, H, P = cfg.kv_heads, cfg.head_dim, page_size
    shapes = {
      "places_last": [(pages, K, H, P), (pages, K, P, H)],
      "heads_first": [(K, pages, P, H)] * 2,
      "joined": [(pages, P, 2 * K, ragged.head_size(H))],
    }[layout]
    where = partitioner.sharding(letters(layout))
    # Separate arrays, so that memory is donated and freed array by array.
    layers: list[tuple[jax.Array, ...]] = []
    states: list[tuple[jax.Array, ...]] = []
    for kind in cfg.kinds:
      if kind == "attention":
        layers.append(tuple(jnp.zeros(x, cfg.dtype, device=where) for x in shapes))
        states.append(())
      else:
        layers.append(())
        states.append(_empty_states(cfg, slots, partitioner))
    return cls(tuple(layers), layout, tuple(states))

  @property
  def pages(self) -> int:
    """Counts the pages: J."""
    return self._pools[0].shape[_page_axis(self.layout)]

  @property
  def page_size(self) -> int:
    """Counts the places per page: P."""
    return self._pools[-1].shape[1 if self.layout == "joined" else 2]

  @property
  def _pools(self) -> tuple[jax.Array, ...]:
    """Returns the first attention layer's arrays."""
    return next(layer for layer in self.layers if layer)

  @property
  def shared(self) -> bool:
    """Whether rows may share a page; otherwise each row needs its own copy."""
    return self.layout != "places_last"

  def decoding_rows(self, table_BC: jax.Array, active_B: jax.Array) -> RowPages:
    """Prepares rows for one-token calls; needed once per window.

    Args:
      table_BC: int page for each row's blocks; -1 for none.
      active_B: True for active rows; others compute garbage.
    """
    if self.layout == "places_last":
      return paged.decoding_rows(table_BC, active_B, self.pages)
    return RowPages(jnp.where(active_B[:, None], table_BC, -1))

  def write(
    self, rows: RowPages, position_BT: jax.Array, valid_BT: jax.Array
  ) -> CacheWrite:
    """Finds a call's token places, for every layer's `append` and `attend`.

    Args:
      rows: `RowPages(table_BC)`, or `decoding_rows` if each row has one token.
      position_BT: each token's int position in its own sequence.
      valid_BT: True for tokens to write; their rows have pages for them.
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
      valid_BT,
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
      # Without the head index, XLA would keep the cache in another layout during a
      # window, and copy the whole cache before and after.
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
      q_BTNH: queries; a token reads its row's places up to its own.
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
    # --- XLA cannot split a kernel: each device runs the kernel on its own heads. A
    # one-device mesh does the same: a kernel asks the mesh for its device kind.
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

  def state(self, layer: int, write: CacheWrite) -> tuple[jax.Array, jax.Array]:
    """Returns a layer's states and last inputs before a call's tokens, by row.

    A row at position 0 starts with zeros.
    """
    B = write.position_BT.shape[0]
    fresh_B = write.position_BT[:, 0] == 0

    def rows(x: jax.Array) -> jax.Array:
      slot_B = write.rows.slot_B
      x = x[:B] if slot_B is None else jnp.take(x, slot_B, axis=0, mode="clip")
      return jnp.where(jnp.expand_dims(fresh_B, range(1, x.ndim)), 0, x)

    state_BZMU, inputs_BWYE = map(rows, self.states[layer])
    return state_BZMU, inputs_BWYE

  def with_state(
    self,
    layer: int,
    state_BZMU: jax.Array,
    inputs_BWYE: jax.Array,
    write: CacheWrite,
    partitioner: Partitioner = ONE_DEVICE,
  ) -> KVCache:
    """Writes a call's states and last inputs; rows without valid tokens keep theirs."""
    B = write.position_BT.shape[0]
    written_B = write.valid_BT[:, 0]
    slot_B = write.rows.slot_B
    arrays = []
    for x, new, axes in zip(
      self.states[layer], (state_BZMU, inputs_BWYE), STATES, strict=True
    ):
      if slot_B is None:
        kept = jnp.expand_dims(~written_B, range(1, x.ndim))
        x = x.at[:B].set(jnp.where(kept, x[:B], new))
      else:
        x = x.at[jnp.where(written_B, slot_B, x.shape[0])].set(new, mode="drop")
      arrays.append(partitioner.shard(x, axes))
    states = list(self.states)
    states[layer] = tuple(arrays)
    return self.replace(states=tuple(states))

  def copy_states(
    self, from_X: jax.Array, to_X: jax.Array, partitioner: Partitioner = ONE_DEVICE
  ) -> KVCache:
    """Copies state rows onto other rows; this cache's states are deleted.

    Args:
      from_X: rows to read, all before any is written.
      to_X: rows to write; those past the last row are dropped.
    """
    states = _copy_states(self.states, from_X, to_X, partitioner)
    return self.replace(states=states)

  def copy(
    self, from_X: jax.Array, to_X: jax.Array, partitioner: Partitioner = ONE_DEVICE
  ) -> KVCache:
    """Copies pages onto other pages; this cache's arrays are deleted.

    Args:
      from_X: pages to read, all before any is written.
      to_X: pages to write; those past the last page are dropped.
    """
    layers = _copy(self.layers, from_X, to_X, self.layout, partitioner)
    return self.replace(layers=layers)

  def grow(self, pages: int, partitioner: Partitioner = ONE_DEVICE) -> KVCache:
    """Grows the pool to `pages` pages; this cache's arrays are deleted."""
    layers = []
    for layer in self.layers:
      layers.append(_grow(layer, pages, self.layout, partitioner))
      for x in layer:  # so that only one layer at a time exists twice
        x.delete()
    return self.replace(layers=tuple(layers))

  def to_host(self, pages: Sequence[int]) -> list[list[np.ndarray]]:
    """Fetches page contents for `from_host`: one list of arrays per `_MOVED` pages."""
    out = []
    for i in range(0, len(pages), _MOVED):
      arrays = _read(self.layers, _padded(pages[i : i + _MOVED], 0), self.layout)
      out.append(jax.device_get(jax.tree.leaves(arrays)))
    return out

  def from_host(
    self,
    pages: Sequence[int],
    contents: Sequence[Sequence[np.ndarray]],
    partitioner: Partitioner = ONE_DEVICE,
  ) -> KVCache:
    """Writes `to_host`'s result into as many pages; this cache's arrays are deleted."""
    layers = self.layers
    for i, arrays in enumerate(contents):
      to_X = _padded(pages[i * _MOVED : (i + 1) * _MOVED], self.pages)
      layers = _write(layers, to_X, arrays, self.layout, partitioner)
    return self.replace(layers=layers)


def page_size(max_len: int) -> int:
  """Returns the places per page for rows with at most `max_len` places."""
  return min(max_len, PAGE_SIZE)


def num_blocks(places: int, max_len: int) -> int:
  """Counts the pages for a row's first `places` places."""
  return -(-places // page_size(max_len))


def row_bytes(cfg: ModelConfig, size: int) -> int:
  """Counts the bytes for `size` places in one row, over all layers."""
  layers = cfg.kinds.count("attention")
  scalars = 2 * layers * cfg.kv_heads * cfg.head_dim
  return size * scalars * jnp.dtype(cfg.dtype).itemsize


def page_bytes(cfg: ModelConfig, page_size: int, partitioner: Partitioner) -> int:
  """Counts a page's bytes on each device, in its layout."""
  page = jax.eval_shape(lambda: KVCache.empty(cfg, 1, page_size, partitioner))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(page))
  return size // partitioner.ways("K")


def state_rows(cfg: ModelConfig, slots: int) -> int:
  """Counts the state rows: one per slot, and a quarter as many snapshots."""
  return slots + -(-slots // 4) if cfg.delta else 0


def state_bytes(cfg: ModelConfig, slots: int, partitioner: Partitioner) -> int:
  """Counts all layers' state bytes on each device."""
  if not cfg.delta:
    return 0
  states = jax.eval_shape(lambda: _empty_states(cfg, slots, partitioner))
  size = sum(x.size * x.dtype.itemsize for x in states)
  return cfg.kinds.count("delta") * size // partitioner.ways("Z")


def _empty_states(
  cfg: ModelConfig, slots: int, partitioner: Partitioner
) -> tuple[jax.Array, ...]:
  d = cfg.delta
  rows = state_rows(cfg, slots)
  shapes = [
    ((rows, d.value_heads, d.key_dim, d.value_dim), "float32"),
    ((rows, d.conv - 1, d.key_heads, d.channels), cfg.dtype),
  ]
  out = []
  for (shape, dtype), axes in zip(shapes, STATES, strict=True):
    out.append(jnp.zeros(shape, dtype, device=partitioner.sharding(axes)))
  return tuple(out)


def _layout(cfg: ModelConfig, page_size: int, partitioner: Partitioner) -> str:
  """Returns the key and value layout for the partitioner's platform."""
  if partitioner.platform == "cpu":
    return "places_last"
  if partitioner.platform == "tpu" and ragged.takes(cfg.dtype, page_size):
    return "joined"
  return "heads_first"


def letters(layout: str) -> str:
  """Returns a pool's axis letters, for `Partitioner.sharding`."""
  return {"places_last": ".K..", "heads_first": "K...", "joined": "..K."}[layout]


def _page_axis(layout: str) -> int:
  return 1 if layout == "heads_first" else 0


def _pages_of(x: jax.Array, page_X: jax.Array, layout: str) -> jax.Array:
  return jnp.take(x, page_X, axis=_page_axis(layout), mode="clip")


def _with_pages(
  x: jax.Array, page_X: jax.Array, new: jax.Array, layout: str
) -> jax.Array:
  """Returns a pool with new contents in some pages; drops pages past the last one."""
  where = (slice(None), page_X) if layout == "heads_first" else page_X
  return x.at[where].set(new, mode="drop")


def _padded(pages: Sequence[int], filler: int) -> np.ndarray:
  """Pads page numbers to one call's `_MOVED`."""
  out = np.full(_MOVED, filler, np.int32)
  out[: len(pages)] = pages
  return out


_jit_over_pages = functools.partial(
  jax.jit, static_argnames=("layout", "partitioner"), donate_argnames="layers"
)


@_jit_over_pages
def _copy(
  layers: Layers,
  from_X: jax.Array,
  to_X: jax.Array,
  layout: str,
  partitioner: Partitioner,
) -> Layers:
  def copied(x: jax.Array) -> jax.Array:
    x = _with_pages(x, to_X, _pages_of(x, from_X, layout), layout)
    return partitioner.shard(x, letters(layout))

  return jax.tree.map(copied, layers)


@functools.partial(jax.jit, static_argnames="partitioner", donate_argnames="states")
def _copy_states(
  states: Layers, from_X: jax.Array, to_X: jax.Array, partitioner: Partitioner
) -> Layers:
  out = []
  for layer in states:
    arrays = []
    for x, axes in zip(layer, STATES[: len(layer)], strict=True):
      x = x.at[to_X].set(jnp.take(x, from_X, axis=0), mode="drop")
      arrays.append(partitioner.shard(x, axes))
    out.append(tuple(arrays))
  return tuple(out)


@functools.partial(jax.jit, static_argnames=("pages", "layout", "partitioner"))
def _grow(
  layer: tuple[jax.Array, ...],
  pages: int,
  layout: str,
  partitioner: Partitioner,
) -> tuple[jax.Array, ...]:
  """Grows one layer to `pages` pages; the new pages are empty."""

  def grown(x: jax.Array) -> jax.Array:
    axis = _page_axis(layout)
    more = [(0, 0)] * x.ndim
    more[axis] = (0, pages - x.shape[axis])
    x = jnp.pad(x, more)
    return partitioner.shard(x, letters(layout))

  return jax.tree.map(grown, layer)


@functools.partial(jax.jit, static_argnames="layout")
def _read(layers: Layers, from_X: jax.Array, layout: str) -> Layers:
  return jax.tree.map(lambda x: _pages_of(x, from_X, layout), layers)


@_jit_over_pages
def _write(
  layers: Layers,
  to_X: jax.Array,
  arrays: Sequence[jax.Array],
  layout: str,
  partitioner: Partitioner,
) -> Layers:
  leaves, tree = jax.tree.flatten(layers)
  written = []
  for x, new in zip(leaves, arrays, strict=True):
    x = _with_pages(x, to_X, new, layout)
    written.append(partitioner.shard(x, letters(layout)))
  return jax.tree.unflatten(tree, written)

"""What a decoder holds: its cache, and the parameters as it wants them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model import qwen
from coa_jax.model.architecture import QwenConfig
from coa_jax.model.qwen import LayerCache
from coa_jax.model.sharding import Layout, platform

# The most places of a piece of a cache; a cache of more has several pieces.
PIECE = 256


def architecture(cfg: QwenConfig, layout: Layout | None = None) -> QwenConfig:
  """The model as samplers run it: layers unrolled; on a CPU with float32 activations.

  A CPU multiplies in float32 alone, and would convert half precision before and after
  every operation. Weights are rounded all the same:
  `weight_dtype` becomes what `dtype` was.
  """
  cfg = dataclasses.replace(cfg, scan=False, remat="none")
  if cfg.dtype == "float32" or platform(layout) != "cpu":
    return cfg
  kind = cfg.weight_dtype or cfg.dtype
  return dataclasses.replace(cfg, dtype="float32", weight_dtype=kind)


def init_cache(
  cfg: QwenConfig, rows: int, size: int, layout: Layout | None = None
) -> tuple[LayerCache, ...]:
  """An empty cache for `rows` sequences, in the dtype of activations.

  It has `size` places; above PIECE as many more as fill the last piece.
  """
  sharding = layout.sharding("BK...") if layout else None
  C, P = -(-size // PIECE), min(size, PIECE)

  def zeros(*shape: int) -> jax.Array:
    return jnp.zeros((rows, cfg.kv_heads, C, *shape), dtype, device=sharding)

  H, dtype = cfg.head_dim, cfg.dtype
  return tuple((zeros(H, P), zeros(P, H)) for _ in range(cfg.layers))


def decoding_views(
  cfg: QwenConfig, params: dict[str, Any], layout: Layout | None = None
) -> list[dict[str, Any]]:
  """The parameters as samplers want them; made once per policy update.

  Layers are unstacked, arrays rounded to `weight_dtype` or the compute dtype (the model
  would do so at every step), and resharded to `layout.decoding()`. Every process calls
  it. With a layout there is a tree for each of `layout.decoding().replicas()`.
  """
  kind = cfg.weight_dtype or cfg.dtype
  if layout is None and "layers" not in params and cfg.param_dtype == kind == "float32":
    return [params]
  view = _decoding_view(cfg, layout)(params)
  if layout is None:
    return [view]

  def part(replica: Layout) -> Any:
    devices = list(replica.mesh.devices.flat)

    def piece(x: jax.Array, sharding: Any) -> jax.Array:
      held = {s.device: s.data for s in x.addressable_shards}
      pieces = [held[d] for d in devices]
      return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    return jax.tree.map(piece, view, replica.tree(view))

  return [part(replica) for replica in layout.decoding().replicas()]


@functools.lru_cache(maxsize=8)
def _decoding_view(cfg: QwenConfig, layout: Layout | None) -> Any:
  kind = cfg.weight_dtype or cfg.dtype
  # A CPU would convert half-precision weights at every step.
  held = "float32" if platform(layout) == "cpu" else kind

  def view(params: dict[str, Any]) -> dict[str, Any]:
    params = qwen.unstack(params, cfg.layers)
    return jax.tree.map(lambda x: qwen.rounded(x, kind).astype(held), params)

  shardings = None
  if layout:
    shardings = layout.decoding().tree(jax.eval_shape(view, qwen.param_shapes(cfg)))
  return jax.jit(view, out_shardings=shardings)

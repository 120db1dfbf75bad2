"""The parameters as a decoder wants them, and the model as it runs there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner, inputs_of, name_of, platform

# The least width at which half-precision products pay on a CPU, for a single row too.
WIDE = 640


def architecture(
  cfg: ModelConfig, partitioner: Partitioner | None = None
) -> ModelConfig:
  """Makes what samplers run: layers unrolled; on a CPU with float32 activations.

  A CPU would convert half precision before and after every operation. Weights are
  rounded all the same: `weight_dtype` becomes what `dtype` was. A CPU that multiplies
  half precision (AMX) has the factors of its matrix products in it where the model has
  WIDE units or more; smaller ones are no faster so, and other CPUs multiply in float32.
  """
  cfg = dataclasses.replace(cfg, scan=False, remat="none")
  if cfg.dtype == "float32" or platform(partitioner) != "cpu":
    return cfg
  product_dtype = ""
  if cfg.width >= WIDE and has_amx():
    product_dtype = cfg.dtype
  return dataclasses.replace(
    cfg,
    dtype="float32",
    weight_dtype=cfg.weight_dtype or cfg.dtype,
    product_dtype=product_dtype,
  )


@functools.cache
def has_amx() -> bool:
  """Tells whether this processor multiplies matrices of bfloat16 (Intel's AMX)."""
  try:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
      return " amx_bf16" in f.read()
  except OSError:
    return False


def decoding_views(
  cfg: ModelConfig, params: dict[str, Any], partitioner: Partitioner | None = None
) -> list[dict[str, Any]]:
  """Makes the parameters that samplers want; called once per policy update.

  Layers are unstacked, arrays rounded to `weight_dtype` or the compute dtype (the model
  would do so at every step), and resharded to `partitioner.decoding()`. With a
  `product_dtype` matrices are held in it, outputs first. Every process calls it. With a
  partitioner there is a tree for each of `partitioner.decoding().replicas()`.
  """
  # --- One device: nothing to do where the arrays are as a sampler wants them.
  kind = cfg.weight_dtype or cfg.dtype
  as_is = "layers" not in params and cfg.param_dtype == kind == "float32"
  if partitioner is None and as_is:
    return [params]
  view = _decoding_view(cfg, partitioner)(params)
  if partitioner is None:
    return [view]

  # --- A mesh: each replica's arrays are made of its own devices' shards, in place.
  def of_replica(replica: Partitioner) -> Any:
    devices = list(replica.mesh.devices.flat)

    def leaf(x: jax.Array, sharding: Any) -> jax.Array:
      by_device = {s.device: s.data for s in x.addressable_shards}
      shards = [by_device[d] for d in devices]
      return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    return jax.tree.map(leaf, view, replica.tree(view, bool(cfg.product_dtype)))

  return list(map(of_replica, partitioner.decoding().replicas()))


@functools.lru_cache(maxsize=8)
def _decoding_view(cfg: ModelConfig, partitioner: Partitioner | None) -> Any:
  """The jitted function that makes a view; cached, or every update would compile it."""
  kind = cfg.weight_dtype or cfg.dtype
  narrow = cfg.product_dtype
  storage_dtype = kind
  if platform(partitioner) == "cpu":
    # A CPU would convert half-precision weights at every step.
    storage_dtype = "float32"

  def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
    x = transformer.rounded(x, kind)
    name = name_of(path)
    inputs = inputs_of(name)
    if narrow and (inputs or name == "embed"):
      # Outputs first; an embedding is so already.
      return x.transpose(*range(inputs, x.ndim), *range(inputs)).astype(narrow)
    return x.astype(storage_dtype)

  def view(params: dict[str, Any]) -> dict[str, Any]:
    return jax.tree_util.tree_map_with_path(
      leaf, transformer.unstack(params, cfg.layers)
    )

  shardings = None
  if partitioner:
    shapes = jax.eval_shape(view, transformer.param_shapes(cfg))
    shardings = partitioner.decoding().tree(shapes, bool(narrow))
  return jax.jit(view, out_shardings=shardings)


def lower_view(
  cfg: ModelConfig, params: dict[str, Any], partitioner: Partitioner | None = None
) -> jax.stages.Lowered:
  """Lowers the program that makes a view, for arrays or shapes; compiles nothing."""
  return _decoding_view(cfg, partitioner).lower(params)

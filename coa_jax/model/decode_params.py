"""Parameters and architecture for decoding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.moving import gatherer
from coa_jax.model.ops import rounded
from coa_jax.model.sharding import ONE_DEVICE, Partitioner, inputs_of, name_of

# Minimum width at which half-precision products are faster on a CPU, even for one row.
WIDE = 640


def architecture(
  cfg: ModelConfig, partitioner: Partitioner = ONE_DEVICE
) -> ModelConfig:
  """Returns the samplers' architecture: unrolled layers; float32 activations on a CPU.

  A CPU would convert half-precision activations before and after every operation.
  Weights are still rounded: an empty `weight_dtype` takes `dtype`'s old value. A CPU
  with half-precision products (AMX) multiplies half-precision factors if the model's
  width is at least WIDE; narrower models gain nothing. Other CPUs multiply in float32.
  """
  cfg = dataclasses.replace(cfg, scan=False, remat="none")
  if cfg.dtype == "float32" or partitioner.platform != "cpu":
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
  """Tells whether this processor multiplies bfloat16 matrices (Intel's AMX)."""
  try:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
      return " amx_bf16" in f.read()
  except OSError:
    return False


def decoding_views(
  cfg: ModelConfig, params: dict[str, Any], partitioner: Partitioner = ONE_DEVICE
) -> list[dict[str, Any]]:
  """Makes the samplers' parameters, once per policy update: one tree per replica.

  Layers are unstacked. Arrays are rounded to `weight_dtype` or the compute dtype
  (otherwise the model would round them at every step), and resharded to
  the decoding mesh, from any devices. With a `product_dtype`, matrices have this
  dtype and their outputs first. Every process must call this function. Trees are in the
  order of `partitioner.replicas()`.
  """
  # --- One device: nothing to do if the arrays already suit the sampler.
  outputs_first = bool(cfg.product_dtype)
  one_device = partitioner.mesh.size == 1
  elsewhere = _elsewhere(params, partitioner)
  kind = cfg.weight_dtype or cfg.dtype
  as_is = "layers" not in params and cfg.param_dtype == kind == "float32"
  if one_device and as_is and not elsewhere:
    return [params]
  view = converter(cfg, partitioner.platform)(params)

  # --- Send to other devices, or reshard.
  if elsewhere:
    return _sent(view, partitioner.replicas(), outputs_first)
  if one_device:
    return [view]
  # A layer at a time: one program for all would hold every gathered array twice.
  rest = {name: x for name, x in view.items() if not is_layer(name)}
  view |= resharder(cfg, partitioner)(rest)
  for i, kind in enumerate(cfg.kinds):
    name = f"layer_{i}"
    view[name] = resharder(cfg, partitioner, kind)(view[name])

  # --- Each replica's arrays are made from its own devices' shards, in place.
  def of_replica(replica: Partitioner) -> Any:
    devices = list(replica.mesh.devices.flat)

    def leaf(x: jax.Array, sharding: Any) -> jax.Array:
      by_device = {s.device: s.data for s in x.addressable_shards}
      shards = [by_device[d] for d in devices]
      return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    return jax.tree.map(leaf, view, replica.tree(view, outputs_first))

  return list(map(of_replica, partitioner.replicas()))


def decoding_shapes(cfg: ModelConfig, partitioner: Partitioner) -> dict[str, Any]:
  """Returns `decoding_views`' shapes, with shardings."""
  convert = converter(cfg, partitioner.platform)
  shapes = jax.eval_shape(convert, transformer.param_shapes(cfg))
  shardings = partitioner.tree(shapes, bool(cfg.product_dtype))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def _elsewhere(params: dict[str, Any], partitioner: Partitioner) -> bool:
  """Whether no mesh device holds the parameters."""
  array = jax.tree.leaves(params)[0]
  if not isinstance(array, jax.Array):
    return False
  return array.sharding.device_set.isdisjoint(partitioner.devices)


def _sent(
  view: dict[str, Any], replicas: list[Partitioner], outputs_first: bool
) -> list[dict[str, Any]]:
  """Sends parameters to the replicas' devices, which have none yet."""
  views: list[dict[str, Any]] = [{} for _ in replicas]
  trained_on = jax.tree.leaves(view)[0].sharding
  for name, part in view.items():
    # Gather one layer at a time on every training device, so that each process sends
    # between its own devices.
    if trained_on.num_devices > 1:
      part = gatherer(trained_on.mesh)(part)
    part = jax.tree.map(lambda x: x.addressable_data(0), part)
    for of_replica, replica in zip(views, replicas, strict=True):
      shardings = replica.tree({name: part}, outputs_first)
      of_replica |= jax.device_put({name: part}, shardings)
  return views


@functools.lru_cache(maxsize=8)
def converter(cfg: ModelConfig, on: str) -> Any:
  """Returns a jitted function to unstack and round parameters, keeping their splits.

  Cached: otherwise every update would compile it. `on` is the devices' platform.
  """
  kind = cfg.weight_dtype or cfg.dtype
  narrow = cfg.product_dtype
  # A CPU would convert half-precision weights at every step.
  storage_dtype = "float32" if on == "cpu" else kind

  def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
    x = rounded(x, kind)
    name = name_of(path)
    inputs = inputs_of(name)
    if narrow and (inputs or name == "embed"):
      # Outputs first; an embedding already has this order.
      return x.transpose(*range(inputs, x.ndim), *range(inputs)).astype(narrow)
    return x.astype(storage_dtype)

  def convert(params: dict[str, Any]) -> dict[str, Any]:
    return jax.tree_util.tree_map_with_path(
      leaf, transformer.unstack(params, cfg.layers)
    )

  return jax.jit(convert)


@functools.lru_cache(maxsize=8)
def resharder(cfg: ModelConfig, partitioner: Partitioner, kind: str = "") -> Any:
  """Returns a jitted function to move parameters to their decoding shardings.

  The function takes one layer with this kind or, for "", all arrays outside the layers.
  """
  shapes = decoding_shapes(cfg, partitioner)
  part = {name: x for name, x in shapes.items() if not is_layer(name)}
  if kind:
    part = shapes[f"layer_{cfg.kinds.index(kind)}"]
  shardings = jax.tree.map(lambda x: x.sharding, part)
  return jax.jit(lambda arrays: arrays, out_shardings=shardings)


def is_layer(name: str) -> bool:
  """Tells whether a decode-parameter subtree with this name is a layer."""
  return name.startswith("layer_")

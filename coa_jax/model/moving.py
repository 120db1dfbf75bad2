"""Resharding of arrays, and the token order in rows split over devices.

`sharding.py` holds each array's split.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# By device kind: the longest mesh axis gathered at once, and the first step's size on a
# longer axis. Over 64 chips or more, libtpu 0.0.42 all-reduces the whole array instead.
# TPU7x's compiler makes more all-reduces in two steps; on GPUs the second gather would
# send data between hosts that NCCL sends within them.
_GATHERED_OVER = dict.fromkeys(
  ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"), (32, 8)
)


def mesh_over(grid: np.ndarray, axes: tuple[str, ...]) -> Mesh:
  """Makes a mesh from a device grid; XLA infers unstated shardings."""
  kinds = (jax.sharding.AxisType.Auto,) * len(axes)
  return Mesh(grid, axes, axis_types=kinds)


@functools.lru_cache(maxsize=8)
def gatherer(mesh: Mesh) -> Any:
  """Returns a jitted function to replicate arrays on every mesh device."""
  whole = NamedSharding(mesh, PartitionSpec())
  return jax.jit(lambda arrays: arrays, out_shardings=whole)


def moved(x: jax.Array, before: NamedSharding, after: NamedSharding) -> jax.Array:
  """Moves an array from one split to another, and its gradient back; inside a jit.

  If `x` is an unreduced sum, each device receives only its own part in `after`. An
  array split over several mesh axes is gathered axis by axis, and over a long axis in
  two steps: in one step a TPU's compiler would all-reduce the whole array, forward and
  backward.
  """
  if before.num_devices == 1:
    return x
  for stage in _stages(before, after):
    x = _moved_once(x, before, stage)
    before = stage
  return x


def _stages(before: NamedSharding, after: NamedSharding) -> list[NamedSharding]:
  """Lists the successive splits up to `after`; each drops one more mesh axis."""
  mesh, parts = _in_parts(before.mesh)
  split = [_mesh_axes(entry, parts) for entry in before.spec]
  stages = []
  for axis, entry in enumerate(after.spec):
    kept = _mesh_axes(entry, parts)
    # Without a gather, or with another change too, `after` is the only stage.
    while split[axis] != kept and split[axis][: len(kept)] == kept:
      given_up = split[axis][-1]
      split[axis] = split[axis][:-1]
      if mesh.shape[given_up] > 1:
        stages.append(NamedSharding(mesh, PartitionSpec(*split)))
  return [*stages[:-1], after]


def _in_parts(mesh: Mesh) -> tuple[Mesh, dict[str, tuple[str, ...]]]:
  """Cuts each long mesh axis into two; the devices keep their order.

  Returns:
    The new mesh, and its axis names for each old axis.
  """
  if isinstance(mesh, AbstractMesh):
    return mesh, {axis: (axis,) for axis in mesh.shape}
  kind = mesh.devices.flat[0].device_kind
  most, first = _GATHERED_OVER.get(kind, (mesh.size, 1))
  names: dict[str, tuple[str, ...]] = {}
  sizes: list[int] = []
  for axis, size in mesh.shape.items():
    if size > most and size % first == 0:
      names[axis] = (axis, f"{axis}_first")
      sizes += [size // first, first]
    else:
      names[axis] = (axis,)
      sizes.append(size)
  axes = tuple(itertools.chain(*names.values()))
  return mesh_over(mesh.devices.reshape(sizes), axes), names


def _mesh_axes(
  entry: str | tuple[str, ...] | None, parts: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
  """Returns a PartitionSpec entry's mesh axes, each replaced by its parts."""
  if entry is None:
    return ()
  axes = (entry,) if isinstance(entry, str) else entry
  return tuple(itertools.chain(*(parts[axis] for axis in axes)))


def _moved_once(x: jax.Array, before: NamedSharding, after: NamedSharding) -> jax.Array:
  """Moves an array to another split in one exchange, and its gradient back."""

  @jax.custom_vjp
  def move(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, after)

  def forward(x: jax.Array) -> tuple[jax.Array, None]:
    return move(x), None

  def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, before),)

  move.defvjp(forward, backward)
  return move(x)


def zigzag(x_BT: jax.Array, row_devices: int) -> jax.Array:
  """Orders row tokens so that causal attention is equal work for all devices.

  A row is cut into two pieces per device. Device i gets the i-th piece from the front
  and the i-th from the back: its queries see as much as any other device's (Llama 3,
  arXiv 2407.21783, section 3.3.2).

  Args:
    x_BT: [B, T, ...], rows in token order.
    row_devices: devices that split a row; 1 changes nothing. T is a multiple of twice
      this number.
  """
  return _reordered(x_BT, _zigzag_order(row_devices))


def straight(x_BT: jax.Array, row_devices: int) -> jax.Array:
  """Restores the token order in rows: the inverse of `zigzag`."""
  return _reordered(x_BT, np.argsort(_zigzag_order(row_devices)))


def _zigzag_order(row_devices: int) -> np.ndarray:
  """Returns a row's piece numbers in device order: 0, last, 1, last but one, ..."""
  front = np.arange(row_devices)
  back = 2 * row_devices - 1 - front
  return np.stack([front, back], axis=1).ravel()


def _reordered(x_BT: jax.Array, order: np.ndarray) -> jax.Array:
  """Reorders each row's pieces, which have equal lengths."""
  if len(order) == 2:  # one device has both pieces, already in order
    return x_BT
  B, T, *rest = x_BT.shape
  pieces = x_BT.reshape(B, len(order), T // len(order), *rest)
  return pieces[:, order].reshape(x_BT.shape)

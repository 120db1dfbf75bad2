"""Placement of devices in a mesh: the most communicating ones are closest.

A team is a run of devices, in the mesh's order, splitting every matrix (`tensor`). It
decodes as one replica, driven by one process, so it must be within that process's own
devices: one host's on a TPU slice.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils


def device_grid(
  sizes: Sequence[int], devices: Sequence[jax.Device], team: int
) -> np.ndarray:
  """Places devices in a grid from axis `data` (first) to `tensor` (last).

  JAX follows the sides of the torus. A host of four chips is a square of it, so a side
  leads through several hosts; if that would split a team between hosts, every host
  becomes a block of the grid. Several slices work together over `data` alone.

  Args:
    sizes: the axes' sizes; they multiply to the number of devices.
    devices: all of one kind.
    team: devices decoding together. They, and the last axis's, are within one host if
      its number of devices allows it.

  Raises:
    ValueError: there are several TPU slices, and `data` is not a multiple of their
      number, or some of their devices are missing.
  """
  # --- Several slices, whose network is slow: whole copies of the state on each.
  slices = _grouped(devices, "slice_index")
  if len(slices) > 1 and devices[0].platform == "tpu":
    counts = {len(part) for part in slices}
    if len(counts) > 1:
      raise ValueError(
        f"mesh.devices={len(devices)} takes more of one slice than of another, and "
        "they hold whole copies of the state each; 0 takes all"
      )
    if sizes[0] % len(slices):
      raise ValueError(
        f"mesh.data={sizes[0]} must be a multiple of the {len(slices)} slices: only "
        "data works over the network between them"
      )
    inner = (sizes[0] // len(slices), *sizes[1:])
    return np.concatenate([device_grid(inner, part, team) for part in slices])

  # --- JAX's own order; it refuses an axis that is not a product of a torus's sides,
  # such as tensor=2 on 4x4x8, unless it may take a part of a side.
  hosts = _grouped(devices, "process_index")
  if not _is_box(devices):  # a part of every host: JAX makes no mesh of that
    return _blocks_of_hosts(sizes, hosts)
  grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  local = len(hosts[0])
  alike = all(len(host) == local for host in hosts)
  teams = [ways for ways in (sizes[-1], team) if local % ways == 0]
  if not alike or not any(num_split(grid, ways) for ways in teams):
    return grid

  return _blocks_of_hosts(sizes, hosts)


def _blocks_of_hosts(
  sizes: Sequence[int], hosts: Sequence[Sequence[jax.Device]]
) -> np.ndarray:
  """Returns a grid in which each host's devices fill the last axes first."""
  local = len(hosts[0])
  inner = [1] * len(sizes)
  for axis in reversed(range(len(sizes))):
    inner[axis] = math.gcd(sizes[axis], local)
    local //= inner[axis]
  outer = [size // part for size, part in zip(sizes, inner, strict=True)]
  # All hosts in one order of places. JAX orders the chips of v5e's and v6e's first host
  # differently, and libtpu 0.0.42 finds no route for groups of v5e chips in unequal
  # positions.
  blocks = np.array([sorted(host, key=_place) for host in hosts])
  blocks = blocks.reshape(*outer, *inner)
  # Each axis of the grid: first its hosts, then the devices within one.
  axes = range(len(sizes))
  order = [axis + part for axis in axes for part in (0, len(sizes))]
  return blocks.transpose(order).reshape(sizes)


def _is_box(devices: Sequence[jax.Device]) -> bool:
  """Whether TPU devices are all of a box's places; devices without places are."""
  places = np.array([_place(device)[:-1] for device in devices])
  sides = places.max(0) - places.min(0) + 1
  return math.prod(sides) in (1, len(devices))


def _place(device: jax.Device) -> tuple[int, ...]:
  """Returns a device's place in a TPU slice; elsewhere its number."""
  core = getattr(device, "core_on_chip", 0)
  return (*getattr(device, "coords", ()), core, device.id)


def num_split(grid: np.ndarray, ways: int) -> int:
  """Counts the teams of `ways` devices spanning several processes."""
  count = 0
  for team in grid.reshape(-1, ways):
    if len({device.process_index for device in team}) > 1:
      count += 1
  return count


def team_sizes(grid: np.ndarray) -> list[int]:
  """Returns the team sizes that fit within one process each."""
  local = min(map(len, _grouped(list(grid.flat), "process_index")))
  return [ways for ways in range(1, local + 1) if local % ways == 0]


def check_leaving_out(field: str, devices: Sequence[jax.Device]) -> None:
  """Refuses a field that leaves out some of these devices, if no program can.

  Raises:
    ValueError: their slices' compiler has no such program for several hosts.
  """
  largest = max(map(len, _grouped(devices, "slice_index")))
  if devices[0].device_kind in ("TPU v5 lite", "TPU v5e") and largest >= 32:
    raise ValueError(
      f"{field}: the compiler for slices of v5e of 32 chips or more makes no program "
      "that leaves some out (libtpu 0.0.42); 0 takes all for everything"
    )


def _grouped(devices: Sequence[jax.Device], attribute: str) -> list[list[jax.Device]]:
  """Devices by an attribute, in its order; one that lacks it counts as 0."""
  groups: dict[int, list[jax.Device]] = collections.defaultdict(list)
  for device in devices:
    groups[getattr(device, attribute, None) or 0].append(device)
  return [groups[key] for key in sorted(groups)]

"""Device placement in a mesh: devices that communicate most are closest.

A team is a run of devices, in mesh order, splitting every matrix (`tensor`). A team
decodes as one replica, driven by one process, so all its devices must belong to this
process: to one host on a TPU slice.
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

  JAX follows the torus's sides. A four-chip host is a square in the torus, so a side
  leads through several hosts; if this would split a team between hosts, every host
  becomes a block in the grid. Several slices work together over `data` alone.

  Args:
    sizes: the axes' sizes; they multiply to the number of devices.
    devices: all of one kind.
    team: devices per team. A team, and a run along the last axis, is within one host if
      the host's device count allows it.

  Raises:
    ValueError: there are several TPU slices, and `data` is not a multiple of their
      number, or they have different numbers of devices.
  """
  # --- Several slices, with a slow network between: each holds whole state copies.
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

  # --- JAX's own order. If JAX may not split a side, it refuses an axis that is not a
  # product of torus sides, such as tensor=2 on 4x4x8.
  hosts = _grouped(devices, "process_index")
  if not _is_box(devices):  # a part of every host: JAX makes no such mesh
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
  # All hosts order their chips alike. JAX orders the first host's chips differently on
  # v5e and v6e, and libtpu 0.0.42 finds no route for v5e chip groups in unequal
  # positions.
  blocks = np.array([sorted(host, key=_place) for host in hosts])
  blocks = blocks.reshape(*outer, *inner)
  # Each grid axis: first its hosts, then the devices within one host.
  axes = range(len(sizes))
  order = [axis + part for axis in axes for part in (0, len(sizes))]
  return blocks.transpose(order).reshape(sizes)


def _is_box(devices: Sequence[jax.Device]) -> bool:
  """Whether TPU devices fill a box; devices without coordinates always do."""
  places = np.array([_place(device)[:-1] for device in devices])
  sides = places.max(0) - places.min(0) + 1
  return math.prod(sides) in (1, len(devices))


def _place(device: jax.Device) -> tuple[int, ...]:
  """Returns a device's coordinates in a TPU slice, if any, its core and its number."""
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
  """Refuses a field that leaves out some devices, if the compiler cannot.

  Raises:
    ValueError: the slices are v5e of 32 chips or more: no program can leave any out.
  """
  largest = max(map(len, _grouped(devices, "slice_index")))
  if devices[0].device_kind in ("TPU v5 lite", "TPU v5e") and largest >= 32:
    raise ValueError(
      f"{field}: the compiler for slices of v5e of 32 chips or more makes no program "
      "that leaves some out (libtpu 0.0.42); 0 takes all for everything"
    )


def _grouped(devices: Sequence[jax.Device], attribute: str) -> list[list[jax.Device]]:
  """Groups devices by an attribute, in ascending order; a missing one counts as 0."""
  groups: dict[int, list[jax.Device]] = collections.defaultdict(list)
  for device in devices:
    groups[getattr(device, attribute, None) or 0].append(device)
  return [groups[key] for key in sorted(groups)]

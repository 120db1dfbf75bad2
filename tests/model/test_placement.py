"""A team of devices is within one host, on every kind of slice; slices share only data.

The tests build slices by hand, so they need only JAX's mesh making. If libtpu is
installed, they compare its own descriptions with these, and use them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest
from jax.experimental import mesh_utils, topologies

from coa_jax.model.placement import device_grid, num_split, team_sizes
from coa_jax.model.sharding import MeshConfig, make_partitioner, make_partitioners

# Device kind and cores per chip, by generation. Every host has 2 x 2 chips.
KINDS = {
  "v5e": ("TPU v5 lite", 1),
  "v5p": ("TPU v5", 1),
  "v6e": ("TPU v6 lite", 1),
  "tpu7x": ("TPU7x", 2),
}
SLICES = (
  *("v5e:2x4", "v5e:4x4", "v6e:4x4", "v6e:8x8"),
  *("v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8"),
  *("tpu7x:2x2x2", "tpu7x:4x4x4"),
)


@dataclasses.dataclass(frozen=True)
class Chip:
  """The attributes of a TPU device that mesh making reads."""

  id: int
  coords: tuple[int, int, int]
  core_on_chip: int
  process_index: int
  device_kind: str
  slice_index: int = 0
  platform: str = "tpu"


def chips(slice_name: str, slices: int = 1) -> list[Chip]:
  """The slices' devices, host by host."""
  generation, _, shape = slice_name.partition(":")
  kind, cores = KINDS[generation]
  x, y, z = (*map(int, shape.split("x")), 1)[:3]
  out = []
  for number in range(slices):
    for host_z, host_y, host_x in itertools.product(
      range(z), range(y // 2), range(x // 2)
    ):
      host = (number * z + host_z) * (y // 2) * (x // 2) + host_y * (x // 2) + host_x
      for dy, dx, core in itertools.product(range(2), range(2), range(cores)):
        coords = (2 * host_x + dx, 2 * host_y + dy, host_z)
        out.append(Chip(len(out), coords, core, host, kind, number))
  return out


def split_by_jax(sizes: tuple[int, ...], devices: list) -> int:
  """Counts the teams that JAX's own placement splits between hosts."""
  grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return num_split(grid, sizes[-1])


def test_a_slice_whose_programs_leave_no_chip_out_refuses_to():
  """Otherwise the compiler fails minutes later with its own error."""
  for name in ("v5e:4x4", "v6e:8x8"):
    devices = chips(name)
    half = len(devices) // 2
    learner, rollouts = make_partitioners(MeshConfig(rollout=half), devices)
    assert learner.mesh.size == rollouts.mesh.size == half
  for field in ("rollout", "devices"):
    reason = rf"mesh\.{field}=32: the compiler for slices of v5e"
    with pytest.raises(ValueError, match=reason):
      make_partitioners(MeshConfig(**{field: 32}), chips("v5e:8x8"))


@pytest.mark.parametrize("name", SLICES)
def test_a_team_that_a_host_can_hold_is_of_one_host(name: str):
  devices = chips(name)
  local = len(devices) // len({d.process_index for d in devices})
  for tensor, context in itertools.product((1, 2, 4), (1, 2, 4)):
    rest = len(devices) // (tensor * context)
    if not rest:
      continue
    for team in (1, 2, 4):
      for data in (1, 2) if rest > 1 else (1,):
        grid = device_grid((data, rest // data, context, tensor), devices, team)
        assert sorted(d.id for d in grid.flat) == sorted(d.id for d in devices)
        assert not num_split(grid, tensor) and not num_split(grid, team)
        assert {tensor, team} <= set(team_sizes(grid))
  grid = device_grid((1, len(devices), 1, 1), devices, local)
  assert not num_split(grid, local) and max(team_sizes(grid)) == local


def test_all_hosts_order_their_devices_alike():
  """JAX orders the first host of v5e and v6e differently from the others."""
  for name in SLICES:
    devices = chips(name)
    sizes = (1, len(devices) // 4, 1, 4)
    if not split_by_jax(sizes, devices):
      continue  # then JAX's own grid is kept
    grid = device_grid(sizes, devices, 4)
    teams = np.array([[(*d.coords, d.core_on_chip) for d in t] for t in grid[0, :, 0]])
    within = teams - teams[:, :1]
    assert (within == within[0]).all(), name


def test_a_part_of_every_host_is_a_mesh():
  """The learner's devices with `mesh.rollout`; for most of them JAX makes no mesh."""
  for name in SLICES:
    part = []
    for _, host in itertools.groupby(chips(name), key=lambda d: d.process_index):
      devices = list(host)
      part += devices[: len(devices) // 2]
    grid = device_grid((1, len(part), 1, 1), part, 2)
    assert sorted(d.id for d in grid.flat) == sorted(d.id for d in part)
    assert not num_split(grid, 2)


def test_jax_would_split_teams_between_hosts():
  """Otherwise the tests above prove nothing. A mesh that JAX places well is kept."""
  assert split_by_jax((1, 4, 1, 4), chips("v6e:4x4")) == 4
  assert split_by_jax((1, 16, 1, 4), chips("v5p:4x4x4")) == 16
  assert split_by_jax((1, 32, 1, 4), chips("tpu7x:4x4x4")) == 32
  for name, sizes in (("v5p:2x2x4", (1, 4, 1, 4)), ("v6e:4x4", (1, 8, 1, 2))):
    devices = chips(name)
    theirs = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
    np.testing.assert_array_equal(device_grid(sizes, devices, 1), theirs)


def test_a_team_that_no_host_can_hold_is_told_from_those_that_fit():
  grid = device_grid((1, 2, 1, 8), chips("v6e:4x4"), 8)
  assert num_split(grid, 8) == 2 and team_sizes(grid) == [1, 2, 4]
  # Training may split matrices 8 ways while decoding splits them 4 ways.
  grid = device_grid((1, 2, 1, 8), chips("v6e:4x4"), 4)
  assert num_split(grid, 8) == 2 and not num_split(grid, 4)


def test_several_slices_share_data_alone():
  devices = chips("v6e:4x4", slices=2)
  grid = device_grid((2, 4, 1, 4), devices, 4)
  assert not num_split(grid, 4)
  for copy in grid:
    assert len({d.slice_index for d in copy.flat}) == 1
  with pytest.raises(
    ValueError, match=r"mesh\.data=1 must be a multiple of the 2 slic"
  ):
    device_grid((1, 32, 1, 1), devices, 1)


def test_devices_of_a_cpu_stay_in_their_order():
  devices = []
  for i in range(8):
    devices.append(Chip(i, (0, 0, 0), 0, i // 4, "cpu", i // 4, "cpu"))
  for sizes in ((1, 4, 1, 2), (2, 2, 2, 1), (1, 1, 1, 8)):
    expected = np.array(devices).reshape(sizes)
    np.testing.assert_array_equal(device_grid(sizes, devices, sizes[-1]), expected)


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu describes TPU slices"
)
@pytest.mark.parametrize("name", SLICES)
def test_real_slices_are_as_the_made_ones(name: str, monkeypatch):
  # Otherwise libtpu asks a metadata server, which only Google's machines have.
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  topology = topologies.get_topology_desc(name, platform="tpu")
  real = {(*d.coords, d.core_on_chip): d for d in topology.devices}
  made = {(*d.coords, d.core_on_chip): d for d in chips(name)}
  assert real.keys() == made.keys()
  for place, device in real.items():
    assert device.device_kind == made[place].device_kind
    assert device.process_index == made[place].process_index
  # Training splits 1 and 2 ways; decoding 1 way, 2 ways, and over a whole host.
  hosts = len({d.process_index for d in topology.devices})
  local = len(topology.devices) // hosts
  for tensor, decoded in itertools.product((1, 2), (1, 2, local)):
    config = MeshConfig(tensor=tensor)
    both = make_partitioner(config, topology.devices, rollout_tensor=decoded)
    assert len(both.decoding(decoded).replicas()) == local // decoded
  if hosts > 1:
    config = MeshConfig(tensor=2 * local)
    wide = make_partitioner(config, topology.devices, rollout_tensor=local)
    assert len(wide.decoding(local).replicas()) == 1
    with pytest.raises(ValueError, match=r"rollout\.tensor .* can be 1, 2, 4"):
      wide.decoding().replicas()

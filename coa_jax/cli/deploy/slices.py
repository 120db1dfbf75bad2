"""The available TPU slices: their names, hosts and labels.

Source: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (machine types and
topologies) and cloud.google.com/tpu/docs/v5e, /v5p, /v6e (accelerator types).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re


@dataclasses.dataclass(frozen=True)
class Generation:
  """A TPU generation's properties.

  Attributes:
    gke_accelerator: GKE's node label.
    cores: cores per chip in a slice's name: `v5p-128` has 64 chips.
    single_host: topologies with one host, of 8 chips or fewer.
    topologies: topologies with several hosts, of 4 chips each.
    gcloud_type: the start of the Cloud TPU API's accelerator type; "" if only GKE and
      Compute Engine have the generation.
    runtime: the TPU VM's software version.
    kind: JAX's name for a device (`device_kind`).
    devices: JAX devices per chip.
  """

  gke_accelerator: str
  cores: int
  single_host: tuple[str, ...]
  topologies: tuple[str, ...]
  gcloud_type: str
  runtime: str
  kind: str
  devices: int = 1


_FLAT = ("4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
  "2x2x2",
  "2x2x4",
  "2x4x4",
  "4x4x4",
  "4x4x8",
  "4x8x8",
  "8x8x8",
  "8x8x16",
  "8x16x16",
  "16x16x16",
)
GENERATIONS = {
  "v5e": Generation(
    gke_accelerator="tpu-v5-lite-podslice",
    cores=1,
    single_host=("1x1", "2x2", "2x4"),
    topologies=_FLAT,
    gcloud_type="v5litepod",
    runtime="v2-alpha-tpuv5-lite",
    kind="TPU v5 lite",
  ),
  "v5p": Generation(
    gke_accelerator="tpu-v5p-slice",
    cores=2,
    single_host=("2x2x1",),
    topologies=_CUBES,
    gcloud_type="v5p",
    runtime="v2-alpha-tpuv5",
    kind="TPU v5",
  ),
  "v6e": Generation(
    gke_accelerator="tpu-v6e-slice",
    cores=1,
    single_host=("1x1", "2x2", "2x4"),
    topologies=_FLAT,
    gcloud_type="v6e",
    runtime="v2-alpha-tpuv6e",
    kind="TPU v6 lite",
  ),
  "tpu7x": Generation(
    gke_accelerator="tpu7x",
    cores=2,
    single_host=("2x2x1",),
    topologies=_CUBES,
    gcloud_type="",
    runtime="",
    kind="TPU7x",
    devices=2,
  ),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Interconnected chips of one pod."""

  generation: str
  topology: str

  @property
  def chips(self) -> int:
    """Counts the slice's chips."""
    return math.prod(map(int, self.topology.split("x")))

  @property
  def chips_per_host(self) -> int:
    """Counts a host's chips: 4 if there are several hosts."""
    if self.topology in GENERATIONS[self.generation].single_host:
      return self.chips
    return 4

  @property
  def hosts(self) -> int:
    """Counts the slice's hosts."""
    return self.chips // self.chips_per_host

  @property
  def name(self) -> str:
    """Returns the slice's name, as v6e-64 or v5p-128."""
    return f"{self.generation}-{self.chips * GENERATIONS[self.generation].cores}"

  @property
  def gcloud_type(self) -> str:
    """Returns the Cloud TPU API's accelerator type; "" if there is none."""
    start = GENERATIONS[self.generation].gcloud_type
    return start and self.name.replace(self.generation, start)


@dataclasses.dataclass(frozen=True)
class Device:
  """A remote machine's device, with the fields of `jax.Device`."""

  id: int
  process_index: int
  slice_index: int = 0
  coords: tuple[int, ...] = ()
  core_on_chip: int = 0
  platform: str = "gpu"
  device_kind: str = "described"


def describe_gpus(nodes: int, gpus: int) -> list[Device]:
  """Describes several hosts' GPUs, one process per GPU."""
  return [Device(i, i) for i in range(nodes * gpus)]


def describe_slices(one: Slice, count: int) -> list[Device]:
  """Describes equal slices' devices, one process per host."""
  generation = GENERATIONS[one.generation]
  sides = [*map(int, one.topology.split("x"))]
  block = sides if one.hosts == 1 else [2, 2, 1][: len(sides)]  # a host's chips
  grid = [side // part for side, part in zip(sides, block, strict=True)]
  out: list[Device] = []
  for number in range(count):
    for coords in itertools.product(*map(range, sides)):
      host = 0
      for place, part, hosts in zip(coords, block, grid, strict=True):
        host = host * hosts + place // part
      for core in range(generation.devices):
        device = Device(
          id=len(out),
          process_index=number * one.hosts + host,
          slice_index=number,
          coords=(*coords, 0)[:3],
          core_on_chip=core,
          platform="tpu",
          device_kind=generation.kind,
        )
        out.append(device)
  return out


def read_slice(text: str) -> Slice:
  """Reads a slice by its name (v5p-128) or its topology (v5p:4x4x4).

  Raises:
    ValueError: no such slice exists; the message lists the generation's.
  """
  match = re.fullmatch(r"(\w+)([-:])([\dx]+)", text)
  if not match or match[1] not in GENERATIONS:
    raise ValueError(
      f"--slice={text}: give v6e-64 or v6e:8x8; there are {', '.join(GENERATIONS)}"
    )
  generation = GENERATIONS[match[1]]
  topologies = (*generation.single_host, *generation.topologies)
  known = [Slice(match[1], topology) for topology in topologies]
  for found in known:
    if (match[2] == ":" and found.topology == match[3]) or found.name == text:
      return found
  listed = ", ".join(f"{found.name} ({found.topology})" for found in known)
  raise ValueError(f"--slice={text}: there is no such slice; there are {listed}")

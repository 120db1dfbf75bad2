"""What the processes of one run tell each other.

Small things go to everybody, as JSON. Arrays go to those alone who want them, so that
nothing on one host grows with the number of hosts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_SPEC = PartitionSpec("process", None, "device")
_own_devices: list[jax.Device] = []  # that all of this goes over; all where empty


def keep_to(devices: Iterable[jax.Device]) -> None:
  """Has processes talk over these devices alone; over all where there are none.

  Others may belong to rollouts, whose threads give them work meanwhile: two programs
  that both talk between devices could wait for each other.
  """
  _own_devices[:] = devices
  _mesh.cache_clear()


def gather_json(value: Any) -> list[Any]:
  """Returns a JSON value of every process, in their order; all have to call this."""
  if jax.process_count() == 1:
    return [value]
  own = json.dumps(value).encode()
  # An all-gather takes arrays of one shape: the bytes, padded to the longest.
  sizes = _all_gather(np.array([len(own)], np.int32))[:, 0]
  padded = np.zeros(_rounded(int(sizes.max())), np.uint8)
  padded[: len(own)] = np.frombuffer(own, np.uint8)
  rows = _all_gather(padded)
  values = []
  for row, size in zip(rows, sizes, strict=True):
    values.append(json.loads(row[:size].tobytes()))
  return values


def send(
  own: Mapping[int, np.ndarray], receivers: Mapping[int, Collection[int]]
) -> dict[int, np.ndarray]:
  """Sends numbered arrays to the processes that want them; all have to call this.

  Each array is cut into as many stripes as there are processes. Each process gets a
  stripe of all arrays, and passes it on to who wants it. So all messages of one round
  have about one length, however unequal arrays are and whoever wants them: a process
  sends what it has and what it passes on, and nobody ever holds what all of them have.

  budget: where stripes lie is said once for both rounds.

  Args:
    own: int32 [n] each, of this process; no other one has these numbers.
    receivers: for every number of any process, the processes that want the array.

  Returns:
    The arrays that this process wants, by number.
  """
  me = jax.process_index()
  count = jax.process_count()

  # --- Where the stripes of each array lie: in the messages of who has it, and in those
  # to who wants it.
  lengths: dict[int, int] = {}
  stripes: dict[int, int] = {}  # their lengths
  sender_end = [0] * count
  begins: dict[int, tuple[int, int]] = {}  # who has it, and where it begins there
  for sender, part in enumerate(gather_json([(i, len(x)) for i, x in own.items()])):
    for i, length in part:
      lengths[i] = length
      stripes[i] = -(-length // count)
      begins[i] = (sender, sender_end[sender])
      sender_end[sender] += stripes[i]
  receiver_end = [0] * count
  wanted: list[dict[int, int]] = [{} for _ in range(count)]  # where each begins
  for i in sorted(lengths):
    for receiver in receivers[i]:
      wanted[receiver][i] = receiver_end[receiver]
      receiver_end[receiver] += stripes[i]

  # --- A stripe of each array to each process.
  first_PS = np.zeros((count, max(sender_end)), np.int32)
  for i, array in own.items():
    padded = np.zeros(stripes[i] * count, np.int32)
    padded[: len(array)] = array
    begin = begins[i][1]
    first_PS[:, begin : begin + stripes[i]] = padded.reshape(count, -1)
  first_PS = _all_to_all(first_PS)

  # --- From each process its stripes to who wants them.
  second_PS = np.zeros((count, max(receiver_end)), np.int32)
  for receiver, places in enumerate(wanted):
    for i, place in places.items():
      sender, begin = begins[i]
      stripe = first_PS[sender, begin : begin + stripes[i]]
      second_PS[receiver, place : place + stripes[i]] = stripe
  second_PS = _all_to_all(second_PS)

  # --- Put together again.
  out = {}
  for i, place in wanted[me].items():
    out[i] = second_PS[:, place : place + stripes[i]].ravel()[: lengths[i]]
  return out


def _all_gather(own: np.ndarray) -> np.ndarray:
  """Returns the arrays of all processes, which are of one shape, stacked."""
  mesh = _mesh()
  of_process = NamedSharding(mesh, PartitionSpec("process"))
  whole = jax.make_array_from_process_local_data(of_process, own[None])
  return np.asarray(_gather(mesh)(whole).addressable_data(0))


def _all_to_all(own_PS: np.ndarray) -> np.ndarray:
  """Sends row p to process p; returns the row that each sent here, [P, S] int32."""
  count, size = own_PS.shape
  mesh = _mesh()
  # Over all devices of a process, for each has links of its own.
  devices = mesh.shape["device"]
  padded_PS = np.zeros((count, devices * _rounded(-(-size // devices))), np.int32)
  padded_PS[:, :size] = own_PS
  whole = multihost_utils.host_local_array_to_global_array(padded_PS[None], mesh, _SPEC)
  whole = _exchange(mesh)(whole)
  return multihost_utils.global_array_to_host_local_array(whole, mesh, _SPEC)[0]


@functools.cache
def _mesh() -> Mesh:
  """The devices of each process in a row, as many of each."""
  rows: dict[int, list[jax.Device]] = {}
  for device in _own_devices or jax.devices():
    rows.setdefault(device.process_index, []).append(device)
  count = min(map(len, rows.values()))
  grid = [sorted(rows[i], key=lambda d: d.id)[:count] for i in sorted(rows)]
  return Mesh(np.array(grid), ("process", "device"))


@functools.cache
def _gather(mesh: Mesh) -> Any:
  """The program of `_all_gather`; as `_exchange`'s compiled for every length."""
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.cache
def _exchange(mesh: Mesh) -> Any:
  """The program; it is compiled anew for every length of messages."""

  def exchange(own_1PS: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(own_1PS[0], "process", 0, 0, tiled=True)[None]

  return jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC))


def _rounded(size: int) -> int:
  """The size made longer by up to 1/8: few lengths, and so few programs."""
  unit = 1 << max(0, size.bit_length() - 4)
  return max(1, -(-size // unit) * unit)

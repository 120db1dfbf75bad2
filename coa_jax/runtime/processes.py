"""What the processes of one run tell each other.

Everything goes to everybody, as JSON or bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PIECE = 1 << 26  # bytes of all processes that a device holds at once
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
  return [json.loads(x) for x in gather_bytes(json.dumps(value).encode())]


def gather_bytes(own: bytes) -> list[bytes]:
  """Returns the bytes of every process, in their order; all have to call this."""
  # An all-gather takes arrays of one shape: the bytes, padded to the longest.
  sizes = _all_gather(np.array([len(own)], np.int32))[:, 0]
  padded = np.zeros(_rounded(int(sizes.max())), np.uint8)
  padded[: len(own)] = np.frombuffer(own, np.uint8)
  # In pieces: each is on every device as a whole, beside model and caches.
  most = max(1, _PIECE // len(sizes))
  pieces = []
  for begin in range(0, len(padded), most):
    pieces.append(_all_gather(padded[begin : begin + most]))
  out = []
  for row, size in zip(np.concatenate(pieces, axis=1), sizes, strict=True):
    out.append(row[:size].tobytes())
  return out


def _all_gather(own: np.ndarray) -> np.ndarray:
  """Returns the arrays of all processes, which are of one shape, stacked."""
  mesh = _mesh()
  of_process = NamedSharding(mesh, PartitionSpec("process"))
  whole = jax.make_array_from_process_local_data(of_process, own[None])
  return np.asarray(_gather(mesh)(whole).addressable_data(0))


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
  """The program of `_all_gather`; compiled anew for every length."""
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _rounded(size: int) -> int:
  """The size made longer by up to 1/8: few lengths, and so few programs."""
  unit = 1 << max(0, size.bit_length() - 4)
  return max(1, -(-size // unit) * unit)

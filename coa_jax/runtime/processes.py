"""Communication between a run's processes, and their own directories.

All data goes to all processes, as JSON or bytes.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PIECE = 1 << 26  # bytes on a device at once, from all processes
_own_devices: list[jax.Device] = []  # used for communication; empty: all devices


def keep_to(devices: Iterable[jax.Device]) -> None:
  """Restricts communication to these devices; without any, all are used.

  Other devices may belong to rollouts, whose threads use them at the same time: two
  programs with collectives could deadlock.
  """
  _own_devices[:] = devices
  _mesh.cache_clear()


def gather_json(value: Any) -> list[Any]:
  """Returns all processes' JSON values, in process order; all have to call this."""
  if jax.process_count() == 1:
    return [value]
  return [json.loads(x) for x in gather_bytes(json.dumps(value).encode())]


def gather_bytes(own: bytes) -> list[bytes]:
  """Returns all processes' bytes, in process order; all have to call this."""
  # An all-gather needs equal shapes: the bytes are padded to the longest.
  sizes = _all_gather(np.array([len(own)], np.int32))[:, 0]
  padded = np.zeros(_rounded(int(sizes.max())), np.uint8)
  padded[: len(own)] = np.frombuffer(own, np.uint8)
  # Gather in pieces: every device holds a whole piece, besides model and caches.
  most = max(1, _PIECE // len(sizes))
  pieces = []
  for begin in range(0, len(padded), most):
    pieces.append(_all_gather(padded[begin : begin + most]))
  out = []
  for row, size in zip(np.concatenate(pieces, axis=1), sizes, strict=True):
    out.append(row[:size].tobytes())
  return out


def _all_gather(own: np.ndarray) -> np.ndarray:
  """Returns all processes' arrays, which have equal shapes, stacked."""
  mesh = _mesh()
  of_process = NamedSharding(mesh, PartitionSpec("process"))
  whole = jax.make_array_from_process_local_data(of_process, own[None])
  return np.asarray(_gather(mesh)(whole).addressable_data(0))


@functools.cache
def _mesh() -> Mesh:
  """Returns a mesh with one device row per process, all rows equally long."""
  rows: dict[int, list[jax.Device]] = {}
  for device in _own_devices or jax.devices():
    rows.setdefault(device.process_index, []).append(device)
  count = min(map(len, rows.values()))
  grid = [sorted(rows[i], key=lambda d: d.id)[:count] for i in sorted(rows)]
  return Mesh(np.array(grid), ("process", "device"))


@functools.cache
def _gather(mesh: Mesh) -> Any:
  """Returns `_all_gather`'s program; recompiled for every length."""
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _rounded(size: int) -> int:
  """Rounds the size up by at most 1/8: few lengths, so few programs."""
  unit = 1 << max(0, size.bit_length() - 4)
  return max(1, -(-size // unit) * unit)


def is_first_process() -> bool:
  """Tells whether this process is the one that reports for all."""
  # A single process need not start its devices to know that it is the first.
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def process_dir(workdir: str) -> str:
  """Returns this process's directory for files that processes must not share.

  The first process writes into the workdir itself.
  """
  if is_first_process():
    return workdir
  return os.path.join(workdir, f"process_{jax.process_index()}")


def other_process_dirs(workdir: str) -> list[str]:
  """Lists the other processes' directories, including earlier starts'.

  An earlier start may have had another number of processes.
  """
  own = process_dir(workdir)
  names = []
  if os.path.isdir(workdir):
    names = [name for name in os.listdir(workdir) if re.fullmatch(r"process_\d+", name)]
  folders = [workdir, *(os.path.join(workdir, name) for name in sorted(names))]
  return [folder for folder in folders if folder != own]

"""Exchanges trajectories among all processes."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import jax
import numpy as np

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.runtime.processes import gather_bytes

# Segment lists sent as arrays, with their dtypes; log-probs stay bit-identical.
_LISTS = {"ids": np.int32, "versions": np.int32, "logps": np.float64}

Numbered = list[tuple[int, Trajectory]]


def gather_trajectories(own: Sequence[tuple[int, Trajectory]]) -> Numbered:
  """Returns all processes' trajectories, in process order; all must call this.

  Each has a number; this process's own are returned uncopied.
  """
  if jax.process_count() == 1:
    return list(own)
  out: Numbered = []
  for process, data in enumerate(gather_bytes(to_bytes(own))):
    out += own if process == jax.process_index() else from_bytes(data)
  return out


def to_bytes(numbered: Sequence[tuple[int, Trajectory]]) -> bytes:
  """Serializes trajectories as JSON, with per-token values in compact arrays."""
  rows = []
  lengths = []
  values: dict[str, list[int | float]] = {name: [] for name in _LISTS}
  for number, trajectory in numbered:
    row = trajectory.to_json()
    for segment in row["segments"]:
      for name in _LISTS:
        lengths.append(len(segment[name]))
        values[name] += segment.pop(name)
    rows.append((number, row))
  arrays = {name: np.array(values[name], dtype) for name, dtype in _LISTS.items()}
  text = np.frombuffer(json.dumps(rows).encode(), np.uint8)
  file = io.BytesIO()
  np.savez(file, rows=text, lengths=np.array(lengths, np.int32), **arrays)
  return file.getvalue()


def from_bytes(data: bytes) -> Numbered:
  """Reads `to_bytes`' output."""
  with np.load(io.BytesIO(data), allow_pickle=False) as file:
    rows = json.loads(file["rows"].tobytes())
    lengths = iter(file["lengths"].tolist())
    values = {name: file[name].tolist() for name in _LISTS}
  ends = dict.fromkeys(_LISTS, 0)
  out: Numbered = []
  for number, row in rows:
    trajectory = Trajectory.from_json(row)
    for segment in trajectory.segments:
      for name in _LISTS:
        begin = ends[name]
        ends[name] += next(lengths)
        setattr(segment, name, values[name][begin : ends[name]])
    out.append((number, trajectory))
  return out

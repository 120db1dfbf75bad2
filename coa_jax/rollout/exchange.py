"""What the processes of one run tell each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from coa_jax.protocol.trajectory import Trajectory


def gather_json(value: Any) -> list[Any]:
  """Returns a JSON value of every process, in their order; all have to call this."""
  if jax.process_count() == 1:
    return [value]
  own = json.dumps(value).encode()
  # An all-gather takes arrays of one shape: the bytes, padded to the longest.
  sizes = multihost_utils.process_allgather(np.array([len(own)]))[:, 0]
  padded = np.zeros(sizes.max(), np.uint8)
  padded[: len(own)] = np.frombuffer(own, np.uint8)
  rows = multihost_utils.process_allgather(padded)
  values = []
  for row, size in zip(rows, sizes, strict=True):
    values.append(json.loads(row[:size].tobytes()))
  return values


def gather_trajectories(
  own: Iterable[tuple[int, Trajectory]],
) -> Iterator[tuple[int, Trajectory]]:
  """Yields what all processes have played, on every one of them.

  Args:
    own: what this process has played: (a number, a trajectory). It is exchanged as
      JSON, which keeps every bit of a log-prob.
  """
  # Alone there is nothing to wait for: each goes on as soon as it is there.
  if jax.process_count() == 1:
    yield from own
    return
  for part in gather_json([(number, t.to_json()) for number, t in own]):
    for number, record in part:
      yield number, Trajectory.from_json(record)

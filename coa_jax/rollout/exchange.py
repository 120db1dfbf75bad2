"""What processes that play trajectories tell each other of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax

from coa_jax.processes import gather_json
from coa_jax.protocol.trajectory import Trajectory


def gather_trajectories(
  own: Iterable[tuple[int, Trajectory]],
) -> Iterator[tuple[int, Trajectory]]:
  """Yields what all processes have played, on every one of them; for evaluation.

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

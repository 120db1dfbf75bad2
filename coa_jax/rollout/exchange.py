"""What processes that play trajectories tell each other of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import jax

from coa_jax.processes import gather_json
from coa_jax.protocol.outcome import Outcome
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout import figures


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


def gather_outcomes(
  own: Sequence[tuple[int, Trajectory]],
) -> list[tuple[int, Trajectory | Outcome]]:
  """Returns what all processes have played: this one's, and of others the outcomes.

  Args:
    own: what this process has played: (a number, a trajectory).
  """
  if jax.process_count() == 1:
    return list(own)
  rows = []
  for number, t in own:
    rows.append((number, dataclasses.asdict(figures.outcome_of(t))))
  out: list[tuple[int, Trajectory | Outcome]] = []
  for process, part in enumerate(gather_json(rows)):
    if process == jax.process_index():
      out += own
    else:
      out += [(number, Outcome(**row)) for number, row in part]
  return out

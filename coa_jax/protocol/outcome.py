"""Outcome: what all processes of a run know of a trajectory that one of them played."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Outcome:
  """Stands in a group for a trajectory of another process; JSON values only.

  Its tokens are on the host that played it, and go to those alone that learn from them.

  Attributes:
    task_id: as the trajectory's, like `reward`, `reward_parts`, `num_tokens`,
      `num_policy` and `versions`.
    sums: what metrics add up, by name; see `rollout/figures.py`.
  """

  task_id: str
  reward: float | None
  reward_parts: dict[str, float]
  num_tokens: int
  num_policy: int
  versions: list[tuple[int, int]]
  sums: dict[str, float]

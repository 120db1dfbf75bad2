"""What a step of RL rolled out, in numbers: the metrics of its trajectories."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import numpy as np

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import CallStatus, Status, Trajectory
from coa_jax.rewards import shaping
from coa_jax.rollout.types import RolloutBatch

# A tool call, think or plan that is written twice.
_TWICE = shaping.RepetitionConfig(weight=1.0)


def describe(rollouts: RolloutBatch) -> dict[str, float]:
  """Returns the metrics of one step's rollouts, kept or not."""
  played = rollouts.played
  failed = [t.status == Status.INFRASTRUCTURE for t in played]
  truncated = [t.status == Status.TRUNCATED for t in played]
  repeated = [shaping.repetition(_TWICE, t) < 0 for t in played]
  figures = {
    "reward": mean_graded(t.reward for t in played),
    "reward_variance_share": rollouts.num_varied / rollouts.num_groups,
    "generated_tokens": sum(t.usage.generated for t in played),
    "tokens_per_trajectory": np.mean([t.usage.total for t in played]),
    "calls_per_trajectory": np.mean([len(t.calls) for t in played]),
    "infrastructure": sum(failed),
    "infrastructure_share": np.mean(failed),
    "truncated": sum(truncated),
    "truncated_share": np.mean(truncated),
    "repeated_share": np.mean(repeated),
    **_entropies(played),
    **_failures(played),
    **rollouts.figures,
  }
  parts = {"answer", "format"}
  for t in played:
    parts.update(t.reward_parts)
  for part in sorted(parts):
    figures[part] = mean_graded(t.reward_parts.get(part) for t in played)
  return {name: float(value) for name, value in figures.items()}


def mean_graded(values: Iterable[float | None]) -> float:
  """Returns the mean of what was graded: a failure of infrastructure is no 0."""
  graded = [value for value in values if value is not None]
  return float(np.mean(graded)) if graded else float("nan")


def _entropies(played: Sequence[Trajectory]) -> dict[str, float]:
  """`entropy_ROLE`: nats per token, estimated by -log p of what was sampled.

  Collapse shows in one role first, and the mean over all tokens hides it.
  """
  logps = collections.defaultdict(list)
  for trajectory in played:
    for segment in trajectory.segments:
      role = segment.role or "text"
      if segment.role in roles.TOOLS:
        role = "tool"
      logps[role] += segment.logps
  return {f"entropy_{role}": -np.mean(x) for role, x in logps.items() if x}


def _failures(played: Sequence[Trajectory]) -> dict[str, float]:
  """`failed_calls_OWNER`: the share of all tool calls that failed by its fault."""
  calls = collections.Counter(call.status for t in played for call in t.calls)
  if not calls:
    return {}
  return {
    f"failed_calls_{status}": calls[status] / calls.total()
    for status in CallStatus
    if status != CallStatus.OK
  }

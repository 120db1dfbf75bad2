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
  count = len(played)

  # --- Sums over the trajectories.
  generated = total = calls = infrastructure = truncated = repeated = 0
  for t in played:
    generated += t.usage.generated
    total += t.usage.total
    calls += len(t.calls)
    infrastructure += t.status == Status.INFRASTRUCTURE
    truncated += t.status == Status.TRUNCATED
    repeated += shaping.repetition(_TWICE, t) < 0

  figures = {
    "reward": mean_graded(t.reward for t in played),
    "reward_variance_share": rollouts.num_varied / rollouts.num_groups,
    "generated_tokens": generated,
    "tokens_per_trajectory": total / count,
    "calls_per_trajectory": calls / count,
    "infrastructure": infrastructure,
    "infrastructure_share": infrastructure / count,
    "truncated": truncated,
    "truncated_share": truncated / count,
    "repeated_share": repeated / count,
    **_entropies(played),
    **_failures(played),
    **rollouts.figures,
  }

  # --- The parts of the reward; these two are there where nothing was graded, too.
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
      # One curve for all tools: of each alone there are few tokens in a step.
      if segment.role in roles.TOOLS:
        role = "tool"
      logps[role] += segment.logps
  return {f"entropy_{role}": -np.mean(x) for role, x in logps.items() if x}


def _failures(played: Sequence[Trajectory]) -> dict[str, float]:
  """`failed_calls_OWNER`: the share of all tool calls that failed by its fault."""
  calls: collections.Counter[CallStatus] = collections.Counter()
  for t in played:
    calls.update(call.status for call in t.calls)
  if not calls:
    return {}
  shares = {f"failed_calls_{s}": calls[s] / calls.total() for s in CallStatus}
  del shares[f"failed_calls_{CallStatus.OK}"]  # no failure
  return shares

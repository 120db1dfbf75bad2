"""Metrics of an RL step's trajectories.

Each metric is a sum over trajectories, or a ratio of two sums.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

import numpy as np

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import CallStatus, Status, Trajectory
from coa_jax.rewards import shaping
from coa_jax.rollout.types import RolloutBatch

# Detects a tool call, think or plan written twice.
_TWICE = shaping.RepetitionConfig(weight=1.0)
# Prefixes of sums' names; the role follows, or the failed calls' status.
_LOGP = "logp_"
_SAMPLED = "sampled_"
_FAILED = "failed_calls_"


def _sums_of(t: Trajectory) -> dict[str, float]:
  """Returns a trajectory's terms in the metrics' sums, by name."""
  sums = {
    "generated": t.usage.generated,
    "total": t.usage.total,
    "calls": len(t.calls),
    "turns": t.usage.tool_turns,
    "contexts": t.usage.model_calls,
    Status.INFRASTRUCTURE: int(t.status == Status.INFRASTRUCTURE),
    Status.TRUNCATED: int(t.status == Status.TRUNCATED),
    "repeated": int(shaping.repetition(_TWICE, t) < 0),
  }
  for status, count in collections.Counter(call.status for call in t.calls).items():
    sums[_FAILED + status] = count

  # --- Log-probs by role.
  logps = collections.defaultdict(list)
  for segment in t.segments:
    role = segment.role or "text"
    # One curve for all tools: each tool alone has few tokens in a step.
    if segment.role in roles.TOOLS:
      role = "tool"
    logps[role] += segment.logps
  for role, values in logps.items():
    if values:
      sums[_LOGP + role] = math.fsum(values)
      sums[_SAMPLED + role] = len(values)
  return sums


def describe(rollouts: RolloutBatch) -> dict[str, float]:
  """Returns the metrics of a step's rollouts, kept or not."""
  played = rollouts.played
  count = len(played)

  # --- Sums over the trajectories, in their order, whichever process played them.
  sums: collections.Counter[str] = collections.Counter()
  for t in played:
    sums.update(_sums_of(t))
  figures = {
    "reward": mean_graded(t.reward for t in played),
    "reward_variance_share": rollouts.num_varied / rollouts.num_groups,
    "generated_tokens": sums["generated"],
    "tokens_per_trajectory": sums["total"] / count,
    "calls_per_trajectory": sums["calls"] / count,
    "infrastructure": sums[Status.INFRASTRUCTURE],
    "infrastructure_share": sums[Status.INFRASTRUCTURE] / count,
    "truncated": sums[Status.TRUNCATED],
    "truncated_share": sums[Status.TRUNCATED] / count,
    "repeated_share": sums["repeated"] / count,
    **_turns(sums["turns"] / count, sums["calls"] / count),
    **_contexts(sums["contexts"] / count),
    **_entropies(sums),
    **_failures(sums),
    **rollouts.figures,
  }

  # --- The reward's parts; these two exist even if nothing was graded.
  parts = {"answer", "format"}
  for t in played:
    parts.update(t.reward_parts)
  for part in sorted(parts):
    figures[part] = mean_graded(t.reward_parts.get(part) for t in played)
  return {name: float(value) for name, value in figures.items()}


def mean_graded(values: Iterable[float | None]) -> float:
  """Averages graded values, NaN if none: an infrastructure failure is not a 0."""
  graded = [value for value in values if value is not None]
  return float(np.mean(graded)) if graded else float("nan")


def _turns(turns: float, calls: float) -> dict[str, float]:
  """Returns the metric only if calls were made at the same time."""
  return {"call_turns_per_trajectory": turns} if turns < calls else {}


def _contexts(mean: float) -> dict[str, float]:
  """Returns the metric only if a trajectory had several contexts."""
  return {"contexts_per_trajectory": mean} if mean > 1 else {}


def _entropies(sums: dict[str, float]) -> dict[str, float]:
  """Returns `entropy_ROLE` in nats per token, estimated by sampled tokens' -log p.

  Entropy collapse shows in one role first, and the mean over all tokens hides it.
  """
  out = {}
  for name, logp in sums.items():
    if name.startswith(_LOGP):
      role = name.removeprefix(_LOGP)
      out[f"entropy_{role}"] = -logp / sums[_SAMPLED + role]
  return out


def _failures(sums: dict[str, float]) -> dict[str, float]:
  """Returns `failed_calls_OWNER`: the share of tool calls that OWNER made fail."""
  if not sums["calls"]:
    return {}
  out = {}
  for status in CallStatus:
    if status != CallStatus.OK:  # no failure
      out[_FAILED + status] = sums[_FAILED + status] / sums["calls"]
  return out

"""What a step of RL rolled out, in numbers: the metrics of its trajectories.

Each is a sum over trajectories, or of two the ratio: so a process needs no more of
those that another one played than their `Outcome`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from coa_jax.processes import gather_json
from coa_jax.protocol import roles
from coa_jax.protocol.outcome import Outcome
from coa_jax.protocol.trajectory import CallStatus, Status, Trajectory
from coa_jax.rewards import shaping
from coa_jax.rollout.types import RolloutBatch

# A tool call, think or plan that is written twice.
_TWICE = shaping.RepetitionConfig(weight=1.0)
# Sums over the tokens of a role, before its name.
_LOGP = "logp_"
_SAMPLED = "sampled_"
_FAILED = "failed_calls_"


def outcome_of(played: Trajectory | Outcome) -> Outcome:
  """Returns what every process knows of a trajectory."""
  if isinstance(played, Outcome):
    return played
  t = played
  sums = {
    "generated": t.usage.generated,
    "total": t.usage.total,
    "calls": len(t.calls),
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
    # One curve for all tools: of each alone there are few tokens in a step.
    if segment.role in roles.TOOLS:
      role = "tool"
    logps[role] += segment.logps
  for role, values in logps.items():
    if values:
      sums[_LOGP + role] = math.fsum(values)
      sums[_SAMPLED + role] = len(values)
  return Outcome(
    task_id=t.task_id,
    reward=t.reward,
    reward_parts=t.reward_parts,
    num_tokens=t.num_tokens,
    num_policy=t.num_policy,
    versions=t.versions,
    sums=sums,
  )


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
    rows.append((number, dataclasses.asdict(outcome_of(t))))
  out: list[tuple[int, Trajectory | Outcome]] = []
  for process, part in enumerate(gather_json(rows)):
    if process == jax.process_index():
      out += own
    else:
      out += [(number, Outcome(**row)) for number, row in part]
  return out


def describe(rollouts: RolloutBatch) -> dict[str, float]:
  """Returns the metrics of one step's rollouts, kept or not."""
  played = [outcome_of(t) for t in rollouts.played]
  count = len(played)

  # --- Sums over the trajectories; in their order, whoever played them.
  sums: collections.Counter[str] = collections.Counter()
  for outcome in played:
    sums.update(outcome.sums)
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
    **_entropies(sums),
    **_failures(sums),
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


def _entropies(sums: dict[str, float]) -> dict[str, float]:
  """`entropy_ROLE`: nats per token, estimated by -log p of what was sampled.

  Collapse shows in one role first, and the mean over all tokens hides it.
  """
  out = {}
  for name, logp in sums.items():
    if name.startswith(_LOGP):
      role = name.removeprefix(_LOGP)
      out[f"entropy_{role}"] = -logp / sums[_SAMPLED + role]
  return out


def _failures(sums: dict[str, float]) -> dict[str, float]:
  """`failed_calls_OWNER`: the share of all tool calls that failed by its fault."""
  if not sums["calls"]:
    return {}
  out = {}
  for status in CallStatus:
    if status != CallStatus.OK:  # no failure
      out[_FAILED + status] = sums[_FAILED + status] / sums["calls"]
  return out

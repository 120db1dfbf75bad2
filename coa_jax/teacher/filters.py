"""The four progressive filters of multi-agent distillation, and the funnel they leave.

Source: arXiv 2508.13167, section on supervised fine-tuning data: complexity, quality,
reflection, error correction, in that order. The paper gives neither ratios nor
definitions for counting; those used here are stated field by field.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.parser import Span, parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.tasks.task import Task

Judge = Callable[[Task, str | None], float]


@dataclasses.dataclass(frozen=True)
class FiltersConfig:
  """Config section `filters`.

  Attributes:
    min_activations: complexity: the fewest agent activations; one for every span that
      an agent wrote (think, plan, call, reflection, candidate, check), observations and
      the final answer not among them.
    min_calls: complexity: the fewest tool calls.
    min_reward: quality: the judge's reward below which an answer is wrong.
    max_repeats: quality: how many calls may repeat an earlier one of the same tool with
      the same input (white space aside).
    keep_unreflected: reflection: the share kept of trajectories without a reflection.
    corrected_copies: error correction: how often a trajectory is written that went
      wrong, noticed (a first double_check below the pass score, or a reflection graded
      poor) and ended right.
    seed: of the down-sampling.
  """

  min_activations: int = 5
  min_calls: int = 0
  min_reward: float = 1.0
  max_repeats: int = 0
  keep_unreflected: float = 0.5
  corrected_copies: int = 2
  seed: int = 0

  def __post_init__(self):
    if not 0 <= self.keep_unreflected <= 1:
      raise ValueError("keep_unreflected is a share, from 0 to 1")
    if self.corrected_copies < 1:
      raise ValueError("corrected_copies must be at least 1")


def filter_trajectories(
  pairs: Iterable[tuple[Task, Trajectory]],
  variant: Variant,
  judge: Judge,
  config: FiltersConfig,
) -> tuple[list[Trajectory], dict[str, Any]]:
  """Applies the four filters in order.

  Args:
    pairs: each trajectory with its task.
    variant: the dialect that trajectories must obey.
    judge: (task, prediction) -> reward; its verdict is written to the trajectory.
    config: thresholds and ratios.

  Returns:
    The trajectories kept, in input order, copies side by side (`meta["copy"]` numbers
    them); and the funnel: per stage "kept" and "dropped" by reason, such that each
    stage's kept + dropped is what the stage before kept.
  """
  stages = {
    "complexity": Counter(),
    "quality": Counter(),
    "reflection": Counter(),
  }
  kept: list[Trajectory] = []
  funnel: dict[str, Any] = {"in": 0}
  passed = Counter()
  corrected = 0
  for task, trajectory in pairs:
    funnel["in"] += 1
    verdict = parse(trajectory.text, variant)
    spans = verdict.spans
    checks = (
      ("complexity", lambda t=trajectory: _simple(t, config)),
      (
        "quality",
        lambda v=verdict, k=task, t=trajectory: _poor(v, k, t, judge, config),
      ),
      ("reflection", lambda s=spans, t=trajectory: _unreflected(s, t, config)),
    )
    for stage, check in checks:
      reason = check()
      if reason:
        stages[stage][reason] += 1
        break
      passed[stage] += 1
    else:
      copies = config.corrected_copies if was_corrected(spans) else 1
      corrected += was_corrected(spans)
      kept += [_copy(trajectory, i) for i in range(copies)]
  for stage, dropped in stages.items():
    funnel[stage] = {"kept": passed[stage], "dropped": dict(sorted(dropped.items()))}
  added = len(kept) - passed["reflection"]
  funnel["error_correction"] = {
    "corrected": corrected,
    "added": added,
    "kept": len(kept),
  }
  return kept, funnel


def _copy(trajectory: Trajectory, number: int) -> Trajectory:
  if number == 0:
    return trajectory
  return dataclasses.replace(trajectory, meta={**trajectory.meta, "copy": number})


def _simple(trajectory: Trajectory, config: FiltersConfig) -> str | None:
  written = [s.role for s in trajectory.segments if s.author == Author.POLICY]
  if sum(role != roles.ANSWER for role in written) < config.min_activations:
    return "few_activations"
  if len(trajectory.calls) < config.min_calls:
    return "few_calls"
  return None


def _poor(
  verdict: Any, task: Task, trajectory: Trajectory, judge: Judge, config: FiltersConfig
) -> str | None:
  if not verdict.ok:
    return f"protocol_{verdict.verdict.value}"
  inputs = Counter((c.name, " ".join(c.arguments.split())) for c in trajectory.calls)
  if sum(inputs.values()) - len(inputs) > config.max_repeats:
    return "redundant_calls"
  reward = judge(task, verdict.answer)
  trajectory.reward = reward
  trajectory.reward_parts = {"answer": reward}
  return "wrong_answer" if reward < config.min_reward else None


def _unreflected(
  spans: Iterable[Span], trajectory: Trajectory, config: FiltersConfig
) -> str | None:
  if any(s.role == roles.REFLECTION for s in spans):
    return None
  # Keyed by the trajectory, so that others in the set change nothing.
  key = f"{config.seed}/{trajectory.task_id}/{trajectory.sample}"
  kept = random.Random(key).random() < config.keep_unreflected
  return None if kept else "no_reflection"


def was_corrected(spans: Iterable[Span]) -> bool:
  """Whether a well-formed trajectory noticed a mistake of its own on the way.

  That is: its first double_check is below the pass score, or some reflection grades a
  criterion poor.
  """
  scores = [roles.check_score(s.content) for s in spans if s.role == roles.DOUBLE_CHECK]
  if scores and scores[0] is not None and scores[0] < roles.PASS_SCORE:
    return True
  reviews = (s.content for s in spans if s.role == roles.REFLECTION)
  return any("poor" in roles.reflection_grades(r).values() for r in reviews)

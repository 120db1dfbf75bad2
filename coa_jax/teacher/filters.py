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
from coa_jax.protocol.parser import Parse, Span, parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.tasks.task import Task

Judge = Callable[[Task, str | None], float]
STAGES = ("complexity", "quality", "reflection")  # that drop; then error correction


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
  dropped: dict[str, Counter[str]] = {stage: Counter() for stage in STAGES}
  kept: list[Trajectory] = []
  count = corrected = added = 0
  for task, trajectory in pairs:
    count += 1
    verdict = parse(trajectory.text, variant)
    fault = _fault(task, trajectory, verdict, judge, config)
    if fault is not None:
      stage, reason = fault
      dropped[stage][reason] += 1
      continue
    copies = 1
    if was_corrected(verdict.spans):
      copies = config.corrected_copies
      corrected += 1
    added += copies - 1
    kept += [_copy(trajectory, i) for i in range(copies)]
  funnel: dict[str, Any] = {"in": count}
  for stage in STAGES:
    count -= dropped[stage].total()
    funnel[stage] = {"kept": count, "dropped": dict(sorted(dropped[stage].items()))}
  last = {"corrected": corrected, "added": added, "kept": len(kept)}
  return kept, {**funnel, "error_correction": last}


def _fault(
  task: Task, trajectory: Trajectory, verdict: Parse, judge: Judge, c: FiltersConfig
) -> tuple[str, str] | None:
  """The stage that drops a trajectory, and its reason; None if all let it pass."""
  written = [s.role for s in trajectory.segments if s.author == Author.POLICY]
  if sum(role != roles.ANSWER for role in written) < c.min_activations:
    return "complexity", "few_activations"
  if len(trajectory.calls) < c.min_calls:
    return "complexity", "few_calls"
  if not verdict.ok:
    return "quality", f"protocol_{verdict.verdict.value}"
  inputs = {(call.name, " ".join(call.arguments.split())) for call in trajectory.calls}
  if len(trajectory.calls) - len(inputs) > c.max_repeats:
    return "quality", "redundant_calls"
  trajectory.reward = judge(task, verdict.answer)
  trajectory.reward_parts = {"answer": trajectory.reward}
  if trajectory.reward < c.min_reward:
    return "quality", "wrong_answer"
  if not any(s.role == roles.REFLECTION for s in verdict.spans):
    # Keyed by the trajectory, so that others in the set change nothing.
    key = f"{c.seed}/{trajectory.task_id}/{trajectory.sample}"
    if random.Random(key).random() >= c.keep_unreflected:
      return "reflection", "no_reflection"
  return None


def _copy(trajectory: Trajectory, number: int) -> Trajectory:
  if number == 0:
    return trajectory
  return dataclasses.replace(trajectory, meta={**trajectory.meta, "copy": number})


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

"""Multi-agent distillation's progressive filters, and their funnel of counts.

Source: arXiv 2508.13167, section on supervised fine-tuning data: complexity, quality,
reflection, error correction, in this order. The paper gives neither ratios nor
definitions for counting; `FiltersConfig` states those used here. Two stages are added:
contamination by evaluation sets (after quality) and duplicates (after reflection).

`examine` looks at a single trajectory, so any number of processes may share the work;
`Funnel` takes the results in input order and decides.

budget: the stages, their config and their funnel are one list.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.novelty import (
  Benchmarks,
  Duplicates,
  policy_text,
  signature,
  visits,
)
from coa_jax.protocol import roles
from coa_jax.protocol.parser import Parse, Span, parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.runtime.fields import bounded, check_fields

# Returns an answer's reward, or None if it cannot be judged: then nothing is dropped.
# Called for trajectories without a verdict.
GradeAnswer = Callable[[Task, str | None], float | None]
_SEED = 0  # for the down-sampling
# The dropping stages. Error correction follows and copies some trajectories.
STAGES = ("complexity", "quality", "contamination", "reflection", "duplicates")


@dataclasses.dataclass(frozen=True)
class FiltersConfig:
  """Config section `filters`.

  Attributes:
    min_activations: complexity: the fewest agent activations: one for every agent span
      (think, plan, call, reflection, candidate, check), none for observations and the
      final answer.
    min_calls: complexity: the fewest tool calls.
    min_reward: quality: a right answer's minimum reward.
    max_repeats: quality: the maximum number of repeated calls (same tool and input,
      ignoring white space).
    benchmarks: contamination: evaluation sets (task files or URIs); no trajectory may
      contain their questions.
    overlap_words: contamination: n, in words: no trajectory may share an n-gram with a
      benchmark question. A shorter question is compared as a whole, and only with the
      trajectory's question. In a script without spaces, two letters count as a word.
    blocked: contamination: domains (`host` or `host/path`) forbidden in calls.
    keep_unreflected: reflection: the kept share of trajectories without a reflection.
    max_similarity: duplicates: the Jaccard similarity between word 5-grams (question
      and policy text) above which only the first trajectory is kept; 1 keeps all.
    corrected_copies: error correction: how often to write a trajectory that made a
      mistake, noticed it (a first double_check below the pass score, or a reflection
      graded poor) and ended right.
  """

  min_activations: int = 5
  min_calls: int = 0
  min_reward: float = 1.0
  max_repeats: int = 0
  benchmarks: tuple[str, ...] = ()
  overlap_words: int = bounded(8, least=1)
  blocked: tuple[str, ...] = ()
  keep_unreflected: float = bounded(0.5, least=0, most=1)
  max_similarity: float = bounded(1.0, least=0, most=1)
  corrected_copies: int = bounded(2, least=1)

  def __post_init__(self):
    check_fields(self)


# Instruction violations as (rule, quote) pairs; None if unknown: no reply was readable,
# or the trajectory was too long for the judge. See `violations`.
Inspection = tuple[tuple[int, str], ...] | None
Inspect = Callable[[Sequence[Trajectory]], Iterable[Inspection]]  # one for each


def load_benchmarks(config: FiltersConfig) -> Benchmarks:
  """Reads the questions in `config.benchmarks`.

  Raises:
    FileNotFoundError, ValueError: as `tasks.sources.load_tasks`.
  """
  questions: list[str] = []
  for uri in config.benchmarks:
    questions += [task.question for task in load_tasks(uri)]
  return Benchmarks(questions, config.overlap_words)


@dataclasses.dataclass
class FilterResult:
  """The filters' verdict on one trajectory.

  Attributes:
    fault: the dropping stage and the reason; None if the trajectory passed all stages.
    reflected: whether the trajectory has a reflection.
    corrected: whether it noticed its own mistake (see `was_corrected`) and ended right.
    graded: whether the answer was judged.
    signature: the text's signature, if duplicates are searched for.
  """

  fault: Sequence[str] | None = None
  reflected: bool = False
  corrected: bool = False
  graded: bool = True
  signature: np.ndarray | None = None


def examine(
  task: Task,
  trajectory: Trajectory,
  variant: Variant,
  grade: GradeAnswer,
  config: FiltersConfig,
  benchmarks: Benchmarks,
) -> FilterResult:
  """Examines one trajectory up to its first fault.

  Without a recorded reward, the one from `grade` is written to the trajectory.
  """
  # --- The stages in the order of STAGES, up to the first fault.
  verdict = parse(trajectory.text, variant)
  fault = (
    _complexity(trajectory, config)
    or _quality(task, trajectory, verdict, grade, config)
    or _contamination(task, trajectory, config, benchmarks)
    or _reflection(trajectory, verdict, config)
  )
  if fault is not None:
    return FilterResult(fault)

  # --- The inputs for `Funnel`.
  result = FilterResult(graded=trajectory.reward is not None)
  result.reflected = _has_reflection(verdict)
  # A noticed mistake earns copies only if the final answer is right.
  result.corrected = bool(_recorded_reward(trajectory)) and was_corrected(verdict.spans)
  if config.max_similarity < 1:
    result.signature = signature(policy_text(trajectory))
  return result


class Funnel:
  """Decides how often each trajectory is written, and counts the decisions."""

  def __init__(self, config: FiltersConfig):
    self._config = config
    self._duplicates = Duplicates(config.max_similarity)
    self._dropped: dict[str, Counter[str]] = {stage: Counter() for stage in STAGES}
    self._count: Counter[str] = Counter()

  def admit(self, result: FilterResult) -> int:
    """Returns the number of copies to write; 0 drops the trajectory."""
    self._count["in"] += 1
    # Only passed texts are remembered: a dropped trajectory drops no other.
    fault = result.fault
    has_passed = fault is None and result.signature is not None
    if has_passed and not self._duplicates.is_new(result.signature):
      fault = ("duplicates", "near_duplicate")
    if fault is not None:
      stage, reason = fault
      self._dropped[stage][reason] += 1
      return 0
    copies = 1
    if result.corrected:
      copies = self._config.corrected_copies
    self._count["ungraded"] += not result.graded
    self._count["reflected"] += result.reflected
    self._count["corrected"] += result.corrected
    self._count["added"] += copies - 1
    return copies

  def report(self) -> dict[str, Any]:
    """Reports each stage's kept count, and its dropped counts by reason.

    A stage's kept and dropped counts add up to the previous stage's kept count. Among
    the trajectories kept last, "ungraded" were not judged, "reflected" have a
    reflection and "corrected" earned copies; "added" counts the extra copies.
    """
    left = self._count["in"]
    out: dict[str, Any] = {"in": left}
    for stage in STAGES:
      dropped = self._dropped[stage]
      left -= dropped.total()
      out[stage] = {"kept": left, "dropped": dict(sorted(dropped.items()))}
    last = {}
    for name in ("ungraded", "reflected", "corrected", "added"):
      last[name] = self._count[name]
    last["kept"] = left + last["added"]
    out["error_correction"] = last
    return out


def stages(report: Mapping[str, Any]) -> dict[str, tuple[int, dict[str, int]]]:
  """Converts a funnel's report to stages for `plots.funnel_bars`."""
  out = {name: (report[name]["kept"], report[name]["dropped"]) for name in STAGES}
  return {**out, "with copies": (report["error_correction"]["kept"], {})}


def filter_trajectories(
  pairs: Iterable[tuple[Task, Trajectory]],
  variant: Variant,
  grade: GradeAnswer,
  config: FiltersConfig,
  inspect: Inspect | None = None,
) -> tuple[list[Trajectory], dict[str, Any]]:
  """Applies the filters in order.

  `inspect` checks for instruction violations, a part of quality. It costs money, so it
  gets only the trajectories passed by `examine`.

  Returns:
    The kept trajectories in input order, copies side by side (`meta["copy"]` numbers
    them), and the funnel's report; see `Funnel.report`.
  """
  benchmarks = load_benchmarks(config)
  funnel = Funnel(config)
  # --- Each trajectory alone.
  results = []
  for task, trajectory in pairs:
    result = examine(task, trajectory, variant, grade, config, benchmarks)
    results.append((trajectory, result))

  # --- The judge's part of quality. `strict`: it owes a verdict on every trajectory.
  if inspect is not None:
    passed = [(t, result) for t, result in results if result.fault is None]
    verdicts = inspect([t for t, _ in passed])
    for (trajectory, result), verdict in zip(passed, verdicts, strict=True):
      if verdict is None:
        trajectory.meta["uninspected"] = True
      elif verdict:
        result.fault = ("quality", "instruction_violation")

  # --- All trajectories together, in order.
  out: list[Trajectory] = []
  for trajectory, result in results:
    copies = funnel.admit(result)
    if copies:
      out.append(trajectory)
    for number in range(1, copies):
      meta = {**trajectory.meta, "copy": number}
      out.append(dataclasses.replace(trajectory, meta=meta))
  return out, funnel.report()


def _complexity(trajectory: Trajectory, c: FiltersConfig) -> tuple[str, str] | None:
  activations = 0
  for segment in trajectory.segments:
    if segment.author == Author.POLICY and segment.role != roles.ANSWER:
      activations += 1
  if activations < c.min_activations:
    return "complexity", "few_activations"
  if len(trajectory.calls) < c.min_calls:
    return "complexity", "few_calls"
  return None


def _quality(
  task: Task,
  trajectory: Trajectory,
  verdict: Parse,
  grade: GradeAnswer,
  c: FiltersConfig,
) -> tuple[str, str] | None:
  # --- The dialect, and repeated calls.
  if not verdict.ok:
    return "quality", f"protocol_{verdict.verdict.value}"
  inputs = {(call.name, " ".join(call.arguments.split())) for call in trajectory.calls}
  if len(trajectory.calls) - len(inputs) > c.max_repeats:
    return "quality", "redundant_calls"

  # --- The answer. A recorded reward comes first: it may have cost a judge's call.
  reward = _recorded_reward(trajectory)
  if reward is None:
    reward = grade(task, verdict.answer)
    if reward is None:
      return None
    trajectory.reward = reward
    trajectory.reward_parts = {"answer": reward}
  if reward < c.min_reward:
    return "quality", "wrong_answer"
  return None


def _recorded_reward(trajectory: Trajectory) -> float | None:
  """Returns the answer's recorded reward; None if it is missing or not a number."""
  parts = trajectory.reward_parts
  if not isinstance(parts, dict):  # a foreign row may have any type here
    return None
  reward = parts.get("answer")
  return float(reward) if isinstance(reward, int | float) else None


def _contamination(
  task: Task, trajectory: Trajectory, c: FiltersConfig, benchmarks: Benchmarks
) -> tuple[str, str] | None:
  if visits(trajectory, c.blocked):
    return "contamination", "blocked_domain"
  if c.benchmarks and benchmarks.hold(task.question, trajectory):
    return "contamination", "benchmark"
  return None


def _has_reflection(verdict: Parse) -> bool:
  return any(span.role == roles.REFLECTION for span in verdict.spans)


def _reflection(
  trajectory: Trajectory, verdict: Parse, c: FiltersConfig
) -> tuple[str, str] | None:
  if not _has_reflection(verdict):
    # Seeded by the trajectory, so that others in the set change nothing.
    key = f"{_SEED}/{trajectory.task_id}/{trajectory.sample}"
    if random.Random(key).random() >= c.keep_unreflected:
      return "reflection", "no_reflection"
  return None


def was_corrected(spans: Iterable[Span]) -> bool:
  """Whether a well-formed trajectory noticed its own mistake.

  That is: its first double_check is below the pass score, or some reflection grades a
  criterion poor.
  """
  is_first_check = True
  for span in spans:
    if span.role == roles.REFLECTION and roles.has_poor_grade(span.content):
      return True
    if span.role == roles.DOUBLE_CHECK and is_first_check:
      is_first_check = False
      score = roles.check_score(span.content)
      if score is not None and score < roles.PASS_SCORE:
        return True
  return False

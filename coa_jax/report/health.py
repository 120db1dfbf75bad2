"""Early warning from a run's metrics before its reward falls; automatic stop.

Failures of agentic RL show first in the entropy of one role, in groups with equal
rewards, in lengths, in repetition, or in log-probs that differ between sampler and
learner.

budget: all stops by a run's metrics, in one place.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from coa_jax.fields import bounded, check_fields
from coa_jax.report.metrics import read_metrics

# One NaN here makes every later value wrong. All are from the learner except roles'
# entropies, which a step without an update has too.
FINITE = (
  "loss",
  "grad_norm",
  "entropy",
  "entropy_",
  "logp_diff",
  "ratio",
  "kl",
  "value_loss",
)
_LOWER_LR = "lower optim.lr"
_DIVERGED = (
  f"an update diverged; {_LOWER_LR}, set optim.clip_norm, or compute in float32 "
  "(model.dtype); begin a run from an earlier checkpoint (experiments/export.py)"
)
_EXPLORE = f"raise algo.loss.clip_high, {_LOWER_LR}, add algo.loss.kl_coef"


class CollapsedError(ValueError):
  """A run was ended because its metrics show that further training is useless."""


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """Config section `watch`: which numbers are worth a warning, or the run's end.

  A metric is reported after `patience` steps in a row beyond its limit, and again only
  after it has been within. A limit of 0 is not watched. A NaN or infinite learner
  metric always ends the run, immediately and without saving, so that the previous
  checkpoint stays.

  Attributes:
    stop: whether a report ends the run, after a checkpoint. The same command then ends
      at the same step; with other limits, or with False, it continues.
    patience: steps.
    reward_variance_share: minimum share of groups neither all right nor all wrong
      (ignoring penalties).
    entropy: minimum entropy of a sampled token, nats.
    entropy_drop: minimum entropy of any role, as a share of its value in the first
      `patience` steps watched.
    length_growth: maximum of tokens in a trajectory, as a multiple of the same steps'
      value.
    truncated: maximum share of trajectories cut off at the token limit.
    repeated: maximum share of trajectories with a repeated call, think or plan.
    calls_drop: minimum of tool calls in a trajectory, as a share of the same steps'
      value.
    logp_diff_share: maximum share of tokens with a log-prob difference between sampler
      and learner above `algo.guards.max_logp_diff`; not watched with
      `algo.sampling.staleness`, because older policies sample the tokens.
    ratio_outlier_share: maximum share of tokens with a probability ratio of learner to
      sampler above e or below 1/e; not watched with `algo.sampling.staleness`.
    removed_mass: maximum probability removed from a token by the grammar.
    infrastructure: maximum share of trajectories lost to unavailable tools or judges.
  """

  stop: bool = False
  patience: int = bounded(5, least=1)
  reward_variance_share: float = bounded(0.02, least=0, was="informative")
  entropy: float = bounded(0.001, least=0)
  entropy_drop: float = bounded(0.02, least=0)
  length_growth: float = bounded(2.5, least=0)
  truncated: float = bounded(0.5, least=0)
  repeated: float = bounded(0.7, least=0)
  calls_drop: float = bounded(0.2, least=0)
  logp_diff_share: float = bounded(0.05, least=0, was="gap")
  ratio_outlier_share: float = bounded(0.01, least=0, was="ratio_tail")
  removed_mass: float = bounded(0.2, least=0)
  infrastructure: float = bounded(0.25, least=0)

  def __post_init__(self):
    check_fields(self)

  @property
  def limits(self) -> dict[str, float]:
    """Returns the limits by field."""
    return {
      "reward_variance_share": self.reward_variance_share,
      "entropy": self.entropy,
      "entropy_drop": self.entropy_drop,
      "length_growth": self.length_growth,
      "truncated": self.truncated,
      "repeated": self.repeated,
      "calls_drop": self.calls_drop,
      "logp_diff_share": self.logp_diff_share,
      "ratio_outlier_share": self.ratio_outlier_share,
      "removed_mass": self.removed_mass,
      "infrastructure": self.infrastructure,
    }


@dataclasses.dataclass(frozen=True)
class Rule:
  """The metric and the direction of a field of `WatchConfig`.

  Attributes:
    metric: its name; a name ending in `_` is a prefix.
    above: whether the limit is a maximum; otherwise a minimum.
    remedy: the usual remedy.
    relative: whether the limit is a multiple of the metric's first values.
    on_policy: whether it is meaningful only if sampler and learner are one policy.
  """

  metric: str
  above: bool
  remedy: str
  relative: bool = False
  on_policy: bool = False


RULES = {
  "reward_variance_share": Rule(
    "reward_variance_share",
    False,
    "tasks are all too easy or all too hard for it (see `reward`): choose others "
    "(experiments/select_tasks.py), raise algo.sampling.samples or .temperature",
  ),
  "entropy": Rule(
    "entropy",
    False,
    f"it hardly explores any more: {_EXPLORE}",
  ),
  "entropy_drop": Rule(
    "entropy_",
    False,
    f"this role has collapsed: {_EXPLORE}",
    relative=True,
  ),
  "length_growth": Rule(
    "tokens_per_trajectory",
    True,
    "lengths explode: reward.shaping.overlong, or algo.loss.advantage=dr_grpo",
    relative=True,
  ),
  "truncated": Rule(
    "truncated_share",
    True,
    "most rollouts end unfinished: raise rollout.max_len, or reward.shaping.overlong",
  ),
  "repeated": Rule(
    "repeated_share",
    True,
    f"it repeats itself: reward.shaping.repetition, rollout.same_calls, {_LOWER_LR}",
  ),
  "calls_drop": Rule(
    "calls_per_trajectory",
    False,
    "it no longer asks its tools: see whether their calls fail (`failed_calls_tool`, "
    f"`failed_calls_infrastructure`) or cost too much (reward.shaping), {_LOWER_LR}",
    relative=True,
  ),
  "logp_diff_share": Rule(
    "logp_diff_share",
    True,
    "sampler and learner disagree: compute more precisely (model.dtype), or correct "
    "with algo.loss.is_clip",
    on_policy=True,
  ),
  "ratio_outlier_share": Rule(
    "ratio_outlier_share",
    True,
    f"the policy has moved far from what sampled: fewer algo.batch.epochs, "
    f"{_LOWER_LR}, or algo.loss.is_clip",
    on_policy=True,
  ),
  "removed_mass": Rule(
    "removed_mass",
    True,
    "it lives by the grammar's mask and has not learnt the protocol: more SFT, or "
    "rollout.constrain=False with a reward for the format",
  ),
  "infrastructure": Rule(
    "infrastructure_share",
    True,
    "tools or judges are down: see the calls' errors in trajectories/",
  ),
}


class HealthMonitor:
  """Reads a stage's metrics step by step."""

  def __init__(self, config: WatchConfig):
    """Takes section `watch`."""
    self._config = config
    # Steps in a row beyond the limit, by field and metric.
    self._beyond: collections.Counter[tuple[str, str]] = collections.Counter()
    # The first values of metrics with relative limits.
    self._first: dict[str, list[float]] = collections.defaultdict(list)
    # Reported and not yet within its limit again, by field and metric.
    self._standing: dict[tuple[str, str], str] = {}

  def replay(self, workdir: str | os.PathLike[str], stage: str, step: int) -> None:
    """Reads the run's earlier metrics as if it had watched them, without warnings.

    Args:
      workdir: the continued run's folder.
      stage: the stage.
      step: the last step to read; 0 for a new run.

    Raises:
      CollapsedError: as from `raise_if_stopped`: the run was to end there.
    """
    # A new run has no file yet.
    rows = read_metrics(workdir, stage) if step else []
    for row in rows:
      if row["step"] <= step:
        # A value that was not finite is null in the file.
        self._judge_all({k: v for k, v in row.items() if v is not None})
    self.raise_if_stopped(step)

  def update(
    self, step: int, values: Mapping[str, float], say: Callable[[str], None]
  ) -> list[str]:
    """Judges a step's values; returns its faults and warns of them, a line each.

    Raises:
      CollapsedError: a value is not finite: immediately, so that it is not saved.
    """
    diverged = []
    for name, value in values.items():
      if not math.isfinite(value) and any(_matches(metric, name) for metric in FINITE):
        diverged.append(f"{name} is {value}: {_DIVERGED}")
    # Judged even if the run ends now: both lists help a reader of the log.
    faults = diverged + self._judge_all(values)
    for text in faults:
      say(f"warning: step {step}: {text}")
    if diverged:
      raise CollapsedError(
        f"stopped at step {step} (not saved; the checkpoint before it stands): "
        f"{'; '.join(diverged)}"
      )
    return faults

  @property
  def ends(self) -> bool:
    """Whether the run must end after the last step."""
    return bool(self._config.stop and self._standing)

  def raise_if_stopped(self, step: int) -> None:
    """Ends the run if it must end.

    Raises:
      CollapsedError: with step, metric, value, limit, and the usual remedy.
    """
    if self.ends:
      reasons = "; ".join(self._standing.values())
      raise CollapsedError(
        f"stopped at step {step} (saved) as watch.stop asks: {reasons}"
      )

  def _judge_all(self, values: Mapping[str, Any]) -> list[str]:
    """Returns a step's reports."""
    reports = []
    # Which metrics a step has differs from step to step: its values are asked, by name.
    for field, limit in self._config.limits.items():
      rule = RULES[field]
      # Off policy the tokens come from older policies: their difference is not a fault.
      if not limit or (rule.on_policy and "staleness" in values):
        continue
      for name, value in values.items():
        if _matches(rule.metric, name) and math.isfinite(value):
          reports += self._judge(field, rule, limit, name, value)
    return reports

  def _judge(
    self, field: str, rule: Rule, limit: float, name: str, value: float
  ) -> list[str]:
    """Counts one value of one metric; returns its report if due."""
    patience = self._config.patience
    limit_text = f"watch.{field}={limit:g}"
    # A relative limit is known once its baseline is: the first `patience` values.
    if rule.relative:
      first = self._first[name]
      if len(first) < patience:
        first.append(value)
        return []
      limit *= sum(first) / patience
      limit_text += f" times its first {sum(first) / patience:.4g}"
    if rule.above:
      beyond = value > limit
      where = "above"
    else:
      beyond = value < limit
      where = "below"

    # A field may limit several metrics, one a role: each has its own count.
    key = (field, name)
    if beyond:
      self._beyond[key] += 1
    else:
      self._beyond[key] = 0
    count = self._beyond[key]
    if count < patience:
      self._standing.pop(key, None)
      return []

    # --- The fault, its size, and the usual remedy.
    steps = "this step"
    if count > 1:
      steps = f"{count} steps in a row"
    text = f"{name} is {value:.4g}, {where} {limit_text}, {steps}; {rule.remedy}"
    # Kept, with its newest values, until a value is within the limit; reported only
    # once.
    self._standing[key] = text
    return [text] if count == patience else []


def _matches(metric: str, name: str) -> bool:
  if metric.endswith("_"):
    return name.startswith(metric)
  return name == metric

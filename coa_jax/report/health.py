"""Watches a run's metrics: warns before its reward falls, and can stop the run.

Agentic RL failures show first in one role's entropy, in groups with equal rewards, in
lengths, in repetition, or in log-prob differences between sampler and learner.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from coa_jax.report.metrics import read_metrics
from coa_jax.runtime.fields import bounded, check_fields, nearest

# A NaN in one of these makes every later value wrong. All are learner metrics except
# roles' entropies, which a step without an update has too.
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
  "(model.dtype); begin a run from an earlier checkpoint (coa export)"
)
_EXPLORE = f"raise algo.loss.clip_high, {_LOWER_LR}, add algo.loss.kl_coef"


class CollapsedError(ValueError):
  """A run was ended because its metrics show that further training is useless."""


@dataclasses.dataclass(frozen=True)
class Rule:
  """A metric's limit and the usual remedy.

  Attributes:
    limit: the default limit; 0 for none.
    above: whether the limit is a maximum; otherwise a minimum.
    remedy: the usual remedy.
    relative: whether the limit is a multiple of the metric's first values.
    on_policy: whether the limit holds only if sampler and learner are one policy.
  """

  limit: float
  above: bool
  remedy: str
  relative: bool = False
  on_policy: bool = False


# Metric -> rule; a name ending in `_` is a prefix.
RULES = {
  "reward_variance_share": Rule(
    0.02,
    False,
    "nearly all tasks are too easy or too hard (see `reward`): select others (coa "
    "tasks), raise algo.sampling.samples or .temperature",
  ),
  "entropy": Rule(
    0.001,
    False,
    f"too little exploration: {_EXPLORE}",
  ),
  "entropy_": Rule(
    0.02,
    False,
    f"collapse of this role: {_EXPLORE}",
    relative=True,
  ),
  "tokens_per_trajectory": Rule(
    2.5,
    True,
    "growing lengths: set reward.shaping.overlong, or algo.loss.advantage=dr_grpo",
    relative=True,
  ),
  "truncated_share": Rule(
    0.5,
    True,
    "many unfinished rollouts: raise rollout.max_len, or set reward.shaping.overlong",
  ),
  "repeated_share": Rule(
    0.7,
    True,
    f"repetition: set reward.shaping.repetition, {_LOWER_LR}",
  ),
  "calls_per_trajectory": Rule(
    0.2,
    False,
    "few tool calls: look for failed calls (`failed_calls_tool`, "
    f"`failed_calls_infrastructure`) and their cost (reward.shaping), {_LOWER_LR}",
    relative=True,
  ),
  "logp_diff_share": Rule(
    0.05,
    True,
    "sampler and learner differ: raise the precision (model.dtype), or correct with "
    "algo.loss.is_clip",
    on_policy=True,
  ),
  "ratio_outlier_share": Rule(
    0.01,
    True,
    "the policy is far from the sampler's: lower algo.batch.epochs, "
    f"{_LOWER_LR}, or set algo.loss.is_clip",
    on_policy=True,
  ),
  "removed_mass": Rule(
    0.2,
    True,
    "only the grammar's mask keeps the protocol: more SFT, or rollout.constrain=False "
    "with a reward for the format",
  ),
  "infrastructure_share": Rule(
    0.25,
    True,
    "unavailable tools or judges: see the calls' errors in trajectories/",
  ),
}
_LIMITS = {metric: rule.limit for metric, rule in RULES.items()}


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """Config section `watch`: limits of metrics, for warnings or an automatic stop.

  A metric is reported after `patience` steps in a row beyond its limit, and again only
  after a value within the limit. A NaN or infinite learner metric always ends the run,
  immediately and without saving, so that the previous checkpoint stays.

  Attributes:
    stop: whether a report ends the run, after a checkpoint. The same command then ends
      at the same step; with other limits, or with False, it continues.
    patience: steps in a row beyond a limit before a report.
    limits: metric -> limit. Metrics left out keep their defaults; 0 turns a limit off.
      Minimums: `reward_variance_share`, `entropy` (nats), `entropy_` (each role) and
      `calls_per_trajectory`; all others are maximums. `entropy_`,
      `calls_per_trajectory` and `tokens_per_trajectory` are multiples of the mean over
      the first `patience` watched steps. `logp_diff_share` and `ratio_outlier_share`
      are not watched with `algo.sampling.staleness`, because older policies sample the
      tokens.
  """

  stop: bool = False
  patience: int = bounded(5, least=1)
  limits: dict[str, float] = dataclasses.field(default_factory=lambda: dict(_LIMITS))

  def __post_init__(self):
    check_fields(self)
    for metric, limit in self.limits.items():
      if metric not in RULES:
        raise ValueError(f"limits has no metric {metric!r}{nearest(metric, RULES)}")
      if not 0 <= limit < math.inf:
        raise ValueError(f"limits.{metric} is {limit}; it must be at least 0")
    object.__setattr__(self, "limits", _LIMITS | self.limits)


class HealthMonitor:
  """Judges a stage's metrics by their limits, step by step."""

  def __init__(self, config: WatchConfig):
    """Takes section `watch`."""
    self._config = config
    # Steps in a row beyond the limit, by metric.
    self._beyond: collections.Counter[str] = collections.Counter()
    # The first values of metrics with relative limits.
    self._first: dict[str, list[float]] = collections.defaultdict(list)
    # Reports of metrics still beyond their limits.
    self._standing: dict[str, str] = {}

  def replay(self, workdir: str | os.PathLike[str], stage: str, step: int) -> None:
    """Judges a resumed run's metrics up to `step`, without warnings.

    `step` is 0 for a new run.

    Raises:
      CollapsedError: from `raise_if_stopped`: the run had to end at `step`.
    """
    # A new run has no metrics file yet.
    rows = read_metrics(workdir, stage) if step else []
    for row in rows:
      if row["step"] <= step:
        # A value that was not finite is null in the file.
        self._judge_all({k: v for k, v in row.items() if v is not None})
    self.raise_if_stopped(step)

  def update(
    self, step: int, values: Mapping[str, float], say: Callable[[str], None]
  ) -> list[str]:
    """Judges a step's values; returns the faults, and warns of each with `say`.

    Raises:
      CollapsedError: a FINITE metric is NaN or infinite; raised before any save.
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
    """Raises an error if the run must end.

    Raises:
      CollapsedError: names step, metric, value, limit, and the usual remedy.
    """
    if self.ends:
      reasons = "; ".join(self._standing.values())
      raise CollapsedError(
        f"stopped at step {step} (saved) as watch.stop asks: {reasons}"
      )

  def _judge_all(self, values: Mapping[str, Any]) -> list[str]:
    """Returns a step's reports."""
    reports = []
    # Steps differ in their metrics, so match the names of this step's values.
    for metric, limit in self._config.limits.items():
      rule = RULES[metric]
      # Off policy, older policies sampled the tokens: a difference is not a fault.
      if not limit or (rule.on_policy and "staleness" in values):
        continue
      for name, value in values.items():
        if _matches(metric, name) and math.isfinite(value):
          reports += self._judge(metric, limit, name, value)
    return reports

  def _judge(self, metric: str, limit: float, name: str, value: float) -> list[str]:
    """Compares a step's value of metric `name` with the limit of `metric`.

    Returns the report if one is due.
    """
    rule = RULES[metric]
    patience = self._config.patience
    limit_text = f"watch.limits.{metric}={limit:g}"
    # A relative limit needs its baseline: the mean of the first `patience` values.
    if rule.relative:
      first = self._first[name]
      if len(first) < patience:
        first.append(value)
        return []
      limit *= sum(first) / patience
      limit_text += f" times its first {sum(first) / patience:.4g}"
    beyond = value > limit if rule.above else value < limit

    # One limit may cover several metrics, one per role: each has its own count.
    self._beyond[name] = self._beyond[name] + 1 if beyond else 0
    count = self._beyond[name]
    if count < patience:
      self._standing.pop(name, None)
      return []

    # --- The fault, its size, and the usual remedy.
    where = "above" if rule.above else "below"
    steps = f"{count} steps in a row" if count > 1 else "this step"
    text = f"{name} is {value:.4g}, {where} {limit_text}, {steps}; {rule.remedy}"
    # The report stands, with its newest numbers, until a value is within the limit, but
    # is returned only once.
    self._standing[name] = text
    return [text] if count == patience else []


def _matches(metric: str, name: str) -> bool:
  if metric.endswith("_"):
    return name.startswith(metric)
  return name == metric

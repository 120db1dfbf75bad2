"""Early warning: what a run's numbers say before its reward does; automatic stop.

What goes wrong in agentic RL shows first in the entropy of one role, in groups whose
samples all earn the same, in lengths, in repetition, or in log-probs that sampler and
learner do not share (reference/rl_field.md, complaints 1 and 14).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

# Of the learner. One NaN here and every later number is wrong.
FINITE = ("loss", "grad_norm", "entropy", "logp_gap", "ratio", "kl", "value_loss")
_LOWER_LR = "lower optim.lr"


class CollapsedError(ValueError):
  """A run was ended because its numbers said that training it further is of no use."""


@dataclasses.dataclass(frozen=True)
class WatchConfig:
  """Config section `watch`: which numbers are worth a warning, or the run's end.

  A number is reported when it was beyond its limit at `patience` steps in a row, and
  again only once it had been within. A limit of 0 is not watched. A number of the
  learner that is NaN or infinite is always reported, at once.

  Attributes:
    stop: whether a report ends the run, after a checkpoint; what is not finite is not
      saved, so the checkpoint before stands.
    patience: steps.
    informative: least share of groups whose rewards differ; only those teach.
    entropy: least entropy of a sampled token, nats.
    entropy_drop: least entropy of any role, as a share of what it was at the first
      `patience` steps watched.
    length_growth: most tokens of a trajectory, as a multiple likewise.
    truncated: most share of trajectories cut off at the token limit.
    repeated: most share of trajectories that make a call, think or plan twice.
    gap: most share of tokens whose log-probs differ by more than `algo.gap` between
      sampler and learner.
    ratio_tail: most share of tokens e times likelier to the learner, or less likely.
    removed_mass: most probability that the grammar takes from a token.
    infrastructure: most share of trajectories lost to tools or judges that were down.
  """

  stop: bool = False
  patience: int = 5
  informative: float = 0.02
  entropy: float = 0.001
  entropy_drop: float = 0.02
  length_growth: float = 2.5
  truncated: float = 0.5
  repeated: float = 0.7
  gap: float = 0.05
  ratio_tail: float = 0.01
  removed_mass: float = 0.2
  infrastructure: float = 0.25

  def __post_init__(self):
    if self.patience < 1:
      raise ValueError(f"patience must be at least 1, got {self.patience}")
    for name, limit in self.limits.items():
      if limit < 0:
        raise ValueError(f"{name} must be at least 0 (0 for not watched), got {limit}")

  @property
  def limits(self) -> dict[str, float]:
    """The limits by field."""
    return {
      "informative": self.informative,
      "entropy": self.entropy,
      "entropy_drop": self.entropy_drop,
      "length_growth": self.length_growth,
      "truncated": self.truncated,
      "repeated": self.repeated,
      "gap": self.gap,
      "ratio_tail": self.ratio_tail,
      "removed_mass": self.removed_mass,
      "infrastructure": self.infrastructure,
    }


@dataclasses.dataclass(frozen=True)
class Rule:
  """What a field of `WatchConfig` limits.

  Attributes:
    metric: its name; one that ends in `_` stands for all that begin so.
    above: whether too much is wrong; else too little.
    remedy: what usually helps.
    relative: whether the limit is a multiple of the metric's first values.
  """

  metric: str
  above: bool
  remedy: str
  relative: bool = False


RULES = {
  "informative": Rule(
    "informative",
    False,
    "tasks are all too easy or all too hard for it (see `reward`): choose others "
    "(experiments/select_tasks.py), raise algo.samples or algo.temperature",
  ),
  "entropy": Rule(
    "entropy",
    False,
    f"it hardly explores any more: raise algo.clip_high, {_LOWER_LR}, add algo.kl_coef",
  ),
  "entropy_drop": Rule(
    "entropy_",
    False,
    f"this role has collapsed: raise algo.clip_high, {_LOWER_LR}, add algo.kl_coef",
    relative=True,
  ),
  "length_growth": Rule(
    "tokens_per_trajectory",
    True,
    "lengths explode: reward.shaping.overlong, or algo.advantage=dr_grpo",
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
  "gap": Rule(
    "gap_share",
    True,
    "sampler and learner disagree: compute more precisely (model.dtype), or correct "
    "with algo.importance_cap",
  ),
  "ratio_tail": Rule(
    "ratio_tail",
    True,
    f"the policy has moved far from what sampled: fewer algo.epochs, {_LOWER_LR}, or "
    "algo.importance_cap",
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


@dataclasses.dataclass(frozen=True)
class Alarm:
  """What was found, in a line, and whether the learner's numbers are still finite."""

  text: str
  finite: bool = True


class Watch:
  """Reads a stage's metrics step by step."""

  def __init__(self, config: WatchConfig):
    """Args: section `watch`."""
    self._config = config
    self._beyond: collections.Counter[tuple[str, str]] = collections.Counter()
    self._first: dict[str, list[float]] = collections.defaultdict(list)
    self._alarms: list[Alarm] = []

  def look(
    self, step: int, values: Mapping[str, float], say: Callable[[str], None]
  ) -> Sequence[Alarm]:
    """What is wrong with a step's values; each is said in a line.

    Raises:
      CollapsedError: what is wrong is not finite and the run is to stop: at once, so
        that it is not saved.
    """
    found = [
      Alarm(
        f"{name} is {value}: the update diverged; {_LOWER_LR}, set optim.clip_norm, or "
        "compute in float32 (model.dtype); begin again from an earlier checkpoint",
        finite=False,
      )
      for name, value in values.items()
      if name in FINITE and not math.isfinite(value)
    ]
    for field, limit in self._config.limits.items():
      for name, value in values.items():
        if limit and _means(RULES[field].metric, name) and math.isfinite(value):
          found += self._judge(field, RULES[field], limit, name, value)
    for alarm in found:
      say(f"warning: step {step}: {alarm.text}")
    self._alarms = found
    if not all(alarm.finite for alarm in found):
      self.end(step)
    return found

  @property
  def ends(self) -> bool:
    """Whether the run is to end after the step looked at last."""
    return bool(self._config.stop and self._alarms)

  def end(self, step: int) -> None:
    """Ends the run if it is to end.

    Raises:
      CollapsedError: naming step, metric, value, limit, and what usually helps.
    """
    if self.ends:
      finite = all(alarm.finite for alarm in self._alarms)
      kept = "saved" if finite else "not saved; the checkpoint before it stands"
      reasons = "; ".join(alarm.text for alarm in self._alarms)
      raise CollapsedError(
        f"stopped at step {step} ({kept}) as watch.stop asks: {reasons}"
      )

  def _judge(
    self, field: str, rule: Rule, limit: float, name: str, value: float
  ) -> list[Alarm]:
    patience, said = self._config.patience, f"watch.{field}={limit:g}"
    if rule.relative:
      first = self._first[name]
      if len(first) < patience:
        first.append(value)
        return []
      limit *= sum(first) / patience
      said += f" times its first {sum(first) / patience:.4g}"
    beyond = value > limit if rule.above else value < limit
    key = field, name
    self._beyond[key] = self._beyond[key] + 1 if beyond else 0
    if self._beyond[key] != patience:
      return []
    where = "above" if rule.above else "below"
    steps = f"{patience} steps in a row" if patience > 1 else "this step"
    return [Alarm(f"{name} is {value:.4g}, {where} {said}, {steps}; {rule.remedy}")]


def _means(metric: str, name: str) -> bool:
  return name.startswith(metric) if metric.endswith("_") else name == metric

"""Configures the RL algorithm: loss, batch, guards, and named presets.

An algorithm is an advantage estimator, a ratio, a surrogate, an aggregation, a KL term
and importance weights. Each is chosen separately; `policy_loss.py` computes them.
`plan.rl.AlgoConfig` joins these configs with the rollouts' `SamplingConfig`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from coa_jax.runtime.fields import bounded, check_fields, choice

# Group-relative estimators, and token-level ones.
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
TOKEN_ADVANTAGES = ("reinforce++", "gae")
AGGREGATIONS = (
  "token-mean",
  "seq-mean-token-mean",
  "seq-mean-token-sum",
  "seq-mean-token-sum-norm",
)


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Config section `algo.loss`.

  Attributes:
    advantage: grpo, dr_grpo (no deviation), rloo, reinforce++ (rewards to go, whitened
      over the batch), reinforce++_baseline (less the group's mean, then whitened), or
      gae (PPO: with a critic).
    ratio: level of the probability ratio: token, or sequence (GSPO).
    surrogate: clip (PPO, DAPO), or cispo.
    clip_low: the ratio's lower bound is 1 - clip_low; 1 for none.
    clip_high: the ratio's upper bound is 1 + clip_high.
    dual_clip: for negative advantages, the ratio counts at most this (verl: 3); 0 for
      no bound.
    aggregation: of the loss over tokens t and trajectories i with l_i policy tokens:
      token-mean is sum_it / sum_i l_i; seq-mean-token-mean is mean_i (sum_t / l_i);
      seq-mean-token-sum is mean_i sum_t; seq-mean-token-sum-norm divides that by
      `horizon` (Dr.GRPO).
    horizon: divisor of seq-mean-token-sum-norm, in tokens; 0 for `batch.length`.
    kl_coef: coefficient of the KL to the reference, the initial model; 0 for no KL and
      no reference.
    kl_estimator: k1, k2 or k3; see `surrogates.kl`.
    kl_in: loss; or reward, with the KL subtracted token by token.
    is_clip: maximum weight in truncated importance sampling (TIS), for tokens sampled
      by another program (vLLM) or an older policy; 0 for no weights. With weights the
      old policy is the learner itself at the step's start (decoupled PPO).
    is_level: level of the weight: token, or sequence.
    is_mode: truncate at `is_clip`; or mask, which drops tokens above `is_clip` or below
      `is_min`. An on-policy token weighs 1, between the two.
    is_min: with mask, the minimum weight kept.
    gamma: discount per token, for reinforce++ and gae.
    lam: GAE's lambda.
    value_clip: moving a value further than this in one step gains nothing (verl: 0.5).
    critic_lr: the critic's peak learning rate, for AdamW.
  """

  advantage: str = choice("grpo", of=GROUP_ADVANTAGES + TOKEN_ADVANTAGES)
  ratio: str = choice("token", of=("token", "sequence"))
  surrogate: str = choice("clip", of=("clip", "cispo"))
  clip_low: float = bounded(0.2, least=0, most=1)
  clip_high: float = bounded(0.28, least=0)
  dual_clip: float = 0.0
  aggregation: str = choice("token-mean", of=AGGREGATIONS)
  horizon: int = bounded(0, least=0)
  kl_coef: float = bounded(0.0, least=0)
  kl_estimator: str = choice("k3", of=("k1", "k2", "k3"))
  kl_in: str = choice("loss", of=("loss", "reward"))
  is_clip: float = bounded(0.0, least=0)
  is_level: str = choice("token", of=("token", "sequence"))
  is_mode: str = choice("truncate", of=("truncate", "mask"))
  is_min: float = bounded(0.0, least=0, below=1)
  gamma: float = bounded(1.0, least=0, most=1)
  lam: float = bounded(1.0, least=0, most=1)
  value_clip: float = bounded(0.5, above=0)
  critic_lr: float = bounded(1e-5, least=0)

  def __post_init__(self):
    check_fields(self)
    # Refuse contradictions between fields.
    if self.dual_clip and (self.dual_clip <= 1 or self.surrogate != "clip"):
      raise ValueError(
        f"dual_clip is {self.dual_clip}; it must be 0 (none), or above 1 with "
        "surrogate 'clip'"
      )
    if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
      raise ValueError(
        "kl_estimator 'k1' has a gradient of mean 0 in the loss: take k2 or k3, or "
        "kl_in='reward'"
      )
    self._check_importance_sampling()

  def _check_importance_sampling(self) -> None:
    # Refuse fields without effect: whoever sets them expects one.
    masks = self.is_mode == "mask"
    if self.is_min and not (self.is_clip and masks):
      raise ValueError(
        f"is_min is {self.is_min}; without is_mode='mask' and an is_clip it must be 0"
      )
    if not self.is_clip:
      for name in ("is_mode", "is_level"):
        value = getattr(self, name)
        usual = getattr(LossConfig, name)
        if value != usual:
          raise ValueError(
            f"{name} is {value!r}, and without weights it says nothing: set an "
            f"is_clip above 0, such as 2.0, or leave it at {usual!r}"
          )
    if masks and self.is_clip <= 1:
      raise ValueError(
        f"is_clip is {self.is_clip}; with is_mode 'mask' it must be above 1: an "
        "on-policy token weighs 1, and none would count"
      )

  @property
  def needs_one_row(self) -> str:
    """Returns the field that needs a trajectory's tokens in one row; "" for none."""
    if self.advantage in TOKEN_ADVANTAGES:
      return "advantage"
    if self.ratio == "sequence":
      return "ratio"
    return "is_level" if self.is_clip and self.is_level == "sequence" else ""

  @property
  def has_critic(self) -> bool:
    """Whether the algorithm has a critic."""
    return self.advantage == "gae"


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """Config section `algo.batch`.

  Attributes:
    rows: rows per micro-batch.
    length: T, tokens per row; at least `rollout.max_len`.
    minibatches: parts of a batch's groups; each part makes one update per epoch.
    epochs: passes over a batch.
  """

  rows: int = bounded(16, least=1)
  length: int = bounded(256, least=1)
  minibatches: int = bounded(1, least=1)
  epochs: int = bounded(1, least=1)

  def __post_init__(self):
    check_fields(self)

  @property
  def updates(self) -> int:
    """Returns the maximum number of updates per batch."""
    return self.minibatches * self.epochs


@dataclasses.dataclass(frozen=True)
class GuardConfig:
  """Config section `algo.guards`: sampler and learner must give the same log-probs.

  Attributes:
    max_logp_diff: nats; the metric `logp_diff_share` is the share of tokens whose
      sampler and learner log-probs differ by more.
    max_logp_diff_share: the run stops at a step whose `logp_diff_share` is above this;
      1 for never.
  """

  max_logp_diff: float = bounded(0.1, above=0)
  max_logp_diff_share: float = bounded(1.0, least=0, most=1)

  def __post_init__(self):
    check_fields(self)


# Name -> fields of section `loss`. A config copies them, so a run's record is complete;
# see `preset`.
PRESETS: dict[str, dict[str, Any]] = {
  # arXiv 2402.03300, eq. 3 and section 4.2.
  "grpo": dict(
    advantage="grpo",
    aggregation="seq-mean-token-mean",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.04,
    kl_estimator="k3",
    kl_in="loss",
  ),
  # arXiv 2503.20783: no division by deviation or length; no KL.
  "dr_grpo": dict(
    advantage="dr_grpo",
    aggregation="seq-mean-token-sum-norm",
    clip_low=0.2,
    clip_high=0.2,
  ),
  # arXiv 2503.14476, eq. 8 to 12; its overlong penalty is a reward. It alone filters
  # groups.
  "dapo": dict(
    advantage="grpo",
    aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.28,
  ),
  # arXiv 2507.18071, eq. 5 and section 5.1.
  "gspo": dict(
    advantage="grpo",
    ratio="sequence",
    aggregation="seq-mean-token-mean",
    clip_low=3e-4,
    clip_high=4e-4,
  ),
  # arXiv 2506.13585, eq. 4: no lower bound; the upper bound, 5, is TRL's advice.
  "cispo": dict(
    advantage="grpo",
    surrogate="cispo",
    aggregation="token-mean",
    clip_low=1.0,
    clip_high=4.0,
  ),
  # arXiv 2402.14740; KL and its coefficient as in TRL's RLOOTrainer.
  "rloo": dict(
    advantage="rloo",
    aggregation="seq-mean-token-sum",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.05,
    kl_estimator="k1",
    kl_in="reward",
  ),
  # arXiv 2501.03262: KL in the reward, token by token; the coefficient is ours.
  "reinforce++": dict(
    advantage="reinforce++",
    aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.001,
    kl_estimator="k1",
    kl_in="reward",
  ),
  # The same paper's form for several samples per prompt: k2 in the loss.
  "reinforce++_baseline": dict(
    advantage="reinforce++_baseline",
    aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.001,
    kl_estimator="k2",
    kl_in="loss",
  ),
  # arXiv 1707.06347 with AFM's KL (its MHQA agent: GAE, .001 k3), lambda as in verl.
  "ppo": dict(
    advantage="gae",
    aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.2,
    gamma=1.0,
    lam=1.0,
    value_clip=0.5,
    kl_coef=0.001,
    kl_estimator="k3",
    kl_in="loss",
  ),
}


def preset(name: str) -> dict[str, Any]:
  """Returns a named algorithm's sections, for `config.algo.update(...)`.

  Raises:
    ValueError: no such name.
  """
  if name not in PRESETS:
    raise ValueError(f"no algorithm {name!r}; there are {', '.join(PRESETS)}")
  sampling: dict[str, Any] = {"filter_groups": False}
  if name == "dapo":
    sampling = {"filter_groups": True, "rounds": 2}
  return {"loss": dict(PRESETS[name]), "sampling": sampling}

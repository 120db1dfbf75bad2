"""The algorithm of RL as a config: section `algo`, and the choices that have names.

An algorithm is an advantage estimator, a ratio, a surrogate, an aggregation, a KL term
and importance weights. Each is chosen by itself; `policy_loss.py` computes them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from coa_jax.tasks.sampling import DRAWS

# Estimators that compare the samples of a group, and those that walk over tokens.
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
TOKEN_ADVANTAGES = ("reinforce++", "gae")
_CHOICES = {
  "draw": DRAWS,
  "advantage": GROUP_ADVANTAGES + TOKEN_ADVANTAGES,
  "ratio": ("token", "sequence"),
  "surrogate": ("clip", "cispo"),
  "aggregation": (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
  ),
  "kl_estimator": ("k1", "k2", "k3"),
  "kl_in": ("loss", "reward"),
  "importance_level": ("token", "sequence"),
  "importance_rule": ("truncate", "mask"),
}
_AT_LEAST_1 = ("steps", "prompts", "rounds", "minibatches", "epochs", "samples")
_AT_LEAST_1 += ("rows", "length", "keep_every")
_AT_LEAST_0 = ("round_prompts", "staleness", "horizon", "clip_high")
_AT_LEAST_0 += ("kl_coef", "critic_lr")
_LEAST = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0)
_ABOVE_0 = ("temperature", "gap", "value_clip")
_SHARES = ("gap_limit", "curriculum", "gamma", "lam", "clip_low")


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
  """Config section `algo`.

  Attributes:
    steps: batches of rollouts to learn from.
    prompts: groups in one step's batch, at most.
    samples: trajectories of a group.
    rounds: rollouts of one step, at most, to fill its batch; with `filter_groups` and
      more than 1, DAPO's dynamic sampling. What is found by then is learnt from.
    round_prompts: groups rolled out in a round (verl: gen_batch_size); 0 for `prompts`.
    filter_groups: only groups whose rewards differ are learnt from.
    temperature: of the rollouts.
    staleness: updates that a sampled token may be old when it is learnt from. 0 is
      on-policy: rollouts and learning take turns. Above, rollouts go on meanwhile and
      take up a new policy where they are; this needs an importance_cap.
    draw: of tasks: uniform; learnability (those solved sometimes are drawn most); or
      curriculum (easy ones first, by the pass rates that select_tasks writes). See
      `tasks/draw.py`.
    curriculum: share of the steps after which a curriculum draws from all tasks.
    minibatches: updates from one batch, each from its part of the groups.
    epochs: how often a batch is gone through.
    advantage: grpo, dr_grpo (no deviation), rloo, reinforce++ (rewards to go, whitened
      over the batch), reinforce++_baseline (less the group's mean, then whitened), or
      gae (PPO: with a critic).
    ratio: token, or sequence (GSPO), of probabilities.
    surrogate: clip (PPO, DAPO), or cispo.
    clip_low: the ratio's lower bound is 1 - clip_low; 1 for none.
    clip_high: its upper bound is 1 + clip_high.
    dual_clip: where the advantage is negative, the ratio counts at most this (verl: 3);
      0 for no such bound.
    aggregation: of the loss over tokens t and trajectories i of l_i policy tokens:
      token-mean is sum_it / sum_i l_i; seq-mean-token-mean is mean_i (sum_t / l_i);
      seq-mean-token-sum is mean_i sum_t; seq-mean-token-sum-norm divides that by
      `horizon` (Dr.GRPO).
    horizon: tokens; 0 for `length`.
    kl_coef: of the KL to the reference, which is the model that training starts from; 0
      for none, and then there is no reference.
    kl_estimator: k1, k2 or k3; see `surrogates.kl`.
    kl_in: loss; or reward, from which it is taken token by token.
    importance_cap: most that a token counts whose sampler is another program than the
      learner (vLLM), or an older policy; 0 for no such weights. With them the old
      policy is the learner itself at the step's begin (decoupled PPO).
    importance_level: of the weight: token, or sequence.
    importance_rule: truncate at the cap; or mask, which drops what is above the cap or
      below the floor. An on-policy token weighs 1, between the two.
    importance_floor: with mask.
    gamma: discount of a token, for reinforce++ and gae.
    lam: GAE's lambda.
    value_clip: how far a value moves in one step before its loss stops (verl: 0.5).
    critic_lr: peak learning rate of the critic, AdamW's.
    gap: nats; the metric `gap_share` is the share of tokens whose log-probs differ by
      more between sampler and learner.
    gap_limit: the run stops at a step whose `gap_share` is above this; 1 for never.
    rows: rows of a micro-batch.
    length: T, tokens of a row; at least `rollout.max_len`.
    keep_every: steps between two dumps of all trajectories of a step.
  """

  steps: int
  prompts: int = 16
  samples: int = 8
  rounds: int = 2
  round_prompts: int = 0
  filter_groups: bool = True
  temperature: float = 1.0
  staleness: int = 0
  draw: str = "uniform"
  curriculum: float = 0.5
  minibatches: int = 1
  epochs: int = 1
  advantage: str = "grpo"
  ratio: str = "token"
  surrogate: str = "clip"
  clip_low: float = 0.2
  clip_high: float = 0.28
  dual_clip: float = 0.0
  aggregation: str = "token-mean"
  horizon: int = 0
  kl_coef: float = 0.0
  kl_estimator: str = "k3"
  kl_in: str = "loss"
  importance_cap: float = 0.0
  importance_level: str = "token"
  importance_rule: str = "truncate"
  importance_floor: float = 0.0
  gamma: float = 1.0
  lam: float = 1.0
  value_clip: float = 0.5
  critic_lr: float = 1e-5
  gap: float = 0.1
  gap_limit: float = 1.0
  rows: int = 16
  length: int = 256
  keep_every: int = 20

  def __post_init__(self):
    for name, known in _CHOICES.items():
      if getattr(self, name) not in known:
        raise ValueError(
          f"{name} {getattr(self, name)!r}; accepted: {', '.join(known)}"
        )
    for name in (f.name for f in dataclasses.fields(self)):
      value = getattr(self, name)
      if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be a finite number")
      if name in _LEAST and value < _LEAST[name]:
        raise ValueError(f"{name} is {value}; it must be at least {_LEAST[name]}")
      if name in _ABOVE_0 and value <= 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
      if name in _SHARES and not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be from 0 to 1")
    compares = self.filter_groups or self.advantage in GROUP_ADVANTAGES
    if compares and self.samples < 2:
      raise ValueError(
        f"samples is {self.samples}; it must be at least 2, for an advantage compares "
        "a group (or take advantage reinforce++ or gae, and filter_groups=False)"
      )
    if self.dual_clip and (self.dual_clip <= 1 or self.surrogate != "clip"):
      raise ValueError(
        f"dual_clip is {self.dual_clip}; it must be 0 (none), or above 1 with "
        "surrogate 'clip'"
      )
    if self.kl_coef and (self.kl_in, self.kl_estimator) == ("loss", "k1"):
      raise ValueError(
        "kl_estimator 'k1' has a gradient of mean 0 in the loss: take k2 or k3, or "
        "kl_in='reward'"
      )
    self._check_importance()

  def _check_importance(self) -> None:
    cap, floor = self.importance_cap, self.importance_floor
    if cap < 0:
      raise ValueError(
        f"importance_cap is {cap}; it must be 0 (no weights) or above, such as 2.0"
      )
    masks = self.importance_rule == "mask"
    if floor and not (cap and masks):
      raise ValueError(
        f"importance_floor is {floor}; without importance_rule='mask' and an "
        "importance_cap it must be 0"
      )
    for name in () if cap else ("importance_rule", "importance_level"):
      value, usual = getattr(self, name), getattr(AlgoConfig, name)
      if value != usual:
        raise ValueError(
          f"{name} is {value!r}, and without weights it says nothing: set an "
          f"importance_cap above 0, such as 2.0, or leave it at {usual!r}"
        )
    if masks and not 0 <= floor < 1 < cap:
      raise ValueError(
        f"importance_floor is {floor} and importance_cap {cap}; with importance_rule "
        "'mask' the floor must be from 0 to below 1 and the cap above 1: an on-policy "
        "token weighs 1, and none would count"
      )
    # Without, PPO's bounds lie around a policy that is several updates away: at 4 of
    # them AReaL fell from 42.0 to 23.3 on AIME24, and with it stayed at 42.2 (its
    # blog/AReaL_v0_3.md, table 3).
    if self.staleness and not cap:
      raise ValueError(
        f"staleness={self.staleness} needs importance_cap above 0, such as 2.0: stale "
        "tokens are then weighted by p_now / p_sampled (decoupled PPO)"
      )
    if self.staleness and self.gap_limit < 1:
      raise ValueError(
        f"gap_limit is {self.gap_limit}: it compares sampler and learner of one "
        "policy; with staleness above 0 they are not, so leave it at 1"
      )

  @property
  def has_critic(self) -> bool:
    """Whether values are learnt too."""
    return self.advantage == "gae"

  @property
  def updates(self) -> int:
    """Updates from one batch, at most."""
    return self.minibatches * self.epochs


# Name -> fields of `AlgoConfig` that make the algorithm. A config that starts from one
# holds the fields, so what was run is on record; see `preset`.
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
    filter_groups=False,
  ),
  # arXiv 2503.20783: neither deviation nor length divides; no KL.
  "dr_grpo": dict(
    advantage="dr_grpo",
    aggregation="seq-mean-token-sum-norm",
    clip_low=0.2,
    clip_high=0.2,
    filter_groups=False,
  ),
  # arXiv 2503.14476, eq. 8 to 12; its overlong penalty is a reward.
  "dapo": dict(
    advantage="grpo",
    aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.28,
    filter_groups=True,
    rounds=2,
  ),
  # arXiv 2507.18071, eq. 5 and section 5.1.
  "gspo": dict(
    advantage="grpo",
    ratio="sequence",
    aggregation="seq-mean-token-mean",
    clip_low=3e-4,
    clip_high=4e-4,
    filter_groups=False,
  ),
  # arXiv 2506.13585, eq. 4: no lower bound; the upper one, 5, is TRL's advice.
  "cispo": dict(
    advantage="grpo",
    surrogate="cispo",
    aggregation="token-mean",
    clip_low=1.0,
    clip_high=4.0,
    filter_groups=False,
  ),
  # arXiv 2402.14740; KL and its coefficient as TRL's RLOOTrainer.
  "rloo": dict(
    advantage="rloo",
    aggregation="seq-mean-token-sum",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.05,
    kl_estimator="k1",
    kl_in="reward",
    filter_groups=False,
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
    filter_groups=False,
  ),
  # The same paper's form for several samples of a prompt: k2 in the loss.
  "reinforce++_baseline": dict(
    advantage="reinforce++_baseline",
    aggregation="token-mean",
    clip_low=0.2,
    clip_high=0.2,
    kl_coef=0.001,
    kl_estimator="k2",
    kl_in="loss",
    filter_groups=False,
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
    filter_groups=False,
  ),
}


def preset(name: str) -> dict[str, Any]:
  """The fields of a named algorithm, for `config.algo.update(...)`.

  Raises:
    ValueError: no such name.
  """
  if name not in PRESETS:
    raise ValueError(f"no algorithm {name!r}; there are {', '.join(PRESETS)}")
  return dict(PRESETS[name])

"""verl 0.9.1's results for cases.json; prints JSON {case: {quantity: value}}.

  PYTHON tests/learner/oracles/of_verl.py > tests/learner/oracles/verl.json

PYTHON is an interpreter with torch 2.13.0 (CPU), verl 0.9.1 --no-deps, tensordict 0.10,
ray, transformers<5.11, accelerate, datasets, hydra-core, codetiming, pandas, peft,
torchdata, pylatexenc, dill. All in float64.
"""

from __future__ import annotations

import types

import numpy as np
import oracle_io as io
import torch
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

AGGREGATIONS = (
  "token-mean",
  "seq-mean-token-mean",
  "seq-mean-token-sum",
  "seq-mean-token-sum-norm",
)
# Importance weights for the sampler's mismatch: (level, verl's threshold).
IMPORTANCE = {
  "token-truncate": ("token", 2.0),
  "sequence-truncate": ("sequence", 2.0),
  "token-mask": ("token", "0.5_2.0"),
  "sequence-mask": ("sequence", "0.5_3.0"),
}


def actor(dual_clip: float, clip_low: float = io.CLIP_LOW):
  """verl's policy loss config. Its dual clip has no off switch; 1e30 disables it."""
  return ActorConfig(
    strategy="fsdp",
    rollout_n=4,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio_low=clip_low,
    clip_ratio_high=io.CLIP_HIGH,
    clip_ratio_c=dual_clip or 1e30,
  )


def losses(c: dict[str, torch.Tensor]) -> dict:
  """Policy losses and their gradients in the log-probs."""
  out = {}
  advantage = c["advantage"][:, None].expand_as(c["mask"])
  variants = {
    "clip": (verl.compute_policy_loss_vanilla, actor(0)),
    "dual": (verl.compute_policy_loss_vanilla, actor(io.DUAL)),
    "gspo": (verl.compute_policy_loss_gspo, actor(0)),
    "cispo": (verl.compute_policy_loss_cispo, actor(0)),
    "cispo-upper": (verl.compute_policy_loss_cispo, actor(0, 1.0)),
  }
  weights = {
    name: compute_rollout_correction_weights(
      c["old"] - c["sampler"], c["mask"], level, threshold
    )[0]
    for name, (level, threshold) in IMPORTANCE.items()
  }
  out |= {f"importance/{k}": w.tolist() for k, w in weights.items()}
  runs = [(name, f, config, None) for name, (f, config) in variants.items()]
  runs += [(f"clip+{k}", *variants["clip"], w) for k, w in weights.items()]
  for name, f, config, weight in runs:
    for mode in AGGREGATIONS:
      logp = c["logp"].clone().requires_grad_()
      args = (c["old"], logp, advantage, c["mask"], mode, config, weight)
      loss, _ = f(*args)
      loss.backward()
      out[f"loss/{name}/{mode}"] = loss.item()
      if mode in AGGREGATIONS[:2]:
        out[f"grad/{name}/{mode}"] = logp.grad.tolist()
  # On-policy distillation as in verl.trainer.distillation.losses, while learner and
  # sampler are equal: the advantage is minus k1 to the teacher.
  logp = c["old"].clone().requires_grad_()
  advantage = -verl.kl_penalty(logp, c["reference"], "k1").detach()
  f, config = variants["clip"]
  loss, _ = f(c["old"], logp, advantage, c["mask"], "token-mean", config, None)
  loss.backward()
  out["loss/distillation"], out["grad/distillation"] = loss.item(), logp.grad.tolist()
  return out


def rest(c: dict[str, torch.Tensor]) -> dict:
  """Advantages, KL estimates and the value loss."""
  out, mask = {}, c["mask"]
  last = mask.cumsum(1).argmax(1)  # the last policy token; 0 in an empty row
  reward = torch.zeros_like(mask)
  reward[torch.arange(len(mask)), last] = c["reward"]
  for name, f, more in (
    ("grpo", verl.compute_grpo_outcome_advantage, {}),
    (
      "dr_grpo",
      verl.compute_grpo_outcome_advantage,
      {"norm_adv_by_std_in_grpo": False},
    ),
    ("rloo", verl.compute_rloo_outcome_advantage, {}),
    (
      "reinforce++_baseline",
      verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
      {},
    ),
  ):
    advantage = f(reward.clone(), mask, io.GROUP, **more)[0]
    out[f"advantage/{name}"] = (advantage * mask).tolist()
  # KL in the reward, token by token.
  held = reward - io.KL * mask * verl.kl_penalty(c["old"], c["reference"], "k1")
  config = types.SimpleNamespace(gamma=io.GAMMA)
  advantage, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
    held, mask, config=config
  )
  out["advantage/reinforce++"] = (advantage * mask).tolist()
  args = (held, c["value"], mask, io.GAMMA, io.LAM)
  advantage, returns = verl.compute_gae_advantage_return(*args)
  out["advantage/gae"] = (advantage * mask).tolist()
  out["return/gae"] = (returns * mask).tolist()
  for k in ("k1", "k2", "k3"):
    logp = c["logp"].clone().requires_grad_()
    kl = verl.kl_penalty(logp, c["reference"], k)
    out[f"kl/{k}"] = (kl * mask).tolist()
    (kl * mask).sum().backward()
    out[f"kl-grad/{k}"] = logp.grad.tolist()
  value = c["new_value"].clone().requires_grad_()
  loss, _ = verl.compute_value_loss(value, c["return"], c["value"], mask, io.VALUE_CLIP)
  loss.backward()
  out["value/loss"], out["value/grad"] = loss.item(), value.grad.tolist()
  return out


def compute(case: dict[str, np.ndarray]) -> dict:
  """Computes every quantity for a case."""
  c = {k: torch.tensor(v, dtype=torch.float64) for k, v in case.items()}
  return losses(c) | rest(c)


if __name__ == "__main__":
  io.print_all(compute)

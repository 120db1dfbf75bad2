"""TRL 1.12.0's PPO results for cases.json; prints {case: {quantity: value}}.

  PYTHONPATH=TRL PYTHON tests/learner/oracles/of_trl_ppo.py \\
    > tests/learner/oracles/trl_ppo.json

TRL is a folder with trl 1.12.0 (the last version with PPO), PYTHON as for of_trl.py.
The lines are cut from the trainer's loop and run unchanged. It does not support
observations, so every token up to a row's last policy token counts as the policy's.
"""

from __future__ import annotations

import types

import numpy as np
import oracle_io as io
import torch
from of_trl import cut
from trl.experimental.ppo import ppo_trainer


def compute(case: dict[str, np.ndarray]) -> dict:
  """GAE, returns and both losses, with the holes in rows filled."""
  c = {k: torch.tensor(v, dtype=torch.float64) for k, v in case.items()}
  if (case["mask"].sum(1) == 0).any():
    return {}
  B, T = case["mask"].shape
  # Whole rows: holes in the other checks are policy tokens here.
  last = T - 1 - case["mask"][:, ::-1].argmax(1)
  whole = torch.tensor(np.arange(T) <= last[:, None])
  reward = -io.KL * (c["old"] - c["reference"]) * whole
  reward[torch.arange(B), torch.tensor(last)] += c["reward"]
  args = types.SimpleNamespace(
    gamma=io.GAMMA,
    lam=io.LAM,
    cliprange=io.CLIP_LOW,
    cliprange_value=io.VALUE_CLIP,
    vf_coef=1.0,
  )
  new_value = c["new_value"].clone().requires_grad_()
  logp = c["logp"].clone().requires_grad_()
  names = vars(ppo_trainer) | {
    "args": args,
    "rewards": reward,
    "values": c["value"] * whole,
    "responses": whole,
    "padding_mask": ~whole,
    "padding_mask_p1": ~whole,
    "micro_batch_inds": slice(None),
    "vpred": new_value,
    "mb_values": c["value"],
    "mb_return": c["return"],
    "new_logprobs": logp,
    "mb_logprobs": c["old"],
    "mb_advantage": c["advantage"][:, None].expand_as(c["old"]),
  }
  train = ppo_trainer.PPOTrainer.train
  exec(
    cut(ppo_trainer, train, "lastgaelam = 0", "advantages = torch.masked_fill"), names
  )
  exec(cut(ppo_trainer, train, "vpredclipped = ", "loss = pg_loss"), names)
  names["loss"].backward()
  return {
    "advantage/gae-whole": names["advantages"].tolist(),
    "return/gae-whole": (names["returns"] * whole).tolist(),
    "loss/clip-whole": names["pg_loss"].item(),
    "value/loss-whole": names["vf_loss"].item(),
    "grad/clip-whole": logp.grad.tolist(),
    "value/grad-whole": new_value.grad.tolist(),
  }


if __name__ == "__main__":
  io.print_all(compute)

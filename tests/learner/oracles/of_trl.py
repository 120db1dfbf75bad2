"""TRL 1.16.0's results for cases.json; prints JSON {case: {quantity: value}}.

  PYTHON tests/learner/oracles/of_trl.py > tests/learner/oracles/trl.json

PYTHON is an interpreter with torch 2.13.0 (CPU), trl 1.16.0, transformers, accelerate,
datasets. The trainer's own `_compute_loss` runs unbound, on a stub whose model returns
the case's log-probs. The advantage lines are cut from its method and run unchanged.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types

import numpy as np
import oracle_io as io
import torch
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

# Aggregation: our name -> TRL's name.
LOSS_TYPES = {
  "token-mean": "dapo",
  "seq-mean-token-mean": "grpo",
  "seq-mean-token-sum-norm": "dr_grpo",
}


class Metrics(dict):
  """Accepts and discards every logged metric."""

  def __missing__(self, key: str) -> list:
    return []


def trainer(logp: torch.Tensor, **changes):
  """A stub with every attribute that `_compute_loss` reads."""
  settings = dict(
    loss_type="dapo",
    epsilon_low=io.CLIP_LOW,
    epsilon_high=io.CLIP_HIGH,
    importance_sampling_level="token",
    beta=0.0,
    use_vllm=False,
  )
  args = types.SimpleNamespace(
    delta=changes.pop("delta", None),
    use_bias_correction_kl=False,
    steps_per_generation=1,
  )
  same = types.SimpleNamespace(
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    num_processes=1,
  )
  nothing = torch.zeros_like(logp)
  return types.SimpleNamespace(
    **settings | changes,
    args=args,
    accelerator=same,
    aux_loss_enabled=False,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    vllm_importance_sampling_correction=True,
    max_completion_length=logp.shape[1],
    current_gradient_accumulation_steps=1,
    model=types.SimpleNamespace(training=True),
    _entropy_bonus_enabled=False,
    _metrics={"train": Metrics()},
    _get_per_token_logps_and_entropies=lambda *a, **k: (logp, nothing, None),
  )


def losses(c: dict[str, torch.Tensor]) -> dict:
  """Policy losses and their gradients in the log-probs."""
  out = {}
  B, T = c["mask"].shape
  ids = torch.zeros((B, T), dtype=torch.long)
  inputs = {
    "prompt_ids": ids[:, :1],
    "prompt_mask": ids[:, :1] + 1,
    "completion_ids": ids,
    "completion_mask": torch.ones_like(c["mask"]),
    "tool_mask": c["mask"],
    "advantages": c["advantage"],
    "old_per_token_logps": c["old"],
    "ref_per_token_logps": c["reference"],
    "num_items_in_batch": c["mask"].sum(),
  }
  variants = {
    "clip": {},
    "dual": {"delta": io.DUAL},
    "gspo": {"importance_sampling_level": "sequence"},
    "clip+k3": {"beta": io.KL},
  }
  runs = [
    (f"{name}/{ours}", {**changes, "loss_type": theirs})
    for name, changes in variants.items()
    for ours, theirs in LOSS_TYPES.items()
  ]
  # The upper bound is absolute here, and there is no lower one.
  upper = {"loss_type": "cispo", "epsilon_high": 1 + io.CLIP_HIGH}
  runs.append(("cispo-upper/token-mean", upper))
  for name, changes in runs:
    logp = c["logp"].clone().requires_grad_()
    loss = GRPOTrainer._compute_loss(trainer(logp, **changes), None, inputs)
    loss.backward()
    out[f"loss/{name}"], out[f"grad/{name}"] = loss.item(), logp.grad.tolist()
  return out


def cut(module, method, first: str, last: str) -> str:
  """A method's statements, from one that starts with `first` to one with `last`."""
  tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
  for node in ast.walk(tree):
    for field in ("body", "orelse"):
      body = getattr(node, field, None)
      texts = [ast.unparse(x) for x in body] if isinstance(body, list) else []
      starts = [i for i, t in enumerate(texts) if t.startswith(first)]
      ends = [i for i, t in enumerate(texts) if t.startswith(last)]
      if starts and ends:
        return "\n".join(texts[starts[0] : ends[-1] + 1])
  raise ValueError(f"{module.__name__}: no {first!r} to {last!r}")


def group_advantages(reward: torch.Tensor, scale: str) -> list:
  """GRPO advantages, computed by the trainer's own lines."""
  method = GRPOTrainer._generate_and_score_completions
  lines = cut(
    grpo_trainer,
    method,
    "mean_grouped_rewards = torch.nanmean",
    "if self.scale_rewards !=",
  )
  names = vars(grpo_trainer) | {
    "self": types.SimpleNamespace(scale_rewards=scale),
    "rewards": reward,
    "num_generations": 4,
  }
  exec(lines, names)
  return names["advantages"].tolist()


def leave_one_out(reward: torch.Tensor) -> list:
  """RLOO advantages, computed by its trainer's own lines."""
  method = rloo_trainer.RLOOTrainer._generate_and_score_completions
  lines = cut(rloo_trainer, method, "grouped_rewards = ", "if num_generations > 1")
  names = vars(rloo_trainer) | {
    "self": types.SimpleNamespace(num_generations=4),
    "rewards": reward,
    "num_generations": 4,
  }
  exec(lines, names)
  return names["advantages"].tolist()


def compute(case: dict[str, np.ndarray]) -> dict:
  """Computes every quantity for a case."""
  c = {k: torch.tensor(v, dtype=torch.float64) for k, v in case.items()}
  out = {
    "advantage/grpo-1e-4": group_advantages(c["reward"], "group"),
    "advantage/dr_grpo": group_advantages(c["reward"], "none"),
    "advantage/rloo": leave_one_out(c["reward"]),
  }
  # TRL's means over rows include rows without policy tokens, and it clamps no
  # log-ratio; so other peers cover the losses for `hard`.
  return out if (case["mask"].sum(1) == 0).any() else out | losses(c)


if __name__ == "__main__":
  io.print_all(compute)

"""google-tunix 0.1.7's results for cases.json; prints {case: {quantity: value}}.

  PYTHON tests/learner/oracles/of_tunix.py > tests/learner/oracles/tunix.json

PYTHON is an interpreter with google-tunix 0.1.7. Its losses call a model for log-probs;
a replacement for that call returns the case's log-probs. All in float32, like tunix.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle_io as io
from flax import nnx
from tunix.rl import algo_core, common

AGGREGATIONS = {
  "token-mean": "token-mean",
  "seq-mean-token-mean": "sequence-mean-token-mean",
  "seq-mean-token-sum": "seq-mean-token-sum",
  "seq-mean-token-sum-norm": "sequence-mean-token-scale",
}
ESTIMATORS = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}


def losses(c: dict[str, jax.Array]) -> dict:
  """Policy losses and their gradients in the log-probs."""
  out = {}

  def loss(logp, **changes):
    settings = dict(
      beta=0.0,
      epsilon=io.CLIP_LOW,
      epsilon_high=io.CLIP_HIGH,
      epsilon_c=None,
      loss_algo="grpo",
      temperature=1.0,
      kl_loss_mode="low_var_kl",
      kl_clamp_value=None,
    )
    example = types.SimpleNamespace(
      prompt_ids=None,
      completion_ids=None,
      completion_mask=c["mask"],
      advantages=c["advantage"],
      old_per_token_logps=c["old"],
      ref_per_token_logps=c["reference"],
      sampler_is_weights=None,
    )
    common.compute_per_token_logps = lambda *a, **k: (logp, jnp.zeros((*logp.shape, 2)))
    config = types.SimpleNamespace(**settings | changes)
    return algo_core.grpo_loss_fn(
      nnx.Linear(1, 1, rngs=nnx.Rngs(0)), example, config, 0, 0
    )[0]

  variants = {
    "clip": {},
    "dual": {"epsilon_c": io.DUAL},
    "gspo": {"loss_algo": "gspo-token"},
  }
  variants |= {
    f"clip+{k}": {"beta": io.KL, "kl_loss_mode": mode}
    for k, mode in ESTIMATORS.items()
    if k != "k1"
  }
  for name, changes in variants.items():
    for ours, mode in AGGREGATIONS.items():
      value, grad = jax.value_and_grad(loss)(c["logp"], loss_agg_mode=mode, **changes)
      out[f"loss/{name}/{ours}"] = value
      if ours == "token-mean":
        out[f"grad/{name}/{ours}"] = grad
  return out


def rest(c: dict[str, jax.Array]) -> dict:
  """Advantages, GAE, KL estimates and the value loss."""
  out, mask = {}, c["mask"]
  reward = np.asarray(c["reward"])
  out["advantage/grpo"] = algo_core.compute_advantages(reward, 4)
  out["advantage/rloo"] = algo_core.compute_rloo_advantages(reward, 4)
  out["advantage/dr_grpo"] = algo_core.compute_drgrpo_advantages(reward, 4)
  last = np.asarray(mask).cumsum(1).argmax(1)
  given = np.zeros(mask.shape, np.float32)
  given[np.arange(len(given)), last] = reward
  given -= io.KL * np.asarray(mask * (c["old"] - c["reference"]))
  advantage, returns = algo_core.compute_gae_advantages(
    given, c["value"], mask, io.GAMMA, io.LAM
  )
  out["advantage/gae"], out["return/gae"] = advantage * mask, returns * mask
  for k, mode in ESTIMATORS.items():
    kl = common.compute_kl_divergence(c["logp"], c["reference"], mode)
    out[f"kl/{k}"] = kl * mask
  example = types.SimpleNamespace(
    prompt_ids=None,
    completion_ids=mask,
    completion_mask=mask,
    old_values=c["value"],
    returns=c["return"],
  )

  def value_loss(value):
    # The model returns T + 1 values: one before each token and one after the last.
    padded = jnp.pad(value, ((0, 0), (0, 1)))
    common.compute_score = lambda *a, **k: padded
    return algo_core.ppo_value_loss_fn(None, example, io.VALUE_CLIP, 0, 0)[0]

  out["value/loss"], out["value/grad"] = jax.value_and_grad(value_loss)(c["new_value"])
  return out


def compute(case: dict[str, np.ndarray]) -> dict:
  """Computes every quantity for a case."""
  c = {k: jnp.asarray(v, jnp.float32) for k, v in case.items()}
  return losses(c) | rest(c)


if __name__ == "__main__":
  io.print_all(compute)

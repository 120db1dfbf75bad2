"""Every loss for every split of the same trajectories, on 4 virtual devices.

  python tests/learner/losses_on_a_mesh.py OUT.json some|all float32|float64

Writes {split: {algorithm: {loss, loss_off, gradient, gradient_off}}}. Losses and
gradients come from one device with one trajectory per row; `_off` is a split's
difference from them, and test_invariance.py has the bounds. One program computes all
losses of a split: it takes each loss's gradient in the log-probs and values, and pulls
it back through the model. SFT has another implementation, so the program
differentiates it separately.

In float64 (see `toy.use_float64`) summation order is negligible, but a bug is not.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import sys

import virtual_devices

os.environ.update(virtual_devices.environment(4, virtual_devices.QUICK))

import jax
import jax.numpy as jnp
import numpy as np
import toy

from coa_jax.learner import log_probs, policy_loss, surrogates
from coa_jax.learner.algorithms import PRESETS, BatchConfig, LossConfig
from coa_jax.learner.batch import Batch, Packed
from coa_jax.learner.cross_entropy import cross_entropy
from coa_jax.learner.optim import OptimConfig
from coa_jax.learner.update import PolicyUpdate
from coa_jax.model.distribution import NO_TRUNCATION
from coa_jax.model.sharding import ONE_DEVICE, MeshConfig, Partitioner, make_partitioner
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

DTYPES = toy.use_float64() if sys.argv[3] == "float64" else {}
CFG = dataclasses.replace(toy.ONE_LAYER, **DTYPES)
LENGTH = 256  # dr_grpo divides by it; the splits have other row lengths
MORE = {
  "dual clip": {"dual_clip": 1.2},
  "token weights": {"is_clip": 1.1},
  "sequence weights": {"is_clip": 1.1, "is_level": "sequence"},
  "masked weights": {
    "is_clip": 1.5,
    "is_mode": "mask",
    "is_min": 0.8,
  },
  "masked sequences": {
    "is_clip": 3.0,
    "is_mode": "mask",
    "is_level": "sequence",
  },
  "gspo of token-mean": {"ratio": "sequence", "aggregation": "token-mean"},
}
LOSSES = PRESETS | MORE
ALGORITHMS = {
  name: LossConfig(**{"clip_low": 0.05, "clip_high": 0.05, **fields})
  for name, fields in LOSSES.items()
}
IN_CONTEXTS = "packed, in contexts"
# split: (rows per micro-batch, tokens per row, mesh).
SOME = {
  IN_CONTEXTS: (4, 128, None),
  "packed, a row at a time, longer rows": (1, 192, None),
  "packed, data 2 fsdp 2": (4, 128, MeshConfig(data=2, fsdp=2)),
}
ALL = {
  **SOME,
  "packed": (2, 128, None),
  "packed, a row at a time": (1, 128, None),
  "packed, empty rows": (8, 128, None),
  "packed, data 2": (2, 128, MeshConfig(data=2, fsdp=1)),
  "packed, context 2 data 2": (2, 128, MeshConfig(data=2, fsdp=1, context=2)),
}
REWARD_GK = np.array([[1.0, 0.0, 0.25, 0.0], [0.0, 1.0, 1.0, 0.5]])


@functools.cache
def played() -> list[Trajectory]:
  """The toy scripts twice, with log-probs from a slightly different policy."""
  rng = np.random.default_rng(0)
  out = toy.trajectories() + toy.trajectories()
  logps = toy.logps_of(CFG, toy.params(layers=1, **DTYPES), out[:4]) * 2
  for t, own in zip(out, logps, strict=True):
    noisy = iter((own + rng.normal(scale=0.2, size=own.shape)).tolist())
    for s in t.segments:
      if s.author == Author.POLICY:
        s.logps = [next(noisy) for _ in s.ids]
  return out


def in_contexts() -> tuple[list[Trajectory], list[int]]:
  """Returns all contexts, and the index of each context's trajectory.

  Every observation starts a new context, which repeats all earlier segments.
  """
  out, owners = [], []
  for i, t in enumerate(played()):
    segments: list[Segment] = []
    for s in t.segments:
      if s.author == Author.TOOL:
        for earlier in t.segments[: t.segments.index(s)]:
          author = earlier.author
          if author != Author.PROMPT:
            author = Author.CARRIED
          segments.append(dataclasses.replace(earlier, author=author, logps=[]))
      segments.append(s)
    contexts = dataclasses.replace(t, segments=segments).split()
    assert len(contexts) == 1 + sum(s.author == Author.TOOL for s in t.segments)
    out += contexts
    owners += [i] * len(contexts)
  return out, owners


def batches(config: LossConfig, rows: int, length: int, contexts: bool) -> list[Batch]:
  """Batches as in an update: scores, advantages and loss weights."""
  trajectories, owners = in_contexts() if contexts else (played(), None)
  if contexts and config.needs_one_row:
    config = LossConfig()  # refused, so not compared
  packed = Packed(trajectories, rows, length)
  rng = np.random.default_rng(1)
  drawn = {
    name: [rng.normal(size=n) for n in packed.counts] for name in ("value_BT", "move")
  }
  logps = packed.read("logp_BT")
  moved = [x + 0.1 * y for x, y in zip(logps, drawn["move"], strict=True)]
  packed.write("reference_BT", moved)
  packed.write(
    "old_BT", [x - 0.1 * y for x, y in zip(logps, drawn["move"], strict=True)]
  )
  packed.write("value_BT", drawn["value_BT"])
  kl = None
  if config.kl_coef and config.kl_in == "reward":
    kl = [x - y for x, y in zip(logps, moved, strict=True)]
  advantage, returns = policy_loss.token_advantages(
    config, REWARD_GK, packed.counts, kl, drawn["value_BT"], owners=owners
  )
  packed.write("advantage_BT", advantage)
  packed.write("return_BT", returns or [np.zeros(n) for n in packed.counts])
  weights = policy_loss.aggregation_weights(config, packed.counts, LENGTH, owners)
  packed.write("loss_weight_BT", weights)
  return packed.batches


def pulled_back(partitioner: Partitioner, params, several: list[Batch]):
  """Returns losses [algorithms, then SFT], and their stacked gradients."""

  def outputs(p):
    logp_BT, *_ = log_probs.token_logps(
      CFG, p["trunk"], several[0], partitioner=partitioner
    )
    head_D1 = p["value_head"]
    return logp_BT, log_probs.token_values(
      CFG, p["trunk"], head_D1, several[0], partitioner
    )

  (logp_BT, value_BT), back = jax.vjp(outputs, params)
  values, ahead = [], []
  for config, batch in zip(ALGORITHMS.values(), several, strict=True):

    def total(logp_BT, value_BT, config=config, batch=batch):
      loss = policy_loss.policy_loss(config, logp_BT, batch)[0]
      if config.has_critic:
        args = (value_BT, batch.value_BT, batch.return_BT, config.value_clip)
        loss += jnp.sum(batch.loss_mask_BT * surrogates.value_loss(*args)[0])
      return loss

    value, cotangent = jax.value_and_grad(total, argnums=(0, 1))(logp_BT, value_BT)
    values.append(value)
    ahead.append(cotangent)
  ahead = jax.tree.map(lambda *x: jnp.stack(x), *ahead)
  grads = jax.lax.map(lambda x: back(x)[0], ahead)

  def sft(p):
    return cross_entropy(CFG, p["trunk"], several[0], partitioner)

  value, more = jax.value_and_grad(sft)(params)
  grads = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), grads, more)
  return jnp.stack([*values, value]), grads


def split(rows: int, length: int, mesh: MeshConfig | None, contexts: bool = False):
  """Returns losses and gradients per policy token, and the micro-batch count."""
  partitioner = ONE_DEVICE
  if mesh:
    devices = mesh.data * mesh.fsdp * mesh.context
    partitioner = make_partitioner(mesh, jax.devices()[:devices])
  head_D1 = 0.3 * jax.random.normal(jax.random.key(1), (CFG.width, 1))
  params = {"trunk": toy.params(layers=1, **DTYPES), "value_head": head_D1}
  params = jax.device_put(params, partitioner.tree(params))
  run = jax.jit(functools.partial(pulled_back, partitioner))
  micro = [batches(c, rows, length, contexts) for c in ALGORITHMS.values()]
  total = None
  for several in zip(*micro, strict=True):
    several = partitioner.put(list(several))
    out = jax.device_get(run(params, several))
    total = out if total is None else jax.tree.map(np.add, total, out)
  tokens = sum(float(b.loss_mask_BT.sum()) for b in micro[0])
  return jax.tree.map(lambda x: x / tokens, total), len(micro[0])


def updated(mesh: MeshConfig | None) -> list[dict[str, float]]:
  """Metrics from two PPO steps with critic, KL and importance weights."""
  fields = {"is_clip": 2.0, "kl_coef": 0.1, "critic_lr": 1e-3}
  loss = LossConfig(**PRESETS["ppo"] | fields)
  batch = BatchConfig(rows=4, length=128, minibatches=2)
  partitioner = make_partitioner(mesh) if mesh else ONE_DEVICE
  params = jax.tree.map(jnp.array, toy.params(layers=1, **DTYPES))
  params = jax.device_put(params, partitioner.tree(params))
  optim = OptimConfig(lr=1e-3, schedule="constant")
  update = PolicyUpdate(
    CFG,
    loss,
    batch,
    optim,
    None,
    partitioner,
    NO_TRUNCATION,
    steps=2,
    prompts=2,
    samples=4,
  )
  state, frozen = update.init(params, 0)
  groups = [copy.deepcopy(played()[:4]), copy.deepcopy(played()[4:])]
  for group, rewards in zip(groups, REWARD_GK.tolist(), strict=True):
    for t, reward in zip(group, rewards, strict=True):
      t.reward = reward
  out = []
  for _ in range(2):
    state, values = update(state, frozen, groups)
    out.append(values)
  if mesh:
    head = state.params["critic"]["value_head"]
    assert head.addressable_shards[0].data.shape[0] == CFG.width // mesh.fsdp
  return out


def main() -> None:
  """Writes all results."""
  longest = max(t.num_tokens for t in played())
  (expected, gradient), _ = split(8, longest, None)
  out = {}
  for name, how in {"some": SOME, "all": ALL}[sys.argv[2]].items():
    (values, grads), count = split(*how, contexts=name == IN_CONTEXTS)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True)
    off = np.max([np.abs(x - y).reshape(len(x), -1).max(1) for x, y in pairs], axis=0)
    sizes = [np.abs(y).reshape(len(y), -1).max(1) for y in jax.tree.leaves(gradient)]
    out[name] = {"micro_batches": count}
    for i, algorithm in enumerate([*ALGORITHMS, "sft"]):
      refused = algorithm != "sft" and ALGORITHMS[algorithm].needs_one_row
      if refused and name == IN_CONTEXTS:
        continue
      out[name][algorithm] = {
        "loss": float(expected[i]),
        "loss_off": float(abs(values[i] - expected[i])),
        "gradient": float(np.max(sizes, axis=0)[i]),
        "gradient_off": float(off[i]),
      }
    worst = max(v["gradient_off"] for v in out[name].values() if isinstance(v, dict))
    print(name, count, worst, flush=True)
  if sys.argv[2] == "all":
    meshes = {"one": None, "data 2 fsdp 2": MeshConfig(data=2, fsdp=2)}
    out["updates"] = {name: updated(mesh) for name, mesh in meshes.items()}
  with open(sys.argv[1], "w") as f:
    json.dump(out, f)


if __name__ == "__main__":
  main()

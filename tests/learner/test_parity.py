"""Losses, advantages, GAE and KL match verl, TRL and tunix to 1e-6.

The peers' results are committed (oracles/*.json), with the scripts that ran the peers'
own code on oracles/cases.json. An installed peer can run again (marker parity):

  VERL_PYTHON=... TRL_PYTHON=... TRL_PPO_PYTHON=... TUNIX_PYTHON=... \\
    python -m pytest -m parity tests/learner/test_parity.py

Each variable names an interpreter; the peer's script describes its environment.
TRL_PPO_PATH, if set, is a folder with trl 1.12.0, which is imported first.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.learner import batch as batching
from coa_jax.learner import policy_loss, surrogates
from coa_jax.learner.algorithms import LossConfig
from coa_jax.learner.batch import Batch
from coa_jax.learner.teachers import DistillationConfig, Teachers
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

ORACLES = pathlib.Path(__file__).parent / "oracles"
PEERS = ("verl", "trl", "trl_ppo", "tunix")
CASES = json.loads((ORACLES / "cases.json").read_text())
# As in oracles/oracle_io.py, which needs no JAX.
COMMON = dict(clip_low=0.2, clip_high=0.28, gamma=0.97, lam=0.9, horizon=12)
KL, VALUE_CLIP = 0.05, 0.5
VARIANTS: dict[str, dict] = {
  "clip": {},
  "dual": {"dual_clip": 3.0},
  "gspo": {"ratio": "sequence"},
  "cispo": {"surrogate": "cispo"},
  "cispo-upper": {"surrogate": "cispo", "clip_low": 1.0},
  "clip+k2": {"kl_coef": KL, "kl_estimator": "k2"},
  "clip+k3": {"kl_coef": KL, "kl_estimator": "k3"},
}
IMPORTANCE = {
  "token-truncate": ("token", "truncate", 2.0, 0.0),
  "sequence-truncate": ("sequence", "truncate", 2.0, 0.0),
  "token-mask": ("token", "mask", 2.0, 0.5),
  "sequence-mask": ("sequence", "mask", 3.0, 0.5),
}
for _name, (_level, _mode, _clip, _min) in IMPORTANCE.items():
  VARIANTS[f"clip+{_name}"] = dict(
    is_level=_level,
    is_mode=_mode,
    is_clip=_clip,
    is_min=_min,
  )
# (peer, case, prefix of the quantity): intended differences, with the reason.
DIFFERENT = {
  # k3 is clamped at 10, as in verl; tunix and TRL let it grow.
  ("tunix", "far", "kl/k3"),
  ("tunix", "far", "loss/clip+k3"),
  ("tunix", "far", "grad/clip+k3"),
  ("trl", "far", "loss/clip+k3"),
  ("trl", "far", "grad/clip+k3"),
  ("tunix", "hard", "kl/k3"),
  ("tunix", "hard", "loss/clip+k3"),
  ("tunix", "hard", "grad/clip+k3"),
  # tunix clamps a token's log-ratio before GSPO's mean; verl and TRL do not.
  ("tunix", "hard", "loss/gspo"),
  ("tunix", "hard", "grad/gspo"),
}


def arrays(case: str) -> dict[str, np.ndarray]:
  """The case's inputs."""
  return {k: np.array(v) for k, v in CASES[case].items()}


def batch_of(c: dict[str, np.ndarray], mask_BT: np.ndarray, share_B) -> Batch:
  """The case as one packed batch, one trajectory per row."""
  advantage_BT = c["advantage"][:, None] * mask_BT
  fields = {
    "segment_BT": np.ones(mask_BT.shape, np.int32),
    "loss_mask_BT": mask_BT,
    "loss_weight_BT": mask_BT * np.array(share_B)[:, None],
    "advantage_BT": advantage_BT,
    "old_BT": c["old"],
    "reference_BT": c["reference"],
    "value_BT": c["value"],
    "return_BT": c["return"],
  }
  floats = {k: jnp.asarray(v, jnp.float32) for k, v in fields.items()}
  floats["segment_BT"] = jnp.asarray(fields["segment_BT"])
  return batching.empty(*mask_BT.shape).replace(**floats)


@functools.cache
def policy(case: str, variant: str, mode: str, whole: bool = False):
  """Our loss and its gradient in the log-probs."""
  c = arrays(case)
  mask_BT = c["mask"]
  bounds = dict(COMMON)
  if whole:  # TRL's PPO: no observations, one bound
    mask_BT, bounds["clip_high"] = filled(mask_BT), 0.2
  config = LossConfig(**bounds | VARIANTS[variant], aggregation=mode)
  counts = mask_BT.sum(1).astype(int).tolist()
  batch = batch_of(
    c, mask_BT, policy_loss.aggregation_weights(config, counts, mask_BT.shape[1])
  )
  # The sampler is the old policy, unless importance weights distinguish the two.
  sampler = "sampler" if config.is_clip else "old"
  batch = batch.replace(logp_BT=jnp.asarray(c[sampler], jnp.float32))

  def loss(logp_BT):
    return policy_loss.policy_loss(config, logp_BT, batch)[0] / sum(counts)

  return jax.value_and_grad(loss)(jnp.asarray(c["logp"], jnp.float32))


def distillation(case: str):
  """Our loss from a teacher's scores alone, and its gradient in the log-probs."""
  c = arrays(case)
  mask_BT = c["mask"]
  trajectories, scores = [], {}
  for old_T, teacher_T, mask_T in zip(c["old"], c["reference"], mask_BT, strict=True):
    mine = mask_T > 0
    ids = [0] * int(mine.sum())
    policy = Segment(Author.POLICY, "", "", ids, old_T[mine].tolist())
    name = str(len(trajectories))
    trajectories.append(Trajectory(name, [policy]))
    scores[name] = teacher_T[mine]
  config = DistillationConfig(teacher="x", task=0.0)
  teachers = Teachers(
    config, {"x": lambda given, _: [scores[t.task_id] for t in given]}, lambda t: t
  )
  terms, _ = teachers.terms(trajectories, None)
  advantage_BT = np.zeros(mask_BT.shape)
  for row_T, mask_T, term in zip(advantage_BT, mask_BT, terms, strict=True):
    row_T[mask_T > 0] = term
  batch = batch_of(c, mask_BT, np.ones(len(mask_BT))).replace(
    advantage_BT=jnp.asarray(advantage_BT, jnp.float32),
    logp_BT=jnp.asarray(c["old"], jnp.float32),
  )

  def loss(logp_BT):
    total, _ = policy_loss.policy_loss(LossConfig(), logp_BT, batch)
    return total / mask_BT.sum()

  return jax.value_and_grad(loss)(batch.logp_BT)


def filled(mask_BT: np.ndarray) -> np.ndarray:
  """Ones up to a row's last policy token."""
  return (mask_BT[:, ::-1].cumsum(1)[:, ::-1] > 0).astype(float)


def token_advantages(case: str, name: str, whole: bool = False):
  """Our advantages and returns as [B, T], zero outside policy tokens."""
  c = arrays(case)
  mask_BT = filled(c["mask"]) if whole else c["mask"]
  in_reward = name in ("gae", "reinforce++")
  config = LossConfig(
    advantage=name, **COMMON, kl_coef=KL if in_reward else 0.0, kl_in="reward"
  )
  rows = [m > 0 for m in mask_BT]
  picked = {k: [c[k][i][r] for i, r in enumerate(rows)] for k in ("old", "reference")}
  kl = [surrogates.kl(a, b, "k1") for a, b in zip(*picked.values(), strict=True)]
  value = [v[r] for v, r in zip(c["value"], rows, strict=True)]
  counts = [int(r.sum()) for r in rows]
  out = policy_loss.token_advantages(
    config, c["reward"].reshape(2, 4), counts, kl if in_reward else None, value
  )

  def spread(parts):
    whole_BT = np.zeros(mask_BT.shape)
    for row, r, part in zip(whole_BT, rows, parts, strict=True):
      row[r] = part
    return whole_BT

  return [spread(parts) if parts else None for parts in out]


def ours(case: str, quantity: str, shape: tuple[int, ...]) -> np.ndarray:
  """Our result for a quantity, by the peers' name for it."""
  kind, name, *mode = quantity.split("/")
  c = arrays(case)
  whole = name.endswith("-whole")
  name = name.removesuffix("-whole")
  if name == "distillation":
    value, grad = distillation(case)
    return np.asarray(value if kind == "loss" else grad)
  if kind in ("loss", "grad"):
    value, grad = policy(case, name, mode[0] if mode else "token-mean", whole)
    return np.asarray(value if kind == "loss" else grad)
  if kind == "importance":
    loss_mask_BT = jnp.asarray(c["mask"], jnp.float32)
    log_BT = jnp.asarray(c["old"] - c["sampler"], jnp.float32)
    segment_BT = jnp.ones(loss_mask_BT.shape, jnp.int32)
    out, _ = surrogates.importance(log_BT, loss_mask_BT, segment_BT, *IMPORTANCE[name])
    return np.asarray(out) * c["mask"]
  if kind in ("kl", "kl-grad"):

    def total(logp_BT):
      kl_BT = surrogates.kl(logp_BT, jnp.asarray(c["reference"], jnp.float32), name)
      return (kl_BT * c["mask"]).sum(), kl_BT * c["mask"]

    gradient = jax.grad(total, has_aux=True)
    grad, kl_BT = gradient(jnp.asarray(c["logp"], jnp.float32))
    return np.asarray(kl_BT if kind == "kl" else grad)
  if kind == "value":
    mask_BT = filled(c["mask"]) if whole else c["mask"]
    batch = batch_of(c, mask_BT, np.ones(len(mask_BT)))

    def loss(value_BT):
      args = (value_BT, batch.value_BT, batch.return_BT, VALUE_CLIP)
      return jnp.sum(mask_BT * surrogates.value_loss(*args)[0]) / mask_BT.sum()

    new = jnp.asarray(c["new_value"], jnp.float32)
    return np.asarray(jax.value_and_grad(loss)(new)[("loss", "grad").index(name)])
  eps = name.removeprefix("grpo-") if name.startswith("grpo-") else None
  advantage_BT, return_BT = token_advantages(case, "grpo" if eps else name, whole)
  if kind == "return":
    return return_BT
  if len(shape) == 2:
    return advantage_BT
  # One number per row, also for rows without policy tokens.
  config = LossConfig(advantage="grpo" if eps else name)
  parts, _ = policy_loss.token_advantages(config, c["reward"].reshape(2, 4), [1] * 8)
  row_B = np.concatenate(parts)
  if eps:  # TRL adds a larger epsilon to the deviation
    std_B = np.repeat(c["reward"].reshape(2, 4).std(1, ddof=1), 4)
    row_B = row_B * (std_B + 1e-6) / (std_B + float(eps))
  return row_B


def check(peer: str, theirs: dict) -> int:
  """Compares a peer's quantities, except DIFFERENT; returns their number."""
  faults, count = [], 0
  for case, quantities in theirs.items():
    for quantity, value in quantities.items():
      if any((peer, case) == d[:2] and quantity.startswith(d[2]) for d in DIFFERENT):
        continue
      expected = np.array(value, np.float64)
      mine = ours(case, quantity, expected.shape)
      off = np.abs(mine - expected) / np.maximum(1, np.abs(expected))
      count += 1
      if off.shape != expected.shape or not off.max() <= 1e-6:
        faults.append(f"{case} {quantity}: off by {off.max():.1e}")
  assert not faults, "\n".join(faults)
  return count


@pytest.mark.parametrize("peer", PEERS)
def test_ours_is_what_the_peer_computed(peer: str):
  count = check(peer, json.loads((ORACLES / f"{peer}.json").read_text()))
  assert count >= {"verl": 200, "trl": 30, "trl_ppo": 10, "tunix": 60}[peer]


def test_stated_differences_from_a_peer_are_real():
  """A DIFFERENT entry without a difference must be deleted."""
  for peer, case, start in DIFFERENT:
    theirs = json.loads((ORACLES / f"{peer}.json").read_text())[case]
    found = {q: v for q, v in theirs.items() if q.startswith(start)}
    assert found
    off = [
      np.abs(ours(case, q, np.shape(v)) - np.array(v)).max() for q, v in found.items()
    ]
    assert max(off) > 1e-3, (peer, case, start)


def test_verls_defaults_are_not_ours_where_its_dual_clip_is_active():
  """A far off-policy batch: the losses match only with verl's dual clip bound."""
  theirs = json.loads((ORACLES / "verl.json").read_text())["far"]
  clip, dual = (float(policy("far", v, "token-mean")[0]) for v in ("clip", "dual"))
  assert theirs["loss/dual/token-mean"] == pytest.approx(dual, abs=1e-6)
  assert clip > 2 * dual


@pytest.mark.parity
@pytest.mark.parametrize("peer", PEERS)
def test_the_peer_still_computes_what_is_committed(peer: str):
  python = os.environ.get(f"{peer.upper()}_PYTHON")
  if not python:
    pytest.skip(f"{peer.upper()}_PYTHON names no interpreter")
  path = os.environ.get(f"{peer.upper()}_PATH", "")
  done = subprocess.run(
    [python, str(ORACLES / f"of_{peer}.py")],
    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    cwd=ORACLES,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  live = json.loads(done.stdout)
  committed = json.loads((ORACLES / f"{peer}.json").read_text())
  assert live.keys() == committed.keys()
  for case, quantities in committed.items():
    assert live[case].keys() == quantities.keys()
    for quantity, value in quantities.items():
      np.testing.assert_allclose(
        live[case][quantity], value, rtol=1e-6, atol=1e-6, err_msg=f"{case} {quantity}"
      )
  check(peer, live)

"""RL with separate rollout devices, on 8 virtual devices.

JAX reads their number at start, so the first test runs the others in a subprocess.
"""

from __future__ import annotations

import pathlib

import guessing
import jax
import ml_collections
import pytest
import toy
from started import run_tests_on_devices

from coa_jax import rl
from coa_jax.learner.update import PolicyUpdate
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.report.metrics import read_metrics

DEVICES = 8
STEPS = 3
on_devices = pytest.mark.skipif(
  jax.device_count() != DEVICES, reason="run by test_on_virtual_devices"
)


@pytest.mark.slow
def test_on_virtual_devices():
  if jax.device_count() == DEVICES:
    pytest.skip("this is that run")
  run_tests_on_devices(__file__, DEVICES)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  folder = tmp_path_factory.mktemp("policy")
  out = guessing.rl_config(folder, toy.ONE_LAYER, steps=100)
  out.algo.update(steps=STEPS, keep_every=1)
  out.dev.every = STEPS
  return out


def changed(config: ml_collections.ConfigDict, **sections) -> ml_collections.ConfigDict:
  out = config.copy_and_resolve_references()
  with out.unlocked():
    for name, changes in sections.items():
      out[name] = {**out.get(name, {}), **changes}
  return out


def results(workdir: pathlib.Path) -> tuple:
  """All tokens with log-probs and versions, and the trained model's file."""
  played = []
  for step in range(STEPS):
    for t in read_trajectories(workdir / "trajectories" / f"step_{step:06d}.jsonl"):
      played += [(s.ids, s.logps, s.versions) for s in t.segments]
  return played, (workdir / "model" / "model.safetensors").read_bytes()


@on_devices
def test_rollouts_on_devices_of_their_own_change_no_bit(config, tmp_path):
  together = changed(config, mesh=dict(devices=2))
  rl.run(together, str(tmp_path / "together"))
  apart = changed(config, mesh=dict(devices=4, rollout=2))
  rl.run(apart, str(tmp_path / "apart"))
  assert results(tmp_path / "apart") == results(tmp_path / "together")


@on_devices
def test_split_replicas_may_run_ahead_on_devices_of_their_own(config, tmp_path):
  """The learner runs beside two replicas of two devices each."""
  algo = {
    **config.algo,
    "sampling": {**config.algo.sampling, "staleness": 1},
    "loss": dict(is_clip=2.0),
  }
  ahead = changed(
    config, algo=algo, mesh=dict(tensor=2, devices=6, rollout=4), rollout=dict(tensor=2)
  )
  rl.run(ahead, str(tmp_path / "run"))
  log = read_metrics(f"{tmp_path}/run/metrics.jsonl", "rl")
  assert [row["step"] for row in log] == list(range(1, STEPS + 1))
  assert max(row["staleness_max"] for row in log) <= 1
  played, _ = results(tmp_path / "run")
  for ids, logps, versions in played:
    assert len(ids) == len(logps) or not logps
    assert set(versions) <= set(range(STEPS))
  # On shared devices the learner and a replica could deadlock.
  shared = changed(ahead, mesh=dict(rollout=0, devices=4))
  with pytest.raises(ValueError, match=r"staleness=1 does not go with replicas of 2 d"):
    rl.run(shared, str(tmp_path / "shared"))


@on_devices
def test_learning_has_the_devices_to_itself(config, tmp_path, monkeypatch):
  """During an update no KV cache, decode parameters or merged adapters are alive."""
  kept = jax.live_arrays()  # of other tests; held, so that no id is reused
  known = set(map(id, kept))
  left: list[tuple[int, ...]] = []
  steps: list[int] = []
  learn = PolicyUpdate.__call__

  def spy(self, state, frozen, groups):
    own = {id(x) for x in jax.tree.leaves((state, frozen))}
    for x in jax.live_arrays():
      # Integer arrays are the dialect's tables; each replica keeps them.
      if x.dtype == "float32" and x.nbytes > 1024 and id(x) not in own | known:
        left.append(x.shape)
    steps.append(int(state.step))
    return learn(self, state, frozen, groups)

  monkeypatch.setattr(PolicyUpdate, "__call__", spy)
  adapters = changed(config, lora=dict(rank=2), mesh=dict(devices=2))
  rl.run(adapters, str(tmp_path / "run"))
  assert steps == list(range(STEPS)) and not left

"""The journey with other algorithms: a critic survives a crash; every preset learns."""

from __future__ import annotations

import guessing
import ml_collections
import numpy as np
import pytest

from coa_jax import rl
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.report.metrics import Metrics, read_metrics
from coa_jax.report.timers import RATE


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """RL of a policy that guesses."""
  return guessing.rl_config(tmp_path_factory.mktemp("policy"))


def test_ppo_interrupted_goes_on_with_its_critic_bit_for_bit(
  config,
  tmp_path,
  monkeypatch,
):
  ppo = config.copy_and_resolve_references()
  # By the learner's own log-probs as old policy, with everything that this needs.
  more = dict(
    steps=3,
    batch=dict(minibatches=2),
    loss=dict(is_clip=2.0, critic_lr=1e-3),
  )
  with ppo.unlocked():
    ppo.algo.update(preset("ppo"))
    ppo.algo.update(more)
  ppo.dev.every, ppo.checkpoint.every = 8, 1
  rl.run(ppo, str(tmp_path / "whole"))

  real = Metrics.log

  def deadly(self, step, *args, **kwargs):
    if step == 3:
      raise KeyboardInterrupt
    return real(self, step, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(Metrics, "log", deadly)
    with pytest.raises(KeyboardInterrupt):
      rl.run(ppo, str(tmp_path / "broken"))
  rl.run(ppo, str(tmp_path / "broken"))
  logs = {}
  for name in ("whole", "broken"):
    rows = read_metrics(str(tmp_path / name / "metrics.jsonl"), "rl")
    assert [r["step"] for r in rows] == [1, 2, 3]
    logs[name] = [
      {k: v for k, v in r.items() if not k.startswith("seconds") and RATE not in k}
      for r in rows
    ]
  assert logs["whole"] == logs["broken"]
  assert all(
    {"value_loss", "reference_kl", "importance"} <= set(r) for r in logs["whole"]
  )
  files = [tmp_path / n / "model" / "model.safetensors" for n in logs]
  assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns(config, tmp_path, name: str):
  learning = config.copy_and_resolve_references()
  with learning.unlocked():
    learning.algo.update(preset(name))
    learning.algo.loss.critic_lr = 1e-3
  rl.run(learning, str(tmp_path))
  log = read_metrics(str(tmp_path / "metrics.jsonl"), "rl")
  reward = [row["reward"] for row in log]
  assert reward[0] < 0.75
  assert np.mean(reward[-5:]) > reward[0] + 0.15, reward

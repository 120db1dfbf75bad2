"""The journey with other algorithms: a critic survives a crash; every preset learns."""

from __future__ import annotations

import guessing
import ml_collections
import numpy as np
import pytest

from coa_jax import rl
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.report.metrics import read_metrics
from coa_jax.report.timers import RATE


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """RL of a policy that guesses."""
  return guessing.rl_config(tmp_path_factory.mktemp("policy"))


def test_ppo_interrupted_goes_on_with_its_critic_bit_for_bit(config, tmp_path):
  ppo = config.copy_and_resolve_references()
  # By the learner's own log-probs as old policy, with everything that this needs.
  more = dict(
    steps=2,
    batch=dict(minibatches=2),
    loss=dict(is_clip=2.0, critic_lr=1e-3),
  )
  with ppo.unlocked():
    ppo.algo.update(preset("ppo"))
    ppo.algo.update(more)
  ppo.dev.every, ppo.checkpoint.every = 8, 1
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  rl.run(ppo, str(whole))
  with guessing.killed_before_log_of(2):
    rl.run(ppo, str(broken))
  rl.run(ppo, str(broken))
  logs = []
  for workdir in (whole, broken):
    rows = read_metrics(str(workdir), "rl")
    for row in rows:
      times = ("seconds", "useful_seconds", "goodput")
      for name in [k for k in row if k.startswith(times) or RATE in k]:
        del row[name]
    logs.append(rows)
  assert logs[0] == logs[1] and [row["step"] for row in logs[0]] == [1, 2]
  assert {"value_loss", "reference_kl", "importance"} <= set(logs[0][0])
  model = "model/model.safetensors"
  assert (whole / model).read_bytes() == (broken / model).read_bytes()


# One of each kind: clips, a filter, ratios of sequences, whitening, a critic.
ONE_OF_EACH = ("grpo", "dapo", "gspo", "reinforce++", "ppo")


def marked(name: str):
  """A preset as a parameter of a test: slow, or soak where another is of its kind."""
  kind = "slow" if name in ONE_OF_EACH else "soak"
  return pytest.param(name, marks=getattr(pytest.mark, kind))


@pytest.mark.parametrize("name", map(marked, PRESETS))
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

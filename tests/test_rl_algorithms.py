"""RL with other algorithms: every preset learns."""

from __future__ import annotations

import guessing
import ml_collections
import numpy as np
import pytest

from coa_jax import rl
from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.report.metrics import read_metrics


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """RL of a policy that guesses."""
  return guessing.rl_config(tmp_path_factory.mktemp("policy"))


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

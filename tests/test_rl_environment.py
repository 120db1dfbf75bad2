"""RL on an environment's reward: a policy that walks at random learns the way."""

from __future__ import annotations

import json

import guessing
import ml_collections
import numpy as np
import pytest
import toy

from coa_jax import rl
from coa_jax.protocol import roles, tool_bodies
from coa_jax.report.metrics import read_metrics
from coa_jax.runtime.config import ConfigError

pytestmark = pytest.mark.slow

QUESTIONS = ("sky", "sea")
RIGHT = "up"


class Walk:
  """Knows the way, which no answer tells."""

  def reset(self, task):
    self.gone = []

  def go(self, way):
    self.gone.append(way)
    return f"step {len(self.gone)}"

  def reward(self):
    return float(self.gone == [RIGHT])


def go(way: str) -> str:
  think = roles.wrap(roles.THINK, "on")
  return think + roles.wrap(
    "tool", tool_bodies.render_function_call("go", {"way": way})
  )


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """Walks up or down, and always answers the same."""
  folder = tmp_path_factory.mktemp("policy")
  examples = [
    toy.written(question, (go(way), "step 1", toy.end("done")), toy.tokenizer())
    for question in QUESTIONS
    for way in (RIGHT, "down")
  ]
  toy.save_policy(str(folder / "walker"), toy.train(examples, 300).params)
  tasks = folder / "tasks.jsonl"
  rows = [{"id": q, "question": q, "answers": ["done"]} for q in QUESTIONS]
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = guessing.rl_config(folder)
  config.init = str(folder / "walker")
  config.tasks.uri = config.dev.uri = str(tasks)
  config.tools = dict(
    tools=(),
    environment=dict(path=f"{__name__}:Walk", functions=dict(go="walks; way")),
  )
  return config


def test_it_learns_the_way(config, tmp_path):
  results = rl.run(config, str(tmp_path))
  answers = [row["answer"] for row in read_metrics(f"{tmp_path}/metrics.jsonl", "rl")]
  assert 0.2 < answers[0] < 0.8
  assert np.mean(answers[-5:]) > 0.9
  assert results["dev_accuracy"] == 1.0


def test_a_hinted_teacher_is_refused(config, tmp_path):
  """It would read a prompt without the environment's text."""
  hinted = config.copy_and_resolve_references()
  with hinted.unlocked():
    hinted.distillation = dict(hint="{answers}")
    hinted.algo.sampling.filter_groups = False
  with pytest.raises(ConfigError, match=r"section tools\.environment writes others"):
    rl.run(hinted, str(tmp_path))


def test_killed_and_resumed_it_is_the_same_run(config, tmp_path):
  guessing.check_resume(config, tmp_path)

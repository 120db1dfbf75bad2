"""RL of agents with their own loop: guessing policies learn the right answers."""

from __future__ import annotations

import guessing
import ml_collections
import numpy as np
import openai
import pytest
import toy

from coa_jax import evaluate, rl
from coa_jax.protocol.tokens import IM_END
from coa_jax.protocol.trajectory import Author, Segment, Trajectory, read_trajectories
from coa_jax.report.metrics import read_metrics
from coa_jax.rollout.agents.worker import Client
from coa_jax.runtime.config import ConfigError

pytestmark = pytest.mark.slow


def caller(task: dict, client: Client) -> str | None:
  """Answers every call with 5."""
  llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
  messages: list = [{"role": "user", "content": task["question"]}]
  for _ in range(4):
    reply = llm.chat.completions.create(model=client.model, messages=messages)
    message = reply.choices[0].message
    if not message.tool_calls:
      return message.content
    messages.append(message)
    for call in message.tool_calls:
      messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
  return None


def asker(task: dict, client: Client) -> str | None:
  """Asks once."""
  llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
  messages: list = [{"role": "user", "content": task["question"]}]
  reply = llm.chat.completions.create(model=client.model, messages=messages)
  return reply.choices[0].message.content


def chatty(question: str, answer: str) -> Trajectory:
  prompt = Segment(Author.PROMPT, "question", question)
  t = Trajectory(question, [prompt, Segment(Author.POLICY, "", answer + IM_END)])
  toy.tokenizer().encode_trajectories([t])
  return t


@pytest.fixture(scope="module")
def team(tmp_path_factory) -> ml_collections.ConfigDict:
  config = guessing.rl_config(tmp_path_factory.mktemp("team"))
  config.agent = dict(path=f"{__name__}:caller", format="team")
  return config


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ml_collections.ConfigDict:
  folder = tmp_path_factory.mktemp("chat")
  config = guessing.rl_config(folder)
  examples = [chatty(q, a) for q in guessing.RIGHT for a in ("red", "blue")]
  toy.save_policy(str(folder / "chat"), toy.train(examples, 200).params)
  config.init = str(folder / "chat")
  config.agent = dict(path=f"{__name__}:asker", format="chat")
  config.reward = dict(shaping=dict(format="none"))
  return config


@pytest.mark.parametrize("name", ["team", "chat"])
def test_it_learns_the_answers(name, request, tmp_path):
  config = request.getfixturevalue(name)
  results = rl.run(config, str(tmp_path))
  answers = [row["answer"] for row in read_metrics(f"{tmp_path}/metrics.jsonl", "rl")]
  assert 0.2 < answers[0] < 0.8
  assert np.mean(answers[-5:]) > 0.9
  assert results["dev_accuracy"] == 1.0 and results["logp_diff"] < 1e-5
  (file,) = (tmp_path / "trajectories").glob("step_000000*")
  for t in read_trajectories(file):
    assert t.meta["ambiguous_joins"] == 0 and len(t.split()) == 1


def test_killed_and_resumed_it_is_the_same_run(team, tmp_path):
  guessing.check_resume(team, tmp_path)


def test_an_evaluation_plays_by_the_agent(team, tmp_path):
  config = ml_collections.ConfigDict(
    {name: team[name] for name in ("init", "model", "rollout", "tools", "tasks")}
  )
  config.agent = team.agent
  config.eval = dict(samples=3)
  results = evaluate.run(config, str(tmp_path))
  assert results["tasks"] == 2 and results["best_of_3"] is not None
  played = read_trajectories(tmp_path / "sampled.jsonl")
  assert [t.meta["agent_answer"] in ("red", "blue") for t in played] == [True] * 6
  assert {t.reward_parts["answer"] for t in played} <= {0.0, 1.0}


REFUSED = [
  (
    {"agent.path": "nowhere:solve"},
    "agent.path 'nowhere:solve' cannot be imported: Mod",
  ),
  ({"agent.path": "solve"}, "must be module:function"),
  ({"agent.format": "chat"}, "reward.shaping.format='product'"),
  ({"rollout.context.count": 2, "rollout.context.leave_at": 64}, "take 1"),
  ({"algo.loss.advantage": "gae"}, "an agent .section agent. may spread them"),
  (
    {"distillation.hint": "{answers}", "algo.sampling.filter_groups": False},
    "hint is added to prompts with the task's question alone; section agent",
  ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_config_that_fits_no_agent_is_refused(team, tmp_path, changes, words):
  config = team.copy_and_resolve_references()
  with config.unlocked():
    for name, value in changes.items():
      section, _, field = name.rpartition(".")
      target = config
      for part in section.split("."):
        if part not in target:
          target[part] = ml_collections.ConfigDict()
        target = target[part]
      target[field] = value
  with pytest.raises((ValueError, ConfigError), match=words):
    rl.run(config, str(tmp_path))

"""Tasksets of the real package `verifiers`, in our loop and in theirs.

The package needs an environment of its own: `PYTHONPATH=.:SITE_PACKAGES pytest ...`.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading

import guessing
import ml_collections
import numpy as np
import pytest
import toy
from test_environments import call, play, results, tools

from coa_jax import rl
from coa_jax.data.tasks.task import Task
from coa_jax.protocol import prompts, roles
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  Trajectory,
  read_trajectories,
)
from coa_jax.report.metrics import read_metrics
from coa_jax.rollout.agents.worker import Client
from coa_jax.tools.toolbox import Toolbox

pytest.importorskip("verifiers.v1")

import guess_taskset

from experiments import play_verifiers

TASKSET = guess_taskset.__name__
ROWS = list(play_verifiers.rows(TASKSET))
ROW = ROWS[1]
Game = play_verifiers.environment(TASKSET)


def test_tool_calls_are_steps_and_the_rewards_count():
  config = tools(f"{__name__}:Game", dict(compare="compares; its argument is number"))
  task = Task.from_json(ROW, "row")
  turns = [call("compare", number=5), call("compare", number=-1), call("compare")]
  rewards = []
  with Toolbox(config) as toolbox:
    for answer in ("8", "7"):
      t = play(task, [*turns, toy.end(answer)], toolbox, config)
      rewards.append(t.reward_parts["answer"])
    more = [call("compare", number=n) for n in range(3)]
    slow = play(task, [*more, toy.end("8")], toolbox, config)
  assert t.segments[0].text == "Ask.\n\nWhich number?"
  right, negative, missing = results(t)
  assert right == (CallStatus.OK, "larger")
  assert negative == (CallStatus.MODEL, "error: the number is not below 0")
  assert missing[0] == CallStatus.MODEL and "compare takes" in missing[1]
  # Two weighted rewards; one reads the state that the tool has changed.
  assert [*rewards, slow.reward_parts["answer"]] == [1.0, 0.25, 0.75]


def test_a_task_that_needs_a_machine_is_refused(monkeypatch):
  async def right(self, trace, runtime):
    return 1.0

  right.reward = True
  monkeypatch.setattr(guess_taskset.GuessTask, "right", right)
  with pytest.raises(ValueError, match="right needs a runtime"):
    play_verifiers.environment(TASKSET)


class Model(http.server.BaseHTTPRequestHandler):
  """Compares with 5, then answers 8."""

  def do_POST(self):
    request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    assert self.headers["Authorization"] == "Bearer key"
    delta = {"role": "assistant", "content": "8"}
    reason = "stop"
    if request["messages"][-1]["role"] != "tool":
      function = {"name": "compare", "arguments": '{"number": 5}'}
      made = {"index": 0, "id": "c", "type": "function", "function": function}
      delta = {"role": "assistant", "tool_calls": [made]}
      reason = "tool_calls"
    assert request["stream"]
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    chunk = {"id": "r", "object": "chat.completion.chunk", "created": 0}
    chunk |= {"model": "policy", "choices": [choice]}
    self.send_response(200)
    self.send_header("Content-Type", "text/event-stream")
    self.end_headers()
    self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())


@pytest.mark.slow
def test_their_loop_plays_with_our_policy_as_the_model(monkeypatch):
  """Their harness installs packages by uv; their tool server imports the taskset."""
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  client = Client(f"http://127.0.0.1:{server.server_port}/v1", "key")
  assert play_verifiers.solve(ROW, client) == 1.0
  server.shutdown()


# RL of a policy that compares with 5, then guesses 3 or 8.

COMPARE = dict(compare="compares; its argument is number")


@pytest.fixture(scope="module")
def guesser(tmp_path_factory) -> ml_collections.ConfigDict:
  variant = roles.get_variant("unified").with_tools({"tool:compare": ""})
  examples = []
  for result in ("larger", "not larger"):
    for answer in ("3", "8"):
      t = Trajectory(result, prompts.prompt_segments(variant, ROW["question"], "brief"))
      observation = roles.wrap(roles.OBSERVATION, result)
      t.segments += [
        Segment(Author.POLICY, "", call("compare", number=5)),
        Segment(Author.TOOL, roles.OBSERVATION, observation),
        Segment(Author.POLICY, "", toy.end(answer)),
      ]
      toy.tokenizer().encode_trajectories([t])
      examples.append(t)
  folder = tmp_path_factory.mktemp("guesser")
  config = guessing.rl_config(folder)
  toy.save_policy(str(folder / "guesser"), toy.train(examples, 300).params)
  config.init = str(folder / "guesser")
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  config.tasks.uri = config.dev.uri = str(folder / "rows.jsonl")
  return config


@pytest.mark.slow
def test_rl_learns_a_taskset_in_our_loop(guesser, tmp_path):
  config = guesser.copy_and_resolve_references()
  environment = dict(path=f"{__name__}:Game", functions=COMPARE)
  config.tools = dict(tools=(), environment=environment)
  results = rl.run(config, str(tmp_path))
  answers = [row["answer"] for row in read_metrics(f"{tmp_path}/metrics.jsonl", "rl")]
  assert 0.4 < answers[0] < 0.85  # a guess has 0.625
  assert np.mean(answers[-5:]) > 0.9 and results["dev_accuracy"] == 1.0


def unused(number: int) -> str:
  raise AssertionError("verifiers calls its own tool")


@pytest.mark.slow
def test_rl_trains_on_their_loop(guesser, tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
  config = guesser.copy_and_resolve_references()
  compare = dict(description=COMPARE["compare"], function=f"{__name__}:unused")
  config.tools = dict(tools=("tool",), functions=dict(compare=compare))
  config.agent = dict(path="experiments.play_verifiers:solve", format="team")
  config.algo.steps = config.algo.keep_every = config.dev.every = 1
  config.algo.sampling.samples = 4
  rl.run(config, str(tmp_path))
  (file,) = (tmp_path / "trajectories").iterdir()
  played = list(read_trajectories(file))
  assert len(played) == 8
  for t in played:
    (compared,) = t.calls
    assert compared.result == ("larger" if t.task_id == ROW["id"] else "not larger")
    assert t.reward_parts["answer"] in (0.25, 1.0)

"""Tasksets of the real package `verifiers`, in our loop and in theirs.

The package needs an environment of its own: `PYTHONPATH=.:SITE_PACKAGES pytest ...`.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import sys
import threading

import pytest
import toy
from test_environments import call, play, results, tools

from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rollout.agents.worker import Client
from coa_jax.tools.toolbox import Toolbox

pytest.importorskip("verifiers.v1")

import guess_taskset

from experiments import play_verifiers

TASKSET = guess_taskset.__name__
ROW = list(play_verifiers.rows(TASKSET))[1]
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
  assert asyncio.run(play_verifiers.solve(ROW, client)) == 1.0
  server.shutdown()

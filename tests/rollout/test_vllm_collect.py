"""Rollouts ahead of the learner over vLLM: whose tokens they are, and how old."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import toy
from playing import keep_all, versions
from scripted_vllm import ScriptedVllm, vllm_worker

from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.protocol.trajectory import Status
from coa_jax.rollout.collect import RolloutCollector, ages
from coa_jax.rollout.types import SamplingConfig

SAMPLING = SamplingConfig(prompts=2, samples=2, rounds=1, staleness=1)
STEPS = 5
PIECE = 6  # tokens of a request


@pytest.fixture
def server(server: ScriptedVllm) -> ScriptedVllm:
  """The scripted server; its log-probs tell how often it loaded weights.

  A log-prob is that of `scripted_vllm`, and as many nats less as it had loads then.
  """

  def tell(body: dict):
    loads = len(server.disturbed)

    def change(answer: dict) -> dict:
      logprobs = answer["choices"][0]["logprobs"]
      logprobs["token_logprobs"] = [p - loads for p in logprobs["token_logprobs"]]
      return answer

    return change

  server.faults = tell
  return server


def policy(version: int) -> dict:
  """Other weights under every version."""
  params = toy.params()
  return {**params, "final_norm": params["final_norm"] * (1 + version / 10)}


def make(on, toolbox, steps: int = STEPS, **changes) -> RolloutCollector:
  config = dataclasses.replace(SAMPLING, **changes)
  tasks = TaskSampler(toy.TASKS, 0)
  return RolloutCollector(on, tasks, toolbox, config, keep_all, steps=steps, seed=3)


def check(trajectories) -> None:
  """Every token carries the version that was served, and a whole script was written."""
  for t in trajectories:
    assert (t.status, t.reward) == (Status.ENDED, 1.0)
    logps = toy.sampled_logps(t)
    assert [int(-p) - 1 for p in logps] == versions(t) == sorted(versions(t))


@pytest.mark.parametrize("staleness", [1, 2])
def test_every_token_is_of_the_policy_that_was_served_and_none_too_old(
  server, tmp_path, staleness
):
  on = vllm_worker(server, tmp_path, PIECE)
  tools = toy.TableToolbox(latency=toy.shuffled_latency(1))
  seen, oldest = [], 0
  with make(on, tools, staleness=staleness) as collector:
    for step in range(STEPS):
      batch = collector.next(policy(step), step)
      seen += [batch.played[:2], batch.played[2:]]
      oldest = max([oldest, *ages(batch.groups, step)])
  assert 1 <= oldest <= staleness
  played = [t for group in seen for t in group]
  check(played)
  task_sampler = TaskSampler(toy.TASKS, 0)
  expected = [task_sampler.task(n, 0).id for n in range(len(seen))]
  assert [group[0].task_id for group in seen] == expected and len(seen) == 10
  # Weights never change under a request, and are loaded once a version.
  assert server.disturbed == [0] * STEPS
  assert max(body["max_tokens"] for body in server.completions()) == PIECE
  sampled = on.engine.counters.sampled_tokens
  assert sampled == sum(t.usage.generated for t in played)


def test_a_turn_goes_on_with_the_newer_policy(server, tmp_path):
  gate, requested, logps_of_loads = threading.Event(), threading.Event(), server.faults

  def wait(body: dict):
    requested.set()
    assert gate.wait(60)
    return logps_of_loads(body)

  server.faults = wait
  on = vllm_worker(server, tmp_path, PIECE, slots=4)
  with make(on, toy.TableToolbox(), steps=2) as collector:
    collector.set_policy(policy(0), 0)
    assert requested.wait(60)
    collector.set_policy(policy(1), 1)
    gate.set()
    played = collector.next(policy(1), 1).played
  check(played)
  for t in played:
    first, rest = versions(t)[:PIECE], versions(t)[PIECE:]
    assert first == [0] * PIECE and set(rest) == {1}


def test_an_evaluation_among_rollouts_is_of_one_policy(server, tmp_path):
  on = vllm_worker(server, tmp_path, PIECE)
  with make(on, toy.TableToolbox(latency=toy.shuffled_latency(2))) as collector:
    collector.next(policy(0), 0)
    played = collector.evaluate(policy(1), 1, toy.TASKS, toy.TableToolbox())
    collector.next(policy(1), 1)
  check(played)
  assert {v for t in played for v in versions(t)} == {1}
  assert server.disturbed == [0, 0]

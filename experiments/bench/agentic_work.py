"""What the contestants of `bench.agentic` do: turns of a model with tools in between.

  PYTHON -m experiments.bench.agentic_work CONTESTANT FOLDER   (bench.agentic starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench import rollout_work as plain
from experiments.bench.worker import Turn, serve


@dataclasses.dataclass(frozen=True)
class Plan:
  """What every trajectory does.

  Attributes:
    prompts: ids of each.
    new: tokens of a turn of the model.
    observations: of each trajectory, the ids that every call returns.
    seconds: of each trajectory, how long every call takes.
  """

  prompts: list[list[int]]
  new: int
  observations: list[list[list[int]]]
  seconds: list[list[float]]


def make_plan(job: dict[str, Any], trajectories: int, latency: bool) -> Plan:
  """The same for everyone: calls of 0.1 to 0.3 seconds, or of none."""
  rng, V = np.random.default_rng(1), job["model"]["vocab_size"]
  shape = (trajectories, job["calls"])
  return Plan(
    prompts=plain.prompts(trajectories, job["prompt"], V),
    new=job["new"],
    observations=rng.integers(0, V, (*shape, job["observation"])).tolist(),
    seconds=(rng.uniform(0.1, 0.3, shape) * latency).tolist(),
  )


class Tools:
  """Calls that take their time; as many at once as there are trajectories."""

  def __init__(self, plan: Plan):
    self.plan = plan
    self._pool = concurrent.futures.ThreadPoolExecutor(len(plan.prompts))

  def start(self, i: int, call: int) -> concurrent.futures.Future[list[int]]:
    """The future of trajectory i's n-th call."""
    return self._pool.submit(self._call, i, call)

  def _call(self, i: int, call: int) -> list[int]:
    time.sleep(self.plan.seconds[i][call])
    return self.plan.observations[i][call]


# Plays a plan; returns every trajectory's last turn, and what it counted.
Play = Callable[[Plan], tuple[list[list[int]], dict[str, float]]]


def ours(folder: str, job: dict[str, Any]) -> Play:
  """One slot a trajectory, whose cache is kept while its tool runs."""
  config = dict(max_len=job["length"], window=8, inject_rows=4)
  engine, params = plain.our_engine(
    *plain.our_model(folder, job), job["trajectories"], **config
  )

  def play(plan: Plan) -> tuple[list[list[int]], dict[str, float]]:
    tools = Tools(plan)
    before = engine.counters
    episodes = []
    for i, prompt in enumerate(plan.prompts):
      calls = [lambda i=i, n=n: tools.start(i, n) for n in range(len(plan.seconds[i]))]
      episodes.append(plain.Turns(i, prompt, plan.new, calls))
    plain.play(engine, params, episodes)
    done = engine.counters.since(before)
    utilisation = done.sampled_tokens / done.slot_steps
    counted = {"prefilled": done.prefilled_tokens, "utilisation": utilisation}
    return [e.new[-1] for e in episodes], counted

  return play


def vllm(folder: str, job: dict[str, Any]) -> Play:
  """A request a turn; what was before it comes from the prefix cache."""
  engine = plain.vllm_engine(
    folder, job, max_model_len=job["length"], enable_prefix_caching=True
  ).llm_engine

  def play(plan: Plan) -> tuple[list[list[int]], dict[str, float]]:
    engine.reset_prefix_cache()  # of the turn before, with the same prompts
    tools, sampling = Tools(plan), plain.vllm_sampling(plan.new)
    ids = [list(p) for p in plan.prompts]
    last: list[list[int]] = [[] for _ in ids]
    turn, waiting, prefilled = [0] * len(ids), {}, 0

    def ask(i: int) -> None:
      engine.add_request(f"{i}", {"prompt_token_ids": list(ids[i])}, sampling)

    for i in range(len(ids)):
      ask(i)
    while waiting or engine.has_unfinished_requests():
      if not engine.has_unfinished_requests():
        concurrent.futures.wait(waiting, return_when="FIRST_COMPLETED")
      for future in [f for f in waiting if f.done()]:
        i = waiting.pop(future)
        ids[i] += future.result()
        ask(i)
      for out in engine.step():
        if out.finished:
          i = int(out.request_id)
          last[i] = list(out.outputs[0].token_ids)
          prefilled += len(ids[i]) - (out.num_cached_tokens or 0)
          ids[i] += last[i]
          turn[i] += 1
          if turn[i] <= len(plan.seconds[i]):
            waiting[tools.start(i, turn[i] - 1)] = i
    return last, {"prefilled": prefilled}

  return play


def tunix(folder: str, job: dict[str, Any]) -> Play:
  """Turns in step: all generate, all tools run, and everything is prefilled again."""
  engine = plain.tunix_engine(folder, job, job["length"])

  def play(plan: Plan) -> tuple[list[list[int]], dict[str, float]]:
    tools, prefilled = Tools(plan), 0
    ids = [list(p) for p in plan.prompts]
    for turn in range(len(plan.seconds[0]) + 1):
      prefilled += sum(map(len, ids))
      last = plain.tunix_generate(engine, ids, plan.new)
      ids = [a + b for a, b in zip(ids, last, strict=True)]
      if turn < len(plan.seconds[0]):
        futures = [tools.start(i, turn) for i in range(len(ids))]
        ids = [a + f.result() for a, f in zip(ids, futures, strict=True)]
    return last, {"prefilled": prefilled}

  return play


CONTESTANTS = {"ours": ours, "vllm": vllm, "tunix": tunix}


def start(name: str, folder: str) -> Turn:
  """A contestant's turn: {"latency": bool} plays all trajectories once."""
  with open(os.path.join(folder, plain.JOB), encoding="utf-8") as f:
    job = json.load(f)
  if name == "ours":
    plain.use_cores(job)
  play = CONTESTANTS[name](folder, job)

  def turn(latency: bool) -> dict[str, Any]:
    last, counted = play(make_plan(job, job["trajectories"], latency))
    return {"first": [ids[:16] for ids in last], "counted": counted}

  return turn


if __name__ == "__main__":
  serve(lambda: start(*sys.argv[1:]))

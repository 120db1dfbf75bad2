"""What the contestants of `bench.rl` do: steps of agentic GRPO on the same work.

  PYTHON -m experiments.bench.rl_work CONTESTANT FOLDER   (bench.rl starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.bench import agentic_work as agentic
from experiments.bench import rollout_work as plain
from experiments.bench.worker import Turn, serve

LR, DECAY, CLIP = 1e-5, 0.1, 1.0
ROWS = 8  # of a micro-batch, for all

# Makes so many steps with tools that take time, or none; the first turns' ids of the
# last step's trajectories, and seconds by phase.
Steps = Callable[[int, bool], tuple[list[list[int]], dict[str, float]]]


def make_plan(job: dict[str, Any], latency: bool) -> agentic.Plan:
  """Groups of trajectories with one prompt each; every one gets its own observations.

  The id 0 is in none of them: it is the peer's padding.
  """
  trajectories = job["prompts"] * job["samples"]
  plan = agentic.make_plan(job, trajectories, latency)
  prompts = [[i or 1 for i in p] for p in plan.prompts[: job["prompts"]]]
  return dataclasses.replace(
    plan,
    prompts=[p for p in prompts for _ in range(job["samples"])],
    observations=[[[i or 1 for i in o] for o in os] for os in plan.observations],
  )


def reward(trajectory: int) -> float:
  """Every other sample of a group is right."""
  return float(trajectory % 2)


def ours(folder: str, job: dict[str, Any]) -> Steps:
  """This project's scheduler and learner, as `rl.run` uses them."""
  import jax

  from coa_jax.learner.algorithms import BatchConfig, LossConfig
  from coa_jax.learner.optim import OptimConfig
  from coa_jax.learner.update import PolicyUpdate
  from coa_jax.model.distribution import NO_TRUNCATION
  from coa_jax.model.sharding import MeshConfig, make_partitioner
  from coa_jax.protocol.trajectory import Author, Segment, Trajectory

  model, params, automaton = plain.our_model(folder, job)
  size = job["prompts"] * job["samples"]
  config = dict(max_len=job["length"], window=16, inject_rows=4)
  engine, params = plain.our_engine(model, params, automaton, size, **config)
  loss = LossConfig(clip_high=0.2)
  batch = BatchConfig(rows=min(ROWS, size), length=job["length"])
  optim = OptimConfig(
    lr=LR, schedule="constant", weight_decay=DECAY, clip_norm=CLIP, b2=0.95
  )
  devices = jax.devices()[: jax.device_count() if size % jax.device_count() == 0 else 1]
  partitioner = make_partitioner(MeshConfig(), devices)
  learner = PolicyUpdate(
    model,
    loss,
    batch,
    optim,
    None,
    partitioner,
    NO_TRUNCATION,
    steps=1000,
    prompts=job["prompts"],
    samples=job["samples"],
  )
  state, frozen = learner.init(params, 0)
  del params

  class Recorded(plain.Turns):
    """Keeps what the learner needs."""

    def __init__(self, i: int, plan: agentic.Plan, tools: agentic.Tools):
      calls = len(plan.seconds[i])
      starts = [lambda n=n: tools.start(i, n) for n in range(calls)]
      super().__init__(i, plan.prompts[i], plan.new, starts)
      self.segments = [Segment(Author.PROMPT, "", "", ids=plan.prompts[i])]

    def sampled(self, ids: list[int], logps: list[float], tag: None) -> Any:
      self.segments.append(Segment(Author.POLICY, "", "", ids, logps))
      return super().sampled(ids, logps, tag)

    def observed(self, result: list[int]) -> list[int]:
      self.segments.append(Segment(Author.TOOL, "", "", ids=result))
      return super().observed(result)

  def steps(count: int, latency: bool) -> tuple[list[list[int]], dict[str, float]]:
    nonlocal state
    plan, phases = make_plan(job, latency), dict.fromkeys(("rollout", "learn"), 0.0)
    before = engine.timings
    for _ in range(count):
      began = time.perf_counter()
      tools = agentic.Tools(plan)
      played = [Recorded(i, plan, tools) for i in range(size)]
      plain.play(engine, learner.policy(state, frozen), played)
      groups = [[] for _ in range(job["prompts"])]
      for e in played:
        g, i = divmod(e.sequence, job["samples"])
        t = Trajectory(f"{g}", e.segments, sample=i, reward=reward(i))
        groups[g].append(t)
      phases["rollout"] += time.perf_counter() - began
      began = time.perf_counter()
      state, _ = learner(state, frozen, groups)
      jax.block_until_ready(state)
      phases["learn"] += time.perf_counter() - began
    inside = engine.timings.since(before)
    del inside["idle"]  # while it learns
    other = phases["rollout"] - sum(inside.values())
    phases = {**inside, "learn": phases["learn"], "other": other}
    return [e.new[-1] for e in played], phases

  return steps


def tunix(folder: str, job: dict[str, Any], in_step: bool = False) -> Steps:
  """See `bench_rl_tunix`, which is imported in the peer's interpreter only."""
  from experiments.bench import rl_tunix

  return rl_tunix.tunix(folder, job, in_step)


CONTESTANTS: dict[str, Callable[[str, dict[str, Any]], Steps]] = {
  "ours": ours,
  "tunix": tunix,
  "tunix in step": lambda folder, job: tunix(folder, job, in_step=True),
}


def start(name: str, folder: str) -> Turn:
  """A contestant's turn: {"steps": n, "latency": bool}; training goes on from turn to
  turn.
  """
  with open(os.path.join(folder, plain.JOB), encoding="utf-8") as f:
    job = json.load(f)
  if name == "ours":
    plain.use_cores(job)
  make = CONTESTANTS[name](folder, job)

  def turn(steps: int, latency: bool) -> dict[str, Any]:
    last, phases = make(steps, latency)
    return {"first": [ids[:16] for ids in last], "phases": phases}

  return turn


if __name__ == "__main__":
  serve(lambda: start(*sys.argv[1:]))

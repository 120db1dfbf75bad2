"""Contestants for `bench.agentic`: model turns with tools in between.

  PYTHON -m experiments.bench.agentic_work CONTESTANT FOLDER   (bench.agentic starts it)

A peer's interpreter runs this file too: it imports neither JAX nor our code at the top.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench import rollout_work as plain
from experiments.bench.peers import Turn, serve


@dataclasses.dataclass(frozen=True)
class TrajectoryPlan:
  """A plan for all trajectories.

  `new` is the tokens per turn. The other fields are per trajectory, the last two also
  per call.
  """

  prompts: list[list[int]]
  new: int
  observations: list[list[list[int]]]
  seconds: list[list[float]]


def make_plan(job: dict[str, Any], trajectories: int, latency: bool) -> TrajectoryPlan:
  """The shared plan: calls take 0.1 to 0.3 seconds, or no time."""
  rng = np.random.default_rng(1)
  V = job["model"]["vocab_size"]
  shape = (trajectories, job["calls"])
  return TrajectoryPlan(
    prompts=plain.prompts(trajectories, job["prompt"], V),
    new=job["new"],
    observations=rng.integers(0, V, (*shape, job["observation"])).tolist(),
    seconds=(rng.uniform(0.1, 0.3, shape) * latency).tolist(),
  )


class TimedTools:
  """Runs timed calls, one thread per trajectory."""

  def __init__(self, plan: TrajectoryPlan):
    self.plan = plan
    self._pool = concurrent.futures.ThreadPoolExecutor(len(plan.prompts))

  def start(self, i: int, call: int) -> concurrent.futures.Future[list[int]]:
    """Starts a call for trajectory i; returns its future."""
    return self._pool.submit(self._call, i, call)

  def calls(self, i: int) -> list[Callable[[], concurrent.futures.Future[list[int]]]]:
    """Returns functions that start trajectory i's calls, in order."""
    count = len(self.plan.seconds[i])
    return [functools.partial(self.start, i, n) for n in range(count)]

  def _call(self, i: int, call: int) -> list[int]:
    time.sleep(self.plan.seconds[i][call])
    return self.plan.observations[i][call]


# Plays a plan; returns each trajectory's last turn, and counts.
Play = Callable[[TrajectoryPlan], tuple[list[list[int]], dict[str, float]]]


def ours(folder: str, job: dict[str, Any]) -> Play:
  """One slot per trajectory; its cache stays while its tool runs."""
  cfg, params, automaton = plain.our_model(folder, job)
  engine, params = plain.our_engine(
    cfg,
    params,
    automaton,
    job["trajectories"],
    max_len=job["length"],
    window=8,
    prefill_rows=4,
  )

  def play(plan: TrajectoryPlan) -> tuple[list[list[int]], dict[str, float]]:
    tools = TimedTools(plan)
    before = engine.counters
    episodes = []
    for i, prompt in enumerate(plan.prompts):
      episodes.append(plain.GreedyEpisode(i, prompt, plan.new, tools.calls(i)))
    plain.play(engine, params, episodes)
    done = engine.counters.since(before)
    utilisation = done.sampled_tokens / done.slot_steps
    counted = {"prefilled": done.prefilled_tokens, "utilisation": utilisation}
    return [e.new[-1] for e in episodes], counted

  return play


def vllm(folder: str, job: dict[str, Any]) -> Play:
  """One request per turn, with the earlier tokens from the prefix cache."""
  engine = plain.vllm_engine(
    folder, job, max_model_len=job["length"], enable_prefix_caching=True
  ).llm_engine

  def play(plan: TrajectoryPlan) -> tuple[list[list[int]], dict[str, float]]:
    engine.reset_prefix_cache()  # an earlier turn had the same prompts
    tools = TimedTools(plan)
    sampling = plain.vllm_sampling(plan.new)
    # Per trajectory: all ids, last turn's ids, number of turns.
    ids = list(map(list, plan.prompts))
    last: list[list[int]] = [[]] * len(ids)
    turn = [0] * len(ids)
    waiting = {}  # a call's future -> trajectory
    prefilled = 0

    def request_turn(i: int) -> None:
      engine.add_request(f"{i}", {"prompt_token_ids": list(ids[i])}, sampling)

    for i in range(len(ids)):
      request_turn(i)
    # --- The engine steps while it has work; ended calls become requests.
    while waiting or engine.has_unfinished_requests():
      if not engine.has_unfinished_requests():
        concurrent.futures.wait(waiting, return_when="FIRST_COMPLETED")
      for future in [f for f in waiting if f.done()]:
        i = waiting.pop(future)
        ids[i] += future.result()
        request_turn(i)
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
  """Turns in step: all generate, all tools run, all tokens are prefilled again."""
  engine = plain.tunix_engine(folder, job, job["length"])

  def play(plan: TrajectoryPlan) -> tuple[list[list[int]], dict[str, float]]:
    tools = TimedTools(plan)
    prefilled = 0
    ids = list(map(list, plan.prompts))
    for turn in range(len(plan.seconds[0]) + 1):
      # --- All generate.
      prefilled += sum(map(len, ids))
      last = plain.tunix_generate(engine, ids, plan.new)
      for own, new in zip(ids, last, strict=True):
        own += new
      if turn == len(plan.seconds[0]):
        break
      # --- All tools run at once.
      futures = [tools.start(i, turn) for i in range(len(ids))]
      for own, future in zip(ids, futures, strict=True):
        own += future.result()
    return last, {"prefilled": prefilled}

  return play


CONTESTANTS = {"ours": ours, "vllm": vllm, "tunix": tunix}


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A contestant's turn: {"latency": bool} plays all trajectories once."""
  if name == "ours":
    plain.use_cores(job)
  play = CONTESTANTS[name](folder, job)

  def turn(latency: bool) -> dict[str, Any]:
    last, counted = play(make_plan(job, job["trajectories"], latency))
    return {"first": [ids[:16] for ids in last], "counted": counted}

  return turn


if __name__ == "__main__":
  serve(start)

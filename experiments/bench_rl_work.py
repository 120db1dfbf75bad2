"""What the contestants of `bench_rl` do: steps of agentic GRPO on the same work.

  PYTHON -m experiments.bench_rl_work CONTESTANT FOLDER   (bench_rl starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments import bench_agentic_work as agentic
from experiments import bench_rollout_work as plain
from experiments.bench_server import Turn, serve

_LR, _DECAY, _CLIP = 1e-5, 0.1, 1.0
_ROWS = 8  # of a micro-batch, for all

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

  from coa_jax.learner.algorithms import AlgoConfig
  from coa_jax.learner.optim import OptimConfig
  from coa_jax.learner.update import PolicyUpdate
  from coa_jax.model.distribution import NO_TRUNCATION
  from coa_jax.model.sharding import MeshConfig, make_layout
  from coa_jax.protocol.trajectory import Author, Segment, Trajectory

  model, params, automaton = plain.our_model(folder, job)
  size = job["prompts"] * job["samples"]
  config = dict(max_len=job["length"], window=16, inject_rows=8)
  scheduler, params = plain.our_scheduler(model, params, automaton, size, **config)
  algo = AlgoConfig(
    steps=1000,
    prompts=job["prompts"],
    samples=job["samples"],
    filter_groups=False,
    clip_high=0.2,
    rows=min(_ROWS, size),
    length=job["length"],
  )
  optim = OptimConfig(
    lr=_LR, schedule="constant", weight_decay=_DECAY, clip_norm=_CLIP, b2=0.95
  )
  devices = jax.devices()[: jax.device_count() if size % jax.device_count() == 0 else 1]
  layout = make_layout(MeshConfig(), devices)
  learner = PolicyUpdate(model, algo, optim, None, layout, NO_TRUNCATION)
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
    before = scheduler.spent
    for _ in range(count):
      began = time.perf_counter()
      tools = agentic.Tools(plan)
      played = [Recorded(i, plan, tools) for i in range(size)]
      for _ in scheduler.run(learner.policy(state, frozen), played, 0):
        pass
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
    inside = scheduler.spent.since(before)
    other = phases["rollout"] - sum(inside.values())
    phases = {**inside, "learn": phases["learn"], "other": other}
    return [e.new[-1] for e in played], phases

  return steps


def tunix(folder: str, job: dict[str, Any], in_step: bool = False) -> Steps:
  """tunix's agentic GRPO learner over its Qwen3 and its own ("vanilla") sampler.

  Args:
    folder: see `start`.
    job: see `start`.
    in_step: whether we put the turns of all trajectories together, into one call of
      the sampler; the learner calls it for every trajectory by itself.
  """
  import jax
  import jax.numpy as jnp
  import optax
  from flax import nnx
  from tunix.models.qwen3 import params as loading
  from tunix.rl import rl_cluster
  from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner
  from tunix.rl.agentic.environments import base_environment
  from tunix.rl.rollout import base_rollout

  from experiments.bench_train_contestants import tunix_config

  path = os.path.join(folder, plain.MODEL)
  config = tunix_config(path, "NONE")
  model = loading.create_model_from_safe_tensors(path, config, dtype=jnp.float32)
  size, groups = job["prompts"] * job["samples"], job["prompts"]
  # One more than is sampled, or the learner drops the last turn as out of room.
  response = job["length"] - job["prompt"] + 1
  micro = max(1, min(groups, _ROWS // job["samples"]))
  optimizer = optax.chain(
    optax.clip_by_global_norm(_CLIP),
    optax.adamw(
      _LR,
      b1=0.9,
      b2=0.95,
      weight_decay=_DECAY,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  cluster = rl_cluster.RLCluster(
    actor=model,
    tokenizer=_Numbers(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={
        role: mesh for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT)
      },
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer,
        eval_every_n_steps=1_000_000,
        mini_batch_size=groups,
        train_micro_batch_size=micro,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=response,
        max_prompt_length=job["prompt"],
        # The sampler rounds longer prompts up to a power of 2.
        kv_cache_size=(1 << (job["length"] - 1).bit_length()) + job["new"],
        temperature=1.0,
        top_p=None,  # greedy
        return_logprobs=True,
      ),
    ),
  )
  phases: dict[str, float] = {}
  plan: list[agentic.Plan] = []  # of the turn that is made
  last: list[list[int]] = [[] for _ in range(size)]

  def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
      began = time.perf_counter()
      out = call(*args, **kwargs)
      phases[name] = phases.get(name, 0.0) + time.perf_counter() - began
      return out

    return wrapped

  cluster.update_actor = timed("learn", cluster.update_actor)

  class Environment(base_environment.BaseTaskEnv):
    """Answers turn n with the plan's n-th observation, after its time."""

    def __init__(self, example: dict[str, Any], **kwargs: Any):
      super().__init__(task=example, max_steps=job["calls"] + 1, **kwargs)

    def _initial_observation(self) -> dict[str, Any]:
      return self.task

    def _step_impl(self, action: Any) -> base_environment.EnvStepResult:
      kwargs, turn = self.extra_kwargs, self.step_count - 1
      i = kwargs["group_id"] % groups * job["samples"] + kwargs["pair_index"]
      if turn == job["calls"]:
        last[i] = [int(x) for x in str(getattr(action, "action", action)).split()]
        right = reward(kwargs["pair_index"])
        return base_environment.EnvStepResult("", right, True, {})
      time.sleep(plan[-1].seconds[i][turn])
      said = " ".join(map(str, plan[-1].observations[i][turn]))
      return base_environment.EnvStepResult(said, 0.0, False, {})

  class Learner(GRPOLearner):
    """With turns of a fixed length."""

    def _model_call(self, chat_lists: Any, env: Any = None, **unused: Any) -> Any:
      if not in_step:
        return super()._model_call(chat_lists, env, max_generation_steps=job["new"])
      env.task["policy_version"] = self.policy_version
      return together(self.chat_parser.parse(chat_lists))

  together = _Together(
    size, lambda texts: cluster.generate(texts, max_generation_steps=job["new"])
  )
  learner = Learner(
    cluster,
    GRPOConfig(
      num_generations=job["samples"],
      max_response_length=response,
      max_concurrency=size,
      beta=0.0,
      epsilon=0.2,
      loss_agg_mode="token-mean",
    ),
    chat_parser=_Parser(),
    env_class=Environment,
  )
  wanted: queue.Queue[int] = queue.Queue()
  made: queue.Queue[BaseException | None] = queue.Queue()

  def batches() -> Iterator[dict[str, Any]]:
    """The learner asks for a batch when the step before is done, and waits here."""
    while True:
      for _ in range(wanted.get()):
        texts = [" ".join(map(str, p)) for p in plan[-1].prompts[:: job["samples"]]]
        yield {"prompts": texts}
      timed("learn", jax.block_until_ready)(nnx.state(cluster.actor_trainer.model))
      made.put(None)

  def work() -> None:
    try:
      learner.train(batches())
      made.put(ValueError("tunix's learner ended"))
    except BaseException as e:
      made.put(e)

  threading.Thread(target=work, daemon=True).start()

  def steps(count: int, latency: bool) -> tuple[list[list[int]], dict[str, float]]:
    phases.clear()
    plan[:] = [make_plan(job, latency)]
    began = time.perf_counter()
    wanted.put(count)
    failed = made.get()
    if failed:
      raise failed
    rest = time.perf_counter() - began - phases["learn"]
    return [list(x) for x in last], {"learn": phases["learn"], "other": rest}

  return steps


class _Numbers:
  """A tokenizer of ids written as numbers, for tunix. No sequence ends."""

  def encode(self, text: str, **unused: Any) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Any, **unused: Any) -> str:
    return " ".join(str(int(i)) for i in ids)

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return 1 << 30

  def pad_id(self) -> int:
    return 0


class _Parser:
  """A chat template with nothing between the messages."""

  def parse(self, messages: Any, *unused: Any, **also_unused: Any) -> str:
    texts = (str(np.asarray(m["content"]).item()) for m in messages)
    return " ".join(text for text in texts if text)


class _Together:
  """Calls of several threads as one call of a batch, once all of them wait."""

  def __init__(self, size: int, generate: Callable[[list[str]], Any]):
    """Args: how many threads; what continues a list of prompts."""
    self._generate, self._texts = generate, [""] * size
    self._taken = itertools.count()
    self._size, self._out = size, None
    self._barrier = threading.Barrier(size, self._call)

  def _call(self) -> None:
    self._taken = itertools.count()
    self._out = self._generate(list(self._texts))

  def __call__(self, text: str) -> Any:
    """Returns what the sampler gives for one prompt."""
    place = next(self._taken)
    self._texts[place] = text
    self._barrier.wait()
    out = self._out
    one = slice(place, place + 1)
    return dataclasses.replace(
      out,
      text=out.text[one],
      tokens=out.tokens[one],
      left_padded_prompt_tokens=out.left_padded_prompt_tokens[one],
      logprobs=out.logprobs[one],
    )


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
    plain.use_all_cores()
  make = CONTESTANTS[name](folder, job)

  def turn(steps: int, latency: bool) -> dict[str, Any]:
    last, phases = make(steps, latency)
    return {"first": [ids[:16] for ids in last], "phases": phases}

  return turn


if __name__ == "__main__":
  serve(lambda: start(*sys.argv[1:]))

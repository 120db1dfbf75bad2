"""Contestants for `bench.rl`: agentic GRPO steps on the same work.

  PYTHON -m experiments.bench.rl_work CONTESTANT FOLDER   (bench.rl starts it)

A peer's interpreter runs this file too: it imports neither JAX nor our code at the top.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.bench import agentic_work as agentic
from experiments.bench import rollout_work as plain
from experiments.bench.peers import Turn, serve
from experiments.bench.train_work import tunix_config, tunix_optimizer

# AdamW's settings and the gradient clipping norm.
_LR = 1e-5
_DECAY = 0.1
_B2 = 0.95
_CLIP = 1.0
_ROWS = 8  # per micro-batch, for all

# Whether tools take time -> every trajectory's last-turn ids, and seconds by phase.
Step = Callable[[bool], tuple[list[list[int]], dict[str, float]]]


def make_plan(job: dict[str, Any], latency: bool) -> agentic.TrajectoryPlan:
  """Plans trajectory groups: one prompt per group, different observations.

  No id is 0, the peer's padding.
  """
  trajectories = job["prompts"] * job["samples"]
  plan = agentic.make_plan(job, trajectories, latency)
  prompts = np.repeat(plan.prompts[: job["prompts"]], job["samples"], axis=0)
  return dataclasses.replace(
    plan,
    prompts=np.maximum(prompts, 1).tolist(),
    observations=np.maximum(plan.observations, 1).tolist(),
  )


def reward(trajectory: int) -> float:
  """Returns 1 for every other sample in a group, else 0."""
  return float(trajectory % 2)


def _our_learner(model: Any, job: dict[str, Any]) -> Any:
  """The policy update, on all devices if these divide the trajectories, else on one."""
  import jax

  from coa_jax.learner.algorithms import BatchConfig, LossConfig
  from coa_jax.learner.optim import OptimConfig
  from coa_jax.learner.update import PolicyUpdate
  from coa_jax.model.distribution import NO_TRUNCATION
  from coa_jax.model.sharding import MeshConfig, make_partitioner

  size = job["prompts"] * job["samples"]
  count = jax.device_count() if size % jax.device_count() == 0 else 1
  return PolicyUpdate(
    model,
    LossConfig(clip_high=0.2),
    BatchConfig(rows=min(_ROWS, size), length=job["length"]),
    OptimConfig(
      lr=_LR, schedule="constant", weight_decay=_DECAY, clip_norm=_CLIP, b2=_B2
    ),
    None,
    make_partitioner(MeshConfig(), jax.devices()[:count]),
    NO_TRUNCATION,
    steps=1000,
    prompts=job["prompts"],
    samples=job["samples"],
  )


def ours(folder: str, job: dict[str, Any]) -> Step:
  """This project's scheduler and learner, as in `rl.run`."""
  import jax

  from coa_jax.protocol.trajectory import Author, Segment, Trajectory

  model, params, automaton = plain.our_model(folder, job)
  size = job["prompts"] * job["samples"]
  engine, params = plain.our_engine(
    model, params, automaton, size, max_len=job["length"], window=16, prefill_rows=4
  )
  learner = _our_learner(model, job)
  state, frozen = learner.init(params, 0)
  del params

  class Recorded(plain.GreedyEpisode):
    """Keeps the learner's inputs."""

    def __init__(self, i: int, plan: agentic.TrajectoryPlan, tools: agentic.TimedTools):
      super().__init__(i, plan.prompts[i], plan.new, tools.calls(i))
      self.segments = [Segment(Author.PROMPT, "", "", ids=plan.prompts[i])]

    def sampled(self, ids: list[int], logps: list[float], tag: None) -> Any:
      self.segments.append(Segment(Author.POLICY, "", "", ids, logps))
      return super().sampled(ids, logps, tag)

    def observed(self, result: list[int]) -> list[int]:
      self.segments.append(Segment(Author.TOOL, "", "", ids=result))
      return super().observed(result)

  def step(latency: bool) -> tuple[list[list[int]], dict[str, float]]:
    nonlocal state
    plan = make_plan(job, latency)
    before = engine.timings

    # --- Roll out.
    began = time.perf_counter()
    tools = agentic.TimedTools(plan)
    episodes = [Recorded(i, plan, tools) for i in range(size)]
    plain.play(engine, learner.policy(state, frozen), episodes)
    groups = [[] for _ in range(job["prompts"])]
    for e in episodes:
      g, i = divmod(e.sequence, job["samples"])
      groups[g].append(Trajectory(f"{g}", e.segments, sample=i, reward=reward(i)))
    rollout_s = time.perf_counter() - began

    # --- Learn.
    began = time.perf_counter()
    state, _ = learner(state, frozen, groups)
    jax.block_until_ready(state)
    learn_s = time.perf_counter() - began

    # --- Time by phase; rollout time without a phase is the host's.
    phases = engine.timings.since(before)
    del phases["idle"]  # while the learner works
    other_s = rollout_s - sum(phases.values())
    phases |= {"learn": learn_s, "other": other_s}
    return [e.new[-1] for e in episodes], phases

  return step


# tunix reads and writes text. Id 0 pads; the end id is outside every vocabulary.
_NUMBERS = plain.NumberTokenizer(end=1 << 30, pad=0)


class _StepState:
  """The input and output of tunix's learner threads.

  `last` has each trajectory's last-turn ids; `learn` has the trainer's seconds.
  """

  def __init__(self, trajectories: int):
    self.plan: agentic.TrajectoryPlan | None = None
    self.last: list[list[int]] = [[] for _ in range(trajectories)]
    self.learn = 0.0

  def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a call, counting its seconds as learning."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
      began = time.perf_counter()
      out = call(*args, **kwargs)
      self.learn += time.perf_counter() - began
      return out

    return wrapped


def tunix(folder: str, job: dict[str, Any], in_step: bool) -> Step:
  """tunix's agentic GRPO learner over its Qwen3 and its own ("vanilla") sampler.

  Args:
    folder: contains the model folder.
    job: the work; see `bench.rl.measure`.
    in_step: whether one sampler call batches all trajectories' turns; the learner
      itself calls the sampler per trajectory.
  """
  import jax
  from flax import nnx

  # --- The learner, with its trainer's time measured.
  shared = _StepState(job["prompts"] * job["samples"])
  cluster = _cluster(folder, job)
  cluster.update_actor = shared.timed(cluster.update_actor)
  learner = _learner(cluster, job, _environment(job, shared), in_step)

  # --- The learner trains in a separate thread, which waits between steps.
  requests: queue.Queue[None] = queue.Queue()
  endings: queue.Queue[BaseException | None] = queue.Queue()  # None: done

  def batches() -> Iterator[dict[str, Any]]:
    """Yields each step's batch; the learner waits here for the next step."""
    while True:
      requests.get()
      texts = [" ".join(map(str, p)) for p in shared.plan.prompts[:: job["samples"]]]
      yield {"prompts": texts}
      shared.timed(jax.block_until_ready)(nnx.state(cluster.actor_trainer.model))
      endings.put(None)

  def work() -> None:
    try:
      learner.train(batches())
      endings.put(ValueError("tunix's learner ended"))
    except BaseException as e:  # raised again by the caller of a step
      endings.put(e)

  threading.Thread(target=work, daemon=True).start()

  def step(latency: bool) -> tuple[list[list[int]], dict[str, float]]:
    shared.plan = make_plan(job, latency)
    shared.learn = 0.0
    began = time.perf_counter()
    requests.put(None)
    failure = endings.get()
    if failure:
      raise failure
    rest = time.perf_counter() - began - shared.learn
    return [list(x) for x in shared.last], {"learn": shared.learn, "other": rest}

  return step


def _cluster(folder: str, job: dict[str, Any]) -> Any:
  """tunix's model, trainer and sampler, on one device."""
  import jax
  import jax.numpy as jnp
  from tunix.models.qwen3 import params as loading
  from tunix.rl import rl_cluster
  from tunix.rl.rollout import base_rollout

  path = os.path.join(folder, plain.MODEL)
  config = tunix_config(path, "NONE")
  optimizer = tunix_optimizer(_LR, _DECAY, 0.9, _B2, _CLIP)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  roles = rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT
  return rl_cluster.RLCluster(
    actor=loading.create_model_from_safe_tensors(path, config, dtype=jnp.float32),
    tokenizer=_NUMBERS,
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(roles, mesh),
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer,
        eval_every_n_steps=1_000_000,
        mini_batch_size=job["prompts"],
        train_micro_batch_size=max(1, min(job["prompts"], _ROWS // job["samples"])),
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=_response(job),
        max_prompt_length=job["prompt"],
        # The sampler rounds longer prompts up to a power of 2.
        kv_cache_size=(1 << (job["length"] - 1).bit_length()) + job["new"],
        temperature=1.0,
        top_p=None,  # greedy
        return_logprobs=True,
      ),
    ),
  )


def _response(job: dict[str, Any]) -> int:
  """One token more than sampled, or the learner drops the last turn as too long."""
  return job["length"] - job["prompt"] + 1


def _environment(job: dict[str, Any], step: _StepState) -> type:
  """Makes an environment class; turn n gets the plan's n-th observation."""
  from tunix.rl.agentic.environments import base_environment

  class Environment(base_environment.BaseTaskEnv):
    """Waits for the plan's call time."""

    def __init__(self, example: dict[str, Any], **kwargs: Any):
      super().__init__(task=example, max_steps=job["calls"] + 1, **kwargs)

    def _initial_observation(self) -> dict[str, Any]:
      return self.task

    def _step_impl(self, action: Any) -> base_environment.EnvStepResult:
      sample = self.extra_kwargs["pair_index"]
      group = self.extra_kwargs["group_id"] % job["prompts"]
      i = group * job["samples"] + sample
      turn = self.step_count - 1
      if turn == job["calls"]:
        step.last[i] = _NUMBERS.encode(str(getattr(action, "action", action)))
        return base_environment.EnvStepResult("", reward(sample), True, {})
      time.sleep(step.plan.seconds[i][turn])
      text = _NUMBERS.decode(step.plan.observations[i][turn])
      return base_environment.EnvStepResult(text, 0.0, False, {})

  return Environment


def _learner(
  cluster: Any, job: dict[str, Any], environment: type, in_step: bool
) -> Any:
  """tunix's agentic learner, with fixed-length turns."""
  from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner

  size = job["prompts"] * job["samples"]
  together = BatchedCalls(
    size, lambda texts: cluster.generate(texts, max_generation_steps=job["new"])
  )

  class FixedTurnsLearner(GRPOLearner):
    """Samples fixed-length turns; with `in_step` batches the sampler calls."""

    def _model_call(self, chat_lists: Any, env: Any = None, **unused: Any) -> Any:
      if not in_step:
        return super()._model_call(chat_lists, env, max_generation_steps=job["new"])
      env.task["policy_version"] = self.policy_version
      return together(self.chat_parser.parse(chat_lists))

  return FixedTurnsLearner(
    cluster,
    GRPOConfig(
      num_generations=job["samples"],
      max_response_length=_response(job),
      max_concurrency=size,
      beta=0.0,
      epsilon=0.2,
      loss_agg_mode="token-mean",
    ),
    chat_parser=PlainTemplate(),
    env_class=environment,
  )


class PlainTemplate:
  """A chat template with nothing between the messages."""

  def parse(self, messages: Any, *unused: Any, **also_unused: Any) -> str:
    texts = (str(np.asarray(m["content"]).item()) for m in messages)
    return " ".join(filter(None, texts))


class BatchedCalls:
  """Batches several threads' calls into one, once all of them wait."""

  def __init__(self, size: int, generate: Callable[[list[str]], Any]):
    """Args: the number of threads; a function that continues a list of prompts."""
    self._generate = generate
    self._texts = [""] * size
    self._indices = itertools.count()  # one per waiting thread
    self._out: Any = None
    self._barrier = threading.Barrier(size, self._call)

  def _call(self) -> None:
    self._indices = itertools.count()
    self._out = self._generate(list(self._texts))

  def __call__(self, text: str) -> Any:
    """Returns the sampler's result for one prompt."""
    index = next(self._indices)
    self._texts[index] = text
    self._barrier.wait()
    out = self._out
    one = slice(index, index + 1)
    return dataclasses.replace(
      out,
      text=out.text[one],
      tokens=out.tokens[one],
      left_padded_prompt_tokens=out.left_padded_prompt_tokens[one],
      logprobs=out.logprobs[one],
    )


CONTESTANTS: dict[str, Callable[[str, dict[str, Any]], Step]] = {
  "ours": ours,
  "tunix": functools.partial(tunix, in_step=False),
  "tunix in step": functools.partial(tunix, in_step=True),
}


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A contestant's turn: {"latency": bool} makes one step; training continues."""
  if name == "ours":
    plain.use_cores(job)
  step = CONTESTANTS[name](folder, job)

  def turn(latency: bool) -> dict[str, Any]:
    last, phases = step(latency)
    return {"first": [ids[:16] for ids in last], "phases": phases}

  return turn


if __name__ == "__main__":
  serve(start)

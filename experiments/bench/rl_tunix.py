"""tunix as a contestant of `bench.rl`: its agentic GRPO learner, as it is and in step.

tunix is imported inside functions: only the peer's interpreter has it.
"""

from __future__ import annotations

import dataclasses
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
from experiments.bench.rl_work import CLIP, DECAY, LR, ROWS, Steps, make_plan, reward


class _Now:
  """What the learner's threads play, and what came of it.

  Attributes:
    plan: of the step that is made.
    last: of every trajectory, the ids of its last turn.
    learn: seconds in the trainer.
  """

  def __init__(self, trajectories: int):
    self.plan: agentic.Plan | None = None
    self.last: list[list[int]] = [[] for _ in range(trajectories)]
    self.learn = 0.0

  def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with its seconds counted as learning."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
      began = time.perf_counter()
      out = call(*args, **kwargs)
      self.learn += time.perf_counter() - began
      return out

    return wrapped


def tunix(folder: str, job: dict[str, Any], in_step: bool) -> Steps:
  """tunix's agentic GRPO learner over its Qwen3 and its own ("vanilla") sampler.

  Args:
    folder: holds the model's.
    job: what is played; see `bench.rl.measure`.
    in_step: whether we put the turns of all trajectories together, into one call of
      the sampler; the learner calls it for every trajectory by itself.
  """
  import jax
  from flax import nnx

  now = _Now(job["prompts"] * job["samples"])
  cluster = _cluster(folder, job)
  cluster.update_actor = now.timed(cluster.update_actor)
  learner = _learner(cluster, job, _environment(job, now), in_step)
  wanted: queue.Queue[int] = queue.Queue()
  made: queue.Queue[BaseException | None] = queue.Queue()

  def batches() -> Iterator[dict[str, Any]]:
    """The learner asks for a batch when the step before is done, and waits here."""
    while True:
      for _ in range(wanted.get()):
        texts = [" ".join(map(str, p)) for p in now.plan.prompts[:: job["samples"]]]
        yield {"prompts": texts}
      now.timed(jax.block_until_ready)(nnx.state(cluster.actor_trainer.model))
      made.put(None)

  def work() -> None:
    try:
      learner.train(batches())
      made.put(ValueError("tunix's learner ended"))
    except BaseException as e:  # raised again where a step was asked for
      made.put(e)

  threading.Thread(target=work, daemon=True).start()

  def steps(count: int, latency: bool) -> tuple[list[list[int]], dict[str, float]]:
    now.plan, now.learn = make_plan(job, latency), 0.0
    began = time.perf_counter()
    wanted.put(count)
    failed = made.get()
    if failed:
      raise failed
    rest = time.perf_counter() - began - now.learn
    return [list(x) for x in now.last], {"learn": now.learn, "other": rest}

  return steps


def _cluster(folder: str, job: dict[str, Any]) -> Any:
  """tunix's model, trainer and sampler, on one device."""
  import jax
  import jax.numpy as jnp
  import optax
  from tunix.models.qwen3 import params as loading
  from tunix.rl import rl_cluster
  from tunix.rl.rollout import base_rollout

  from experiments.bench.train_peers import tunix_config

  path = os.path.join(folder, plain.MODEL)
  config = tunix_config(path, "NONE")
  optimizer = optax.chain(
    optax.clip_by_global_norm(CLIP),
    optax.adamw(
      LR,
      b1=0.9,
      b2=0.95,
      weight_decay=DECAY,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  roles = rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT
  return rl_cluster.RLCluster(
    actor=loading.create_model_from_safe_tensors(path, config, dtype=jnp.float32),
    tokenizer=Numbers(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(roles, mesh),
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer,
        eval_every_n_steps=1_000_000,
        mini_batch_size=job["prompts"],
        train_micro_batch_size=max(1, min(job["prompts"], ROWS // job["samples"])),
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
  """One more than is sampled, or the learner drops the last turn as out of room."""
  return job["length"] - job["prompt"] + 1


def _environment(job: dict[str, Any], now: _Now) -> type:
  """The class of environments that answer turn n with the plan's n-th observation."""
  from tunix.rl.agentic.environments import base_environment

  class Environment(base_environment.BaseTaskEnv):
    """Takes the plan's time for a call."""

    def __init__(self, example: dict[str, Any], **kwargs: Any):
      super().__init__(task=example, max_steps=job["calls"] + 1, **kwargs)

    def _initial_observation(self) -> dict[str, Any]:
      return self.task

    def _step_impl(self, action: Any) -> base_environment.EnvStepResult:
      kwargs, turn = self.extra_kwargs, self.step_count - 1
      group = kwargs["group_id"] % job["prompts"]
      i = group * job["samples"] + kwargs["pair_index"]
      if turn == job["calls"]:
        now.last[i] = Numbers().encode(str(getattr(action, "action", action)))
        right = reward(kwargs["pair_index"])
        return base_environment.EnvStepResult("", right, True, {})
      time.sleep(now.plan.seconds[i][turn])
      said = Numbers().decode(now.plan.observations[i][turn])
      return base_environment.EnvStepResult(said, 0.0, False, {})

  return Environment


def _learner(
  cluster: Any, job: dict[str, Any], environment: type, in_step: bool
) -> Any:
  """Its agentic learner, whose turns have a fixed length."""
  from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner

  size = job["prompts"] * job["samples"]
  together = Together(
    size, lambda texts: cluster.generate(texts, max_generation_steps=job["new"])
  )

  class Learner(GRPOLearner):
    """With turns of a fixed length."""

    def _model_call(self, chat_lists: Any, env: Any = None, **unused: Any) -> Any:
      if not in_step:
        return super()._model_call(chat_lists, env, max_generation_steps=job["new"])
      env.task["policy_version"] = self.policy_version
      return together(self.chat_parser.parse(chat_lists))

  return Learner(
    cluster,
    GRPOConfig(
      num_generations=job["samples"],
      max_response_length=_response(job),
      max_concurrency=size,
      beta=0.0,
      epsilon=0.2,
      loss_agg_mode="token-mean",
    ),
    chat_parser=Template(),
    env_class=environment,
  )


class Numbers:
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


class Template:
  """A chat template with nothing between the messages."""

  def parse(self, messages: Any, *unused: Any, **also_unused: Any) -> str:
    texts = (str(np.asarray(m["content"]).item()) for m in messages)
    return " ".join(text for text in texts if text)


class Together:
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

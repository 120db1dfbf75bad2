"""A policy that plays tasks, through whatever engine samples for it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from coa_jax.model import sizes
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Layout
from coa_jax.protocol import prompts, roles
from coa_jax.protocol.grammar.automaton import compile_constraint, compile_stops
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rewards.grader import Grader
from coa_jax.rollout.episode import CoAEpisode, Replay, Setting
from coa_jax.rollout.replicas import Scheduler
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.vllm.engine import VllmConfig, VllmEngine
from coa_jax.tasks.task import Task
from coa_jax.tools.journal import ToolJournal, Tools
from coa_jax.tools.toolbox import Toolbox


def gathered(value: Any) -> list[Any]:
  """A JSON value of every process, in their order; all have to call this."""
  if jax.process_count() == 1:
    return [value]
  own = json.dumps(value).encode()
  gather = multihost_utils.process_allgather
  sizes = gather(np.array([len(own)]))[:, 0]
  padded = np.zeros(sizes.max(), np.uint8)
  padded[: len(own)] = np.frombuffer(own, np.uint8)
  rows = zip(sizes, gather(padded), strict=True)
  return [json.loads(row[:size].tobytes()) for size, row in rows]


def of_all_processes(
  played: Iterable[tuple[int, Trajectory]],
) -> Iterator[tuple[int, Trajectory]]:
  """What all processes have played, on every one of them.

  Args:
    played: by this process: (the task's place, a trajectory). It is exchanged as JSON,
      which keeps every bit of a log-prob.
  """
  if jax.process_count() == 1:
    yield from played
    return
  for part in gathered([(place, t.to_json()) for place, t in played]):
    for place, record in part:
      yield place, Trajectory.from_json(record)


class Player:
  """A policy that plays tasks: model, tokenizer and engine together."""

  def __init__(
    self,
    model: ModelConfig,
    tokenizer: Tokenizer,
    config: RolloutConfig,
    tools: Iterable[str],
    layout: Layout | None = None,
    vllm: VllmConfig | None = None,
    grader: Grader | None = None,
    variant: roles.Variant | None = None,
    journal: ToolJournal | None = None,
  ):
    """Compiles the variant's stops and allocates the slots, or meets the vLLM server.

    The caller closes the grader; None for one with the default rewards. `variant` is
    the dialect where it is not the config's with these tools. With a journal no tool
    call is made twice, though a run is interrupted.

    Raises:
      ValueError: the tokenizer does not fit the model, the variant lacks a tool, or
        vLLM can not do what `config` asks for.
      VllmError: there is no server at `vllm.url`, or not one that can be used.
    """
    if variant is None:
      variant = roles.get_variant(config.variant).with_tools(tools)
    self.tokenizer = tokenizer
    self.grader = grader or Grader()
    self.journal = journal
    self.setting = Setting(
      variant,
      config.style,
      config.max_calls,
      config.tool_seconds,
      observation_tokens=config.observation_tokens,
      same_calls=config.same_calls,
    )
    if vllm is None:
      ways = layout.mesh.size // layout.mesh.shape["tensor"] if layout else 1
      given = config.slots, config.max_len, config.window
      needs = sizes.rollout_needs(model, *given, replicas=ways)
      sizes.check_device(sizes.parameter_needs(model) | needs, layout)
    automaton = compile_stops(variant, tokenizer, model.vocab_size)
    self.constraint = None
    if config.constrain:
      self.constraint = compile_constraint(variant, tokenizer, model.vocab_size)
    self.engine: Scheduler | VllmEngine
    if vllm is None:
      self.engine = Scheduler(model, automaton, config, layout, self.constraint)
    else:
      probe = prompts.prompt_segments(variant, "What is asked here?", config.style)
      tokenizer.encode_prompt(probe)
      ids = [i for s in probe for i in s.ids]
      self.engine = VllmEngine(
        vllm, model, automaton, config, ids, tokenizer, layout, self.constraint
      )

  def check(self, tasks: Sequence[Task]) -> None:
    """Refuses, before any decoding, tasks that could not be played to a reward.

    Raises:
      ValueError: a prompt leaves no room to answer, or a task's answers can not be
        graded; the message names the task.
    """
    limit = self.engine.config.max_len
    self.grader.check(tasks, limit)
    for task in tasks:
      prompt = prompts.prompt_segments(
        self.setting.variant, task.question, self.setting.style
      )
      self.tokenizer.encode_prompt(prompt)
      length = sum(len(s.ids) for s in prompt)
      if length >= limit:
        raise ValueError(
          f"task {task.id!r}: a prompt of {length} tokens leaves no room in "
          f"rollout.max_len={limit}; raise it or drop the task"
        )

  def episode(
    self,
    task: Task,
    sample: int,
    sequence: int,
    temperature: float,
    toolbox: Toolbox,
    version: int = 0,
    who: tuple[Any, ...] = (),
    within: int = 0,
  ) -> CoAEpisode:
    """An attempt at a task, for the engine; args as those of `CoAEpisode`.

    `who` tells it from all others of its version, and of `within` versions before and
    after it, for the journal of tool calls.
    """
    tools: Tools = toolbox
    if self.journal:
      tools = self.journal.tools(toolbox, version, who, within)
    return CoAEpisode(
      task=task,
      sample=sample,
      sequence=sequence,
      temperature=temperature,
      tokenizer=self.tokenizer,
      toolbox=tools,
      setting=dataclasses.replace(self.setting, version=version),
    )

  def grade(
    self, episode: CoAEpisode, evaluation: bool = False
  ) -> concurrent.futures.Future[None]:
    """Has the trajectory of an episode that is over graded; see `Grader.submit`."""
    args = (episode.task, episode.trajectory, self.setting.variant, evaluation)
    return self.grader.submit(*args)

  def play(
    self,
    params: Any,
    tasks: Sequence[Task],
    toolbox: Toolbox,
    samples: int,
    temperature: float,
    seed: int,
    version: int = 0,
    skip: Container[tuple[int, int]] = (),
    evaluation: bool = False,
  ) -> Iterator[tuple[int, Trajectory]]:
    """Plays every task `samples` times; of n processes each plays every n-th task.

    Args:
      params: the policy.
      tasks: what to ask; a task's place and the sample number key the randomness.
      toolbox: answers the calls.
      samples: attempts per task.
      temperature: 0 is greedy.
      seed: of the sampling.
      version: of the policy, recorded on every token.
      skip: (task's place, sample) of attempts that are not played; the others come out
        as they would with them.
      evaluation: whether answers are graded as in evaluation.

    Yields:
      (the task's place, a graded trajectory), in the order in which they are done;
      while some are graded, others decode.
    """
    episodes = (
      self.episode(
        task,
        k,
        i * samples + k,
        temperature,
        toolbox,
        version,
        (evaluation, seed, i, k),
      )
      for i, task in enumerate(tasks)
      if i % jax.process_count() == jax.process_index()
      for k in range(samples)
      if (i, k) not in skip
    )
    waiting: dict[concurrent.futures.Future[None], CoAEpisode] = {}

    def graded(
      futures: Iterable[concurrent.futures.Future[None]],
    ) -> Iterator[tuple[int, Trajectory]]:
      for future in futures:
        future.result()  # raises what the grader did
        episode = waiting[future]
        yield episode.sequence // samples, episode.trajectory

    for episode in self.engine.run(params, episodes, seed):
      waiting[self.grade(episode, evaluation)] = episode
      done = [f for f in waiting if f.done()]
      yield from graded(done)
      for future in done:
        del waiting[future]
    yield from graded(concurrent.futures.as_completed(waiting))

  def groups(
    self,
    params: Any,
    tasks: Sequence[Task],
    toolbox: Toolbox,
    samples: int,
    temperature: float,
    seed: int,
    version: int = 0,
    evaluation: bool = False,
  ) -> list[list[Trajectory]]:
    """As `play`, but all at once: for each task its trajectories by sample number.

    Every process gets the trajectories of all.
    """
    out: list[list[Trajectory]] = [[] for _ in tasks]
    args = (params, tasks, toolbox, samples, temperature, seed, version)
    played = self.play(*args, evaluation=evaluation)
    for place, trajectory in of_all_processes(played):
      out[place].append(trajectory)
    return [sorted(group, key=lambda t: t.sample) for group in out]

  def rescore(
    self, params: Any, trajectories: Sequence[Trajectory], temperature: float
  ) -> list[list[float]]:
    """Log-probs of what each trajectory's policy wrote, by the sampler's own program.

    With the parameters, slots and windows that a trajectory was sampled with they are
    those it recorded, bit for bit, in half precision too; with others they are what
    that policy's sampler would have recorded.

    Raises:
      ValueError: a trajectory was sampled under another variant or `max_len`, or the
        engine is vLLM.
    """
    if not isinstance(self.engine, Scheduler):
      raise ValueError("vLLM can not be given tokens to take; rescore without it")
    episodes = [Replay(t, i, temperature) for i, t in enumerate(trajectories)]
    for _ in self.engine.run(params, episodes, 0):
      pass
    return [e.logps for e in episodes]

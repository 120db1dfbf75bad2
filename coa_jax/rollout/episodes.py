"""One trajectory being made: prompt, sampled spans, tool calls, observations, reward.

An episode turns what the sampler yields into protocol objects and back; it is the only
place where tokens meet tools.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from coa_jax.model.architecture import QwenConfig
from coa_jax.model.sharding import Layout
from coa_jax.protocol import prompts, roles
from coa_jax.protocol.automaton import compile_constraint, compile_stops
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import (
  CallStatus,
  Status,
  ToolCall,
  Trajectory,
)
from coa_jax.rollout.scheduler import RolloutConfig, Scheduler
from coa_jax.rollout.toolbox import Toolbox
from coa_jax.rollout.vllm import VllmEngine
from coa_jax.rollout.vllm_server import VllmConfig
from coa_jax.tasks.rewards import grade, score
from coa_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all episodes of a run share.

  Attributes:
    variant: the dialect, left with this run's tools.
    style: of the prompt (`prompts.STYLES`).
    max_calls: tool calls a trajectory may make.
    tool_seconds: seconds of tool time a trajectory may spend.
    version: of the policy, recorded on every sampled token.
  """

  variant: Variant
  style: str
  max_calls: int
  tool_seconds: float
  version: int = 0


class CoAEpisode:
  """One attempt at one task, as the scheduler drives it."""

  def __init__(
    self,
    task: Task,
    sample: int,
    sequence: int,
    temperature: float,
    tokenizer: Tokenizer,
    toolbox: Toolbox,
    setting: Setting,
  ):
    """Args: the task, which of its samples this is, the id that keys its randomness."""
    self.task = task
    self.sequence = sequence
    self.temperature = temperature
    self.tokenizer = tokenizer
    self.toolbox = toolbox
    self.setting = setting
    self._turn = ""  # policy text since the last observation
    self._began = time.monotonic()
    self._tool_seconds = 0.0
    meta = {
      "question": task.question,
      "answers": list(task.answers),
      "family": task.family,
      "source": task.source,
    }
    prompt = prompts.prompt_segments(setting.variant, task.question, setting.style)
    self.trajectory = Trajectory(task.id, prompt, sample=sample, meta=meta)

  def start(self) -> list[int]:
    """The prompt's ids, chat template included."""
    self.tokenizer.encode_prompt(self.trajectory.segments)
    ids = [i for s in self.trajectory.segments for i in s.ids]
    self.trajectory.usage.prompt = len(ids)
    self.trajectory.usage.model_calls = 1
    return ids

  def progress(self, ids: list[int]) -> None:
    """Nothing is done before a turn is over. See `Episode`."""

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future[ToolCall] | None:
    """Appends sampled ids; starts the call that `tag` closes. See `Episode`."""
    t = self.trajectory
    segments = self.tokenizer.policy_segments(ids, logps, self.setting.version)
    t.segments += segments
    t.usage.generated += len(ids)
    self._turn += "".join(s.text for s in segments)
    if tag is None:
      return self._finish(Status.TRUNCATED)
    if tag == roles.close_tag(roles.ANSWER):
      return self._finish(Status.ENDED)
    if len(t.calls) >= self.setting.max_calls:
      return self._finish(Status.TURN_LIMIT)
    name = tag[2:-1]
    before, opening, content = self._turn.rpartition(roles.open_tag(name))
    if not opening:
      call = ToolCall(name, before, "error: " + tag + " closes nothing")
      call.status = CallStatus.MODEL
      future: concurrent.futures.Future[ToolCall] = concurrent.futures.Future()
      future.set_result(call)
      return future
    content = content[: content.index(tag)].removeprefix(" ")
    return self.toolbox.submit(name, content)

  def observed(self, result: ToolCall) -> list[int] | None:
    """Appends the observation of a finished call. See `Episode`."""
    t = self.trajectory
    t.calls.append(result)
    t.usage.tool_calls += 1
    self._tool_seconds += result.seconds
    if result.status == CallStatus.INFRASTRUCTURE:
      return self._finish(Status.INFRASTRUCTURE)
    if self._tool_seconds > self.setting.tool_seconds:
      return self._finish(Status.TOOL_FAILED)
    segment = self.tokenizer.encode_observation(result.result)
    t.segments.append(segment)
    t.usage.observation += len(segment.ids)
    self._turn = ""
    return segment.ids

  def out_of_room(self) -> None:
    """Ends the episode whose last observation does not fit any more."""
    segment = self.trajectory.segments.pop()
    self.trajectory.usage.observation -= len(segment.ids)
    self._finish(Status.TRUNCATED)

  def lost(self) -> None:
    """Ends the episode that the engine failed; it leaves its group."""
    self._finish(Status.INFRASTRUCTURE)

  def _finish(self, status: Status) -> None:
    t = self.trajectory
    t.status = status
    t.usage.seconds = time.monotonic() - self._began
    if status != Status.INFRASTRUCTURE:
      t.reward, t.reward_parts = score(self.task, t.text, self.setting.variant)
    return None


class Player:
  """A policy that plays tasks: model, tokenizer and engine together."""

  def __init__(
    self,
    model: QwenConfig,
    tokenizer: Tokenizer,
    config: RolloutConfig,
    tools: Sequence[str],
    layout: Layout | None = None,
    vllm: VllmConfig | None = None,
  ):
    """Compiles the variant's stops and allocates the slots, or meets the vLLM server.

    Raises:
      ValueError: the tokenizer does not fit the model, the variant lacks a tool, or
        vLLM can not do what `config` asks for.
      VllmError: there is no server at `vllm.url`, or not one that can be used.
    """
    variant = roles.get_variant(config.variant).with_tools(tools)
    self.tokenizer = tokenizer
    self.setting = Setting(variant, config.style, config.max_calls, config.tool_seconds)
    automaton = compile_stops(variant, tokenizer, model.vocab_size)
    self.constraint = None
    if config.constrain:
      self.constraint = compile_constraint(variant, tokenizer, model.vocab_size)
    self.scheduler: Scheduler | VllmEngine
    if vllm is None:
      self.scheduler = Scheduler(model, automaton, config, layout, self.constraint)
    else:
      probe = prompts.prompt_segments(variant, "What is asked here?", config.style)
      tokenizer.encode_prompt(probe)
      ids = [i for s in probe for i in s.ids]
      self.scheduler = VllmEngine(vllm, model, automaton, config, ids, layout)

  def check(self, tasks: Sequence[Task]) -> None:
    """Refuses, before any decoding, tasks that could not be played to a reward.

    Raises:
      ValueError: a prompt leaves no room to answer, or a task's answers can not be
        graded; the message names the task.
    """
    limit = self.scheduler.config.max_len
    for task in tasks:
      grade(task, None)
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

  def play(
    self,
    params: Any,
    tasks: Sequence[Task],
    toolbox: Toolbox,
    samples: int,
    temperature: float,
    seed: int,
    version: int = 0,
  ) -> Iterator[tuple[int, Trajectory]]:
    """Plays every task `samples` times.

    Args:
      params: the policy.
      tasks: what to ask; a task's place and the sample number key the randomness.
      toolbox: answers the calls.
      samples: attempts per task.
      temperature: 0 is greedy.
      seed: of the sampling.
      version: of the policy, recorded on every token.

    Yields:
      (the task's place, a finished trajectory), in the order in which they end.
    """
    setting = dataclasses.replace(self.setting, version=version)
    episodes = (
      CoAEpisode(
        task=task,
        sample=k,
        sequence=i * samples + k,
        temperature=temperature,
        tokenizer=self.tokenizer,
        toolbox=toolbox,
        setting=setting,
      )
      for i, task in enumerate(tasks)
      for k in range(samples)
    )
    for episode in self.scheduler.run(params, episodes, seed):
      yield episode.sequence // samples, episode.trajectory

  def groups(
    self,
    params: Any,
    tasks: Sequence[Task],
    toolbox: Toolbox,
    samples: int,
    temperature: float,
    seed: int,
    version: int = 0,
  ) -> list[list[Trajectory]]:
    """As `play`, but all at once: for each task its trajectories by sample number."""
    out: list[list[Trajectory]] = [[] for _ in tasks]
    args = (params, tasks, toolbox, samples, temperature, seed, version)
    for place, trajectory in self.play(*args):
      out[place].append(trajectory)
    return [sorted(group, key=lambda t: t.sample) for group in out]

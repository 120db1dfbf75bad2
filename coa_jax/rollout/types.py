"""What rollouts are made of: config, the engine's contract, episodes, counters.

budget: what engines, workers and episodes agree on is read together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from coa_jax.data.tasks.sampling import TASK_SAMPLERS
from coa_jax.data.tasks.task import Task
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import Truncation
from coa_jax.protocol import prompts, roles, tokens
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.runtime.fields import bounded, check_fields, choice
from coa_jax.runtime.json_io import read_object


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Config section `rollout`.

  Attributes:
    variant: the protocol's dialect; its tools are those of section `tools`. A hyphen
      takes an agent away: unified-plan is unified without plans.
    style: of the prompt: full, or brief for models trained from scratch.
    slots: trajectories decoded together, on each replica of the model (a device, or
      as many as `tensor` says).
    tensor: devices that split the matrices of one replica; they are within one process,
      and training may split them otherwise. 0 for as many as mesh.tensor.
    window: tokens sampled between two looks at the tools.
    in_flight: windows that the device is given before the first of them is read. With 2
      it need not wait for the host, but a slot that stops misses a window. 0: 2, on a
      CPU 1.
    max_len: tokens a trajectory may have in all; at most the model's positions.
    max_prompt: tokens a task's prompt may have; tasks with longer ones are dropped and
      counted before a run (verl: filter_overlong_prompts). 0: as many as leave room for
      an answer in max_len.
    max_calls: tool calls a trajectory may make.
    tool_seconds: seconds of tool time a trajectory may spend; a call gets no more
      than is left, and none being left ends the trajectory as `tool_failed`.
    memory: GB of a device that keys and values may take. 0 is for all that is left when
      the first trajectory starts, on a CPU for as much as the slots come to need. A
      trajectory that finds no room waits, or is paused and goes on later.
    observation_tokens: tokens one observation may have, its tags included; of longer
      ones head and tail are kept.
    same_calls: times a trajectory may make one and the same call (its tag and its
      content); more are answered by an error and not run. 0 for any number.
    inject_rows: slots that receive given tokens in one call of the device, at most;
      where fewer do, it has 1, 4 or 16 rows, and so on. On a CPU it always has the
      most, but no more than make 256 tokens.
    constrain: sample only what the variant's grammar allows.
    top_k: sample from the most likely tokens; 0 for all.
    top_p: sample from the most likely tokens of this probability in all; 1 for all.
    min_p: sample from tokens at least this share as likely as the likeliest.
    seed: of all sampling; below 2**32, where JAX's keys end.
  """

  variant: str = "unified"
  style: str = "full"
  slots: int = bounded(64, least=1)
  tensor: int = bounded(0, least=0)
  window: int = bounded(8, least=1)
  in_flight: int = bounded(0, least=0)
  max_len: int = bounded(320, least=1)
  max_prompt: int = bounded(0, least=0)
  memory: float = bounded(0.0, least=0)
  max_calls: int = bounded(8, least=0)
  tool_seconds: float = bounded(60.0, above=0)
  observation_tokens: int = bounded(512, least=tokens.MIN_OBSERVATION)
  same_calls: int = bounded(0, least=0)
  inject_rows: int = bounded(16, least=1)
  constrain: bool = False
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = bounded(0, least=0, below=2**32)

  def __post_init__(self):
    check_fields(self)
    if self.max_prompt >= self.max_len:
      raise ValueError(
        f"max_prompt={self.max_prompt} leaves no room in max_len={self.max_len}; it "
        "must be below it, or 0"
      )
    # For their refusals of a dialect or a style that is not there.
    prompts.instructions(roles.get_variant(self.variant), self.style)
    _ = self.truncation  # refuses what it can not mean

  @property
  def truncation(self) -> Truncation:
    """Which tokens may be drawn."""
    return Truncation(self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Config section `algo.sampling` of RL: what each step rolls out.

  Attributes:
    prompts: groups in one step's batch, at most.
    samples: trajectories of a group.
    rounds: rollouts of one step, at most, to fill its batch; with `filter_groups` and
      more than 1, DAPO's dynamic sampling. What is found by then is learnt from.
    round_prompts: groups rolled out in a round (verl: gen_batch_size); 0 for `prompts`.
    filter_groups: only groups that are neither all right nor all wrong are learnt
      from (DAPO); graded answers (f1, a share of tests) must differ. Penalties do not
      count.
    temperature: of the rollouts.
    staleness: updates that a sampled token may be old when it is learnt from. 0 is
      on-policy: rollouts and learning take turns. Above, rollouts go on meanwhile and
      take up a new policy where they are; this needs a `loss.is_clip`.
    task_sampler: uniform; learnability (tasks solved sometimes are drawn most); or
      curriculum (easy ones first, by the pass rates that select_tasks writes). See
      `tasks/sampling.py`.
    curriculum: share of the steps after which a curriculum draws from all tasks.
  """

  prompts: int = bounded(16, least=1)
  samples: int = bounded(8, least=1)
  rounds: int = bounded(2, least=1)
  round_prompts: int = bounded(0, least=0)
  filter_groups: bool = True
  temperature: float = bounded(1.0, above=0)
  staleness: int = bounded(0, least=0)
  task_sampler: str = choice("uniform", of=TASK_SAMPLERS)
  curriculum: float = bounded(0.5, least=0, most=1)

  def __post_init__(self):
    check_fields(self)


def check_positions(config: RolloutConfig, model: ModelConfig, folder: str) -> None:
  """Refuses trajectories that may grow longer than the model's positions.

  Args:
    config: how long they may grow.
    model: the architecture in the folder.
    folder: a model folder; one whose config.json names no positions sets no limit.

  Raises:
    ValueError: naming both.
  """
  # From the file: rotary positions have no end, so `ModelConfig` has none either.
  file = os.path.join(folder, "config.json")
  most = read_object(file).get("max_position_embeddings")
  if most and model.yarn:  # published folders name the positions before stretching
    most = max(most, round(model.yarn.factor * model.yarn.positions))
  if most and config.max_len > most:
    raise ValueError(
      f"rollout.max_len={config.max_len} is above the {most} positions that the model "
      f"has (max_position_embeddings in {file}); lower it"
    )


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One attempt at a task: what its tokens depend on besides the policy and the tools.

  Attributes:
    task: the policy answers it.
    sample: number of the attempt among the task's.
    seed: with `sequence` keys the sampling; from 0 to 2**32 - 1.
    sequence: unique under a seed.
    temperature: of the sampling; 0 is greedy.
    version: of the policy when the attempt is submitted.
  """

  task: Task
  sample: int
  seed: int
  sequence: int
  temperature: float
  version: int = 0


class Engine(Protocol):
  """Plays episodes under the newest policy it was given; thread-safe.

  `replicas.ReplicaPool` (our own sampler) and `vllm.engine.VllmEngine` implement it.

  Attributes:
    config: slots, limits and the sampling distribution.
    capacity: episodes that can run at once.
    counters: what was done so far.
    timings: what its seconds went into.
    takes_tokens: whether it obeys `Episode.forced`: takes tokens instead of sampling.
  """

  config: RolloutConfig
  takes_tokens: bool

  @property
  def capacity(self) -> int:
    """Episodes that can run at once."""

  @property
  def counters(self) -> Counters:
    """What was done so far."""

  @property
  def timings(self) -> Timings:
    """What the seconds so far went into."""

  def set_policy(self, params: Any, version: int) -> None:
    """Samples with these parameters from now on, running episodes too.

    Args:
      params: the policy, stacked or not; None forgets it, so that its memory is free.
      version: recorded on every token that it samples.
    """

  def submit(
    self, episode: Episode, group: int | None = None, first: bool = False
  ) -> concurrent.futures.Future[Episode]:
    """Queues an episode; returns at once.

    Args:
      episode: not running yet.
      group: episodes of one group that are submitted one after the other share their
        prompt's cache.
      first: whether it goes before all that wait and are not `first`.

    Returns:
      A future of the episode once it is over. It holds the engine's failure, if that
      ends it, and is cancelled by `cancel` and `close`.

    Raises:
      RuntimeError: the engine is closed or has no policy.
    """

  def batch(self) -> contextlib.AbstractContextManager[None]:
    """Has idle replicas wait for the block's end before they start what it submits.

    Without it the first episode submitted would be sampled alone, and all others would
    wait for its window.
    """

  def cancel(self, episode: Episode) -> None:
    """Drops an episode: at once where it waits, after a window where it runs."""

  def close(self) -> None:
    """Drops all episodes and waits for the threads, for a window at most."""


class Episode(Protocol):
  """What an engine asks of one trajectory; tokens in, tokens out.

  A class that derives from it inherits `top_p`, `limit`, `version`, `forced` and
  `progress`.

  Attributes:
    seed: with `sequence` keys its randomness; from 0 to 2**32 - 1.
    sequence: unique under a seed.
    temperature: of its sampling; 0 is greedy.
    top_p: of its sampling, where the engine takes one for each; None for the config's.
    limit: tokens it may have in all, if below max_len; may change as it goes on.
    version: of the policy that samples next; the engine sets it.
  """

  seed: int
  sequence: int
  temperature: float
  top_p: float | None = None
  limit: int = sys.maxsize
  version: int = 0

  def start(self) -> list[int]:
    """The prompt's ids."""

  def forced(self) -> list[int]:
    """Ids to take next instead of sampling them; asked once what was given is in."""
    return []

  def progress(self, ids: list[int]) -> None:
    """Told after a window that did not stop it what was sampled since `sampled`."""

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future | None:
    """Takes what was sampled since the last call.

    `tag` is the closing tag that stopped decoding, or None at the token limit. Returns
    a future to wait for, or None when the episode is over.
    """

  def observed(self, result: Any) -> list[int] | None:
    """Takes the future's result; returns ids to append, or None when it is over."""

  def out_of_room(self) -> None:
    """Told that the ids to append would exceed the token limit; it is over."""

  def lost(self) -> None:
    """Told that the engine can not sample for it any more; it is over."""


Group = list[Trajectory]


@dataclasses.dataclass
class RolloutBatch:
  """What one step learns from.

  Attributes:
    groups: those that were kept; a trajectory without a reward has left its group.
    played: every trajectory rolled out, by any process, kept or not.
    own: those of them that this process played.
    num_groups: groups rolled out.
    num_varied: those of them that are neither all right nor all wrong.
    cursor: JSON values that say where the next step's rollouts go on: the next group;
      the tasks of it and those after it that were submitted already (None of one that
      was not), which a resumed run plays again with the random numbers that they had;
      and the state of the task sampler.
    figures: more to log, by name.
    spent: seconds of the wait for them, by phase (`report/timers.py`).
  """

  groups: list[Group] = dataclasses.field(default_factory=list)
  played: Group = dataclasses.field(default_factory=list)
  own: Group = dataclasses.field(default_factory=list)
  num_groups: int = 0
  num_varied: int = 0
  cursor: dict[str, Any] = dataclasses.field(default_factory=dict)
  figures: dict[str, float] = dataclasses.field(default_factory=dict)
  spent: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Counters:
  """What the device was asked to do since the engine was made."""

  prefilled_tokens: int = 0
  copied_tokens: int = 0  # of prompts, held by pages that were there already
  sampled_tokens: int = 0
  windows: int = 0
  pauses: int = 0  # of trajectories for whose pages there was no room
  slot_steps: int = 0  # decode steps times slots: sampled_tokens / this is utilisation

  def since(self, before: Counters) -> Counters:
    """Returns what was done since `before`."""
    return Counters(**_differences(self, before))

  @classmethod
  def total(cls, each: Iterable[Counters]) -> Counters:
    """Sums the counters of several replicas."""
    out = cls()
    for counters in each:
      for name, count in vars(counters).items():
        setattr(out, name, getattr(out, name) + count)
    return out


@dataclasses.dataclass
class Timings:
  """Wall seconds of an engine by what they went into; of several replicas their mean.

  What is missing to the time of a run is the host's beside a device that works.
  """

  sync: float = 0.0  # giving the decoder the parameters
  decode: float = 0.0  # waiting for tokens
  tools: float = 0.0  # waiting for tools
  host: float = 0.0  # between windows, with nothing for the device to do
  idle: float = 0.0  # with no episode to play, between the first and the last

  def since(self, before: Timings) -> dict[str, float]:
    """Returns what was spent since `before`, by name."""
    return _differences(self, before)

  @classmethod
  def mean(cls, each: Iterable[Timings]) -> Timings:
    """Averages the seconds of several replicas, which pass at the same time."""
    rows = [dataclasses.astuple(timings) for timings in each]
    return cls(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def _differences(after: Any, before: Any) -> dict[str, Any]:
  """Field by field, of two values of one dataclass of numbers."""
  earlier = vars(before)
  return {name: value - earlier[name] for name, value in vars(after).items()}

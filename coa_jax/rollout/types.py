"""Rollout types: configs, the engine and episode contracts, batches, counters."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from coa_jax.data.tasks.sampling import TASK_SAMPLERS
from coa_jax.data.tasks.task import Task
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import Truncation
from coa_jax.model.hf.config import decoder_fields
from coa_jax.protocol import prompts, roles, tokens
from coa_jax.protocol.contexts import ContextConfig
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.runtime.fields import bounded, check_fields, choice, section
from coa_jax.runtime.json_io import read_object


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Config section `rollout`.

  Attributes:
    variant: the protocol's dialect; its tools are section `tools`'. A hyphen removes an
      agent: unified-plan is unified without plans.
    style: the prompt's style: full, or brief for models trained from scratch.
    slots: trajectories decoded together on each model replica (`tensor` devices).
    tensor: devices splitting one replica's matrices, within one process; training may
      split them otherwise. 0 for mesh.tensor.
    window: tokens sampled between two checks of the tools.
    max_len: maximum tokens per trajectory; at most the model's positions.
    max_prompt: maximum tokens per task's prompt; tasks with longer ones are dropped and
      counted before a run (verl: filter_overlong_prompts). 0: the most that leaves room
      for an answer in max_len.
    max_sampled: maximum tokens that the policy writes in a trajectory, over all its
      contexts; 0 for no limit but theirs.
    max_calls: tool calls a trajectory may make.
    tool_seconds: maximum tool time per trajectory, seconds; a call gets at most the
      rest, and with none left the trajectory ends as `tool_failed`.
    memory: maximum GB per device for keys and values. 0 takes all memory left when the
      first trajectory starts; on a CPU the cache grows with the slots' needs. A
      trajectory without room waits, or is paused and resumes later.
    observation_tokens: maximum tokens per observation, tags included; longer ones keep
      head and tail.
    context: several contexts for trajectories longer than max_len.
    prefill_rows: maximum slots prefilled in one device call. With fewer, the call has
      1, 4 or 16 rows, and so on; on a CPU always the maximum, up to 256 tokens.
    constrain: sample only within the variant's grammar.
    top_k: sample from this many most likely tokens; 0 for all.
    top_p: sample from the most likely tokens with this total probability; 1 for all.
    seed: seed for all sampling; below 2**32, the limit of JAX's keys.
  """

  variant: str = "unified"
  style: str = "full"
  slots: int = bounded(64, least=1)
  tensor: int = bounded(0, least=0)
  window: int = bounded(8, least=1)
  max_len: int = bounded(320, least=1)
  max_prompt: int = bounded(0, least=0)
  memory: float = bounded(0.0, least=0)
  max_sampled: int = bounded(0, least=0)
  max_calls: int = bounded(8, least=0)
  tool_seconds: float = bounded(60.0, above=0)
  observation_tokens: int = bounded(512, least=tokens.MIN_OBSERVATION)
  context: ContextConfig = section(ContextConfig)
  prefill_rows: int = bounded(16, least=1)
  constrain: bool = False
  top_k: int = 0
  top_p: float = 1.0
  seed: int = bounded(0, least=0, below=2**32)

  def __post_init__(self):
    check_fields(self)
    if self.max_prompt >= self.max_len:
      raise ValueError(
        f"max_prompt={self.max_prompt} leaves no room in max_len={self.max_len}; it "
        "must be below it, or 0"
      )
    self.context.check(self.max_len, "max_len")
    # They refuse an unknown dialect or style.
    prompts.instructions(roles.get_variant(self.variant), self.style)
    _ = self.truncation  # refuses invalid values

  @property
  def truncation(self) -> Truncation:
    """Returns the truncation of the sampling distribution."""
    return Truncation(self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Config section `algo.sampling` of RL: each step's rollouts.

  Attributes:
    prompts: maximum groups in one step's batch.
    samples: trajectories per group.
    rounds: maximum rounds of rollouts to fill a step's batch; with `filter_groups` and
      more than 1, DAPO's dynamic sampling. Groups found by then are learnt from.
    round_prompts: groups rolled out in a round (verl: gen_batch_size); 0 for `prompts`.
    filter_groups: learn only from groups neither all right nor all wrong (DAPO); graded
      answers (f1, a share of tests) must differ. Penalties do not count.
    temperature: the rollouts' sampling temperature.
    staleness: maximum age of a sampled token when learnt, in steps. 0 is on-policy:
      rollouts and learning alternate. Above, rollouts continue meanwhile and switch to
      a new policy midway; this needs a `loss.is_clip`.
    task_sampler: uniform; learnability (tasks solved sometimes are drawn most); or
      curriculum (easy ones first, by pass rates of coa tasks). See
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
  """Refuses trajectories that may exceed the model's positions.

  Args:
    folder: a model folder; one whose config.json names no positions sets no limit.

  Raises:
    ValueError: `max_len` is above the positions; the message names both.
  """
  # From the file: rotary positions have no limit, so `ModelConfig` has none either.
  file = os.path.join(folder, "config.json")
  most = decoder_fields(read_object(file), file).get("max_position_embeddings")
  if most and model.yarn:  # published folders name the positions before stretching
    most = max(most, round(model.yarn.factor * model.yarn.positions))
  if most and config.max_len > most:
    raise ValueError(
      f"rollout.max_len={config.max_len} is above the {most} positions that the model "
      f"has (max_position_embeddings in {file}); lower it"
    )


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One attempt at a task: all inputs to its sampling except policy and tools.

  Attributes:
    task: the task to answer.
    sample: the attempt's number within the task.
    seed: keys the sampling, with `sequence`; from 0 to 2**32 - 1.
    sequence: unique under a seed.
    temperature: sampling temperature; 0 is greedy.
    version: the policy's version when the attempt is submitted.
  """

  task: Task
  sample: int
  seed: int
  sequence: int
  temperature: float
  version: int = 0


class Engine(Protocol):
  """Plays episodes under the newest published policy; thread-safe.

  `replicas.ReplicaPool` (our own sampler) and `vllm.engine.VllmEngine` implement it.

  Attributes:
    config: slots, limits and the sampling distribution.
    takes_tokens: whether `Episode.forced` works: taking tokens instead of sampling.
  """

  config: RolloutConfig
  takes_tokens: bool

  @property
  def capacity(self) -> int:
    """Episodes that can run at once."""

  @property
  def counters(self) -> Counters:
    """Returns the work so far."""

  @property
  def timings(self) -> Timings:
    """Returns the seconds so far, by phase."""

  def set_policy(self, params: Any, version: int) -> None:
    """Samples with these parameters from now on, running episodes too.

    Args:
      params: the policy, stacked or not; None drops the policy and frees its memory.
      version: recorded on every sampled token.
    """

  def submit(
    self, episode: Episode, group: int | None = None, first: bool = False
  ) -> concurrent.futures.Future[Episode]:
    """Queues an episode; returns at once.

    Args:
      episode: an episode not running yet.
      group: a group's consecutively submitted episodes share their prompt's cache.
      first: whether it precedes all waiting episodes without `first`.

    Returns:
      A future for the finished episode, or for the engine's failure; `cancel` and
      `close` cancel the future.

    Raises:
      RuntimeError: the engine is closed or has no policy.
    """

  def batch(self) -> contextlib.AbstractContextManager[None]:
    """Delays idle replicas until the block ends, so that its episodes start together.

    Otherwise the first episode would be sampled alone, and all others would wait for
    its window.
    """

  def cancel(self, episode: Episode) -> None:
    """Drops an episode: a waiting one at once, a running one after a window."""

  def close(self) -> None:
    """Drops all episodes and waits for the threads, for a window at most."""


class Episode(Protocol):
  """An engine's interface to one trajectory; tokens in, tokens out.

  Subclasses inherit `top_p`, `limit`, `version`, `opening`, `forced` and `progress`.

  Attributes:
    seed: keys the randomness, with `sequence`; from 0 to 2**32 - 1.
    sequence: unique under a seed.
    temperature: sampling temperature; 0 is greedy.
    top_p: the episode's own top_p, if the engine allows one; None for the config's.
    limit: maximum tokens, if below max_len; may change while the episode runs.
    version: the version of the sampling policy; set by the engine.
    opening: parts of `start`'s ids that the grammar reads: an earlier context's.
  """

  seed: int
  sequence: int
  temperature: float
  top_p: float | None = None
  limit: int = sys.maxsize
  version: int = 0
  opening: Sequence[tuple[Sequence[int], bool]] = ()

  def start(self) -> list[int]:
    """Returns the prompt's ids."""

  def forced(self) -> list[int]:
    """Returns the next ids to force instead of sampling; called after each prefill."""
    return []

  def progress(self, ids: list[int]) -> None:
    """Receives ids sampled since the last `sampled`, after a window without a stop."""

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future | None:
    """Takes the ids sampled since the last call.

    `tag` is the stopping closing tag, or None at the token limit. Returns a future to
    wait for, or None when the episode is over.
    """

  def observed(self, result: Any) -> list[int] | None:
    """Takes a result; returns ids to append, or None once the episode is over."""

  def out_of_room(self) -> None:
    """Ends the episode: the ids to append would exceed the token limit."""

  def lost(self) -> None:
    """Ends the episode: the engine can no longer sample for it."""


def prompt_ids(episode: Episode, max_len: int) -> list[int]:
  """Starts an episode; refuses a prompt that leaves no room in `rollout.max_len`."""
  ids = episode.start()
  if len(ids) >= max_len:
    raise ValueError(
      f"a prompt of {len(ids)} tokens leaves no room in rollout.max_len={max_len}; "
      "raise it or drop the task"
    )
  return ids


Group = list[Trajectory]


@dataclasses.dataclass
class RolloutBatch:
  """One step's batch.

  Attributes:
    groups: kept groups; a trajectory without a reward has left its group.
    played: every trajectory rolled out, by any process, kept or not.
    own: this process's trajectories among them.
    num_groups: groups rolled out.
    num_varied: groups rolled out, neither all right nor all wrong.
    cursor: JSON values for resuming the next step's rollouts: the next group's number;
      the tasks of groups submitted from there on (None for an unsubmitted group), which
      a resumed run plays again with the same random numbers; and the task sampler's
      state.
    figures: further metrics, by name.
    spent: seconds waited for the batch, by phase (`report/timers.py`).
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
  """The device's work since the engine was created."""

  prefilled_tokens: int = 0
  copied_tokens: int = 0  # prompt tokens in already filled pages
  sampled_tokens: int = 0
  windows: int = 0
  pauses: int = 0  # a trajectory's, for lack of pages
  slot_steps: int = 0  # decode steps times slots: sampled_tokens / this is utilisation

  def since(self, before: Counters) -> Counters:
    """Returns the work since `before`."""
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
  """An engine's wall seconds by phase; the mean over several replicas.

  In the rest of a run's time the host works while the device is busy.
  """

  sync: float = 0.0  # giving the decoder the parameters
  decode: float = 0.0  # waiting for tokens
  tools: float = 0.0  # waiting for tools
  host: float = 0.0  # between windows, with nothing for the device to do
  idle: float = 0.0  # with no episode to play, between the first and the last

  def since(self, before: Timings) -> dict[str, float]:
    """Returns the seconds since `before`, by name."""
    return _differences(self, before)

  @classmethod
  def mean(cls, each: Iterable[Timings]) -> Timings:
    """Averages the seconds of several replicas, which pass at the same time."""
    rows = [dataclasses.astuple(timings) for timings in each]
    return cls(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def _differences(after: Any, before: Any) -> dict[str, Any]:
  """Subtracts two instances of a numeric dataclass, field by field."""
  earlier = vars(before)
  return {name: value - earlier[name] for name, value in vars(after).items()}

"""The plan of an RL run: its config, meshes, architectures and checks.

A plan allocates nothing, so `experiments.bench.compile_check` makes one for absent
devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from coa_jax.data.tasks.sources import TasksConfig
from coa_jax.learner.algorithms import (
  GROUP_ADVANTAGES,
  BatchConfig,
  GuardConfig,
  LossConfig,
)
from coa_jax.learner.checkpoint import CheckpointConfig
from coa_jax.learner.optim import OptimConfig
from coa_jax.learner.teachers import (
  DistillationConfig,
  Teachers,
  check_folder,
  is_address,
)
from coa_jax.learner.update import PolicyUpdate
from coa_jax.model import attention, decode_params, lora, memory
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.io import load_config
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import MeshConfig, Partitioner, make_partitioners
from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.report.health import WatchConfig
from coa_jax.report.tracking import LogConfig
from coa_jax.rewards.grader import RewardConfig
from coa_jax.rollout.agents.config import AgentConfig
from coa_jax.rollout.types import RolloutConfig, SamplingConfig, check_positions
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.runtime import capacity
from coa_jax.runtime.fields import bounded, check_fields, section
from coa_jax.tools.toolbox import ToolsConfig


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
  """Config section `algo`.

  Attributes:
    steps: batches of rollouts to learn from. A larger number extends a workdir's run if
      optim.schedule is constant and no curriculum is spread over it.
    keep_every: steps between two dumps of a step's trajectories.
    sampling: a step's rollouts.
    loss: a step's loss.
    batch: number and shape of a step's updates.
    guards: stop conditions.
  """

  steps: int = bounded(least=1)
  keep_every: int = bounded(20, least=1)
  sampling: SamplingConfig = section(SamplingConfig)
  loss: LossConfig = section(LossConfig)
  batch: BatchConfig = section(BatchConfig)
  guards: GuardConfig = section(GuardConfig)

  def __post_init__(self):
    check_fields(self)
    if self.batch.minibatches > self.sampling.prompts:
      raise ValueError(
        f"batch.minibatches={self.batch.minibatches} is above sampling.prompts="
        f"{self.sampling.prompts}: each part needs a group"
      )
    samples = self.sampling.samples
    by_group = self.loss.advantage in GROUP_ADVANTAGES
    if samples < 2 and (by_group or self.sampling.filter_groups):
      raise ValueError(
        f"sampling.samples is {samples}; it must be at least 2, for an advantage "
        "compares a group (or take loss.advantage reinforce++ or gae, and "
        "sampling.filter_groups=False)"
      )
    # Without is_clip, PPO's bounds are around a policy several updates away: at 4
    # updates AReaL fell from 42.0 to 23.3 on AIME24, but with decoupled PPO stayed at
    # 42.2 (its blog/AReaL_v0_3.md, table 3).
    staleness = self.sampling.staleness
    if staleness and not self.loss.is_clip:
      raise ValueError(
        f"sampling.staleness={staleness} needs loss.is_clip above 0, such as 2.0: "
        "stale tokens are then weighted by p_now / p_sampled (decoupled PPO)"
      )
    if staleness and self.guards.max_logp_diff_share < 1:
      raise ValueError(
        f"guards.max_logp_diff_share is {self.guards.max_logp_diff_share}: it compares "
        "sampler and learner of one policy; with sampling.staleness above 0 they are "
        "not, so leave it at 1"
      )


@dataclasses.dataclass(frozen=True)
class DevConfig:
  """Config section `dev`: greedy evaluation during training, on its own tasks.

  Attributes:
    every: steps between two evaluations.
    uri: tasks, as `tasks.uri`; `tasks.fields`, `kind`, `source` and `attachments` apply
      here, too.
    limit: maximum number of tasks.
    corpus: pages for the dev tasks; the training corpus if None.
  """

  every: int = bounded(least=1)
  uri: str
  limit: int = bounded(64, least=1)
  corpus: str | None = None

  def __post_init__(self):
    check_fields(self)

  def tasks(self, tasks: TasksConfig) -> TasksConfig:
    """Returns dev tasks, read like training tasks."""
    return TasksConfig(
      self.uri,
      self.limit,
      fields=tasks.fields,
      kind=tasks.kind,
      source=tasks.source,
      attachments=tasks.attachments,
    )

  def tools(self, tools: ToolsConfig) -> ToolsConfig:
    """Returns the training tools, over the dev tasks' pages."""
    return dataclasses.replace(tools, corpus=self.corpus or tools.corpus)


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Config of RL: its sections.

  Attributes:
    init: the model folder to start from.
    algo: rollouts and learning.
    tasks: training tasks.
    dev: tasks for evaluation during training.
    model: loading options of the folder.
    lora: adapters, as in SFT; None trains the whole model.
    mesh: use of the devices.
    optim: the optimizer.
    rollout: options of playing a trajectory.
    distillation: models that score the policy's tokens; None for none.
    agent: a user's agent, which plays the tasks; None for our own loop.
    vllm: the sampling server; None for our own sampler.
    tools: the policy's tools.
    reward: the reward of an answer.
    checkpoint: schedule of saving the state.
    log: other destinations of metrics.
    watch: metrics that cause a warning, or end the run.
  """

  init: str
  algo: AlgoConfig
  tasks: TasksConfig
  dev: DevConfig
  model: LoadConfig = section(LoadConfig)
  lora: LoraConfig | None = None
  mesh: MeshConfig = section(MeshConfig)
  optim: OptimConfig = section(OptimConfig)
  rollout: RolloutConfig = section(RolloutConfig)
  distillation: DistillationConfig | None = None
  agent: AgentConfig | None = None
  vllm: VllmConfig | None = None
  tools: ToolsConfig = section(ToolsConfig)
  reward: RewardConfig = section(RewardConfig)
  checkpoint: CheckpointConfig = section(CheckpointConfig)
  log: LogConfig = section(LogConfig)
  watch: WatchConfig = section(WatchConfig)

  def __post_init__(self):
    if not self.init:
      raise ValueError("config lacks field 'init'")
    length = self.algo.batch.length
    if length < self.rollout.max_len:
      raise ValueError(
        f"algo.batch.length={length} is shorter than rollout.max_len="
        f"{self.rollout.max_len}: a trajectory must fit a row"
      )
    if self.vllm and self.mesh.rollout:
      raise ValueError(
        f"mesh.rollout={self.mesh.rollout} gives devices to our own sampler, and with "
        "section vllm the server samples: take 0"
      )
    if self.distillation:
      self._check_teachers(self.distillation)
    if self.agent:
      self.agent.check_format(self.reward.shaping.format)
      if self.agent.endpoint:
        raise ValueError("agent.endpoint is for evaluation: RL trains the model `init`")
    field = self.algo.loss.needs_one_row
    spread = ""
    if self.agent:
      spread = "an agent (section agent) may spread"
    elif self.rollout.context.count > 1:
      spread = f"rollout.context.count={self.rollout.context.count} spreads"
    if field and spread:
      raise ValueError(
        f"algo.loss.{field}={getattr(self.algo.loss, field)!r} reads a trajectory's "
        f"tokens in one row, and {spread} them over several: take another"
      )
    # Stale rollouts run beside the learner. On the same devices, their programs could
    # deadlock if both communicate between devices.
    tensor = self.rollout.tensor or self.mesh.tensor
    if self.algo.sampling.staleness and tensor > 1 and not self.mesh.rollout:
      raise ValueError(
        _hindrance(
          self.algo.sampling,
          f"replicas of {tensor} devices (rollout.tensor; mesh.tensor where that is 0) "
          "unless mesh.rollout gives them devices of their own",
        )
      )

  @property
  def extension_fault(self) -> str:
    """Explains why more steps would change the run from its start; "" if not."""
    sampling = self.algo.sampling
    if sampling.task_sampler == "curriculum" and sampling.curriculum:
      return (
        "algo.sampling.task_sampler='curriculum' spreads the tasks over the steps; "
        "only runs with algo.sampling.curriculum=0 or another sampler can be extended"
      )
    return self.optim.extension_fault

  def _check_teachers(self, distillation: DistillationConfig) -> None:
    sampling = self.algo.sampling
    if sampling.filter_groups:
      raise ValueError(
        "algo.sampling.filter_groups=True leaves out groups with equal rewards, which "
        "a teacher scores like others; with section distillation take False"
      )
    if distillation.hint and (self.agent or self.tools.environment):
      section = "agent" if self.agent else "tools.environment"
      raise ValueError(
        "distillation.hint is added to prompts with the task's question alone; section "
        f"{section} writes others: take a teacher without a hint"
      )
    servers = [name for name in distillation.sources if is_address(name)]
    if servers and (self.rollout.constrain or sampling.temperature != 1):
      raise ValueError(
        f"teacher {servers[0]!r} reports log-probs at temperature 1 and without our "
        "grammar: take algo.sampling.temperature=1 and rollout.constrain=False, or a "
        "model folder as teacher"
      )


@dataclasses.dataclass(frozen=True)
class RLPlan:
  """An RL run's meshes and architectures.

  Attributes:
    settings: the run's config.
    cfg: the learner's architecture.
    decoder: the decoder's architecture.
    learner: the learner's mesh.
    rollouts: the decoding mesh, over the learner's devices or dedicated ones.
  """

  settings: RLConfig
  cfg: ModelConfig
  decoder: ModelConfig
  learner: Partitioner
  rollouts: Partitioner

  def make_update(
    self, constraint: Constraint | None, teachers: Teachers | None = None
  ) -> PolicyUpdate:
    """Builds the learner; `constraint` is the rollouts' grammar."""
    settings = self.settings
    algo = settings.algo
    return PolicyUpdate(
      self.cfg,
      loss=algo.loss,
      batch=algo.batch,
      optim=settings.optim,
      lora_config=settings.lora,
      partitioner=self.learner,
      truncation=settings.rollout.truncation,
      steps=algo.steps,
      prompts=algo.sampling.prompts,
      samples=algo.sampling.samples * settings.rollout.context.count,
      temperature=algo.sampling.temperature,
      max_logp_diff=algo.guards.max_logp_diff,
      constraint=constraint,
      teachers=teachers,
    )

  def cache_budget(self, state: Any, total: int) -> memory.CacheBudget:
    """Counts a decoding device's bytes by use.

    Args:
      state: arrays, or shapes with shardings, kept during rollouts.
      total: the device's bytes.
    """
    return memory.cache_budget(
      self.decoder,
      self.settings.rollout,
      self.rollouts,
      decode_params.decoding_shapes(self.decoder, self.rollouts),
      state,
      policies=2 if self.settings.algo.sampling.staleness else 1,
      total=total,
    )

  def budget_line(self, state: Any) -> str:
    """Describes the devices' memory; "" if unknown, or if a server samples.

    Raises:
      ValueError: as `memory.CacheBudget.check`.
    """
    total = memory.device_bytes(self.rollouts)
    if self.settings.vllm or not total:
      return ""
    budget = self.cache_budget(state, total)
    budget.check()
    return budget.describe()


def plan_rl(
  settings: RLConfig,
  cfg: ModelConfig | None = None,
  devices: list[jax.Device] | None = None,
) -> RLPlan:
  """Plans a run, and refuses one that can not work.

  Args:
    cfg: an architecture in place of the folder's.
    devices: absent devices, known only to the compiler; None for this machine's.

  Raises:
    ValueError, FileNotFoundError: the config does not fit the model, the devices, the
      memory or the number of processes.
  """
  batch = settings.algo.batch
  sampling = settings.algo.sampling
  learner, rollouts = make_partitioners(settings.mesh, devices, settings.rollout.tensor)

  # --- Settings that would need processes to wait for each other.
  if sampling.staleness and learner.num_processes > 1:
    beside = "several processes and"
    if settings.vllm:
      raise ValueError(_hindrance(sampling, f"{beside} section vllm"))
    if sampling.task_sampler != "uniform":
      # A draw depends on the groups learnt by then.
      sampler = f"algo.sampling.task_sampler={sampling.task_sampler!r}"
      raise ValueError(_hindrance(sampling, f"{beside} {sampler}"))

  # --- The model, on the learner's and the sampler's mesh.
  if cfg is None:
    cfg = load_config(settings.init, settings.model)
    check_positions(settings.rollout, cfg, settings.init)
  learner.check({**cfg.axes, "B": batch.rows, "T": batch.length}, "algo.batch")
  lora.check(cfg, settings.lora)
  attention.check(cfg, learner, batch.length)
  decoder = decode_params.architecture(cfg, rollouts)
  if settings.vllm is None:
    for replica in rollouts.replicas():
      replica.check(decoder.axes)

  # --- The teachers, which must read the policy's ids.
  if settings.distillation:
    for folder in settings.distillation.folders:
      check_folder(folder, settings.init, settings.model, learner, batch.length)

  # --- Memory: the learner's; and the host's, for all of a step's trajectories.
  if devices is None:
    adapts = settings.lora is not None
    memory.check_training(cfg, "algo.batch", batch.rows, batch.length, adapts, learner)
    groups = (
      f"algo.sampling.prompts={sampling.prompts} of "
      f"algo.sampling.samples={sampling.samples}"
    )
    trajectories = sampling.prompts * sampling.samples
    capacity.check_host({groups: trajectories * capacity.TRAJECTORY})
  return RLPlan(settings, cfg, decoder, learner, rollouts)


def _hindrance(sampling: SamplingConfig, what: str) -> str:
  return (
    f"algo.sampling.staleness={sampling.staleness} does not go with {what}; take 0 "
    "(on-policy)"
  )

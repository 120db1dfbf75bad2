"""Agentic RL: a policy plays tasks with real tools, and learns from what it earned.

By default GRPO with DAPO's clip-higher, token-mean loss and dynamic sampling; section
`algo` chooses (`learner/algorithms.py`). On-policy: each batch of rollouts is of the
policy that learns from it, and is then thrown away. With
`algo.sampling.staleness` rollouts go on while it learns, and tokens may be that many
updates old (`rollout/collect.py`).

budget: a journey is one page, from its config to its results.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from coa_jax import capacity
from coa_jax.config import (
  ConfigError,
  check_sections,
  hash_files,
  hash_json,
  optional,
  prepare_workdir,
  section,
)
from coa_jax.fields import bounded, check_fields
from coa_jax.learner import advantages
from coa_jax.learner.algorithms import (
  GROUP_ADVANTAGES,
  BatchConfig,
  GuardConfig,
  LossConfig,
)
from coa_jax.learner.checkpoint import CheckpointConfig, Checkpoints
from coa_jax.learner.optim import OptimConfig
from coa_jax.learner.update import PolicyUpdate, rewards_of
from coa_jax.lock import exclusive
from coa_jax.model import attention, flops, sizes
from coa_jax.model import lora as adapting
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.folder import open_folder, save_run
from coa_jax.model.hf.io import load_model
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import (
  MeshConfig,
  Partitioner,
  make_partitioner,
  process_dir,
)
from coa_jax.protocol import roles
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import CallStatus, Status, Trajectory, write_jsonl
from coa_jax.report.health import HealthMonitor, WatchConfig
from coa_jax.report.metrics import (
  METRICS_FILE,
  Metrics,
  read_metrics,
  write_json,
)
from coa_jax.report.timers import StepTimer, phase_seconds
from coa_jax.report.tracking import LogConfig
from coa_jax.rewards import shaping
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rollout.collect import RolloutBatch, RolloutCollector
from coa_jax.rollout.scheduler import on_device
from coa_jax.rollout.types import RolloutConfig, SamplingConfig, check_positions
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tasks.sampling import make_task_sampler
from coa_jax.tasks.sources import TasksConfig, select_tasks
from coa_jax.tasks.task import Task
from coa_jax.tools.journal import ToolJournal
from coa_jax.tools.toolbox import Toolbox, ToolsConfig

SECTIONS = (
  "init",
  "model",
  "lora",
  "mesh",
  "optim",
  "rollout",
  "vllm",
  "tools",
  "tasks",
  "reward",
  "algo",
  "dev",
  "checkpoint",
  "log",
  "watch",
)
_MAY_CHANGE = ("log.wandb_project", "watch")
# A tool call, think or plan that is written twice.
_TWICE = shaping.RepetitionConfig(weight=1.0)


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
  """Config section `algo`.

  Attributes:
    steps: batches of rollouts to learn from.
    keep_every: steps between two dumps of all trajectories of a step.
    sampling: what a step rolls out.
    loss: what it minimises.
    batch: how many updates it makes, and of what shape.
    guards: what stops the run.
  """

  steps: int = bounded(least=1)
  keep_every: int = bounded(20, least=1)
  sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
  loss: LossConfig = dataclasses.field(default_factory=LossConfig)
  batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
  guards: GuardConfig = dataclasses.field(default_factory=GuardConfig)

  def __post_init__(self):
    check_fields(self)
    samples = self.sampling.samples
    by_group = self.loss.advantage in GROUP_ADVANTAGES
    if samples < 2 and (by_group or self.sampling.filter_groups):
      raise ValueError(
        f"sampling.samples is {samples}; it must be at least 2, for an advantage "
        "compares a group (or take loss.advantage reinforce++ or gae, and "
        "sampling.filter_groups=False)"
      )
    # Without, PPO's bounds lie around a policy that is several updates away: at 4 of
    # them AReaL fell from 42.0 to 23.3 on AIME24, and with it stayed at 42.2 (its
    # blog/AReaL_v0_3.md, table 3).
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
  """Config section `dev`: greedy evaluation during training, on tasks of its own.

  Attributes:
    every: updates between two evaluations.
    uri: a task file.
    limit: tasks of it.
    corpus: pages that its tasks need; the training corpus where None.
  """

  every: int = bounded(least=1)
  uri: str
  limit: int = bounded(64, least=1)
  corpus: str | None = None

  def __post_init__(self):
    check_fields(self)

  def tools(self, tools: ToolsConfig) -> ToolsConfig:
    """Those of training, over the pages of these tasks."""
    return dataclasses.replace(tools, corpus=self.corpus or tools.corpus)


@exclusive(process_dir)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains from `config.init`; writes `workdir/model` and `results.json`.

  budget: a journey is one page.

  Args:
    config: sections `SECTIONS`; `init` is a model folder; `lora` as in `sft.run`; with
      `vllm` a running server samples; `log` as `tracking.LogConfig` says.
    workdir: where everything goes; an interrupted run in it is continued, and ends
      with the parameters of an uninterrupted one. Several processes share it and the
      tasks; all but the first log into folders of their own.

  Returns:
    What `results.json` holds: steps, rewards, rates and seconds by phase.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    CollapsedError: a number of the learner is not finite, or section `watch` asks for
      the end of a run with such numbers.
    Interrupted: SIGTERM or SIGINT came; where the run stands is saved.
    VllmError: the server can not be used; before any training, or when it is gone.
  """
  # --- Read the config, and refuse what can not work, before any device work.
  check_sections(config, SECTIONS, needed=("init",))
  algo = section(config, "algo", AlgoConfig)
  rollout = section(config, "rollout", RolloutConfig)
  tasks = select_tasks(section(config, "tasks", TasksConfig))
  sampling = algo.sampling
  task_sampler = make_task_sampler(
    sampling.task_sampler,
    tasks,
    rollout.seed,
    sampling.curriculum * algo.steps,
  )
  dev = section(config, "dev", DevConfig)
  dev_tasks = select_tasks(TasksConfig(dev.uri, dev.limit))
  tools = section(config, "tools", ToolsConfig)
  every = section(config, "checkpoint", CheckpointConfig)
  load = section(config, "model", LoadConfig)
  lora = optional(config, "lora", LoraConfig)
  optim = section(config, "optim", OptimConfig)
  partitioner = make_partitioner(section(config, "mesh", MeshConfig))
  cfg, tokenizer = open_folder(config.init, load)
  own = folder_of_process(workdir)
  worker = _worker(config, cfg, tokenizer, algo, rollout, tools, partitioner, own)
  worker.check([*tasks, *dev_tasks])
  tracked = section(config, "log", LogConfig) if own == workdir else None
  watch = HealthMonitor(section(config, "watch", WatchConfig))
  prepare_workdir(config, own, _MAY_CHANGE, _inputs(config, [*tasks, *dev_tasks]))

  # --- Model, learner and where an interrupted run stood.
  cfg, params = load_model(config.init, load, partitioner)
  learner = PolicyUpdate(
    cfg,
    loss=algo.loss,
    batch=algo.batch,
    optim=optim,
    lora=lora,
    partitioner=partitioner,
    truncation=rollout.truncation,
    steps=algo.steps,
    prompts=sampling.prompts,
    samples=sampling.samples,
    temperature=sampling.temperature,
    max_logp_diff=algo.guards.max_logp_diff,
    constraint=worker.constraint,
    allowed=on_device(worker.constraint),
  )
  state, frozen = learner.init(params, rollout.seed)
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), every)
  for_dev = Toolbox(dev.tools(tools))
  with Toolbox(tools) as toolbox, for_dev, worker.grader, worker, checkpoints:
    state, cursor = checkpoints.restore(state) or (state, {})
    watch.replay(own, "rl", int(state.step))
    collector = RolloutCollector(
      worker,
      task_sampler,
      toolbox,
      sampling,
      has_reward_variance=_has_reward_variance,
      steps=algo.steps,
      seed=rollout.seed,
      step=int(state.step),
      cursor=cursor,
    )
    examine = functools.partial(_accuracy, collector, dev_tasks, for_dev)
    clock = StepTimer()
    with Metrics(own, "rl", algo.steps, tracked=tracked) as metrics, collector:
      for step in range(int(state.step), algo.steps):
        # --- Roll out. A signal here saves the state before the step.
        params = learner.policy(state, frozen)
        clock.lap("sync")
        with checkpoints.resumable(state, cursor):
          values = {} if step % dev.every else {"dev_accuracy": examine(params, step)}
          clock.lap("dev")
          rollouts = collector.next(params, step)
          clock.lap("other", **rollouts.spent)
        # --- Learn.
        cursor = rollouts.cursor
        state, learned = learner(state, frozen, rollouts.groups)
        _check_logp_diff(algo.guards, step, learned)
        clock.lap("learn")
        # --- Log, watch, save.
        values |= learned | _describe(rollouts)
        values |= _speed(clock, cfg, algo, lora, partitioner, rollouts)
        metrics.log(step + 1, values, f"reward {values['reward']:.3f}")
        _keep(own, algo, step, rollouts.played)
        # After the line above: what a checkpoint holds has always been logged.
        watch.update(step + 1, values, metrics.warn)
        checkpoints.reached(state, cursor, step + 1 == algo.steps or watch.ends)
        worker.journal.forget(checkpoints.oldest - sampling.staleness)
        clock.lap("save")
        watch.raise_if_stopped(step + 1)
      with checkpoints.resumable(state, cursor):
        accuracy = examine(learner.policy(state, frozen), algo.steps)

  # --- The model as a folder, and the run in a few numbers.
  trained = state.params["policy"], frozen["base"]
  save_run(workdir, cfg, *trained, lora, tokenizer, config.init)
  return _results(own, algo.steps, accuracy)


def _worker(
  config: ml_collections.ConfigDict,
  cfg: ModelConfig,
  tokenizer: Tokenizer,
  algo: AlgoConfig,
  rollout: RolloutConfig,
  tools: ToolsConfig,
  partitioner: Partitioner | None,
  workdir: str,
) -> RolloutWorker:
  """Returns what plays the tasks and has them graded."""
  vllm = optional(config, "vllm", VllmConfig)
  _check_fit(
    cfg, algo, rollout, optional(config, "lora", LoraConfig), partitioner, vllm
  )
  check_positions(rollout, cfg, config.init)
  attention.check(cfg, partitioner, algo.batch.length)
  grader = Grader(section(config, "reward", RewardConfig).kept_in(workdir))
  journal = ToolJournal(os.path.join(workdir, "tool_calls"))
  return RolloutWorker(
    cfg,
    tokenizer,
    rollout,
    tools.tool_descriptions,
    partitioner=partitioner,
    vllm=vllm,
    grader=grader,
    journal=journal,
    policy_changes=algo.sampling.staleness > 0,
  )


def _inputs(config: ml_collections.ConfigDict, tasks: Sequence[Task]) -> dict[str, str]:
  """What is read, for `prepare_workdir`."""
  return {
    "tasks": hash_json(t.to_json() for t in tasks),
    "tools.corpus": hash_files(config.tools.get("corpus")),
    "dev.corpus": hash_files(config.dev.get("corpus")),
    "init": hash_files(config.init, samples=16),
  }


def _keep(workdir: str, algo: AlgoConfig, step: int, played: list[Trajectory]) -> None:
  """Writes a step's trajectories, if they are to be kept."""
  if step % algo.keep_every == 0:
    name = f"step_{step:06d}.jsonl"
    write_jsonl(os.path.join(workdir, "trajectories", name), played)


def _check_fit(
  cfg: ModelConfig,
  algo: AlgoConfig,
  rollout: RolloutConfig,
  lora: LoraConfig | None,
  partitioner: Partitioner | None,
  vllm: VllmConfig | None,
) -> None:
  batch = algo.batch
  sampling = algo.sampling
  if batch.length < rollout.max_len:
    raise ValueError(
      f"algo.batch.length={batch.length} is shorter than rollout.max_len="
      f"{rollout.max_len}: a trajectory must fit a row"
    )
  if partitioner:
    partitioner.check(cfg, B=batch.rows, T=batch.length)
  sizes.check_training(
    cfg, "algo.batch", batch.rows, batch.length, bool(lora), partitioner
  )
  groups = (
    f"algo.sampling.prompts={sampling.prompts} of "
    f"algo.sampling.samples={sampling.samples}"
  )
  trajectories = sampling.prompts * sampling.samples
  capacity.check_host({groups: trajectories * capacity.TRAJECTORY})
  adapting.check(cfg, lora)
  if sampling.staleness:
    _check_asynchronous(sampling, partitioner, vllm)


def _check_asynchronous(
  sampling: SamplingConfig, partitioner: Partitioner | None, vllm: VllmConfig | None
) -> None:
  """Refuses what rollouts that run ahead of the learner can not do."""
  several = jax.process_count() > 1
  # Its collectives and the learner's could wait for each other.
  tensor = partitioner is not None and partitioner.mesh.shape["tensor"] > 1
  hindrance = ""
  if several and vllm:
    hindrance = "several processes and section vllm"
  elif several and sampling.task_sampler != "uniform":
    # What one draws next depends on what has been learnt from when it does.
    hindrance = (
      f"several processes and algo.sampling.task_sampler={sampling.task_sampler!r}"
    )
  elif tensor:
    hindrance = "mesh.tensor above 1"
  if hindrance:
    raise ValueError(
      f"algo.sampling.staleness={sampling.staleness} does not go with {hindrance}; "
      "take 0 (on-policy)"
    )


def _has_reward_variance(groups: Sequence[Sequence[Trajectory]]) -> np.ndarray:
  return advantages.has_reward_variance(rewards_of(groups))


def folder_of_process(workdir: str) -> str:
  """`process_dir` of a run that goes on with no more processes than it had.

  Raises:
    ConfigError: it had fewer; each has a log of its own from the beginning.
  """
  before, own = 1, process_dir(workdir)
  # Claimed before any work, while a kill may leave the first log without the others.
  while os.path.exists(os.path.join(workdir, f"process_{before}", "config.json")):
    before += 1
  begun = os.path.exists(os.path.join(workdir, METRICS_FILE))
  if begun and before < jax.process_count():
    raise ConfigError(
      f"{workdir} holds a run of {before} processes, not {jax.process_count()}; go on "
      "with as many, or choose another workdir"
    )
  return own


def _check_logp_diff(guards: GuardConfig, step: int, values: dict[str, float]) -> None:
  """Stops a run whose sampler and learner differ by more than the config allows."""
  share = values.get("logp_diff_share", 0.0)
  if share > guards.max_logp_diff_share:
    raise ValueError(
      f"step {step + 1}: log-probs of {share:.1%} of the tokens differ "
      f"by more than algo.guards.max_logp_diff={guards.max_logp_diff:g} nats between "
      "sampler and learner, and algo.guards.max_logp_diff_share is "
      f"{guards.max_logp_diff_share:.1%}. This update is not saved; compute more "
      "precisely (model.dtype, model.weight_dtype), or correct with algo.loss.is_clip"
    )


def _speed(
  clock: StepTimer,
  cfg: ModelConfig,
  algo: AlgoConfig,
  lora: LoraConfig | None,
  partitioner: Partitioner | None,
  rollouts: RolloutBatch,
) -> dict[str, float]:
  """The step's seconds by phase, tokens per second, and the learner's `mfu`."""
  learnt = [t.num_tokens for g in rollouts.groups for t in g if t.reward is not None]
  generated = sum(t.usage.generated for t in rollouts.played)
  learnt = learnt * algo.batch.epochs
  out = clock.flush(decode=generated, learn=sum(learnt))
  took = out["seconds_learn"]
  devices = partitioner.mesh.size if partitioner else 1
  return out | flops.utilisation(cfg, learnt, took, bool(lora), devices)


def _describe(rollouts: RolloutBatch) -> dict[str, float]:
  """What was rolled out, in numbers."""
  played = rollouts.played
  out = {
    "reward": _mean([t.reward for t in played]),
    "reward_variance_share": rollouts.num_varied / rollouts.num_groups,
    "generated_tokens": sum(t.usage.generated for t in played),
    "tokens_per_trajectory": np.mean([t.usage.total for t in played]),
    "calls_per_trajectory": np.mean([len(t.calls) for t in played]),
    "infrastructure": sum(t.status == Status.INFRASTRUCTURE for t in played),
    "infrastructure_share": np.mean(
      [t.status == Status.INFRASTRUCTURE for t in played]
    ),
    "truncated": sum(t.status == Status.TRUNCATED for t in played),
    "truncated_share": np.mean([t.status == Status.TRUNCATED for t in played]),
    "repeated_share": np.mean([shaping.repetition(_TWICE, t) < 0 for t in played]),
    **_entropies(played),
    **_failures(played),
    **rollouts.figures,
  }
  for part in sorted({"answer", "format"}.union(*(t.reward_parts for t in played))):
    out[part] = _mean([t.reward_parts.get(part) for t in played])
  return {k: float(v) for k, v in out.items()}


def _entropies(played: list[Trajectory]) -> dict[str, float]:
  """`entropy_ROLE`: nats per token, estimated by -log p of what was sampled.

  Collapse shows in one role first, and the mean over all tokens hides it.
  """
  logps = collections.defaultdict(list)
  for s in (s for t in played for s in t.segments):
    logps["tool" if s.role in roles.TOOLS else s.role or "text"] += s.logps
  return {f"entropy_{role}": -np.mean(x) for role, x in logps.items() if x}


def _failures(played: list[Trajectory]) -> dict[str, float]:
  """`failed_calls_OWNER`: the share of all tool calls that failed by its fault."""
  calls = collections.Counter(call.status for t in played for call in t.calls)
  owners = [status for status in CallStatus if status != CallStatus.OK]
  return {f"failed_calls_{o}": calls[o] / calls.total() for o in owners if calls}


def _accuracy(
  collector: RolloutCollector,
  tasks: Sequence[Task],
  toolbox: Toolbox,
  params: Any,
  step: int,
) -> float:
  """Of greedy answers to tasks, by the policy after `step` updates."""
  played = collector.evaluate(params, step, tasks, toolbox)
  return _mean([t.reward_parts.get("answer") for t in played])


def _mean(values: list[float | None]) -> float:
  """The mean of what was graded: an infrastructure failure is no wrong answer."""
  graded = [v for v in values if v is not None]
  return float(np.mean(graded)) if graded else float("nan")


def _results(workdir: str, steps: int, accuracy: float) -> dict[str, Any]:
  """Writes the run in a few numbers, from its log, to `results.json`."""
  log = read_metrics(os.path.join(workdir, METRICS_FILE), "rl")
  diffs = [row["logp_diff"] for row in log if row.get("logp_diff") is not None]
  results = {
    "steps": steps,
    "dev_accuracy_first": log[0]["dev_accuracy"],
    "dev_accuracy": accuracy,
    "reward_first": log[0]["reward"],
    "reward": log[-1]["reward"],
    "logp_diff": max(diffs, default=None),
    "seconds": log[-1]["seconds"],
    **phase_seconds(log),
  }
  write_json(os.path.join(workdir, "results.json"), results)
  return results

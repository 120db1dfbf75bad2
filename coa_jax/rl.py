"""Agentic RL: a policy plays tasks with real tools, and learns from its rewards.

By default GRPO with DAPO's clip-higher, token-mean loss and dynamic sampling; section
`algo` chooses (`learner/algorithms.py`). On-policy: the learning policy plays each
batch of rollouts, which is then discarded. With `algo.sampling.staleness` rollouts
continue while it learns, and tokens may be that many updates old
(`rollout/collect.py`).

budget: a stage is one page, from its config to its results.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from coa_jax.data.tasks.sampling import make_task_sampler
from coa_jax.data.tasks.sources import TasksConfig, describe_tasks, select_tasks
from coa_jax.data.tasks.task import Task
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
from coa_jax.model import attention, flops, lora, sizes
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.folder import open_folder, save_run
from coa_jax.model.hf.io import load_model
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import (
  MeshConfig,
  Partitioner,
  count_devices,
  is_first_process,
  make_partitioners,
  other_process_dirs,
  process_dir,
)
from coa_jax.protocol.origin import Dialect, Origin, warn_if_other
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report import first_step
from coa_jax.report.card import write_model_cards
from coa_jax.report.health import HealthMonitor, WatchConfig
from coa_jax.report.metrics import (
  METRICS_FILE,
  Metrics,
  read_metrics,
  resume_log,
  say,
  write_json,
)
from coa_jax.report.profiling import traced
from coa_jax.report.restarts import Goodput, say_what_changed
from coa_jax.report.timers import StepTimer, phase_seconds
from coa_jax.report.tracking import LogConfig
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rewards.shaping import ShapingConfig, correctness
from coa_jax.rollout import figures, memory
from coa_jax.rollout.collect import RolloutCollector
from coa_jax.rollout.device_loop import on_device
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import (
  Group,
  RolloutBatch,
  RolloutConfig,
  SamplingConfig,
  check_positions,
)
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.runtime import capacity, processes
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import bounded, check_fields, section
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.record import (
  hash_files,
  hash_json,
  prepare_workdir,
  read_begun,
  read_origin_of,
)
from coa_jax.tools.journal import ToolJournal
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.unread import warn_unread

# Another mesh only changes the rounding of sums.
_MAY_CHANGE = ("log", "watch", "mesh")


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
  """Config section `algo`.

  Attributes:
    steps: batches of rollouts to learn from. A larger number extends a workdir's run if
      optim.schedule is constant and no curriculum is spread over it.
    keep_every: steps between two dumps of all trajectories of a step.
    sampling: a step's rollouts.
    loss: its loss.
    batch: number and shape of its updates.
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
    samples = self.sampling.samples
    by_group = self.loss.advantage in GROUP_ADVANTAGES
    if samples < 2 and (by_group or self.sampling.filter_groups):
      raise ValueError(
        f"sampling.samples is {samples}; it must be at least 2, for an advantage "
        "compares a group (or take loss.advantage reinforce++ or gae, and "
        "sampling.filter_groups=False)"
      )
    # Without it, PPO's bounds are around a policy several updates away: at 4 of them
    # AReaL fell from 42.0 to 23.3 on AIME24, and with it stayed at 42.2 (its
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
  """Config section `dev`: greedy evaluation during training, on its own tasks.

  Attributes:
    every: updates between two evaluations.
    uri: tasks, as `tasks.uri`; `fields`, `kind` and `source` of `tasks` hold here, too.
    limit: tasks of it.
    corpus: pages for its tasks; the training corpus if None.
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
    tasks: to learn from.
    dev: tasks to evaluate on meanwhile.
    model: loading options of the folder.
    lora: adapters, as in SFT; None trains the whole model.
    mesh: use of the devices.
    optim: the optimizer.
    rollout: options of playing a trajectory.
    vllm: the sampling server; None for our own sampler.
    tools: the policy's tools.
    reward: the reward of an answer.
    checkpoint: schedule of saving the state.
    log: other destinations of metrics.
    watch: metrics for a warning, or the run's end.
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
    # Rollouts then run beside the learner: on the same devices, their programs could
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


@exclusive(process_dir)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains from `config.init`; writes `workdir/model` and `results.json`.

  budget: a journey is one page.

  Args:
    config: as `RLConfig` says.
    workdir: folder of all outputs; an interrupted run in it resumes, and ends with the
      parameters of an uninterrupted one. Several processes share it and the tasks; all
      but the first log into their own folders. With other processes or devices than
      before it plays the same tasks with the same seeds; the rounding of sums may
      differ.

  Returns:
    The contents of `results.json`: steps, rewards, rates and seconds by phase.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    CollapsedError: a learner metric is not finite, or section `watch` ends a run with
      such metrics.
    Interrupted: SIGTERM or SIGINT came; the run's position is saved.
    VllmError: the server can not be used; before any training, or when it is gone.
  """
  # --- Read the config, and refuse faults, before any device work.
  settings = read_config(config, RLConfig)
  algo = settings.algo
  sampling = algo.sampling
  rollout = settings.rollout

  # --- Tasks to learn from, and others to watch the policy on.
  tasks = select_tasks(settings.tasks)
  dev_tasks = select_tasks(settings.dev.tasks(settings.tasks))
  if is_first_process():
    say(f"{describe_tasks(tasks)}; dev: {describe_tasks(dev_tasks)}")

  # --- The model's architecture, and its worker; its weights come later. Rollouts may
  # have dedicated devices; otherwise they use the learner's.
  partitioner, rollout_partitioner = make_partitioners(
    settings.mesh, rollout_tensor=rollout.tensor
  )
  apart = settings.mesh.rollout and partitioner
  processes.keep_to(partitioner.mesh.devices.flat if apart else ())
  cfg, tokenizer = open_folder(settings.init, settings.model)
  _check_fit(settings, cfg, partitioner)
  own_dir = process_dir(workdir)
  other_dirs = other_process_dirs(workdir)
  worker = make_worker(
    cfg,
    tokenizer,
    rollout,
    settings.tools.tool_descriptions,
    partitioner=rollout_partitioner,
    vllm=settings.vllm,
    grader=Grader(settings.reward.kept_in(own_dir), other_dirs),
    journal=ToolJournal(
      os.path.join(own_dir, "tool_calls"),
      [os.path.join(folder, "tool_calls") for folder in other_dirs],
    ),
    policy_changes=sampling.staleness > 0,
  )
  dropped = {"dropped_tasks": len(tasks), "dropped_dev_tasks": len(dev_tasks)}
  tasks = worker.admit(tasks)
  dev_tasks = worker.admit(dev_tasks, "dev tasks")
  dropped["dropped_tasks"] -= len(tasks)
  dropped["dropped_dev_tasks"] -= len(dev_tasks)
  worker.check([*tasks, *dev_tasks])
  task_sampler = make_task_sampler(
    sampling.task_sampler,
    tasks,
    seed=rollout.seed,
    steps=sampling.curriculum * algo.steps,
  )
  dialect = worker.episode_config
  warn_if_other(settings.init, dialect.variant, dialect.style)
  warn_unread(settings.tools)
  monitor = HealthMonitor(settings.watch)
  # The last refusal: from here on the workdir is this run's.
  prepare_workdir(
    settings,
    own_dir,
    may_change=_MAY_CHANGE,
    inputs=_inputs(settings, [*tasks, *dev_tasks]),
    may_grow={"algo.steps": _extension_fault(settings)},
    origin={
      "dialects": [dataclasses.asdict(Dialect.of(dialect.variant, dialect.style))],
      "max_len": rollout.max_len,
      "seed": rollout.seed,
    },
  )

  # --- Load the model, and build the learner.
  cfg, params = load_model(settings.init, settings.model, partitioner)
  learner = PolicyUpdate(
    cfg,
    loss=algo.loss,
    batch=algo.batch,
    optim=settings.optim,
    lora_config=settings.lora,
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
  if settings.vllm is None:
    policies = 2 if sampling.staleness else 1
    kept = (state, frozen)
    line = memory.budget_line(cfg, rollout, rollout_partitioner, kept, policies)
    if line:
      say(line)

  # --- Open the run's resources, and resume an interrupted one.
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), settings.checkpoint)
  toolbox = Toolbox(settings.tools)
  dev_toolbox = Toolbox(settings.dev.tools(settings.tools))
  with toolbox, dev_toolbox, worker.grader, worker, checkpoints:
    state, cursor = checkpoints.restore(state) or (state, {})
    devices = count_devices(partitioner, rollout_partitioner)
    log = resume_log(own_dir, "rl", int(state.step), workdir)
    if is_first_process():
      say_what_changed(log, devices, jax.process_count())
      drop_trajectories([own_dir, *other_dirs], int(state.step))
    # Warnings before the checkpoint count, so that patience ends at the same step.
    monitor.replay(own_dir, "rl", int(state.step))
    collector = RolloutCollector(
      worker,
      task_sampler,
      toolbox,
      sampling,
      has_reward_variance=functools.partial(has_mixed_answers, settings.reward.shaping),
      steps=algo.steps,
      seed=rollout.seed,
      step=int(state.step),
      cursor=cursor,
      until_done=checkpoints.until_done,
    )
    evaluate = functools.partial(_accuracy, collector, dev_tasks, dev_toolbox)
    timer = StepTimer()
    # All but the first process log only into their own folders.
    tracked = settings.log if own_dir == workdir else None
    metrics = Metrics(own_dir, "rl", algo.steps, tracked=tracked)
    goodput = Goodput(log, read_begun(workdir), devices)
    with metrics, goodput, collector:
      numbers = range(int(state.step), algo.steps)
      for step in traced(numbers, settings.log.profile, "rl", own_dir, offset=1):
        # --- Roll out. A signal here saves the state before the step.
        params = learner.policy(state, frozen)  # adapters merged, as decoding wants it
        timer.lap("sync")
        values = {}
        with checkpoints.resumable(state, cursor):
          if step % settings.dev.every == 0:
            values["dev_accuracy"] = evaluate(params, step)
          timer.lap("dev")
          rollouts = collector.next(params, step)
          timer.lap("other", **rollouts.spent)

        # --- Learn. The old state is donated: a signal waits until there is a new one
        # to save. Merged adapters are a copy of the model, and their memory is needed.
        cursor = rollouts.cursor
        del params
        state, learned = learner(state, frozen, rollouts.groups)
        _check_logp_diff(algo.guards, step, learned)
        timer.lap("learn")

        # --- Log, watch, save.
        values |= learned
        values |= figures.describe(rollouts)
        values |= _speed(timer, rollouts, values, settings, cfg, partitioner)
        values |= goodput.after_step(values, output=values["generated_tokens"])
        metrics.log(step + 1, values, f"reward {values['reward']:.3f}")
        if step == 0:
          for line in _first_warnings(settings, rollouts, tasks, worker.grader):
            metrics.warn(f"warning: step 1: {line}")
        if step % algo.keep_every == 0:
          name = f"step_{step:06d}.jsonl"
          path = os.path.join(own_dir, "trajectories", name)
          write_jsonl(path, rollouts.own)
        # After the line above: checkpointed steps are always logged.
        monitor.update(step + 1, values, metrics.warn)
        is_last = step + 1 == algo.steps or monitor.ends
        checkpoints.reached(state, cursor, is_last)
        # A group missing in the oldest checkpoint began up to `staleness` before.
        worker.journal.forget(checkpoints.oldest - sampling.staleness)
        timer.lap("save")
        monitor.raise_if_stopped(step + 1)
      # --- Evaluate the new policy on `dev`'s tasks.
      with checkpoints.resumable(state, cursor):
        accuracy = evaluate(learner.policy(state, frozen), algo.steps)

  # --- Write the model folder, and the run's results.
  save_run(
    workdir,
    cfg,
    state.params["policy"],
    frozen["base"],
    settings.lora,
    tokenizer,
    settings.init,
    Origin.of_run(read_origin_of(own_dir), algo.steps),
  )
  results = _results(own_dir, algo.steps, accuracy, dropped)
  if is_first_process():
    write_model_cards(workdir, own_dir, settings.init, algo.steps)
  return results


def _extension_fault(settings: RLConfig) -> str:
  """Explains why a run with more steps differs from the start; "" if it does not."""
  sampling = settings.algo.sampling
  if sampling.task_sampler == "curriculum" and sampling.curriculum:
    return (
      "algo.sampling.task_sampler='curriculum' spreads the tasks over the steps; "
      "only algo.sampling.curriculum=0 and other samplers go on"
    )
  return settings.optim.extension_fault


def _inputs(settings: RLConfig, tasks: Sequence[Task]) -> dict[str, str]:
  """Returns the run's inputs, for `prepare_workdir`."""
  return {
    "tasks": hash_json(map(Task.to_json, tasks)),
    "tools.corpus": hash_files(settings.tools.corpus),
    "dev.corpus": hash_files(settings.dev.corpus),
    "init": hash_files(settings.init, samples=16),
  }


def _check_fit(
  settings: RLConfig, cfg: ModelConfig, partitioner: Partitioner | None
) -> None:
  """Refuses misfits of the model, the devices, the host or the processes."""
  # --- The learner's memory, on the mesh and on each device.
  batch = settings.algo.batch
  sampling = settings.algo.sampling
  if partitioner:
    partitioner.check({**cfg.axes, "B": batch.rows, "T": batch.length}, "algo.batch")
  adapts = settings.lora is not None
  sizes.check_training(cfg, "algo.batch", batch.rows, batch.length, adapts, partitioner)

  # --- The host's memory: all trajectories of a step.
  groups = (
    f"algo.sampling.prompts={sampling.prompts} of "
    f"algo.sampling.samples={sampling.samples}"
  )
  trajectories = sampling.prompts * sampling.samples
  capacity.check_host({groups: trajectories * capacity.TRAJECTORY})

  # --- The model's limits.
  lora.check(cfg, settings.lora)
  check_positions(settings.rollout, cfg, settings.init)
  attention.check(cfg, partitioner, batch.length)

  # --- Settings that would need processes to wait for each other.
  if sampling.staleness and jax.process_count() > 1:
    beside = "several processes and"
    if settings.vllm:
      raise ValueError(_hindrance(sampling, f"{beside} section vllm"))
    if sampling.task_sampler != "uniform":
      # A draw depends on the groups learnt by then.
      sampler = f"algo.sampling.task_sampler={sampling.task_sampler!r}"
      raise ValueError(_hindrance(sampling, f"{beside} {sampler}"))


def _hindrance(sampling: SamplingConfig, what: str) -> str:
  return (
    f"algo.sampling.staleness={sampling.staleness} does not go with {what}; take 0 "
    "(on-policy)"
  )


def has_mixed_answers(shaping: ShapingConfig, groups: Sequence[Group]) -> np.ndarray:
  """Marks in keep_G the groups neither all right nor all wrong.

  DAPO filters by right answers (arXiv 2503.14476, eq. 11). By rewards, an all-wrong
  group with differing penalties would be kept and divided by its small deviation.
  """
  right = functools.partial(correctness, shaping)
  return advantages.has_reward_variance(
    rewards_of(groups, lambda t: right(t.reward_parts))
  )


def drop_trajectories(folders: Sequence[str], step: int) -> None:
  """Deletes processes' files of steps after a checkpoint: they are repeated.

  Args:
    folders: all processes', including former ones'.
    step: the checkpoint's, and the first repeated one.
  """
  for folder in folders:
    for path in glob.glob(os.path.join(glob.escape(folder), "trajectories", "step_*")):
      match = re.fullmatch(r"step_(\d+)\.jsonl", os.path.basename(path))
      if match and int(match[1]) >= step:
        os.remove(path)


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
  timer: StepTimer,
  rollouts: RolloutBatch,
  values: dict[str, float],
  settings: RLConfig,
  cfg: ModelConfig,
  partitioner: Partitioner | None,
) -> dict[str, float]:
  """The step's seconds by phase, tokens per second, and the learner's `mfu`."""
  # The learner reads trajectories with a reward, once per epoch.
  lengths: list[int] = []
  for group in rollouts.groups:
    lengths += [t.num_tokens for t in group if t.reward is not None]
  lengths *= settings.algo.batch.epochs
  out = timer.flush(decode=values["generated_tokens"], learn=sum(lengths))
  return out | flops.utilisation(
    cfg,
    lengths,
    out["seconds_learn"],
    settings.lora is not None,
    partitioner.mesh.size if partitioner else 1,
  )


def _accuracy(
  collector: RolloutCollector,
  tasks: Sequence[Task],
  toolbox: Toolbox,
  params: Any,
  step: int,
) -> float:
  """Returns metrics of greedy answers to tasks, by the policy after `step` updates."""
  played = collector.evaluate(params, step, tasks, toolbox)
  return figures.mean_graded(t.reward_parts.get("answer") for t in played)


def _first_warnings(
  settings: RLConfig, rollouts: RolloutBatch, tasks: Sequence[Task], grader: Grader
) -> list[str]:
  """Warnings of the first step, by the attempts of this process."""
  exact = settings.reward.match != "f1"
  tools: tuple[str, ...] = ()
  if settings.tools.enabled and settings.rollout.max_calls:
    tools = settings.tools.tags
  return first_step.warnings(
    rollouts.own,
    tasks,
    tools,
    lambda task: exact and grader.grader_of(task) == "qa",
  )


def _results(
  workdir: str, steps: int, accuracy: float, dropped: dict[str, int]
) -> dict[str, Any]:
  """Writes a summary of the run's log to `results.json`."""
  log = read_metrics(os.path.join(workdir, METRICS_FILE), "rl")
  diffs = [row["logp_diff"] for row in log if row.get("logp_diff") is not None]
  results = {
    "steps": steps,
    "dev_accuracy_first": log[0]["dev_accuracy"],
    "dev_accuracy": accuracy,
    "reward_first": log[0]["reward"],
    "reward": log[-1]["reward"],
    "logp_diff": max(diffs, default=None),  # None if no step learnt anything
    "seconds": log[-1]["seconds"],
    "goodput": log[-1].get("goodput"),
    **phase_seconds(log),
    **dropped,
  }
  write_json(os.path.join(workdir, "results.json"), results)
  return results

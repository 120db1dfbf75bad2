"""Agentic RL: a policy plays tasks with real tools, and learns from its rewards.

The default is GRPO with DAPO's clip-higher, token-mean loss and dynamic sampling;
section `algo` selects others (`learner/algorithms.py`). Training is on-policy: the
learning policy plays each batch of rollouts, which is then discarded. With
`algo.sampling.staleness` rollouts continue during learning, and tokens may be that many
steps old (`rollout/collect.py`).

budget: a stage is one page, from its config to its results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import ml_collections
import numpy as np

from coa_jax.data.tasks.sampling import make_task_sampler
from coa_jax.data.tasks.sources import describe_tasks, select_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.learner import advantages
from coa_jax.learner.algorithms import GuardConfig
from coa_jax.learner.checkpoint import Checkpoints
from coa_jax.learner.state import TrainState
from coa_jax.learner.teachers import (
  ModelTeacher,
  Scorer,
  Teachers,
  is_address,
  make_hinted,
)
from coa_jax.learner.update import PolicyUpdate, rewards_of
from coa_jax.model import flops
from coa_jax.model.hf.folder import load_tokenizer, save_run
from coa_jax.model.hf.io import load_model, load_params
from coa_jax.model.sharding import count_devices
from coa_jax.plan.rl import RLConfig, RLPlan, plan_rl
from coa_jax.protocol.origin import Dialect, Origin, warn_if_other
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report import first_step
from coa_jax.report.card import write_model_cards
from coa_jax.report.health import HealthMonitor
from coa_jax.report.metrics import (
  Metrics,
  read_metrics,
  resume_log,
  say,
  write_json,
)
from coa_jax.report.profiling import traced
from coa_jax.report.restarts import Goodput, say_what_changed
from coa_jax.report.timers import StepTimer, phase_seconds
from coa_jax.rewards.grader import Grader
from coa_jax.rewards.shaping import ShapingConfig, correctness
from coa_jax.rollout import figures
from coa_jax.rollout.agents.worker import AgentWorker
from coa_jax.rollout.collect import RolloutCollector
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import Group, RolloutBatch
from coa_jax.rollout.vllm.teacher import ServerTeacher
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.runtime import processes
from coa_jax.runtime.config import read_config
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.processes import is_first_process, other_process_dirs, process_dir
from coa_jax.runtime.record import (
  hash_files,
  hash_json,
  prepare_workdir,
  read_begun,
  read_origin_of,
)
from coa_jax.tools.journal import ToolJournal
from coa_jax.tools.toolbox import Toolbox
from coa_jax.tools.unread import warn_unread

# Another mesh only changes the rounding of sums.
_MAY_CHANGE = ("log", "watch", "mesh")


@dataclasses.dataclass
class _Session:
  """An open run: its records and resources.

  Attributes:
    frozen: the untrained parameters.
    cursor: the collector's position.
    evaluate: plays the dev tasks with the given parameters, at the given step.
    own_dir: this process's folder.
  """

  learner: PolicyUpdate
  state: TrainState
  frozen: Any
  cursor: dict[str, Any]
  collector: RolloutCollector
  evaluate: Callable[[Any, int], float]
  checkpoints: Checkpoints
  metrics: Metrics
  goodput: Goodput
  timer: StepTimer
  own_dir: str


@exclusive(process_dir)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains from `config.init`; writes `workdir/model` and `results.json`.

  budget: a stage is one page.

  Args:
    config: as `RLConfig` says.
    workdir: the output folder. An interrupted run resumes there, and ends with the same
      parameters as without an interruption. Several processes share the folder and the
      tasks; all but the first log into their own folders. With other processes or
      devices than before, a run plays the same tasks with the same seeds; the rounding
      of sums may differ.

  Returns:
    The contents of `results.json`: steps, rewards, rates and seconds by phase.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    CollapsedError: a learner metric is not finite, or section `watch` ends a run with
      such metrics.
    Interrupted: SIGTERM or SIGINT came; the run's position is saved.
    VllmError: the server can not be used: before any training, or once it is gone.
  """
  # --- Plan: read the config and the tasks, and refuse faults.
  settings = read_config(config, RLConfig)
  algo = settings.algo
  tasks = _Tasks.read(settings)
  plan = plan_rl(settings)
  tokenizer = load_tokenizer(settings.init, plan.cfg)
  worker = _make_worker(plan, tokenizer, workdir)
  tasks = tasks.admitted(worker)
  monitor = HealthMonitor(settings.watch)
  # The last refusal: from here on the workdir is this run's.
  _claim(settings, tasks, worker, process_dir(workdir))

  with _open(plan, worker, tasks, workdir) as s:
    first = int(s.state.step)
    # Earlier metrics count, so that patience ends at the same step.
    monitor.replay(s.own_dir, "rl", first)
    numbers = range(first, algo.steps)
    for step in traced(numbers, settings.log.profile, "rl", s.own_dir, offset=1):
      # --- Roll out. A signal here saves the state before the step.
      params = s.learner.policy(s.state, s.frozen)  # adapters merged
      s.timer.lap("sync")
      values = {}
      with s.checkpoints.resumable(s.state, s.cursor):
        if step % settings.dev.every == 0:
          values["dev_accuracy"] = s.evaluate(params, step)
        s.timer.lap("dev")
        rollouts = s.collector.next(params, step)
        s.timer.lap("other", **rollouts.spent)

      # --- Learn. The old state is donated: a signal waits for the new one. Merged
      # adapters are a copy of the model, and their memory is needed.
      s.cursor = rollouts.cursor
      del params
      s.state, learned = s.learner(s.state, s.frozen, rollouts.groups)
      _check_logp_diff(algo.guards, step, learned)
      s.timer.lap("learn")

      # --- Log, watch, save.
      values |= learned
      values |= figures.describe(rollouts)
      values |= _speed(s.timer, rollouts, values, plan)
      values |= s.goodput.after_step(values, output=values["generated_tokens"])
      s.metrics.log(step + 1, values, f"reward {values['reward']:.3f}")
      if step == 0:
        for line in _first_warnings(settings, rollouts, tasks.train, worker.grader):
          s.metrics.warn(f"warning: step 1: {line}")
      if step % algo.keep_every == 0:
        name = f"step_{step:06d}.jsonl"
        write_jsonl(os.path.join(s.own_dir, "trajectories", name), rollouts.own)
      # After logging: checkpointed steps are always logged.
      monitor.update(step + 1, values, s.metrics.warn)
      is_last = step + 1 == algo.steps or monitor.ends
      s.checkpoints.reached(s.state, s.cursor, is_last)
      # A group missing in the oldest checkpoint began up to `staleness` steps before.
      worker.journal.forget(s.checkpoints.oldest - algo.sampling.staleness)
      s.timer.lap("save")
      monitor.raise_if_stopped(step + 1)
    # --- Evaluate the final policy on the dev tasks.
    with s.checkpoints.resumable(s.state, s.cursor):
      accuracy = s.evaluate(s.learner.policy(s.state, s.frozen), algo.steps)

  # --- Write the model folder, and the run's results.
  save_run(
    workdir,
    plan.cfg,
    s.state.params["policy"],
    s.frozen["base"],
    settings.lora,
    tokenizer,
    settings.init,
    Origin.of_run(read_origin_of(s.own_dir), algo.steps),
  )
  results = _results(s.own_dir, algo.steps, accuracy, tasks.dropped)
  if is_first_process():
    write_model_cards(workdir, s.own_dir, settings.init, algo.steps)
  return results


@dataclasses.dataclass(frozen=True)
class _Tasks:
  """A run's tasks.

  Attributes:
    train: training tasks.
    dev: tasks for evaluation during training.
    dropped: numbers of tasks with too long prompts, for `results.json`.
  """

  train: Sequence[Task]
  dev: Sequence[Task]
  dropped: dict[str, int]

  @classmethod
  def read(cls, settings: RLConfig) -> _Tasks:
    """Reads the config's tasks."""
    train = select_tasks(settings.tasks)
    dev = select_tasks(settings.dev.tasks(settings.tasks))
    if is_first_process():
      say(f"{describe_tasks(train)}; dev: {describe_tasks(dev)}")
    return cls(train, dev, {})

  def admitted(self, worker: RolloutWorker) -> _Tasks:
    """Drops tasks too long for the worker, and refuses ungradable tasks."""
    train = worker.admit(self.train)
    dev = worker.admit(self.dev, "dev tasks")
    worker.grader.check([*train, *dev], worker.engine.config.max_len)
    dropped = {
      "dropped_tasks": len(self.train) - len(train),
      "dropped_dev_tasks": len(self.dev) - len(dev),
    }
    return _Tasks(train, dev, dropped)


def _make_worker(plan: RLPlan, tokenizer: Tokenizer, workdir: str) -> RolloutWorker:
  """Makes the run's rollout worker; its weights come later."""
  settings = plan.settings
  processes.keep_to(plan.learner.devices if settings.mesh.rollout else ())
  own_dir = process_dir(workdir)
  other_dirs = other_process_dirs(workdir)
  worker = make_worker(
    plan.cfg,
    tokenizer,
    settings.rollout,
    settings.tools.tool_descriptions,
    partitioner=plan.rollouts,
    vllm=settings.vllm,
    grader=Grader(settings.reward.kept_in(own_dir), other_dirs),
    journal=ToolJournal(
      os.path.join(own_dir, "tool_calls"),
      [os.path.join(folder, "tool_calls") for folder in other_dirs],
    ),
    policy_changes=settings.algo.sampling.staleness > 0,
    parallel_calls=settings.tools.parallel,
    conversations=settings.agent.format if settings.agent else "",
  )
  return AgentWorker(worker, settings.agent) if settings.agent else worker


def _claim(
  settings: RLConfig, tasks: _Tasks, worker: RolloutWorker, own_dir: str
) -> None:
  """Records the run in its folder, or refuses another run's folder."""
  dialect = worker.episode_config
  warn_if_other(settings.init, dialect.variant, dialect.style)
  warn_unread(settings.tools)
  inputs = {
    "tasks": hash_json(map(Task.to_json, [*tasks.train, *tasks.dev])),
    "tools.corpus": hash_files(settings.tools.corpus),
    "dev.corpus": hash_files(settings.dev.corpus),
    "init": hash_files(settings.init, samples=16),
  }
  for folder in settings.distillation.folders if settings.distillation else ():
    inputs[f"teacher {folder}"] = hash_files(folder, samples=16)
  prepare_workdir(
    settings,
    own_dir,
    may_change=_MAY_CHANGE,
    inputs=inputs,
    may_grow={"algo.steps": settings.extension_fault},
    origin={
      "dialects": [dataclasses.asdict(Dialect.of(dialect.variant, dialect.style))],
      "max_len": settings.rollout.max_len,
      "seed": settings.rollout.seed,
    },
  )


@contextlib.contextmanager
def _open(
  plan: RLPlan, worker: RolloutWorker, tasks: _Tasks, workdir: str
) -> Iterator[_Session]:
  """Loads the model, opens the run's resources, and resumes an interrupted run."""
  settings = plan.settings
  sampling = settings.algo.sampling
  seed = settings.rollout.seed
  own_dir = process_dir(workdir)

  # --- The model, and the learner.
  params = load_params(settings.init, plan.cfg, plan.learner)
  teachers = _load_teachers(plan, worker)
  learner = plan.make_update(worker.constraint, teachers)
  state, frozen = learner.init(params, seed)
  del params  # their memory is needed
  if line := plan.budget_line((state, frozen, teachers and teachers.params)):
    say(line)

  # --- Resources, in opening order.
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), settings.checkpoint)
  toolbox = Toolbox(settings.tools)
  dev_toolbox = Toolbox(settings.dev.tools(settings.tools))
  with toolbox, dev_toolbox, worker.grader, worker, checkpoints:
    # --- Resume.
    state, cursor = checkpoints.restore(state) or (state, {})
    step = int(state.step)
    devices = count_devices(plan.learner, plan.rollouts)
    log = resume_log(own_dir, "rl", step, workdir)
    if is_first_process():
      say_what_changed(log, devices, jax.process_count())
      drop_trajectories([own_dir, *other_process_dirs(workdir)], step)

    # --- The records, and the collector. All but the first process log only into their
    # own folders.
    tracked = settings.log if own_dir == workdir else None
    metrics = Metrics(own_dir, "rl", settings.algo.steps, tracked=tracked)
    goodput = Goodput(log, read_begun(workdir), devices)

    def until_done(futures: Sequence[Future[Any]]) -> None:
      metrics.follow(futures, "trajectories")
      checkpoints.until_done(futures)

    task_sampler = make_task_sampler(
      sampling.task_sampler,
      tasks.train,
      seed=seed,
      steps=sampling.curriculum * settings.algo.steps,
    )
    collector = RolloutCollector(
      worker,
      task_sampler,
      toolbox,
      sampling,
      has_reward_variance=functools.partial(has_mixed_answers, settings.reward.shaping),
      steps=settings.algo.steps,
      seed=seed,
      step=step,
      cursor=cursor,
      until_done=until_done,
    )
    with metrics, goodput, collector:
      yield _Session(
        learner=learner,
        state=state,
        frozen=frozen,
        cursor=cursor,
        collector=collector,
        evaluate=functools.partial(_accuracy, collector, tasks.dev, dev_toolbox),
        checkpoints=checkpoints,
        metrics=metrics,
        goodput=goodput,
        timer=StepTimer(),
        own_dir=own_dir,
      )


def _load_teachers(plan: RLPlan, worker: RolloutWorker) -> Teachers | None:
  """Loads the teacher models onto the learner's devices."""
  settings = plan.settings
  config = settings.distillation
  if config is None:
    return None
  batch = settings.algo.batch
  scorers: dict[str, Scorer] = {}
  for source in config.sources:
    if is_address(source):
      scorers[source] = ServerTeacher(source, batch.length, plan.cfg.vocab_size)
      continue
    cfg, params = plan.cfg, None  # the policy's own
    if source:
      cfg, params = load_model(source, settings.model, plan.learner)
    temperature = settings.algo.sampling.temperature
    scorers[source] = ModelTeacher(
      cfg, params, batch, plan.learner, temperature, worker.constraint
    )
  dialect = worker.episode_config
  hinted = make_hinted(
    config.hint, worker.tokenizer, dialect.variant, dialect.style, batch.length
  )
  return Teachers(config, scorers, hinted)


def has_mixed_answers(shaping: ShapingConfig, groups: Sequence[Group]) -> np.ndarray:
  """Returns keep_G, True for groups neither all right nor all wrong.

  DAPO filters by right answers (arXiv 2503.14476, eq. 11). A filter by rewards would
  keep an all-wrong group with differing penalties, and divide by its small deviation.
  """
  return advantages.has_reward_variance(
    rewards_of(groups, lambda t: correctness(shaping, t.reward_parts))
  )


def drop_trajectories(folders: Sequence[str], step: int) -> None:
  """Deletes the trajectories of steps that a run resumed at `step` repeats."""
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
  plan: RLPlan,
) -> dict[str, float]:
  """Returns the step's seconds by phase, tokens per second, and learner `mfu`."""
  # The learner reads trajectories with a reward, once per epoch.
  lengths: list[int] = []
  for group in rollouts.groups:
    for t in group:
      if t.reward is not None:
        lengths += [context.num_tokens for context in t.split()]
  lengths *= plan.settings.algo.batch.epochs
  out = timer.flush(decode=values["generated_tokens"], learn=sum(lengths))
  return out | flops.utilisation(
    plan.cfg,
    lengths,
    out["seconds_learn"],
    plan.settings.lora is not None,
    plan.learner.mesh.size,
  )


def _accuracy(
  collector: RolloutCollector,
  tasks: Sequence[Task],
  toolbox: Toolbox,
  params: Any,
  step: int,
) -> float:
  """Returns the accuracy of greedy answers, by the policy after `step` steps."""
  played = collector.evaluate(params, step, tasks, toolbox)
  return figures.mean_graded(t.reward_parts.get("answer") for t in played)


def _first_warnings(
  settings: RLConfig, rollouts: RolloutBatch, tasks: Sequence[Task], grader: Grader
) -> list[str]:
  tools: tuple[str, ...] = ()
  if settings.tools.enabled and settings.rollout.max_calls:
    tools = settings.tools.tags
  return first_step.warnings(rollouts.own, tasks, tools, grader)


def _results(
  workdir: str, steps: int, accuracy: float, dropped: dict[str, int]
) -> dict[str, Any]:
  """Writes a summary of the run's log to `results.json`."""
  log = read_metrics(workdir, "rl")
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

"""Agentic RL: a policy plays tasks with real tools, and learns from what it earned.

GRPO with DAPO's clip-higher, token-mean loss and dynamic sampling. On-policy: one
update per batch of rollouts; the sampler's own log-probs are the old policy's, or, with
`algo.importance_cap`, the learner's own are and its tokens are weighted.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from coa_jax.config import check_sections, claim, optional, section
from coa_jax.learner import advantages, losses
from coa_jax.learner import batch as batching
from coa_jax.learner.batch import Batch
from coa_jax.learner.checkpoint import CheckpointConfig, Checkpoints
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, SumLoss, TrainState, init_state
from coa_jax.model import lora as adapting
from coa_jax.model.architecture import LoadConfig, QwenConfig
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import Layout, MeshConfig, make_layout, own_folder
from coa_jax.model.weights import load_config, load_model
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Status, Trajectory, write_jsonl
from coa_jax.report.metrics import (
  METRICS_FILE,
  Clock,
  Metrics,
  read_metrics,
  write_json,
)
from coa_jax.rollout.engine import RolloutConfig
from coa_jax.rollout.player import Player
from coa_jax.rollout.slots import on_device
from coa_jax.rollout.toolbox import Toolbox, ToolsConfig
from coa_jax.rollout.vllm_server import VllmConfig
from coa_jax.tasks.rewards.grader import Grader, RewardConfig
from coa_jax.tasks.sources import TasksConfig, select_tasks
from coa_jax.tasks.task import Task

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
)


@dataclasses.dataclass(frozen=True)
class AlgoConfig:
  """Config section `algo`.

  Attributes:
    steps: updates.
    prompts: groups in one update's batch, at most.
    samples: trajectories of a group.
    rounds: batches of `prompts` groups rolled out to find that many whose rewards
      differ (DAPO's dynamic sampling); 1 takes what one batch gives.
    temperature: of the rollouts.
    clip_low: the ratio's lower bound is 1 - clip_low.
    clip_high: its upper bound is 1 + clip_high.
    importance_cap: most weight of a token whose sampler is another program than the
      learner (vLLM); 0 for no such weights. See `losses.policy_gradient`.
    gap: nats; the metric `gap_share` is the share of tokens whose log-probs differ by
      more between sampler and learner.
    gap_limit: the run stops at a step whose `gap_share` is above this; 1 for never.
    standardise: False leaves the deviation out of the advantage (Dr.GRPO).
    rows: rows of a micro-batch.
    length: T, tokens of a row; at least `rollout.max_len`.
    keep_every: updates between two dumps of all trajectories of an update.
  """

  steps: int
  prompts: int = 16
  samples: int = 8
  rounds: int = 2
  temperature: float = 1.0
  clip_low: float = 0.2
  clip_high: float = 0.28
  importance_cap: float = 0.0
  gap: float = 0.1
  gap_limit: float = 1.0
  standardise: bool = True
  rows: int = 16
  length: int = 256
  keep_every: int = 20

  def __post_init__(self):
    if self.samples < 2:
      raise ValueError("samples must be at least 2: an advantage compares a group")
    if self.temperature <= 0:
      raise ValueError("temperature must be above 0: equal samples teach nothing")
    if not 0 <= self.gap_limit <= 1 or self.gap <= 0:
      raise ValueError("gap must be above 0, gap_limit a share from 0 to 1")
    if self.importance_cap < 0:
      raise ValueError("importance_cap must be 0 (no weights) or above")


@dataclasses.dataclass(frozen=True)
class DevConfig:
  """Config section `dev`: greedy evaluation during training, on tasks of its own.

  Attributes:
    every: updates between two evaluations.
    uri: a task file.
    limit: tasks of it.
    corpus: pages that its tasks need; the training corpus where None.
  """

  every: int
  uri: str
  limit: int = 64
  corpus: str | None = None


@dataclasses.dataclass
class Rollouts:
  """What one update learns from.

  Attributes:
    trajectories: of the groups that were kept, without those that left their group.
    advantages: one for each.
    played: every trajectory rolled out, kept or not.
    groups: groups rolled out.
    kept: groups kept.
    removed_mass: mean probability that the grammar took from a token.
  """

  trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
  advantages: list[float] = dataclasses.field(default_factory=list)
  played: list[Trajectory] = dataclasses.field(default_factory=list)
  groups: int = 0
  kept: int = 0
  removed_mass: float = 0.0


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains from `config.init`; writes `workdir/model` and `results.json`.

  Args:
    config: sections `SECTIONS`; `init` is a model folder; `lora` as in `sft.run`; with
      `vllm` a running server samples.
    workdir: where everything goes; an interrupted run in it is continued, and ends
      with the parameters of an uninterrupted one. Several processes share it, each
      playing its part of the tasks; all but the first log into folders of their own.

  Returns:
    What `results.json` holds: steps, rewards, rates and seconds by phase.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    VllmError: the server can not be used; before any training, or when it is gone.
  """
  check_sections(config, SECTIONS, needed=("init",))
  algo = section(config, "algo", AlgoConfig)
  rollout = section(config, "rollout", RolloutConfig)
  tasks = select_tasks(section(config, "tasks", TasksConfig))
  dev = section(config, "dev", DevConfig)
  dev_tasks = select_tasks(TasksConfig(dev.uri, dev.limit))
  tools = section(config, "tools", ToolsConfig)
  dev_tools = dataclasses.replace(tools, corpus=dev.corpus or tools.corpus)
  every = section(config, "checkpoint", CheckpointConfig)
  load = section(config, "model", LoadConfig)
  lora = optional(config, "lora", LoraConfig)
  optimizer = make_optimizer(section(config, "optim", OptimConfig), algo.steps)
  layout = make_layout(section(config, "mesh", MeshConfig))
  cfg, tokenizer = load_config(config.init, load), Tokenizer.load(config.init)
  _check_rows(cfg, algo, rollout, layout)
  vllm = optional(config, "vllm", VllmConfig)
  grader = Grader(section(config, "reward", RewardConfig))
  player = Player(cfg, tokenizer, rollout, tools.told, layout, vllm, grader)
  player.check([*tasks, *dev_tasks])
  own = own_folder(workdir)
  claim(config, own)
  cfg, params = load_model(config.init, load, layout)
  trained, frozen = adapting.split(cfg, params, lora, rollout.seed, layout)
  learner = Learner(_loss(cfg, algo, lora, layout, player), optimizer, layout)
  learner.reserve(-(-algo.prompts * algo.samples // algo.rows))  # a row each, at worst
  state = init_state(trained, optimizer, layout)
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), every.keep)
  with Toolbox(tools) as toolbox, Toolbox(dev_tools) as for_dev, grader, checkpoints:

    def examine(params: Any) -> float:
      groups = player.groups(params, dev_tasks, for_dev, 1, 0.0, rollout.seed, 0, True)
      return _mean([t.reward_parts.get("answer") for (t,) in groups])

    restored = checkpoints.restore(state)
    state = restored[0] if restored else state
    clock = Clock()
    with Metrics(own, "rl", algo.steps) as metrics:
      for step in range(int(state.step), algo.steps):
        values = {}
        params = adapting.merged(state.params, frozen, lora)
        if step % dev.every == 0:
          values["dev_accuracy"] = examine(params)
          clock.lap("dev")
        rollouts = collect(player, params, tasks, toolbox, algo, rollout.seed, step)
        clock.lap("rollout")
        state, learned = _learn(learner, state, frozen, rollouts, algo, player)
        values |= learned | _describe(rollouts)
        clock.lap("learn")
        if step % algo.keep_every == 0:
          name = f"step_{step:06d}.jsonl"
          write_jsonl(os.path.join(own, "trajectories", name), rollouts.played)
        figure = f"reward {values['reward']:.3f}"
        metrics.log(step + 1, values | clock.take(), figure)
        # After the line above: what a checkpoint holds has always been logged.
        if (step + 1) % every.every == 0 or step + 1 == algo.steps:
          checkpoints.save(state, {})
        clock.lap("save")
      accuracy = examine(adapting.merged(state.params, frozen, lora))
  adapting.export(workdir, cfg, state.params, frozen, lora, tokenizer, config.init)
  results = _results(own, algo.steps, accuracy)
  write_json(os.path.join(own, "results.json"), results)
  return results


def _check_rows(
  cfg: QwenConfig, algo: AlgoConfig, rollout: RolloutConfig, layout: Layout | None
) -> None:
  if algo.length < rollout.max_len:
    raise ValueError(
      f"algo.length={algo.length} is shorter than rollout.max_len={rollout.max_len}: "
      "a trajectory must fit a row"
    )
  if layout:
    layout.check(cfg, B=algo.rows, T=algo.length)


def collect(
  player: Player,
  params: Any,
  tasks: list[Task],
  toolbox: Toolbox,
  algo: AlgoConfig,
  seed: int,
  step: int,
) -> Rollouts:
  """Rolls out groups until enough of them have rewards that differ.

  Which tasks are asked and every sampled token depend on (seed, step, params) alone;
  the order in which trajectories ended does not matter.
  """
  out = Rollouts()
  before = dataclasses.replace(player.engine.counters)
  for nth in range(step * algo.rounds, (step + 1) * algo.rounds):
    asked = [_pick(tasks, seed, nth * algo.prompts + i) for i in range(algo.prompts)]
    draw = int(np.random.SeedSequence((seed, nth)).generate_state(1)[0])
    groups = player.groups(
      params, asked, toolbox, algo.samples, algo.temperature, draw, version=step
    )
    reward_GK = np.array(
      [[np.nan if t.reward is None else t.reward for t in g] for g in groups]
    )
    advantage_GK = advantages.group_relative(reward_GK, algo.standardise)
    out.groups += len(groups)
    out.played += [t for g in groups for t in g]
    for g in np.flatnonzero(advantages.informative(reward_GK)):
      if out.kept == algo.prompts:
        break
      out.kept += 1
      for t, advantage in zip(groups[g], advantage_GK[g].tolist(), strict=True):
        if t.reward is not None:
          out.trajectories.append(t)
          out.advantages.append(advantage)
    if out.kept == algo.prompts:
      break
  out.removed_mass = player.engine.counters.since(before).removed_per_token
  return out


def _pick(tasks: list[Task], seed: int, n: int) -> Task:
  """The n-th task of an endless stream: every epoch is a new permutation."""
  epoch, place = divmod(n, len(tasks))
  return tasks[np.random.default_rng((seed, epoch)).permutation(len(tasks))[place]]


def _loss(
  cfg: QwenConfig,
  algo: AlgoConfig,
  lora: LoraConfig | None,
  layout: Layout | None,
  player: Player,
) -> SumLoss:
  truncation = player.engine.config.truncation
  constraint = on_device(player.constraint)

  def loss(
    trained: Any, frozen: Any, batch: Batch
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    params = adapting.assemble(trained, frozen, lora)
    logp_BT, entropy_BT = losses.token_logps(
      cfg, params, batch, algo.temperature, layout, truncation, constraint
    )
    bounds = (algo.clip_low, algo.clip_high, algo.importance_cap)
    value, sums = losses.policy_gradient(logp_BT, batch, *bounds)
    gap_BT = jnp.abs(logp_BT - batch.logp_BT)
    figures = {
      "entropy": entropy_BT,
      "logp_gap": gap_BT,
      "gap_share": (gap_BT > algo.gap).astype(jnp.float32),
    }
    for name, figure_BT in figures.items():
      figure = jnp.sum(batch.weight_BT * figure_BT)
      sums = {**sums, name: jax.lax.stop_gradient(figure)}
    return value, sums

  return loss


def _learn(
  learner: Learner,
  state: TrainState,
  frozen: Any,
  rollouts: Rollouts,
  algo: AlgoConfig,
  player: Player,
) -> tuple[TrainState, dict[str, float]]:
  """One update; without an informative group only the step counts on."""
  micro = list(
    batching.batches(
      rollouts.trajectories,
      algo.rows,
      algo.length,
      rollouts.advantages,
      player.constraint,
    )
  )
  if not micro:
    return state.replace(step=state.step + 1), {}
  tokens = sum(float(b.weight_BT.sum()) for b in micro)
  step = int(state.step)
  state, values = learner.step(state, micro, tokens, frozen)
  values = {k: float(v) for k, v in values.items()}
  if values["gap_share"] > algo.gap_limit:
    raise ValueError(
      f"step {step + 1}: log-probs of {values['gap_share']:.1%} of the tokens differ "
      f"by more than algo.gap={algo.gap:g} nats between sampler and learner, and "
      f"algo.gap_limit is {algo.gap_limit:.1%}. This update is not saved; compute more "
      "precisely (model.dtype, model.weight_dtype), or correct with algo.importance_cap"
    )
  return state, values


def _describe(rollouts: Rollouts) -> dict[str, float]:
  """What was rolled out, in numbers."""
  played = rollouts.played
  out = {
    "reward": _mean([t.reward for t in played]),
    "informative": rollouts.kept / rollouts.groups,
    "removed_mass": rollouts.removed_mass,
    "generated_tokens": sum(t.usage.generated for t in played),
    "tokens_per_trajectory": np.mean([t.usage.total for t in played]),
    "calls_per_trajectory": np.mean([len(t.calls) for t in played]),
    "infrastructure": sum(t.status == Status.INFRASTRUCTURE for t in played),
    "truncated": sum(t.status == Status.TRUNCATED for t in played),
  }
  for part in sorted({"answer", "format"}.union(*(t.reward_parts for t in played))):
    out[part] = _mean([t.reward_parts.get(part) for t in played])
  return {k: float(v) for k, v in out.items()}


def _mean(values: list[float | None]) -> float:
  """The mean of what was graded: an infrastructure failure is no wrong answer."""
  graded = [v for v in values if v is not None]
  return float(np.mean(graded)) if graded else float("nan")


def _results(workdir: str, steps: int, accuracy: float) -> dict[str, Any]:
  """The run in a few numbers, from its log."""
  log = read_metrics(os.path.join(workdir, METRICS_FILE), "rl")
  phases = sorted({k for row in log for k in row if k.startswith("seconds_")})
  gaps = [row["logp_gap"] for row in log if row.get("logp_gap") is not None]
  return {
    "steps": steps,
    "dev_accuracy_first": log[0]["dev_accuracy"],
    "dev_accuracy": accuracy,
    "reward_first": log[0]["reward"],
    "reward": log[-1]["reward"],
    "logp_gap": max(gaps, default=None),
    "seconds": log[-1]["seconds"],
    **{k: sum(row.get(k, 0.0) for row in log) for k in phases},
  }

"""Agentic RL: a policy plays tasks with real tools, and learns from what it earned.

By default GRPO with DAPO's clip-higher, token-mean loss and dynamic sampling; section
`algo` chooses (`learner/algorithms.py`). On-policy: each batch of rollouts is of the
policy that learns from it, and is then thrown away.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from typing import Any

import ml_collections
import numpy as np

from coa_jax.config import check_sections, claim, optional, section
from coa_jax.learner import advantages
from coa_jax.learner.algorithms import AlgoConfig
from coa_jax.learner.checkpoint import CheckpointConfig, Checkpoints
from coa_jax.learner.optim import OptimConfig
from coa_jax.learner.update import PolicyUpdate, rewards_of
from coa_jax.model import lora as adapting
from coa_jax.model.architecture import LoadConfig, QwenConfig
from coa_jax.model.lora import LoraConfig
from coa_jax.model.sharding import Layout, MeshConfig, make_layout, own_folder
from coa_jax.model.weights import load_config, load_model
from coa_jax.protocol import roles
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Status, Trajectory, write_jsonl
from coa_jax.report.metrics import (
  METRICS_FILE,
  Clock,
  Metrics,
  read_metrics,
  write_json,
)
from coa_jax.report.tracking import LogConfig
from coa_jax.rollout.engine import RolloutConfig
from coa_jax.rollout.player import Player
from coa_jax.rollout.slots import on_device
from coa_jax.rollout.tool_journal import ToolJournal
from coa_jax.rollout.toolbox import Toolbox, ToolsConfig
from coa_jax.rollout.vllm_server import VllmConfig
from coa_jax.tasks.rewards import shaping
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
  "log",
)
# A tool call, think or plan that is written twice.
_TWICE = shaping.RepetitionConfig(weight=1.0)


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
  """What one step learns from.

  Attributes:
    groups: those that were kept; a trajectory without a reward has left its group.
    played: every trajectory rolled out, kept or not.
    asked: groups rolled out.
    informative: those of them whose rewards differ.
    removed_mass: mean probability that the grammar took from a token.
    next_round: the first round whose tasks have not been drawn yet.
  """

  groups: list[list[Trajectory]] = dataclasses.field(default_factory=list)
  played: list[Trajectory] = dataclasses.field(default_factory=list)
  asked: int = 0
  informative: int = 0
  removed_mass: float = 0.0
  next_round: int = 0


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains from `config.init`; writes `workdir/model` and `results.json`.

  Args:
    config: sections `SECTIONS`; `init` is a model folder; `lora` as in `sft.run`; with
      `vllm` a running server samples; `log` as `tracking.LogConfig` says.
    workdir: where everything goes; an interrupted run in it is continued, and ends
      with the parameters of an uninterrupted one. Several processes share it, each
      playing its part of the tasks; all but the first log into folders of their own.

  Returns:
    What `results.json` holds: steps, rewards, rates and seconds by phase.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any training, naming the fault.
    Interrupted: SIGTERM or SIGINT came; where the run stands is saved.
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
  optim = section(config, "optim", OptimConfig)
  layout = make_layout(section(config, "mesh", MeshConfig))
  cfg, tokenizer = load_config(config.init, load), Tokenizer.load(config.init)
  _check_rows(cfg, algo, rollout, layout)
  vllm = optional(config, "vllm", VllmConfig)
  grader = Grader(section(config, "reward", RewardConfig))
  own = own_folder(workdir)
  journal = ToolJournal(os.path.join(own, "tool_calls"))
  player = Player(cfg, tokenizer, rollout, tools.told, layout, vllm, grader, journal)
  player.check([*tasks, *dev_tasks])
  tracked = section(config, "log", LogConfig) if own == workdir else None
  claim(config, own, may_change=("log.wandb_project",))
  cfg, params = load_model(config.init, load, layout)
  grammar = (player.constraint, on_device(player.constraint))
  learner = PolicyUpdate(cfg, algo, optim, lora, layout, rollout.truncation, *grammar)
  state, frozen = learner.init(params, rollout.seed)
  checkpoints = Checkpoints(os.path.join(workdir, "checkpoints"), every)
  with Toolbox(tools) as toolbox, Toolbox(dev_tools) as for_dev, grader, checkpoints:
    examine = functools.partial(_examine, player, dev_tasks, for_dev, rollout.seed)
    state, cursor = checkpoints.restore(state) or (state, {"round": 0})
    clock = Clock()
    with Metrics(own, "rl", algo.steps, tracked=tracked) as metrics:
      for step in range(int(state.step), algo.steps):
        values = {}
        params = learner.policy(state, frozen)
        with checkpoints.resumable(state, cursor):
          if step % dev.every == 0:
            values["dev_accuracy"] = examine(params, step)
            clock.lap("dev")
          args = tasks, toolbox, algo, rollout.seed, step, cursor["round"]
          rollouts = collect(player, params, *args)
          clock.lap("rollout")
        cursor = {"round": rollouts.next_round}
        state, learned = learner(state, frozen, rollouts.groups)
        _check_gap(algo, step, learned)
        values |= learned | _describe(rollouts)
        clock.lap("learn")
        if step % algo.keep_every == 0:
          _keep(own, step, rollouts.played)
        metrics.log(step + 1, values | clock.take(), f"reward {values['reward']:.3f}")
        # After the line above: what a checkpoint holds has always been logged.
        checkpoints.reached(state, cursor, step + 1 == algo.steps)
        journal.forget(checkpoints.oldest)
        clock.lap("save")
      with checkpoints.resumable(state, cursor):
        accuracy = examine(learner.policy(state, frozen), algo.steps)
      results = _results(own, algo.steps, accuracy)
  trained = state.params["policy"], frozen["base"]
  adapting.export(workdir, cfg, *trained, lora, tokenizer, config.init)
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


def _examine(
  player: Player, tasks: list[Task], toolbox: Toolbox, seed: int, params: Any, step: int
) -> float:
  """Mean accuracy of greedy answers."""
  groups = player.groups(params, tasks, toolbox, 1, 0.0, seed, step, evaluation=True)
  return _mean([t.reward_parts.get("answer") for (t,) in groups])


def _keep(workdir: str, step: int, played: list[Trajectory]) -> None:
  """Writes a step's trajectories for whoever wants to look at them."""
  write_jsonl(os.path.join(workdir, "trajectories", f"step_{step:06d}.jsonl"), played)


def collect(
  player: Player,
  params: Any,
  tasks: list[Task],
  toolbox: Toolbox,
  algo: AlgoConfig,
  seed: int,
  step: int,
  first: int,
) -> Rollouts:
  """Rolls out groups until enough of them have rewards that differ.

  Which tasks are asked and every sampled token depend on (seed, first, params) alone;
  the order in which trajectories ended does not matter. `first` is the first round of
  the run that was not rolled out before, so that no task is skipped.
  """
  out = Rollouts()
  before = dataclasses.replace(player.engine.counters)
  size = algo.round_prompts or algo.prompts
  for nth in range(first, first + algo.rounds):
    asked = [_pick(tasks, seed, nth * size + i) for i in range(size)]
    draw = int(np.random.SeedSequence((seed, nth)).generate_state(1)[0])
    groups = player.groups(
      params, asked, toolbox, algo.samples, algo.temperature, draw, version=step
    )
    out.next_round = nth + 1
    out.asked += len(groups)
    out.played += [t for g in groups for t in g]
    keep_G = advantages.informative(rewards_of(groups))
    out.informative += int(keep_G.sum())
    if algo.filter_groups:
      groups = [g for g, keep in zip(groups, keep_G, strict=True) if keep]
    out.groups = (out.groups + groups)[: algo.prompts]
    if len(out.groups) == algo.prompts:
      break
  out.removed_mass = player.engine.counters.since(before).removed_per_token
  return out


def _pick(tasks: list[Task], seed: int, n: int) -> Task:
  """The n-th task of an endless stream: every epoch is a new permutation."""
  epoch, place = divmod(n, len(tasks))
  return tasks[np.random.default_rng((seed, epoch)).permutation(len(tasks))[place]]


def _check_gap(algo: AlgoConfig, step: int, values: dict[str, float]) -> None:
  """Stops a run whose sampler and learner differ by more than the config allows."""
  share = values.get("gap_share", 0.0)
  if share > algo.gap_limit:
    raise ValueError(
      f"step {step + 1}: log-probs of {share:.1%} of the tokens differ "
      f"by more than algo.gap={algo.gap:g} nats between sampler and learner, and "
      f"algo.gap_limit is {algo.gap_limit:.1%}. This update is not saved; compute more "
      "precisely (model.dtype, model.weight_dtype), or correct with algo.importance_cap"
    )


def _describe(rollouts: Rollouts) -> dict[str, float]:
  """What was rolled out, in numbers."""
  played = rollouts.played
  out = {
    "reward": _mean([t.reward for t in played]),
    "informative": rollouts.informative / rollouts.asked,
    "removed_mass": rollouts.removed_mass,
    "generated_tokens": sum(t.usage.generated for t in played),
    "tokens_per_trajectory": np.mean([t.usage.total for t in played]),
    "calls_per_trajectory": np.mean([len(t.calls) for t in played]),
    "infrastructure": sum(t.status == Status.INFRASTRUCTURE for t in played),
    "truncated": sum(t.status == Status.TRUNCATED for t in played),
    "truncated_share": np.mean([t.status == Status.TRUNCATED for t in played]),
    "repeated_share": np.mean([shaping.repetition(_TWICE, t) < 0 for t in played]),
    **_entropies(played),
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

"""Evaluates a model on tasks with real tools, greedily and by sampling.

budget: a stage is one page.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import ml_collections

from coa_jax.data.tasks.sources import TasksConfig, describe_tasks, select_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import load_tokenizer
from coa_jax.model.hf.io import load_config, load_params
from coa_jax.model.sharding import MeshConfig, make_partitioner
from coa_jax.protocol import roles
from coa_jax.protocol.jsonlog import JsonLog, Place
from coa_jax.protocol.origin import warn_if_other
from coa_jax.protocol.trajectory import (
  Status,
  Trajectory,
  Usage,
  read_trajectories,
  write_jsonl,
)
from coa_jax.report import first_step, scores
from coa_jax.report.metrics import Metrics, say, write_json
from coa_jax.rewards.best_of import SelectorConfig, choose_by_model, choose_by_part
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rollout.agents.config import AgentConfig
from coa_jax.rollout.agents.worker import AgentWorker, endpoint_worker
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig, check_positions
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.runtime import capacity
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import bounded, check_fields, section
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.processes import gather_json, is_first_process, process_dir
from coa_jax.runtime.record import hash_files, hash_json, prepare_workdir
from coa_jax.runtime.shard import Shard
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.types import Tools
from coa_jax.tools.unread import warn_unread

Attempts = dict[tuple[int, int], Trajectory]  # by (the task's index, sample)
_Look = Callable[[Sequence[Trajectory]], list[str]]
_FIRST = 64  # attempts checked for faults in the config

# A shard's outputs, to be merged with the others'.
LOGS = ("greedy.part.jsonl", "sampled.part.jsonl")
SELECTIONS = "selections.jsonl"  # the selector's choices, in a workdir


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Config section `eval`.

  A finished evaluation may be scored again with another k, best_by or selector.

  Attributes:
    greedy: True to play every task once at temperature 0.
    samples: further attempts per task at `temperature`; 3 or more for pass@3.
    temperature: the further attempts' temperature.
    k: for pass@k (one of k samples is right) and votes (the most frequent answer among
      k samples is right), each at most `samples`.
    best_by: also report the best of k samples by this part of the reward ("part_NAME"
      of a reward function, or "reward"); "" for none.
    selector: also report a language model's choice among k samples; None for none.
  """

  greedy: bool = True
  samples: int = bounded(3, least=0)
  temperature: float = 1.0
  k: tuple[int, ...] = scores.KS
  best_by: str = ""
  selector: SelectorConfig | None = None

  def __post_init__(self):
    check_fields(self)
    if not self.greedy and self.samples < 1:
      raise ValueError("greedy is False and samples is 0: nothing to play")
    if self.samples and self.temperature <= 0:
      raise ValueError(
        f"temperature is {self.temperature}; it must be above 0, `greedy` plays at 0"
      )
    for k in self.k:
      # The default k may exceed `samples`.
      if k < 1 or (k > self.samples and self.k != scores.KS):
        if not self.samples:
          raise ValueError("samples is 0, so no k can be given: pass@k takes k samples")
        most = f"from 1 to samples={self.samples}"
        raise ValueError(f"k has {k}; it must be {most}: pass@k takes k samples")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
  """Config of an evaluation: its sections.

  Attributes:
    init: a model folder; "" if `agent.endpoint` is the model.
    tasks: the tasks to play.
    model: loading options of the folder.
    mesh: use of the devices.
    rollout: options of playing a trajectory.
    agent: a user's agent, which plays the tasks; None for our own loop.
    vllm: the sampling server; None for our own sampler.
    tools: the model's tools.
    reward: the reward of an answer.
    eval: attempts per task.
  """

  tasks: TasksConfig
  init: str = ""
  model: LoadConfig = section(LoadConfig)
  mesh: MeshConfig = section(MeshConfig)
  rollout: RolloutConfig = section(RolloutConfig)
  agent: AgentConfig | None = None
  vllm: VllmConfig | None = None
  tools: ToolsConfig = section(ToolsConfig)
  reward: RewardConfig = section(RewardConfig)
  eval: EvalConfig = section(EvalConfig)

  def __post_init__(self):
    endpoint = self.agent and self.agent.endpoint
    if not self.init and not endpoint:
      raise ValueError("config lacks field 'init'")
    if endpoint and (self.init or self.vllm):
      raise ValueError(
        "agent.endpoint is the model, so init and section vllm would not be used: take "
        'init="" and leave vllm out'
      )
    if self.agent:
      self.agent.check_format(self.reward.shaping.format)


@exclusive(process_dir)
def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  shard: Shard | None = None,
) -> dict[str, Any]:
  """Plays the tasks; writes `greedy.jsonl`, `sampled.jsonl` and `results.json`.

  budget: a stage is one page.

  Args:
    config: as `EvaluateConfig` says.
    workdir: the output folder. Each finished attempt is written to its stage's file
      (`sampled.part.jsonl`) at once, and never played again. Several processes share
      the folder: each plays its part of the tasks and writes its attempts, all but the
      first into their own folders. Each process has the whole `results.json`.
    shard: plays only this part of the tasks, into `LOGS`, and scores nothing. With all
      parts' logs joined, the whole evaluation resumes from there.

  Returns:
    The contents of `results.json`: the figures of `scores.summary`, also grouped in
    `by_source` and `by_family`; `reward_parts` (means); `usage` (sums over all
    attempts); and `dropped_tasks`, with too long prompts, which no other figure counts.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any decoding, naming the fault in
      the config, the tasks or the model.
    VllmError: the server can not be used: before any decoding, or once it is gone.
  """
  # --- Read the config, and refuse faults.
  settings = read_config(config, EvaluateConfig)
  samples = settings.eval.samples
  tasks = select_tasks(settings.tasks)
  if is_first_process():
    say(describe_tasks(tasks))
  # In the end the host holds all its own attempts.
  fields = f"eval.samples={samples} of {len(tasks)} tasks"
  held = samples * len(tasks) * capacity.TRAJECTORY
  capacity.check_host({fields: held // jax.process_count()})
  workdir = process_dir(workdir)
  worker, load = _open_worker(settings, Grader(settings.reward.kept_in(workdir)))
  all_tasks = len(tasks)
  tasks = worker.admit(tasks)
  worker.grader.check(tasks, settings.rollout.max_len)
  if settings.init:
    dialect = worker.episode_config
    warn_if_other(settings.init, dialect.variant, dialect.style)
  warn_unread(settings.tools)

  # --- Claim the workdir for one config and its inputs.
  inputs = {
    "tasks": hash_json(map(Task.to_json, tasks)),
    "tools.corpus": hash_files(settings.tools.corpus),
  }
  if settings.init:
    inputs["init"] = hash_files(settings.init, samples=16)
  # Finished attempts can be scored again.
  scoring = ("eval.k", "eval.best_by", "eval.selector")
  prepare_workdir(settings, workdir, may_change=scoring, inputs=inputs)

  # --- Play, greedily and at the temperature; earlier starts' attempts are kept.
  tags = None if settings.agent else settings.tools.tags
  look = functools.partial(_first_warnings, settings, tasks, tags, worker.grader)
  params = load()
  own_greedy: list[Trajectory] = []
  own_sampled: list[Trajectory] = []
  with worker.grader, Toolbox(settings.tools) as toolbox, worker:
    play = functools.partial(
      _play,
      worker=worker,
      params=params,
      tasks=tasks,
      tools=toolbox,
      seed=settings.rollout.seed,
      workdir=workdir,
      shard=shard,
    )
    if settings.eval.greedy:
      own_greedy = play("greedy", samples=1, temperature=0.0, look=look)
      look = None  # the first stage's warnings are reported once
    if samples:
      temperature = settings.eval.temperature
      own_sampled = play("sampled", samples=samples, temperature=temperature, look=look)

  if shard:
    return {"greedy": len(own_greedy), "sampled": len(own_sampled)}

  # --- Choose among a task's attempts, then score all processes' attempts.
  _choose(settings.eval, own_sampled, workdir)
  greedy = gather_scored(own_greedy, tasks, tags)
  sampled = gather_scored(own_sampled, tasks, tags)
  played = [*greedy, *sampled]
  if played and all(t.status == Status.INFRASTRUCTURE for t in played):
    failures = [t.meta.get("ungraded") for t in (*own_greedy, *own_sampled)]
    first = next(filter(None, failures), "see the attempts' calls")
    raise ValueError(f"none of {len(played)} attempts could be graded: {first}")
  by_group = functools.partial(
    scores.by_group, greedy, sampled, tools=tags, ks=settings.eval.k
  )
  sources = {task.id: task.source for task in tasks}
  results = scores.summary(greedy, sampled, tags, settings.eval.k)
  results["by_source"] = by_group(lambda t: sources[t.task_id])
  results["by_family"] = by_group(lambda t: t.family)
  results["reward_parts"] = _parts([*greedy, *sampled])
  results["dropped_tasks"] = all_tasks - len(tasks)
  results["usage"] = _usage([*greedy, *sampled])
  write_json(os.path.join(workdir, "results.json"), results)
  return results


def _open_worker(
  settings: EvaluateConfig, grader: Grader
) -> tuple[RolloutWorker, Callable[[], Any]]:
  """Makes the worker; also returns a function that loads the policy."""
  agent = settings.agent
  if agent and agent.endpoint:
    return AgentWorker(endpoint_worker(agent.workers, grader), agent), lambda: None
  partitioner = make_partitioner(settings.mesh, rollout_tensor=settings.rollout.tensor)
  cfg = load_config(settings.init, settings.model)
  tokenizer = load_tokenizer(settings.init, cfg)
  check_positions(settings.rollout, cfg, settings.init)
  worker = make_worker(
    cfg,
    tokenizer,
    settings.rollout,
    settings.tools.tool_descriptions,
    partitioner=partitioner.decoding(settings.rollout.tensor),
    vllm=settings.vllm,
    grader=grader,
    parallel_calls=settings.tools.parallel,
    conversations=agent.format if agent else "",
  )
  if agent:
    worker = AgentWorker(worker, agent)
  return worker, lambda: load_params(settings.init, cfg, partitioner)


def _choose(config: EvalConfig, sampled: Sequence[Trajectory], workdir: str) -> None:
  """Marks this process's chosen attempts, by `eval.best_by` and `eval.selector`."""
  groups = list(scores.by_task(scores.graded(sampled)).values())
  if config.best_by:
    choose_by_part(groups, config.best_by, config.k)
  if config.selector:
    cache = os.path.join(workdir, SELECTIONS)
    choose_by_model(config.selector, groups, config.k, cache)


def gather_scored(
  own: Iterable[Trajectory],
  tasks: Sequence[Task],
  tools: Collection[str] = roles.TOOLS,
) -> list[scores.Scored]:
  """Gathers all processes' attempts for scoring, by task and sample; a collective.

  After a start with fewer processes, two may have the same attempt: the first process's
  counts.
  """
  evidence = {task.id: task.evidence for task in tasks}
  rows = [dataclasses.asdict(scores.scored(t, tools, evidence[t.task_id])) for t in own]
  places = {task.id: place for place, task in enumerate(tasks)}
  out: dict[tuple[int, int], scores.Scored] = {}
  for row in itertools.chain.from_iterable(gather_json(rows)):
    attempt = scores.Scored.from_json(row)
    out.setdefault((places[attempt.task_id], attempt.sample), attempt)
  return [out[key] for key in sorted(out)]


def _play(
  stage: str,
  *,
  samples: int,
  temperature: float,
  worker: RolloutWorker,
  params: Any,
  tasks: list[Task],
  tools: Tools,
  seed: int,
  workdir: str,
  shard: Shard | None,
  look: _Look | None,
) -> list[Trajectory]:
  """Plays this process's missing attempts, and returns all; writes `STAGE.jsonl`.

  A shard's attempts stay in its `STAGE.part.jsonl`.
  """
  # --- Finished attempts. The stage's file is written whole, at its end; after a start
  # with other processes, it holds others' attempts, too, or lacks some.
  path = os.path.join(workdir, f"{stage}.jsonl")
  mine = shard or Shard(jax.process_index(), jax.process_count())
  places = {task.id: place for place, task in enumerate(tasks)}
  there: Attempts = {}
  if os.path.exists(path):
    for t in read_trajectories(path):
      if t.status != Status.INFRASTRUCTURE:  # those are played again
        there[places[t.task_id], t.sample] = t
  wanted = set(itertools.product(mine.of(range(len(tasks))), range(samples)))
  # After a kill only some processes may have all their attempts. Then all continue, for
  # they make the decode parameters together.
  if not any(gather_json(not wanted <= there.keys())):
    if wanted and is_first_process():
      say(f"{path} has all attempts; delete it to play them again")
    return list(there.values())

  # --- Until then `part` has the finished attempts.
  part = AttemptLog(os.path.join(workdir, f"{stage}.part.jsonl"), mine)
  there |= part.ended
  played = worker.generate(
    params,
    tasks,
    tools,
    samples,
    temperature,
    seed,
    skip=there.keys(),
    evaluation=True,
    shard=mine,
  )
  total = len(there.keys() | wanted)
  attempts = _ordered(there, part.added(played), total, workdir, stage, look)
  if not shard:
    write_jsonl(path, attempts)
    part.remove()
  return attempts


class AttemptLog:
  """A log of a stage's finished attempts, on disk at once.

  Attributes:
    ended: interrupted starts' attempts, without infrastructure failures, which are
      played again.
  """

  def __init__(self, path: str, mine: Shard):
    """Reads the file: the attempts that `mine` owns; others stay in place.

    A line cut short by a kill is removed.
    """
    self.ended: Attempts = {}
    self._mine = mine
    self._log = JsonLog(path, self._recall)

  def _recall(self, attempt: Any, where: str, _: Place) -> None:
    # Refuse to write to a file of another kind.
    if not isinstance(attempt, list) or [type(x) for x in attempt] != [int, dict]:
      raise ValueError(
        f"{where}: not an attempt (a task's index and a trajectory); delete the "
        "file, and its attempts are made again"
      )
    task_index, row = attempt
    trajectory = Trajectory.from_json(row, where)
    # By the current number of processes: earlier starts may have had fewer.
    mine = self._mine.owns(task_index)
    if mine and trajectory.status != Status.INFRASTRUCTURE:
      self.ended[task_index, trajectory.sample] = trajectory

  def added(
    self, played: Iterator[tuple[int, Trajectory]]
  ) -> Iterator[tuple[int, Trajectory]]:
    """Writes each played attempt, then yields it."""
    # On disk before it is reported: a kill loses no counted attempt.
    for task_index, trajectory in played:
      self._log.append([task_index, trajectory.to_json()])
      yield task_index, trajectory

  def remove(self) -> None:
    """Deletes the file; `STAGE.jsonl` has all its attempts."""
    if os.path.exists(self._log.path):
      os.remove(self._log.path)


def _first_warnings(
  settings: EvaluateConfig,
  tasks: Sequence[Task],
  tags: Collection[str] | None,
  grader: Grader,
  attempts: Sequence[Trajectory],
) -> list[str]:
  tools: Collection[str] = ()
  if tags and settings.tools.enabled and settings.rollout.max_calls:
    tools = tags
  return first_step.warnings(attempts, tasks, tools, grader)


def _usage(played: Sequence[scores.Scored]) -> dict[str, float]:
  sums = {}
  for field in dataclasses.fields(Usage):
    sums[field.name] = sum(getattr(t.usage, field.name) for t in played)
  return sums


def _parts(played: Sequence[scores.Scored]) -> dict[str, float]:
  # Parts differ by kind of task: a mean is over the attempts that have one.
  values: dict[str, list[float]] = {}
  for t in played:
    for name, value in t.reward_parts.items():
      values.setdefault(name, []).append(value)
  return {name: statistics.fmean(values[name]) for name in sorted(values)}


def _ordered(
  there: Attempts,
  attempts: Iterable[tuple[int, Trajectory]],
  total: int,
  workdir: str,
  stage: str,
  look: _Look | None,
) -> list[Trajectory]:
  """Returns all `total` trajectories by task and sample, and logs progress.

  `there` has an earlier start's attempts, which are not logged again. Warns once about
  faults that `look` finds in the first attempts.
  """
  played = [(place, sample, t) for (place, sample), t in there.items()]
  num_right = sum(t.reward_parts.get("answer", 0.0) for *_, t in played)
  num_graded = len(played)
  log_every = max(1, total // 50)  # some fifty lines, however many are played
  # Several evaluations may follow each other: the progress bar names each.
  title = f"{os.path.basename(os.path.abspath(workdir))}, {stage}"
  with Metrics(workdir, stage, total, unit="trajectory", title=title) as metrics:
    for task_index, trajectory in attempts:
      played.append((task_index, trajectory.sample, trajectory))
      # Infrastructure failures are not wrong answers.
      num_right += trajectory.reward_parts.get("answer", 0.0)
      num_graded += trajectory.status != Status.INFRASTRUCTURE
      if len(played) % log_every == 0 or len(played) == total:
        accuracy = num_right / max(1, num_graded)
        metrics.log(len(played), {"accuracy": accuracy}, f"accuracy {accuracy:.3f}")
      if look and len(played) == min(_FIRST, total):
        for line in look([t for _, _, t in played]):
          metrics.warn(f"warning: {line}")
  # They came in order of completion.
  played.sort(key=lambda attempt: attempt[:2])
  return [trajectory for _, _, trajectory in played]

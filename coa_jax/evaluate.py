"""Evaluation of a model on tasks with real tools, greedy and sampled."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections

from coa_jax import capacity
from coa_jax.config import (
  check_sections,
  hash_files,
  hash_json,
  optional,
  prepare_workdir,
  section,
)
from coa_jax.lock import exclusive
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import open_folder
from coa_jax.model.hf.io import load_model
from coa_jax.model.sharding import MeshConfig, make_layout, process_dir
from coa_jax.protocol.jsonlog import JsonLog, Place
from coa_jax.protocol.prompts import instructions
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import (
  Status,
  Trajectory,
  Usage,
  read_trajectories,
  write_jsonl,
)
from coa_jax.report import scores
from coa_jax.report.metrics import Metrics, write_json
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rollout.exchange import gather_trajectories
from coa_jax.rollout.types import RolloutConfig, check_positions
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tasks.sources import TasksConfig, select_tasks
from coa_jax.tasks.task import Task
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.types import Tools

SECTIONS = (
  "init",
  "model",
  "mesh",
  "rollout",
  "vllm",
  "tools",
  "tasks",
  "reward",
  "eval",
)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Config section `eval`.

  Attributes:
    greedy: True to play every task once at temperature 0.
    samples: further attempts per task at `temperature`; 3 or more for pass@3.
    temperature: of those.
  """

  greedy: bool = True
  samples: int = 3
  temperature: float = 1.0

  def __post_init__(self):
    if self.samples < 0:
      raise ValueError(f"samples is {self.samples}; it must be 0 or more")
    if not self.greedy and self.samples < 1:
      raise ValueError("greedy is False and samples is 0: nothing to play")
    if self.samples and self.temperature <= 0:
      raise ValueError("temperature must be above 0; `greedy` plays at 0")


@exclusive(process_dir)
def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  variant: Variant | None = None,
  wrap_tools: Callable[[Toolbox], Tools] | None = None,
) -> dict[str, Any]:
  """Plays the tasks; writes `greedy.jsonl`, `sampled.jsonl` and `results.json`.

  budget: a journey is one page.

  Args:
    config: sections `SECTIONS`; `init` is a model folder; with `vllm` a running server
      samples.
    workdir: where everything goes. No attempt that has ended there is played again:
      each is in a file of its stage (`sampled.part.jsonl`) at once. Several processes
      share it, each playing its part of the tasks; all but the first write into folders
      of their own.
    variant: the dialect, where a study plays in another one than the config's.
    wrap_tools: makes what answers the calls from the config's tools, likewise.

  Returns:
    What `results.json` holds: the figures of `scores.summary`, `by_family`, and `usage`
    (sums over all attempts).

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any decoding, naming what is
      wrong with the config, the tasks or the model.
    VllmError: the server can not be used; before any decoding, or when it is gone.

  budget: a journey reads as one page.
  """
  check_sections(config, SECTIONS, needed=("init",))
  plan = section(config, "eval", EvalConfig)
  tasks = select_tasks(section(config, "tasks", TasksConfig))
  fields = f"eval.samples={plan.samples} of {len(tasks)} tasks"
  capacity.check_host({fields: plan.samples * len(tasks) * capacity.TRAJECTORY})
  tools = section(config, "tools", ToolsConfig)
  rollout = section(config, "rollout", RolloutConfig)
  load = section(config, "model", LoadConfig)
  layout = make_layout(section(config, "mesh", MeshConfig))
  cfg, tokenizer = open_folder(config.init, load)
  check_positions(rollout, cfg, config.init)
  vllm = optional(config, "vllm", VllmConfig)
  workdir = process_dir(workdir)
  grader = Grader(section(config, "reward", RewardConfig).kept_in(workdir))
  worker = RolloutWorker(
    cfg,
    tokenizer,
    rollout,
    tools.tool_descriptions,
    layout=layout,
    vllm=vllm,
    grader=grader,
    variant=variant,
  )
  worker.check(tasks)
  inputs = {
    "tasks": hash_json(t.to_json() for t in tasks),
    "tools.corpus": hash_files(tools.corpus),
    "init": hash_files(config.init, samples=16),
  }
  if variant is not None:
    inputs["variant"] = hash_json([instructions(variant)])
  prepare_workdir(config, workdir, inputs=inputs)
  _, params = load_model(config.init, load, layout)
  greedy: list[Trajectory] = []
  sampled: list[Trajectory] = []
  with grader, Toolbox(tools) as opened, worker:
    toolbox = wrap_tools(opened) if wrap_tools else opened

    def play(name: str, samples: int, temperature: float) -> list[Trajectory]:
      path = os.path.join(workdir, f"{name}.jsonl")
      if not os.path.exists(path):
        part = _Part(os.path.join(workdir, f"{name}.part.jsonl"))
        skip = {(place, t.sample) for place, t in part.ended}
        playing = worker.generate(
          params,
          tasks,
          toolbox,
          samples,
          temperature,
          rollout.seed,
          skip=skip,
          evaluation=True,
        )
        stream = gather_trajectories(part.added(playing))
        write_jsonl(path, _ordered(stream, tasks, samples, workdir, name))
        part.remove()
      return read_trajectories(path)

    if plan.greedy:
      greedy = play("greedy", 1, 0.0)
    if plan.samples:
      sampled = play("sampled", plan.samples, plan.temperature)
  names = variant.tools if variant is not None else tools.tags
  results = scores.summary(greedy, sampled, names)
  results["by_family"] = scores.by_family(greedy, sampled, names)
  results["reward_parts"] = _parts([*greedy, *sampled])
  results["usage"] = _usage([*greedy, *sampled])
  write_json(os.path.join(workdir, "results.json"), results)
  return results


class _Part:
  """The attempts of a stage that have ended, on disk as they end.

  Attributes:
    ended: those of interrupted starts: (the task's place, trajectory). What the
      infrastructure ended is played again.
  """

  def __init__(self, path: str):
    """Reads what is there; a line cut short by a kill is removed."""
    self.ended: list[tuple[int, Trajectory]] = []
    self._log = JsonLog(path, self._recall)

  def _recall(self, attempt: Any, where: str, _: Place) -> None:
    if not isinstance(attempt, list) or [type(x) for x in attempt] != [int, dict]:
      raise ValueError(
        f"{where}: not an attempt (a task's place and a trajectory); delete the "
        "file, and its attempts are made again"
      )
    place, row = attempt
    trajectory = Trajectory.from_json(row, where)
    # Of as many processes as there are now: those before may have been fewer.
    mine = place % jax.process_count() == jax.process_index()
    if mine and trajectory.status != Status.INFRASTRUCTURE:
      self.ended.append((place, trajectory))

  def added(
    self, played: Iterator[tuple[int, Trajectory]]
  ) -> Iterator[tuple[int, Trajectory]]:
    """What had ended before, then what is played, each written as it ends."""
    yield from self.ended
    for place, trajectory in played:
      self._log.append([place, trajectory.to_json()])
      yield place, trajectory

  def remove(self) -> None:
    """Deletes the file; the stage's own holds all of it."""
    if os.path.exists(self._log.path):
      os.remove(self._log.path)


def _usage(played: list[Trajectory]) -> dict[str, float]:
  """What all attempts cost, whichever processes played them: sums of their usages."""
  fields = [field.name for field in dataclasses.fields(Usage)]
  return {name: sum(getattr(t.usage, name) for t in played) for name in fields}


def _parts(played: list[Trajectory]) -> dict[str, float]:
  """The mean of every part of the rewards, over the attempts that have it."""
  values: dict[str, list[float]] = {}
  for t in played:
    for name, value in t.reward_parts.items():
      values.setdefault(name, []).append(value)
  return {name: statistics.fmean(values[name]) for name in sorted(values)}


def _ordered(
  stream: Any, tasks: list[Task], samples: int, workdir: str, name: str
) -> list[Trajectory]:
  """All trajectories by task and sample, with progress while they are played."""
  played: list[tuple[int, int, Trajectory]] = []
  right, graded = 0.0, 0
  total = len(tasks) * samples
  with Metrics(workdir, name, total, unit="trajectory") as metrics:
    for place, t in stream:
      played.append((place, t.sample, t))
      right += t.reward_parts.get("answer", 0.0)
      graded += t.status != Status.INFRASTRUCTURE
      done = len(played)
      if done % max(1, total // 50) == 0 or done == total:
        accuracy = right / max(1, graded)
        metrics.log(done, {"accuracy": accuracy}, f"accuracy {accuracy:.3f}")
  return [t for _, _, t in sorted(played, key=lambda p: p[:2])]

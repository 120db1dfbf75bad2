"""Multi-agent distillation: tasks -> team runs -> trajectories -> a filtered set.

Writes into the workdir:
  config.json          the config, and the commit; written first
  calls.jsonl          with backend "chat": every model and tool call, as it came back;
                       an interrupted run resumes from these
  runs.jsonl           every finished run, appended as it ends; in task order at the end
  selections.jsonl     with teacher.select: each task's chosen run, and why
  violations.jsonl     with section violations: its judge's calls, likewise
  trajectories.jsonl   the filtered training set
  teacher.jsonl        each run's reward, answer, calls and cost, for `report`
  funnel.png           counts kept and dropped by every stage
  statistics.png       lengths and roles before and after the filters
  manifest.json        config, counts per stage and drop reason, lengths and roles
                       before and after, git commit, sha256
  results.json         the figures
  README.md            a Hugging Face dataset card, unless a user wrote one

An interrupted run resumes when started again on the same workdir: no finished run and
no paid call is repeated, and everything except wall times is the same.

budget: a stage is one page, from its config to its results.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_collections

from coa_jax.data.tasks.sources import TasksConfig, describe_tasks, select_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.agents import TeamConfig, solve
from coa_jax.data.teacher.backend import InfrastructureError, ModelBackend
from coa_jax.data.teacher.convert import ConvertConfig
from coa_jax.data.teacher.filters import (
  FiltersConfig,
  Inspection,
  filter_trajectories,
  stages,
)
from coa_jax.data.teacher.gsm8k_numbers import with_new_numbers
from coa_jax.data.teacher.gsm8k_programs import Gsm8kPrograms
from coa_jax.data.teacher.gsm8k_replay import Gsm8kReplay
from coa_jax.data.teacher.journal import Journal
from coa_jax.data.teacher.llm import ChatBackend, TeacherChatConfig
from coa_jax.data.teacher.outcomes import convert_all, grade_run
from coa_jax.data.teacher.outcomes import figures as outcome_figures
from coa_jax.data.teacher.runs import Run, RunFile
from coa_jax.data.teacher.scripted import ScriptedBackend, ScriptedConfig
from coa_jax.data.teacher.select import Selection, figures, select_all
from coa_jax.data.teacher.settings import GSM8K_PROGRAMS, TeacherConfig
from coa_jax.data.teacher.token_meter import Encode, encoder
from coa_jax.data.teacher.tool_augmentation import ToolAugmentation, augmented_copies
from coa_jax.data.teacher.violations import ViolationInspector, ViolationsConfig
from coa_jax.protocol.origin import Dialect
from coa_jax.protocol.roles import Variant, get_variant
from coa_jax.protocol.trajectory import Status, Trajectory, write_jsonl
from coa_jax.report import plots
from coa_jax.report.card import write_dataset_card
from coa_jax.report.metrics import Metrics, say, write_json
from coa_jax.rewards import grade_known
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rewards.shaping import ShapingConfig
from coa_jax.runtime import capacity
from coa_jax.runtime.config import ConfigError, as_json, read_config
from coa_jax.runtime.fields import section
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.record import (
  hash_files,
  hash_json,
  prepare_workdir,
  write_manifest,
)
from coa_jax.runtime.shard import Shard
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.unread import warn_unread

RUNS = "runs.jsonl"
TRAJECTORIES = "trajectories.jsonl"
TEACHER = "teacher.jsonl"
CALLS = "calls.jsonl"
SELECTIONS = "selections.jsonl"
VIOLATIONS = "violations.jsonl"
MANIFEST = "manifest.json"
# A shard's outputs, to be merged with the others'.
LOGS = (RUNS, CALLS)
_log = logging.getLogger(__name__)
# A server may move, or a request limit appear, during a run.
_ENDPOINT = (
  "base_url",
  "timeout_s",
  "retries",
  "prices",
  "key_file",
)
_MAY_CHANGE = (
  "teacher.workers",
  "violations.workers",
  *(f"chat.{field}" for field in _ENDPOINT),
  *(f"violations.{field}" for field in _ENDPOINT),
)


@dataclasses.dataclass(frozen=True)
class DistillConfig:
  """Config of distillation: its sections.

  Attributes:
    tasks: the team's tasks.
    teacher: the team's backend, number of runs, and dialect.
    scripted: the script of `teacher.backend="scripted"`; None for its defaults.
    chat: the endpoint of `teacher.backend="chat"`.
    tools: the team's tools.
    convert: conversion of a run to a trajectory.
    filters: conditions for keeping a trajectory.
    formats: copies in other tool formats.
    reward: a run's reward: as in RL, without `shaping`.
    violations: inspects the kept trajectories; None for no inspection.
  """

  tasks: TasksConfig
  teacher: TeacherConfig = section(TeacherConfig)
  scripted: ScriptedConfig | None = None
  chat: TeacherChatConfig | None = None
  tools: ToolsConfig = section(ToolsConfig)
  convert: ConvertConfig = section(ConvertConfig)
  filters: FiltersConfig = section(FiltersConfig)
  formats: ToolAugmentation = section(ToolAugmentation)
  reward: RewardConfig = section(RewardConfig)
  violations: ViolationsConfig | None = None

  def __post_init__(self):
    # Without this check, an unread section would be silently ignored.
    backend = self.teacher.backend
    for name in ("scripted", "chat"):
      if getattr(self, name) is not None and name != backend:
        raise ValueError(
          f"config has no section {name!r} with teacher.backend={backend!r}: it is "
          f"read with teacher.backend={name!r} alone"
        )
    if backend == "chat" and self.chat is None:
      raise ValueError("config lacks section 'chat', for teacher.backend='chat'")
    if self.formats.copies and self.teacher.prompt == "brief":
      raise ValueError(
        "config.formats.copies: only teacher.prompt='full' describes formats"
      )
    if self.formats.copies and self.tools.parallel > 1:
      raise ValueError(
        "config.formats.copies: other tool formats have no lists of calls; take "
        "tools.parallel=1"
      )
    if self.reward.shaping != ShapingConfig():
      raise ValueError(
        "config.reward.shaping: distillation knows no shaping terms; leave it out"
      )

  def violations_key(self, api_key: str | None) -> str | None:
    """Returns the API key for `violations`; None if its endpoint is not the team's."""
    if self.chat is None or self.violations is None:
      return api_key
    if self.violations.base_url != self.chat.base_url:
      return None
    return api_key


@exclusive()
def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  api_key: str | None = None,
  shard: Shard | None = None,
) -> dict[str, Any]:
  """Distils a team's work on the configured tasks into a training set.

  budget: a stage is one page.

  Args:
    config: as `DistillConfig` says.
    workdir: the output folder; an interrupted run with the same config resumes.
    api_key: for the endpoint of backend "chat"; also for `violations`, if that has the
      same endpoint or there is no such backend.
    shard: plays only this part of the tasks, into `LOGS`. With all parts' logs joined,
      the whole distillation resumes from there.

  Returns:
    The contents of results.json.

  Raises:
    ConfigError: the config cannot be used, or the workdir holds another config's run.
    InfrastructureError: the endpoint or a tool keeps failing.
    RefusedError: the endpoint refuses the key, the URL or the model.
  """
  # --- Read the config, and refuse faults, before any cost.
  settings = read_config(config, DistillConfig)
  teacher = settings.teacher
  tasks = with_new_numbers(select_tasks(settings.tasks), teacher.new_numbers)
  say(describe_tasks(tasks))
  _check_host(teacher, tasks)
  if settings.tools.environment is not None:
    raise ConfigError("tools.environment: the team calls no environment; leave it out")
  # The trajectories' dialect, with this run's tools.
  variant = get_variant(teacher.variant).with_tools(settings.tools.tool_descriptions)
  variant = dataclasses.replace(variant, parallel=settings.tools.parallel)
  grader = Grader(settings.reward.kept_in(workdir))
  grader.check(tasks, 0)
  inputs = {
    "tasks": hash_json(map(Task.to_json, tasks)),
    "tools.corpus": hash_files(settings.tools.corpus),
  }
  encode = encoder(teacher.tokenizer)
  warn_unread(settings.tools)
  prepare_workdir(settings, workdir, may_change=_MAY_CHANGE, inputs=inputs)

  # --- Play every task with the team; the best of several runs may be chosen.
  runs = RunFile(os.path.join(workdir, RUNS))
  own_tasks = shard.of(tasks) if shard else tasks
  jobs = list(itertools.product(own_tasks, range(teacher.samples)))
  bill = {}  # the endpoint's usage, if there is one
  with contextlib.ExitStack() as stack:
    stack.enter_context(grader)
    backends = _backends(settings, tasks, api_key, stack)
    toolbox = stack.enter_context(Toolbox(settings.tools))
    # Endpoint calls are paid for: an interrupted run resumes from them.
    journal = None
    if isinstance(backends[0], ChatBackend):
      journal = Journal(
        os.path.join(workdir, CALLS), done=runs.__contains__, usd=backends[0].config.usd
      )
    work = functools.partial(
      _run_one,
      backends=backends,
      toolbox=toolbox,
      journal=journal,
      tools=settings.tools.tools,
      limits=teacher.limits(variant),
      encode=encode,
      grader=grader,
    )
    failed = _run_all(jobs, work, runs, workdir, teacher.workers, journal)
    if shard:
      return {"runs": len(jobs), "infrastructure": failed}
    # In task order, not in order of completion.
    runs.sort([(task.id, sample) for task, sample in jobs])
    selections = _select_all(tasks, runs, backends[0], journal, workdir, teacher)
    if journal is not None:
      bill["calls"] = journal.bill()

  # --- Convert the runs to trajectories, and filter those.
  costs, pairs, dropped = convert_all(
    jobs, runs, variant, teacher.prompt, settings.convert, selections
  )
  before = plots.Statistics.of([t for _, t in pairs], tokens=False)
  filtered, funnel, inspected = _filtered(settings, variant, pairs, workdir, api_key)
  # Copies of kept trajectories, in other tool formats, come last.
  augmented = augmented_copies(filtered, variant, settings.formats)
  after = plots.Statistics.of(filtered, tokens=False)
  write_jsonl(os.path.join(workdir, TEACHER), costs)
  write_jsonl(os.path.join(workdir, TRAJECTORIES), [*filtered, *augmented])

  # --- Count every step's input and output.
  counts = {
    "tasks": len(tasks),
    "runs": len(jobs),
    "infrastructure": failed,
    "convert": {"kept": len(pairs), "dropped": dict(sorted(dropped.items()))},
    "filters": funnel,
    "augmented": len(augmented),
    **inspected,
  }
  results = {**counts, **outcome_figures(costs, filtered), **bill}
  if selections is not None:
    rewards = {(m.task_id, m.sample): m.reward for m in costs}
    results["best_of_n"] = figures(tasks, selections, rewards)

  # --- Write pictures, manifest and results.
  funnels = {"conversion": (len(pairs), dict(dropped)), **stages(funnel)}
  plots.write_filter_figures(os.path.join(workdir, ""), funnels, before, after)
  write_manifest(
    os.path.join(workdir, MANIFEST),
    os.path.join(workdir, TRAJECTORIES),
    as_json(settings),
    counts=counts,
    statistics=[before.summary(), after.summary()],
    dialects=[as_json(Dialect.of(variant, teacher.prompt, bool(augmented)))],
  )
  write_json(os.path.join(workdir, "results.json"), results)
  write_dataset_card(workdir, TRAJECTORIES)
  if not filtered:
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))
    _log.warning("no trajectory is kept; conversion dropped %s", reasons or "none")
  return results


def _check_host(teacher: TeacherConfig, tasks: Sequence[Task]) -> None:
  """Refuses more runs or threads than this machine's memory holds."""
  runs = teacher.samples * len(tasks)
  capacity.check_host(
    {
      f"teacher.samples={teacher.samples} of {len(tasks)} tasks": runs
      * capacity.TRAJECTORY,
      f"teacher.workers={teacher.workers}": teacher.workers * capacity.THREAD,
    }
  )


def _run_one(
  task: Task,
  sample: int,
  *,
  backends: Sequence[ModelBackend],
  toolbox: Toolbox,
  journal: Journal | None,
  tools: tuple[str, ...],
  limits: TeamConfig,
  encode: Encode,
  grader: Grader,
) -> Run:
  """Plays and grades one team run; an interrupted run replays its journal."""
  backend = backends[sample]
  call = toolbox.call
  # Between the team and its endpoint: replay, and the journal.
  if journal is not None:
    key = (task.id, sample)
    backend = journal.backend(backend, key)
    call = journal.tools(call, key)
  done = solve(task, backend, call, tools, limits, encode, sample)
  return grade_run(done, task, grader)


def _filtered(
  settings: DistillConfig,
  variant: Variant,
  pairs: Sequence[tuple[Task, Trajectory]],
  workdir: str,
  api_key: str | None,
) -> tuple[list[Trajectory], dict[str, Any], dict[str, Any]]:
  """Returns the kept trajectories, the funnel, and the inspection's result."""
  apply = functools.partial(
    filter_trajectories, pairs, variant, grade_known, settings.filters
  )
  if settings.violations is None:
    filtered, funnel = apply()
    return filtered, funnel, {}
  path = os.path.join(workdir, VIOLATIONS)
  # The team's key is only for the team's endpoint.
  key = settings.violations_key(api_key)
  with ViolationInspector(settings.violations, path, key) as inspector:
    filtered, funnel = apply(functools.partial(_shown, inspector, workdir))
    return filtered, funnel, {"violations": inspector.counts()}


def _shown(
  inspector: ViolationInspector, workdir: str, trajectories: Sequence[Trajectory]
) -> Iterator[Inspection]:
  """Yields the inspector's verdicts, and logs progress."""
  total = len(trajectories)
  with Metrics(workdir, stage="inspect", total=total, unit="trajectory") as metrics:
    for done, verdict in enumerate(inspector(trajectories), 1):
      if done % max(1, total // 50) == 0 or done == total:
        metrics.log(done, inspector.values(), inspector.spent())
      yield verdict


def _backends(
  settings: DistillConfig,
  tasks: Sequence[Task],
  api_key: str | None,
  stack: contextlib.ExitStack,
) -> list[ModelBackend]:
  """Returns one backend per sample of a task."""
  samples = settings.teacher.samples
  if settings.chat is not None:
    # One for all: an endpoint draws anew for each sample.
    backend = stack.enter_context(ChatBackend(settings.chat, api_key))
    return [backend] * samples
  try:
    if settings.teacher.backend == "gsm8k_replay":
      return [Gsm8kReplay(tasks)] * samples
    if settings.teacher.backend == GSM8K_PROGRAMS:
      return [Gsm8kPrograms(tasks, sample) for sample in range(samples)]
    # A script's choices are keyed by the sample.
    scripted = settings.scripted or ScriptedConfig()
    return [ScriptedBackend(tasks, scripted, s) for s in range(samples)]
  except ValueError as e:
    raise ConfigError(f"config.teacher.backend: {e}") from e


def _run_all(
  jobs: Sequence[tuple[Task, int]],
  work: Callable[[Task, int], Run],
  file: RunFile,
  workdir: str,
  workers: int,
  journal: Journal | None,
) -> int:
  """Runs every job missing in the file; returns the number of infrastructure failures.

  budget: one loop of a pool, its progress and its ends.

  Raises:
    InfrastructureError: so many runs failed in a row that others would, too.
  """
  # --- Leave out jobs finished by earlier starts; the shown progress counts their
  # rewards.
  todo: list[tuple[Task, int]] = []
  num_ended = 0
  total_reward = 0.0
  for task, sample in jobs:
    finished = file.read(task.id, sample)
    if finished is None:
      todo.append((task, sample))
    else:
      num_ended += 1
      total_reward += finished.reward or 0.0

  # --- Run the others; submit up to twice as many as there are workers.
  num_failed = 0
  failed_in_a_row = 0
  queue = iter(todo)
  log_every = max(1, len(jobs) // 200)  # more lines would only be noise
  pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="team")
  running: set[concurrent.futures.Future[Run]] = set()
  try:
    with Metrics(workdir, stage="distill", total=len(jobs), unit="run") as metrics:
      while True:
        # Not all at once: unstarted jobs need no cancelling.
        for task, sample in itertools.islice(queue, 2 * workers - len(running)):
          running.add(pool.submit(work, task, sample))
        if not running:
          return num_failed
        ended, running = concurrent.futures.wait(
          running, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in ended:
          finished = future.result()
          num_ended += 1
          # A failure is not written, so the next start makes the run again. Many in a
          # row mean that the endpoint or a tool is down.
          if finished.status == Status.INFRASTRUCTURE:
            num_failed += 1
            failed_in_a_row += 1
            if failed_in_a_row >= min(len(jobs), max(8, 2 * workers)):
              raise InfrastructureError(
                f"{failed_in_a_row} runs in a row failed; the last: {finished.error}. "
                "Finished runs are kept: mend it and start again on the same workdir"
              )
            continue

          # The run is on disk before its calls are forgotten: a kill loses neither.
          failed_in_a_row = 0
          file.append(finished)
          total_reward += finished.reward or 0.0
          if journal is not None:
            journal.forget((finished.task_id, finished.sample))
          if num_ended % log_every == 0 or num_ended == len(jobs):
            share = total_reward / (num_ended - num_failed)
            values = {"right": share, "failed": num_failed}
            figure = f"right {share:.2f}"
            if journal is not None:
              values |= journal.values()
              figure += f"  {journal.spent()}"
            metrics.log(num_ended, values, figure)
  except BaseException:
    # Unfinished runs end at their next call: nobody would read them.
    if journal is not None:
      journal.stop()
    raise
  finally:
    pool.shutdown(cancel_futures=True)


def _select_all(
  tasks: Sequence[Task],
  file: RunFile,
  backend: ModelBackend,
  journal: Journal | None,
  workdir: str,
  teacher: TeacherConfig,
) -> dict[str, Selection] | None:
  """Selects each task's best run, by task id, into selections.jsonl; or None."""
  if journal is None or not teacher.select:
    return None

  def runs_of_tasks() -> Iterator[tuple[Task, list[Run]]]:
    for task in tasks:
      runs = []
      for sample in range(teacher.samples):
        run = file.read(task.id, sample)
        if run is not None:  # an infrastructure failure left none
          runs.append(run)
      yield task, runs

  selections: dict[str, Selection] = {}
  log_every = max(1, len(tasks) // 50)
  with Metrics(workdir, stage="select", total=len(tasks), unit="task") as metrics:
    for selection in select_all(runs_of_tasks(), backend, journal, teacher.workers):
      selections[selection.task_id] = selection
      num_done = len(selections)
      if num_done % log_every == 0 or num_done == len(tasks):
        metrics.log(num_done, journal.values(), journal.spent())
  rows = [dataclasses.asdict(selections[task.id]) for task in tasks]
  write_jsonl(os.path.join(workdir, SELECTIONS), rows)
  return selections

"""Multi-agent distillation: tasks -> team runs -> trajectories -> a filtered set.

Writes into the workdir:
  config.json          what was asked for, and the commit; written first
  calls.jsonl          with a chat brain: every call of the model and of a tool, as it
                       came back: the log, and what an interrupted run goes on from
  runs.jsonl           every finished run, appended as it ends; in task order at the end
  selections.jsonl     with teacher.select: which run of each task was taken, and why
  violations.jsonl     with section violations: the calls of its judge, likewise
  trajectories.jsonl   the filtered training set
  teacher.jsonl        each run's reward, answer, calls and cost, for `report`
  funnel.png           what every stage kept and dropped
  statistics.png       lengths and roles before and after the filters
  manifest.json        config, counts per stage and drop reason, those lengths and
                       roles (before, after), git commit, sha256
  results.json         the figures

An interrupted run goes on where it stopped when it is started again on the same
workdir: no finished run and no call that was paid for is repeated, and everything but
wall times comes out the same.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_collections

from coa_jax import capacity
from coa_jax.config import (
  ConfigError,
  check_sections,
  hash_files,
  hash_json,
  optional,
  prepare_workdir,
  section,
  write_manifest,
)
from coa_jax.importers.pipeline import judge
from coa_jax.lock import exclusive
from coa_jax.protocol.roles import Variant, get_variant
from coa_jax.protocol.trajectory import Status, Trajectory, write_jsonl
from coa_jax.report import plots
from coa_jax.report.metrics import Metrics, write_json
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rewards.shaping import ShapingConfig
from coa_jax.tasks.sources import TasksConfig, select_tasks
from coa_jax.tasks.task import Task
from coa_jax.teacher.agents import solve
from coa_jax.teacher.annotated import AnnotatedBrain
from coa_jax.teacher.convert import ConvertConfig
from coa_jax.teacher.filters import FiltersConfig, filter_trajectories, stages
from coa_jax.teacher.journal import Journal
from coa_jax.teacher.llm import Brain, ChatBrain, InfrastructureError, TeacherChatConfig
from coa_jax.teacher.outcomes import convert_all, graded
from coa_jax.teacher.outcomes import figures as outcome_figures
from coa_jax.teacher.runs import Run, RunFile, encoder
from coa_jax.teacher.scripted import ScriptedBrain, ScriptedConfig
from coa_jax.teacher.select import Selection, figures, select_all
from coa_jax.teacher.settings import TeacherConfig
from coa_jax.teacher.tool_augmentation import ToolAugmentation, augmented_copies
from coa_jax.teacher.violations import Inspection, Inspector, ViolationsConfig
from coa_jax.tools.toolbox import Toolbox, ToolsConfig

RUNS, TRAJECTORIES, TEACHER = "runs.jsonl", "trajectories.jsonl", "teacher.jsonl"
CALLS, SELECTIONS, MANIFEST = "calls.jsonl", "selections.jsonl", "manifest.json"
VIOLATIONS = "violations.jsonl"
SECTIONS = (
  "tasks",
  "tools",
  "teacher",
  "convert",
  "filters",
  "formats",
  "reward",
  "violations",
)
# A server may move, a limit of requests may show, while a run is under way.
_MAY_CHANGE = ("teacher.workers", "chat.base_url", "chat.timeout_s", "chat.retries")
_MAY_CHANGE += ("chat.backoff_s", "chat.max_pause_s", "chat.prices", "chat.key_file")
_MAY_CHANGE += tuple(f.replace("chat", "violations") for f in _MAY_CHANGE[1:])
_MAY_CHANGE += ("violations.workers",)


@exclusive()
def run(
  config: ml_collections.ConfigDict, workdir: str, api_key: str | None = None
) -> dict[str, Any]:
  """Distils a team's work on the configured tasks into a training set.

  Args:
    config: sections `SECTIONS` and the brain's. `reward` is that of RL, without
      `shaping`; `violations`, where it is given, inspects what the filters keep.
    workdir: where everything is written; holding an interrupted run of the same config
      it is continued.
    api_key: for the endpoint of a chat brain, and of `violations` where it is the same
      or there is no such brain.

  Returns:
    What results.json holds.

  Raises:
    ConfigError: the config cannot be used, or the workdir holds a run of another one.
    InfrastructureError: the endpoint or a tool keeps failing.
    RefusedError: the endpoint refuses the key, the URL or the model.
  """
  plan = _Plan.read(config)
  teacher, tasks, tools = plan.teacher, plan.tasks, plan.tools
  grader = Grader(plan.reward.kept_in(workdir))
  grader.check(tasks, 0)  # what cannot be judged fails here, before anything is spent
  limits, encode = teacher.limits(plan.variant), encoder(teacher.tokenizer)
  prepare_workdir(config, workdir, _MAY_CHANGE, plan.inputs)

  runs = RunFile(os.path.join(workdir, RUNS))
  jobs = list(itertools.product(tasks, range(teacher.samples)))
  with contextlib.ExitStack() as stack:
    stack.enter_context(grader)
    brains = _brains(config, teacher, tasks, api_key, stack)
    toolbox = stack.enter_context(Toolbox(tools))
    journal = None
    if isinstance(brains[0], ChatBrain):
      path, usd = os.path.join(workdir, CALLS), brains[0].config.usd
      journal = stack.enter_context(Journal(path, runs.__contains__, usd))

    def work(task: Task, sample: int) -> Run:
      brain, call, key = brains[sample], toolbox.call, (task.id, sample)
      if journal is not None:
        brain, call = journal.brain(brain, key), journal.tools(call, key)
      done = solve(task, brain, call, tools.tools, limits, encode, sample)
      return graded(done, task, grader)

    failed = _run_all(jobs, work, runs, workdir, teacher.workers, journal)
    runs.sort([(task.id, sample) for task, sample in jobs])
    chosen = _select_all(tasks, runs, brains[0], journal, workdir, teacher)
    calls = {"calls": journal.bill()} if journal is not None else {}

  style, variant = teacher.prompt, plan.variant
  meters, pairs, dropped = convert_all(jobs, runs, variant, style, plan.rules, chosen)
  before = plots.Statistics.of([t for _, t in pairs], tokens=False)
  kept, funnel, inspected = _filtered(plan, pairs, workdir, api_key)
  augmented = augmented_copies(kept, variant, plan.formats)
  write_jsonl(os.path.join(workdir, TEACHER), meters)
  write_jsonl(os.path.join(workdir, TRAJECTORIES), [*kept, *augmented])

  counts = {
    "tasks": len(tasks),
    "runs": len(jobs),
    "infrastructure": failed,
    "convert": {"kept": len(pairs), "dropped": dict(sorted(dropped.items()))},
    "filters": funnel,
    "restyled": len(augmented),
    **inspected,
  }
  after = plots.Statistics.of(kept, tokens=False)
  funnels = {"conversion": (len(pairs), dict(dropped)), **stages(funnel)}
  _draw(workdir, funnels, before, after)
  results = {**counts, **outcome_figures(meters, kept), **calls}
  if chosen is not None:
    rewards = {(m.task_id, m.sample): m.reward for m in meters}
    results["best_of_n"] = figures(tasks, chosen, rewards)
  manifest, data = (os.path.join(workdir, n) for n in (MANIFEST, TRAJECTORIES))
  told = {"counts": counts, "statistics": [before.summary(), after.summary()]}
  write_manifest(manifest, data, config.to_dict(), **told)
  write_json(os.path.join(workdir, "results.json"), results)
  return results


def _draw(
  workdir: str,
  funnels: dict[str, tuple[int, dict[str, int]]],
  before: plots.Statistics,
  after: plots.Statistics,
) -> None:
  """The pictures of the filters."""
  pictures = {
    "funnel.png": plots.funnel_bars(funnels),
    "statistics.png": plots.filter_statistics(before, after),
  }
  for name, figure in pictures.items():
    plots.write_png(os.path.join(workdir, name), figure)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """A config, read and found usable."""

  teacher: TeacherConfig
  rules: ConvertConfig
  formats: ToolAugmentation
  tools: ToolsConfig
  filters: FiltersConfig
  violations: ViolationsConfig | None
  chat: TeacherChatConfig | None
  reward: RewardConfig
  variant: Variant
  tasks: list[Task]

  @classmethod
  def read(cls, config: ml_collections.ConfigDict) -> _Plan:
    """Raises: ConfigError, ValueError, FileNotFoundError."""
    teacher = section(config, "teacher", TeacherConfig)
    check_sections(config, (*SECTIONS, teacher.brain))
    formats = section(config, "formats", ToolAugmentation)
    if formats.copies and teacher.prompt == "brief":
      raise ConfigError(
        "config.formats.copies: only teacher.prompt='full' describes formats"
      )
    reward = section(config, "reward", RewardConfig)
    if reward.shaping != ShapingConfig():
      words = "config.reward.shaping: a run earns what its answer does, no more"
      raise ConfigError(words)
    tools = section(config, "tools", ToolsConfig)
    tasks = select_tasks(section(config, "tasks", TasksConfig))
    fields = f"teacher.samples={teacher.samples} of {len(tasks)} tasks"
    workers = f"teacher.workers={teacher.workers}"
    needs = {fields: teacher.samples * len(tasks) * capacity.TRAJECTORY}
    capacity.check_host(needs | {workers: teacher.workers * capacity.THREAD})
    return cls(
      teacher=teacher,
      rules=section(config, "convert", ConvertConfig),
      formats=formats,
      tools=tools,
      filters=section(config, "filters", FiltersConfig),
      violations=optional(config, "violations", ViolationsConfig),
      chat=optional(config, "chat", TeacherChatConfig),
      reward=reward,
      variant=get_variant(teacher.variant).with_tools(tools.tool_descriptions),
      tasks=tasks,
    )

  @property
  def inputs(self) -> dict[str, str]:
    """What was read, for `prepare_workdir`."""
    tasks = hash_json(t.to_json() for t in self.tasks)
    return {"tasks": tasks, "tools.corpus": hash_files(self.tools.corpus)}

  def violations_key(self, api_key: str | None) -> str | None:
    """The key, unless it is that of another endpoint, whose brain works as the team."""
    chat, inspects = self.chat, self.violations
    same = chat is None or (inspects and inspects.base_url == chat.base_url)
    return api_key if same else None


def _filtered(
  plan: _Plan,
  pairs: Sequence[tuple[Task, Trajectory]],
  workdir: str,
  api_key: str | None,
) -> tuple[list[Trajectory], dict[str, Any], dict[str, Any]]:
  """The trajectories kept; the funnel; what an inspection of violations came to."""
  chain = functools.partial(filter_trajectories, pairs, plan.variant, judge)
  if plan.violations is None:
    return *chain(plan.filters), {}
  path, key = os.path.join(workdir, VIOLATIONS), plan.violations_key(api_key)
  with Inspector(plan.violations, path, key) as inspector:
    found = chain(plan.filters, functools.partial(_shown, inspector, workdir))
    return *found, {"violations": inspector.counts()}


def _shown(
  inspector: Inspector, workdir: str, trajectories: Sequence[Trajectory]
) -> Iterator[Inspection]:
  """The inspector's verdicts, with progress."""
  total = len(trajectories)
  with Metrics(workdir, stage="inspect", total=total, unit="trajectory") as metrics:
    for done, verdict in enumerate(inspector(trajectories), 1):
      if done % max(1, total // 50) == 0 or done == total:
        metrics.log(done, inspector.values(), inspector.spent())
      yield verdict


def _brains(
  config: ml_collections.ConfigDict,
  teacher: TeacherConfig,
  tasks: Sequence[Task],
  api_key: str | None,
  stack: contextlib.ExitStack,
) -> list[Brain]:
  """One brain for each sample of a task."""
  if teacher.brain == "chat":
    chat = section(config, "chat", TeacherChatConfig)
    brain = stack.enter_context(ChatBrain(chat, api_key))
    return [brain] * teacher.samples
  try:
    if teacher.brain == "annotated":
      return [AnnotatedBrain(tasks)] * teacher.samples
    scripted = section(config, "scripted", ScriptedConfig)
    return [ScriptedBrain(tasks, scripted, s) for s in range(teacher.samples)]
  except ValueError as e:
    raise ConfigError(f"config.teacher.brain: {e}") from e


def _run_all(
  jobs: Sequence[tuple[Task, int]],
  work: Callable[[Task, int], Run],
  file: RunFile,
  workdir: str,
  workers: int,
  journal: Journal | None,
) -> int:
  """Runs every job that is not in the file; the number that infrastructure failed."""
  todo = [(task, sample) for task, sample in jobs if (task.id, sample) not in file]
  before = [file.read(t.id, sample) for t, sample in jobs if (t.id, sample) in file]
  step, right = len(before), sum(run_.reward or 0.0 for run_ in before if run_)
  failed, in_a_row = 0, 0
  every = max(1, len(jobs) // 200)  # metrics lines; more would only be noise
  pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="team")
  waiting: dict[concurrent.futures.Future[Run], Task] = {}
  try:
    with Metrics(workdir, stage="distill", total=len(jobs), unit="run") as metrics:
      queue = iter(todo)
      while True:
        for task, sample in itertools.islice(queue, 2 * workers - len(waiting)):
          waiting[pool.submit(work, task, sample)] = task
        if not waiting:
          return failed
        ended, _ = concurrent.futures.wait(
          waiting, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in ended:
          task, run_ = waiting.pop(future), future.result()
          step += 1
          if run_.status == Status.INFRASTRUCTURE:
            failed, in_a_row = failed + 1, in_a_row + 1
            if in_a_row >= min(len(jobs), max(8, 2 * workers)):
              raise InfrastructureError(
                f"{in_a_row} runs in a row failed; the last: {run_.error}. Finished "
                "runs are kept: mend it and start again on the same workdir"
              )
            continue
          in_a_row = 0
          file.append(run_)
          if journal is not None:
            journal.forget((run_.task_id, run_.sample))
          right += run_.reward or 0.0
          if step % every == 0 or step == len(jobs):
            share = right / (step - failed)
            values, spent = {"right": share, "failed": failed}, ""
            if journal is not None:
              values |= journal.values()
              spent = f"  {journal.spent()}"
            metrics.log(step, values, f"right {share:.2f}{spent}")
  except BaseException:
    if journal is not None:
      journal.stop()
    raise
  finally:
    pool.shutdown(cancel_futures=True)


def _select_all(
  tasks: Sequence[Task],
  file: RunFile,
  brain: Brain,
  journal: Journal | None,
  workdir: str,
  teacher: TeacherConfig,
) -> dict[str, Selection] | None:
  """The best run of each task, by task id; in selections.jsonl, too; or None."""
  if journal is None or not teacher.select:
    return None
  out: dict[str, Selection] = {}
  done = (
    (task, [r for s in range(teacher.samples) if (r := file.read(task.id, s))])
    for task in tasks
  )
  with Metrics(workdir, stage="select", total=len(tasks), unit="task") as metrics:
    for chosen in select_all(done, brain, journal, teacher.workers):
      out[chosen.task_id] = chosen
      if len(out) % max(1, len(tasks) // 50) == 0 or len(out) == len(tasks):
        metrics.log(len(out), journal.values(), journal.spent())
  rows = [dataclasses.asdict(out[task.id]) for task in tasks]
  write_jsonl(os.path.join(workdir, SELECTIONS), rows)
  return out

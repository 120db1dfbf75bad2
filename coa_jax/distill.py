"""Multi-agent distillation: tasks -> team runs -> trajectories -> a filtered set.

Writes into the workdir:
  config.json          what was asked for, and the commit; written first
  runs.jsonl           every finished run, appended as it ends; in task order at the end
  trajectories.jsonl   the filtered training set
  teacher.jsonl        each run's reward, answer, calls and cost, for `report`
  funnel.png           what every stage kept and dropped
  manifest.json        config, counts per stage and drop reason, git commit, sha256
  results.json         the figures

An interrupted run goes on where it stopped when it is started again on the same
workdir: no finished run is repeated, and everything but wall times comes out the same.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from coa_jax.config import ConfigError, check_sections, claim, git_commit, section
from coa_jax.protocol.prompts import STYLES, prompt_segments
from coa_jax.protocol.roles import ANSWER, Variant, get_variant, wrap
from coa_jax.protocol.trajectory import (
  Author,
  Segment,
  Status,
  Trajectory,
  write_jsonl,
)
from coa_jax.report import plots
from coa_jax.report.metrics import Metrics, write_json
from coa_jax.rollout.toolbox import Toolbox, ToolsConfig
from coa_jax.tasks.rewards import grade
from coa_jax.tasks.sources import TasksConfig, select_tasks
from coa_jax.tasks.task import Task
from coa_jax.teacher.agents import TeamConfig, review_style, solve
from coa_jax.teacher.annotated import AnnotatedBrain
from coa_jax.teacher.convert import ConvertConfig, Dropped, convert
from coa_jax.teacher.filters import FiltersConfig, filter_trajectories, stages
from coa_jax.teacher.llm import Brain, ChatBrain, ChatConfig, InfrastructureError
from coa_jax.teacher.restyle import FormatsConfig, restyle
from coa_jax.teacher.runs import Encode, Run, RunFile
from coa_jax.teacher.scripted import ScriptedBrain, ScriptedConfig

RUNS, TRAJECTORIES, TEACHER = "runs.jsonl", "trajectories.jsonl", "teacher.jsonl"
SECTIONS = ("tasks", "tools", "teacher", "convert", "filters", "formats")
BRAINS = ("scripted", "annotated", "chat")


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
  """Config section `teacher`.

  Attributes:
    brain: "scripted" (section `scripted`; tasks of the generated world only),
      "annotated" (tasks with worked solutions, such as GSM8K's training rows) or "chat"
      (section `chat`; any OpenAI-compatible endpoint).
    samples: runs per task.
    workers: runs at once.
    variant: the dialect of the trajectories.
    prompt: the style of their prompt; see `protocol.prompts`.
    tokenizer: folder of the tokenizer that costs are counted by; None counts words,
      digits and punctuation marks.
    max_turns: limits of a run, and likewise the next two; see `agents.TeamConfig`.
  """

  brain: str = "scripted"
  samples: int = 1
  workers: int = 4
  variant: str = "unified"
  prompt: str = "brief"
  tokenizer: str | None = None
  max_turns: int = 24
  max_calls: int = 12
  max_checks: int = 3

  def __post_init__(self):
    if self.brain not in BRAINS:
      raise ValueError(f"brain is {self.brain!r}; accepted: {', '.join(BRAINS)}")
    if self.prompt not in STYLES:
      raise ValueError(f"prompt is {self.prompt!r}; accepted: {', '.join(STYLES)}")
    if self.samples < 1 or self.workers < 1:
      raise ValueError("samples and workers must be at least 1")


def run(
  config: ml_collections.ConfigDict, workdir: str, api_key: str | None = None
) -> dict[str, Any]:
  """Distils a team's work on the configured tasks into a training set.

  Args:
    config: sections tasks, tools, teacher, convert, filters, formats and the brain's.
    workdir: where everything is written; holding an interrupted run of the same config
      it is continued.
    api_key: for the endpoint of a chat brain.

  Returns:
    What results.json holds.

  Raises:
    ConfigError: the config cannot be used, or the workdir holds a run of another one.
    InfrastructureError: the endpoint or a tool keeps failing.
    RefusedError: the endpoint refuses the key, the URL or the model.
  """
  teacher = section(config, "teacher", TeacherConfig)
  check_sections(config, (*SECTIONS, teacher.brain))
  converting = section(config, "convert", ConvertConfig)
  formats = section(config, "formats", FormatsConfig)
  if formats.copies and teacher.prompt == "brief":
    raise ConfigError("config.formats.copies: only teacher.prompt='full' tells formats")
  tools = section(config, "tools", ToolsConfig)
  filters = section(config, "filters", FiltersConfig)
  variant = get_variant(teacher.variant).with_tools(tools.told)
  limits = TeamConfig(
    max_turns=teacher.max_turns,
    max_calls=teacher.max_calls,
    max_checks=teacher.max_checks,
    review=review_style(variant),
  )
  tasks = select_tasks(section(config, "tasks", TasksConfig))
  for task in tasks:
    grade(task, None)  # what cannot be judged fails here, before anything is spent
  encode = _encoder(teacher.tokenizer)
  claim(config, workdir)

  runs = RunFile(os.path.join(workdir, RUNS))
  jobs = list(itertools.product(tasks, range(teacher.samples)))
  with contextlib.ExitStack() as stack:
    brains = _brains(config, teacher, tasks, api_key, stack)
    toolbox = stack.enter_context(Toolbox(tools))

    def work(task: Task, sample: int) -> Run:
      brain = brains[sample]
      return solve(task, brain, toolbox.call, tools.tools, limits, encode, sample)

    failed = _run_all(jobs, work, runs, workdir, teacher.workers)
  runs.sort([(task.id, sample) for task, sample in jobs])

  meters, pairs, dropped = _convert_all(jobs, runs, variant, teacher, converting)
  kept, funnel = filter_trajectories(pairs, variant, grade, filters)
  restyled = _restyled(kept, variant, formats)
  write_jsonl(os.path.join(workdir, TEACHER), meters)
  write_jsonl(os.path.join(workdir, TRAJECTORIES), [*kept, *restyled])

  counts = {
    "tasks": len(tasks),
    "runs": len(jobs),
    "infrastructure": failed,
    "convert": {"kept": len(pairs), "dropped": dict(sorted(dropped.items()))},
    "filters": funnel,
    "restyled": len(restyled),
  }
  _draw(workdir, (len(pairs), dict(dropped)), funnel)
  results = {**counts, **_figures(meters, kept)}
  write_json(
    os.path.join(workdir, "manifest.json"),
    {
      "config": config.to_dict(),
      "counts": counts,
      "git_commit": git_commit(),
      "sha256": {TRAJECTORIES: _sha256(os.path.join(workdir, TRAJECTORIES))},
    },
  )
  write_json(os.path.join(workdir, "results.json"), results)
  return results


def _encoder(folder: str | None) -> Encode:
  if folder is None:
    return _pieces
  from coa_jax.protocol.tokens import Tokenizer  # takes seconds to import

  return Tokenizer.load(folder).encode


_PIECE = re.compile(r"[^\W\d]+|\d|[^\w\s]")


def _pieces(text: str) -> list[int]:
  """Stands in for a tokenizer: words, single digits and punctuation marks."""
  return [zlib.crc32(piece.encode()) for piece in _PIECE.findall(text)]


def _brains(
  config: ml_collections.ConfigDict,
  teacher: TeacherConfig,
  tasks: Sequence[Task],
  api_key: str | None,
  stack: contextlib.ExitStack,
) -> list[Brain]:
  """One brain for each sample of a task."""
  if teacher.brain == "chat":
    chat = section(config, "chat", ChatConfig)
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
) -> int:
  """Runs every job that is not in the file; the number that infrastructure failed."""
  todo = [(task, sample) for task, sample in jobs if (task.id, sample) not in file]
  step, right, failed, in_a_row = len(jobs) - len(todo), 0, 0, 0
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
          right += grade(task, run_.prediction)
          if step % every == 0 or step == len(jobs):
            share = right / (step - (len(jobs) - len(todo)) - failed)
            metrics.log(step, {"right": share, "failed": failed}, f"right {share:.2f}")
  finally:
    pool.shutdown(cancel_futures=True)


def _convert_all(
  jobs: Sequence[tuple[Task, int]],
  file: RunFile,
  variant: Variant,
  teacher: TeacherConfig,
  config: ConvertConfig,
) -> tuple[list[Trajectory], list[tuple[Task, Trajectory]], Counter[str]]:
  """Every run's meter; tasks with their trajectories; why there is none, counted."""
  meters: list[Trajectory] = []
  pairs: list[tuple[Task, Trajectory]] = []
  dropped: Counter[str] = Counter()
  for task, sample in jobs:
    run_ = file.read(task.id, sample)
    if run_ is None:
      continue  # infrastructure failed it
    meters.append(_meter(run_, task))
    prompt = prompt_segments(variant, task.question, teacher.prompt)
    result = convert(run_, task, variant, prompt, config)
    if isinstance(result, Dropped):
      dropped[result.reason] += 1
    else:
      pairs.append((task, result))
  return meters, pairs, dropped


def _draw(
  workdir: str, conversion: tuple[int, dict[str, int]], funnel: dict[str, Any]
) -> None:
  """The picture of what every stage kept and dropped."""
  figure = plots.funnel_bars({"conversion": conversion, **stages(funnel)})
  with open(os.path.join(workdir, "funnel.png"), "wb") as f:
    f.write(plots.to_png(figure))


def _restyled(
  kept: Sequence[Trajectory], variant: Variant, config: FormatsConfig
) -> list[Trajectory]:
  """Copies of trajectories under other tool formats; second copies earn none."""
  out = []
  for t, number in itertools.product(kept, range(1, config.copies + 1)):
    copy = None if "copy" in t.meta else restyle(t, variant, number, config.seed)
    out += [copy[0]] if copy else []
  return out


def _meter(run_: Run, task: Task) -> Trajectory:
  """The run's cost, calls, answer and reward, without its text."""
  reward = grade(task, run_.prediction)
  answer = Segment(Author.POLICY, ANSWER, wrap(ANSWER, run_.prediction or ""))
  return Trajectory(
    run_.task_id,
    segments=[answer],
    calls=run_.calls,
    status=run_.status,
    reward=reward,
    reward_parts={"answer": reward},
    usage=run_.usage,
    sample=run_.sample,
    meta={"family": task.family},
  )


def _figures(
  meters: Sequence[Trajectory], kept: Sequence[Trajectory]
) -> dict[str, Any]:
  """Shares of right answers, mean cost of a run, make-up of the training set."""
  rewards: dict[str, list[float]] = {}
  for meter in meters:
    rewards.setdefault(meter.meta["family"] or "all", []).append(meter.reward)
  usage = [dataclasses.asdict(meter.usage) for meter in meters]
  return {
    "right": _mean([m.reward for m in meters]),
    "right_by_family": {name: _mean(r) for name, r in sorted(rewards.items())},
    "mean_usage": {
      name: _mean([u[name] for u in usage]) for name in (usage or [{}])[0]
    },
    "kept": len(kept),
    "kept_by_family": dict(sorted(Counter(t.meta["family"] for t in kept).items())),
  }


def _mean(values: Sequence[float]) -> float | None:
  return sum(values) / len(values) if values else None


def _sha256(path: str) -> str:
  with open(path, "rb") as f:
    return hashlib.file_digest(f, "sha256").hexdigest()

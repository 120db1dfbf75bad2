r"""Checks tasks before a run, or selects some of them by a model's pass rate.

  coa tasks --config=configs/rl_world.py
  coa tasks --uri=problems.csv --kind=math
  coa tasks --uri=set.jsonl --fields=question=query,answers=gold
  coa tasks --config=configs/select_world.py --workdir=DIR [--shard=I/N]

With --workdir a model plays the tasks, and tasks within a band of pass rates are
written (section `select`; see `coa_jax/cli/select_tasks.py`). Without --workdir the
tasks are only checked, section `dev` included: kinds, sources, samples, and whether
every task can be graded. Every accepted answer is graded by the run's `reward`, or by
the default one; answers that earn less than 1 are listed and set exit status 1. A judge
is asked as in the run. For programming tasks only the tests are read, because no
solution is known.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any

import ml_collections
import rich
from absl import flags

from coa_jax import evaluate
from coa_jax.cli import select_tasks as selection
from coa_jax.cli.launch import launch, run_program
from coa_jax.data.tasks.sources import TasksConfig, describe_tasks, select_tasks
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.plan.rl import DevConfig
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.report.tables import Table
from coa_jax.rewards.code.tests import read_tests
from coa_jax.rewards.graded import Ungradable
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import section

_SAMPLES = 3
_MOST_LISTED = 20

_URI = flags.DEFINE_string("uri", None, "Tasks, in place of a config's tasks.uri.")
_KIND = flags.DEFINE_string("kind", None, "In place of tasks.kind: qa, math or code.")
_FIELDS = flags.DEFINE_list(
  "fields", None, "In place of tasks.fields: question=COLUMN,answers=COLUMN."
)


@dataclasses.dataclass(frozen=True)
class TasksCheckConfig:
  """The sections read from any config with tasks.

  Attributes:
    tasks: the tasks to check.
    reward: the tasks' grader.
    dev: RL's evaluation tasks, to check as well; None if there are none.
  """

  tasks: TasksConfig
  reward: RewardConfig = section(RewardConfig)
  dev: DevConfig | None = None


def table_of(tasks: list[Task], grader: Grader) -> Table:
  """Counts tasks by source, family, kind and grader."""
  counts = collections.Counter(
    (t.source, t.family, t.kind.value, grader.grader_of(t)) for t in tasks
  )
  names = ("source", "family", "kind", "grader")
  rows = []
  for key, count in sorted(counts.items()):
    row: dict[str, Any] = dict(zip(names, key, strict=True))
    rows.append({**row, "tasks": count})
  columns = {name: name for name in (*names, "tasks")}
  return Table(describe_tasks(tasks), rows, columns)


def faults_of(task: Task, grader: Grader) -> list[str]:
  """Lists a task's accepted answers with a reward other than 1."""
  if task.kind == Kind.CODE and grader.grader_of(task) == "code":
    read_tests(task)
    return []
  faults = []
  for answer in task.answers:
    try:
      reward = grader.answer(task, answer, Trajectory(task.id)).answer
    except Ungradable as e:
      faults.append(f"{task.id}: {answer!r:.80} cannot be graded: {e}")
      continue
    if reward != 1:
      faults.append(f"{task.id}: {answer!r:.80} earns {reward:g}")
  return faults


def work(config: ml_collections.ConfigDict) -> None:
  """Checks a config's tasks; flags override section `tasks`."""
  given = {"uri": _URI.value, "kind": _KIND.value, "fields": _fields()}
  tasks = {
    **dict(config.get("tasks") or {}),
    **{name: value for name, value in given.items() if value is not None},
  }
  values = {"tasks": tasks}
  for name in ("dev", "reward"):
    values[name] = config.get(name)
  check(read_config(values, TasksCheckConfig))


def check(settings: TasksCheckConfig) -> None:
  """Prints tables, samples and faults; exit status 1 if there are faults."""
  sections = {"tasks": select_tasks(settings.tasks)}
  if settings.dev is not None:
    sections["dev"] = select_tasks(settings.dev.tasks(settings.tasks))
  tasks = [task for found in sections.values() for task in found]

  with Grader(settings.reward) as grader:
    # --- Counts and samples.
    for name, found in sections.items():
      print(f"{name}:")
      rich.print(table_of(found, grader))
      for task in found[:_SAMPLES]:
        answers = " | ".join(task.answers)
        print(f"\n{task.id}\n  {task.question.strip()[:300]}\n  -> {answers[:200]}")
      print()

    # --- Are they gradable? A trajectory's length does not matter here.
    grader.check(tasks, sys.maxsize)
    faults = [fault for task in tasks for fault in faults_of(task, grader)]
  for fault in faults[:_MOST_LISTED]:
    print(fault)
  if len(faults) > _MOST_LISTED:
    print(f"... and {len(faults) - _MOST_LISTED:,} more")
  if faults:
    print(f"{len(faults):,} accepted answers do not earn 1")
    sys.exit(1)
  num_code = sum(task.kind == Kind.CODE for task in tasks)
  print(f"every accepted answer of {len(tasks) - num_code:,} tasks earns 1")
  if num_code:
    print(f"the tests of {num_code:,} programming tasks can be read")


def _fields() -> dict[str, str] | None:
  if _FIELDS.value is None:
    return None
  fields = {}
  for word in _FIELDS.value:
    ours, equals, column = word.partition("=")
    if not equals or not column:
      raise ValueError(f"--fields: {word!r} is not FIELD=COLUMN")
    fields[ours.strip()] = column.strip()
  return fields


def command() -> None:
  """Runs the command line."""
  words = [word.lstrip("-").partition("=")[0] for word in sys.argv[1:]]
  if "uri" in words and not any(word.split(".")[0] == "config" for word in words):
    run_program(lambda: work(ml_collections.ConfigDict()))
    return
  launch(
    selection.run,
    selection.SelectTasksConfig,
    lambda results: [selection.table(results)],
    logs=evaluate.LOGS,
    without_workdir=work,
  )

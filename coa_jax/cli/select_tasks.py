"""Difficulty selection for RL: keeps tasks within a band of a model's pass rates.

Plays the tasks like `evaluate` and writes, besides evaluate's files:
  tasks.jsonl       the kept tasks, with meta.pass_rate and meta.attempts; a `tasks.uri`
  selection.json    the funnel, the histogram of pass rates, the token counts

The samples are kept: another band in the same workdir needs no new samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import ml_collections

from coa_jax import evaluate
from coa_jax.data.tasks.difficulty import SelectConfig, keep_tasks, pass_rates
from coa_jax.data.tasks.rows import read_rows
from coa_jax.data.tasks.schemas import read_task
from coa_jax.data.tasks.sources import TasksConfig, select_tasks
from coa_jax.data.tasks.task import Row, first_of
from coa_jax.protocol.trajectory import (
  Trajectory,
  read_trajectories,
  write_jsonl,
)
from coa_jax.report.metrics import write_json
from coa_jax.report.scores import Scored, correct, graded
from coa_jax.report.tables import Table
from coa_jax.runtime.config import ConfigError, read_config
from coa_jax.runtime.fields import nearest, section
from coa_jax.runtime.lock import hold
from coa_jax.runtime.processes import process_dir
from coa_jax.runtime.shard import Shard

# `keep_tasks`' reasons for leaving tasks out, except too few attempts.
_LEFT_OUT = ("used", "all_wrong", "all_right", "too_hard", "too_easy", "limit")


@dataclasses.dataclass(frozen=True)
class SelectTasksConfig(evaluate.EvaluateConfig):
  """Config of a selection: an evaluation's sections, and `select`.

  Attributes:
    select: criteria for kept tasks.
  """

  select: SelectConfig = section(SelectConfig)

  def __post_init__(self):
    super().__post_init__()
    if self.eval.samples < 1:
      raise ConfigError("eval.samples must be at least 1: pass rates come from samples")


def run(
  config: ml_collections.ConfigDict, workdir: str, shard: Shard | None = None
) -> dict[str, Any]:
  """Estimates pass rates and keeps tasks by the criteria in `select`.

  Args:
    config: see `SelectTasksConfig`; if `select.played` names files of attempts, `tasks`
      is the only other section needed: only the names of the rest are checked.
    workdir: the output folder.
    shard: plays only this part of the tasks: see `evaluate.run`.

  Returns:
    selection.json's content.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any play, see `evaluate.run`; or
      no task is left.
  """
  # --- Read the config. Without new attempts most sections may be missing, so only
  # their names are checked.
  select = read_config(config.get("select"), SelectConfig, "select")
  if select.played:
    names = [field.name for field in dataclasses.fields(SelectTasksConfig)]
    for name in config:
      if name not in names:
        raise ConfigError(f"config has no section {name!r}{nearest(name, names)}")
  else:
    select = read_config(config, SelectTasksConfig).select
  used = _used(select.without)
  if select.played and shard:
    raise ConfigError("select.played plays nothing, so there are no shards of it")
  # --- Attempts: earlier or new ones.
  tasks = select_tasks(read_config(config.get("tasks"), TasksConfig, "tasks"))
  played: list[Trajectory | Scored] = []
  if select.played:
    for path in select.played:
      played += read_trajectories(path)
  else:
    rest = {name: config[name] for name in config if name != "select"}
    evaluation = evaluate.run(ml_collections.ConfigDict(rest), workdir, shard=shard)
    if shard:
      return evaluation
    own = read_trajectories(os.path.join(process_dir(workdir), "sampled.jsonl"))
    played += evaluate.gather_scored(own, tasks)
  # --- The kept tasks.
  counted = graded(played)
  attempts = pass_rates((t.task_id, correct(t)) for t in counted)
  chosen_tasks, funnel = keep_tasks(tasks, attempts, select, used)
  results = {"select": vars(select), **funnel, **_usage(played, len(counted))}
  with hold(process_dir(workdir)):
    # Before the refusal: the funnel shows why nothing is left.
    write_json(os.path.join(workdir, "selection.json"), results)
    if not chosen_tasks:
      reasons = []
      for name, count in funnel.items():
        if isinstance(count, int) and name not in ("in", "out"):
          reasons.append(f"{count} {name}")
      raise ValueError(
        f"no task is left of {len(tasks)}: {', '.join(reasons)} (see select.at_least, "
        "at_most, all_wrong, all_right, min_attempts and without)"
      )
    write_jsonl(
      os.path.join(workdir, "tasks.jsonl"), [t.to_json() for t in chosen_tasks]
    )
  return results


def _used(paths: tuple[str, ...]) -> set[str]:
  """Returns the question of every row in the files, otherwise the row's id.

  An id is unique only within a file: often just the file's name and a number.
  """
  used: set[str] = set()
  for path in paths:
    if not os.path.exists(path):
      raise FileNotFoundError(f"select.without: there is no file {path}")
    for where, row in read_rows(path):
      used.add(_name_of(row, where).strip())
  return used


def _name_of(row: Row, where: str) -> str:
  """Returns the question of a task's or trajectory's row, otherwise its id.

  Raises:
    ValueError: the row has neither.
  """
  if "segments" not in row:
    # As in a run: with its options, decrypted, from any column.
    with contextlib.suppress(ValueError):
      return read_task(row, where, where).question
  meta = row.get("meta") if isinstance(row.get("meta"), dict) else {}
  names = {**row, "question": row.get("question") or meta.get("question")}
  name = first_of(names, "question", "task_id", "id", default=None)
  if not isinstance(name, str | int):
    raise ValueError(
      f"select.without: {where}: has no question and no id; accepted: tasks or "
      "trajectories"
    )
  return str(name)


def _usage(played: list[Trajectory | Scored], counted: int) -> dict[str, Any]:
  return {
    "attempts": len(played),
    "ungraded": len(played) - counted,
    "tokens": sum(t.usage.total for t in played),
    "tool_calls": sum(t.usage.tool_calls for t in played),
  }


def table(results: Mapping[str, Any]) -> Table:
  """Makes a table of `selection.json`: all and kept tasks by pass rate."""
  rows = []
  for rate, tasks in results["rates"].items():
    kept = results["kept_rates"].get(rate, 0)
    rows.append({"rate": rate, "tasks": tasks, "kept": kept})
  left = {name: results[name] for name in _LEFT_OUT if name in results}
  too_few = results["in"] - results["out"] - sum(left.values())
  if too_few:
    left["too few attempts"] = too_few
  reasons = ", ".join(f"{count:,} {name}" for name, count in left.items())
  note = (
    f"{results['out']:,} of {results['in']:,} tasks are kept; left out: "
    f"{reasons or 'none'}. {results['attempts']:,} attempts, "
    f"{results['ungraded']:,} ungraded, {results['tokens']:,} tokens, "
    f"{results['tool_calls']:,} tool calls. More is in selection.json."
  )
  columns = {"rate": "right of graded attempts", "tasks": "tasks", "kept": "kept"}
  return Table("Tasks by pass rate", rows, columns, note)

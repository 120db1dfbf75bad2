"""Cost per answer: the multi-agent system and the single model, compared by task.

The multi-agent system sends its context again at every model call; a prefix cache would
serve `Usage.cached` of these tokens. The single model's stream processes prompt,
observation and generated tokens once each. Totals are shown with and without cache
credit: without credit, the multi-agent system looks worse than in deployments.

A trained model needs no instructions, so its prompt may be empty, while the team's
agents read their instructions at every call. Part of the savings comes from this
difference, not from replacing many agents by one model. So reductions are shown as
played and with instructions on both sides: then the single model's prompt also has full
instructions for every role and tool (`prompts.instructions`), read once per task and
counted by the team's token counter.

Seconds are an attempt's wall time from start to end. A team makes its model and tool
calls one after the other; a model playing many tasks at once has a full batch's
latency. So the two are comparable only if both used the machine in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coa_jax.protocol import prompts
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.report.scores import (
  by_task,
  correct,
  graded,
  proportion_interval,
  resample_sums,
)
from coa_jax.report.tables import Table, cell

MULTI, SINGLE = "multi_agent", "single"
PAPER_REDUCTION = 0.846  # arXiv 2508.13167, abstract: tokens per task, GAIA, n = 10
# Figure -> table label. All but `solved` are counts per attempt.
FIGURES = {
  "prompt": "prompt tokens",
  "prompt_cached_credit": "prompt tokens, less cached",
  "completion": "completion tokens",
  "total": "total tokens",
  "total_cached_credit": "total tokens, less cached",
  "tool_calls": "tool calls",
  "model_calls": "model calls",
  "seconds": "seconds (a scripted team: of its tools)",
  "solved": "solved",
}
REDUCTIONS = {
  "reduction_no_cache": "tokens per task, as played",
  "reduction_instructed": "tokens per task, instructions on both sides",
  "reduction_cache": "tokens per task, as played, with cache credit",
  "reduction_per_solved": "tokens per solved task, as played",
  "reduction_per_solved_instructed": (
    "tokens per solved task, instructions on both sides"
  ),
  "reduction_per_solved_cache": "tokens per solved task, as played, with cache credit",
}
INSTRUCTED = (
  "The team's agents read their instructions at every call. As played, the one model "
  "has the prompt of its training, perhaps none; with instructions on both sides its "
  "prompt describes every role and tool, once a task."
)


def cost(
  multi: Sequence[Trajectory],
  single: Sequence[Trajectory],
  instructions: int | None = None,
) -> dict[str, Any]:
  """Compares the two systems on the tasks attempted by both.

  Args:
    multi: the multi-agent system's attempts; only task id, status, reward parts and
      usage are read, so a run's usage is enough.
    single: the single model's attempts.
    instructions: tokens that instructions would add to the single model's prompt; 0 if
      already included, None if unknown.

  Returns:
    `tasks`, the number of common tasks; `left_out`, the number of tasks attempted by
    only one system (infrastructure failures aside); for `multi_agent` and `single`,
    the figures `per_task` (mean over tasks; `solved` gives the accuracy), `per_solved`
    (sum over tasks divided by the number of solved tasks; None if none is solved) and
    `ci95` (figure -> [low, high] of `per_task`; by `scores.proportion_interval` for
    `solved`); `accuracy_gain`, the single model's accuracy less the multi-agent
    system's; the reductions 1 - single / multi_agent: `reduction_no_cache` and
    `reduction_cache` (total tokens per task, without and with cache credit),
    `reduction_per_solved` and `reduction_per_solved_cache` (total tokens per solved
    task, likewise), `reduction_instructed` and `reduction_per_solved_instructed`
    (without cache credit, but with `instructions` more tokens in the single model's
    prompt; None if unknown); `instructions`, as given; and `ci95`, gain or
    reduction -> [low, high] by a bootstrap that draws the same tasks for both systems.

  Raises:
    ValueError: no task was attempted by both.
  """
  # --- Each system's figures [tasks, FIGURES] on common tasks. A task attempted by only
  # one system would bias every mean.
  theirs = by_task(graded(multi))
  ours = by_task(graded(single))
  shared = [task for task in theirs if task in ours]
  if not shared:
    raise ValueError(
      f"no task in common: {len(theirs)} of the multi-agent system, {len(ours)} of the "
      "single model"
    )
  columns_m = np.array([_figures(theirs[task]) for task in shared])
  columns_s = np.array([_figures(ours[task]) for task in shared])

  # --- Reductions over all tasks and over resamples, the same tasks for both systems.
  # An unknown count is nan, so only dependent values become unknown.
  extra = math.nan if instructions is None else instructions * len(shared)
  point = _reductions(columns_m.sum(0)[None], columns_s.sum(0)[None], extra)
  # In one matrix, so that a drawn task counts for both systems.
  both = resample_sums(np.concatenate([columns_m, columns_s], axis=1))
  resampled_m = both[:, : len(FIGURES)]
  resampled_s = both[:, len(FIGURES) :]
  resampled = _reductions(resampled_m, resampled_s, extra)
  gains = (resampled_s[:, -1] - resampled_m[:, -1]) / len(shared)

  # --- The record.
  out: dict[str, Any] = {
    "tasks": len(shared),
    "left_out": len(set(theirs) | set(ours)) - len(shared),
    "instructions": instructions,
    MULTI: {**_table(columns_m), "ci95": _intervals(columns_m, resampled_m)},
    SINGLE: {**_table(columns_s), "ci95": _intervals(columns_s, resampled_s)},
    # FIGURES ends in `solved`; its mean is the accuracy.
    "accuracy_gain": float(columns_s[:, -1].mean() - columns_m[:, -1].mean()),
    "ci95": {"accuracy_gain": _interval(gains)},
  }
  for name, values in point.items():
    out[name] = _finite(values[0])
    out["ci95"][name] = _interval(resampled[name])
  return out


def instruction_tokens(
  variant: Variant, style: str, encode: Callable[[str], Sequence[int]]
) -> int:
  """Counts the tokens that instructions would add to the single model's prompt.

  Args:
    variant: the single model's dialect, reduced to its tools.
    style: its prompt style; "full" already includes instructions.
    encode: the team's token counter.
  """
  return 0 if style == "full" else len(encode(prompts.instructions(variant)))


def _figures(attempts: Sequence[Trajectory]) -> list[float]:
  """Averages a task's attempts; returns the means in the order of FIGURES."""
  rows = []
  for t in attempts:
    u = t.usage
    # Reading an observation costs as much as reading a prompt.
    prompt = u.prompt + u.observation
    figures = {
      "prompt": prompt,
      "prompt_cached_credit": prompt - u.cached,
      "completion": u.generated,
      "total": u.total,
      "total_cached_credit": u.total - u.cached,
      "tool_calls": u.tool_calls,
      "model_calls": u.model_calls,
      "seconds": u.seconds,
      "solved": correct(t),
    }
    rows.append([figures[name] for name in FIGURES])
  return list(np.mean(np.array(rows, float), axis=0))


def _table(columns: np.ndarray) -> dict[str, dict[str, float | None]]:
  per_task: dict[str, float | None] = {}
  per_solved: dict[str, float | None] = dict.fromkeys(FIGURES)
  sums = columns.sum(0)
  solved = sums[-1]
  for i, name in enumerate(FIGURES):
    per_task[name] = float(sums[i] / len(columns))
    if solved:
      per_solved[name] = float(sums[i] / solved)
  return {"per_task": per_task, "per_solved": per_solved}


def _intervals(
  columns: np.ndarray, resampled: np.ndarray
) -> dict[str, list[float | None] | None]:
  """Computes the intervals of means over tasks, from sums of resampled tasks."""
  out = {}
  for i, name in enumerate(FIGURES):
    out[name] = _interval(resampled[:, i] / len(columns))
  # If all tasks agree, a bootstrap interval has zero width; a proportion's has not.
  out["solved"] = proportion_interval(columns[:, -1])
  return out


def _reductions(
  multi: np.ndarray, single: np.ndarray, extra: float
) -> dict[str, np.ndarray]:
  """Computes reductions [R] from both systems' column sums [R, FIGURES].

  `extra` is the number of instruction tokens, nan if unknown.
  """
  of_multi = dict(zip(FIGURES, multi.T, strict=True))
  of_single = dict(zip(FIGURES, single.T, strict=True))
  credit = "total_cached_credit"
  # A resample in which one side solves nothing divides by 0; see `_interval`.
  with np.errstate(divide="ignore", invalid="ignore"):
    total = of_single["total"] / of_multi["total"]
    cached = of_single[credit] / of_multi[credit]
    solved = of_single["solved"] / of_multi["solved"]
    instructed = (of_single["total"] + extra) / of_multi["total"]
    return {
      "reduction_no_cache": 1 - total,
      "reduction_cache": 1 - cached,
      "reduction_instructed": 1 - instructed,
      "reduction_per_solved": 1 - total / solved,
      "reduction_per_solved_instructed": 1 - instructed / solved,
      "reduction_per_solved_cache": 1 - cached / solved,
    }


def _finite(value: float) -> float | None:
  return float(value) if np.isfinite(value) else None


def _interval(values: np.ndarray) -> list[float | None] | None:
  values = values[~np.isnan(values)]
  if not len(values):
    return None
  # "nearest" does not interpolate: a resample in which one side solves nothing is
  # infinite, and must not turn its neighbours into NaN.
  low, high = np.percentile(values, [2.5, 97.5], method="nearest")
  return [_finite(low), _finite(high)]


def cost_tables(table: dict[str, Any]) -> list[Table]:
  """Formats `cost`'s result as two tables: both systems' figures, and savings."""
  # --- Both systems' figures.
  rows = []
  for name, label in FIGURES.items():
    row = {"figure": label}
    for system in (MULTI, SINGLE):
      for per in ("per_task", "per_solved"):
        row[f"{system}_{per}"] = cell(table[system][per][name])
      interval = cell(table[system]["ci95"][name])
      if interval != "-":
        row[f"{system}_per_task"] += f" ({interval})"
    rows.append(row)
  columns = {
    "figure": "",
    "multi_agent_per_task": "multi-agent, per task",
    "single_per_task": "one model, per task",
    "multi_agent_per_solved": "multi-agent, per solved task",
    "single_per_solved": "one model, per solved task",
  }

  # --- The savings, next to the paper's.
  saved = []

  def add(label: str, value: float | None, ci95: list[float | None] | None) -> None:
    saved.append({"of": label, "reduction": value, "ci95": ci95})

  for name, label in REDUCTIONS.items():
    add(label, table[name], table["ci95"][name])
  add("tokens per task, as the paper has it (n = 10)", PAPER_REDUCTION, None)
  gain = "accuracy_gain"
  add("accuracy gained", table[gain], table["ci95"][gain])

  note = (
    f"{table['tasks']} tasks that both attempted; {table['left_out']} left out. In "
    "parentheses 95 % intervals."
  )
  return [
    Table("Cost of an answer", rows, columns, note),
    Table(
      "Saved by one model (1 - one model / multi-agent)",
      saved,
      {"of": "of", "reduction": "reduction", "ci95": "95 % interval"},
      INSTRUCTED
      + " Intervals by bootstrap over tasks, the same tasks drawn for both systems.",
    ),
  ]

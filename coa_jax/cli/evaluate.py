"""Evaluates a model, from one config file.

  coa evaluate --config=configs/X.py --workdir=DIR [--json]

Any field can be overridden: --config.SECTION.FIELD=VALUE. Prints a table with one row
for all tasks and one per source and family; --json prints results.json instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax import evaluate
from coa_jax.cli.launch import launch
from coa_jax.report.tables import Table, cell

# Figure of a summary -> its heading. For pass@k and choices see `headings`.
_FIGURES = {"pass1_greedy": "greedy", "pass1_sampled": "sampled"}
_BY_K = {
  r"pass(\d+)": "pass@{}",
  r"best_of_(\d+)": "vote of {}",
  r"best_of_(\d+)_by_(.+)": "best of {} by {}",
  r"selected_of_(\d+)": "chosen of {}",
}
_COSTS = {
  "tool_calls_per_task": "tool calls",
  "tokens_per_task": "tokens",
  "malformed_rate": "malformed",
}


def headings(results: Mapping[str, Any]) -> dict[str, str]:
  """Returns the figures in these results, as columns of a table."""
  columns = dict(_FIGURES)
  for name in results:
    for pattern, text in _BY_K.items():
      match = re.fullmatch(pattern, name)
      if match:
        columns[name] = text.format(*match.groups())
  columns |= _COSTS
  return {name: text for name, text in columns.items() if results[name] is not None}


def table(results: Mapping[str, Any], title: str = "Evaluation") -> Table:
  """Makes a table of `results.json`: all tasks, each source, each family."""
  columns = {"of": "tasks of", "tasks": "tasks", **headings(results)}
  groups = {"all": results}
  for by in ("by_source", "by_family"):
    # A single group equals all tasks.
    if len(results[by]) > 1:
      kind = by.removeprefix("by_")
      groups |= {f"{kind} {name or '-'}": one for name, one in results[by].items()}
  rows = []
  for name, one in groups.items():
    row = {"of": name, "tasks": one["tasks"]}
    for figure in headings(results):
      row[figure] = cell(one.get(figure))
      spread = one["ci95"].get(figure)
      if spread and figure in _FIGURES:
        row[figure] += f" ({cell(spread[0])}-{cell(spread[1])})"
    rows.append(row)
  failed = results["status"].get("infrastructure", 0)
  note = "in parentheses 95 % intervals; more in results.json"
  if failed:
    note += (
      f"; {failed} attempts failed by infrastructure are left out, and the same "
      "command plays them again"
    )
  return Table(title, rows, columns, note)


def command() -> None:
  """Runs the command line."""
  launch(
    evaluate.run,
    evaluate.EvaluateConfig,
    lambda results: [table(results)],
    logs=evaluate.LOGS,
  )

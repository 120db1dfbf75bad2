"""Multi-agent distillation.

coa distill --config=configs/X.py --workdir=DIR [--config.FIELD=VALUE]
  [--shard=I/N]

A chat endpoint's API key, if required, is read from COA_API_KEY.
"""

import os
from collections.abc import Mapping
from typing import Any

import ml_collections

from coa_jax import distill
from coa_jax.cli.launch import launch
from coa_jax.report.tables import Table, cell
from coa_jax.runtime.shard import Shard


def run(
  config: ml_collections.ConfigDict, workdir: str, shard: Shard | None = None
) -> dict[str, Any]:
  """Runs the stage with the API key."""
  return distill.run(config, workdir, os.environ.get("COA_API_KEY"), shard)


def tables(results: Mapping[str, Any]) -> list[Table]:
  """Makes tables of `results.json`: runs by task family, and runs kept by stage."""
  stages = {"convert": results["convert"], **results["filters"]}
  rows = [{"stage": "team runs", "kept": results["runs"], "dropped": ""}]
  for name, stage in stages.items():
    if isinstance(stage, dict) and "kept" in stage:
      reasons = [f"{n:,} {reason}" for reason, n in stage.get("dropped", {}).items()]
      if stage.get("added"):
        reasons.append(f"{stage['added']:,} copies added")
      rows.append({"stage": name, "kept": stage["kept"], "dropped": ", ".join(reasons)})
  rows.append({"stage": "trajectories", "kept": results["kept"], "dropped": ""})
  usage = {name: cell(value) for name, value in results["mean_usage"].items()}
  note = (
    f"Share of right runs: {cell(results['right'])}; "
    f"{results['infrastructure']} failed by infrastructure. "
    f"Mean of a run: {usage['prompt']} prompt tokens "
    f"({usage['cached']} cached), {usage['generated']} generated, "
    f"{usage['tool_calls']} tool calls. More is in results.json."
  )
  families = []
  for name, right in results["right_by_family"].items():
    kept = results["kept_by_family"].get(name, 0)
    families.append({"family": name or "-", "right": right, "kept": kept})
  columns = {"stage": "stage", "kept": "kept", "dropped": "dropped or added"}
  return [
    Table(
      "Right runs and kept trajectories by family of tasks",
      families,
      {"family": "family", "right": "right", "kept": "kept"},
    ),
    Table("From runs to trajectories", rows, columns, note),
  ]


def command() -> None:
  """Runs the command line."""
  launch(run, distill.DistillConfig, tables, logs=distill.LOGS)

"""How a model takes other tool names, fences, descriptions and tools: accuracy by each.

  python -m experiments.studies.tool_formats \
    --config=configs/evaluate_formats_world.py --workdir=DIR

Plays the tasks of an evaluation once as the protocol writes tools ("native"), then in
formats that restyled training trajectories have (`config.formats` of `distill`: "seen")
and in formats that no training ever draws ("unseen", `tool_formats.HELD_OUT`). The
prompt tells of each; the tools behind them are the same. Then with other tools
("tools"), as `config.formats.tools` has them. Each is an evaluation of its own in
DIR/NAME, and goes on where it was interrupted. Writes DIR/formats.json. Differences are
paired: over the tasks that both have.
"""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
from collections.abc import Sequence
from typing import Any

import ml_collections
import rich

from coa_jax import evaluate
from coa_jax.config import ConfigError, section
from coa_jax.lock import exclusive
from coa_jax.model.sharding import own_folder
from coa_jax.protocol.trajectory import Trajectory, read_trajectories
from coa_jax.report.metrics import write_json
from coa_jax.report.scores import (
  by_task,
  correct,
  graded,
  interval,
  proportion_interval,
)
from coa_jax.report.tables import Table, rich_table
from coa_jax.rollout.types import RolloutConfig
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from experiments.launch import launch

_NAME = re.compile(r"\w+", re.ASCII)
_COLUMNS = {
  "name": "format",
  "accuracy": "accuracy",
  "ci95": "95 %",
  "unread": "calls not in it",
  "tool_calls": "tool calls",
  "protocol_ok": "well formed",
  "tools": "tools",
}


@dataclasses.dataclass(frozen=True)
class FormatsConfig:
  """Config section `formats`.

  Attributes:
    seen: how many formats of restyled training copies are played.
    unseen: how many that no training draws.
    tools: name -> other tools, a whole section `tools` each.
  """

  seen: int = 2
  unseen: int = 4
  tools: dict[str, ToolsConfig] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if min(self.seen, self.unseen) < 0:
      raise ValueError("seen and unseen must be 0 or more")
    for name in self.tools:
      if not _NAME.fullmatch(name):
        raise ValueError(f"tools: {name!r} names a folder: {_NAME.pattern}")


@exclusive(own_folder)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Evaluates every format.

  Args:
    config: of `evaluate`, `rollout.style` full, without `format`; and `formats`.
    workdir: where the evaluations go.

  Returns:
    What formats.json holds: `formats`, a row each (accuracy over all attempts, its
    interval over tasks, the share of calls not written as told); `groups`, the mean
    accuracy by task of native, seen and unseen formats and of other tools;
    `differences` to native, each with its paired interval.

  Raises:
    ConfigError, ValueError, FileNotFoundError: as `evaluate.run`.
  """
  if config.get("format"):
    raise ConfigError("config.format: this program draws the formats itself")
  if section(config, "rollout", RolloutConfig).style != "full":
    raise ConfigError("config.rollout.style: only 'full' tells formats")
  plan = section(config, "formats", FormatsConfig)
  for tools in plan.tools.values():  # before anything is played
    with Toolbox(tools):
      pass
  own = config.copy_and_resolve_references()
  with own.unlocked():
    if "formats" in own:
      del own.formats  # which no single evaluation reads
  scores = {"native": [_play(own, workdir, "native")]}
  for kind, count in (("seen", plan.seen), ("unseen", plan.unseen)):
    drawn = [dict(held_out=kind == "unseen", number=n) for n in range(count)]
    scores[kind] = [
      _play(own, workdir, f"{kind}_{n}", format=d) for n, d in enumerate(drawn)
    ]
  scores["tools"] = [
    _play(own, workdir, f"tools_{name}", tools=config.formats.tools[name])
    for name in plan.tools
  ]
  rows = [row for group in scores.values() for row, _ in group]
  means = {k: _by_task([s for _, s in group]) for k, group in scores.items() if group}
  native = means["native"]
  groups, differences = {}, {}
  for kind, mean in means.items():
    groups[kind] = _figure(list(mean.values()))
    both = [task for task in native if task in mean]
    if kind != "native":
      change = [mean[t] - native[t] for t in both]
      differences[kind] = _figure(change) | {"ci95": interval(change)}
  results = {"formats": rows, "groups": groups, "differences": differences}
  write_json(os.path.join(workdir, "formats.json"), results)
  note = "; ".join(f"{k} - native {_told(v)}" for k, v in differences.items())
  rich.print(rich_table(Table("Accuracy by tool format", rows, _COLUMNS, note)))
  return results


def _play(
  config: ml_collections.ConfigDict, workdir: str, name: str, **sections: Any
) -> tuple[dict[str, Any], dict[str, float]]:
  """A format's row, and the accuracy of each task; with other `sections`."""
  own = config.copy_and_resolve_references()
  with own.unlocked():
    for key, value in sections.items():
      own[key] = value
  folder = os.path.join(workdir, name)
  found = evaluate.run(own, folder)
  played: list[Trajectory] = []
  for stage in ("greedy", "sampled"):
    path = os.path.join(folder, f"{stage}.jsonl")
    played += read_trajectories(path) if os.path.exists(path) else []
  accuracy = {
    task: statistics.fmean(map(correct, attempts))
    for task, attempts in by_task(graded(played)).items()
  }
  told = found.get("format")
  drawn = told["tools"].values() if told else []
  figure = _figure(list(accuracy.values()))
  row = {
    "name": name,
    "accuracy": figure["mean"],
    "ci95": figure["ci95"],
    "unread": told["unread"] if told else found["malformed_rate"],
    "tool_calls": found["tool_calls_per_task"],
    "protocol_ok": found["protocol_ok"],
    "tools": "; ".join(f"{n}: {layout}" for n, layout in drawn)
    or ", ".join(section(own, "tools", ToolsConfig).tools),
  }
  return row, accuracy


def _by_task(scores: Sequence[dict[str, float]]) -> dict[str, float]:
  """The mean of each task over the formats that it was played in."""
  tasks = list(dict.fromkeys(task for one in scores for task in one))
  return {t: statistics.fmean(one[t] for one in scores if t in one) for t in tasks}


def _figure(values: Sequence[float]) -> dict[str, Any]:
  mean = statistics.fmean(values) if values else None
  return {"mean": mean, "ci95": proportion_interval(values), "tasks": len(values)}


def _told(figure: dict[str, Any]) -> str:
  if figure["mean"] is None:
    return "unknown"
  low, high = figure["ci95"]
  return f"{figure['mean']:+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
  launch(run)

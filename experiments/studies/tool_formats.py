r"""How a model takes other tool names, fences, descriptions and tools: accuracies.

  python -m experiments.studies.tool_formats \
    --config=configs/evaluate_formats_world.py --workdir=DIR

Plays the tasks of an evaluation once as the protocol writes tools ("native"), then in
formats that augmented training trajectories have (`config.formats` of `distill`:
"seen") and in formats that no training ever draws ("unseen", `ToolSpec.held_out`). The
prompt describes each; the tools behind them are the same. Then with other tools
("tools"), as `config.formats.tools` has them. Each is an evaluation of its own in
DIR/NAME, and goes on where it was interrupted. Writes DIR/formats.json. Differences are
paired: over the tasks that both have.

A format is no matter of the evaluation's: it is given a variant with other names, and
tools that read them.

budget: the study whole: its tools, its evaluations, their comparison.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import re
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import rich

from coa_jax import evaluate
from coa_jax.config import ConfigError, read_config
from coa_jax.fields import section
from coa_jax.lock import exclusive
from coa_jax.model.sharding import process_dir
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.tool_naming import ToolNaming, draw_naming
from coa_jax.protocol.trajectory import (
  CallStatus,
  ToolCall,
  Trajectory,
  read_trajectories,
)
from coa_jax.report.metrics import write_json
from coa_jax.report.scores import (
  by_task,
  correct,
  graded,
  interval,
  proportion_interval,
)
from coa_jax.report.tables import Table, rich_table
from coa_jax.tools.code_session import CodeSession
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.types import CallFuture, CallRequest, Tools, done_call, then
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
    seen: how many formats of augmented training copies are played.
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


@dataclasses.dataclass(frozen=True)
class FormatStudyConfig(evaluate.EvaluateConfig):
  """Config of the study: an evaluation's sections, and `formats`."""

  formats: FormatsConfig = section(FormatsConfig)

  def __post_init__(self):
    super().__post_init__()
    if self.rollout.style != "full":
      raise ConfigError("config.rollout.style: only 'full' describes formats")
    if self.rollout.constrain:
      raise ConfigError(
        "config.rollout.constrain: the grammar knows the protocol's own tools only; "
        "set it to False"
      )
    if self.tools.mcp or self.tools.descriptions:
      raise ConfigError(
        "config.tools: a format describes the tools itself; leave out tools.mcp and "
        "tools.descriptions"
      )


class RenamedTools(Tools):
  """A toolbox whose tools are called and written to as a naming says."""

  def __init__(self, toolbox: Tools, naming: ToolNaming):
    """Wraps the tools, which the caller closes."""
    self._toolbox = toolbox
    self._naming = naming

  def code_session(self) -> CodeSession | None:
    """Gives the toolbox's own."""
    return self._toolbox.code_session()

  def start(self, request: CallRequest) -> CallFuture:
    """Starts a call; the call on record is as it was written.

    What is not in the tool's format is answered with how to write it, and runs nothing.
    """
    name = request.name
    try:
      tag, body = self._naming.read(name, request.arguments)
    except KeyError:
      return _refused(request, f"no tool {name}")
    if body is None:
      form = self._naming.formats[tag].description
      return _refused(request, f"{name} cannot read this; write {form}")

    def as_written(call: ToolCall) -> ToolCall:
      return dataclasses.replace(call, name=name, arguments=request.arguments)

    translated = dataclasses.replace(request, name=tag, arguments=body)
    return then(self._toolbox.start(translated), as_written)


def _refused(request: CallRequest, error: str) -> CallFuture:
  call = ToolCall(request.name, request.arguments, f"error: {error}", CallStatus.MODEL)
  return done_call(call)


@exclusive(process_dir)
def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Evaluates every format.

  budget: a study is one page.

  Args:
    config: of `evaluate`, `rollout.style` full; and `formats`.
    workdir: where the evaluations go.

  Returns:
    What formats.json holds: `formats`, a row each (accuracy over all attempts, its
    interval over tasks, the share of calls not written so); `groups`, the mean
    accuracy by task of native, seen and unseen formats and of other tools;
    `differences` to native, each with its paired interval.

  Raises:
    ConfigError, ValueError, FileNotFoundError: as `evaluate.run`.
  """
  if jax.process_count() > 1:
    raise ConfigError("the study reads all attempts: it is for one process")
  # --- Read everything, and open the tools, before anything is played.
  plan = read_config(config, FormatStudyConfig).formats
  for tools in plan.tools.values():
    with Toolbox(tools):
      pass
  own = config.copy_and_resolve_references()
  with own.unlocked():
    if "formats" in own:
      del own.formats  # which no single evaluation reads
  # --- Play them, each as an evaluation of its own.
  scores = {"native": [_play(own, workdir, "native")]}
  for kind, count in (("seen", plan.seen), ("unseen", plan.unseen)):
    scores[kind] = [
      _play(own, workdir, f"{kind}_{number}", _draw(own, kind == "unseen", number))
      for number in range(count)
    ]
  scores["tools"] = []
  for name in plan.tools:
    other = own.copy_and_resolve_references()
    with other.unlocked():
      other.tools = config.formats.tools[name]
    scores["tools"].append(_play(other, workdir, f"tools_{name}"))

  # --- Compare them, task by task. Native comes first.
  rows = []
  groups = {}
  differences = {}
  native: dict[str, float] = {}
  for kind, group in scores.items():
    if not group:
      continue
    rows += [row for row, _ in group]
    mean = _by_task([accuracies for _, accuracies in group])
    groups[kind] = _figure(list(mean.values()))
    if kind == "native":
      native = mean
    else:
      change = [mean[task] - native[task] for task in native if task in mean]
      differences[kind] = _figure(change) | {"ci95": interval(change)}
  results = {"formats": rows, "groups": groups, "differences": differences}
  write_json(os.path.join(workdir, "formats.json"), results)
  note = "; ".join(f"{k} - native {_in_words(v)}" for k, v in differences.items())
  rich.print(rich_table(Table("Accuracy by tool format", rows, _COLUMNS, note)))
  return results


def _draw(config: ml_collections.ConfigDict, held_out: bool, number: int) -> ToolNaming:
  """Draws the format of this number for the tools of an evaluation."""
  settings = read_config(config, evaluate.EvaluateConfig)
  variant = get_variant(settings.rollout.variant)
  variant = variant.with_tools(settings.tools.tool_descriptions)
  naming = draw_naming(variant, random.Random(f"0/{held_out}/{number}"), held_out)
  assert naming is not None  # without bodies to hold, every format will do
  return naming


def _play(
  config: ml_collections.ConfigDict,
  workdir: str,
  name: str,
  naming: ToolNaming | None = None,
) -> tuple[dict[str, Any], dict[str, float]]:
  """Evaluates one format; returns its row, and the accuracy of each task."""
  # --- The evaluation; native, it knows of no format.
  folder = os.path.join(workdir, name)
  settings = read_config(config, evaluate.EvaluateConfig)
  tools = settings.tools
  if naming is None:
    results = evaluate.run(config, folder)
  else:
    variant = get_variant(settings.rollout.variant)
    variant = variant.with_tools(tools.tool_descriptions)
    results = evaluate.run(
      config,
      folder,
      variant=naming.apply(variant),
      wrap_tools=lambda toolbox: RenamedTools(toolbox, naming),
    )

  # --- What it played: the accuracy of each task, over all attempts.
  played: list[Trajectory] = []
  for stage in ("greedy", "sampled"):
    path = os.path.join(folder, f"{stage}.jsonl")
    if os.path.exists(path):
      played += read_trajectories(path)
  accuracy = {}
  for task, attempts in by_task(graded(played)).items():
    accuracy[task] = statistics.fmean(map(correct, attempts))

  # --- Its row.
  unread = results["malformed_rate"]
  described = ", ".join(tools.tools)
  if naming is not None:
    unread = _unread(naming, played)
    described = "; ".join(f"{n}: {form}" for n, form in naming.record.values())
  figure = _figure(list(accuracy.values()))
  row = {
    "name": name,
    "accuracy": figure["mean"],
    "ci95": figure["ci95"],
    "unread": unread,
    "tool_calls": results["tool_calls_per_task"],
    "protocol_ok": results["protocol_ok"],
    "tools": described,
  }
  return row, accuracy


def _unread(naming: ToolNaming, played: Sequence[Trajectory]) -> float | None:
  """The share of calls that were not written as the prompt says; None without calls."""
  names = set(naming.names.values())
  calls = 0
  unread = 0
  for t in played:
    for call in t.calls:
      if call.name in names:
        _, body = naming.read(call.name, call.arguments)
        calls += 1
        unread += body is None
  return unread / calls if calls else None


def _by_task(scores: Sequence[dict[str, float]]) -> dict[str, float]:
  """The mean of each task over the formats that it was played in."""
  by_task: dict[str, list[float]] = collections.defaultdict(list)
  for one in scores:
    for task, accuracy in one.items():
      by_task[task].append(accuracy)
  return {task: statistics.fmean(values) for task, values in by_task.items()}


def _figure(values: Sequence[float]) -> dict[str, Any]:
  mean = statistics.fmean(values) if values else None
  return {"mean": mean, "ci95": proportion_interval(values), "tasks": len(values)}


def _in_words(figure: dict[str, Any]) -> str:
  if figure["mean"] is None:
    return "unknown"
  low, high = figure["ci95"]
  return f"{figure['mean']:+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
  launch(run, FormatStudyConfig)

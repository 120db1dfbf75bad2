"""Compares runs: a table for each stage, and one page with overlaid curves.

  coa compare --out=runs/sweep/compare.html runs/sweep/*
  coa compare --figures=reward,dev_accuracy runs/rl runs/rl_again
  coa compare --multi=runs/distill/teacher.jsonl --single=runs/eval/greedy.jsonl

Runs are compared within their stage (distill, sft, rl, evaluate, ...). Runs with
configs differing only in seeds are one table row and one curve: the mean over seeds,
with the 95 % interval of Student's t. A row is named by the differing fields; a single
run with a long name, by its workdir.

The last form compares costs per answer: a multi-agent system's attempts, written by
`distill`, and one model's, written by `evaluate`, on the same tasks and tools.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich
import scipy.stats
from absl import flags

from coa_jax.cli.compare_cost import print_costs
from coa_jax.cli.launch import run_program
from coa_jax.report.metrics import METRICS_FILE, read_metrics
from coa_jax.report.plots import seed_curves
from coa_jax.report.tables import Table, cell
from coa_jax.report.viewer import write_page
from coa_jax.runtime.config import ConfigError
from coa_jax.runtime.fields import nearest
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.record import read_run

# Fields that only number repetitions of a run.
SEEDS = ("seed",)
# The default figures and curves, if runs have them.
FIGURES = (
  "dev_accuracy",
  "reward",
  "pass1_greedy",
  "pass1_sampled",
  "pass3",
  "validation_loss",
  "loss",
  "right",
  "kept",
  "tasks",
  "tokens_per_task",
  "tokens_per_s",
  "seconds",
)
CURVES = ("reward", "dev_accuracy", "loss", "validation_loss", "entropy", "grad_norm")
# Section of only one stage -> the stage.
_STAGES = {
  "quickstart": "quickstart",
  "teacher": "distill",
  "data": "sft",
  "algo": "rl",
  "eval": "evaluate",
  "synthesis": "synthesize",
}
# A row with a longer name, in characters, is named by its workdir.
_NAME = 60


@dataclasses.dataclass(frozen=True)
class Run:
  """One finished or running run of a stage.

  `config` has fields by path, "optim.lr"; `results` is empty until the run finishes.
  """

  path: str
  config: Mapping[str, Any]
  results: Mapping[str, float]
  log: Sequence[Mapping[str, Any]]

  @property
  def stage(self) -> str:
    """Returns the stage, by the config's sections; "run" if none matches."""
    sections = {field.partition(".")[0] for field in self.config}
    return next((name for key, name in _STAGES.items() if key in sections), "run")


def read(path: str) -> Run:
  """Reads a workdir.

  Raises:
    FileNotFoundError, ConfigError: it contains no run.
  """
  config = read_run(os.path.join(path, "config.json"))
  results = {}
  file = os.path.join(path, "results.json")
  if os.path.exists(file):
    results = {
      name: value
      for name, value in _flat(read_object(file))
      if isinstance(value, int | float) and not isinstance(value, bool)
    }
  log = []
  if os.path.exists(os.path.join(path, METRICS_FILE)):
    log = read_metrics(path)
  return Run(path, dict(_flat(config)), results, log)


def find(paths: Sequence[str]) -> list[str]:
  """Lists the workdirs among the paths and directly below them, in order.

  Existing paths without a run, which globs also match, are reported in one line.

  Raises:
    FileNotFoundError: a path does not exist, or none has a run.
  """
  out = []
  without = []
  for path in paths:
    if not os.path.exists(path):
      raise FileNotFoundError(f"{path}: there is no such workdir")
    below = [path]
    if os.path.isdir(path):
      below += [os.path.join(path, name) for name in sorted(os.listdir(path))]
    # A quickstart is a run that contains runs: it comes before them.
    found = [folder for folder in below if _holds_run(folder)]
    out += found
    if not found:
      without.append(path)
  if not out:
    raise FileNotFoundError(
      f"{', '.join(paths)}: no run found (no config.json of a run); give workdirs, "
      "or a folder of them"
    )
  if without:
    print(f"left out, no run found: {', '.join(without)}", file=sys.stderr)
  return list(dict.fromkeys(out))


def _holds_run(folder: str) -> bool:
  """Whether a folder is a workdir: a model folder's config.json has no `config`.

  A damaged config.json counts, so that reading it reports the fault.
  """
  path = os.path.join(folder, "config.json")
  if not os.path.isfile(path):
    return False
  try:
    return "config" in read_object(path)
  except ValueError:
    return True


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Groups runs differing only in seeds.

  Returns:
    Name -> the group's runs. A name lists the fields that differ among all runs, with
    values; a single run with a long or empty list has its workdir's name.
  """
  fields = sorted({name for run in runs for name in run.config})
  differing = []
  for name in fields:
    values = [run.config.get(name) for run in runs]
    if name.rpartition(".")[2] in SEEDS or len(set(map(_as_json, values))) < 2:
      continue
    differing.append(name)
  same: dict[tuple[str, ...], list[Run]] = collections.defaultdict(list)
  for run in runs:
    same[tuple(_as_json(run.config.get(name)) for name in differing)].append(run)
  shared = {
    name: _shared_folder(run.config.get(name) for run in runs) for name in differing
  }
  out: dict[str, list[Run]] = {}
  for number, members in enumerate(same.values(), 1):
    config = members[0].config
    parts = [f"{name}={_brief(config.get(name), shared[name])}" for name in differing]
    title = ", ".join(parts) or "all"
    if len(members) == 1 and (len(title) > _NAME or not parts):
      title = os.path.basename(os.path.abspath(members[0].path))
    if title in out:  # e.g. workdirs with equal names
      title += f" ({number})"
    out[title] = members
  return out


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
  """Computes the mean and its 95 % interval's half width (one value: None)."""
  if len(values) < 2:
    return values[0], None
  mean = statistics.fmean(values)
  error = statistics.stdev(values) / math.sqrt(len(values))
  return mean, float(scipy.stats.t.ppf(0.975, len(values) - 1)) * error


def table(
  groups: Mapping[str, Sequence[Run]],
  figures: Sequence[str] = (),
  title: str = "Runs",
) -> Table:
  """Makes a row for each group: the figures' means and intervals.

  By default, shows the figures in FIGURES that any run has.
  """
  known = _figures_of([run for runs in groups.values() for run in runs])
  shown = [name for name in figures or FIGURES if name in known]
  rows = []
  for name, runs in groups.items():
    row: dict[str, Any] = {"name": name, "runs": len(runs)}
    for figure in shown:
      values = [run.results[figure] for run in runs if figure in run.results]
      row[figure] = None
      if values:
        mean, half = mean_and_interval(values)
        row[figure] = cell(mean)
        if half is not None:
          row[figure] += f" \u00b1 {cell(half)}"
    rows.append(row)
  columns = {"name": "run", "runs": "seeds"} | {name: name for name in shown}
  note = "Mean over seeds, \u00b1 half of the 95 % interval (Student's t)."
  return Table(title, rows, columns, note)


def figures_of(
  groups: Mapping[str, Sequence[Run]], curves: Sequence[str] = (), stage: str = ""
) -> dict[str, Any]:
  """Draws each logged metric over steps, all groups in one panel."""
  logs = {name: [run.log for run in runs] for name, runs in groups.items()}
  known = _metrics_of([run for runs in groups.values() for run in runs])
  out = {}
  for metric in [name for name in curves or CURVES if name in known]:
    caption = f"{metric}: mean over seeds, band from the lowest to the highest"
    out[f"{stage}, {caption}" if stage else caption] = seed_curves(
      logs, metric, logarithmic=stage == "sft"
    )
  return out


def _figures_of(runs: Sequence[Run]) -> set[str]:
  """Returns the figures in any run's results."""
  return {name for run in runs for name in run.results}


def _metrics_of(runs: Sequence[Run]) -> set[str]:
  """Returns the metrics with a logged value in any run."""
  rows = [row for run in runs for row in run.log]
  found = {key for row in rows for key, value in row.items() if value is not None}
  return found - {"stage", "step"}


def _check_names(
  flag: str, names: Sequence[str], known: Collection[str], what: str
) -> None:
  """Refuses a figure or a metric missing in all runs."""
  for name in names:
    if name not in known:
      raise ConfigError(f"--{flag}: no run {what} {name!r}{nearest(name, known)}")


def compare(
  paths: Sequence[str],
  out: str = "",
  figures: Sequence[str] = (),
  curves: Sequence[str] = (),
) -> None:
  """Prints the tables of workdirs, and writes the page if `out` names one.

  Raises:
    FileNotFoundError, ConfigError: there is no run, or none has a figure or a metric.
  """
  runs = [read(path) for path in find(paths)]
  _check_names("figures", figures, _figures_of(runs), "has")
  _check_names("curves", curves, _metrics_of(runs), "has logged")
  stages: dict[str, list[Run]] = {}
  for run in runs:
    stages.setdefault(run.stage, []).append(run)
  if len(stages) > 1:
    print(
      f"runs of {len(stages)} stages, each compared with its own: {', '.join(stages)}"
    )
  tables = []
  drawn = {}
  for stage, members in stages.items():
    groups = group(members)
    tables.append(table(groups, figures, f"Runs of {stage}"))
    rich.print(tables[-1])
    drawn |= figures_of(groups, curves, stage)
  unfinished = [run.path for run in runs if not run.results]
  if unfinished:
    print(f"not finished: {', '.join(unfinished)}")
  if out:
    folders = ", ".join(paths)
    write_page(
      out,
      "Runs compared",
      {},
      intro=f"{len(runs)} runs of {folders}.",
      tables=tables,
      figures=drawn,
    )
    print(f"page: {os.path.abspath(out)}")


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
  """Yields the fields of a config, or of results, with their paths."""
  for name, value in config.items():
    if isinstance(value, dict) and value:
      yield from _flat(value, f"{above}{name}.")
    else:
      yield above + name, value


def _as_json(value: Any) -> str:
  return json.dumps(value, sort_keys=True)


def _shared_folder(values: Iterable[Any]) -> str:
  """Returns the common parent folder of all texts; "" if there is none."""
  texts = [value for value in values if isinstance(value, str) and value]
  # By character, then cut at a slash: paths may be absolute and relative.
  return os.path.commonprefix(texts).rpartition("/")[0]  # noqa: RUF071


def _brief(value: Any, shared: str = "") -> str:
  """Shortens a config's value for a row's name; leaves out the shared folder."""
  text = value if isinstance(value, str) else json.dumps(value)
  if shared and text.startswith(f"{shared}/"):
    text = text[len(shared) + 1 :]
  return text if len(text) <= 40 else "..." + text[-37:]


def _define_flags() -> None:
  flags.DEFINE_string("out", "", "The page to write, an HTML file; empty for none.")
  flags.DEFINE_list("figures", [], "Figures of results.json to show, as pass3,seconds.")
  flags.DEFINE_list("curves", [], "Metrics to draw over steps, as reward,entropy.")
  flags.DEFINE_string("multi", "", "Trajectories of a multi-agent system.")
  flags.DEFINE_string("single", "", "Trajectories of one model.")
  flags.DEFINE_string("json", "", "The file for the costs' figures; empty for none.")


def main(paths: list[str]) -> None:
  """Compares the command line's workdirs, or the costs of two files."""
  values = flags.FLAGS
  if values.multi or values.single:
    if paths or not (values.multi and values.single):
      raise ConfigError(
        "costs are compared between two files: give --multi and --single, no workdirs"
      )
    print_costs(values.multi, values.single, values.json)
    return
  if not paths:
    raise ConfigError(
      "name workdirs, or folders of them: coa compare runs/*; or --multi and --single"
    )
  compare(paths, values.out, values.figures, values.curves)


def command() -> None:
  """Runs the command line."""
  _define_flags()
  run_program(main, takes_words=True)

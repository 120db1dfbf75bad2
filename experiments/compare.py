"""Compares runs: one table and one page of overlaid curves.

  python -m experiments.compare --out=runs/sweep/compare.html runs/sweep/*
  python -m experiments.compare --figures=reward,dev_accuracy runs/rl runs/rl_again

Runs whose configs differ in their seeds alone are one row of the table and one line of
a curve: the mean over seeds, with the 95 % interval of Student's t. A row is named by
the fields in which the configs differ.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich
import scipy.stats
from absl import flags

from coa_jax.config import ConfigError, nearest
from coa_jax.json_io import read_object
from coa_jax.record import read_run
from coa_jax.report.metrics import METRICS_FILE, read_all_metrics
from coa_jax.report.plots import seed_curves
from coa_jax.report.tables import Table, cell, rich_table
from coa_jax.report.viewer import write_page
from experiments.launch import run_program

# Fields that only say which of several equal runs one is.
SEEDS = ("seed",)
# What the table and the curves show where no flag says it, as far as runs have it.
FIGURES = (
  "dev_accuracy",
  "reward",
  "pass1_greedy",
  "pass1_sampled",
  "pass3",
  "validation_loss",
  "loss",
  "tokens_per_task",
  "tokens_per_s",
  "seconds",
)
CURVES = ("reward", "dev_accuracy", "loss", "validation_loss", "entropy", "grad_norm")


@dataclasses.dataclass(frozen=True)
class Run:
  """One finished or running journey.

  Attributes:
    path: its workdir.
    config: field -> value, by paths such as "optim.lr".
    results: figure -> number, of `results.json`; empty while it runs.
    log: the rows of `metrics.jsonl`.
  """

  path: str
  config: Mapping[str, Any]
  results: Mapping[str, float]
  log: Sequence[Mapping[str, Any]]


def read(path: str) -> Run:
  """Reads a workdir.

  Raises:
    FileNotFoundError, ConfigError: it holds no run.
  """
  config, _ = read_run(os.path.join(path, "config.json"))
  results = {}
  file = os.path.join(path, "results.json")
  if os.path.exists(file):
    results = _numbers(read_object(file))
  log = []
  if os.path.exists(os.path.join(path, METRICS_FILE)):
    log = read_all_metrics(path)
  return Run(path, dict(_flat(config)), results, log)


def find(paths: Sequence[str]) -> list[str]:
  """Finds the workdirs among folders and right below them, in order.

  Raises:
    FileNotFoundError: a path has none.
  """
  out = []
  for path in paths:
    below = [path]
    if os.path.isdir(path):
      below += [os.path.join(path, name) for name in sorted(os.listdir(path))]
    found = [p for p in below if os.path.exists(os.path.join(p, "config.json"))]
    if not found:
      raise FileNotFoundError(
        f"{path}: no run is there (no config.json); give workdirs, or a folder of them"
      )
    # A quickstart is a run that holds runs: its own come first.
    out += found
  return list(dict.fromkeys(out))


def group(runs: Sequence[Run]) -> dict[str, list[Run]]:
  """Groups runs that differ in seeds alone, by what else sets them apart.

  Returns:
    Name -> its runs. A name lists the fields that differ among all runs, with their
    values; or it is the workdir, where no field does.
  """
  fields = sorted({name for run in runs for name in run.config})
  differing = []
  for name in fields:
    values = {json.dumps(run.config.get(name), sort_keys=True) for run in runs}
    if len(values) > 1 and name.rpartition(".")[2] not in SEEDS:
      differing.append(name)
  out: dict[str, list[Run]] = collections.defaultdict(list)
  for run in runs:
    parts = [f"{name}={_brief(run.config.get(name))}" for name in differing]
    out[", ".join(parts) or "all"].append(run)
  return dict(out)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
  """Computes a mean and half the width of its 95 % interval; None of one value."""
  mean = statistics.fmean(values)
  if len(values) < 2:
    return mean, None
  error = statistics.stdev(values) / math.sqrt(len(values))
  return mean, float(scipy.stats.t.ppf(0.975, len(values) - 1)) * error


def table(groups: Mapping[str, Sequence[Run]], figures: Sequence[str] = ()) -> Table:
  """Makes a row for each group: mean and interval of every figure.

  Args:
    groups: as `group` makes them.
    figures: of results.json; () for those of FIGURES that some run has.

  Raises:
    ConfigError: no run has a figure of that name.
  """
  known = {name for runs in groups.values() for run in runs for name in run.results}
  for name in figures:
    if name not in known:
      raise ConfigError(f"--figures: no run has {name!r}{nearest(name, known)}")
  shown = figures or [name for name in FIGURES if name in known]
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
  return Table("Runs", rows, columns, note)


def figures_of(
  groups: Mapping[str, Sequence[Run]], curves: Sequence[str] = ()
) -> dict[str, Any]:
  """Draws each metric over steps, all groups in one panel.

  Raises:
    ConfigError: no run has a metric of that name.
  """
  logs = {name: [run.log for run in runs] for name, runs in groups.items()}
  known = {
    key for rows in logs.values() for log in rows for row in log for key in row
  } - {"stage", "step"}
  for name in curves:
    if name not in known:
      raise ConfigError(f"--curves: no run has logged {name!r}{nearest(name, known)}")
  out = {}
  for metric in curves or [name for name in CURVES if name in known]:
    caption = f"{metric}: mean over seeds, band from the lowest to the highest"
    out[caption] = seed_curves(logs, metric)
  return out


def compare(
  paths: Sequence[str],
  out: str = "",
  figures: Sequence[str] = (),
  curves: Sequence[str] = (),
) -> None:
  """Prints the table of some workdirs, and writes the page if `out` names one."""
  runs = [read(path) for path in find(paths)]
  groups = group(runs)
  summary = table(groups, figures)
  rich.print(rich_table(summary))
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
      tables=[summary],
      figures=figures_of(groups, curves),
    )
    print(f"page: {os.path.abspath(out)}")


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
  """Yields the fields of a config by their paths."""
  for name, value in config.items():
    if isinstance(value, dict) and value:
      yield from _flat(value, f"{above}{name}.")
    else:
      yield above + name, value


def _numbers(results: Mapping[str, Any], above: str = "") -> dict[str, float]:
  """The finite numbers of results.json, by their paths."""
  out = {}
  for name, value in results.items():
    if isinstance(value, dict):
      out |= _numbers(value, f"{above}{name}.")
    elif isinstance(value, int | float) and not isinstance(value, bool):
      out[above + name] = float(value)
  return out


def _brief(value: Any) -> str:
  """A value of a config in a name of a row."""
  text = value if isinstance(value, str) else json.dumps(value)
  return text if len(text) <= 40 else "..." + text[-37:]


def _define_flags() -> None:
  flags.DEFINE_string("out", "", "The page to write, an HTML file; empty for none.")
  flags.DEFINE_list("figures", [], "Figures of results.json to show, as pass3,seconds.")
  flags.DEFINE_list("curves", [], "Metrics to draw over steps, as reward,entropy.")


def main(paths: list[str]) -> None:
  """Compares the workdirs of the command line."""
  if not paths:
    raise ConfigError("name workdirs, or folders of them: experiments.compare runs/*")
  values = flags.FLAGS
  compare(paths, values.out, values.figures, values.curves)


if __name__ == "__main__":
  _define_flags()
  run_program(main, takes_words=True)

"""A run's numbers: `metrics.jsonl`, live progress, `results.json`.

Training stages also send their numbers to dashboards: see `tracking.py`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from coa_jax.report import timers
from coa_jax.report.tracking import LogConfig, Tracking
from coa_jax.runtime import heartbeat
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import parse_object, shown

T = TypeVar("T")

METRICS_FILE = "metrics.jsonl"
# Seconds between plain progress lines if the output is not a terminal.
PLAIN_EVERY = 10.0
FOLLOW_EVERY = 30.0  # seconds between two lines within one step


class Metrics:
  """Appends a stage's numbers to `workdir/metrics.jsonl` and shows its progress.

  Use as a context manager. On a terminal, progress is one live bar; otherwise a plain
  line every PLAIN_EVERY seconds, always including the first and the last step. Values
  named `seconds_PHASE` (see `timers.py`) are shown below the progress as shares of the
  step, and at the end in a table. All output goes to standard error.

  Several stages share a file, and a resumed run appends to the existing file. The first
  `log` drops the stage's lines with the same or a later step, so a resumed run leaves
  no duplicates. `seconds` continues from the last kept line.

  Attributes:
    non_finite: the number of NaN or infinite values so far; they are written as null.
  """

  def __init__(
    self,
    workdir: str,
    stage: str,
    total: int,
    unit: str = "step",
    tracked: LogConfig | None = None,
    title: str = "",
  ):
    """Creates `workdir` if missing; writes nothing yet.

    Args:
      workdir: the run's directory.
      stage: the stage's name, e.g. "sft".
      total: the stage's last step.
      unit: the name of a step in progress lines.
      tracked: section `log`, which adds TensorBoard's event files and other outputs;
        None writes only metrics.jsonl.
      title: the stage's title in progress lines; by default its name.
    """
    # --- The record.
    os.makedirs(workdir, exist_ok=True)
    self.path = os.path.join(workdir, METRICS_FILE)
    self.stage = stage
    self.total = total
    self.unit = unit
    self.title = title or stage
    self.non_finite = 0

    # --- Views of the record; they begin at the first logged step, not known yet.
    self._workdir = workdir
    self._tracked = tracked
    self._tracking: Tracking | None = None
    self._phases = timers.PhaseTotals()

    # --- The clock, and the log of interrupted runs.
    self._began = time.monotonic()
    self._shown = self._began
    self._seconds_before = 0.0  # of the interrupted runs that this one continues
    self._steps_before = 0  # likewise
    self._first: int | None = None  # the first step logged here

    # --- The progress: a live bar on a terminal, otherwise lines.
    self._line = ""  # the last progress line, if not printed yet
    self._console = Console(stderr=True)
    self._bar = None
    if self._console.is_terminal:
      self._bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}"),
        console=self._console,
      )
      self._task = self._bar.add_task(self.title, total=total, status="starting")

  def __enter__(self) -> Metrics:
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *exc: object) -> None:
    # Print the last line even if PLAIN_EVERY seconds have not passed.
    if self._bar is not None:
      self._bar.stop()
    elif self._line:
      say(self._line)
    if self._tracking is not None:
      self._tracking.close(failed=exc[0] is not None)
    if self.non_finite:
      say(f"{self.stage}: {self.non_finite} values were NaN or infinite")
    if self._phases.seconds:
      table = self._phases.table(f"{self.stage}: where the time went")
      self._console.print(table)

  def log(self, step: int, values: dict[str, float], figure: str = "") -> None:
    """Appends one line and updates the progress.

    Args:
      step: the number of completed units, or the unit described by the values.
      values: name -> number (anything `float` takes, 0-d arrays too).
      figure: the main figure, shown next to the progress, e.g. "loss 1.32".

    Raises:
      ValueError: a value has a reserved name.
    """
    for name in ("stage", "step", "seconds"):
      if name in values:
        raise ValueError(f"metric name {name!r} is taken by the line itself")

    # --- A resumed stage's first line replaces the old lines from its step on.
    seconds = time.monotonic() - self._began
    if self._first is None:
      self._first = step
      self._steps_before, self._seconds_before = _drop_from(self.path, self.stage, step)
      if self._tracked is not None:
        self._tracking = Tracking(self._workdir, self.stage, step, self._tracked)

    # --- The line.
    row = {"stage": self.stage, "step": step}
    row["seconds"] = round(self._seconds_before + seconds, 3)
    for name, value in values.items():
      value = float(value)
      if math.isfinite(value):
        row[name] = value
      else:
        row[name] = None
        self.non_finite += 1
    # Opened for each line, so that the line is in the file however the run ends.
    with open(self.path, "a", encoding="utf-8") as f:
      f.write(json.dumps(row) + "\n")

    # --- Views of the line.
    if self._tracking is not None:
      self._tracking.log(step, {k: float(v) for k, v in values.items()})
    self._phases.add(row)
    self._show(step, seconds, figure, timers.line(timers.seconds_of(row)))

  def count(self, items: Iterable[T]) -> Iterator[T]:
    """Yields the items and shows their count as progress; writes no metrics."""
    every = max(1, self.total // 100)  # nobody sees more than 100 updates
    for step, item in enumerate(items, 1):
      yield item
      if step % every == 0 or step == self.total:
        self._show(step, time.monotonic() - self._began, "", "")

  def follow(self, futures: Sequence[Future[Any]], unit: str) -> None:
    """Shows how many of a long step's futures are done; waits for none.

    Args:
      futures: the step's work.
      unit: their plural name in progress lines.
    """
    done = 0
    lock = threading.Lock()

    def count(_: Future[Any]) -> None:
      nonlocal done
      with lock:
        done += 1
        now = time.monotonic()
        if now - self._shown < FOLLOW_EVERY or done == len(futures):
          return
        self._shown = now
        status = f"{done}/{len(futures)} {unit}"
        if self._bar is not None:
          self._bar.update(self._task, status=status)
        else:
          say(f"{self.title}  {status}")

    for future in futures:
      future.add_done_callback(count)

  def warn(self, text: str) -> None:
    """Prints a line above the progress."""
    self._console.print(text, style="bold yellow", markup=False, soft_wrap=True)

  def _show(self, step: int, seconds: float, figure: str, shares: str) -> None:
    heartbeat.beat()
    # The pace excludes an interrupted run's steps, which cost this run no time.
    pace = seconds / max(step - self._steps_before, 1)
    remaining = max(self.total - step, 0) * pace
    parts = [
      f"{self.unit} {step}/{self.total}",
      f"{duration(self._seconds_before + seconds)} elapsed",
      f"{duration(remaining)} left",
    ]
    if figure:
      parts.append(figure)
    status = "  ".join(parts)

    # --- On a terminal the bar shows every step.
    if self._bar is not None:
      status = _literal(status)
      if shares:
        status += f"\n[dim]{_literal(shares)}[/dim]"
      self._bar.update(self._task, completed=step, status=status)
      self._shown = time.monotonic()
      return

    # --- Otherwise an occasional line; a line not yet due waits for `__exit__`.
    self._line = f"{self.title}  {status}"
    if shares:
      self._line += f"\n  {shares}"
    now = time.monotonic()
    if step == self._first or step >= self.total or now - self._shown >= PLAIN_EVERY:
      say(self._line)
      self._line = ""
      self._shown = now


def say(line: str) -> None:
  """Prints a line on standard error at once, like progress."""
  print(line, file=sys.stderr, flush=True)


def _literal(text: str) -> str:
  # rich reads [word] as markup; a figure is never markup.
  return text.replace("[", r"\[")


def duration(seconds: float) -> str:
  """Writes seconds as `42s`, `3m05s` or `2h07m`."""
  seconds = round(seconds)
  if seconds < 60:
    return f"{seconds}s"
  if seconds < 3600:
    return f"{seconds // 60}m{seconds % 60:02d}s"
  return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def _read_lines(path: str) -> list[dict[str, Any]]:
  if not os.path.exists(path):
    return []
  # Read as bytes: an incomplete line may end within a character.
  with open(path, "rb") as f:
    lines = f.read().split(b"\n")
  rows = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    where = f"{path}:{number}"
    try:
      row = parse_object(line, where)
    except ValueError:
      # A killed run may leave its last line incomplete; no other line may be broken.
      if number < len(lines):
        raise
      continue
    for name, kind in (("stage", str), ("step", int), ("seconds", int | float)):
      if not isinstance(row.get(name), kind):
        value = shown(row.get(name))
        raise ValueError(f"{where}: no line of a log: field {name!r} is {value}")
    rows.append(row)
  return rows


def _write_lines(path: str, rows: Iterable[dict[str, Any]]) -> None:
  with atomic_write(path) as f:
    f.writelines(json.dumps(row) + "\n" for row in rows)


def _drop_from(path: str, stage: str, step: int) -> tuple[int, float]:
  """Drops the stage's lines from `step` on; returns the last kept step and seconds."""
  rows = _read_lines(path)
  rows = [r for r in rows if r["stage"] != stage or r["step"] < step]
  # Written even if no row was dropped: this removes a killed run's incomplete line.
  if os.path.exists(path):
    _write_lines(path, rows)
  ours = [r for r in rows if r["stage"] == stage]
  if not ours:
    return 0, 0.0
  return ours[-1]["step"], ours[-1]["seconds"]


def resume_log(
  workdir: str, stage: str, step: int, first_dir: str
) -> list[dict[str, Any]]:
  """Reads a resumed stage's lines up to the checkpoint's step, from `first_dir`.

  Every process uses and copies the first process's lines, because its own may lack
  steps, or have steps that were repeated later. So all processes judge and sum up the
  same run.
  """
  rows = _read_lines(os.path.join(first_dir, METRICS_FILE))
  rows = [row for row in rows if row["stage"] == stage and row["step"] <= step]
  if workdir != first_dir:
    os.makedirs(workdir, exist_ok=True)
    _write_lines(os.path.join(workdir, METRICS_FILE), rows)
  return rows


def read_metrics(path: str | os.PathLike[str], stage: str = "") -> list[dict[str, Any]]:
  """Reads a stage's lines, in order; non-finite values are None.

  Skips an incomplete last line, which a killed run may leave.

  Args:
    path: the file, or its workdir.
    stage: the stage; "" for all.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: another line is malformed; the message names file and line.
  """
  path = os.fspath(path)
  if os.path.isdir(path):
    path = os.path.join(path, METRICS_FILE)
  if not os.path.exists(path):
    raise FileNotFoundError(f"no metrics at {path}")
  return [row for row in _read_lines(path) if stage in ("", row["stage"])]


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes `value` as JSON with sorted keys, so that equal results give equal files.

  The write is atomic. Non-finite numbers become null; numpy scalars and arrays become
  numbers and lists.
  """
  with atomic_write(path) as f:
    json.dump(_plain(value), f, indent=2, sort_keys=True, allow_nan=False)
    f.write("\n")


def _plain(value: Any) -> Any:
  if hasattr(value, "tolist"):  # a numpy or jax array or scalar
    value = value.tolist()
  if isinstance(value, dict):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value

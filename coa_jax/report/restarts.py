"""What a run's restarts change and cost: other devices, and time that was no step's.

Goodput is the share of wall time, since the run first began, that went into the steps
which count. Not in it: starting and restoring, compiling, steps that were lost since
the last checkpoint and made again, and pauses between the starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from coa_jax.report import timers
from coa_jax.report.metrics import say

_COMPILES = "/jax/core/compile/"  # JAX's events of tracing, lowering and compiling
USEFUL = "useful_seconds"


class Goodput:
  """Counts a run's useful seconds over its restarts; use as a context manager."""

  def __init__(
    self, log: Sequence[Mapping[str, Any]], begun: float | None, devices: int
  ):
    """Takes up the count where the log ends.

    Args:
      log: the lines of metrics that the run goes on from.
      begun: Unix time of the run's first beginning; None for what the log says.
      devices: that the run uses now.
    """
    self._devices = devices
    seconds = 0.0
    self._useful = 0.0
    if log:
      seconds = log[-1]["seconds"]
      self._useful = log[-1].get(USEFUL, seconds)  # an earlier version's has none
    self._begun = time.time() - seconds if begun is None else begun
    self._lock = threading.Lock()
    self._compiled: list[tuple[float, float]] = []  # began, ended; in any thread

  def __enter__(self) -> Goodput:
    jax.monitoring.register_event_duration_secs_listener(self._hear)
    return self

  def __exit__(self, *unused: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._hear)

  def after_step(
    self, values: Mapping[str, float], output: float | None = None
  ) -> dict[str, float]:
    """Returns the run's `goodput` with this step, and what it is made of.

    Args:
      values: of the step, with its seconds by phase.
      output: tokens that the step's rollouts wrote, on all devices.
    """
    now = time.monotonic()
    seconds = sum(timers.seconds_of(values).values())
    self._useful += max(0.0, seconds - self._compiling(now - seconds, now))
    wall = max(time.time() - self._begun, self._useful)  # a clock may be set back
    out = {
      "goodput": self._useful / max(wall, 1e-9),
      USEFUL: self._useful,
      "devices": self._devices,
      "processes": jax.process_count(),
    }
    if output is not None and seconds > 0:
      out["output" + timers.RATE + "_per_chip"] = output / seconds / self._devices
    return out

  def _hear(self, event: str, seconds: float, **unused: Any) -> None:
    if event.startswith(_COMPILES):
      now = time.monotonic()
      with self._lock:
        self._compiled.append((now - seconds, now))

  def _compiling(self, begin: float, end: float) -> float:
    """Seconds of a span in which something was compiled; earlier ones are forgotten."""
    with self._lock:
      spans = sorted(self._compiled)
      self._compiled = []
    total = 0.0
    # One may lie within another, or beside it in another thread.
    for first, last in spans:
      first = max(first, begin)
      last = min(last, end)
      total += max(0.0, last - first)
      begin = max(begin, last)
    return total


def say_what_changed(
  log: Sequence[Mapping[str, Any]], devices: int, processes: int
) -> None:
  """Says that a run goes on with others than it had, and what that means.

  Args:
    log: the lines of metrics that it goes on from.
    devices: that it has now.
    processes: likewise.
  """
  if not log or "devices" not in log[-1]:
    return
  now = f"{devices} devices of {processes} processes"
  before = f"{log[-1]['devices']:.0f} devices of {log[-1]['processes']:.0f} processes"
  if now != before:
    say(
      f"goes on after step {log[-1]['step']} with {now}, before {before}: the "
      "same data, tasks and seeds; sums are rounded in another order, so last bits may "
      "differ"
    )

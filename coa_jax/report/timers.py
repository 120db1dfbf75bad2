"""A stage's time: seconds by phase, their rates, a line and a table.

Time outside of all phases is `other`, so the phases of a line of metrics.jsonl add up
to the wall time since the previous line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.report.tables import Table

SECONDS = "seconds_"
RATE = "_tokens_per_second"
OTHER = "other"
# Phase -> its meaning, in the order of tables and pictures.
PHASES = {
  "data": "rows of tokens",
  "sync": "weights to the sampler",
  "decode": "the sampler's programs",
  "tools": "waiting for tools",
  "host": "between the sampler's programs: episodes, parsing, grading",
  "rollout": "waiting for rollouts that run beside the learner",
  "learn": "gradients and optimizer",
  "step": "gradients and optimizer",
  "eval": "loss of held-out trajectories",
  "dev": "evaluation by rollouts",
  "save": "checkpoints and records",
  OTHER: "the host, all else",
}
_WIDTH = 78  # characters of a line


class StepTimer:
  """Measures the phases of one step after another."""

  def __init__(self):
    """Begins the first step now."""
    self._seconds: dict[str, float] = {}
    self._last = time.monotonic()

  def lap(self, phase: str, **parts: float) -> None:
    """Ends a phase that began with the previous lap, or with the step.

    Repeated laps of a phase are summed; `parts` are seconds of this time that belong to
    other phases.
    """
    now = time.monotonic()
    # Subtract the other phases' seconds.
    own = now - self._last - sum(parts.values())
    for name, seconds in {**parts, phase: own}.items():
      key = SECONDS + name
      self._seconds[key] = self._seconds.get(key, 0.0) + seconds
    self._last = now

  def flush(self, **tokens: float) -> dict[str, float]:
    """Ends the step: returns `seconds_PHASE` of each phase, and tokens per second of
    some.

    Time since the last lap is `other`'s. A step's checkpoint is written after its
    numbers are, so it counts for the next step.

    `tokens`: phase -> its number of tokens.
    """
    # The rest is other time, so that all phases add up to the wall time.
    self.lap(OTHER)
    out = self._seconds
    self._seconds = {}
    for phase, count in tokens.items():
      seconds = out.get(SECONDS + phase, 0.0)
      if seconds > 0 and count:
        out[phase + RATE] = count / seconds
    return out


def seconds_of(row: Mapping[str, Any]) -> dict[str, float]:
  """Reads seconds by phase in a line of metrics, in the order of PHASES."""
  by_phase = {}
  for name, value in row.items():
    if name.startswith(SECONDS) and value is not None:
      by_phase[name.removeprefix(SECONDS)] = float(value)
  out = {}
  for name in PHASES:
    if name in by_phase:
      out[name] = by_phase.pop(name)
  return out | by_phase  # phases of other versions come last


def phase_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Adds up `seconds_PHASE` of many lines."""
  return {SECONDS + name: value for name, value in PhaseTotals(rows).seconds.items()}


def line(seconds: Mapping[str, float]) -> str:
  """Writes the shares of a step's phases in a line, the largest first."""
  total = sum(seconds.values())
  if total <= 0:
    return ""
  # A share under half a percent, or one that does not fit, is left out.
  out = ""
  for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
    share = f"{name} {value / total:.0%}"
    if out:
      share = "  " + share
    if value >= 0.005 * total and len(out + share) <= _WIDTH:
      out += share
  return out


class PhaseTotals:
  """Sums the phases of many lines of metrics."""

  def __init__(self, rows: Sequence[Mapping[str, Any]] = ()):
    """Takes lines to begin with."""
    self.seconds: dict[str, float] = {}
    self._tokens: dict[str, float] = {}
    for row in rows:
      self.add(row)

  def add(self, row: Mapping[str, Any]) -> None:
    """Adds a line."""
    for name, value in seconds_of(row).items():
      self.seconds[name] = self.seconds.get(name, 0.0) + value
      # The rate of many lines is total tokens by total seconds, not a mean of rates.
      tokens = (row.get(name + RATE) or 0.0) * value
      self._tokens[name] = self._tokens.get(name, 0.0) + tokens

  def table(self, title: str) -> Table:
    """Makes a table with a row for each phase above 0 seconds."""
    total = sum(self.seconds.values())
    rows = []
    for name, seconds in self.seconds.items():
      if seconds <= 0:
        continue
      row = {"phase": name, "what": PHASES.get(name, ""), "seconds": seconds}
      row["share"] = f"{seconds / total:.1%}"
      row["rate"] = None
      if self._tokens[name]:
        row["rate"] = self._tokens[name] / seconds
      rows.append(row)
    # In a step's order, not by seconds.
    rows.sort(key=lambda row: list(PHASES).index(row["phase"]))
    columns = {"phase": "phase", "seconds": "seconds", "share": "share"}
    return Table(title, rows, {**columns, "rate": "tokens/s", "what": "what"})

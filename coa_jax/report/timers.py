"""Measures a stage's seconds and token rates by phase; shows them as line and table.

Time outside all phases is `other`, so the phases in a metrics.jsonl line add up to the
wall time since the previous line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.report.tables import Table

SECONDS = "seconds_"
RATE = "_tokens_per_second"
OTHER = "other"
# Phase -> meaning, in the order of tables and figures.
PHASES = {
  "data": "making rows of tokens",
  "sync": "weight transfer to the sampler",
  "decode": "the sampler's programs",
  "tools": "waiting for tools",
  "host": "between the sampler's programs: episodes, parsing, grading",
  "rollout": "waiting for concurrent rollouts",
  "learn": "RL's gradients and optimizer",
  "step": "SFT's gradients and optimizer",
  "eval": "loss of held-out trajectories",
  "dev": "evaluation by rollouts",
  "save": "checkpoints and records",
  OTHER: "the rest, on the host",
}
_WIDTH = 78  # characters per line


class StepTimer:
  """Measures each step's phases."""

  def __init__(self):
    """Begins the first step now."""
    self._seconds: dict[str, float] = {}
    self._last = time.monotonic()

  def lap(self, phase: str, **parts: float) -> None:
    """Ends a phase, which began with the previous lap or with the step.

    Repeated laps of a phase are summed. `parts`: other phase -> its seconds within this
    lap.
    """
    now = time.monotonic()
    # Subtract the other phases' seconds.
    own = now - self._last - sum(parts.values())
    for name, seconds in {**parts, phase: own}.items():
      key = SECONDS + name
      self._seconds[key] = self._seconds.get(key, 0.0) + seconds
    self._last = now

  def flush(self, **tokens: float) -> dict[str, float]:
    """Ends the step; returns `seconds_PHASE` and, for phases in `tokens`, token rates.

    Time since the last lap is `other`. A step's checkpoint is written after its
    numbers, so the checkpoint's time counts for the next step.

    `tokens`: phase -> number of tokens.
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
  """Reads seconds by phase from a metrics row, in the order of PHASES."""
  by_phase = {
    name.removeprefix(SECONDS): float(value)
    for name, value in row.items()
    if name.startswith(SECONDS) and value is not None
  }
  return _ordered(by_phase)


def _ordered(by_phase: Mapping[str, float]) -> dict[str, float]:
  """Returns the phases in the order of PHASES; those of other versions come last."""
  return {name: by_phase[name] for name in (*PHASES, *by_phase) if name in by_phase}


def phase_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Sums `seconds_PHASE` over metrics rows."""
  return {SECONDS + name: value for name, value in PhaseTotals(rows).seconds.items()}


def line(seconds: Mapping[str, float]) -> str:
  """Writes a step's phase shares as one line, the largest first."""
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
  """Sums phases over metrics rows."""

  def __init__(self, rows: Sequence[Mapping[str, Any]] = ()):
    """Adds the given rows."""
    self.seconds: dict[str, float] = {}
    self._tokens: dict[str, float] = {}
    for row in rows:
      self.add(row)

  def add(self, row: Mapping[str, Any]) -> None:
    """Adds a row."""
    for name, value in seconds_of(row).items():
      self.seconds[name] = self.seconds.get(name, 0.0) + value
      # The total rate is total tokens by total seconds, not a mean of rates.
      tokens = (row.get(name + RATE) or 0.0) * value
      self._tokens[name] = self._tokens.get(name, 0.0) + tokens

  def table(self, title: str) -> Table:
    """Makes a table with a row for each phase above 0 seconds."""
    total = sum(self.seconds.values())
    rows = []
    for name, seconds in _ordered(self.seconds).items():
      if seconds <= 0:
        continue
      rows.append(
        {
          "phase": name,
          "what": PHASES.get(name, ""),
          "seconds": seconds,
          "share": f"{seconds / total:.1%}",
          "rate": self._tokens[name] / seconds or None,
        }
      )
    columns = {"phase": "phase", "seconds": "seconds", "share": "share"}
    return Table(title, rows, {**columns, "rate": "tokens/s", "what": "what"})

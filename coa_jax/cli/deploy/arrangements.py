"""Estimates from a run's own times whether rollouts should have their own devices.

`decode`, `wait`, `learn` and `sync` are an on-policy RL step's seconds by phase, on N
devices. A step's modelled seconds, if n devices are reserved for rollouts:

  interleaved   sync + decode + wait + learn
  side by side  sync + max(decode + learn, decode + wait)
  apart         sync + max(decode N/n + wait, learn N/(N-n))

`decode` and `learn` are device time, so they take longer on fewer devices; `wait` is
the rest of a step (tools, host). If nothing waits, apart is never faster than
interleaved. Not modelled: queues, stragglers, and transfers between devices. The model
has not been compared with measured runs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from coa_jax.report.metrics import METRICS_FILE, read_metrics
from coa_jax.report.timers import SECONDS
from coa_jax.runtime.record import read_run


@dataclasses.dataclass(frozen=True)
class StepSeconds:
  """A step's mean seconds by phase, on all devices."""

  sync: float
  decode: float
  wait: float
  learn: float

  @classmethod
  def of(cls, log: Sequence[Mapping[str, float]]) -> StepSeconds:
    """Averages the steps after the first, which compiles.

    Raises:
      ValueError: there are fewer than two steps, or the run was asynchronous, so that
        the phases overlap.
    """
    if len(log) < 2:
      raise ValueError(f"the log has {len(log)} steps; it must have at least 2")
    if any("rollouts_waited" in row for row in log):
      raise ValueError(
        "the run was asynchronous; only a run with algo.sampling.staleness=0 has "
        "separate seconds for each phase"
      )
    rows = log[1:]
    seconds = {"sync": 0.0, "decode": 0.0, "wait": 0.0, "learn": 0.0}
    for row in rows:
      for name, value in row.items():
        phase = name.removeprefix(SECONDS)
        # Evaluation and checkpoints are the same in every arrangement.
        if phase == name or phase in ("dev", "save"):
          continue
        seconds[phase if phase in seconds else "wait"] += value / len(rows)
    return cls(**seconds)

  def interleaved(self) -> float:
    """Computes a step's seconds if rollouts and learning take turns on all devices."""
    return self.sync + self.decode + self.wait + self.learn

  def side_by_side(self) -> float:
    """Computes a step's seconds if rollouts and learning share all devices at once."""
    return self.sync + self.decode + max(self.learn, self.wait)

  def apart(self, devices: int, own: int) -> float:
    """Computes a step's seconds if `own` devices are reserved for rollouts."""
    rollouts = self.decode * devices / own + self.wait
    return self.sync + max(rollouts, self.learn * devices / (devices - own))

  def best_apart(self, devices: int, team: int, processes: int = 1) -> int:
    """Returns the fastest number of devices to reserve for rollouts.

    Args:
      devices: number of devices in all processes.
      team: devices per replica, all in one process.
      processes: number of processes; each reserves equally many devices.

    Raises:
      ValueError: one replica per process leaves the learner no device.
    """
    least = team * processes
    if least >= devices:
      raise ValueError(
        f"a replica of {team} on each of {processes} processes leaves the learner none "
        f"of {devices} devices"
      )
    numbers = range(least, devices, least)
    return min(numbers, key=lambda own: self.apart(devices, own))


def lines(log: Sequence[Mapping[str, float]], team: int) -> list[str]:
  """Describes a step in each arrangement, the fastest last; see `StepSeconds`."""
  seconds = StepSeconds.of(log)
  devices = round(log[-1]["devices"])
  own = seconds.best_apart(devices, team, round(log[-1]["processes"]))
  ways = {
    "interleaved (staleness=0, mesh.rollout=0)": seconds.interleaved(),
    f"apart (staleness>=1, mesh.rollout={own})": seconds.apart(devices, own),
  }
  # A replica of several devices cannot share them with a learner.
  if team == 1:
    ways["side by side (staleness>=1, mesh.rollout=0)"] = seconds.side_by_side()
  out = [
    f"measured a step: decode {seconds.decode:.3g} s, learn {seconds.learn:.3g} s, "
    f"sync {seconds.sync:.3g} s, the rest {seconds.wait:.3g} s"
  ]
  for name, value in sorted(ways.items(), key=lambda way: -way[1]):
    out.append(f"{value:9.3g} s  {name}")
  return out


def describe_run(workdir: str) -> str:
  """Estimates a step in each arrangement, from an on-policy RL run's workdir.

  Raises:
    FileNotFoundError, ValueError: there is no such run, or see `StepSeconds.of`.
  """
  log = read_metrics(os.path.join(workdir, METRICS_FILE), "rl")
  config = read_run(os.path.join(workdir, "config.json"))
  team = config["rollout"]["tensor"] or config["mesh"]["tensor"]
  try:
    return "\n".join(lines(log, team))
  except ValueError as e:
    raise ValueError(f"{workdir}: {e}") from e

r"""Says from a run's own times whether its rollouts should have devices of their own.

  python -m experiments.chips --workdir=runs/rl [--team=2]

Reads the seconds by phase of an on-policy run of RL (`metrics.jsonl`) and prints what a
step would take in three arrangements of the same devices: by turns (as measured), side
by side (`algo.sampling.staleness`), and apart (`mesh.rollout`, at its best number, as
many of each process). The model behind it, of N devices, n of which roll out:

  by turns      sync + decode + wait + learn
  side by side  sync + max(decode + learn, decode + wait)
  apart         sync + max(decode N/n + wait, learn N/(N-n))

`decode` and `learn` are the device's seconds, which fewer devices stretch; `wait` is
all else of a step (tools, host), which they do not. Where no part of a step waits,
apart is never faster than by turns. Left out are queues, stragglers, and what a
transfer between devices takes longer than a sync on them: no such run was measured.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from absl import flags

from coa_jax.cli.launch import run_program, stop
from coa_jax.report.metrics import METRICS_FILE, read_metrics
from coa_jax.report.timers import SECONDS


@dataclasses.dataclass(frozen=True)
class StepSeconds:
  """Mean seconds of a step on all devices, by what they scale with."""

  sync: float
  decode: float
  wait: float
  learn: float

  @classmethod
  def of(cls, log: Sequence[Mapping[str, float]]) -> StepSeconds:
    """Averages the steps after the first, which compiles.

    Raises:
      ValueError: there are fewer than two, or rollouts went on beside the learner, so
        that their seconds are not told apart.
    """
    if len(log) < 2:
      raise ValueError(f"the log has {len(log)} steps; it must have at least 2")
    if any("rollouts_waited" in row for row in log):
      raise ValueError(
        "the run was asynchronous; its seconds are told apart at "
        "algo.sampling.staleness=0 alone"
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

  def by_turns(self) -> float:
    """Seconds of a step whose rollouts and learning take turns on all devices."""
    return self.sync + self.decode + self.wait + self.learn

  def side_by_side(self) -> float:
    """Seconds of a step that learns on the same devices while rollouts go on."""
    return self.sync + self.decode + max(self.learn, self.wait)

  def apart(self, devices: int, own: int) -> float:
    """Seconds of a step whose rollouts have `own` of the devices to themselves."""
    rollouts = self.decode * devices / own + self.wait
    return self.sync + max(rollouts, self.learn * devices / (devices - own))

  def best_apart(self, devices: int, team: int, processes: int = 1) -> int:
    """Returns the number of devices of rollouts' own at which a step is fastest.

    Args:
      devices: of all processes.
      team: devices of a replica, which one process has.
      processes: each gives as many.

    Raises:
      ValueError: a replica of each process would leave the learner no device.
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
  """Says what a step takes in each arrangement, the fastest last.

  Args:
    log: of an on-policy run.
    team: devices of a replica.

  Raises:
    ValueError: see `StepSeconds`.
  """
  seconds = StepSeconds.of(log)
  devices = round(log[-1]["devices"])
  own = seconds.best_apart(devices, team, round(log[-1]["processes"]))
  ways = {
    "by turns (staleness=0, mesh.rollout=0)": seconds.by_turns(),
    f"apart (staleness>=1, mesh.rollout={own})": seconds.apart(devices, own),
  }
  # Replicas of several devices are refused beside a learner on the same ones.
  if team == 1:
    ways["side by side (staleness>=1, mesh.rollout=0)"] = seconds.side_by_side()
  out = [
    f"measured a step: decode {seconds.decode:.3g} s, learn {seconds.learn:.3g} s, "
    f"sync {seconds.sync:.3g} s, all else {seconds.wait:.3g} s"
  ]
  for name, value in sorted(ways.items(), key=lambda way: -way[1]):
    out.append(f"{value:9.3g} s  {name}")
  return out


def define_flags() -> None:
  """Defines this program's flags: not on import, for other programs have like ones."""
  flags.DEFINE_string("workdir", None, "Of a run of RL.", required=True)
  flags.DEFINE_integer("team", 1, "Devices of a replica (rollout.tensor).", 1)


def main() -> None:
  """Prints the three arrangements."""
  log = read_metrics(os.path.join(flags.FLAGS.workdir, METRICS_FILE), "rl")
  try:
    print("\n".join(lines(log, flags.FLAGS.team)))
  except ValueError as e:
    stop(f"{flags.FLAGS.workdir}: {e}")


if __name__ == "__main__":
  define_flags()
  run_program(main)

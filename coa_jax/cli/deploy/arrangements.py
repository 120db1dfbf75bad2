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

import os
from collections.abc import Mapping, Sequence

from coa_jax.report.metrics import read_metrics
from coa_jax.report.timers import SECONDS
from coa_jax.runtime.record import read_run


def step_seconds(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns a step's mean seconds by phase, without the first step, which compiles.

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
  return seconds


def arrangements(
  sync: float,
  decode: float,
  wait: float,
  learn: float,
  devices: int,
  team: int,
  processes: int = 1,
) -> dict[str, float]:
  """Returns a step's seconds in each arrangement, with the best number of devices.

  Args:
    sync: seconds of the phase, as in `step_seconds`; likewise decode, wait and learn.
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
  apart = {}
  for own in range(least, devices, least):
    rollouts = decode * devices / own + wait
    apart[own] = sync + max(rollouts, learn * devices / (devices - own))
  best = min(apart, key=lambda own: apart[own])
  ways = {
    "interleaved (staleness=0, mesh.rollout=0)": sync + decode + wait + learn,
    f"apart (staleness>=1, mesh.rollout={best})": apart[best],
  }
  # A replica of several devices cannot share them with a learner.
  if team == 1:
    name = "side by side (staleness>=1, mesh.rollout=0)"
    ways[name] = sync + decode + max(learn, wait)
  return ways


def describe_run(workdir: str) -> str:
  """Describes a step of an on-policy RL run in each arrangement, the fastest last.

  Raises:
    FileNotFoundError, ValueError: there is no such run, or see `step_seconds`.
  """
  log = read_metrics(workdir, "rl")
  config = read_run(os.path.join(workdir, "config.json"))
  team = config["rollout"]["tensor"] or config["mesh"]["tensor"]
  try:
    seconds = step_seconds(log)
    devices, processes = (round(log[-1][name]) for name in ("devices", "processes"))
    ways = arrangements(**seconds, devices=devices, team=team, processes=processes)
  except ValueError as e:
    raise ValueError(f"{workdir}: {e}") from e
  out = [
    f"measured a step: decode {seconds['decode']:.3g} s, learn {seconds['learn']:.3g} "
    f"s, sync {seconds['sync']:.3g} s, the rest {seconds['wait']:.3g} s"
  ]
  for name, value in sorted(ways.items(), key=lambda way: -way[1]):
    out.append(f"{value:9.3g} s  {name}")
  return "\n".join(out)

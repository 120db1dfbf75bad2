"""What a rollout costs as slots, lengths and turns grow: our engine alone.

  python -m experiments.bench.scaling [--quick] [--out=FILE.json] [--plot=FILE.png]

The 5M model in float32, random weights, tools that take no time. Three sweeps:

  slots   1 to 256, trajectories of 464 tokens in four turns
  length  256 to 8,192 tokens of a trajectory, one turn, 4 slots
  turns   2,048 tokens in 1 to 64 turns, 8 slots: prefilling nothing twice, a token
          costs the same whatever their number

Every point has a process of its own, so that its peak memory is its own; the third of
three runs is timed. Of generated tokens per second; "ms a step" is of decoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from matplotlib.figure import Figure

from coa_jax.report import plots
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.agentic import OBSERVATION, PROMPT
from experiments.bench.train_work import SIZES
from experiments.launch import run_program

_PLOT = flags.DEFINE_string("plot", "", "PNG file to draw the three sweeps to.")


def _job(slots: int, length: int, turns: int) -> dict[str, int]:
  """Trajectories of about so many tokens; generated ones share what is not given."""
  fixed = PROMPT + (turns - 1) * OBSERVATION
  new = (length - fixed) // turns
  return {
    "trajectories": slots,
    "prompt": PROMPT,
    "calls": turns - 1,
    "observation": OBSERVATION,
    "new": new,
    "length": fixed + turns * new,
  }


def _turns(turns: int) -> dict[str, int]:
  """As many generated tokens whatever the turns; their observations are extra."""
  job = _job(8, 2_048, 1)
  job["new"] = job["new"] // turns
  job["calls"] = turns - 1
  job["observation"] = 4
  job["length"] = PROMPT + turns * job["new"] + (turns - 1) * job["observation"]
  return job


# Sweep -> what varies -> the job.
SWEEPS: dict[str, dict[int, dict[str, int]]] = {
  "slots": {n: _job(n, 464, 4) for n in (1, 4, 16, 64, 256)},
  "length": {n: _job(4, n, 1) for n in (256, 512, 1_024, 2_048, 4_096, 8_192)},
  "turns": {n: _turns(n) for n in (1, 4, 16, 64)},
}

_LABELS = {
  "slots": "slots, trajectories of 464 tokens",
  "length": "tokens of a trajectory, 4 slots",
  "turns": "turns, 1,984 generated tokens, 8 slots",
}


def measure(model: Mapping[str, Any], job: Mapping[str, int]) -> dict[str, Any]:
  """One point of a sweep.

  Args:
    model: fields of ModelConfig.
    job: what every trajectory does; see `agentic_work.make_plan`.

  Raises:
    ValueError: the worker ended.
  """
  job = {"model": model, "dtype": "float32", **job}
  with peers.contestants("experiments.bench.agentic_work", job, {}) as workers:
    (turn,) = peers.warm_turns(workers, 1, latency=False)["ours"]
  new = job["trajectories"] * (job["calls"] + 1) * job["new"]
  return {
    "tokens_per_second": new / turn["seconds"],
    "ms_a_step": turn["seconds"] / ((job["calls"] + 1) * job["new"]) * 1e3,
    "prefilled": turn["counted"]["prefilled"],
    "utilisation": turn["counted"]["utilisation"],
    "peak_mb": turn["peak_mb"],
  }


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
  """Tokens per second above, memory below, over what each sweep varies."""
  sweeps = list(dict.fromkeys(r["sweep"] for r in rows))
  figure = Figure(figsize=(4 * len(sweeps), 4.8), layout="constrained")
  axes = figure.subplots(2, len(sweeps), squeeze=False, sharex="col")
  values = {"tokens_per_second": "generated tokens/s", "peak_mb": "peak memory, MB"}
  for column, sweep in enumerate(sweeps):
    points = [r for r in rows if r["sweep"] == sweep]
    x = [r["at"] for r in points]
    for number, (name, label) in enumerate(values.items()):
      axis = axes[number, column]
      y = [r[name] for r in points]
      axis.plot(x, y, "o-", color=plots.COLORS[number])
      axis.set_xscale("log", base=2)
      axis.set_xticks(x, [f"{v:,}" for v in x])
      axis.set_ylim(0, 1.1 * max(y))
      axis.grid(alpha=0.25, linewidth=0.6)
      if column == 0:
        axis.set_ylabel(label)
    axes[1, column].set_xlabel(_LABELS[sweep])
  figure.suptitle("Rollouts of a model of 5M parameters, float32, on a CPU")
  return figure


_COLUMNS = {
  "sweep": "sweep",
  "at": "at",
  "tokens_per_second": "tokens/s",
  "ms_a_step": "ms a step",
  "prefilled": "prefilled",
  "utilisation": "utilisation",
  "peak_mb": "peak MB",
}


def run() -> dict[str, Any]:
  """Everything the flags ask for: the table, and the picture where --plot says."""
  model = SIZES["5M"].model
  most = None  # points of a sweep
  if bench.QUICK.value:
    model = SIZES["1M"].model
    most = 2
  rows = []
  for sweep, jobs in bench.chosen(SWEEPS).items():
    for at, job in itertools.islice(jobs.items(), most):
      row = {"sweep": sweep, "at": at, **measure(model, job)}
      rows.append(row)
      print(f"{sweep} {at}: {row['tokens_per_second']:.0f} tokens/s", flush=True)
  if _PLOT.value:
    plots.write_png(_PLOT.value, draw(rows))
  return {"table": rows, "ratios": {}}


NOTE = "tokens/s are of generated ones, of all slots; --quick takes the 1M model."

if __name__ == "__main__":
  run_program(bench.program(run, "Scaling", _COLUMNS, NOTE))

"""Compares our SFT step with torch (transformers) and google-tunix, on a CPU.

  python -m experiments.bench.train [--quick] [--out=FILE.json]
    [--torch_python=/tmp/peer_torch/bin/python]   pip install torch transformers
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

All contestants fine-tune one Qwen3 (5M-hybrid: a Qwen3.5) in full and in float32, from
one Hugging Face folder with random weights: 1,024-token rows with five segments each
(one for the hybrid), attention inside segments, loss on three quarters of the tokens,
gradients clipped to norm 1, AdamW. Contestants are separate, long-lived processes with
interleaved turns. Their first losses, before and after updates, must agree to 1e-3.

Small models have small vocabularies, 1,344 (the quickstart's) and 4,096, and 100M has
32,768, so the output matrix does not outweigh the layers. Every contestant uses its
entry in `SETTINGS`: rows per forward pass, compilation.
All use glibc's allocator with `launch.prepare`'s settings.

tokens/s: tokens over the rounds' median wall time; `cores` is processor time over wall
time, far below the machine's cores if another program ran, too. Peak MB is the
process's ru_maxrss: interpreter, libraries, compilation, weights, optimizer and
activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.train_work import SIZES, Size

TOLERANCE = 1e-3  # relative, between losses
CHECKED = 3  # steps with compared losses; the second and third follow updates

# `rows`: per forward pass; `devices`: a launcher's `--cpu_devices`, at most one per two
# rows.
SETTINGS: dict[str, dict[str, Any]] = {
  "ours": {"rows": 2, "devices": 1},  # and fields of `LoadConfig`
  "torch": {"rows": 1, "attention": "sdpa", "compile": False, "remat": False},
  "tunix": {"rows": 1, "remat": "NONE"},  # and names of tunix's RematConfig
}


def check_losses(
  losses: Mapping[str, Sequence[float]], tolerance: float = TOLERANCE
) -> None:
  """Refuses contestants whose losses differ from ours.

  Args:
    losses: the first steps' losses by contestant, with "ours", from equal weights and
      rows.
    tolerance: maximum relative difference from ours.
  """
  for name, theirs in losses.items():
    for step, (a, b) in enumerate(zip(losses["ours"], theirs, strict=True), 1):
      if not abs(a - b) <= tolerance * abs(a):  # also for NaN
        raise ValueError(
          f"{name} does other work than ours: its loss at step {step} is {b:.6f}, "
          f"ours {a:.6f}, more than {tolerance} apart"
        )


def race(
  size: Size,
  pythons: Mapping[str, str],
  settings: Mapping[str, Mapping[str, Any]],
  rounds: int,
  checked: int = CHECKED,
  tolerance: float = TOLERANCE,
) -> tuple[dict[str, list[float]], peers.Turns]:
  """Trains every contestant at one size, interleaved.

  `settings` are as `SETTINGS`. The first `checked` steps' losses are compared. Half
  precision may use a GPU.

  Returns:
    The first steps' losses, and every turn's answer (see `peers.serve`), by contestant,
    ours first.
  """
  module = "experiments.bench.train_work"
  job = {"size": dataclasses.asdict(size), "settings": settings}
  gpu = size.dtype != "float32"
  with peers.contestants(module, job, pythons, writer=module, gpu=gpu) as workers:
    # Equal work is verified before timing.
    answers = peers.ask_all(workers, steps=checked)
    first = {name: answer["losses"] for name, answer in answers.items()}
    for name, values in first.items():
      print(f"{name}: losses", *(f"{x:.6f}" for x in values), flush=True)
    check_losses(first, tolerance)
    return first, peers.take_turns(workers, rounds, steps=size.steps)


def measure(
  name: str,
  size: Size,
  pythons: Mapping[str, str],
  settings: Mapping[str, Mapping[str, Any]],
  rounds: int,
  checked: int = CHECKED,
) -> list[dict[str, Any]]:
  """Measures one size; returns a table row per contestant, ours first.

  Args as for `race`, and the size's name.
  """
  print(name, flush=True)
  first, turns = race(size, pythons, settings, rounds, checked)
  tokens = size.rows * size.length * size.steps
  rows = []
  for who, answers in turns.items():
    setting = settings.get(who, settings["ours"])
    row = {
      "size": name,
      "contestant": who,
      "vocabulary": size.model["vocab_size"],
      "rows": size.rows,
      "setting": ", ".join(f"{k} {v}" for k, v in setting.items()),
      "first_loss": first[who][0],
      **peers.rates(answers, tokens),
    }
    rows.append(row)
    print(f"{name} {who}: {row['tokens_per_second']:,.0f}", flush=True)
  return rows


_COLUMNS = {
  "size": "size",
  "vocabulary": "vocabulary",
  "contestant": "who",
  "tokens_per_second": "tokens/s",
  "cores": "cores",
  "peak_mb": "peak MB",
  "setting": "setting",
}


def run() -> dict[str, Any]:
  """Runs the selected cases; returns the table and the ratios."""
  pythons = bench.available("torch", "tunix")
  rows = []
  for name, size in bench.chosen(SIZES).items():
    able = pythons
    if "delta" in size.model:  # tunix has no such model
      able = {who: python for who, python in pythons.items() if who != "tunix"}
    if bench.QUICK.value:
      small = dataclasses.replace(size, rows=2, steps=1)
      rows += measure(name, small, able, SETTINGS, rounds=2, checked=2)
    else:
      rows += measure(name, size, able, SETTINGS, bench.ROUNDS.value)
  figures = ("tokens_per_second", "peak_mb")
  return {"table": rows, "ratios": bench.ratios(rows, ["size"], figures)}


NOTE = "Float32, rows of 1,024 tokens; medians of interleaved rounds; peak: ru_maxrss."

if __name__ == "__main__":
  run_program(bench.program(run, "SFT step", _COLUMNS, NOTE))

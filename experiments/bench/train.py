"""The SFT step against torch with transformers, and against google-tunix, on a CPU.

  python -m experiments.bench.train [--quick] [--out=FILE.json]
    [--torch_python=/tmp/peer_torch/bin/python]   pip install torch transformers
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

Full fine-tuning of one Qwen3 in float32, random weights from one Hugging Face folder:
rows of 1,024 tokens with five segments each, attention inside segments, loss on three
quarters of the tokens, gradients clipped to norm 1, AdamW. Each contestant is a process
of its own that stays alive and is told how many steps to make; they take turns, one at
a time. Their first losses, before and after updates, must agree to 1e-3.

Sizes have small vocabularies where the model is small: 1,344 (the quickstart's), 4,096,
and 32,768 at 100M, so that the output matrix does not outweigh the layers. Every
contestant runs its row of `SETTINGS` (--settings changes it): how many rows go through
the model at once, what is compiled. All have glibc's allocator as `launch.prepare` sets
it.

tokens/s: median over rounds of wall time; `cores` is processor time over wall time, far
below the machine's cores where something else ran beside. Peak MB is the process's
ru_maxrss: interpreter, libraries, compilation, weights, optimizer and activations.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from coa_jax.model.config import LoadConfig
from experiments.bench import program as bench
from experiments.bench.train_work import SIZES, Size
from experiments.bench.workers import CHECKED, available, race
from experiments.launch import run_program

_SETTINGS = flags.DEFINE_string(
  "settings", "{}", 'Other settings, as JSON: {"torch": {"rows": 2, "compile": true}}.'
)

# `rows` go through the model at once, the rest of a step's after them; `devices` is
# what `--cpu_devices` of a launcher is, but no more than one for two rows.
SETTINGS: dict[str, dict[str, Any]] = {
  "ours": {"rows": 2, "devices": 1},  # and fields of `LoadConfig`
  "torch": {"rows": 1, "attention": "sdpa", "compile": False, "remat": False},
  "tunix": {"rows": 1, "remat": "NONE"},  # and names of tunix's RematConfig
}


def measure(
  name: str,
  size: Size,
  pythons: Mapping[str, str],
  settings: Mapping[str, Mapping[str, Any]],
  rounds: int,
  checked: int = CHECKED,
) -> list[dict[str, Any]]:
  """Rows of the table: every contestant at one size, ours first.

  Args as of `race`, and the size's name.

  Raises:
    ValueError: losses differ (see `check_losses`), or a worker ended.
  """
  print(name, flush=True)
  first, turns = race(size, pythons, settings, rounds, checked)
  tokens = size.rows * size.length * size.steps
  rows = []
  for contestant, taken in turns.items():
    seconds = statistics.median(t["seconds"] for t in taken)
    rows.append(
      {
        "size": name,
        "contestant": contestant,
        "parameters": parameters(size),
        "vocabulary": size.model["vocab_size"],
        "rows": size.rows,
        "setting": ", ".join(f"{k} {v}" for k, v in settings[contestant].items()),
        "first_loss": first[contestant][0],
        "tokens_per_second": tokens / seconds,
        "slowest": tokens / max(t["seconds"] for t in taken),
        "fastest": tokens / min(t["seconds"] for t in taken),
        "cores": statistics.median(t["cpu_seconds"] / t["seconds"] for t in taken),
        "peak_mb": taken[-1]["peak_mb"],
      }
    )
    print(f"{name} {contestant}: {rows[-1]['tokens_per_second']:,.0f}", flush=True)
  return rows


def parameters(size: Size) -> int:
  """Scalars of the model; the embedding is also the output matrix."""
  m = size.model
  heads = m["width"] * m["head_dim"] * 2 * (m["heads"] + m["kv_heads"])
  layer = heads + 3 * m["width"] * m["ff"] + 2 * m["width"] + 2 * m["head_dim"]
  return m["vocab_size"] * m["width"] + m["layers"] * layer + m["width"]


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Ours over theirs, by name; more than 1 is better in speed and worse in memory."""
  by = {(row["size"], row["contestant"]): row for row in rows}
  return {
    f"{size} {figure} over {peer}": by[size, "ours"][figure] / row[figure]
    for (size, peer), row in by.items()
    if peer != "ours"
    for figure in ("tokens_per_second", "peak_mb")
  }


def merged(changes: str) -> dict[str, dict[str, Any]]:
  """`SETTINGS` with --settings over them.

  Raises:
    ValueError: not JSON, or a contestant or a setting that does not exist.
  """
  try:
    given = json.loads(changes)
  except json.JSONDecodeError as e:
    raise ValueError(f"--settings: not JSON ({e})") from e
  out = {name: dict(values) for name, values in SETTINGS.items()}
  ours_too = {f.name for f in dataclasses.fields(LoadConfig)}
  for name, values in given.items():
    known = set(out.get(name, ())) | (ours_too if name == "ours" else set())
    for key in values:
      if key not in known:
        raise ValueError(
          f"--settings: {name} has no {key!r}; accepted: {sorted(known)}"
        )
    out[name] |= values
  return out


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
  """Everything the flags ask for: the table and the ratios."""
  settings = merged(_SETTINGS.value)
  peers = available(("torch", "tunix"))
  rows = []
  for name, size in bench.chosen(SIZES).items():
    rounds, checked = bench.ROUNDS.value, CHECKED
    if bench.QUICK.value:
      size, rounds, checked = dataclasses.replace(size, rows=2, steps=1), 2, 2
    rows += measure(name, size, peers, settings, rounds, checked)
  return {"table": rows, "ratios": ratios(rows)}


NOTE = "Float32, rows of 1,024 tokens; medians of rounds by turns; peak: ru_maxrss."

if __name__ == "__main__":
  run_program(bench.program(run, "SFT step", _COLUMNS, NOTE))

"""Measures this project's speed on one GPU, with torch in the same run.

  python -m experiments.bench.gpu --out=DIR [--stages=rates,train] [--models=0.5b]
    [--quick] [--torch_python=python3]   pip install torch transformers

Stages, the most valuable first. Each is a separate process with a time limit and writes
DIR/STAGE.json after every figure, so a lost machine loses only the later figures.

  rates    Bytes/s for a copy, FLOP/s for products in bfloat16, TF32 and float32.
  window   Decoding steps at Qwen2.5's 0.5B and 1.5B sizes over 1,024 cached tokens:
           time, and the share needed to read the step's bytes from memory.
  train    SFT steps at the same sizes with 4,096 tokens, beside transformers under
           torch.compile: tokens/s, model FLOP utilisation (MFU), memory.
  decode   128-token prompts continued by 256 tokens: the rollouts' scheduler,
           beside transformers' `generate` with a static cache.
  compile  Every sampler program of a 0.5B run, without a compile cache.
  correct  tests/test_gpu.py, each test by name.

Weights are random, drawn on the device. MFU is the model's arithmetic
(`coa_jax.model.flops`) over the measured bfloat16 product rate. Without a GPU, or with
--quick, models are tiny and only test the script.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import rich
from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.report.tables import Table
from experiments.bench import peers

# Default time limit per stage, seconds.
LIMITS = {
  "rates": 40,
  "window": 150,
  "train": 240,
  "decode": 240,
  "compile": 200,
  "correct": 240,
}

_OUT = flags.DEFINE_string("out", None, "Folder for the figures.", required=True)
_STAGES = flags.DEFINE_list("stages", list(LIMITS), "Stages, in this order.")
_LIMIT = flags.DEFINE_integer("limit_s", 0, "Time limit per stage, seconds.", 0)
_QUICK = flags.DEFINE_bool("quick", False, "Tiny models, one round.")
_MODELS = flags.DEFINE_list("models", [], "Sizes, 0.5b or 1.5b; both by default.")
_TORCH = flags.DEFINE_string("torch_python", sys.executable, "Runs torch's worker.")


@flags.validator("stages", message=f"accepted: {', '.join(LIMITS)}")
def _known(stages: list[str]) -> bool:
  return set(stages) <= set(LIMITS)


def run_stage(stage: str, out: pathlib.Path) -> dict[str, Any]:
  """Runs a stage in a separate process; returns its figures and how it ended."""
  command = [sys.executable, "-m", "experiments.bench.gpu_work", stage, str(out)]
  sizes = ["tiny"] if _QUICK.value else _MODELS.value or ["0.5b", "1.5b"]
  command += [_TORCH.value, *sizes]
  env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  limit = _LIMIT.value or LIMITS[stage]
  file = out / f"{stage}.json"
  file.unlink(missing_ok=True)  # an earlier run's
  began = time.monotonic()
  with open(out / f"{stage}.log", "w") as log:
    process = subprocess.Popen(
      command, cwd=peers.ROOT, env=env, stdout=log, stderr=log, start_new_session=True
    )
    try:
      ended = f"status {process.wait(limit)}"
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, 9)
      process.wait()
      ended = f"stopped after {limit} s"
  rows = json.loads(file.read_text()) if file.exists() else []
  return {"ended": ended, "seconds": time.monotonic() - began, "rows": rows}


def main() -> None:
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  for stage in _STAGES.value:
    result = run_stage(stage, out)
    rows = result["rows"]
    columns = {name: name for row in rows for name in row} or {"": "no figures"}
    note = f"{result['ended']}, {result['seconds']:.0f} s; log: {stage}.log"
    rich.print(Table(stage, rows, columns, note), flush=True)


if __name__ == "__main__":
  run_program(main)

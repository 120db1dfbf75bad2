"""Steps of agentic GRPO with tools, against google-tunix's agentic GRPO learner.

  python -m experiments.bench.rl [--quick] [--out=FILE.json] [--rounds=3]
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

A step: 8 prompts of 64 tokens, 4 trajectories each. A trajectory has four turns of 64
tokens and three calls between them that take 100 to 300 ms (or no time) and return 48
tokens. Every other trajectory of a group earns 1, the others 0; then one update (token
mean, no KL, clip 0.2, AdamW, micro-batches of 8 rows).

All start from one Hugging Face folder of random weights and play the same tasks with
the same latencies. Decoding is greedy and nothing but the length ends a turn, so all
are to sample the same tokens: in the very second step, which follows an update, the
last turn's first 16 tokens must agree in 9 of 10 trajectories, or nothing is reported.
The contestants are processes that take turns, a step each, after two to compile.

* ours: the scheduler and `PolicyUpdate`, as `rl.run` calls them, a device a core. Text,
  grading and tool processes are left out on both sides.
* tunix: `tunix.rl.agentic.agentic_grpo_learner.GRPOLearner` with its only sampler that
  runs on a CPU ("vanilla"). It calls the sampler for every trajectory by itself, from
  threads, and has every turn prefill all that came before. For its metrics it runs one
  more forward pass over every trajectory.
* tunix in step: the same learner, but we put the turns of all trajectories together
  into one call of its sampler. tunix does not; it is the most that its parts can do.

Seconds of ours are by phase. Of tunix `learn` is `update_actor`, and `other` all else,
whose parts overlap in threads: sampling, tools, scoring.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.bench import program as bench
from experiments.bench.train_work import SIZES
from experiments.bench.workers import available, by_turns, generators
from experiments.launch import run_program

PROMPT, NEW, CALLS, OBSERVATION = 64, 64, 3, 48
PROMPTS, SAMPLES = 8, 4
CASES = {
  f"{size} {tools}": (size, tools == "tools")
  for size in ("5M",)
  for tools in ("tools", "no latency")
}
_AGREE = 0.9  # of trajectories


def check_tokens(first: Mapping[str, Sequence[Sequence[int]]]) -> None:
  """Refuses contestants that do not play, or learn, as ours do.

  Args:
    first: of every contestant, tokens of every trajectory.

  Raises:
    ValueError: naming the peer, and how many of its trajectories agree.
  """
  for name, theirs in first.items():
    pairs = list(zip(first["ours"], theirs, strict=True))
    same = sum(list(a) == list(b) for a, b in pairs)
    if same < _AGREE * len(pairs):
      raise ValueError(
        f"{name} does other work than ours: {same} of {len(pairs)} trajectories agree"
      )


def measure(
  name: str,
  model: Mapping[str, Any],
  pythons: Mapping[str, str],
  latencies: Sequence[bool],
  rounds: int,
  prompts: int = PROMPTS,
  new: int = NEW,
) -> list[dict[str, Any]]:
  """Rows of the table: every contestant at one size, ours first.

  Args:
    name: of the size.
    model: fields of ModelConfig.
    pythons: the interpreter of every peer that takes part.
    latencies: whether tools take time.
    rounds: steps of every contestant that are timed.
    prompts: groups of a step.
    new: tokens of a turn of the model.

  Raises:
    ValueError: trajectories differ, or a worker ended.
  """
  job = {
    "model": model,
    "dtype": "float32",
    "prompt": PROMPT,
    "new": new,
    "calls": CALLS,
    "observation": OBSERVATION,
    "prompts": prompts,
    "samples": SAMPLES,
    "length": PROMPT + (CALLS + 1) * new + CALLS * OBSERVATION,
  }
  trajectories = prompts * SAMPLES
  with generators("experiments.bench.rl_work", job, pythons) as workers:
    rows = []
    for latency in latencies:
      # Later on rounding has let their weights drift apart.
      check = None if rows else check_tokens
      turns = by_turns(workers, rounds, check, steps=1, latency=latency)
      for who, taken in turns.items():
        seconds = statistics.median(t["seconds"] for t in taken)
        phases = {
          f"seconds_{phase}": statistics.median(t["phases"][phase] for t in taken)
          for phase in taken[0]["phases"]
        }
        row = {
          "size": name,
          "tools": "0.1-0.3 s" if latency else "0 s",
          "contestant": who,
          "trajectories_per_second": trajectories / seconds,
          "steps_per_minute": 60 / seconds,
          **phases,
          "cpu_seconds": statistics.median(t["cpu_seconds"] for t in taken),
          "slowest": max(t["seconds"] for t in taken),
          "fastest": min(t["seconds"] for t in taken),
          "peak_mb": taken[-1]["peak_mb"],
        }
        rows.append(row)
        print(f"{name}, {row['tools']}, {who}: {seconds:.2f} s a step", flush=True)
  return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Our trajectories/s over theirs, and their processor time over ours, by name.

  The second holds on a machine that others load too, and knows nothing of waiting.
  """
  by = {(r["size"], r["tools"], r["contestant"]): r for r in rows}
  out = {}
  for (size, tools, who), row in by.items():
    if who != "ours":
      own, name = by[size, tools, "ours"], f"{size}, tools of {tools}, over {who}"
      rate, cpu = "trajectories_per_second", "cpu_seconds"
      out[name] = own[rate] / row[rate]
      out[f"{name}, in processor time"] = row[cpu] / own[cpu]
  return out


_COLUMNS = {
  "contestant": "who",
  "tools": "tools",
  "trajectories_per_second": "traj/s",
  "seconds_decode": "decode",
  "seconds_tools": "wait",
  "seconds_learn": "learn",
  "seconds_other": "other",
  "cpu_seconds": "CPU s",
}


def run() -> dict[str, Any]:
  """Everything the flags ask for: the table and the ratios."""
  quick = bench.QUICK.value
  less = dict(prompts=2, new=16) if quick else {}
  rounds = 1 if quick else bench.ROUNDS.value
  peers = available(("tunix",))
  if peers and not quick:
    peers["tunix in step"] = peers["tunix"]
  rows, asked = [], {}
  for size, latency in bench.chosen(CASES).values():
    asked.setdefault("1M" if quick else size, []).append(latency)
  for size, latencies in asked.items():
    rows += measure(size, SIZES[size].model, peers, latencies, rounds, **less)
  return {"table": rows, "ratios": ratios(rows)}


NOTE = (
  f"{PROMPTS} x {SAMPLES} trajectories a step (--quick: 2 x {SAMPLES}); medians of "
  "seconds; wait: for tools alone."
)

if __name__ == "__main__":
  run_program(bench.program(run, "Steps of RL with tools", _COLUMNS, NOTE))

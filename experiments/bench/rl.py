"""Compares our agentic GRPO steps with google-tunix's agentic GRPO learner.

  python -m experiments.bench.rl [--quick] [--out=FILE.json] [--rounds=3]
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

A step has 8 prompts with 64 tokens, 4 trajectories each. A trajectory has four 64-token
turns and three calls between them, which take 100 to 300 ms (or no time) and return 48
tokens. Every other trajectory in a group has reward 1, the others 0. One update (token
mean, no KL, clip 0.2, AdamW, micro-batches with 8 rows) ends the step.

All contestants load one Hugging Face folder with random weights and play the same tasks
with the same latencies. Decoding is greedy and only length ends a turn, so all should
sample the same tokens: in the second step, after an update, the last turn's first 16
tokens must agree in 9 of 10 trajectories, or nothing is reported. The contestants are
interleaved processes, one step at a time, after two steps to compile.

* ours: the scheduler and `PolicyUpdate` as in `rl.run`, one device per core. Both sides
  omit text, grading and tool processes.
* tunix: `tunix.rl.agentic.agentic_grpo_learner.GRPOLearner` with its only CPU sampler
  ("vanilla"). Threads call the sampler for each trajectory separately, and every turn
  prefills all earlier tokens. Its metrics need another forward pass per trajectory.
* tunix in step: the same learner, but we batch all trajectories' turns in one sampler
  call: the best that tunix's parts can do.

Our seconds are per phase. tunix's `learn` is `update_actor`; `other` is the rest, which
overlaps in threads: sampling, tools, scoring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.agentic import NEW, trajectory_job
from experiments.bench.train_work import SIZES

PROMPTS = 8  # per step
SAMPLES = 4  # per prompt
# Name -> size, whether tools take time.
CASES = {"5M tools": ("5M", True), "5M no latency": ("5M", False)}
_AGREE = 0.9  # fraction of trajectories


def check_tokens(first: Mapping[str, Sequence[Sequence[int]]]) -> None:
  """Refuses contestants with other tokens than ours in over a tenth of trajectories."""
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
  """Measures one size; returns a table row per latency and contestant, ours first.

  Args as for `agentic.measure`, in float32; `rounds` are steps, `prompts` are groups
  per step.
  """
  job = trajectory_job(model, "float32", new)
  job |= {"prompts": prompts, "samples": SAMPLES}
  trajectories = prompts * SAMPLES
  rows = []
  with peers.contestants("experiments.bench.rl_work", job, pythons) as workers:
    for latency in latencies:
      # --- Interleaved steps. Later, rounding lets weights diverge, so no check.
      check = None if rows else check_tokens
      turns = peers.warm_turns(workers, rounds, check, latency=latency)

      # --- One row per contestant.
      for who, answers in turns.items():
        seconds = peers.median(answers)
        cpu_seconds = peers.median(answers, "cpu_seconds")
        phases = [answer["phases"] for answer in answers]
        row = {
          "size": name,
          "tools": "0.1-0.3 s" if latency else "0 s",
          "contestant": who,
          "trajectories_per_second": trajectories / seconds,
          "steps_per_minute": 60 / seconds,
          "cpu_seconds": cpu_seconds,
          "trajectories_per_cpu_second": trajectories / cpu_seconds,
          "slowest": max(t["seconds"] for t in answers),
          "fastest": min(t["seconds"] for t in answers),
          "peak_mb": answers[-1]["peak_mb"],
        }
        for phase in phases[0]:
          row[f"seconds_{phase}"] = peers.median(phases, phase)
        rows.append(row)
        print(f"{name}, {row['tools']}, {who}: {seconds:.2f} s a step", flush=True)
  return rows


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
  """Runs the selected cases; returns the table and the ratios."""
  quick = bench.QUICK.value
  small = {}
  if quick:
    small = {"prompts": 2, "new": 16}
  pythons = bench.available("tunix")
  if "tunix" in pythons and not quick:
    pythons["tunix in step"] = pythons["tunix"]
  rows = []
  for (size,), latencies in bench.by_model(bench.chosen(CASES)).items():
    if quick:
      size = "1M"
    model = SIZES[size].model
    rows += measure(size, model, pythons, latencies, bench.rounds(), **small)
  # Processor time is comparable on a loaded machine, too, but excludes waiting.
  figures = ("trajectories_per_second", "trajectories_per_cpu_second")
  return {"table": rows, "ratios": bench.ratios(rows, ["size", "tools"], figures)}


NOTE = (
  f"{PROMPTS} x {SAMPLES} trajectories a step (--quick: 2 x {SAMPLES}); medians of "
  "seconds; wait: for tools alone."
)

if __name__ == "__main__":
  run_program(bench.program(run, "Steps of RL with tools", _COLUMNS, NOTE))

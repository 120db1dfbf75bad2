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

from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.agentic import NEW, trajectory_job
from experiments.bench.train_work import SIZES

PROMPTS = 8  # of a step
SAMPLES = 4  # of a prompt
# Name -> size, whether tools take time.
CASES = {"5M tools": ("5M", True), "5M no latency": ("5M", False)}
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

  Args as of `agentic.measure`, in float32; `rounds` are steps, `prompts` their groups.

  Raises:
    ValueError: trajectories differ, or a worker ended.
  """
  job = trajectory_job(model, "float32", new)
  job |= {"prompts": prompts, "samples": SAMPLES}
  trajectories = prompts * SAMPLES
  rows = []
  with peers.contestants("experiments.bench.rl_work", job, pythons) as workers:
    for latency in latencies:
      # --- A step each, by turns. Later on rounding lets their weights drift apart.
      check = None if rows else check_tokens
      turns = peers.warm_turns(workers, rounds, check, steps=1, latency=latency)

      # --- A row for each.
      for who, answers in turns.items():
        seconds = peers.median(answers)
        phases = [answer["phases"] for answer in answers]
        row = {
          "size": name,
          "tools": "0.1-0.3 s" if latency else "0 s",
          "contestant": who,
          "trajectories_per_second": trajectories / seconds,
          "steps_per_minute": 60 / seconds,
          "cpu_seconds": peers.median(answers, "cpu_seconds"),
          "slowest": max(t["seconds"] for t in answers),
          "fastest": min(t["seconds"] for t in answers),
          "peak_mb": answers[-1]["peak_mb"],
        }
        for phase in phases[0]:
          row[f"seconds_{phase}"] = peers.median(phases, phase)
        rows.append(row)
        print(f"{name}, {row['tools']}, {who}: {seconds:.2f} s a step", flush=True)
  return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Our trajectories/s over theirs, and their processor time over ours, by name.

  The second holds on a machine that others load too, and knows nothing of waiting.
  """
  rate = "trajectories_per_second"
  out = {}
  for row, own in bench.against_ours(rows, "size", "tools"):
    name = f"{row['size']}, tools of {row['tools']}, over {row['contestant']}"
    out[name] = own[rate] / row[rate]
    out[f"{name}, in processor time"] = row["cpu_seconds"] / own["cpu_seconds"]
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
  return {"table": rows, "ratios": ratios(rows)}


NOTE = (
  f"{PROMPTS} x {SAMPLES} trajectories a step (--quick: 2 x {SAMPLES}); medians of "
  "seconds; wait: for tools alone."
)

if __name__ == "__main__":
  run_program(bench.program(run, "Steps of RL with tools", _COLUMNS, NOTE))

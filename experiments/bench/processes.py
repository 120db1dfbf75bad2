r"""Bytes that go through one of several processes, and that it holds, in a step.

  python -m experiments.bench.processes [--counts=2,4,8] [--out=FILE.json]

Starts so many real processes on loopback, of one CPU device each. Every one has played
four groups of four made-up trajectories of 512 to 2,048 tokens, half of them the
policy's; all learn one step of RL from all of them, and one of SFT. So a column that
stays as it is from line to line does not grow with the number of hosts.

"JSON to all" sends the trajectories as RL and evaluation did before: everything to
everybody. "Global batch" is what a host made of them then. "Scored" is what evaluation
sends now. Bytes are counted where arrays are handed to JAX, those to and from other
processes, of the process that has most; messages of tokens go padded by up to 1/8 more.
Expect a minute or two.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags

from experiments.bench import program as bench
from experiments.launch import run_program

# Programs are compiled without care: what is counted does not depend on them.
_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_COUNTS = flags.DEFINE_list("counts", ["2", "4", "8"], "Numbers of processes.")
LENGTH = 2_048
GROUPS = 4  # that each process has played

_COLUMNS = {
  "processes": "processes",
  "trajectories": "trajectories",
  "tokens": "tokens",
  "json": "JSON to all: received MB",
  "outcomes": "outcomes: received MB",
  "scored": "scored: received MB",
  "sent": "tokens: sent MB",
  "received": "received MB",
  "global": "global batch MB",
  "held": "RL's batch held MB",
  "sft": "SFT's MB",
}


def run_processes(count: int, groups: int, length: int) -> list[dict[str, Any]]:
  """What each of so many processes prints.

  Raises:
    RuntimeError: one of them failed; with the end of what it said.
  """
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  job = {"address": address, "processes": count, "groups": groups, "length": length}

  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "job.json")
    with open(path, "w", encoding="utf-8") as f:
      json.dump(job, f)

    def run(i: int) -> dict[str, Any]:
      command = [sys.executable, "-m", "experiments.bench.processes_work", path, str(i)]
      env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICKLY}
      done = subprocess.run(command, env=env, capture_output=True, text=True)
      if done.returncode:
        raise RuntimeError(f"process {i} of {count} failed: {done.stderr[-2000:]}")
      return json.loads(done.stdout.splitlines()[-1])

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
      return list(threads.map(run, range(count)))


def line(count: int, each: list[dict[str, Any]]) -> dict[str, Any]:
  """The table's line: of each figure the process that has most."""

  def most(*names: str) -> int:
    values = []
    for figures in each:
      for name in names:
        figures = figures[name]
      values.append(figures)
    return max(values)

  held = most("rl", "learn", "held")
  sizes = {
    "json": most("rl", "json", "received"),
    "outcomes": most("rl", "outcomes", "received"),
    "scored": most("rl", "scored", "received"),
    "sent": most("rl", "learn", "sent"),
    "received": most("rl", "learn", "received"),
    "global": held * count,
    "held": held,
    "sft": most("sft", "held"),
  }
  return {
    "processes": count,
    "trajectories": each[0]["rl"]["trajectories"],
    "tokens": each[0]["tokens"],
    **{name: size / 1e6 for name, size in sizes.items()},
  }


def figures() -> dict[str, Any]:
  """The table's lines."""
  rows = []
  for count in map(int, _COUNTS.value):
    if bench.QUICK.value:
      rows.append(line(count, run_processes(count, groups=1, length=256)))
    else:
      rows.append(line(count, run_processes(count, GROUPS, LENGTH)))
  return {"table": rows, "ratios": {}}


main = bench.program(
  figures,
  "bytes of one process and step",
  _COLUMNS,
  "MB are 10^6 bytes, of the process that has most",
)

if __name__ == "__main__":
  run_program(main)

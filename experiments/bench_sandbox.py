"""Programs a second: the jail, our subprocess back-end and a plain subprocess.

  python -m experiments.bench_sandbox [--quick] [--cases=REGEX] [--out=FILE.json]

Three programs (print, numpy, sympy), one and two callers, the contestants by turns in
every round. The plain one starts an interpreter for each program, as a harness without
any of ours would. Every answer is checked. Ratios are the jail's runs per second with
one caller over the plain subprocess's: above 1 the jail is faster.

Expect (two cores that others used too): 1.7 to 1.9 for print, 8 to 9 for numpy, 13 to
19 for sympy; p50 of the jail 8 to 10 ms for print, 2 minutes with --rounds=2.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import app

from experiments import bench
from tools_sandbox.client import Sandbox

# Name -> program, what it prints.
PROGRAMS = {
  "print": ("print(1 + 1)", "2"),
  "numpy": (
    "import numpy as np\nprint(round(np.linalg.det(np.eye(50) * 1.0), 3))",
    "1.0",
  ),
  "sympy": (
    "import sympy as sp\nx = sp.symbols('x')\nprint(sp.factor(x**3 - 1))",
    "(x - 1)*(x**2 + x + 1)",
  ),
}
CALLERS = (1, 2)
RATIOS = {"print": "executions", "numpy": "numpy", "sympy": "sympy"}
_RUNS = {"jail": 100, "subprocess": 100, "plain": 10}  # of each caller in a round
_COLUMNS = {
  "program": "program",
  "callers": "callers",
  "name": "contestant",
  "p50_ms": "p50 ms",
  "p99_ms": "p99 ms",
  "per_s": "runs/s",
}


def _plain(program: str) -> str:
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  return done.stdout


def timed(
  run: Callable[[str], str], program: str, expected: str, callers: int, runs: int
) -> tuple[list[float], float]:
  """Runs a program `runs` times from each of `callers` threads.

  Returns:
    Seconds of each run, and runs per second of all callers together.

  Raises:
    ValueError: a run printed something else.
  """
  seconds: list[float] = []
  wrong: list[str] = []

  def work() -> None:
    for _ in range(runs):
      start = time.perf_counter()
      said = run(program).strip()
      seconds.append(time.perf_counter() - start)
      if said != expected:
        wrong.append(said)

  threads = [threading.Thread(target=work) for _ in range(callers)]
  start = time.perf_counter()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  total = time.perf_counter() - start
  if wrong:
    raise ValueError(f"{len(wrong)} runs of {program!r} printed {wrong[0]!r}")
  return seconds, len(seconds) / total


def run() -> dict[str, Any]:
  """Times every contestant by turns; see the file's docstring."""
  programs = bench.chosen(PROGRAMS)
  rounds = 1 if bench.QUICK.value else bench.ROUNDS.value
  found: dict[tuple[str, int, str], tuple[list[float], list[float]]] = {}
  slots = max(CALLERS)
  with Sandbox(slots, backend="jail") as jail, Sandbox(slots) as sandbox:
    contestants = {
      "jail": lambda p: jail.run(p).stdout,
      "subprocess": lambda p: sandbox.run(p).stdout,
      "plain": _plain,
    }
    for name in ("jail", "subprocess"):  # both slots of each
      timed(contestants[name], *PROGRAMS["print"], slots, 10)
    for _ in range(rounds):
      for title, (program, expected) in programs.items():
        for callers in CALLERS:
          for name, contestant in contestants.items():
            seconds, rate = timed(contestant, program, expected, callers, _RUNS[name])
            every, rates = found.setdefault((title, callers, name), ([], []))
            every += seconds
            rates.append(rate)
  table, rate_of = [], {}
  for (title, callers, name), (seconds, rates) in found.items():
    cuts = statistics.quantiles(seconds, n=100)
    rate_of[title, callers, name] = statistics.median(rates)
    table.append(
      {
        "program": title,
        "callers": callers,
        "name": name,
        "p50_ms": round(cuts[49] * 1e3, 2),
        "p99_ms": round(cuts[98] * 1e3, 2),
        "per_s": round(rate_of[title, callers, name], 1),
      }
    )
  ratios = {
    f"{RATIOS[t]}_vs_subprocess": rate_of[t, 1, "jail"] / rate_of[t, 1, "plain"]
    for t in programs
  }
  return {"table": table, "ratios": ratios, "rounds": rounds}


main = bench.program(
  run,
  "Programs in a sandbox",
  _COLUMNS,
  "p50 and p99 over all runs, runs/s the median of the rounds",
)

if __name__ == "__main__":
  app.run(main)

"""Programs per second: the jail, our subprocess back-end, bubblewrap, a plain process.

  python -m experiments.bench.sandbox [--quick] [--cases=REGEX] [--out=FILE.json]

Three programs (print, numpy, sympy) run with 1, 2, 8 and 64 callers; every round
interleaves the contestants. Our two back-ends, the jail and subprocess, have two slots
each. The plain process starts an interpreter per program, like a harness without our
code; bubblewrap, if on PATH, starts an interpreter behind similar walls.
Every answer is checked. A ratio is the jail's runs per second with one caller over the
plain process's: above 1 the jail is faster. Last, one session runs cells in sequence.

Expect these ratios (two cores, alone): 2.7 for print, 10 for numpy, 25 for sympy. With
--rounds=1 expect two minutes, mostly for 64 callers of a plain sympy.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from coa_jax.cli.launch import run_program
from experiments.bench import program as bench
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
CALLERS = (1, 2, 8, 64)
_CELLS = 3000
SLOTS = 2
RATIOS = {"print": "executions", "numpy": "numpy", "sympy": "sympy"}
_RUNS = {"jail": 128, "subprocess": 128}  # runs per round, all callers together
_FEW = 16  # for the other contestants
_COLUMNS = {
  "program": "program",
  "callers": "callers",
  "name": "contestant",
  "p50_ms": "p50 ms",
  "p99_ms": "p99 ms",
  "per_s": "runs/s",
}
_PYTHON = os.path.realpath(sys.executable)
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def _command(*command: str) -> Callable[[str], str]:
  """Makes a function that runs a program as the command's last argument."""

  def run(program: str) -> str:
    return subprocess.run(
      [*command, program], capture_output=True, text=True, env=_ENVIRONMENT, check=False
    ).stdout

  return run


def _readable() -> list[str]:
  """Host paths that an interpreter with our packages needs."""
  packages = [p for p in sys.path if p.endswith("site-packages")]
  folders = [sys.base_prefix, sys.prefix, *packages]
  folders += ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]
  return [p for p in dict.fromkeys(map(os.path.realpath, folders)) if os.path.exists(p)]


def others() -> dict[str, Callable[[str], str]]:
  """A plain process, and bubblewrap if installed."""
  # A linked interpreter still finds its packages, by its own folder.
  python = [sys.executable, "-I", "-c"]
  contestants = {"plain": _command(*python)}
  path = shutil.which("bwrap")
  if path is None:
    print("bubblewrap: not on PATH, left out")
    return contestants
  binds = []
  for folder in _readable():
    binds += ["--ro-bind", folder, folder]
  walls = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
  # If /lib is a link, binding its target does not make /lib.
  links = []
  for name in ("lib64", "lib"):
    if os.path.islink(f"/{name}"):
      links += ["--symlink", f"usr/{name}", f"/{name}"]
  # The scratch folder first: an environment below /tmp goes into it.
  scratch = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
  contestants["bubblewrap"] = _command(path, *walls, *scratch, *binds, *links, *python)
  return contestants


def timed(
  run: Callable[[str], str], program: str, expected: str, callers: int, runs: int
) -> tuple[list[float], float]:
  """Runs a program `runs` times, shared by `callers` threads; checks every answer.

  Returns the seconds of each run, and all callers' runs per second.
  """

  def work(_: int) -> float:
    start = time.perf_counter()
    output = run(program).strip()
    took = time.perf_counter() - start
    if output != expected:
      raise ValueError(f"a run of {program!r} printed {output!r}")
    return took

  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(callers) as pool:
    seconds = list(pool.map(work, range(max(runs, callers))))
  return seconds, len(seconds) / (time.perf_counter() - start)


def latencies(seconds: Sequence[float], per_s: float) -> dict[str, float]:
  """Returns a row's columns from single runs' seconds and all callers' runs/s."""
  cuts = statistics.quantiles(seconds, n=100)
  return {
    "p50_ms": round(cuts[49] * 1e3, 2),
    "p99_ms": round(cuts[98] * 1e3, 2),
    "per_s": round(per_s, 1),
  }


def measure() -> dict[str, Any]:
  """Times the interleaved contestants; see the file's docstring."""
  programs = bench.chosen(PROGRAMS)
  # Program, callers, contestant -> seconds of all runs, and runs per second by round.
  seconds_of: dict[tuple[str, int, str], list[float]] = collections.defaultdict(list)
  rates_of: dict[tuple[str, int, str], list[float]] = collections.defaultdict(list)
  with Sandbox(SLOTS) as jail, Sandbox(SLOTS, backend="subprocess") as sandbox:
    contestants = {
      "jail": lambda p: jail.run(p, timeout_s=60).stdout,
      "subprocess": lambda p: sandbox.run(p, timeout_s=60).stdout,
      **others(),
    }
    # --- Start both slots of each back-end.
    for name in _RUNS:
      timed(contestants[name], *PROGRAMS["print"], SLOTS, 20)

    # --- The rounds: every program, number of callers and contestant.
    callers_of = CALLERS
    if bench.QUICK.value:
      callers_of = CALLERS[:2]
    turns = itertools.product(programs, callers_of, contestants)
    for title, callers, name in list(turns) * bench.rounds():
      program, expected = programs[title]
      runs = _RUNS.get(name, _FEW)
      try:
        seconds, rate = timed(contestants[name], program, expected, callers, runs)
      except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
      seconds_of[title, callers, name] += seconds
      rates_of[title, callers, name].append(rate)

  # --- The table; the session counts as another program.
  table = []
  per_s = {case: statistics.median(rates) for case, rates in rates_of.items()}
  for (title, callers, name), rate in per_s.items():
    columns = latencies(seconds_of[title, callers, name], rate)
    table.append({"program": title, "callers": callers, "name": name, **columns})
  cells = _cells()
  table.append({"program": "session", "callers": 1, "name": "jail", **cells})
  ratios = {}
  for title in programs:
    ratio = per_s[title, 1, "jail"] / per_s[title, 1, "plain"]
    ratios[f"{RATIOS[title]}_vs_subprocess"] = ratio
  return {
    "table": table,
    "ratios": ratios,
    "rounds": bench.rounds(),
    "cells_per_s": cells["per_s"],
  }


def _cells() -> dict[str, float]:
  """Times one session's cells in sequence; the target is 1,000 per second."""
  seconds = []
  with Sandbox(1) as jail, jail.session(timeout_s=600) as session:
    for i in range(_CELLS):
      start = time.perf_counter()
      output = session.run(f"x = {i}\nprint(x)").stdout
      seconds.append(time.perf_counter() - start)
      if output != f"{i}\n":
        raise ValueError(f"cell {i} printed {output!r}")
  return latencies(seconds, _CELLS / sum(seconds))


NOTE = "p50 and p99 over all runs, runs/s the median of the rounds"

if __name__ == "__main__":
  run_program(bench.program(measure, "Programs in a sandbox", _COLUMNS, NOTE))

"""Programs a second through the HTTP service against the same pool in process.

  python -m experiments.bench.service [--quick] [--cases=REGEX] [--out=FILE.json]

`print(1 + 1)` by 1, 8 and 64 callers on two slots of the jail; the pool in this process
and a `python -m tools_sandbox.service.server` on loopback by turns, every answer
checked. The callers are threads of this process, so their HTTP costs share its cores:
on a machine of their own the service has more for its programs. Ratios are the
service's runs per second over the pool's: what HTTP costs.

Expect (two cores under a load of 9): 0.98, 0.90 and 0.87; two minutes. In process the
p50 of many callers is short and the p99 long: whoever has just had a slot often gets it
again. The service's queue is first come first served.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from experiments.bench import program as bench
from experiments.bench.sandbox import RunTimings, timed
from experiments.launch import run_program
from tools_sandbox.client import Sandbox
from tools_sandbox.service.remote import RemoteConfig

PROGRAM, EXPECTED = "print(1 + 1)", "2"
CALLERS = {"1 caller": 1, "8 callers": 8, "64 callers": 64}
SLOTS = 2
_RUNS = 192  # of all callers in a round
_COLUMNS = {
  "callers": "callers",
  "name": "contestant",
  "p50_ms": "p50 ms",
  "p99_ms": "p99 ms",
  "per_s": "runs/s",
}


@contextlib.contextmanager
def _service() -> Iterator[str]:
  """A server's URL."""
  command = [sys.executable, "-m", "tools_sandbox.service.server", f"--slots={SLOTS}"]
  process = subprocess.Popen([*command, "--port=0"], stdout=subprocess.PIPE, text=True)
  try:
    line = process.stdout.readline()
    if " at http://" not in line:
      raise ValueError("the service did not start; it says why above")
    yield line.split()[-1]
  finally:
    process.terminate()
    process.wait()
    process.stdout.close()


def run() -> dict[str, Any]:
  """Times both by turns; see the file's docstring."""
  logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
  cases = bench.chosen(CALLERS)
  timings: dict[tuple[str, str], RunTimings] = collections.defaultdict(RunTimings)
  with contextlib.ExitStack() as stack:
    url = stack.enter_context(_service())
    # 64 callers queue for two slots: that is not the service being away.
    config = RemoteConfig((url,), wait_s=120.0)
    pools = {
      "in process": stack.enter_context(Sandbox(SLOTS, backend="jail")),
      "service": stack.enter_context(Sandbox(backend="remote", remote=config)),
    }

    def time_pool(name: str, callers: int, runs: int) -> tuple[list[float], float]:
      pool = pools[name]
      return timed(lambda p: pool.run(p).stdout, PROGRAM, EXPECTED, callers, runs)

    for name in pools:  # both slots of each
      time_pool(name, SLOTS, 10)
    for title, name in list(itertools.product(cases, pools)) * bench.rounds():
      callers = cases[title]
      seconds, rate = time_pool(name, callers, _RUNS // callers)
      timings[title, name].add(seconds, rate)
  ratios = {}
  for title in cases:
    service, own = timings[title, "service"].rates, timings[title, "in process"].rates
    pairs = zip(service, own, strict=True)
    ratios[f"{title}, service vs in process"] = statistics.median(
      theirs / ours for theirs, ours in pairs
    )
  table = [
    {"callers": title, "name": name, **t.columns}
    for (title, name), t in timings.items()
  ]
  return {"table": table, "ratios": ratios, "rounds": bench.rounds()}


main = bench.program(
  run,
  "The sandbox over HTTP",
  _COLUMNS,
  "p50 and p99 over all runs, runs/s the median of the rounds",
)

if __name__ == "__main__":
  run_program(main)

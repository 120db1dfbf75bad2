"""Many runs in one jail pool, some hostile: what they leave behind.

Of ten runs one is hostile (some at Landlock's and the control group's walls), one is
called off in the middle, as a client that hangs up does, and one is a session: every
second of these is left open, for its lease to end.

Of `bench.sandbox --soak=N`; a small one is a slow test.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from tools_sandbox.client import Sandbox
from tools_sandbox.faults import SessionEnded
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail import cgroup, landlock
from tools_sandbox.jail.wire import Limits, Verdict

EVERY = 10  # one run of so many is hostile
CALLERS = 8
SLOTS = 2
COLUMNS = {"what": "what", "before": "before", "after": "after"}
_PROGRAMS = (
  ("print(1 + 1)", "2\n"),
  ("import numpy as np\nprint(int(np.eye(9).sum()))", "9\n"),
  ("open('f', 'w').write('x' * 9999)\nprint(len(open('f').read()))", "9999\n"),
  ("import sympy as sp\nx = sp.symbols('x')\nprint(sp.factor(x**2 - 1))",
   "(x - 1)*(x + 1)\n"),
)  # fmt: skip
_DAEMON = "import os, time\nif not os.fork():\n  os.setsid()\n  {}\n"
# What a hostile program may come to; it may never come to `infrastructure`.
_HOSTILE = (
  "import os\nwhile True: os.fork()",
  "while True: pass",
  "x = []\nwhile True: x.append(bytearray(1 << 24))",
  "while True: open('f', 'ab').write(b'x' * (1 << 20))",
  "for i in range(10**6): open(str(i), 'w')",
  "while True: print('x' * 65536)",
  _DAEMON.format("time.sleep(999)"),
  _DAEMON.format("[os.fork() for _ in range(3)]; time.sleep(999)"),
  "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
  "import os\nfor i in range(3, 300):\n  try: os.write(i, b'x' * 99)\n"
  "  except OSError: pass",
  "import os\nos.makedirs('/'.join('d' * 300))\nos.chmod('d', 0)",
  "import os, threading, time\n"
  "for _ in range(99): threading.Thread(target=time.sleep, args=(99,)).start()",
  "import socket\nsocket.socket()",
  "import os\nos.close(1); os.close(2); os._exit(0)",
  "import os, time\nfor i in range(20):\n  if not os.fork():\n"
  "    x = b'x' * (60 << 20)\n    time.sleep(9)",  # between two samples
  "open('/proc/self/oom_score_adj', 'w').write('-1000')",
  "open('/dev/shm/../../site/x', 'w')",
)
# Limits of a hostile run.
_HOSTILE_S = 0.5
_HOSTILE_MB = 128
# Which of each EVERY.
_CALLED_OFF = 3
_SESSION = 6
_OFF_S = (0.0, 0.002, 0.02, 0.2)  # seconds after which a run is called off
_LEASE_S = 0.3
_SETTLE_S = 60.0
_MEGABYTES = 16  # of resident memory that a pool may gain


def _resident_mb(pids: list[int]) -> float:
  """Proportional resident memory of processes, in MiB."""
  kib = 0
  for pid in pids:
    try:
      with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as f:
        kib += sum(int(line.split()[1]) for line in f if line.startswith("Pss:"))
    except OSError:
      continue
  return kib / 1024


def _below() -> list[int]:
  """Processes below this one."""
  parents: dict[int, list[int]] = collections.defaultdict(list)
  for name in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{name}/stat", "rb") as f:
        parents[int(f.read().rpartition(b")")[2].split()[1])].append(int(name))
    except OSError:
      continue
  out: list[int] = []
  queue = [os.getpid()]
  while queue:
    below = parents.get(queue.pop(), [])
    out += below
    queue += below
  return out


def _ended(pid: int) -> bool:
  """Whether a process has ended and nobody has asked how."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as f:
      return f.read().rpartition(b")")[2].split()[0] == b"Z"
  except OSError:
    return False


def _count(path: str) -> int:
  try:
    with open(path, "rb") as f:
      return len(f.readlines())
  except OSError:
    return 0


def resources() -> dict[str, float]:
  """What this process and those below it hold now."""
  pids = _below()
  # A zygote lets its last run lie until it makes the next one.
  ended = min(sum(map(_ended, pids)), SLOTS)
  return {
    "processes": len(pids) - ended,
    "descriptors": len(os.listdir("/proc/self/fd")),
    "mounts here": _count("/proc/self/mountinfo"),
    "mounts of all": sum(_count(f"/proc/{pid}/mountinfo") for pid in pids),
    "folders": len(os.listdir(tempfile.gettempdir())),
    "control groups": _groups(),
    "MiB here": round(_resident_mb([os.getpid()]), 1),
    "MiB below": round(_resident_mb(pids), 1),
  }


def _groups() -> int:
  """Control groups below this process's own."""
  folders = set(cgroup._own_folders().values())
  own = f"tools-sandbox-{os.getpid()}-"
  return sum(n.startswith(own) for f in folders for n in os.listdir(f))


def _walls() -> dict[str, Any]:
  """Those that not every machine has."""
  groups = cgroup.check() or "in use"
  return {"landlock": landlock.version(), "control groups": groups}


def _call_off(pool: SandboxPool, i: int) -> list[str]:
  """Calls a run off; what was wrong."""
  cancel = Cancel()
  timer = threading.Timer(_OFF_S[i // EVERY % len(_OFF_S)], cancel)
  timer.start()
  limits = Limits(wall_s=60, cpu_s=60)
  result = pool.run("import time\ntime.sleep(50)", limits=limits, cancel=cancel)
  timer.join()
  fine = result.verdict == Verdict.INFRASTRUCTURE and "called off" in result.stderr
  return [] if fine else [f"called off: {result}"]


def _talk(pool: SandboxPool, i: int) -> list[str]:
  """Three cells of a session; every second one is left to its lease."""
  session = pool.session(Limits(wall_s=60, cpu_s=60), lease_s=_LEASE_S)
  output = ""
  try:
    for cell in ("x = 20", "x += int(input())", "print(x)"):
      result = session.run(cell, "1")
      output += result.stdout
  except SessionEnded:  # its lease, on a machine that is busy
    return []
  if i // EVERY % 2:
    session.close()
  return [] if output == "21\n" else [f"a session: {result}"]


@contextlib.contextmanager
def _temporary_folder() -> Iterator[None]:
  """A place for temporary files that nobody else uses."""
  before = tempfile.tempdir
  with tempfile.TemporaryDirectory() as folder:
    tempfile.tempdir = folder
    try:
      yield
    finally:
      tempfile.tempdir = before


def _settled(before: dict[str, float]) -> tuple[dict[str, float], list[str]]:
  """What is held once the last runs' namespaces are gone, and what is more by then."""
  after = resources()
  deadline = time.monotonic() + _SETTLE_S
  counts = [name for name in before if not name.startswith("MiB")]
  while time.monotonic() < deadline and any(after[n] > before[n] for n in counts):
    time.sleep(0.2)
    after = resources()
  leaks = [name for name in counts if after[name] > before[name]]
  leaks += [n for n in before if n not in counts and after[n] > before[n] + _MEGABYTES]
  return after, leaks


def soak(runs: int) -> dict[str, Any]:
  """Makes `runs` runs, checks their answers, compares what is held before and after.

  budget: one run of each kind, and the looks before and after all.

  Returns:
    "table" of what was held before and after, "ratios" of throughput (last tenth over
    first), "runs_per_s", and "verdicts" of the hostile programs.

  Raises:
    ValueError: an ordinary run gave a wrong answer, a hostile one broke the service, or
      something leaked.
  """
  warm = len(_HOSTILE) * EVERY
  report_every = max(warm + 1, runs // 20)
  # --- One run, by its number.
  wrong: list[str] = []
  ends: list[float] = []
  verdicts: collections.Counter[str] = collections.Counter()
  others = set(_below())
  with _temporary_folder(), Sandbox(SLOTS, backend="jail") as sandbox:
    pool = sandbox._pool

    def run(i: int) -> None:
      if i % EVERY == EVERY - 1:
        program = _HOSTILE[i // EVERY % len(_HOSTILE)]
        result = sandbox.run(program, timeout_s=_HOSTILE_S, memory_mb=_HOSTILE_MB)
        verdicts[result.verdict] += 1
        if result.verdict == Verdict.INFRASTRUCTURE:
          wrong.append(f"hostile {program!r}: {result.stderr[-300:]}")
      elif i % EVERY == _CALLED_OFF:
        wrong.extend(_call_off(pool, i))
      elif i % EVERY == _SESSION:
        wrong.extend(_talk(pool, i))
      else:
        program, expected = _PROGRAMS[i % len(_PROGRAMS)]
        result = sandbox.run(program, timeout_s=60)
        if (result.stdout, result.verdict) != (expected, Verdict.OK):
          wrong.append(f"{program!r}: {result}")
      ends.append(time.monotonic())
      if len(ends) % report_every == 0:
        print(f"{len(ends):,} of {runs:,} runs", flush=True)

    def drain(first: int, last: int) -> None:
      left = iter(range(first, last))

      def call() -> None:
        for i in left:  # each takes the next that nobody has taken
          run(i)

      threads = [threading.Thread(target=call) for _ in range(CALLERS)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()

    # --- All of them, between two looks at what is held.
    drain(0, warm)  # every program once: what they load stays loaded
    time.sleep(1)
    before = resources()
    ends.clear()
    start = time.monotonic()
    drain(warm, warm + runs)
    after, leaks = _settled(before)

  # --- A closed pool has no processes.
  deadline = time.monotonic() + _SETTLE_S
  while (left := set(_below()) - others) and time.monotonic() < deadline:
    time.sleep(0.2)
  if left:
    leaks.append("processes of a closed pool")
  # --- The figures.
  tenth = max(1, len(ends) // 10)
  first = tenth / (ends[tenth - 1] - start)
  last = first
  if tenth > 1:
    last = (tenth - 1) / (ends[-1] - ends[-tenth])
  if wrong or leaks:
    raise ValueError(f"leaks: {leaks} ({before} -> {after}); wrong: {wrong[:3]}")
  table = [{"what": n, "before": before[n], "after": after[n]} for n in before]
  return {
    "table": table,
    "walls": _walls(),
    "ratios": {"last_over_first_tenth": last / first},
    "runs": runs,
    "runs_per_s": {"first tenth": round(first, 1), "last tenth": round(last, 1)},
    "verdicts": dict(verdicts),
  }

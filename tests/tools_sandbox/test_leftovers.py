"""Runs, sessions and hosts leave nothing behind, however they end."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import proc
import pytest
from sandbox_server import soon

from tests.backend import MISSING, WHY, needs_jail
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail.wire import Limits, Verdict

ROOT = pathlib.Path(__file__).parents[2]
# The preload skips a missing module; its name identifies our slots' processes.
MARK = f"no_module_{os.getpid()}"


NAP = "p.run('import os, time; os.fork(); time.sleep(600)')"
HOSTS = {
  "subprocess, killed in a run": ("subprocess", "p.run('1')", NAP),
  "jail, closed": ("jail", "p.run('1')", "p.close()"),
  "jail, killed in a run": ("jail", "p.run('1')", NAP),
  "jail, killed in a session": ("jail", "p.session().run('1')", "time.sleep(600)"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_nothing_of_a_closed_or_killed_host_remains(tmp_path, name):
  backend, before, after = HOSTS[name]
  if backend == "jail" and MISSING:
    pytest.skip(WHY)
  program = (
    "import time\nfrom tools_sandbox.host.pool import SandboxPool\n"
    "from tools_sandbox.jail.wire import Limits\n"
    f"p = SandboxPool(1, Limits(wall_s=600), ({MARK!r},), backend={backend!r})\n"
    f"{before}\nprint('up', flush=True)\n{after}"
  )
  host = subprocess.Popen(
    [sys.executable, "-c", program],
    stdout=subprocess.PIPE,
    cwd=ROOT,
    env={**os.environ, "TMPDIR": str(tmp_path)},
  )
  assert host.stdout.readline() == b"up\n"
  if after != "p.close()":
    # Subprocess: zygote, program and its fork; jail: the slot's processes.
    soon(lambda: len(proc.naming(MARK)) >= 3)
    assert len(proc.groups(host.pid)) == len(proc.FOLDERS) * (backend == "jail")
    host.kill()
  host.wait(60)
  host.stdout.close()
  soon(lambda: not proc.naming(MARK) and not os.listdir(tmp_path))
  soon(lambda: not proc.groups(host.pid))


def runs(pool, rounds: int) -> None:
  """Programs, each leaving a process and a file."""
  for _ in range(10 * rounds):
    pool.run("import os\nos.fork()\nopen('f', 'w').write('x')")


def sessions(pool, rounds: int) -> None:
  """Sessions, each leaving a process."""
  for _ in range(2 * rounds):
    with pool.session() as s:
      s.run("import os\nif not os.fork(): import time; os.setsid(); time.sleep(600)")


# Programs that keep processes, threads, descriptors, memory or files.
GREEDY = (
  "import os\nwhile True: os.fork()",
  "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(999)",
  "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
  "x = []\nwhile True: x.append(bytearray(1 << 24))",
  "for i in range(10**6): open(str(i), 'w')",
  "import os\nos.makedirs('/'.join('d' * 300))\nos.chmod('d', 0)",
  "import threading, time\n"
  "for _ in range(99): threading.Thread(target=time.sleep, args=(99,)).start()",
  "import os\nos.close(1); os.close(2); os._exit(0)",
)


def greedy(pool, rounds: int) -> None:
  """Greedy programs, cancelled runs, sessions without a close."""
  limits = Limits(wall_s=0.5, memory_mb=128)
  for i in range(rounds):
    for program in GREEDY:
      result = pool.run(program, limits=limits)
      assert result.verdict != Verdict.INFRASTRUCTURE, (program, result)
    cancel = Cancel()
    timer = threading.Timer((0.0, 0.002, 0.02, 0.2)[i % 4], cancel)
    timer.start()
    called_off = pool.run("while True: pass", limits=limits, cancel=cancel)
    assert "called off" in called_off.stderr
    timer.join()
    pool.session(lease_s=0.1).run("x = 1")
    assert pool.run("print(1)").stdout == "1\n"


def held(folder: pathlib.Path) -> dict[str, int]:
  """Kind of resource -> how many the pools of this process hold now."""
  slots = proc.naming(MARK)
  return {
    "processes": len(slots),
    "descriptors of one": max(map(proc.descriptors, slots), default=0),
    "mounts of one": max(map(proc.mounts, slots), default=0),
    "descriptors": proc.descriptors(os.getpid()),
    "threads": threading.active_count(),
    "folders": len(os.listdir(folder)),
    "control groups": len(proc.groups(os.getpid())),
  }


def held_at_most(folder: pathlib.Path) -> dict[str, int]:
  """The most of each kind during a second: a slot's next init needs time to start."""
  seen = []
  for _ in range(20):
    seen.append(held(folder))
    time.sleep(0.05)
  return {kind: max(counts[kind] for counts in seen) for kind in seen[0]}


# An idle slot's counts vary a little. A leak adds to them in every run, and there are
# more runs than this.
SLACK = 3


@pytest.mark.slow
@pytest.mark.parametrize(
  ("backend", "work"),
  [
    ("subprocess", runs),
    pytest.param("jail", runs, marks=needs_jail),
    pytest.param("jail", sessions, marks=needs_jail),
    pytest.param("jail", greedy, marks=[needs_jail, pytest.mark.slow]),
  ],
)
def test_a_pool_holds_no_more_after_many(tmp_path, monkeypatch, backend, work):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  gc.collect()  # otherwise files left open by other tests may be closed meanwhile
  files = proc.descriptors(os.getpid())
  with SandboxPool(1, preload=(MARK,), runs_per_zygote=35, backend=backend) as pool:
    work(pool, 1)
    most = {kind: count + SLACK for kind, count in held_at_most(tmp_path).items()}
    work(pool, 8)
    soon(lambda: all(n <= most[kind] for kind, n in held(tmp_path).items()))
    assert (pool.replaced > 0) == (work is not sessions)  # a worn-out zygote
  soon(lambda: not proc.naming(MARK) and not os.listdir(tmp_path))
  assert proc.descriptors(os.getpid()) <= files

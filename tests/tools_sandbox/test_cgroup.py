"""Slots' control groups: real ones, if this machine lets us create them."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from tests.backend import BACKENDS, MISSING, needs_jail
from tests.tools_sandbox.proc import FOLDERS, groups
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail import cgroup
from tools_sandbox.jail.wire import Limits, Verdict

_why = MISSING or cgroup.check()
needs_group = pytest.mark.skipif(bool(_why), reason="; ".join(_why))


# Takes 30 x 60 MB faster than the sampler, which looks every 0.1 s.
BURST = """
import os, time
for i in range(30):
  if not os.fork():
    x = b'x' * (60 << 20)
    time.sleep(2)
    os._exit(0)
time.sleep(2)
"""

# Kernel memory, which no process holds: killing one frees little of it.
BUFFERS = """
import os, socket, time
for _ in range(20):
  if not os.fork(): break
pairs = []
while len(pairs) < 24:
  pairs += socket.socketpair()
  for s in pairs[-2:]:
    s.setblocking(False)
    try:
      while s.send(b'x' * 100000): pass
    except OSError: pass
time.sleep(1)
"""


def read(name: str, before: list[str] = ()) -> list[str]:
  """A file's content in each new group that has it; cgroup version 1 or 2."""
  new = [n for n in groups(os.getpid()) if n not in before]
  paths = {pathlib.Path(folder, n, name) for folder in FOLDERS for n in new}
  return [path.read_text() for path in paths if path.exists()]


@pytest.fixture
def pool():
  """A pool with one slot, whose control group is the only new one of this process."""
  before = groups(os.getpid())  # from pools not yet closed by other tests
  with SandboxPool(1, preload=()) as pool:
    assert pool.run("print(1)").stdout == "1\n"
    assert len(groups(os.getpid())) == len(before) + len(FOLDERS)
    pool.read = lambda name: read(name, before)
    yield pool
  assert set(groups(os.getpid())) <= set(before)


@needs_group
def test_a_slot_is_in_its_group_and_the_group_goes_with_it(pool):
  for text in pool.read("cgroup.procs"):
    processes = text.split()
    assert len(processes) >= 3  # keeper, first process, template
    assert str(os.getpid()) not in processes


@needs_group
def test_bounds_follow_the_limits_of_the_run(pool):
  bounds = []
  for mb, tasks in ((100, 5), (200, 50), (100, 5)):
    limits = Limits(memory_mb=mb, disk_mb=10, processes=tasks)
    assert pool.run("1", limits=limits).verdict == Verdict.OK
    (memory,) = pool.read("memory.limit_in_bytes") + pool.read("memory.max")
    (pids,) = pool.read("pids.max")
    bounds.append((int(memory) >> 20, int(pids)))
  (a, few), (b, many), again = bounds
  assert b - a == 100 and many - few == 45 and again == (a, few)
  assert a > 110 and few > 5


@needs_group
def test_a_slot_does_not_swap(pool):
  # With swap space and without this, a program beyond its limit is not killed.
  bounds = pool.read("memory.swappiness") + pool.read("memory.swap.max")
  assert all(int(bound) == 0 for bound in bounds)


@pytest.fixture
def tight(monkeypatch):
  """Groups of 100 MiB, whatever a run's limits say.

  The sampler of the total memory must not act first: it uses the run's larger limit.
  """
  limit = cgroup.Group.limit
  monkeypatch.setattr(cgroup.Group, "limit", lambda group, *_: limit(group, 100, 64))


@pytest.mark.slow
@needs_group
def test_the_kernel_ends_a_burst_between_two_samples(tight, pool):
  result = pool.run(BURST, limits=Limits(memory_mb=4000, wall_s=30))
  # The kernel kills the program itself, and the verdict is MEMORY; or it kills only
  # children, and the program sleeps to its end.
  (events,) = pool.read("memory.oom_control") + pool.read("memory.events")
  assert int(events.split("oom_kill ")[1].split()[0]) >= 1 and pool.replaced == 0
  assert result.verdict in (Verdict.MEMORY, Verdict.OK)
  assert pool.run("print(2)").stdout == "2\n"


@needs_group
def test_a_program_killed_for_memory_says_so(tight, pool):
  result = pool.run("x = b'x' * (900 << 20)", limits=Limits(memory_mb=2000))
  assert (result.verdict, result.exit_code) == (Verdict.MEMORY, -signal.SIGKILL)
  assert "memory" in result.stderr and pool.replaced == 0
  # A program that kills itself has not run out of memory.
  own = pool.run("import os\nos.kill(os.getpid(), 9)")
  assert (own.verdict, own.exit_code) == (Verdict.ERROR, -signal.SIGKILL)


@needs_group
def test_a_kill_for_memory_does_not_fail_the_next_run(pool):
  small = Limits(memory_mb=8, disk_mb=1, wall_s=60)
  for _ in range(3):
    assert pool.run(BUFFERS, limits=small).verdict == Verdict.MEMORY
    assert pool.run("print(2)").stdout == "2\n"


@needs_group
def test_groups_of_hosts_that_died_with_their_watchers_are_swept():
  gone = subprocess.Popen([sys.executable, "-c", ""])
  gone.wait()
  for folder in FOLDERS:
    os.mkdir(f"{folder}/tools-sandbox-{gone.pid}-0")
  before = groups(os.getpid())
  group = cgroup.Group.create()
  try:
    assert not groups(gone.pid)
    assert len(groups(os.getpid())) == len(before) + len(FOLDERS)
  finally:
    group.remove()
  assert set(groups(os.getpid())) <= set(before)


def test_version_2_needs_both_controllers_handed_down(tmp_path):
  own = tmp_path / "user" / "session" / "shell"
  own.mkdir(parents=True)
  handed = {"": "cpu memory pids", "user": "memory pids", "user/session": "memory"}
  for path, controllers in handed.items():
    (tmp_path / path / "cgroup.subtree_control").write_text(controllers + "\n")
    (tmp_path / path / "cgroup.procs").touch()

  def place(*controllers: str) -> str | None:
    return cgroup._handing_down(str(tmp_path), "user/session/shell", {*controllers})

  assert place("memory", "pids") == f"{tmp_path}/user"
  assert place("memory") == f"{tmp_path}/user/session"
  assert place("cpu", "pids") == str(tmp_path)
  assert place("memory", "hugetlb") is None
  (tmp_path / "user" / "cgroup.procs").unlink()  # as if we could not write it
  assert place("memory", "pids") == str(tmp_path)


@needs_jail
def test_without_groups_a_slot_works_as_before(monkeypatch):
  monkeypatch.setattr(cgroup, "_own_folders", lambda: {"pids": "/nowhere"})
  (why,) = cgroup.check()
  assert "no controller memory: not mounted" in why
  with SandboxPool(1, preload=()) as pool:
    before = groups(os.getpid())
    assert pool.run("print(1)").stdout == "1\n"
    assert groups(os.getpid()) == before
    result = pool.run("x = b'x' * (1 << 30)", limits=Limits(memory_mb=100))
    assert result.verdict == Verdict.MEMORY


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_is_called_off_and_the_slot_is_good(backend):
  with SandboxPool(1, preload=(), backend=backend) as pool:
    before = Cancel()
    before()
    assert pool.run("1", cancel=before).verdict == Verdict.INFRASTRUCTURE
    for _ in range(3):
      cancel = Cancel()
      timer = threading.Timer(0.2, cancel)
      timer.start()
      slow = Limits(wall_s=100, cpu_s=100)
      result = pool.run("import time\ntime.sleep(90)", limits=slow, cancel=cancel)
      timer.join()
      assert result.verdict == Verdict.INFRASTRUCTURE and result.exit_code is None
      assert "called off" in result.stderr and result.seconds < 60
      assert pool.run("print(1)").stdout == "1\n"
    done = Cancel()
    assert pool.run("print(2)", cancel=done).stdout == "2\n"
    done()  # nothing runs now
    assert pool.run("print(3)").stdout == "3\n" and pool.replaced == 0

"""Control groups of slots: real ones, where this machine lets us make them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.backend import BACKENDS, MISSING, needs_jail
from tests.tools_sandbox.sandbox_server import soon
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail import cgroup
from tools_sandbox.jail.wire import Limits, Verdict

_why = MISSING or cgroup.check()
needs_group = pytest.mark.skipif(bool(_why), reason="; ".join(_why))
# One for each controller in version 1, one for both in version 2.
FOLDERS = list(dict.fromkeys(cgroup._own_folders().values()))

# Takes 30 x 60 MB faster than a tenth of a second lets anybody look.
BURST = """
import os, time
for i in range(30):
  if not os.fork():
    x = b'x' * (60 << 20)
    time.sleep(2)
    os._exit(0)
time.sleep(2)
"""

# Memory of the kernel, which no process holds: killing one frees little of it.
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


def groups(pid: int) -> list[str]:
  """Names of the groups that a host process has made."""
  mine = f"tools-sandbox-{pid}-"
  return [n for folder in FOLDERS for n in os.listdir(folder) if mine in n]


@needs_group
def test_a_slot_is_in_its_group_and_the_group_goes_with_it():
  before = groups(os.getpid())  # of pools that other tests have not closed
  with SandboxPool(2, preload=()) as pool:
    assert pool.run("print(1)").stdout == "1\n"
    (zygote,) = pool._idle
    for folder in zygote._group.folders:
      with open(f"{folder}/cgroup.procs", encoding="ascii") as f:
        assert len(f.read().split()) >= 3  # keeper, first process, template
      with open(f"{folder}/cgroup.procs", encoding="ascii") as f:
        assert str(os.getpid()) not in f.read().split()
    assert len(groups(os.getpid())) == len(before) + len(FOLDERS)
  assert set(groups(os.getpid())) <= set(before)


@needs_group
def test_bounds_follow_the_limits_of_the_run():
  with SandboxPool(1, preload=()) as pool:
    seen = []
    for mb, tasks in ((100, 5), (200, 50), (100, 5)):
      limits = Limits(memory_mb=mb, disk_mb=10, processes=tasks)
      assert pool.run("1", limits=limits).verdict == Verdict.OK
      group = pool._idle[0]._group
      with open(group._memory(cgroup._LIMIT), encoding="ascii") as f:
        memory = int(f.read())
      with open(f"{group._folders['pids']}/pids.max", encoding="ascii") as f:
        seen.append((memory >> 20, int(f.read())))
    (a, few), (b, many), again = seen
    assert b - a == 100 and many - few == 45 and again == (a, few)
    assert a > 110 and few > 5


@needs_group
def test_the_kernel_ends_a_burst_between_two_samples(monkeypatch):
  # The sampler, which bounds the sum, must not be first: it gets a limit of its own.
  with SandboxPool(1, preload=()) as pool:
    assert pool.run("1").verdict == Verdict.OK
    group = pool._idle[0]._group
    monkeypatch.setattr(group, "limit", lambda mb, tasks: None)
    cgroup.Group.limit(group, 100, 64)
    result = pool.run(BURST, limits=Limits(memory_mb=4000, wall_s=30))
    # Either the program itself was chosen, and its end is told as memory's; or only
    # children were, and it slept on.
    with open(group._memory(cgroup._EVENTS), encoding="ascii") as f:
      kills = int(f.read().split("oom_kill ")[1].split()[0])
    assert kills >= 1 and pool.replaced == 0
    assert result.verdict in (Verdict.MEMORY, Verdict.OK)
    assert pool.run("print(2)").stdout == "2\n"


@needs_group
def test_a_program_killed_for_memory_says_so(monkeypatch):
  with SandboxPool(1, preload=()) as pool:
    assert pool.run("1").verdict == Verdict.OK
    group = pool._idle[0]._group
    monkeypatch.setattr(group, "limit", lambda mb, tasks: None)
    cgroup.Group.limit(group, 100, 64)
    result = pool.run("x = b'x' * (900 << 20)", limits=Limits(memory_mb=2000))
    assert (result.verdict, result.exit_code) == (Verdict.MEMORY, -signal.SIGKILL)
    assert "memory" in result.stderr and pool.replaced == 0
    # One that kills itself has not run out of anything.
    own = pool.run("import os\nos.kill(os.getpid(), 9)")
    assert (own.verdict, own.exit_code) == (Verdict.ERROR, -signal.SIGKILL)


@needs_group
def test_what_the_kernel_kills_for_one_run_is_no_failure_of_the_next():
  small = Limits(memory_mb=8, disk_mb=1, wall_s=60)
  with SandboxPool(1, preload=()) as pool:
    for _ in range(3):
      assert pool.run(BUFFERS, limits=small).verdict == Verdict.MEMORY
      assert pool.run("print(2)").stdout == "2\n"


@needs_group
def test_a_killed_host_leaves_no_group():
  code = (
    "import sys, time\nfrom tools_sandbox.host.pool import SandboxPool\n"
    "p = SandboxPool(1, preload=())\np.run('1')\nprint('up', flush=True)\n"
    "time.sleep(60)"
  )
  host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
  try:
    assert host.stdout.readline() == b"up\n" and len(groups(host.pid)) == len(FOLDERS)
  finally:
    host.kill()
    host.wait()
    host.stdout.close()
  soon(lambda: not groups(host.pid))


@needs_group
def test_groups_of_hosts_that_died_with_their_watchers_are_swept():
  gone = subprocess.Popen([sys.executable, "-c", ""])
  gone.wait()
  for folder in FOLDERS:
    os.mkdir(f"{folder}/tools-sandbox-{gone.pid}-0")
  before = groups(os.getpid())
  made = cgroup.Group.create()
  try:
    assert not groups(gone.pid) and len(groups(os.getpid())) == len(before) + len(
      FOLDERS
    )
  finally:
    made.remove()
  assert set(groups(os.getpid())) <= set(before)


def test_in_version_2_it_is_made_where_both_controllers_are_handed_down(tmp_path):
  own = tmp_path / "user" / "session" / "shell"
  own.mkdir(parents=True)
  handed = {"": "cpu memory pids", "user": "memory pids", "user/session": "memory"}
  for path, controllers in handed.items():
    (tmp_path / path / "cgroup.subtree_control").write_text(controllers + "\n")
    (tmp_path / path / "cgroup.procs").touch()

  def found(*controllers: str) -> str | None:
    return cgroup._handing_down(str(tmp_path), "user/session/shell", {*controllers})

  assert found("memory", "pids") == f"{tmp_path}/user"
  assert found("memory") == f"{tmp_path}/user/session"
  assert found("cpu", "pids") == str(tmp_path)
  assert found("memory", "hugetlb") is None
  (tmp_path / "user" / "cgroup.procs").unlink()  # as good as not ours to write
  assert found("memory", "pids") == str(tmp_path)


@needs_jail
def test_without_groups_a_slot_works_as_before(monkeypatch):
  monkeypatch.setattr(cgroup, "_own_folders", lambda: {"pids": "/nowhere"})
  (why,) = cgroup.check()
  assert "no controller memory: not mounted" in why
  with SandboxPool(1, preload=()) as pool:
    assert pool.run("print(1)").stdout == "1\n" and pool._idle[0]._group is None
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
    done()  # nothing runs any more
    assert pool.run("print(3)").stdout == "3\n" and pool.replaced == 0

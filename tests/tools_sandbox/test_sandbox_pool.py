"""SandboxPool: threads, broken zygotes and their replacement, no leftovers."""

import concurrent.futures
import os
import signal
import sys
import tempfile
import threading
import time

import proc
import pytest
from sandbox_server import holds, marks, soon

from tests.backend import BACKENDS
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail.wire import Limits, Verdict

KILL_ZYGOTE = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"


@pytest.fixture(autouse=True)
def own():
  """This test's processes: tools of other tests may run for the whole session."""
  before = proc.descendants()
  return lambda: proc.descendants() - before


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path, monkeypatch):
  """A private temporary folder: other pytest sessions have files in /tmp."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  yield
  assert not list(tmp_path.glob("tools-sandbox-*"))


def test_callers_are_served_in_the_order_of_their_arrival(tmp_path):
  log, begun, gate = (tmp_path / name for name in ("log", "begun", "gate"))
  with (
    SandboxPool(1, preload=(), backend="subprocess") as pool,
    concurrent.futures.ThreadPoolExecutor(9) as threads,
  ):

    def work(letter):
      for text in (letter, letter.upper()):
        pool.run(f"open({str(log)!r}, 'a').write({text!r})")

    first = f"{marks(begun)}\n{holds(gate)}"
    runs = [threads.submit(pool.run, first, limits=Limits(wall_s=60))]
    soon(begun.exists)
    for i, letter in enumerate("abcdefgh"):
      runs.append(threads.submit(work, letter))
      soon(lambda i=i: pool.waiting == i + 1)
    gate.touch()
    for run in runs:
      run.result(60)
    assert pool.waiting == 0
  # A caller that asks again queues behind all waiting callers.
  served = log.read_text()
  assert served[:8] == "abcdefgh" and sorted(served[8:]) == list("ABCDEFGH")


def test_a_caller_that_is_interrupted_gives_up_its_place(tmp_path, monkeypatch):
  begun, gate = tmp_path / "begun", tmp_path / "gate"
  with (
    SandboxPool(1, preload=(), backend="subprocess") as pool,
    concurrent.futures.ThreadPoolExecutor(1) as threads,
  ):
    first = threads.submit(pool.run, f"{marks(begun)}\n{holds(gate)}")
    soon(begun.exists)

    def interrupted(place, timeout=None):
      raise KeyboardInterrupt

    with monkeypatch.context() as patch:
      patch.setattr(concurrent.futures.Future, "result", interrupted)
      with pytest.raises(KeyboardInterrupt):
        pool.run("print(1)")
    assert pool.waiting == 0
    gate.touch()
    assert pool.run("print(2)").stdout == "2\n"
    assert first.result(60).stdout == "open\n"


def _meet(pool, folder, count):
  """Runs `count` programs; each ends only after all of them have begun."""
  folder.mkdir()
  program = (
    "import os, time, uuid\n"
    f"open({str(folder)!r} + '/' + str(uuid.uuid4()), 'w')\n"
    f"while len(os.listdir({str(folder)!r})) < {count}: time.sleep(0.01)\nprint('met')"
  )
  limits = Limits(wall_s=60, cpu_s=60)
  with concurrent.futures.ThreadPoolExecutor(count) as threads:
    runs = [threads.submit(pool.run, program, limits=limits) for _ in range(count)]
    assert [run.result().stdout for run in runs] == ["met\n"] * count


def test_slots_run_at_the_same_time(tmp_path):
  with SandboxPool(3, preload=(), backend="subprocess") as pool:
    _meet(pool, tmp_path / "here", 3)


def test_a_zygote_killed_between_runs_is_replaced(own):
  with SandboxPool(1, preload=(), backend="subprocess") as pool:
    assert pool.run("print(1)").stdout == "1\n"
    (zygote,) = own()
    os.kill(zygote, signal.SIGKILL)
    result = pool.run("print(2)")  # not started on the dead zygote, so retried
    assert (result.stdout, result.verdict) == ("2\n", Verdict.OK)


def test_a_program_that_kills_its_zygote_is_not_run_twice(tmp_path):
  log = tmp_path / "runs"
  with SandboxPool(1, preload=(), backend="subprocess") as pool:
    program = f"open({str(log)!r}, 'a').write('x')\n{KILL_ZYGOTE}while True: pass"
    result = pool.run(program)
    assert result.verdict == Verdict.INFRASTRUCTURE and result.exit_code is None
    assert "zygote" in result.stderr and log.read_text() == "x"
    assert pool.run("print(2)").stdout == "2\n"


def test_a_dead_zygote_is_replaced_before_it_is_missed(tmp_path, own):
  where = "import os\nprint(os.getppid())"
  with SandboxPool(2, preload=(), backend="subprocess") as pool:
    _meet(pool, tmp_path / "here", 2)
    before = own()
    assert pool.run(KILL_ZYGOTE).verdict == Verdict.INFRASTRUCTURE
    after = own()
    # A new zygote starts before a run needs it; but the ready one serves first.
    assert len(after) == 2 and len(after - before) == 1
    assert int(pool.run(where).stdout) in after & before


def test_daemons_of_a_killed_zygote_are_swept(tmp_path):
  pid_file = tmp_path / "pid"
  program = (
    "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork():\n"
    "    os._exit(0)\n  with open('pid', 'w') as f: f.write(str(os.getpid()))\n"
    f"  os.rename('pid', {str(pid_file)!r})\n  time.sleep(600)\n"
    f"while not os.path.exists({str(pid_file)!r}): time.sleep(0.01)\n"
    f"{KILL_ZYGOTE}time.sleep(99)"
  )
  with SandboxPool(1, preload=(), backend="subprocess") as pool:
    result = pool.run(program, limits=Limits(wall_s=60))
    assert result.verdict == Verdict.INFRASTRUCTURE
    daemon = int(pid_file.read_text())

    soon(lambda: proc.ended(daemon))


def test_a_wedged_zygote_is_replaced(monkeypatch):
  monkeypatch.setattr("tools_sandbox.host.slot._GRACE_S", 0.5)
  with SandboxPool(1, preload=(), backend="subprocess") as pool:
    pool.run("print(1)")
    program = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"
    result = pool.run(program, limits=Limits(wall_s=0.5))
    assert result.verdict == Verdict.INFRASTRUCTURE
    monkeypatch.undo()
    assert pool.run("print(2)").stdout == "2\n"


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/file"])
def test_a_zygote_that_cannot_start_is_infrastructure(monkeypatch, python):
  monkeypatch.setattr(sys, "executable", python)
  with SandboxPool(1, backend="subprocess") as pool:
    result = pool.run("print(1)")
  assert result.verdict == Verdict.INFRASTRUCTURE
  assert result.stderr.startswith("the zygote failed") or python in result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_ends_runs_in_flight(own, backend):
  pool = SandboxPool(1, preload=(), backend=backend)
  mark = f"in-flight-{os.getpid()}"
  sleeps = ["-c", "import time; time.sleep(600)", mark]
  program = f"import os, sys\nos.execv(sys.executable, [sys.executable, *{sleeps!r}])"
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    running = threads.submit(pool.run, program, limits=Limits(wall_s=60))
    soon(lambda: proc.naming(mark))
    waiting = threads.submit(pool.run, "print(1)")
    soon(lambda: pool.waiting == 1)
    pool.close()
    assert running.result(60).verdict == Verdict.INFRASTRUCTURE
    with pytest.raises(RuntimeError, match="the sandbox pool is closed"):
      waiting.result(60)
  soon(lambda: not own())
  with pytest.raises(RuntimeError, match="closed"):
    pool.run("print(1)")
  pool.close()


def test_a_zygote_outlives_the_thread_that_started_it(own):
  with SandboxPool(1, preload=(), backend="subprocess") as pool:
    thread = threading.Thread(target=pool.run, args=("print(1)",))
    thread.start()
    thread.join()
    (zygote,) = own()
    time.sleep(0.1)
    assert pool.run("import os\nprint(os.getppid())").stdout == f"{zygote}\n"


@pytest.mark.parametrize("kwargs", [{"slots": 0}, {"runs_per_zygote": 0}])
def test_bad_counts(kwargs):
  with pytest.raises(ValueError, match="at least 1"):
    SandboxPool(**kwargs)

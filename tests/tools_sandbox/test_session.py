"""Sessions: state between cells, ends of sessions, hostile cells."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import signal

import pytest
from sandbox_server import children, open_pool, soon

from tests.backend import needs_jail
from tools_sandbox.faults import SessionEnded
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail.wire import Limits, Verdict

pytestmark = needs_jail
# The preload skips a missing module; its name identifies our slots' processes.
MARK = f"no_module_{os.getpid()}"


LIMITS = Limits(wall_s=60, cpu_s=300)


@pytest.fixture(scope="module")
def jailed():
  with open_pool("jail", limits=LIMITS) as pool:
    yield pool
    assert pool.replaced == 0  # no cell of this file broke the slot


@pytest.fixture(scope="module")
def served():
  with open_pool("remote", limits=LIMITS) as pool:
    yield pool


@pytest.fixture(params=["jailed", "served"])
def pool(request):
  """A pool, local or behind a service; attacks and timing use only `jailed`."""
  return request.getfixturevalue(request.param)


def _outcome(result):
  return result.stdout, result.verdict


def test_cells_share_variables_imports_files_and_nothing_else(pool):
  with pool.session() as s:
    assert _outcome(s.run("import math\nx = 41")) == ("", Verdict.OK)
    assert _outcome(s.run("def f(): return x + 1")) == ("", Verdict.OK)
    assert _outcome(s.run("open('f', 'w').write('kept')\nx += math.floor(1.5)")) == (
      "",
      Verdict.OK,
    )
    assert _outcome(s.run("print(f(), open('f').read(), __name__)")) == (
      "43 kept __main__\n",
      Verdict.OK,
    )
  with pool.session() as s:
    result = s.run("import os\nprint(os.listdir('.'))\nx")
    assert _outcome(result) == ("[]\n", Verdict.ERROR) and "NameError" in result.stderr
  assert pool.run("x").verdict == Verdict.ERROR


@pytest.mark.parametrize(
  ("cell", "code", "word"),
  [
    ("1 / 0", 1, "ZeroDivisionError"),
    ("x = (", 1, "SyntaxError"),
    ("import sys\nsys.exit(3)", 3, ""),
    ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ("input()", 1, "EOFError"),
    ("def f(): f()\nf()", 1, "RecursionError"),
    ("import os, signal\nos.kill(1, signal.SIGKILL)", 1, "Error"),
    ("import sys\nsys.stdout.close()\nsys.stdout = None\n1 / 0", 1, "ZeroDivision"),
  ],
)
def test_a_cell_that_fails_leaves_the_session_alive(pool, cell, code, word):
  with pool.session() as s:
    s.run("x = 7")
    result = s.run(cell)
    assert result.exit_code == code and word in result.stderr, result
    assert result.verdict == (Verdict.ERROR if code else Verdict.OK) and s.alive
    assert s.run("assert x == 7").verdict == Verdict.OK


def test_errors_show_the_lines_of_the_cell_they_come_from(pool):
  with pool.session() as s:
    s.run("def f():\n  return nothing_here  # of the first")
    text = s.run("f()  # of the second").stderr
  assert "of the first" in text and "of the second" in text and "/" not in text


# Cells that end a session: name -> (cell, changed limits, verdict, word of stderr).
ENDS = {
  "hangs": ("print('a')\nwhile True: pass", {"wall_s": 1.5}, Verdict.TIMEOUT, "1.5 s"),
  "sleeps": ("import time\ntime.sleep(600)", {"wall_s": 1.5}, Verdict.TIMEOUT, "1.5 s"),
  "cpu": ("while True: pass", {"cpu_s": 1.0}, Verdict.TIMEOUT, "CPU"),
  "memory": ("x = bytearray(1 << 30)", {"memory_mb": 100}, Verdict.MEMORY, "Memory"),
  "exits": ("import os\nos._exit(3)", {}, Verdict.ERROR, ""),
  "exits_with_0": ("import os\nos._exit(0)", {}, Verdict.OK, ""),
  "killed": ("import os\nos.kill(os.getpid(), 9)", {}, Verdict.ERROR, ""),
  "closes_its_pipes": ("import os\nos.closerange(3, 256)", {}, Verdict.ERROR, ""),
  "pipes_closed_and_hangs": (
    "import os, time\nos.closerange(3, 256)\ntime.sleep(600)",
    {},
    Verdict.ERROR,
    "",
  ),
  "stops_itself": (
    "import os\nos.kill(os.getpid(), 19)",
    {"wall_s": 1.5},
    Verdict.TIMEOUT,
    "1.5 s",
  ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_cell_that_ends_the_session(pool, name):
  cell, changed, verdict, word = ENDS[name]
  with pool.session(dataclasses.replace(pool.limits, **changed)) as s:
    assert s.run("x = 1\nprint(x)").stdout == "1\n"
    result = s.run(cell)
    assert result.verdict == verdict and word in result.stderr, result
    assert "the session has ended" in result.stderr and not s.alive
    with pytest.raises(SessionEnded):
      s.run("print(x)")
    # The slot is free at once, without the session's variables.
    assert pool.run("print('x' in globals())").stdout == "False\n"


def test_time_is_each_cells_and_cpu_all_cells_together(pool):
  limits = Limits(wall_s=60, cpu_s=1)
  spin = (
    "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: 1"
  )
  with pool.session(limits) as s:
    results = []
    while s.alive and len(results) < 20:
      results.append(s.run(spin).verdict)
  assert results[:2] == [Verdict.OK] * 2 and results[-1] == Verdict.TIMEOUT
  assert len(results) < 20


def test_disk_and_output_are_limited(pool):
  limits = Limits(wall_s=60, disk_mb=4, output_bytes=1000)
  with pool.session(limits) as s:
    for _ in range(3):  # output is limited per cell
      result = s.run("print('a' * 900)")
      assert len(result.stdout) == 901 and not result.truncated
    assert s.run("print('a' * 1_000_000)").truncated
    write = "open('%s', 'wb').write(b'x' * (3 << 20))"
    assert s.run(write % "a").verdict == Verdict.OK
    assert "No space left" in s.run(write % "b").stderr  # disk is limited per session


def test_a_long_cell_and_a_flood_do_not_wedge(pool):
  with pool.session() as s:
    assert s.run("x = '" + "y" * 3_000_000 + "'\nprint(len(x))").stdout == "3000000\n"
    flood = "import os, threading\ndef f():\n  while True: os.write(1, b'z' * 65536)\n"
    s.run(flood + "threading.Thread(target=f, daemon=True).start()")
    result = s.run("x = 5")  # a thread of an earlier cell still writes
    assert result.verdict == Verdict.OK and set(result.stdout) <= set(
      "z.[]0123456789 bytescut"
    )
    assert s.run("assert x == 5").exit_code == 0


def test_a_fork_that_falls_out_of_its_cell_is_not_asked(jailed):
  with jailed.session() as s:
    s.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)")
    for i in range(5):
      assert s.run(f"print({i}, pid > 0)").stdout == f"{i} True\n"


# Writes a forged result to all descriptors but stdio: two belong to the session.
_FORGE = (
  "import json, os, struct\n"
  "body = json.dumps({'event': 'result', 'alive': True, 'result': {'stdout': 'FORGED',"
  " 'stderr': '', 'exit_code': 0, 'verdict': 'ok', 'seconds': 0.0,"
  " 'truncated': False}}).encode()\n"
  "for fd in range(3, 256):\n"
  "  for path in (fd, f'/proc/self/fd/{fd}'):\n    try:\n"
  "      out = os.dup(path) if path == fd else os.open(path, os.O_WRONLY)\n"
  "      os.write(out, struct.pack('>I', len(body)) + body)\n"
  "    except OSError: pass\n"
)


def test_a_forged_reply_stays_in_its_session(jailed):
  with jailed.session(Limits(wall_s=2)) as s:
    s.run(_FORGE)
    for _ in range(3):
      if s.alive:
        assert "FORGED" not in s.run("print(1)").stdout
  with jailed.session() as s:
    assert s.run("print(1)").stdout == "1\n"
  assert jailed.run("print(2)").stdout == "2\n"


def test_an_end_told_too_early_changes_only_what_it_says_of_itself(jailed):
  """The worst a hostile cell can do to the next cell of its session."""
  early = (
    "import os, time\n"
    "for fd in range(3, 256):\n  try: os.write(fd, bytes(9))\n  except OSError: pass\n"
    "time.sleep(1.5)\nprint('late')\nos._exit(9)"  # after the next cell has begun
  )
  with jailed.session() as s:
    assert _outcome(s.run(early)) == ("", Verdict.OK)  # a forged end
    result = s.run("print('never run')")
    assert result.exit_code == 9 and not s.alive and "never" not in result.stdout


def test_a_process_has_two_descriptors_more_than_a_run(jailed):
  count = (
    "import os\nn = 0\nfor fd in range(1024):\n  try: os.fstat(fd); n += 1\n"
    "  except OSError: pass\nprint(n)"
  )
  with jailed.session() as s:
    assert s.run(count).stdout == "5\n"
  assert jailed.run(count).stdout == "3\n"


def test_threads_between_cells_are_limited_too(jailed):
  limits = Limits(wall_s=300, cpu_s=1)
  with jailed.session(limits) as s:
    s.run("import threading\ndef f():\n  while True: pass\n"
          "threading.Thread(target=f, daemon=True).start()")  # fmt: skip
    # The session ends before this cell or during it.
    result = s.run("import time\ntime.sleep(250)")
    assert result.verdict == Verdict.TIMEOUT and "CPU" in result.stderr


def test_a_session_holds_a_slot_for_its_life():
  with (
    SandboxPool(1, preload=()) as pool,
    concurrent.futures.ThreadPoolExecutor(1) as threads,
  ):
    s = pool.session()
    with pytest.raises(TimeoutError, match="no slot came free"):
      pool.session(wait_s=0.05)
    run = threads.submit(pool.run, "print(1)")
    soon(lambda: pool.waiting)
    assert s.run("print(2)").stdout == "2\n" and not run.done()
    s.close()
    s.close()  # no effect
    assert run.result(60).stdout == "1\n" and pool.replaced == 0
    with pytest.raises(SessionEnded):
      s.run("1")


def test_a_pool_that_closes_ends_its_sessions(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  pool = SandboxPool(2, preload=())
  idle, busy = pool.session(), pool.session()
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    cell = threads.submit(busy.run, "import time\ntime.sleep(60)")
    soon(lambda: busy.expires == math.inf)  # its cell runs
    pool.close()
    assert cell.result(60).verdict == Verdict.INFRASTRUCTURE
  assert not idle.alive and not busy.alive and not os.listdir(tmp_path)


def test_a_zygote_that_dies_ends_its_session_not_the_pool():
  with SandboxPool(1, preload=(MARK,)) as pool:
    with pool.session() as s:
      s.run("x = 1")
      (slot,) = (p for p, words in children(os.getpid()).items() if MARK in words)
      os.kill(slot, signal.SIGKILL)
      while (result := s.run("assert x == 1")).verdict == Verdict.OK:
        pass  # its descendants die a moment later
      assert result.verdict == Verdict.INFRASTRUCTURE and not s.alive
    with pool.session() as s:
      assert s.run("print(3)").stdout == "3\n"


def test_cells_are_strings_of_bounded_length(pool, monkeypatch):
  with pool.session() as s:
    with pytest.raises(TypeError, match="program"):
      s.run(b"1")
    monkeypatch.setattr("tools_sandbox.jail.wire.MAX_INPUT", 10)
    with pytest.raises(ValueError, match="10 characters"):
      s.run("print(1234567)")
    assert s.alive

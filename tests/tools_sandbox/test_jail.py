"""Ordinary programs that must work in the jail, its limits, what it leaves behind."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from tests.backend import needs_jail
from tools_sandbox.client import Sandbox
from tools_sandbox.host import pool
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail import keeper
from tools_sandbox.jail.wire import Limits, Verdict

pytestmark = needs_jail

# Name -> program, stdin, what it prints.
ORDINARY = {
  "print": ("print(1 + 1)", "", "2\n"),
  "input": ("print(int(input()) + int(input()))", "1\n2\n", "3\n"),
  "stdin_by_lines": ("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n", "3\n"),
  "dev_stdin": ("print(open('/dev/stdin').read())", "\u00e9", "\u00e9\n"),
  "open_0": ("print(open(0).read())", "x", "x\n"),
  "dev_stdout": ("open('/dev/stdout', 'w').write('x')", "", "x"),
  "unicode": ("print('\u00e9\U0001f600 \u4e2d')", "", "\u00e9\U0001f600 \u4e2d\n"),
  "numpy": (
    "import numpy as np\nprint(round(np.linalg.det(np.diag([2., 3.])), 6))",
    "",
    "6.0\n",
  ),
  "numpy_fft": (
    "import numpy as np\nprint(np.fft.fft(np.ones(4)).real)",
    "",
    "[4. 0. 0. 0.]\n",
  ),
  "sympy_solve": (
    "import sympy as sp\nx = sp.symbols('x')\nprint(sp.solve(x**2 - 5*x + 6, x))",
    "",
    "[2, 3]\n",
  ),
  "sympy_integral": (
    "from sympy import *\nx = symbols('x')\nprint(integrate(sin(x) * x, x))",
    "",
    "-x*cos(x) + sin(x)\n",
  ),
  "files": (
    "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('hi')\n"
    "print(open('a/b/c').read(), os.listdir('.'))",
    "",
    "hi ['a']\n",
  ),
  "absolute_tmp": (
    "open('/tmp/x', 'w').write('y')\nprint(open('/tmp/x').read())",
    "",
    "y\n",
  ),
  "tempfile": (
    "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n  f.write('t')\n"
    "  f.seek(0)\n  print(f.read())",
    "",
    "t\n",
  ),
  "own_module": (
    "open('helper.py', 'w').write('x = 5')\nimport helper\nprint(helper.x)",
    "",
    "5\n",
  ),
  "modules_named_like_ours": (
    "for n in ('wire', 'kernel', 'zygote', 'child', 'run', 'landlock'):\n"
    "  open(n + '.py', 'w').write('x = 5')\n"
    "import wire, kernel, zygote, child, run, landlock\nprint(kernel.x)",
    "",
    "5\n",
  ),
  "sqlite": (
    "import sqlite3\nc = sqlite3.connect('db')\nc.execute('create table t (a)')\n"
    "c.execute('insert into t values (7)')\nc.commit()\n"
    "print(c.execute('select a from t').fetchone())",
    "",
    "(7,)\n",
  ),
  "threads": (
    "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(4) as e: print(list(e.map(abs, [-1, -2])))",
    "",
    "[1, 2]\n",
  ),
  "multiprocessing": (
    "from multiprocessing import Pool, Queue\ndef f(x): return x * x\n"
    "with Pool(2) as p: print(p.map(f, range(4)))",
    "",
    "[0, 1, 4, 9]\n",
  ),
  "asyncio": (
    "import asyncio\nasync def f():\n  await asyncio.sleep(0.01)\n  return 3\n"
    "print(asyncio.run(f()))",
    "",
    "3\n",
  ),
  "subprocess_python": (
    "import subprocess, sys\n"
    "print(subprocess.check_output([sys.executable, '-c', 'print(4)']).decode())",
    "",
    "4\n\n",
  ),
  "shared_memory": (
    "from multiprocessing import shared_memory\n"
    "s = shared_memory.SharedMemory(create=True, size=64)\ns.buf[0] = 9\n"
    "print(s.buf[0])\ns.close()\ns.unlink()",
    "",
    "9\n",
  ),
  "shutil_and_zip": (
    "import shutil, zipfile\nopen('a', 'w').write('z')\nshutil.copy2('a', 'b')\n"
    "with zipfile.ZipFile('c.zip', 'w') as z: z.write('b')\n"
    "print(zipfile.ZipFile('c.zip').namelist())",
    "",
    "['b']\n",
  ),
  "dates_and_zones": (
    "from datetime import datetime\nfrom zoneinfo import ZoneInfo\n"
    "print(datetime(2024, 7, 1, tzinfo=ZoneInfo('Europe/Paris')).utcoffset())",
    "",
    "2:00:00\n",
  ),
  "ssl_and_hashes": (
    "import ssl, hashlib, lzma, bz2, zlib, decimal, ctypes\n"
    "print(hashlib.sha256(b'').hexdigest()[:8])",
    "",
    "e3b0c442\n",
  ),
  "signals_to_itself": (
    "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('tick'))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()",
    "",
    "tick\n",
  ),
  "recursion": (
    "import sys\nsys.setrecursionlimit(20000)\n"
    "def f(n): return n and 1 + f(n - 1)\nprint(f(9000))",
    "",
    "9000\n",
  ),
  "who_am_i": (
    "import getpass, os\nprint(getpass.getuser(), os.getuid())",
    "",
    "sandbox 1000\n",
  ),
  "locks_between_processes": (
    "import fcntl, os\nf = open('f', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
    "fcntl.lockf(f, fcntl.LOCK_EX)\nif os.fork() == 0:\n  g = open('f', 'w')\n"
    "  for lock in (fcntl.flock, fcntl.lockf):\n    try:\n"
    "      lock(g, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "    except BlockingIOError: print('held', flush=True)\n  os._exit(0)\nos.wait()",
    "",
    "held\nheld\n",
  ),
  "asyncio_subprocess": (
    "import asyncio, sys\nasync def f():\n"
    "  p = await asyncio.create_subprocess_exec(\n"
    "      sys.executable, '-c', 'print(input())', stdin=-1, stdout=-1)\n"
    "  print((await p.communicate(b'6'))[0])\nasyncio.run(f())",
    "",
    "b'6\\n'\n",
  ),
  "the_machine": (
    "import os, shutil\nprint(os.cpu_count() > 0, len(os.sched_getaffinity(0)) > 0,\n"
    "      shutil.disk_usage('.').total >> 20,\n"
    "      os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGESIZE') >> 20)",
    "",
    "True True 128 1024\n",
  ),
  "exit_hooks": ("import atexit\natexit.register(print, 'bye')", "", "bye\n"),
}


@pytest.fixture(scope="module")
def jailed():
  with Sandbox(slots=1, backend="jail", timeout_s=60) as sandbox:
    yield sandbox


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary(jailed, name):
  program, stdin, expected = ORDINARY[name]
  result = jailed.run(program, stdin)
  assert (result.stdout, result.verdict) == (expected, Verdict.OK), result


def test_long_output_is_cut_and_odd_bytes_replaced(jailed):
  result = jailed.run("print('x' * 3_000_000)")
  assert result.truncated and result.verdict == Verdict.OK
  result = jailed.run("import os\nos.write(1, b'a\\xff\\x00b')")
  assert result.stdout == "a\ufffd\x00b"


def test_the_same_program_draws_the_same_numbers_in_every_slot(jailed):
  program = (
    "import random, numpy\nprint(random.random(), numpy.random.rand(), hash('a'))"
  )
  with Sandbox(slots=1, backend="jail") as other:
    assert jailed.run(program).stdout == other.run(program).stdout
  assert jailed.run(program).stdout == jailed.run(program).stdout
  assert jailed.run(program).stdout != jailed.run(program + "\n").stdout


def test_of_the_path_only_installed_packages_are_mounted(monkeypatch, tmp_path):
  # As an editable install's .pth leaves it, pip's own folder for them included.
  editable = [tmp_path / "repository", tmp_path / "venv" / "src" / "package"]
  installed = tmp_path / "venv" / "lib" / "site-packages"
  for folder in (*editable, installed):
    folder.mkdir(parents=True)
  monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
  monkeypatch.setattr(sys, "path", ["", *map(str, editable), str(installed)])
  places, path, _ = keeper._layout()
  assert path == [places[os.path.realpath(installed)]]
  own = {os.path.dirname(keeper.__file__), os.path.realpath(sys.base_prefix)}
  others = set(places) - own - set(keeper._SYSTEM)
  assert others == {os.path.realpath(installed)}


def test_errors_name_no_folder_of_the_host(jailed):
  for program in ("from numpy import no_such", "import no_such", "open('/a/b')"):
    text = jailed.run(program).stderr.replace("'/a/b'", "")
    assert text and "/" not in text, text


@pytest.mark.parametrize(
  ("program", "changed", "verdict", "word"),
  [
    ("while True: pass", {"wall_s": 0.5}, Verdict.TIMEOUT, "0.5 s"),
    ("while True: pass", {"cpu_s": 1, "wall_s": 300}, Verdict.TIMEOUT, "CPU"),
    ("bytearray(1 << 29)", {"memory_mb": 100}, Verdict.MEMORY, "MemoryError"),
    ("while True: open('f', 'ab').write(b'x' * (1 << 20))", {"disk_mb": 4},
     Verdict.ERROR, "No space left"),
    ("for i in range(99): open(str(i), 'w')", {"inodes": 20}, Verdict.ERROR,
     "No space left"),
    ("open('f', 'wb').write(b'x' * (3 << 20))", {"file_mb": 2}, Verdict.ERROR,
     "File too large"),
    ("import os\nwhile True: os.fork()", {"processes": 9}, Verdict.ERROR,
     "BlockingIOError"),
    ("import os; os.kill(os.getpid(), 9)", {}, Verdict.ERROR, ""),
    ("import os; os._exit(7)", {}, Verdict.ERROR, ""),
  ],
)  # fmt: skip
def test_limits(program, changed, verdict, word):
  limits = Limits(**{**Limits(wall_s=60).to_json(), **changed})
  with SandboxPool(1, limits, (), backend="jail") as jails:
    result = jails.run(program)
    assert result.verdict == verdict and word in result.stderr, result
    assert jails.run("print(2)").stdout == "2\n"


def test_what_was_printed_before_a_timeout_comes_back(jailed):
  result = jailed.run("print('before')\nwhile True: pass", timeout_s=2)
  assert (result.stdout, result.verdict) == ("before\n", Verdict.TIMEOUT)


def _soon(condition, seconds=60.0):
  deadline = time.monotonic() + seconds
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.02)
  return condition()


# A module that is not there is skipped, but tells our slots' processes from others.
MARK = f"no_module_{os.getpid()}"


def _processes(word=MARK):
  found = []
  for name in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{name}/cmdline", "rb") as f:
        if word.encode() in f.read().split(b"\0"):
          found.append(int(name))
    except OSError:
      continue
  return found


def test_nothing_of_a_closed_or_killed_host_remains(tmp_path):
  program = (
    "import os, sys, time\nfrom tools_sandbox.host.pool import SandboxPool\n"
    f"p = SandboxPool(1, preload=({MARK!r},), backend='jail')\n"
    "print(p.run('print(1)').stdout, flush=True)\n"
    "p.run('import time; time.sleep(600)') if sys.argv[1] == 'kill' else p.close()"
  )
  folder = os.path.dirname(os.path.dirname(pool.__file__))
  for how in ("close", "kill"):
    host = subprocess.Popen(
      [sys.executable, "-c", program, how],
      stdout=subprocess.PIPE,
      cwd=folder,
      env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert host.stdout.readline() == b"1\n"
    if how == "kill":
      assert _processes()
      host.kill()
    host.wait(60)
    host.stdout.close()
    assert _soon(lambda: not _processes() and not os.listdir(tmp_path))


def test_close_ends_runs_in_flight(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  jails, results = SandboxPool(1, preload=(), backend="jail"), []
  program = "import time\ntime.sleep(60)"
  thread = threading.Thread(target=lambda: results.append(jails.run(program)))
  thread.start()
  assert _soon(lambda: any(slot.runs for slot in list(jails._live)))
  jails.close()
  thread.join(60)
  assert results[0].verdict == Verdict.INFRASTRUCTURE and not os.listdir(tmp_path)


def test_eight_callers_share_two_slots():
  with SandboxPool(2, preload=(), backend="jail") as jails:

    def call(i):
      return [jails.run(f"print({i} * {j})").stdout for j in range(5)]

    with concurrent.futures.ThreadPoolExecutor(8) as callers:
      said = list(callers.map(call, range(8)))
  assert said == [[f"{i * j}\n" for j in range(5)] for i in range(8)]


def test_many_runs_leave_no_process_mount_or_descriptor():
  def held():
    slot = next(iter(jails._live)).process.pid
    with open(f"/proc/{slot}/mountinfo", encoding="ascii") as f:
      mounts = len(f.readlines())
    return mounts, len(os.listdir("/proc/self/fd")), len(_processes())

  gc.collect()  # else what other tests left open may be closed meanwhile
  with SandboxPool(1, preload=(MARK,), backend="jail") as jails:
    for _ in range(10):
      jails.run("print(1)")
    mounts, files, processes = held()
    before = mounts, files, processes + 1
    for _ in range(50):
      jails.run("import os\nos.fork()\nopen('f', 'w').write('x')")
    # One init may still be on its way out, or have been when it was counted before.
    assert _soon(lambda: all(a <= b for a, b in zip(held(), before, strict=True)))


def test_what_is_missing_is_said_and_nothing_weaker_is_used(monkeypatch):
  monkeypatch.setattr(keeper, "check", lambda: ["the kernel has no seccomp filters"])
  with pytest.raises(RuntimeError, match="no seccomp filters"):
    Sandbox()  # the default
  with pytest.raises(ValueError, match="backend"):
    Sandbox(backend="docker")


def test_check_names_the_step_that_the_kernel_refuses():
  code = (
    "import ctypes, sys\nfrom tools_sandbox.jail import keeper, kernel, seccomp\n"
    "if sys.argv[1]: seccomp._ALLOWED.update(clone=56, prctl=157, ioctl=16)\n"
    "kernel.set_filter(seccomp.build())\nprint(keeper.check())"
  )
  folder = os.path.dirname(os.path.dirname(os.path.dirname(pool.__file__)))
  done = subprocess.run(
    ["setpriv", "--no-new-privs", sys.executable, "-c", code, "x"],
    capture_output=True,
    text=True,
    cwd=folder,
  )
  assert "unshare" in done.stdout, (done.stdout, done.stderr[-500:])

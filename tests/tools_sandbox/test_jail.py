"""The jail: ordinary programs work in it; its mounts; kernels that refuse it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.backend import needs_jail
from tools_sandbox.client import Sandbox
from tools_sandbox.faults import NoJail
from tools_sandbox.host import pool
from tools_sandbox.jail import keeper
from tools_sandbox.jail.wire import Verdict

pytestmark = needs_jail

# Name -> (program, its output); test_sandbox_run has more, on every back-end.
ORDINARY = {
  "dev_stdout": ("open('/dev/stdout', 'w').write('x')", "x"),
  "files": (
    "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('hi')\n"
    "print(open('a/b/c').read(), os.listdir('.'))",
    "hi ['a']\n",
  ),
  "absolute_tmp": (
    "open('/tmp/x', 'w').write('y')\nprint(open('/tmp/x').read())",
    "y\n",
  ),
  "tempfile": (
    "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n  f.write('t')\n"
    "  f.seek(0)\n  print(f.read())",
    "t\n",
  ),
  "modules_named_like_ours": (
    "for n in ('wire', 'kernel', 'zygote', 'child', 'run', 'landlock'):\n"
    "  open(n + '.py', 'w').write('x = 5')\n"
    "import wire, kernel, zygote, child, run, landlock\nprint(kernel.x)",
    "5\n",
  ),
  "sqlite": (
    "import sqlite3\nc = sqlite3.connect('db')\nc.execute('create table t (a)')\n"
    "c.execute('insert into t values (7)')\nc.commit()\n"
    "print(c.execute('select a from t').fetchone())",
    "(7,)\n",
  ),
  "shared_memory": (
    "from multiprocessing import shared_memory\n"
    "s = shared_memory.SharedMemory(create=True, size=64)\ns.buf[0] = 9\n"
    "print(s.buf[0])\ns.close()\ns.unlink()",
    "9\n",
  ),
  "shared_maps": (
    "import mmap, os\nm = mmap.mmap(-1, 8)\n"
    "n = mmap.mmap(-1, length=8, access=mmap.ACCESS_WRITE)\n"
    "p = mmap.mmap(-1, 8, mmap.MAP_PRIVATE)\nif os.fork() == 0:\n"
    "  m[0] = n[1] = p[2] = 7\n  os._exit(0)\nos.wait()\n"
    "print(m[0], n[1], p[2], isinstance(m, mmap.mmap), m.size())",
    "7 7 0 True 8\n",
  ),
  "multiprocessing_value": (
    "import multiprocessing as mp\nv = mp.Value('i', 5)\na = mp.Array('d', [1.5])\n"
    "def f():\n  v.value += 1\n  a[0] *= 2\np = mp.Process(target=f)\np.start()\n"
    "p.join()\nprint(v.value, a[0])",
    "6 3.0\n",
  ),
  "a_large_object_shared_by_forks": (
    "import os, time\nx = b'x' * (400 << 20)\nfor _ in range(4):\n"
    "  if os.fork() == 0:\n    time.sleep(0.5)\n    os._exit(0)\n"
    "for _ in range(4): os.wait()\nprint(len(x) >> 20)",
    "400\n",
  ),
  "zeros": ("print(open('/dev/zero', 'rb').read(3))", "b'\\x00\\x00\\x00'\n"),
  "shutil_and_zip": (
    "import shutil, zipfile\nopen('a', 'w').write('z')\nshutil.copy2('a', 'b')\n"
    "with zipfile.ZipFile('c.zip', 'w') as z: z.write('b')\n"
    "print(zipfile.ZipFile('c.zip').namelist())",
    "['b']\n",
  ),
  "dates_and_zones": (
    "from datetime import datetime\nfrom zoneinfo import ZoneInfo\n"
    "print(datetime(2024, 7, 1, tzinfo=ZoneInfo('Europe/Paris')).utcoffset())",
    "2:00:00\n",
  ),
  "ssl_and_hashes": (
    "import ssl, hashlib, lzma, bz2, zlib, decimal, ctypes\n"
    "print(hashlib.sha256(b'').hexdigest()[:8])",
    "e3b0c442\n",
  ),
  "signals_to_itself": (
    "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('tick'))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()",
    "tick\n",
  ),
  "recursion": (
    "import sys\nsys.setrecursionlimit(20000)\n"
    "def f(n): return n and 1 + f(n - 1)\nprint(f(9000))",
    "9000\n",
  ),
  "who_am_i": (
    "import getpass, os\nprint(getpass.getuser(), os.getuid())",
    "sandbox 1000\n",
  ),
  "locks_between_processes": (
    "import fcntl, os\nf = open('f', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
    "fcntl.lockf(f, fcntl.LOCK_EX)\nif os.fork() == 0:\n  g = open('f', 'w')\n"
    "  for lock in (fcntl.flock, fcntl.lockf):\n    try:\n"
    "      lock(g, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "    except BlockingIOError: print('held', flush=True)\n  os._exit(0)\nos.wait()",
    "held\nheld\n",
  ),
  "asyncio_subprocess": (
    "import asyncio, sys\nasync def f():\n"
    "  p = await asyncio.create_subprocess_exec(\n"
    "      sys.executable, '-c', 'print(input())', stdin=-1, stdout=-1)\n"
    "  print((await p.communicate(b'6'))[0])\nasyncio.run(f())",
    "b'6\\n'\n",
  ),
  "the_machine": (
    "import os, shutil\nprint(os.cpu_count() > 0, len(os.sched_getaffinity(0)) > 0,\n"
    "      shutil.disk_usage('.').total >> 20,\n"
    "      os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGESIZE') >> 20)",
    "True True 128 1024\n",
  ),
}


@pytest.fixture(scope="module")
def jailed():
  with Sandbox(slots=1, backend="jail", timeout_s=60) as sandbox:
    yield sandbox


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary(jailed, name):
  program, expected = ORDINARY[name]
  result = jailed.run(program)
  assert (result.stdout, result.verdict) == (expected, Verdict.OK), result


def test_only_installed_packages_of_the_path_are_mounted(monkeypatch, tmp_path):
  # sys.path as the .pth of an editable install leaves it, with pip's own src folder.
  editable = [tmp_path / "repository", tmp_path / "venv" / "src" / "package"]
  installed = tmp_path / "venv" / "lib" / "site-packages"
  for folder in (*editable, installed):
    folder.mkdir(parents=True)
  monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
  monkeypatch.setattr(sys, "path", ["", *map(str, editable), str(installed)])
  mounts, path, _ = keeper._layout()
  assert path == [mounts[os.path.realpath(installed)]]
  own = {os.path.dirname(keeper.__file__), os.path.realpath(sys.base_prefix)}
  others = set(mounts) - own - set(keeper._SYSTEM)
  assert others == {os.path.realpath(installed)}


def test_a_missing_wall_is_named_and_nothing_weaker_is_used(monkeypatch):
  monkeypatch.setattr(keeper, "check", lambda: ["the kernel has no seccomp filters"])
  with pytest.raises(RuntimeError, match="no seccomp filters"):
    Sandbox()  # the default back-end
  with pytest.raises(ValueError, match="backend"):
    Sandbox(backend="docker")


@pytest.mark.parametrize("umask", [0o077, 0o777])
def test_a_slot_starts_under_any_umask(umask):
  code = (
    "from tools_sandbox.host.pool import SandboxPool\n"
    "with SandboxPool(1, preload=()) as p: print(p.run('print(7)').stdout)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    umask=umask if os.geteuid() == 0 else umask & 0o077,
    cwd=pathlib.Path(pool.__file__).parents[2],
  )
  assert done.stdout == "7\n\n", done.stderr[-500:]


@pytest.mark.parametrize(
  ("said", "kind"),
  [(b"Refused: [Errno 1] unshare", NoJail), (b"OSError: a lock", OSError)],
)
def test_only_where_the_kernel_refuses_is_a_weaker_wall_advised(
  monkeypatch, said, kind
):
  done = subprocess.CompletedProcess([], 1, b"", said)
  monkeypatch.setattr(keeper, "_built", [])
  monkeypatch.setattr(keeper.subprocess, "run", lambda *a, **k: done)
  with pytest.raises((NoJail, OSError), match=said.decode().split("]")[-1]) as e:
    Sandbox()
  assert type(e.value) is kind
  assert ("subprocess" in str(e.value)) == (kind is NoJail)


def test_check_names_the_step_that_the_kernel_refuses():
  code = (
    "import ctypes, sys\nfrom tools_sandbox.jail import keeper, kernel, seccomp\n"
    "if sys.argv[1]: seccomp._ALLOWED.update(clone=56, prctl=157, ioctl=16)\n"
    "kernel.set_filter(seccomp.build())\nprint(keeper.check())"
  )
  folder = pathlib.Path(pool.__file__).parents[2]
  done = subprocess.run(
    ["setpriv", "--no-new-privs", sys.executable, "-c", code, "x"],
    capture_output=True,
    text=True,
    cwd=folder,
  )
  assert "unshare" in done.stdout, (done.stdout, done.stderr[-500:])

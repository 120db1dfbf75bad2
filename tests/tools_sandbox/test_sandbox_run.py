"""What one run may do and what comes back, on either back-end: a single program."""

import os
import re
import sys

import proc
import pytest
from sandbox_server import soon

from tests.backend import BACKENDS
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.jail.wire import Limits, Verdict


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
  return request.param


def open_pool(backend, preload=("numpy", "numpy.random")):
  return SandboxPool(1, preload=preload, backend=backend)


@pytest.fixture(scope="module")
def pool(backend):
  with open_pool(backend) as pool:
    yield pool


# Program -> its exit status, which the kernel tells.
STATUS = {
  "print(1 + 1)": 0,
  "import sys; sys.exit(3)": 3,
  "import sys; sys.exit()": 0,
  "raise SystemExit('bye')": 1,
  "import os; os._exit(7)": 7,
  "1 / 0": 1,
  "import os; os.kill(os.getpid(), 9)": -9,
  "raise KeyboardInterrupt": 1,
  "import sys; sys.stdout.close()": 0,
  "input()  # the end of stdin": 1,
  # Strange ones are answered.
  "": 0,
  "\0": 1,
  "\ud800": 1,
  "x = '\ud800'\nprint(x)": 1,
}


@pytest.mark.parametrize("program", STATUS)
def test_exit_status_comes_from_the_kernel(pool, program):
  result = pool.run(program)
  code = STATUS[program]
  verdict = Verdict.ERROR if code else Verdict.OK
  assert (result.exit_code, result.verdict) == (code, verdict), result


_SLEEP = "import time\ntime.sleep(600)"
_ON_XCPU = "import os, signal, time\nsignal.signal(signal.SIGXCPU, {})\n"


@pytest.mark.parametrize(
  ("program", "wall_s", "cpu_s"),
  [
    ("while True: pass", 0.3, 10),
    (_SLEEP, 0.3, 10),
    ("import os\nos.fork()\nwhile True: pass", 0.3, 10),
    (f"import os\nos.close(1); os.close(2)\n{_SLEEP}", 0.3, 10),
    (
      "import signal\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
      "while True: signal.pause()",
      0.3,
      10,
    ),
    # No handler of the signal that asks it to flush makes it end well.
    (_ON_XCPU.format("lambda *a: os._exit(0)") + "time.sleep(600)", 1, 9),
    (_ON_XCPU.format("signal.SIG_IGN") + "time.sleep(600)", 1, 9),
    # The limit on CPU seconds, soft and hard.
    ("while True: pass", 300, 1),
    (_ON_XCPU.format("signal.SIG_IGN") + "while 1: 1", 300, 1),
  ],
)
def test_timeout(pool, program, wall_s, cpu_s):
  result = pool.run(program, limits=Limits(wall_s=wall_s, cpu_s=cpu_s))
  assert (result.verdict, result.exit_code) == (Verdict.TIMEOUT, -9), result
  assert min(wall_s, cpu_s / 2) <= result.seconds < 200
  word = "CPU" if cpu_s < wall_s else f"[killed: used more than {wall_s} s]"
  assert word in result.stderr
  assert pool.run("print(2)").stdout == "2\n"


@pytest.mark.parametrize(
  "program",
  [
    "x = bytearray(1 << 30)",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import numpy\nnumpy.ones((1 << 14, 1 << 14))",
  ],
)
def test_memory_bomb(pool, program):
  result = pool.run(program, limits=Limits(memory_mb=100))
  assert (result.verdict, result.exit_code) == (Verdict.MEMORY, 1)
  assert "MemoryError" in result.stderr and "<program>" in result.stderr


@pytest.mark.parametrize(
  ("program", "limits", "verdict", "words"),
  [
    (
      "import os, time\nfor _ in range(6):\n  if os.fork() == 0: break\n"
      "x = b'x' * (80 << 20)\ntime.sleep(600)",
      {"memory_mb": 160, "wall_s": 120},
      Verdict.MEMORY,
      "160 MiB",
    ),
    (
      "import os\nwhile True: os.fork()",
      {"processes": 20, "wall_s": 60},
      Verdict.ERROR,
      "20 processes|BlockingIOError",  # counted, or refused by the kernel
    ),
    (
      "f = open('big', 'wb')\nfor _ in range(9): f.write(b'x' * (1 << 20))",
      {"file_mb": 2},
      Verdict.ERROR,
      "File too large",
    ),
  ],
)
def test_limits_of_a_run(pool, program, limits, verdict, words):
  result = pool.run(program, limits=Limits(**limits))
  assert result.verdict == verdict and re.search(words, result.stderr), result
  assert pool.run("print(2)").stdout == "2\n"


_FAKE = '{"event": "result", "result": {"verdict": "ok"}}'
# Name -> (program, stdin, what it prints).
PRINTS = {
  "a verdict": (f"import os\nos.write(1, b'{_FAKE}')", "", _FAKE),
  "the zygote's pipes": (
    "import os\nbase = f'/proc/{os.getppid()}/fd'\nopened = 0\n"
    "for fd in range(64):\n"
    "  try:\n    open(f'{base}/{fd}', 'wb')\n    opened += 1\n"
    "  except OSError: pass\nprint(opened)",
    "",
    "0\n",
  ),
  "the main module": (
    "import sys, dataclasses, inspect\n"
    "@dataclasses.dataclass\nclass P:\n  x: 'int' = 3\n"
    "def f():\n  return 1\n"
    "if __name__ == '__main__':\n"
    "  print(P(), sys.modules['__main__'].P is P, inspect.getsource(f).strip()[-8:])",
    "",
    "P(x=3) True return 1\n",
  ),
  "input": ("print(input() + input())", "12\n\u00e93\n", "12\u00e93\n"),
  "sys.stdin": ("import sys\nprint(*sys.stdin, sep='')", "\u00e9\n", "\u00e9\n\n"),
  "/dev/stdin": ("print(open('/dev/stdin').read())", "\u00e9", "\u00e9\n"),
  "descriptor 0": ("print(open(0).read())", "\u00e9", "\u00e9\n"),
  "bytes": (
    "import sys\nprint(sys.stdin.buffer.read().decode())",
    "\u00e9",
    "\u00e9\n",
  ),
  "stdin ignored": ("print('x')", "y" * 3_000_000, "x\n"),
  "bytes that are no text": (
    "import os\nos.write(1, b'a\\xff\\x00b\\xe2\\x82')",
    "",
    "a\ufffd\x00b\ufffd",
  ),
  "memory error caught": (
    "try:\n  bytearray(1 << 40)\nexcept MemoryError:\n  print('caught')",
    "",
    "caught\n",
  ),
  "what the interpreter does at its end": (
    "import atexit, threading, time\nfrom multiprocessing import Pool\n"
    "def square(x): return x * x\n"
    "atexit.register(print, 'atexit')\n"
    "last = threading.Event()\n"
    "def late(): last.wait(); time.sleep(0.05); print('thread')\n"
    "threading.Thread(target=late).start()\n"
    "with Pool(2) as p: print(p.map(square, range(4)))\nlast.set()",
    "",
    "[0, 1, 4, 9]\nthread\natexit\n",
  ),
}


@pytest.mark.parametrize("name", PRINTS)
def test_what_a_run_prints(pool, name):
  program, stdin, expected = PRINTS[name]
  result = pool.run(program, stdin)
  assert (result.stdout, result.verdict) == (expected, Verdict.OK), result


def test_large_stdin_and_output_at_once(pool):
  # Both directions exceed what a pipe holds: a parent that writes first would hang.
  program = "import sys\nfor line in sys.stdin:\n  sys.stdout.write(line)"
  text = "0123456789\n" * 100_000
  result = pool.run(program, text, Limits(output_bytes=2_000_000))
  assert result.stdout == text and not result.truncated


def test_floods_keep_head_and_tail_of_each_stream(pool):
  program = (
    "import sys\nprint('a', end='')\nfor _ in range(3000):\n  print('o' * 99)\n"
    "  print('e' * 99, file=sys.stderr)\nprint('z', end='')"
  )
  result = pool.run(program, limits=Limits(output_bytes=1000))
  assert result.verdict == Verdict.OK and result.truncated
  assert result.stdout.startswith("aooo") and result.stdout.endswith("oo\nz")
  for text, cut in ((result.stdout, 299002), (result.stderr, 299000)):
    assert f"...[{cut} bytes cut]..." in text and len(text) < 1100


def test_what_was_printed_before_a_timeout_comes_back(pool):
  result = pool.run("print('before')\nwhile True: pass", limits=Limits(wall_s=1))
  assert result.stdout == "before\n" and "[killed: used more than 1 s]" in (
    result.stderr
  )


def test_daemons_die_with_the_run(pool):
  marker = f"daemon-{os.getpid()}"
  program = (
    "import os, sys, subprocess, time\n"
    f"args = [sys.executable, '-c', 'import time; time.sleep(600)', '{marker}']\n"
    "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
    "    os.execv(sys.executable, args)\n"
    "  os._exit(0)\n"
    "daemon = subprocess.Popen(args)\n"
    "time.sleep(0.3)\nprint('left', daemon.poll())"
  )
  result = pool.run(program)
  assert (result.stdout, result.verdict) == ("left None\n", Verdict.OK), result
  soon(lambda: not proc.naming(marker))


def test_files_stay_in_their_run(pool, backend):
  first = pool.run(
    "import os, tempfile\nopen('a.txt', 'w').write('x')\n"
    "print(os.getcwd())\nprint(tempfile.mkdtemp())\nprint(os.path.expanduser('~'))"
  )
  cwd, temporary, home = first.stdout.split()
  assert temporary.startswith(cwd) and home == cwd
  if backend == "subprocess":  # else /tmp, the run's own
    assert not os.path.exists(cwd)
  assert pool.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_awkward_files_are_removed(pool, backend):
  program = (
    "import os\nprint(os.getcwd())\nos.mkdir('locked')\nopen('locked/f', 'w')\n"
    "os.chmod('locked', 0)\nos.symlink('/etc', 'link')\n"
    "for _ in range(1100):\n  os.mkdir('d'); os.chdir('d')"
  )
  folder = pool.run(program).stdout.strip()
  assert folder == "/tmp" if backend == "jail" else not os.path.exists(folder)
  assert os.path.exists("/etc/passwd")
  assert pool.run("print(2)").stdout == "2\n"


def test_modules_and_globals_do_not_leak_between_runs(pool):
  for value in (1, 2):
    program = (
      f"for name in ('wire', 'helper'):\n  open(name + '.py', 'w').write('x = {value}')"
      "\nimport math, sys, wire, helper\nprint(wire.x, helper.x, 'y' in dir(), "
      "math.pi > 3.1, 'extra' in sys.modules)\n"
      "y = 1\nmath.pi = 3\nsys.modules['extra'] = math"
    )
    assert pool.run(program).stdout == f"{value} {value} False True False\n"


def test_environment_is_scrubbed(backend, monkeypatch):
  monkeypatch.setenv("SANDBOX_TEST_SECRET", "s3cret")
  with open_pool(backend, ()) as fresh:
    result = fresh.run(
      "import os, subprocess, sys\nprint(sorted(os.environ))\n"
      "child = [sys.executable, '-c', 'import os; print(os.environ)']\n"
      "print(subprocess.check_output(child))\n"
      "print(open('/proc/self/environ').read())"
    )
  assert result.verdict == Verdict.OK, result
  names = result.stdout.splitlines()[0]
  assert names.replace("'LD_LIBRARY_PATH', ", "") == "['HOME', 'TMPDIR']"
  assert "s3cret" not in result.stdout


def test_random_numbers_depend_on_the_program_alone(pool, backend):
  program = (
    "import random, numpy\nprint(random.random(), numpy.random.rand(), hash('a'))"
  )
  with open_pool(backend) as other:
    assert other.run(program).stdout == pool.run(program).stdout
  assert pool.run(program).stdout == pool.run(program).stdout
  assert pool.run(program).stdout != pool.run(program + "\n").stdout


def test_short_traceback_names_no_host_path(pool):
  program = (
    "import json\n\ndef deep(n):\n  if n:\n    deep(n - 1)\n"
    "  json.loads('{')\n\ndeep(9)"
  )
  result = pool.run(program)
  assert result.stderr == (
    "Traceback (most recent call last):\n  ... 6 frames ...\n"
    + '  File "<program>", line 5, in deep\n    deep(n - 1)\n' * 3
    + "  [Previous line repeated 1 more time]\n"
    + "  File \"<program>\", line 6, in deep\n    json.loads('{')\n"
    "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: "
    "line 1 column 2 (char 1)\n"
  )


@pytest.mark.parametrize(
  "program",
  [
    "from numpy import no_such_name",
    "import numpy as np\nnp.zeros(3) @ np.zeros(4)",
    "import no_such_module",
    "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()",
    "open('m.py', 'w').write('def f(): return [][0]')\nimport m\nm.f()",
    "class E(Exception):\n  def __str__(self): raise SystemExit(0)\nraise E",
  ],
)
def test_errors_name_no_host_path(pool, program):
  text = pool.run(program).stderr
  assert text and "/" not in text.replace("1 / 0", ""), text
  assert sys.prefix not in text and "zygote" not in text and "child.py" not in text


def test_syntax_error_shows_the_line(pool):
  result = pool.run("x = 1\ny = (2")
  assert (result.exit_code, result.verdict) == (1, Verdict.ERROR)
  assert 'File "<program>", line 2\n    y = (2\n' in result.stderr
  assert "SyntaxError: '(' was never closed" in result.stderr
  assert "Traceback" not in result.stderr


def test_privileges_are_gone(pool):
  result = pool.run(
    "import resource as r\nfor line in open('/proc/self/status'):\n"
    "  if line.startswith(('CapEff', 'NoNewPrivs')): print(line.split()[1])\n"
    "r.setrlimit(r.RLIMIT_CPU, (999, 999))"
  )
  assert result.stdout.split() == ["0" * 16, "1"] and result.exit_code == 1

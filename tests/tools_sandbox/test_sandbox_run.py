"""A run's behaviour and results: the same on every back-end and over HTTP.

budget: the contract of a run, as tables over back-ends.
"""

import concurrent.futures
import os
import re
import sys

import proc
import pytest
from sandbox_server import WHERE, open_pool, soon

from tests.backend import MISSING
from tools_sandbox.jail.wire import Limits, Verdict

NUMPY = ("numpy", "numpy.random")


@pytest.fixture(scope="module", params=WHERE)
def where(request):
  return request.param


@pytest.fixture(scope="module")
def pool(where):
  with open_pool(where, NUMPY) as pool:
    yield pool


# Program -> its exit status, from the kernel.
STATUS = {
  "print(1 + 1)": 0,
  "import sys; sys.exit(3)": 3,
  "import sys; sys.exit()": 0,
  "raise SystemExit('bye')": 1,
  "import os; os._exit(7)": 7,
  "1 / 0": 1,
  "import os; os.kill(os.getpid(), 9)": -9,
  "import os; os.kill(os.getpid(), 15)": -15,
  "raise KeyboardInterrupt": 1,
  "import sys; sys.stdout.close()": 0,
  "input()  # the end of stdin": 1,
  # Strange programs get a result too.
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
# Limits; verdict, exit status (None: any) and a regex for stderr; programs.
LIMITED = [
  (
    {"wall_s": 1},
    (Verdict.TIMEOUT, -9, r"\[killed: used more than 1 s\]"),
    [
      "print('before')\nwhile True: pass",
      _SLEEP,
      "import os\nos.fork()\nwhile True: pass",
      f"import os\nos.close(1); os.close(2)\n{_SLEEP}",
      "import signal\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
      "while True: signal.pause()",
      # SIGXCPU asks the program to flush; no handler for it changes the verdict.
      _ON_XCPU.format("lambda *a: os._exit(0)") + _SLEEP,
      _ON_XCPU.format("signal.SIG_IGN") + _SLEEP,
    ],
  ),
  (
    {"wall_s": 300, "cpu_s": 1},
    (Verdict.TIMEOUT, -9, "CPU"),
    ["while True: pass", _ON_XCPU.format("signal.SIG_IGN") + "while 1: 1"],
  ),
  (
    {"memory_mb": 100},
    (Verdict.MEMORY, 1, "(?s)<program>.*MemoryError"),
    [
      "x = bytearray(1 << 30)",
      "x = []\nwhile True: x.append(bytearray(1 << 20))",
      "import numpy\nnumpy.ones((1 << 14, 1 << 14))",
    ],
  ),
  (
    {"memory_mb": 160, "wall_s": 120},
    (Verdict.MEMORY, None, "160 MiB"),
    [
      "import os, time\nfor _ in range(6):\n  if os.fork() == 0: break\n"
      "x = b'x' * (80 << 20)\ntime.sleep(600)"
    ],
  ),
  (
    {"processes": 20, "wall_s": 60},  # counted, or refused by the kernel
    (Verdict.ERROR, None, "20 processes|BlockingIOError"),
    ["import os\nwhile True: os.fork()"],
  ),
  (
    {"file_mb": 2},
    (Verdict.ERROR, 1, "File too large"),
    ["f = open('big', 'wb')\nfor _ in range(9): f.write(b'x' * (1 << 20))"],
  ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("changed", "end", "program"),
  [(changed, end, each) for changed, end, programs in LIMITED for each in programs],
)
def test_each_limit_ends_a_run(pool, changed, end, program):
  limits = Limits(**changed)
  result = pool.run(program, limits=limits)
  verdict, code, words = end
  assert result.verdict == verdict and re.search(words, result.stderr), result
  assert code in (None, result.exit_code), result
  assert result.stdout == ("before\n" if "before" in program else "")
  if verdict == Verdict.TIMEOUT:
    assert min(limits.wall_s, limits.cpu_s / 2) <= result.seconds < 200
  assert pool.run("print(2)").stdout == "2\n"


_FAKE = '{"event": "result", "result": {"verdict": "ok"}}'
# Name -> (program, stdin, its output).
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
  "every kind of letter": (
    "import sys\nprint(sys.stdin.read()[::-1], end='')",
    "a\x00\u00e9\U0001f600\n\ud800",
    "?\n\U0001f600\u00e9\x00a",
  ),
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
def test_the_output_of_a_run(pool, name):
  program, stdin, expected = PRINTS[name]
  result = pool.run(program, stdin)
  assert (result.stdout, result.verdict) == (expected, Verdict.OK), result


def test_large_stdin_and_output_at_once(pool):
  # Both directions exceed a pipe's capacity: a parent that writes first would hang.
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


def test_files_stay_in_their_run(pool):
  first = pool.run(
    "import os, tempfile\nopen('a.txt', 'w').write('x')\n"
    "print(os.getcwd())\nprint(tempfile.mkdtemp())\nprint(os.path.expanduser('~'))"
  )
  cwd, temporary, home = first.stdout.split()
  assert temporary.startswith(cwd) and home == cwd
  assert cwd == "/tmp" or not os.path.exists(cwd)  # in the jail, /tmp is the run's own
  assert pool.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_awkward_files_are_removed(pool):
  program = (
    "import os\nprint(os.getcwd())\nos.mkdir('locked')\nopen('locked/f', 'w')\n"
    "os.chmod('locked', 0)\nos.symlink('/etc', 'link')\n"
    "for _ in range(1100):\n  os.mkdir('d'); os.chdir('d')"
  )
  folder = pool.run(program).stdout.strip()
  assert folder == "/tmp" or not os.path.exists(folder)
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


def test_environment_is_scrubbed(where, monkeypatch):
  monkeypatch.setenv("SANDBOX_TEST_SECRET", "s3cret")
  with open_pool(where) as fresh:
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


def test_random_numbers_depend_on_the_program_alone(pool, where):
  program = (
    "import random, numpy\nprint(random.random(), numpy.random.rand(), hash('a'))"
  )
  with open_pool(where, NUMPY) as other:
    assert other.run(program).stdout == pool.run(program).stdout
  assert pool.run(program).stdout == pool.run(program).stdout
  assert pool.run(program).stdout != pool.run(program + "\n").stdout
  with pytest.raises(RuntimeError, match="closed"):
    other.run(program)


def test_programs_are_strings_of_bounded_length(pool, monkeypatch):
  for texts, words in (((5, ""), "program"), (("print(1)", b"x"), "stdin")):
    with pytest.raises(TypeError, match=words):
      pool.run(*texts)
  monkeypatch.setattr("tools_sandbox.jail.wire.MAX_INPUT", 10)
  with pytest.raises(ValueError, match="10 characters"):
    pool.run("print(1234567)")


def test_callers_share_slots(where):
  with (
    open_pool(where, slots=2) as pool,
    concurrent.futures.ThreadPoolExecutor(8) as threads,
  ):

    def work(i):
      return [pool.run(f"print(int(input()) * {j})", str(i)).stdout for j in range(5)]

    results = list(threads.map(work, range(8)))
  assert results == [[f"{i * j}\n" for j in range(5)] for i in range(8)]


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


_DRAWS = (
  "import random, numpy, sympy\nfrom sympy.core.random import randint\n"
  "print(random.random(), numpy.random.rand(), randint(0, 9**9), hash('a'))"
)
_PRELOADED = (
  "import sys\nprint('sympy' in sys.modules, end=' ')\n"
  "import sympy as sp, numpy as np\nx = sp.symbols('x')\n"
  "print(sp.solve(x**2 - 5*x + 6, x), np.arange(3).sum())"
)
_TIMES = """
import datetime, time
from datetime import date, datetime as d, timezone as tz
print(time.time(), time.time_ns(), time.gmtime()[:6], time.gmtime(0)[0])
print(time.localtime() == time.localtime(1e9), time.strftime("%Y"), time.ctime()[-4:])
print(d.now(tz.utc).isoformat(), d.utcnow(), d.today() == d.now(), date.today().year)
print(repr(d.now())[:17], isinstance(d.now(), date), time.asctime()[-4:])
class Own(d): pass
print(type(Own.now()).__name__, time.strftime("%Y", time.gmtime(0)))
print(time.monotonic() < time.monotonic())
"""
_EXPECTED = """1000000000.0 1000000000000000000 (2001, 9, 9, 1, 46, 40) 1970
True 2001 2001
2001-09-09T01:46:40+00:00 2001-09-09 01:46:40 True 2001
datetime.datetime True 2001
Own 1970
True
"""


def test_seed_and_clock_of_a_run_with_the_default_preload(where):
  def fixed(**surroundings):
    return Limits(wall_s=60, cpu_s=60, **surroundings)

  with open_pool(where, preload=None) as pool:
    assert pool.run(_PRELOADED, limits=fixed()).stdout == "True [2, 3] 3\n"
    draws = [pool.run(_DRAWS, limits=fixed(seed=n)).stdout for n in (1, 1, 2)]
    one, same, other = draws
    assert one == same != other and pool.run(_DRAWS).stdout not in draws
    # With a seed, the draws do not depend on the program.
    assert pool.run(f"{_DRAWS} # x", limits=fixed(seed=1)).stdout == one
    times = pool.run(_TIMES, limits=fixed(clock_s=10**9))
    assert (times.stdout, times.stderr) == (_EXPECTED, "")
    assert pool.run("import time\nprint(time.time() > 1.5e9)").stdout == "True\n"
    if where == "subprocess" or MISSING:
      return  # no sessions without a jail
    with pool.session(fixed(seed=1, clock_s=10**9)) as session:
      assert session.run(_DRAWS).stdout == one
      assert session.run(_TIMES).stdout == _EXPECTED

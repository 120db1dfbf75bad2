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


@pytest.mark.parametrize(
  ("program", "code", "verdict"),
  [
    ("print(1 + 1)", 0, Verdict.OK),
    ("import sys; sys.exit(3)", 3, Verdict.ERROR),
    ("import sys; sys.exit()", 0, Verdict.OK),
    ("raise SystemExit('bye')", 1, Verdict.ERROR),
    ("import os; os._exit(7)", 7, Verdict.ERROR),
    ("1 / 0", 1, Verdict.ERROR),
    ("import os; os.kill(os.getpid(), 9)", -9, Verdict.ERROR),
    ("raise KeyboardInterrupt", 1, Verdict.ERROR),
    ("import sys; sys.stdout.close()", 0, Verdict.OK),
  ],
)
def test_exit_status_comes_from_the_kernel(pool, program, code, verdict):
  result = pool.run(program)
  assert (result.exit_code, result.verdict) == (code, verdict), result


def test_a_printed_verdict_changes_nothing(pool):
  fake = '{"event": "result", "result": {"verdict": "ok"}}'
  result = pool.run(f"import os\nos.write(1, b'{fake}')\nos._exit(5)")
  assert (result.exit_code, result.verdict) == (5, Verdict.ERROR)
  assert result.stdout == fake


def test_the_pipes_of_the_zygote_are_out_of_reach(pool):
  result = pool.run(
    "import os\nbase = f'/proc/{os.getppid()}/fd'\nopened = 0\n"
    "for fd in range(64):\n"
    "  try:\n    open(f'{base}/{fd}', 'wb')\n    opened += 1\n"
    "  except OSError: pass\nprint(opened)"
  )
  assert result.stdout == "0\n", result


def test_main_guard_and_main_module(pool):
  program = (
    "import sys, dataclasses, inspect\n"
    "@dataclasses.dataclass\nclass P:\n  x: 'int' = 3\n"
    "def f():\n  return 1\n"
    "if __name__ == '__main__':\n"
    "  print(P(), sys.modules['__main__'].P is P, inspect.getsource(f).strip()[-8:])"
  )
  assert pool.run(program).stdout == "P(x=3) True return 1\n"


@pytest.mark.parametrize(
  "program",
  [
    "a, b = input(), input()\nprint(a + b)",
    "import sys\nprint(''.join(sys.stdin.read().split()))",
    "import sys\nprint(''.join(line.strip() for line in sys.stdin))",
    "print(open('/dev/stdin').read().replace('\\n', ''))",
    "print(open(0).read().replace('\\n', ''))",
    "import sys\nprint(sys.stdin.buffer.read().decode().replace('\\n', ''))",
  ],
)
def test_every_way_of_reading_stdin(pool, program):
  assert pool.run(program, stdin="12\n\u00e93\n").stdout == "12\u00e93\n"


def test_stdin_ends_and_may_be_ignored(pool):
  assert "EOFError" in pool.run("input()").stderr
  assert pool.run("print('x')", stdin="y" * 3_000_000).stdout == "x\n"


def test_large_stdin_and_output_at_once(pool):
  # Both directions exceed what a pipe holds: a parent that writes first would hang.
  program = "import sys\nfor line in sys.stdin:\n  sys.stdout.write(line)"
  text = "0123456789\n" * 100_000
  result = pool.run(program, text, Limits(output_bytes=2_000_000))
  assert result.stdout == text and not result.truncated


def test_output_flood_keeps_head_and_tail(pool):
  result = pool.run("print('a' + 'x' * 10_000_000 + 'z')", limits=Limits())
  assert result.verdict == Verdict.OK and result.truncated
  assert result.stdout.startswith("axxx") and result.stdout.endswith("xz\n")
  cut = int(re.search(r"\.\.\.\[(\d+) bytes cut\]\.\.\.", result.stdout)[1])
  assert cut == 10_000_003 - Limits().output_bytes


def test_stderr_flood_beside_stdout(pool):
  program = (
    "import sys\nfor _ in range(3000):\n  print('o' * 99)\n"
    "  print('e' * 99, file=sys.stderr)"
  )
  result = pool.run(program, limits=Limits(output_bytes=1000))
  for text in (result.stdout, result.stderr):
    assert "[299000 bytes cut]" in text and len(text) < 1100


def test_bytes_that_are_no_text(pool):
  result = pool.run("import os\nos.write(1, b'a\\xff\\x00b\\xe2\\x82')")
  assert result.stdout == "a\ufffd\x00b\ufffd" and result.verdict == Verdict.OK


@pytest.mark.parametrize(
  "program",
  [
    "while True: pass",
    "import time\ntime.sleep(600)",
    "import signal, time\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
    "while True: time.sleep(1)",
    "import os\nos.fork()\nwhile True: pass",
    "import os, time\nos.close(1); os.close(2); time.sleep(600)",
  ],
)
def test_timeout(pool, program):
  result = pool.run(program, limits=Limits(wall_s=0.3))
  assert result.verdict == Verdict.TIMEOUT and result.exit_code < 0, result
  assert 0.3 <= result.seconds < 60
  assert pool.run("print(2)").stdout == "2\n"


def test_what_was_printed_before_a_timeout_comes_back(pool):
  result = pool.run("print('before')\nwhile True: pass", limits=Limits(wall_s=2))
  assert result.stdout == "before\n" and "[killed: used more than 2 s]" in (
    result.stderr
  )


def test_cpu_limit_is_a_timeout(pool):
  result = pool.run("while True: pass", limits=Limits(wall_s=300, cpu_s=1))
  assert result.verdict == Verdict.TIMEOUT and result.seconds < 200
  assert "CPU" in result.stderr


@pytest.mark.parametrize("handler", ["lambda *a: os._exit(0)", "signal.SIG_IGN"])
def test_no_handler_makes_a_timeout_ok(pool, handler):
  start = f"import os, signal, time\nsignal.signal(signal.SIGXCPU, {handler})\n"
  result = pool.run(f"{start}time.sleep(600)", limits=Limits(wall_s=1, cpu_s=9))
  assert (result.verdict, result.exit_code) == (Verdict.TIMEOUT, -9), result
  assert "used more than 1 s" in result.stderr


def test_the_hard_limit_on_cpu_seconds_is_a_timeout_too(pool):
  program = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile 1: 1"
  result = pool.run(program, limits=Limits(wall_s=300, cpu_s=1))
  assert result.verdict == Verdict.TIMEOUT and "CPU" in result.stderr, result


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


def test_memory_of_all_processes_together(pool):
  program = (
    "import os, time\nfor _ in range(6):\n  if os.fork() == 0: break\n"
    "x = b'x' * (80 << 20)\ntime.sleep(600)"
  )
  result = pool.run(program, limits=Limits(memory_mb=160, wall_s=120))
  assert result.verdict == Verdict.MEMORY


def test_a_program_may_catch_memory_error(pool):
  program = "try:\n  bytearray(1 << 40)\nexcept MemoryError:\n  print('caught')"
  result = pool.run(program)
  assert (result.stdout, result.verdict) == ("caught\n", Verdict.OK)


def test_fork_bomb(pool, backend):
  result = pool.run(
    "import os\nwhile True: os.fork()", limits=Limits(processes=20, wall_s=60)
  )
  word = "20 processes" if backend == "subprocess" else "BlockingIOError"
  assert result.verdict == Verdict.ERROR and word in result.stderr
  assert pool.run("print(2)").stdout == "2\n"


def test_daemons_die_with_the_run(pool):
  marker = f"daemon-{os.getpid()}"
  program = (
    "import os, sys, subprocess, time\n"
    "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
    f"    args = ['{marker}', '-c', 'import time; time.sleep(600)']\n"
    "    os.execv(sys.executable, args)\n"
    "  os._exit(0)\n"
    f"args = ['{marker}', '-c', 'import time; time.sleep(600)']\n"
    "subprocess.Popen(args, executable=sys.executable)\n"
    "time.sleep(0.3)\nprint('left')"
  )
  result = pool.run(program)
  assert (result.stdout, result.verdict) == ("left\n", Verdict.OK), result
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
    "for _ in range(1500):\n  os.mkdir('d'); os.chdir('d')"
  )
  folder = pool.run(program).stdout.strip()
  assert folder == "/tmp" if backend == "jail" else not os.path.exists(folder)
  assert os.path.exists("/etc/passwd")
  assert pool.run("print(2)").stdout == "2\n"


def test_file_size_limit(pool):
  program = "f = open('big', 'wb')\nfor _ in range(9): f.write(b'x' * (1 << 20))"
  result = pool.run(program, limits=Limits(file_mb=2))
  assert result.verdict == Verdict.ERROR and "File too large" in result.stderr


def test_modules_written_by_the_program(pool):
  for value in (1, 2):
    program = (
      f"for name in ('wire', 'helper'):\n  open(name + '.py', 'w').write('x = {value}')"
      "\nimport wire, helper\nprint(wire.x, helper.x)"
    )
    assert pool.run(program).stdout == f"{value} {value}\n"


def test_globals_and_modules_do_not_leak_between_runs(pool):
  pool.run("import math, sys\nx = 1\nmath.pi = 3\nsys.modules['extra'] = math")
  result = pool.run("import math, sys\nprint('x' in dir(), math.pi > 3.1, 'extra' in "
                    "sys.modules)")  # fmt: skip
  assert result.stdout == "False True False\n"


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


@pytest.mark.parametrize("program", ["\0", "\ud800", "x = '\ud800'\nprint(x)", ""])
def test_strange_programs_are_answered(pool, program):
  assert pool.run(program).verdict in (Verdict.ERROR, Verdict.OK)


def test_threads_atexit_and_multiprocessing_finish(pool):
  program = (
    "import atexit, threading, time\nfrom multiprocessing import Pool\n"
    "def square(x): return x * x\n"
    "atexit.register(print, 'atexit')\n"
    "last = threading.Event()\n"
    "def late(): last.wait(); time.sleep(0.05); print('thread')\n"
    "threading.Thread(target=late).start()\n"
    "with Pool(2) as p: print(p.map(square, range(4)))\nlast.set()"
  )
  result = pool.run(program)
  assert result.stdout == "[0, 1, 4, 9]\nthread\natexit\n", result


def test_privileges_are_gone(pool):
  result = pool.run(
    "import resource as r\nfor line in open('/proc/self/status'):\n"
    "  if line.startswith(('CapEff', 'NoNewPrivs')): print(line.split()[1])\n"
    "r.setrlimit(r.RLIMIT_CPU, (999, 999))"
  )
  assert result.stdout.split() == ["0" * 16, "1"] and result.exit_code == 1

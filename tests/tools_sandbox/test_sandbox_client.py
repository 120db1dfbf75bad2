"""The one door."""

import inspect
import os

import pytest

from tests.backend import BACKENDS
from tools_sandbox.client import Sandbox
from tools_sandbox.jail.wire import Limits, Verdict

ROWS = '{"id": 1, "title": "Paris", "text": "Capital of France."}\n'


def test_run_with_defaults_and_overrides():
  with Sandbox(
    slots=1, timeout_s=20, output_bytes=100, preload=(), backend="subprocess"
  ) as sandbox:
    assert sandbox.run("print(input())", "hi").stdout == "hi\n"
    result = sandbox.run("import time; time.sleep(30)", timeout_s=0.2)
    assert result.verdict == Verdict.TIMEOUT
    result = sandbox.run("bytearray(1 << 28)", memory_mb=50)
    assert result.verdict == Verdict.MEMORY
    assert sandbox.run("bytearray(1 << 28)").verdict == Verdict.OK
    assert sandbox.run("print('x' * 200)").truncated
    with pytest.raises(ValueError, match="wall_s"):
      sandbox.run("1", timeout_s=0)
  with pytest.raises(RuntimeError, match="closed"):
    sandbox.run("1")


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_seed_and_clock_of_a_run_with_the_default_preload(backend):
  with Sandbox(slots=1, backend=backend, timeout_s=60) as sandbox:
    assert sandbox.run(_PRELOADED).stdout == "True [2, 3] 3\n"
    one, same, other = (sandbox.run(_DRAWS, seed=n).stdout for n in (1, 1, 2))
    assert one == same != other and sandbox.run(_DRAWS).stdout not in (one, other)
    # Whatever the program, where a seed is given.
    assert sandbox.run(f"{_DRAWS} # x", seed=1).stdout == one
    times = sandbox.run(_TIMES, clock_s=10**9)
    assert (times.stdout, times.stderr) == (_EXPECTED, "")
    assert sandbox.run("import time\nprint(time.time() > 1.5e9)").stdout == "True\n"
    if backend == "jail":
      with sandbox.session(timeout_s=50, seed=1, clock_s=10**9) as session:
        assert session.run(_DRAWS).stdout == one
        assert session.run(_TIMES).stdout == _EXPECTED


def test_defaults_are_those_of_limits():
  signature = inspect.signature(Sandbox).parameters
  limits = Limits()
  assert signature["timeout_s"].default == limits.wall_s == limits.cpu_s
  assert signature["memory_mb"].default == limits.memory_mb
  assert signature["output_bytes"].default == limits.output_bytes


def test_search_and_its_cache(tmp_path):
  corpus, cache = tmp_path / "c.jsonl", tmp_path / "cache"
  corpus.write_text(ROWS)
  for _ in range(2):
    with Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None) as sandbox:
      assert sandbox.search("paris", 3)[0].document.text == "Capital of France."
    (first,) = os.listdir(cache)
  stamp = os.stat(cache / first).st_mtime_ns
  with Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None):
    assert os.stat(cache / first).st_mtime_ns == stamp  # mapped, not built again
  corpus.write_text(ROWS.replace("Paris", "Lyon"))
  with Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None) as sandbox:
    assert sandbox.search("paris", 3) == [] and sandbox.search("lyon")
  assert len(os.listdir(cache)) == 2


def test_a_broken_corpus_leaves_no_cache(tmp_path):
  corpus, cache = tmp_path / "c.jsonl", tmp_path / "cache"
  corpus.write_text("{")
  with pytest.raises(ValueError, match=r"c\.jsonl:1"):
    Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None)
  assert os.listdir(cache) == []


def test_what_a_sandbox_does_not_have_it_says(tmp_path):
  with Sandbox(backend=None) as sandbox:
    with pytest.raises(ValueError, match="no corpus"):
      sandbox.search("x")
    with pytest.raises(ValueError, match="back-end"):
      sandbox.run("print(1)")
    with pytest.raises(ValueError, match="'jail'"):
      sandbox.session()
  with pytest.raises(ValueError, match="index_cache"):
    Sandbox(index_cache=str(tmp_path), backend=None)
  with pytest.raises(FileNotFoundError):
    Sandbox(corpus=str(tmp_path / "none.jsonl"), backend=None)
  refusal = pytest.raises(ValueError, match="'subprocess' has no sessions")
  with Sandbox(backend="subprocess", preload=()) as sandbox, refusal:
    sandbox.session()

"""Hidden tests in every released form, on real programs in the real sandbox."""

from __future__ import annotations

import json
import pathlib

import pytest
from hidden_tests import outcome, task

from coa_jax.data.tasks.sources import load_tasks
from coa_jax.rewards.code import grader as code
from coa_jax.rewards.code.grader import CodeConfig, CodeGrader
from coa_jax.rewards.code.tests import read_tests, same_output
from coa_jax.rewards.graded import Ungradable
from tests.backend import BACKEND
from tools_sandbox.faults import Refused
from tools_sandbox.jail.wire import Result, Verdict

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"

STDIN = {"stdin": ["2 3\n", "10 5\n"], "expected_output": ["5\n", "15"]}
FUNCTIONAL = {
  "functional": "r = Solution().add(2, 3)\nassert r == 5, f'got {r!r}'\n"
  "assert Solution().add(10, b=5) == 15\n"
}
CHECK = {
  "import_prefix": "from operator import add\n",
  "test_code": "def check(candidate):\n  assert candidate(2, 3) == 5\n"
  "  for a in range(3):\n    assert candidate(a, 1) == a + 1\n",
  "entry_point": "add",
}
CALLS = {"inputs": ["2\n3", [10, 5]], "outputs": ["5", 15], "fn_name": "add"}
LINES = {"inputs": ["2 3", ["10 5"]], "outputs": ["5", ["15"]]}
PRINTS = "a, b = map(int, input().split())\nprint(a + b)"
METHOD = (
  "class Solution:\n  def add(self, a: int, b: int) -> List[int]:\n    return a + b"
)
ADD = "def add(a, b):\n  return a + b"
FORMS = {
  "stdin": (STDIN, PRINTS),
  "functional": (FUNCTIONAL, METHOD),
  "check": (CHECK, ADD),
  "calls": (CALLS, ADD),
  "calls of a method": (CALLS, METHOD),
  "lines": (LINES, PRINTS),
}


@pytest.fixture(scope="module")
def partial():
  """Like `grader`, but rewards the fraction of passed tests."""
  service = CodeGrader(CodeConfig(sandbox=BACKEND, partial=True, test_s=30.0))
  yield service
  service.close()


@pytest.mark.parametrize("form", FORMS)
def test_every_released_form_passes_what_is_right_and_only_that(form, partial):
  tests, program = FORMS[form]
  assert outcome(partial, tests, program) == (1.0, "passed")
  wrong = program.replace("a + b", "a - b")
  assert outcome(partial, tests, wrong) == (0.0, "wrong")
  half = program.replace("a + b", "a + b if a < 5 else 0")
  share, why = outcome(partial, tests, half)
  assert why == ("passed" if form == "check" else "wrong")
  assert share == (1.0 if form == "check" else 0.5)
  assert outcome(partial, tests, "def (")[1] == "raised"
  assert outcome(partial, tests, "import os\nos._exit(0)")[0] == 0.0


def test_an_empty_program_passes_nothing(grader):
  """Even if the prefix or the prelude defines the tested name."""
  gcd = {"test_code": "assert gcd(4, 6) == 2", "entry_point": "gcd"}
  assert outcome(grader, gcd, "x = 1") == (0.0, "raised")
  assert outcome(grader, CHECK, "x = 1") == (0.0, "raised")
  assert outcome(grader, gcd, "def gcd(a, b): return 2") == (1.0, "passed")
  assert outcome(grader, STDIN, "```py\n```") == (0.0, "missing")
  assert grader.grade(task(STDIN), None).record == {"outcome": "missing"}


@pytest.mark.slow
def test_asserts_see_state_changes_objects_and_exceptions(grader):
  tests = {
    "import_prefix": """
class Node:
  def __init__(self, value, next=None):
    self.value, self.next = value, next
def chain(values):
  head = None
  for value in reversed(values):
    head = Node(value, head)
  return head
def values(node):
  while node:
    yield node.value
    node = node.next
""",
    "test_code": """
import random
def check(candidate):
  stack = Stack()
  stack.push(4)
  stack.push(5)
  assert stack.pop() == 5 and stack.pop() == 4
  try:
    stack.pop()
    assert False, "it was empty"
  except IndexError:
    pass
  numbers = [3, 1, 2]
  assert candidate(numbers) is None
  assert numbers == [1, 2, 3]
  for _ in range(5):
    some = [random.random() for _ in range(4)]
    candidate(some)
    assert some == sorted(some)
  assert list(values(backwards(chain(list(range(500)))))) == list(range(500))[::-1]
  assert list(evens(7)) == [0, 2, 4, 6]
  assert pairs([1, 2]) == {(1, 2): {3}, "x": 1j} and pairs([1, 2])["x"] == 1j
""",
    "entry_point": "order",
  }
  program = """
class Stack:
  def __init__(self):
    self.items = []
  def push(self, x):
    self.items.append(x)
  def pop(self):
    return self.items.pop()
def order(numbers):
  numbers.sort()
def backwards(node):
  back = None
  while node:
    node.next, back, node = back, node, node.next
  return back
def evens(n):
  yield from range(0, n, 2)
def pairs(xs):
  return {tuple(xs): {sum(xs)}, "x": 1j}
"""
  graded = grader.grade(task(tests), program)
  assert graded.answer == 1.0 and graded.record["passed"] == 14
  for broken in ("self.items.append(x)", "numbers.sort()", "back, node, node.next"):
    worse = program.replace(broken, broken.replace("x)", "1)").replace("sort", "copy"))
    worse = worse.replace("back, node, node.next", "back, None, None")
    assert grader.grade(task(tests), worse).answer == 0.0


@pytest.mark.slow
def test_limits_have_outcomes_of_their_own(partial):
  hasty = CodeGrader(CodeConfig(sandbox=BACKEND, partial=True, test_s=2.0))
  loop = "import time\nwhile True: time.sleep(1)"
  assert outcome(hasty, STDIN, loop) == (0.0, "timeout")
  spin = ADD.replace("return", "while a == 10: pass\n  return")
  assert outcome(hasty, CALLS, spin) == (0.5, "timeout")
  hasty.close()
  stops = ADD.replace("return", "import os\n  if a == 2: os._exit(3)\n  return")
  share, why = outcome(partial, CHECK, stops)
  assert (share, why) == (0.5, "raised")  # later iterations still run
  hungry = "x = bytearray(4 << 30)\n" + PRINTS
  assert outcome(partial, STDIN, hungry) == (0.0, "memory")
  flood = "print('5' * 30_000_000)"
  assert outcome(partial, STDIN, flood) == (0.0, "wrong")


class DownSandbox:
  """A sandbox whose service does not start.

  Attributes:
    runs: number of attempts.
  """

  def __init__(self, **_):
    self.runs = 0

  def run(self, *_) -> Result:
    self.runs += 1
    return Result("", "no zygote", None, Verdict.INFRASTRUCTURE, 0.0)


def test_a_sandbox_that_fails_is_no_wrong_answer(monkeypatch):
  down = DownSandbox()
  with monkeypatch.context() as patch:
    patch.setattr(code, "Sandbox", lambda **_: down)
    service = CodeGrader(CodeConfig())
  for tests, program in FORMS.values():
    with pytest.raises(Ungradable, match="no zygote"):
      service.grade(task(tests), program)
  assert down.runs == 2 * len(FORMS)
  service = CodeGrader(CodeConfig(sandbox=BACKEND))
  service.close()
  with pytest.raises(Ungradable, match="closed"):
    service.grade(task(STDIN), PRINTS)


def test_a_service_that_refuses_is_no_wrong_answer(monkeypatch):
  def refuse(*args):
    raise Refused("timeout_s is above 60")

  monkeypatch.setattr(DownSandbox, "run", refuse)
  monkeypatch.setattr(code, "Sandbox", lambda **_: DownSandbox())
  with pytest.raises(Ungradable, match="above 60"):
    CodeGrader(CodeConfig()).grade(task(STDIN), PRINTS)


@pytest.mark.parametrize(
  "source", ["assert (", "x = 3", "assert f(lambda: 1)", "import os\nos._exit(1)"]
)
def test_broken_tests_are_no_wrong_answer(source, grader):
  with pytest.raises(Ungradable, match="hidden tests"):
    grader.grade(task({"functional": source}), "def f(x): return 1")


@pytest.mark.parametrize(
  ("source", "vanishes", "right"),
  [
    ("assert all(map(lambda n: f(n) == n, [1, 2]))", "raise StopIteration", "return n"),
    ("for x in f(3):\n  assert x == 7", "return []", "return [7] * n"),
  ],
)
def test_no_result_makes_a_test_vanish(source, vanishes, right, grader):
  for body, reward in ((vanishes, 0.0), (right, 1.0)):
    assert outcome(grader, {"functional": source}, f"def f(n): {body}")[0] == reward


@pytest.mark.slow
def test_the_tests_have_their_own_time():
  """A program that has nearly used up its own time still passes."""
  tests = {"functional": "import time\nx = f(3)\ntime.sleep(1)\nassert x == 3"}
  slow = "import time\ntime.sleep(1)\ndef f(n): return n"
  service = CodeGrader(CodeConfig(sandbox=BACKEND, total_s=1.6))
  assert outcome(service, tests, slow) == (1.0, "passed")
  service.close()


FORGED = """
import json, os, sys
def add(a, b):
  frame = sys._getframe()
  while "request" not in frame.f_locals or "out" not in frame.f_locals:
    frame = frame.f_back
  request, out = frame.f_locals["request"], frame.f_locals["out"]
  value = {"value": {"root": ROOT, "objects": []}, "args": None}
  line = request["nonce"] + " " + request["calls"][0][0] + " " + json.dumps(value)
  os.write(out, line.encode() + b"\\n")
  os._exit(0)
"""


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_what_a_program_says_it_returned_is_not_hashed_here(grader, kind, monkeypatch):
  """A set of numbers with equal hashes would block the whole process for minutes."""
  each = "k * (2**61 - 1)" if kind == "set" else "[k * (2**61 - 1), 0]"
  program = FORGED.replace("ROOT", f'{{"{kind}": [{each} for k in range(2_000)]}}')
  monkeypatch.setattr(code.code_inside, "decode", None)  # only the jail may decode
  assert outcome(grader, CALLS, program) == (0.0, "wrong")
  assert outcome(grader, CALLS, "def add(a, b): return {a + b}") == (0.0, "wrong")
  table = {"inputs": ["1"], "outputs": [{"1": [2]}], "fn_name": "f"}
  assert outcome(grader, table, "def f(a): return {a: (2,)}") == (1.0, "passed")


@pytest.mark.parametrize(
  ("tests", "message"),
  [
    (None, "meta.tests is NoneType; code tasks need hidden tests"),
    ({"stdin": ["1"]}, "meta.tests.expected_output must be a list"),
    ({"stdin": ["1"], "expected_output": ["1", "2"]}, "1 stdin for 2 expected_output"),
    ({"functional": " "}, "meta.tests.functional must be a non-empty string"),
    ({"test_code": "assert f()"}, "meta.tests.entry_point must be"),
    ({"inputs": ["("], "outputs": ["1"], "fn_name": "f"}, "must be JSON values"),
  ],
)
def test_refused_before_anything_runs(tests, message):
  with pytest.raises(ValueError, match=f"task 't': .*{message}"):
    read_tests(task(tests))


@pytest.mark.parametrize(
  ("printed", "expected", "same"),
  [
    ("1 2\n3 \n\n", "1 2\n3", True),
    ("1  2", "1 2", True),
    ("1.0", "1", True),
    ("0.3333333", "0.33333333", True),
    ("0.3334", "0.33333333", False),
    ("10000001", "10000002", False),
    ("1\n2", "1 2", False),
    ("nan", "nan.0", False),
    ("1e999999999", "1.0", False),
    ("yes", "YES", False),
    ("", "0", False),
  ],
)
def test_same_output(printed, expected, same):
  assert same_output(printed, expected, 1e-6) == same


def test_a_machine_without_jails_says_so(monkeypatch):
  def missing(**_):
    raise RuntimeError("no user namespaces")

  monkeypatch.setattr(code, "Sandbox", missing)
  with pytest.raises(ValueError, match=r"reward.code.sandbox='jail': no user names"):
    CodeGrader(CodeConfig())


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_pass_their_hidden_tests_and_stubs_do_not(name, grader):
  path = FIXTURES / f"{name}.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for task_, row in zip(load_tasks(path), rows, strict=True):
    stub = row.get("prompt", "") + "  return None"
    right = row.get("code") or row["prompt"] + row["canonical_solution"]
    assert grader.grade(task_, right).answer == 1.0, row["task_id"]
    assert grader.grade(task_, stub).answer == 0.0, row["task_id"]

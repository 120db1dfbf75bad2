"""Rewards for programs: hidden tests, run in the jail.

The released schemas (arXiv 2508.13167, code agent data) are `stdin` +
`expected_output`, `functional` (asserts), `test_code` + `entry_point` (asserts, with an
`import_prefix`) and `inputs` + `outputs` (with `fn_name`: calls, else stdin).

The graded program never shares a process, or a run, with its expected values. A program
that reads stdin prints text, and the host compares the text. Calls are made in one run,
and their plain results are compared in another (asserts) or on the host (`fn_name`):
see `inside`. So a hostile program can print, patch, walk and exit at will; only the
right answer to its input gains anything. Asserts also run in a jail: tests that `eval`
a string would execute the program's text there.

budget: the three test forms share one protocol with `inside`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import secrets
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.rewards.code import inside as code_inside
from coa_jax.rewards.code.program import program_of
from coa_jax.rewards.code.tests import (
  HiddenTests,
  long_integer,
  read_tests,
  same_output,
  same_value,
)
from coa_jax.rewards.graded import Graded, Ungradable
from coa_jax.runtime.fields import bounded, check_fields, choice
from tools_sandbox.client import BACKENDS, Sandbox
from tools_sandbox.faults import Refused
from tools_sandbox.jail.wire import Result, Verdict
from tools_sandbox.service.remote import RemoteConfig

# Absolute or relative error for a printed number, if the expected text has a decimal
# point; and for a returned number, also inside lists, if a float is expected (LeetCode
# writes five digits).
_TOLERANCE = 1e-6
_CALL_TOLERANCE = 1e-5
_OUTPUT_BYTES = 8 << 20  # per stream; longer output is cut, and therefore wrong
_ROUNDS = 400  # between tests and program; each settles a call in every unfinished test
_INSIDE = inspect.getsource(code_inside)
# Names that LiveCodeBench provides without an import, and its recursion limit; integers
# may have any number of digits.
_MODULES = (
  "typing, string, re, datetime, collections, heapq, bisect, copy, math, random, "
  "statistics, itertools, functools, operator, io, sys, json, builtins"
)
_PRELUDE = "\n".join(
  [
    *(f"from {name} import *" for name in _MODULES.split(", ")),
    f"import {_MODULES}",
    "sys.setrecursionlimit(50_000)",
    'getattr(sys, "set_int_max_str_digits", int)(0)',  # not in every service's Python
  ]
)
# Runs a program that reads stdin; the prelude's names become additional builtins.
_PRINTING = """
import builtins as _builtins
_names = {{}}
exec({prelude!r}, _names)
vars(_builtins).update({{**_names, **vars(_builtins)}})
del _builtins, _names
exec(compile({program!r}, "<solution>", "exec", dont_inherit=True))
"""


class Outcome(enum.StrEnum):
  """A program's test results: the first failure seen."""

  PASSED = "passed"
  WRONG = "wrong"  # another value or text than expected
  RAISED = "raised"  # the program, or its result's test, raised or exited
  TIMEOUT = "timeout"
  MEMORY = "memory"
  MISSING = "missing"  # the answer has no program


_OUTCOMES = {Verdict.TIMEOUT: Outcome.TIMEOUT, Verdict.MEMORY: Outcome.MEMORY}


@dataclasses.dataclass(frozen=True)
class CodeConfig:
  """Config section `reward.code`: hidden tests.

  Attributes:
    partial: True rewards the share of passed tests; False gives 1.0 if all pass, and
      the first failure ends the grading.
    sandbox: jail; remote (services run the programs); or subprocess, if the machine
      cannot build jails and no program is hostile (tools_sandbox/README.md).
    remote: the services, if `sandbox` is remote.
    workers: programs running at once.
    test_s: wall and CPU seconds per test.
    total_s: seconds for one answer's tests; tests left without time fail as timeout.
    memory_mb: MiB per run.
  """

  partial: bool = False
  sandbox: str = choice("jail", of=BACKENDS)
  remote: RemoteConfig | None = None
  workers: int = bounded(2, least=1)
  test_s: float = bounded(6.0, above=0)
  total_s: float = bounded(60.0, above=0)
  memory_mb: int = bounded(1024, least=1)

  def __post_init__(self):
    check_fields(self)
    if (self.sandbox == "remote") != (self.remote is not None):
      raise ValueError("remote: the services of sandbox='remote', and of no other")


class CodeGrader:
  """Runs hidden tests; thread-safe. Call `close` after use."""

  def __init__(self, config: CodeConfig):
    """Opens the sandbox; its processes start with the first program.

    Raises:
      ValueError: this machine cannot build the jail; the message names the missing
        requirement.
    """
    self.config = config
    try:
      self._sandbox = Sandbox(
        slots=config.workers,
        memory_mb=config.memory_mb,
        output_bytes=_OUTPUT_BYTES,
        backend=config.sandbox,
        remote=config.remote,
      )
    except RuntimeError as e:
      raise ValueError(f"reward.code.sandbox={config.sandbox!r}: {e}") from e

  def close(self) -> None:
    """Ends every program."""
    self._sandbox.close()

  def grade(self, task: Task, answer: str | None) -> Graded:
    """Returns 1.0 if the program passes all tests, or the share of passed tests.

    Raises:
      Ungradable: the sandbox failed, or the tests themselves are broken.
      ValueError: the task's tests have an unknown form.
    """
    tests = read_tests(task)
    program = program_of(answer or "")
    if not program.strip():
      return Graded(0.0, {"outcome": Outcome.MISSING.value})
    grading = _Grading(self._sandbox, self.config, task.id, program)
    if tests.source:
      grading.asserts(tests)
    elif tests.function:
      grading.calls(tests)
    else:
      grading.prints(tests)
    return grading.graded()


class _Grading:
  """One program and its tests."""

  def __init__(self, sandbox: Sandbox, config: CodeConfig, task_id: str, program: str):
    self.sandbox = sandbox
    self.config = config
    self.task_id = task_id
    self.program = program
    self.left = config.total_s
    self.outcomes: list[Outcome] = []
    self.death = Outcome.RAISED  # how the program last ended before its answers

  @property
  def failures(self) -> list[Outcome]:
    """The failed tests' outcomes."""
    return [outcome for outcome in self.outcomes if outcome != Outcome.PASSED]

  @property
  def decided(self) -> bool:
    """Whether further tests cannot change the reward."""
    return bool(self.failures) and not self.config.partial

  def graded(self) -> Graded:
    seen = len(self.outcomes)
    failures = self.failures
    passed = seen - len(failures)
    answer = float(not failures)
    if self.config.partial:
      answer = passed / seen
    outcome = Outcome.PASSED
    if failures:
      outcome = failures[0]
    return Graded(answer, {"outcome": outcome.value, "passed": passed, "seen": seen})

  def run(self, program: str, stdin: str, seconds: float, timed: bool = True) -> Result:
    """Runs a program; if `timed`, within the program's remaining time.

    After a service failure, the run is tried once more.

    Raises:
      Ungradable: the service failed twice, refuses the request, or is closed.
    """
    if timed:
      seconds = min(seconds, max(self.left, 0.1))
    for _ in range(2):
      try:
        result = self.sandbox.run(program, stdin, seconds)
      except (RuntimeError, Refused) as e:  # closed, or the service's limits
        raise Ungradable(f"task {self.task_id!r}: {e}") from e
      except ValueError:  # more characters than the sandbox takes
        return Result("", "too long", -9, Verdict.MEMORY, 0.0)
      if result.verdict != Verdict.INFRASTRUCTURE:
        if timed:
          self.left -= result.seconds
        return result
    raise Ungradable(
      f"task {self.task_id!r}: the sandbox failed: {result.stderr!r:.300}"
    )

  def prints(self, tests: HiddenTests) -> None:
    """Tests the program's printed output."""
    program = _PRINTING.format(prelude=_PRELUDE, program=self.program)
    for stdin, expected in zip(tests.inputs, tests.expected, strict=True):
      if self.left <= 0:
        self.outcomes.append(Outcome.TIMEOUT)
      else:
        result = self.run(program, stdin, self.config.test_s)
        if result.verdict != Verdict.OK:
          self.outcomes.append(_OUTCOMES.get(result.verdict, Outcome.RAISED))
        elif same_output(result.stdout, expected, _TOLERANCE):
          self.outcomes.append(Outcome.PASSED)
        else:
          self.outcomes.append(Outcome.WRONG)
      if self.decided:
        return

  def calls(self, tests: HiddenTests) -> None:
    """Tests a function's return values, compared on the host."""
    # --- All calls, in `inside`'s form: test n makes one call, number 0.
    calls = {}
    for n, arguments in enumerate(tests.inputs):
      calls[f"{n}.0"] = {
        "root": {"name": tests.function},
        "names": [],
        "args": code_inside.encode(arguments, {}),
        "kwargs": code_inside.encode({}, {}),
      }
    # --- One run for all calls, and another for the calls after a fatal call.
    replies: dict[str, str | None] = {}
    while len(replies) < len(calls):
      open_calls = {key: call for key, call in calls.items() if key not in replies}
      self.answers(open_calls, "", replies)
      # Immediately: `death` belongs to this run.
      for n in range(len(self.outcomes), len(replies)):
        self.outcomes.append(self._compare(replies[f"{n}.0"], tests, n))
      if self.decided:
        return

  def _compare(self, reply: str | None, tests: HiddenTests, n: int) -> Outcome:
    if reply is None:
      return self.death
    try:
      message = json.loads(reply)
      if "raised" in message:
        return Outcome.RAISED
      value = _plain(message["value"]["root"])
      expected = [tests.expected[n]]
      if tests.wrapped and isinstance(expected[0], list):
        expected += expected[0][:1]
      if any(same_value(value, e, _CALL_TOLERANCE) for e in expected):
        return Outcome.PASSED
    except (
      ValueError,
      TypeError,
      LookupError,
      AttributeError,
      ArithmeticError,
      RecursionError,
    ):
      pass  # a forged reply, or a value without a JSON form
    return Outcome.WRONG

  def asserts(self, tests: HiddenTests) -> None:
    """Tests by asserts, which run separately from the program.

    Tests and program alternate: the tests run until they need a call's result, the
    program answers such calls, and the tests run again from the start with the known
    results.
    """
    known: dict[str, _Known] = {}
    for _ in range(_ROUNDS):
      # --- The tests, as far as the known results reach.
      needs, verdicts = self._tests_round(tests, known)
      if not needs:
        self.outcomes = [self._outcome(v) for v in verdicts]
        return
      # --- The calls to send, in the tests' order. Objects live only as long as a run,
      # so the calls that made them are repeated.
      calls = dict(needs)
      if any(_is_stateful(call, reply) for call, reply in known.values()):
        for key, (call, _) in known.items():
          calls.setdefault(key, call)
      calls = {key: calls[key] for key in sorted(calls, key=_place)}
      # --- The program's answers. A known answer stays: the tests have relied on it.
      replies: dict[str, str | None] = {}
      self.answers(calls, tests.prefix, replies)
      for key, reply in replies.items():
        if key in needs or reply is None:
          known[key] = (calls[key], reply)
      if None in replies.values() and not self.config.partial:
        self.outcomes = [self.death]
        return
    self.outcomes = [Outcome.TIMEOUT]

  def _outcome(self, verdict: str) -> Outcome:
    outcomes = {"passed": Outcome.PASSED, "wrong": Outcome.WRONG, "dead": self.death}
    return outcomes.get(verdict, Outcome.RAISED)

  def _tests_round(
    self, tests: HiddenTests, known: dict[str, _Known]
  ) -> tuple[dict[str, Any], list[str]]:
    """Runs the tests with the known results; returns needed calls, or verdicts.

    Raises:
      Ungradable: the tests are broken.
    """
    # --- One run without the graded program, untimed: not the program's time.
    nonce = secrets.token_hex(16)
    request = {
      "nonce": nonce,
      "prefix": tests.prefix,
      "source": tests.source,
      "entry": tests.entry,
      "known": known,
    }
    program = _INSIDE + "\nrun_tests()\n"
    result = self.run(program, json.dumps(request), 30.0, timed=False)
    # --- Its one line: needs or verdicts, or why the tests are broken.
    for line in result.stdout.split("\n"):
      if line.startswith(nonce + " "):
        reply = json.loads(line.removeprefix(nonce))
        nothing = "broken" not in reply and not (reply["needs"] or reply["verdicts"])
        if "broken" in reply or (nothing and not known):
          why = reply.get("broken", "nothing in them can fail")
          raise Ungradable(f"task {self.task_id!r}: its hidden tests are broken: {why}")
        # A loop over an empty result tests nothing; this is not a pass.
        return dict(reply["needs"]), reply["verdicts"] or ["wrong"]
    # --- No line: the run died. Before any result the tests alone can be at fault.
    if not known:
      raise Ungradable(
        f"task {self.task_id!r}: its hidden tests end by themselves with "
        f"{result.verdict.value}: {result.stderr!r:.300}"
      )
    return {}, ["too much for the tests"]  # its result cannot be decoded

  def answers(
    self, calls: dict[str, Any], prefix: str, replies: dict[str, str | None]
  ) -> None:
    """Sends calls to the program; fills in its replies up to its death.

    A reply is verbatim JSON text; None for a call with two answers, or in which the
    program died. Later calls have no reply.
    """
    # --- No time left: every call counts as fatal.
    if self.left <= 0:
      self.death = Outcome.TIMEOUT
      replies.update(dict.fromkeys(calls))
      return
    # --- One run for all the calls.
    nonce = secrets.token_hex(16)
    request = {
      "nonce": nonce,
      "prelude": _PRELUDE,
      "prefix": prefix,
      "program": self.program,
      "seconds": self.config.test_s,
      "calls": list(calls.items()),
    }
    program = _INSIDE + "\nanswer_calls()\n"
    seconds = self.config.test_s * (len(calls) + 1)
    result = self.run(program, json.dumps(request), seconds)
    # --- Its lines; a call with two answers was forged, and has no answer.
    answers: dict[str, str | None] = {}
    for line in result.stdout.split("\n"):
      head, _, rest = line.partition(" ")
      key, _, reply = rest.partition(" ")
      if head != nonce:
        continue
      answers[key] = None if key in answers else reply
    # --- In order, up to the fatal call.
    for key in calls:
      replies[key] = answers.get(key)
      if replies[key] is None:
        self.death = _OUTCOMES.get(result.verdict, Outcome.RAISED)
        if result.exit_code == -_ALARM:
          self.death = Outcome.TIMEOUT
        return


_ALARM = 14  # SIGALRM ends a call that takes too long
_Known = tuple[Any, str | None]  # a call and the program's reply to it


def _is_stateful(call: Any, reply: str | None) -> bool:
  """Whether a call used an object in the program, or returned one."""
  return "handle" in call["root"] or (reply is not None and '"opaque"' in reply)


def _place(key: str) -> tuple[int, ...]:
  return tuple(map(int, key.split(".")))


def _plain(value: Any) -> Any:
  """Converts an encoded value to JSON: tuples become lists, and keys become text.

  Only text is hashed: a program can choose numbers with equal hashes, and a set with
  such numbers would stall this whole process.

  Raises:
    TypeError, ValueError: the value has no JSON form, so it cannot be expected.
  """
  if not isinstance(value, dict):
    return value
  ((kind, inner),) = value.items()
  if kind == "int":
    return long_integer(inner)
  if kind in ("list", "tuple"):
    return [_plain(v) for v in inner]
  if kind != "dict" or any(isinstance(k, dict) for k, _ in inner):
    raise TypeError(f"a {kind} is no JSON")
  return {str(k): _plain(v) for k, v in inner}

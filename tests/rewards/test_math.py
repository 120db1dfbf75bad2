"""Mathematical equivalence; no answer can stall or crash the grader."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import re
import resource
import signal
import subprocess

import math_verify
import pytest

from coa_jax.rewards import math

PAIRS = pathlib.Path(__file__).with_name("math_pairs.tsv")


def pairs() -> list[list[str]]:
  """Rows: prediction, gold, equal or not, math-verify's verdict, the reason."""
  _, *rows = PAIRS.read_text(encoding="utf-8").splitlines()
  return [row.split("\t") for row in rows]


@pytest.mark.slow
def test_pairs_that_are_equal_and_pairs_that_are_not():
  rows = pairs()
  assert len({(row[0], row[1]) for row in rows}) == len(rows) >= 500
  verdicts = {True: "yes", False: "no"}
  wrong = [row for row in rows if verdicts[math.equivalent(row[0], [row[1]])] != row[2]]
  assert not wrong


def read(text: str) -> list:
  return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)


@pytest.mark.slow
def test_what_math_verify_says_is_beside_each_pair_and_each_deviation_has_a_reason():
  rows = pairs()
  assert not [row for row in rows if row[2] != row[3] and len(row[4].split()) < 2]
  # With the installed version: one with other verdicts needs another table.
  verdicts = {True: "yes", False: "no"}
  changed = []
  for row in rows:
    equal = math_verify.verify(read(row[1]), read(row[0]), timeout_seconds=None)
    if verdicts[bool(equal)] != row[3]:
      changed.append(row)
  assert not changed


# Texts with a formula that math-verify finds without a box.
IN_PROSE = [
  ("The answer is $\\frac12$", "$0.5$"),
  ("so \\boxed{1} then \\boxed{2}", "\\boxed{2}"),
  ("\\(x=3\\)", "$3$"),
  ("\\[2\\sqrt{3}\\]", "$2$"),
]


@pytest.mark.slow
def test_the_bare_grader_is_math_verify():
  rows = pairs()
  deviating = [row for row in rows if row[2] != row[3] and "boxed" not in row[0]]
  plain = [tuple(row[:2]) for row in [*rows[:100:5], *deviating[::8]]]
  plain = [pair for pair in plain if not re.search(r"\$|\\\(|answer is", "".join(pair))]
  assert len(plain) + len(IN_PROSE) >= 40
  for prediction, gold in plain:
    equal = math_verify.verify(read(gold), read(prediction), timeout_seconds=None)
    assert math.math_verify_says(prediction, [gold]) == equal, (prediction, gold)
  for prediction, gold in IN_PROSE:
    ours, theirs = (
      math_verify.parse(text, parsing_timeout=None) for text in (prediction, gold)
    )
    equal = math_verify.verify(theirs, ours, timeout_seconds=None)
    assert math.math_verify_says(prediction, [gold]) == equal, (prediction, gold)
  # The two graders keep their own verdicts.
  assert math.math_verify_says("10^{-20}\\pi", ["10^{-20}"])
  assert not math.equivalent("10^{-20}\\pi", ["10^{-20}"])


def kill_the_child() -> None:
  """Acts like the kernel when memory is short; there may be no child yet."""
  find = ["pgrep", "-P", str(os.getpid()), "-f", "math_inside"]
  for pid in subprocess.run(find, capture_output=True, text=True).stdout.split():
    os.kill(int(pid), signal.SIGKILL)


def test_a_killed_child_is_replaced():
  assert math.equivalent("\\sqrt{4}", ["2"])
  kill_the_child()
  assert math.equivalent("\\sqrt{9}", ["3"])


def test_several_values_in_one_answer_are_a_set_and_any_gold_answer_will_do():
  assert math.equivalent("3", ["2", "3"])
  assert math.equivalent("\\boxed{3, -1}", ["-1, 3"])
  assert math.equivalent("x = 3 or x = -1", ["1, 2", "\\{-1, 3\\}"])
  assert not math.equivalent("3", ["-1, 3"])


@pytest.mark.slow
@pytest.mark.parametrize(
  "answer",
  [
    "",
    "9" * 2000,
    "\\frac{" * 150,
    "((" * 400,
    "x^" * 400 + "x",
    "\\int " * 150,
    "\x00",
    "i^" * 300 + "i",
    "sin(" * 200,
    "\ufdfa" * 900,  # one character; NFKC turns it into eighteen
    "9^{9^{9}}+i",
    "10^{-10^{10}}+0.1",
  ],
)
def test_no_answer_crashes_the_grader(answer, monkeypatch):
  monkeypatch.setattr(math, "CPU_SECONDS", 1)
  assert not math.equivalent(answer, ["2\\sqrt{2}"])
  assert math.equivalent("\\sqrt{8}", ["2\\sqrt{2}"])


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "\\frac{" * 150, "9" * 5000])
def test_no_answer_crashes_the_bare_grader(answer, monkeypatch):
  monkeypatch.setattr(math, "CPU_SECONDS", 1)
  assert not math.math_verify_says(answer, ["2\\sqrt{2}"])
  assert math.math_verify_says("\\sqrt{8}", ["2\\sqrt{2}"])


def test_many_open_files_do_not_stop_the_grader():
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
  with contextlib.ExitStack() as stack:
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    stack.callback(kill_the_child)
    for _ in range(1100):  # moves a new child's pipes beyond 1023
      stack.enter_context(open(os.devnull))
    kill_the_child()
    assert math.equivalent("\\sqrt{4}", ["2"])


@pytest.mark.slow
def test_threads_may_grade_at_once_and_an_endless_answer_holds_none_up(monkeypatch):
  monkeypatch.setattr(math, "CPU_SECONDS", 1)
  cases = [(f"\\sqrt{{{n * n}}}", [str(n + n % 2)], n % 2 == 0) for n in range(2, 18)]
  for i in (0, 9):
    cases.insert(i, ("9^{9^{9^{9}}}", ["4"], False))
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    jobs = [pool.submit(math.equivalent, *case[:2]) for case in cases]
    assert [job.result(timeout=110) for job in jobs] == [case[2] for case in cases]

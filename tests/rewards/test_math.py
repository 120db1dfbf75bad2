"""Mathematical equivalence, and that no answer can stall or crash the grader."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import os
import pathlib
import resource
import signal
import time

import math_verify
import pytest

from coa_jax.rewards import math

SOFT, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
PAIRS = pathlib.Path(__file__).with_name("math_pairs.tsv")
RIGHT = [
  ("204", "204"),
  ("\\boxed{204}", "204"),
  ("so \\boxed{1} then \\boxed{\\frac{1}{2}}", "0.5"),
  ("\\boxed{'42'}", "42"),
  ("27.0", "27"),
  ("1,234,567", "1234567"),
  ("$\\frac12$", "\\frac{1}{2}"),
  ("18 dollars", "18"),
  ("\\$18", "18"),
  ("The answer is 204", "204"),
  ("(3,\\pi/2)", "\\left( 3, \\frac{\\pi}{2} \\right)"),
  ("1,2,-1,-2", "-2,-1,1,2"),
  ("f(x)=x+1", "$x+1$"),
  ("\\text{Evelyn}", "Evelyn"),
  ("2\\sqrt{2}", "$\\sqrt{8}$"),
  ("18 square feet", "18"),
  ("5 seconds", "5"),
  ("18 \\text{ dollars}", "18"),
  ("5 million", "5000000"),
  ("5,000,000", "5 million"),
  ("1.5 \\text{ million} dollars", "1500000"),
  ("$\\frac{1}{2}$ million", "500000"),
  ("3 Hundred thousand", "300000"),
  ("2 dozen eggs", "24"),
]
WRONG = [
  ("205", "204"),
  ("", "204"),
  ("5 or 204", "204"),
  ("0.333", "1/3"),
  ("2\\pi", "2"),
  ("\\boxed{1} or \\boxed{2}", "1"),
  ("1/0", "1"),
  ("9" * 2000, "9"),
  ("\\boxed{", "1"),
  ("5 million", "5"),
  ("5", "5 million"),
  ("5 \\text{ million}", "5"),
  ("$5$ million", "5"),
  ("1.5~\\text{million}", "3/2"),
  ("3 hundred", "3"),
  ("10 factorial", "10"),
  ("3 squared", "3"),
  ("2 thirds", "2"),
  ("18 minus two", "18"),
  ("18 \\text{ minus two}", "18"),
  ("5 and six", "5"),
  ("2 times pi", "2"),
  ("2 sin x", "2"),
  ("7 forty", "7"),
]


@pytest.mark.parametrize(("prediction", "gold"), RIGHT)
def test_equal(prediction: str, gold: str):
  assert math.equivalent(prediction, [gold])


@pytest.mark.parametrize(("prediction", "gold"), WRONG)
def test_different(prediction: str, gold: str):
  assert not math.equivalent(prediction, [gold])


def test_any_gold_answer_will_do():
  assert math.equivalent("3", ["2", "3"])


def pairs() -> tuple[str, list[list[str]]]:
  """The version of math-verify, and rows: prediction, gold, equal, its verdict, why."""
  text = PAIRS.read_text(encoding="utf-8")
  head, *rows = (line.split("\t") for line in text.splitlines())
  return head[3].split()[1], rows


def test_two_hundred_hard_pairs():
  _, rows = pairs()
  assert len({(row[0], row[1]) for row in rows}) == 200
  verdicts = {True: "yes", False: "no"}
  wrong = [row for row in rows if verdicts[math.equivalent(row[0], [row[1]])] != row[2]]
  assert not wrong


def test_what_math_verify_says_is_beside_each_pair_and_each_deviation_has_a_reason():
  version, rows = pairs()
  assert not [row for row in rows if row[2] != row[3] and len(row[4].split()) < 2]
  if importlib.metadata.version("math-verify") != version:
    pytest.skip(f"the table holds the verdicts of math-verify {version}")

  def read(text: str) -> list:
    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)

  for prediction, gold, _, recorded, _ in rows:
    equal = math_verify.verify(read(gold), read(prediction), timeout_seconds=None)
    assert {True: "yes", False: "no"}[bool(equal)] == recorded, (prediction, gold)


def test_an_endless_answer_is_wrong_and_the_next_one_is_graded(monkeypatch):
  monkeypatch.setattr(math, "CPU_SECONDS", 1)
  began = time.monotonic()
  assert not math.equivalent("9^{9^{9^{9}}}", ["4"])
  assert time.monotonic() - began < 110
  assert math.equivalent("\\sqrt{4}", ["2"])


def test_a_killed_child_is_replaced():
  assert math.equivalent("\\sqrt{4}", ["2"])
  os.kill(math._VERIFIER._child.pid, signal.SIGKILL)
  math._VERIFIER._child.wait()
  assert math.equivalent("\\sqrt{9}", ["3"])


def test_several_values_in_one_answer_are_a_set():
  assert math.equivalent("\\boxed{3, -1}", ["-1, 3"])
  assert math.equivalent("x = 3 or x = -1", ["1, 2", "\\{-1, 3\\}"])
  assert not math.equivalent("3", ["-1, 3"])


@pytest.mark.parametrize(
  "answer", ["\\frac{" * 150, "((" * 400, "x^" * 400 + "x", "\\int " * 150, "\x00"]
)
def test_no_answer_crashes_the_grader(answer):
  assert not math.equivalent(answer, ["2\\sqrt{2}"])
  assert math.equivalent("\\sqrt{8}", ["2\\sqrt{2}"])


def test_many_open_files_do_not_stop_the_grader():
  resource.setrlimit(resource.RLIMIT_NOFILE, (4096, HARD))
  math._VERIFIER.close()
  with contextlib.ExitStack() as stack:
    for _ in range(1100):
      stack.enter_context(open(os.devnull))
    assert math.equivalent("\\sqrt{4}", ["2"])
    assert math._VERIFIER._child.stdout.fileno() > 1024
    math._VERIFIER.close()
  resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))


def test_an_endless_answer_holds_no_other_thread_up_for_long(monkeypatch):
  monkeypatch.setattr(math, "CPU_SECONDS", 1)
  endless = ("9^{9^{9^{9}}}", ["4"])
  plain = ("\\sqrt{9}", ["3"])
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    jobs = [pool.submit(math.equivalent, *job) for job in [endless, plain] * 2]
    assert [job.result(timeout=300) for job in jobs] == [False, True] * 2


def test_threads_may_grade_at_once():
  cases = [(f"\\sqrt{{{n * n}}}", [str(n + n % 2)], n % 2 == 0) for n in range(2, 18)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    verdicts = list(pool.map(lambda c: math.equivalent(c[0], c[1]), cases))
  assert verdicts == [c[2] for c in cases]

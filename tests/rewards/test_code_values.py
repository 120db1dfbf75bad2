"""Returned and printed values against expected ones; names that programs may use."""

from __future__ import annotations

import pytest
from hidden_tests import outcome, task

from coa_jax.rewards.code.tests import read_tests

STDIN = {"stdin": ["2 3\n", "10 5\n"], "expected_output": ["5\n", "15"]}


SUM = "def f(*x): return {}"


@pytest.mark.parametrize(
  ("returns", "expected", "reward"),
  [
    ("5", "[5]", 0.0),
    ("[5]", "[[5]]", 0.0),
    ("False", "[0]", 0.0),
    ("None", "[null]", 0.0),
    ("'a'", '["a"]', 0.0),
    ("[]", "[[]]", 0.0),
    ("{}", "[{}]", 0.0),
    ("[5]", "5", 0.0),
    # Floats approximately, also inside lists and objects; integers exactly.
    ("0.1 + 0.2", "0.3", 1.0),
    ("[1 / 3]", "[0.33333333333]", 1.0),
    ("[[1 / 3, 2], [3.0]]", "[[0.33333, 2], [3]]", 1.0),
    ("{'a': 0.1 + 0.2}", '{"a": 0.3}', 1.0),
    ("1 / 3", "0.33333", 1.0),
    ("(1e9 + 1) / 3", "333333333.66667", 1.0),
    ("1 / 3", "0.3334", 0.0),
    ("[1 / 3, 0.5]", "[0.33333, 0.6]", 0.0),
    ("float('nan')", "0.5", 0.0),
    ("10 ** 400", "0.5", 0.0),
    ("'0.3'", "0.3", 0.0),
    ("2", "2.0", 1.0),
    ("2.0", "2", 1.0),
    ("2.0000001", "2", 0.0),
    ("10 ** 17 + 1", str(10**17), 0.0),
    # In Python True is 1, for LiveCodeBench and for asserts too.
    ("1", "true", 1.0),
    ("[True]", "[1]", 1.0),
    # Integers longer than a JSON reader accepts by default.
    ("7 ** 6000", "7" + "0" * 5070, 0.0),
    ("10 ** 5070", "1" + "0" * 5070, 1.0),
    ("[-(10 ** 5070)]", "[-1" + "0" * 5070 + "]", 1.0),
    ("10 ** 5070 + 1", "1" + "0" * 5070, 0.0),
    ("str(10 ** 4000)", "1" + "0" * 4000, 0.0),
  ],
)
def test_what_a_call_returns_is_what_is_expected(returns, expected, reward, grader):
  tests = {"inputs": ["1"], "outputs": [expected], "fn_name": "f"}
  program = SUM.format(returns)
  assert outcome(grader, tests, program)[0] == reward
  by_name = {"functional": f"assert f(1) == ({returns})"}
  if "nan" not in returns:
    assert outcome(grader, by_name, program)[0] == 1.0


def test_a_list_of_one_is_the_value_where_the_data_set_says_so(grader):
  tests = {"inputs": [[[2, 3]]], "outputs": [[5]], "fn_name": "f"}
  program = "def f(x): return sum(x)"
  assert outcome(grader, tests, program)[0] == 0.0
  wrapped = {**tests, "wrapped_outputs": True}
  assert outcome(grader, wrapped, program)[0] == 1.0
  assert outcome(grader, wrapped, "def f(x): return [sum(x)]")[0] == 1.0
  assert outcome(grader, wrapped, "def f(x): return [[sum(x)]]")[0] == 0.0
  with pytest.raises(ValueError, match="wrapped_outputs must be true or false, got 1"):
    read_tests(task({**tests, "wrapped_outputs": 1}))


def test_an_argument_may_be_a_long_integer(grader):
  tests = {"inputs": ["1" + "0" * 5000], "outputs": ["5001"], "fn_name": "f"}
  assert outcome(grader, tests, "def f(x): return len(str(x))")[0] == 1.0
  asserts = {"functional": "assert f(10 ** 5000) == 10 ** 5001"}
  assert outcome(grader, asserts, "def f(x): return x * 10")[0] == 1.0
  assert outcome(grader, asserts, "def f(x): return x * 10 + 1")[0] == 0.0


PRELUDE_USES = [
  "gcd(12, 18) == 6",
  "statistics.median([1, 2, 3]) == 2 and mean([2]) == 2",
  "json.loads('[1]') == [1] and loads('1') == 1",
  "io.StringIO('a').read() == 'a'",
  "datetime.date(2024, 2, 29).day == 29 and timedelta(days=1).days == 1",
  "bisect.bisect_left([1, 2], 2) == 1 and bisect_right([1], 1) == 1",
  "Counter('aab').most_common(1) == [('a', 2)] and deque([1])[0] == 1",
  "lru_cache(None)(lambda: 1)() == 1 and reduce(add, [1, 2]) == 3",
  "list(accumulate([1, 2])) == [1, 3] and itertools.count(1)",
  "ascii_lowercase == string.ascii_lowercase and maxsize == sys.maxsize",
  "re.sub('a', 'b', 'a') == 'b' and match('a', 'ab')",
  "copy.copy([1]) == deepcopy([1]) and random.Random(0) and randint(1, 1)",
  "pow(2, 3, 5) == 3 and heappop([1]) == 1 and Optional[List[int]]",
  "len(str(7 ** 6000)) == 5071 and str(7 ** 6000)",
  "int('1' + '0' * 5000) == 10 ** 5000",
]


@pytest.mark.parametrize("kind", ["stdin", "calls"])
def test_both_kinds_of_programs_have_the_prelude(kind, grader):
  body = "".join(f"  assert {use}\n" for use in PRELUDE_USES)
  program = "from __future__ import annotations\n"
  program += f"def f(n: List[int]):\n{body}  return 0 if n == 0 else 1 + f2(n - 1)\n"
  program += "def f2(n):\n  return 0 if n == 0 else 1 + f2(n - 1)\n"
  tests = {"inputs": ["20000"], "outputs": ["20000"]}
  if kind == "calls":
    tests["fn_name"] = "f"
  else:
    program += "if __name__ == '__main__':\n  print(f(int(input())))\n"
  assert outcome(grader, tests, program) == (1.0, "passed")
  assert outcome(grader, tests, program.replace("Counter", "Count_er"))[0] == 0.0


def test_a_program_that_reads_stdin_is_main(grader):
  program = """
import collections, pickle, sys
class Counter: pass
gcd = 3
def main():
  assert type(pickle.loads(pickle.dumps(Counter()))) is Counter
  assert sys.modules["__main__"].gcd == gcd == 3 and "lcm" not in globals()
  print(sum(map(int, stdin.read().split())))
main()
"""
  assert outcome(grader, STDIN, program) == (1.0, "passed")

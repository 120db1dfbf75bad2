"""Hidden tests for code tasks: the released schemas as three forms, and comparison.

Rows come from other people's files: a row that fits no form is refused before any run.
"""

from __future__ import annotations

import dataclasses
import decimal
import itertools
import json
import math
import re
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.runtime.json_io import parse_json

_DIGITS = 4000  # in an integer; Python reads and writes 4,300 by default
_LONG = re.compile(rf"-?\d{{{_DIGITS},100000}}")  # time is quadratic in the digits


@dataclasses.dataclass(frozen=True)
class HiddenTests:
  """One task's hidden tests, in one of three forms.

  Attributes:
    inputs: each test's input: text on stdin, or the arguments of `function`.
    expected: the expected results, one for each input; () for asserts.
    function: the called function's name; "" if the program reads stdin.
    source: asserts, as Python; "" for the other forms.
    prefix: source that runs before both the asserts and the program.
    entry: the argument of the asserts' `check`; "" for none.
    wrapped: whether the expected value may be the first item of a list (APPS).
  """

  inputs: tuple[Any, ...] = ()
  expected: tuple[Any, ...] = ()
  function: str = ""
  source: str = ""
  prefix: str = ""
  entry: str = ""
  wrapped: bool = False


def read_tests(task: Task) -> HiddenTests:
  """Reads the hidden tests in `task.meta["tests"]`.

  Raises:
    ValueError: there are no tests, or their form is unknown; the message names the
      task, the field and the accepted forms.
  """
  where = f"task {task.id!r}: meta.tests"
  row = task.meta.get("tests")
  if not isinstance(row, dict):
    raise ValueError(
      f"{where} is {type(row).__name__}; code tasks need hidden tests, "
      "an object with stdin + expected_output, functional, test_code + entry_point, or "
      "inputs + outputs"
    )
  row = {k: v for k, v in row.items() if v is not None}
  # --- Asserts, with or without a `check` function.
  if "functional" in row:
    return HiddenTests(source=_text(row, "functional", where))
  if "test_code" in row:
    source = _text(row, "test_code", where)
    entry = _text(row, "entry_point", where)
    prefix = str(row.get("import_prefix", ""))
    return HiddenTests(source=source, entry=entry, prefix=prefix)
  # --- Inputs and outputs, under either pair of names.
  first, second = "inputs", "outputs"
  if "stdin" in row:
    first, second = "stdin", "expected_output"
  inputs: Any = row.get(first)
  outputs: Any = row.get(second)
  for name, value in ((first, inputs), (second, outputs)):
    if not isinstance(value, list | tuple) or not value:
      raise ValueError(f"{where}.{name} must be a list of at least one value")
  if len(inputs) != len(outputs):
    raise ValueError(f"{where}: {len(inputs)} {first} for {len(outputs)} {second}")
  # --- Texts for a program with stdin.
  function = row.get("fn_name", "")
  if not function:
    return HiddenTests(tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
  # --- Values for a function call.
  try:
    arguments = tuple(map(_arguments, inputs))
    values = tuple(map(_value, outputs))
  except (ValueError, TypeError) as e:
    raise ValueError(f"{where}: inputs and outputs must be JSON values: {e}") from None
  # Never guessed: in other data, a one-item list is just a list.
  wrapped = row.get("wrapped_outputs", False)
  if not isinstance(wrapped, bool):
    raise ValueError(f"{where}.wrapped_outputs must be true or false, got {wrapped!r}")
  function = _text(row, "fn_name", where)
  return HiddenTests(arguments, values, function, wrapped=wrapped)


def _text(row: dict[str, Any], name: str, where: str) -> str:
  value = row.get(name)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{where}.{name} must be a non-empty string, got {value!r:.80}")
  return value


def _lines(value: Any) -> str:
  """Converts a value to text; a list becomes one line per item."""
  if isinstance(value, list):
    return "\n".join(map(str, value))
  return str(value)


def _arguments(value: Any) -> list[Any]:
  """Reads a call's arguments: a list, or lines of JSON, one each."""
  if isinstance(value, str):
    return [_argument(line) for line in value.split("\n") if line.strip()]
  if not isinstance(value, list):
    raise ValueError(f"arguments {value!r:.80} are no list")
  return value


def _argument(line: str) -> Any:
  try:
    return parse_json(line, "arguments")
  except ValueError:
    # An integer longer than Python's default limit; Decimal has no limit.
    if not _LONG.fullmatch(line.strip()):
      raise
    return int(decimal.Decimal(line.strip()))


def _value(value: Any) -> Any:
  """Reads a call's expected value; text other than JSON is the value itself."""
  if not isinstance(value, str):
    return value
  try:
    return json.loads(value, parse_int=_integer)
  except (ValueError, RecursionError):
    return value


def _integer(digits: str) -> int | decimal.Decimal:
  """Reads an integer, as a Decimal if it has `_DIGITS` digits or more."""
  if len(digits) < _DIGITS:
    return int(digits)
  return long_integer(digits)


def long_integer(digits: str) -> decimal.Decimal:
  """Reads an integer of any length, in linear time.

  Raises:
    ValueError: the text is not an integer.
    TypeError: `digits` is not text.
  """
  if not re.fullmatch(r"-?\d+", digits):
    raise ValueError("not an integer")
  return decimal.Decimal(digits)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
  """Whether a call returned the expected value; both are JSON.

  Numbers are equal in value (True is 1, as in Python), or within the tolerance,
  absolute or relative, if a float is expected. Text, lists and objects are equal item
  by item.
  """
  if isinstance(expected, list):
    if not isinstance(value, list) or len(value) != len(expected):
      return False
    pairs = zip(value, expected, strict=True)
    return all(same_value(v, e, tolerance) for v, e in pairs)
  if isinstance(expected, dict):
    if not isinstance(value, dict) or value.keys() != expected.keys():
      return False
    return all(same_value(value[k], e, tolerance) for k, e in expected.items())
  if isinstance(expected, float) and isinstance(value, int | float | decimal.Decimal):
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
  return value == expected


def same_output(printed: str, expected: str, tolerance: float) -> bool:
  """Whether a program printed the expected output.

  White space around words, and around the text, is ignored. Words are equal as text or
  as exact decimals, or within the tolerance if the expected word has a decimal point.
  """
  ours = [line.split() for line in printed.strip().split("\n")]
  theirs = [line.split() for line in expected.strip().split("\n")]
  if list(map(len, ours)) != list(map(len, theirs)):
    return False
  words = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
  return all(a == b or _same_number(a, b, tolerance) for a, b in words)


def _same_number(ours: str, theirs: str, tolerance: float) -> bool:
  if max(len(ours), len(theirs)) > 100:  # a program chose its length
    return False
  try:
    a = decimal.Decimal(ours)
    b = decimal.Decimal(theirs)
    if not (a.is_finite() and b.is_finite()):
      return False
    # Exact: beyond 2**53, only one of two neighbours is right.
    if "." not in theirs:
      return a == b
    return abs(float(a) - float(b)) <= tolerance * max(1.0, abs(float(b)))
  except (decimal.DecimalException, OverflowError, ValueError):
    return False

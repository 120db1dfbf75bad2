"""The calculator that evaluations use as a tool never seen."""

from __future__ import annotations

import pytest

from coa_jax.tools.functions import Functions, FunctionTool
from experiments.calculator import TOOL, calculate
from tools_sandbox.faults import BadCall


@pytest.mark.parametrize(
  ("expression", "value"),
  [
    ("3 * (4 + 5)", "27"),
    (" -7 // 2 ", "-4"),
    ("7 / 2", "3.5"),
    ("7 % 4 - +1.5", "1.5"),
    ("1999 - 1950", "49"),
  ],
)
def test_values(expression: str, value: str):
  assert calculate(expression) == value


@pytest.mark.parametrize(
  ("expression", "message"),
  [
    ("", "no arithmetic"),
    ("2 +", "no arithmetic"),
    ("a\0b", "no arithmetic"),
    (7, "no arithmetic"),
    (None, "no arithmetic"),
    ("__import__('os')", "only numbers"),
    ("2 ** 9999999999", "only numbers"),
    ("True + 1", "only numbers"),
    ("'a' * 10", "only numbers"),
    ("[1][0]", "only numbers"),
    ("1 / 0", "zero"),
    ("1e99 * 1e99", "too large"),
    ("1e999", "too large"),
    ("9" * 900, "too large"),
    ("*".join(["9" * 90] * 9), "too large"),
    ("-" * 990 + "1", "too deep"),
    ("(" * 900 + "1" + ")" * 90, "no arithmetic|too deep"),
  ],
)
def test_what_is_no_arithmetic_is_the_callers_fault(expression: object, message: str):
  with pytest.raises(BadCall, match=message):
    calculate(expression)


def test_it_is_a_function_tool():
  tools = Functions({"calculate": FunctionTool(**TOOL)})
  call = '{"name": "calculate", "arguments": {"expression": "2 * 21"}}'
  assert tools(call, 1.0) == "42"

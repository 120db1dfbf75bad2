"""A tool of one function, arithmetic: an example, and one no training here has seen.

  config.tools.tools = ("wiki_search", "tool")
  config.tools.functions = dict(calculate=calculator.TOOL)

The policy calls it as {"name": "calculate", "arguments": {"expression": "2 * (3 + 4)"}}
and may write anything: it is parsed, never evaluated by Python, and numbers stay below
a size.
"""

from __future__ import annotations

import ast
import operator

from tools_sandbox.faults import BadCall

TOOL = {
  "description": "compute an arithmetic expression; its argument is expression",
  "function": "experiments.calculator:calculate",
}
_LARGEST = 1e100
_BINARY = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
  """The value of an arithmetic expression: numbers, + - * / // % and parentheses.

  Raises:
    BadCall: it is anything else, divides by zero, or a number in it has more than 100
      digits.
  """
  try:
    return str(_value(ast.parse(expression[:1000].strip(), mode="eval").body))
  except (SyntaxError, ValueError, AttributeError, TypeError) as e:
    raise BadCall(f"expression is no arithmetic: {e}") from None
  except (RecursionError, MemoryError):
    raise BadCall("expression is too deep") from None
  except (ZeroDivisionError, OverflowError) as e:
    raise BadCall(str(e)) from None


def _value(node: ast.expr) -> float:
  match node:
    case ast.Constant(value) if type(value) in (int, float):
      result = value
    case ast.UnaryOp(op, operand) if type(op) in _UNARY:
      result = _UNARY[type(op)](_value(operand))
    case ast.BinOp(left, op, right) if type(op) in _BINARY:
      result = _BINARY[type(op)](_value(left), _value(right))
    case _:
      raise BadCall(f"{ast.unparse(node)[:80]!r}: only numbers and + - * / // % ( )")
  if not abs(result) < _LARGEST:
    raise BadCall("a number is too large")
  return result

"""Finds calls in smolagents programs: parses the programs, never runs them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

Program = Sequence[ast.stmt]
# In OAgents and smolagents, programs call managed agents as functions.
AGENT = "search_agent"  # the function by which a program delegates a task
# Nodes in a statement that delegates a task, keeps the result or prints it.
_PLAIN = (
  ast.Expr,
  ast.Assign,
  ast.Call,
  ast.Name,
  ast.Constant,
  ast.keyword,
  ast.expr_context,
  ast.JoinedStr,
  ast.FormattedValue,
)


def parse_program(program: str) -> list[ast.stmt]:
  """Parses a program into statements; returns none if it is not Python."""
  try:
    return ast.parse(program).body
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return []


def callee(node: ast.AST) -> str | None:
  """Returns the plain name of a call's function."""
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    return node.func.id
  return None  # a method, or the result of another call


def nodes_in_order(program: Program, kind: type) -> list[Any]:
  """Lists a kind's nodes by end position: a call's arguments before the call."""
  nodes = []
  for statement in program:
    nodes += [node for node in ast.walk(statement) if isinstance(node, kind)]
  return sorted(nodes, key=lambda n: (n.end_lineno, n.end_col_offset))


def delegated_texts(program: Program) -> list[str | None]:
  """Lists the text in each call to the search agent; None for a call without text."""
  out = []
  for call in nodes_in_order(program, ast.Call):
    if callee(call) == AGENT:
      # A call may also have other arguments, such as a dict with known facts.
      values = map(literal, _arguments(call))
      texts = [value for value in values if isinstance(value, str)]
      out.append(texts[0] if texts else None)
  return out


def other_statements(program: Program) -> list[ast.stmt]:
  """Lists statements that do more than delegate tasks and keep or print the reports."""
  out = []
  for statement in program:
    calls = set(map(callee, nodes_in_order([statement], ast.Call)))
    is_plain = all(isinstance(node, _PLAIN) for node in ast.walk(statement))
    if not (calls and is_plain and calls <= {AGENT, "print"}):
      out.append(statement)
  return out


def final_argument(program: Program) -> ast.expr | None:
  """Returns `final_answer`'s argument at a program's end; None without one."""
  if not program:
    return None
  last = program[-1]
  if not isinstance(last, ast.Expr) or callee(last.value) != "final_answer":
    return None
  arguments = _arguments(last.value)
  return arguments[0] if arguments else None


def literal(node: ast.expr | None) -> Any:
  """Returns a literal value; None if it is missing or computed."""
  if node is None:
    return None
  try:
    return ast.literal_eval(node)  # reads constants and containers; calls nothing
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return None


def only_answers(program: Program) -> bool:
  """Whether a program only calls `final_answer` with a plain value."""
  calls = nodes_in_order(program, ast.Call)
  return len(program) == len(calls) == 1 and final_argument(program) is not None


def _arguments(call: ast.Call) -> list[ast.expr]:
  return call.args + [keyword.value for keyword in call.keywords]

"""What a program of smolagents calls: its syntax tree, read and never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

Program = Sequence[ast.stmt]
# In OAgents and smolagents, managed agents stand among the functions of a program.
AGENT = "search_agent"  # the function by which a program delegates a task
# Nodes of a statement that hands a task on, keeps what came back or prints it.
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
  """Parses a program into statements; none where it is not Python."""
  try:
    return ast.parse(program).body
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return []


def callee(node: ast.AST) -> str | None:
  """Returns the plain name that a node calls."""
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    return node.func.id
  return None  # a method, or what another call returned


def nodes_in_order(program: Program, kind: type) -> list[Any]:
  """Lists nodes of a kind by where they end: a call's arguments before the call."""
  nodes = []
  for statement in program:
    nodes += [node for node in ast.walk(statement) if isinstance(node, kind)]
  return sorted(nodes, key=lambda n: (n.end_lineno, n.end_col_offset))


def delegated_texts(program: Program) -> list[str | None]:
  """Lists the text that each call of the search agent gets; None where it gets none."""
  out = []
  for call in nodes_in_order(program, ast.Call):
    if callee(call) == AGENT:
      # Others may stand beside the task, such as a dict of what is known already.
      values = map(literal, _arguments(call))
      texts = [value for value in values if isinstance(value, str)]
      out.append(texts[0] if texts else None)
  return out


def other_statements(program: Program) -> list[ast.stmt]:
  """Lists statements that do more than hand tasks on and keep or print the reports."""
  out = []
  for statement in program:
    calls = set(map(callee, nodes_in_order([statement], ast.Call)))
    is_plain = all(isinstance(node, _PLAIN) for node in ast.walk(statement))
    if not (calls and is_plain and calls <= {AGENT, "print"}):
      out.append(statement)
  return out


def final_argument(program: Program) -> ast.expr | None:
  """Returns what a program gives to `final_answer` at its end."""
  if not program:
    return None
  last = program[-1]
  if not isinstance(last, ast.Expr) or callee(last.value) != "final_answer":
    return None
  arguments = _arguments(last.value)
  return arguments[0] if arguments else None


def literal(node: ast.expr | None) -> Any:
  """Returns a value that is written out; None where there is none or it is computed."""
  if node is None:
    return None
  try:
    return ast.literal_eval(node)  # reads constants and containers; calls nothing
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return None


def only_answers(program: Program) -> bool:
  """Says whether a program only gives `final_answer` something plain."""
  calls = nodes_in_order(program, ast.Call)
  return len(program) == len(calls) == 1 and final_argument(program) is not None


def _arguments(call: ast.Call) -> list[ast.expr]:
  return call.args + [keyword.value for keyword in call.keywords]

"""Finds the config dataclass fields that code reads, from syntax and annotations.

An expression's class comes from the annotations of parameters, results and dataclass
fields, and from assignments of these. A field counts as read if an expression of its
class accesses it outside `__post_init__`, which only checks. Containers count as their
entries: an entry of `dict[str, FooConfig]` is a FooConfig.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable

Kinds = set[str]


class Reads:
  """The known classes of some modules, and the fields read there."""

  def __init__(self, trees: Iterable[ast.Module]):
    """Walks the trees until no new class of an attribute is found."""
    self.fields: dict[str, dict[str, Kinds]] = {}  # of config dataclasses
    self.bases: dict[str, list[str]] = {}
    self.read: set[tuple[str, str]] = set()
    # (class, attribute) and function -> classes; a method's classes are its result's.
    self._attributes: dict[tuple[str, str], Kinds] = collections.defaultdict(set)
    self._results: dict[str, Kinds] = collections.defaultdict(set)
    trees = list(trees)
    for node in (node for tree in trees for node in ast.walk(tree)):
      if isinstance(node, ast.ClassDef):
        self._declare(node)
      elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        self._results[node.name] |= names_in(node.returns)
    known = -1
    while known != (known := sum(map(len, self._attributes.values()))):
      for tree in trees:
        for node in tree.body:
          self._walk(node, {}, "")

  def unread(self) -> list[str]:
    """`Class.field` of every unread field."""
    missing = []
    for cls, fields in self.fields.items():
      family = {cls} | self._above(cls)
      family |= {other for other in self.fields if cls in self._above(other)}
      for field in fields:
        if not any((member, field) in self.read for member in family):
          missing.append(f"{cls}.{field}")
    return sorted(missing)

  def _above(self, cls: str) -> Kinds:
    """The names of all base classes."""
    out: Kinds = set()
    new = {cls}
    while new:
      out |= new
      new = {base for name in new for base in self.bases.get(name, ())} - out
    return out - {cls}

  def _declare(self, node: ast.ClassDef) -> None:
    self.bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]
    annotated = {
      item.target.id: names_in(item.annotation)
      for item in node.body
      if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    if node.name.endswith("Config") and "dataclass" in decorators:
      self.fields[node.name] = annotated
    for name, kinds in annotated.items():
      self._attributes[node.name, name] |= kinds
    for item in node.body:
      if isinstance(item, ast.FunctionDef):  # a property, or a called method
        self._attributes[node.name, item.name] |= names_in(item.returns)

  def _walk(self, node: ast.AST, scope: dict[str, Kinds], cls: str) -> None:
    """Follows one statement or expression; `cls` is the enclosing class."""
    if isinstance(node, ast.ClassDef):
      for item in node.body:
        self._walk(item, dict(scope), node.name)
      return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      if node.name == "__post_init__":
        return
      scope = dict(scope)
      arguments = node.args
      for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        scope[arg.arg] = names_in(arg.annotation)
      if cls and arguments.args and arguments.args[0].arg == "self":
        scope["self"] = {cls}
      for item in node.body:
        self._walk(item, scope, cls)
      return
    # Bind names before reading their uses.
    for target, value in _bindings(node):
      self._bind(target, self._kinds(value, scope), scope)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
      for kind in self._kinds(node.value, scope):
        self.read.add((kind, node.attr))
    for child in ast.iter_child_nodes(node):
      self._walk(child, scope, cls)

  def _bind(self, target: ast.AST, kinds: Kinds, scope: dict[str, Kinds]) -> None:
    if isinstance(target, ast.Name):
      scope[target.id] = scope.get(target.id, set()) | kinds
    elif isinstance(target, ast.Attribute):
      for owner in self._kinds(target.value, scope):
        self._attributes[owner, target.attr] |= kinds
    elif isinstance(target, ast.Tuple | ast.List):
      for item in target.elts:
        self._bind(item, kinds, scope)

  def _kinds(self, node: ast.AST, scope: dict[str, Kinds]) -> Kinds:
    """The possible classes of an expression or its entries."""
    if isinstance(node, ast.Name):
      return scope.get(node.id, set())
    if isinstance(node, ast.Attribute):
      owners = self._kinds(node.value, scope)
      owners |= {base for owner in owners for base in self._above(owner)}
      return set().union(*(self._attributes[owner, node.attr] for owner in owners))
    if isinstance(node, ast.Call):
      return self._call(node, scope)
    parts: list[ast.AST] = []
    if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
      parts = [node.value]
    elif isinstance(node, ast.BoolOp):
      parts = node.values
    elif isinstance(node, ast.IfExp):
      parts = [node.body, node.orelse]
    elif isinstance(node, ast.Tuple | ast.List):
      parts = node.elts
    return set().union(*(self._kinds(part, scope) for part in parts))

  def _call(self, node: ast.Call, scope: dict[str, Kinds]) -> Kinds:
    name = ast.unparse(node.func).split(".")[-1]
    if name == "read_config":
      return names_in(node.args[1])
    if name in self.bases:  # a class
      return {name}
    if name in ("replace", "zip", "enumerate", "list", "sorted", "reversed"):
      return set().union(*(self._kinds(arg, scope) for arg in node.args))
    kinds = set(self._results.get(name, ()))
    if isinstance(node.func, ast.Attribute):
      kinds |= self._kinds(node.func, scope)
      if name in ("values", "items", "get"):
        kinds |= self._kinds(node.func.value, scope)
    return kinds


def names_in(annotation: ast.AST | None) -> Kinds:
  """All names in an annotation; from `module.Class` both."""
  out: Kinds = set()
  for node in ast.walk(annotation) if annotation is not None else ():
    if isinstance(node, ast.Name):
      out.add(node.id)
    elif isinstance(node, ast.Attribute):
      out.add(node.attr)
  return out


def _bindings(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
  """The (target, value) pairs that a statement or expression binds."""
  if isinstance(node, ast.Assign):
    return [(target, node.value) for target in node.targets]
  if isinstance(node, ast.AnnAssign) and node.value is not None:
    return [(node.target, node.value), (node.target, node.annotation)]
  if isinstance(node, ast.NamedExpr | ast.For):
    return [(node.target, node.value if isinstance(node, ast.NamedExpr) else node.iter)]
  if isinstance(node, ast.With):
    return [(i.optional_vars, i.context_expr) for i in node.items if i.optional_vars]
  generators = getattr(node, "generators", [])
  return [(generator.target, generator.iter) for generator in generators]

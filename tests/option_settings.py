"""Finds the config fields set outside tests: by configs, programs and docs pages.

A field has a path, such as algo.loss.clip_low; NAME in a path is a name chosen by the
user. A setting gives at least the field's section: `loss.clip_low` in a page,
`--config.algo.loss.clip_low=1`, or `loss=dict(clip_low=1)` in Python.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import pathlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

NAME = "NAME"
Path = tuple[str, ...]
_DOTTED = re.compile(r"\b[a-z]\w*(?:\.[a-z]\w*)+")
_FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Option:
  """A field of a config dataclass.

  Attributes:
    owner: the class declaring it, the highest base of several.
    path: one of its paths.
    reader: the config class at this path.
  """

  owner: str
  path: Path
  reader: str


def options(cls: type, above: Path = ()) -> Iterator[Option]:
  """Yields all fields of a config; a section's fields replace it."""
  hints = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    path = (*above, field.name)
    sections = list(_sections(hints[field.name], path))
    for section, inside in sections:
      yield from options(section, inside)
    if not sections:
      family = [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]
      owner = [
        base.__name__
        for base in family
        if field.name in {f.name for f in dataclasses.fields(base)}
      ][-1]
      yield Option(owner, path, cls.__name__)


def _sections(hint: Any, path: Path) -> Iterator[tuple[type, Path]]:
  """Yields the dataclasses in an annotation, with their paths."""
  if dataclasses.is_dataclass(hint):
    yield hint, path
  elif typing.get_origin(hint) is dict:
    yield from _sections(typing.get_args(hint)[1], (*path, NAME))
  else:
    for kind in typing.get_args(hint):
      yield from _sections(kind, path)


def unset(fields: Iterable[Option], settings: Iterable[Path]) -> list[str]:
  """Returns `Class.field` of each field not set by any of its paths."""
  fields = list(fields)
  parts = {
    path[start:end]
    for path in settings
    for start in range(len(path))
    for end in range(start + 1, len(path) + 1)
  }
  found = {(f.owner, f.path[-1]) for f in fields if _is_set(f, parts)}
  every = {(f.owner, f.path[-1]) for f in fields}
  return sorted(f"{owner}.{name}" for owner, name in every - found)


def _is_set(field: Option, parts: set[Path]) -> bool:
  *above, name = field.path
  if not above:
    return (name,) in parts
  if (field.reader, name) in parts or (field.owner, name) in parts:
    return True
  if above[-1] != NAME:
    return (above[-1], name) in parts
  section = above[-2]
  return any(len(p) == 3 and (p[0], p[2]) == (section, name) for p in parts)


def by_values(values: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
  """Yields the paths of a config's values."""
  for name, value in values.items():
    yield (*above, name)
    if isinstance(value, Mapping):
      yield from by_values(value, (*above, name))


def by_file(file: pathlib.Path) -> Iterator[Path]:
  """Yields the paths set by a program, a page or a notebook."""
  text = file.read_text(encoding="utf-8")
  if file.suffix == ".ipynb":
    cells = json.loads(text)["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    text = "\n".join(code)
    # IPython lines are not Python.
    parts = [re.sub(r"^\s*[%!].*$", "pass", part, flags=re.M) for part in code]
  elif file.suffix == ".md":
    parts = _FENCE.findall(text)
  else:
    parts = [text]
  for part in parts:
    yield from by_python(part)
  if file.suffix == ".py":  # flags in strings
    text = "\n".join(re.findall(r"--[\w.]+", text))
  for dotted in _DOTTED.findall(text):
    yield tuple(dotted.split("."))


def by_python(text: str) -> Iterator[Path]:
  """Yields the paths set by Python code: assignments, dicts and call arguments."""
  try:
    tree = ast.parse(text)
  except SyntaxError:  # a page's fragment
    return
  for node in ast.walk(tree):
    if isinstance(node, ast.Assign):
      for target in node.targets:
        path = _path_of(target)
        if path:
          yield path
          yield from _inside(node.value, path)
    elif isinstance(node, ast.Call | ast.Dict):
      yield from _inside(node, ())


def _path_of(target: ast.AST) -> Path:
  """The path of `config.algo.loss`, `config["algo"].loss` or a bare name."""
  if isinstance(target, ast.Name):
    return (target.id,)
  if isinstance(target, ast.Attribute):
    return (*_path_of(target.value), target.attr)
  if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
    return (*_path_of(target.value), str(target.slice.value))
  return ()


def _inside(node: ast.AST, above: Path) -> Iterator[Path]:
  """The paths inside `dict(a=...)`, {"a": ...}, `f(a=...)` or `FooConfig(a=...)`."""
  items: list[tuple[str, ast.AST]] = []
  if isinstance(node, ast.Call):
    items = [(k.arg, k.value) for k in node.keywords if k.arg]
    name = ast.unparse(node.func).split(".")[-1]
    if name != "dict":
      above = (name,)
      if name == "update" and isinstance(node.func, ast.Attribute):
        above = _path_of(node.func.value)
  elif isinstance(node, ast.Dict):
    keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
    if len(keys) == len(node.keys):
      items = [(str(k), v) for k, v in zip(keys, node.values, strict=True)]
  for key, value in items:
    path = (*above, key)
    yield path
    yield from _inside(value, path)

"""Reads untrusted JSON: every fault is one ValueError that names the place.

Python's own reader raises four kinds of errors (not JSON, not UTF-8, nested too deeply,
a number with too many digits), and its result may have any type. Here a file or a line
becomes a value, and an object becomes a dataclass with checked field types.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import pydantic_core
from pydantic_core import core_schema

T = TypeVar("T")
# Deeper than any of our files; Python's own functions (copies, repr) recurse per level.
MAX_DEPTH = 100
_TOO_DEEP = f"nested too deeply; at most {MAX_DEPTH} levels are read"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, where: str, surrogates: bool = False) -> Any:
  """Reads one JSON value.

  Args:
    where: the value's place for messages, e.g. "FILE:LINE".
    surrogates: accept lone surrogates, halves of surrogate pairs, in strings.

  Raises:
    ValueError: `text` is not JSON, not UTF-8, nested more than `MAX_DEPTH` levels deep,
      or has a duplicate field, a number with too many digits or a lone surrogate.
  """
  try:
    if isinstance(text, bytes):
      text = text.decode("utf-8-sig")
    value = json.loads(text, object_pairs_hook=_unique)
  except json.JSONDecodeError as e:
    line = ""
    if e.lineno > 1:  # in a one-value file; for JSON lines `where` has the line
      line = f" at line {e.lineno}"
    raise ValueError(f"{where}: not JSON ({e.msg}{line})") from e
  except UnicodeDecodeError as e:
    raise ValueError(f"{where}: not UTF-8 ({e.reason} at byte {e.start})") from e
  except RecursionError:
    raise ValueError(f"{where}: {_TOO_DEEP}") from None
  except ValueError:  # more digits than Python's limit
    digits = sys.get_int_max_str_digits()
    raise ValueError(
      f"{where}: not JSON (a whole number has more than {digits} digits)"
    ) from None
  if _is_deeper(value, MAX_DEPTH):
    raise ValueError(f"{where}: {_TOO_DEEP}")
  if not surrogates and _SURROGATE.search(text):
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
      half = ascii(e.object[e.start])
      raise ValueError(
        f"{where}: {half} is half of a surrogate pair and no character; remove it"
      ) from None
  return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns an object from its fields; refuses duplicate field names."""
  value = dict(pairs)
  if len(value) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise json.JSONDecodeError(f"an object has field {shown(twice)} twice", "", 0)
  return value


def _is_deeper(value: Any, levels: int) -> bool:
  """Whether lists and objects are nested more than `levels` deep."""
  containers = [value] if isinstance(value, dict | list) else []
  for _ in range(levels):
    inside = []
    for one in containers:
      if isinstance(one, dict):
        one = one.values()
      # Most lists hold thousands of numbers: only the types are checked.
      if {dict, list} & set(map(type, one)):
        inside += [x for x in one if isinstance(x, dict | list)]
    containers = inside
  return bool(containers)


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
  """Reads one JSON object.

  Raises:
    ValueError: as `parse_json`, or the value is not an object.
  """
  value = parse_json(text, where)
  if not isinstance(value, dict):
    raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
  return value


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a file's JSON object.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: as `parse_object`, naming the file.
  """
  with open(path, "rb") as f:
    return parse_object(f.read(), os.fspath(path))


def to_dataclass(row: Any, cls: type[T], where: str, needed: Iterable[str] = ()) -> T:
  """Builds a dataclass from a JSON object, checking every field's type.

  Numbers must be finite, except in lists, which may be long and hold log-probs of -inf.
  `__post_init__` is not called.

  Args:
    cls: a dataclass with str, int, float, bool, enum, dataclass or Any fields, optional
      ones (`T | None`), and lists, tuples and dicts of these.
    needed: fields required in the row, although the dataclass has a default.

  Raises:
    ValueError: a field is missing, unknown or has another type; the message has its
      name and value.
  """
  try:
    value = _validator(cls).validate_python(row)
  except pydantic_core.ValidationError as e:
    raise ValueError(f"{where}: {_message(e.errors(include_url=False)[0])}") from None
  # Defaults serve rows from earlier versions, which lack some fields, but not these.
  for name in needed:
    if name not in row:
      raise ValueError(f"{where}: field {name!r} is missing")
  return value


def _message(fault: pydantic_core.ErrorDetails) -> str:
  """Describes a fault in one line: the field's path and value, and accepted values."""
  steps = fault["loc"]
  if fault["type"] == "unknown":
    accepted = fault["msg"].split(", ")
    steps += (next(name for name in fault["input"] if name not in accepted),)
  path = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in steps)
  field = "the row"
  if path:
    field = f"field {path.removeprefix('.')!r}"
  if fault["type"] == "unknown":
    return f"unknown {field}; there are {', '.join(accepted)}"
  if fault["type"] == "missing":
    return f"{field} is missing"
  wanted = _CONTAINERS.get(fault["type"], fault["msg"])
  return f"{field} is {shown(fault['input'])}; it must be {wanted}"


def shown(value: Any, most: int = 80) -> str:
  """Returns any value as text for messages, cut to `most` characters."""
  try:
    text = repr(value)
  except (RecursionError, ValueError):  # an int with more digits than Python's limit
    text = f"a {type(value).__name__}"
  if len(text) > most:
    text = text[: most - 3] + "..."
  return text


_CONTAINERS = {
  "list_type": "a list",
  "tuple_type": "a list",
  "dict_type": "an object",
  "dataclass_type": "an object",
}


@functools.cache
def _validator(cls: type) -> pydantic_core.SchemaValidator:
  return pydantic_core.SchemaValidator(_schema(cls))


def _schema(hint: Any, finite: bool = True) -> core_schema.CoreSchema:
  """Returns a type's schema; pydantic's own strict dataclass schema refuses dicts."""
  if hint is Any:
    return core_schema.any_schema()
  if isinstance(hint, types.UnionType):  # T | None
    (inner,) = set(typing.get_args(hint)) - {types.NoneType}
    return core_schema.nullable_schema(_schema(inner))
  arguments = typing.get_args(hint)
  origin = typing.get_origin(hint)  # e.g. list for list[int]
  if origin is list:
    return core_schema.list_schema(_schema(arguments[0], False), fail_fast=True)
  if origin is tuple:
    item = _schema(arguments[0], False)
    return core_schema.tuple_schema([item], variadic_item_index=0, fail_fast=True)
  if origin is dict:  # JSON's keys are always text
    return core_schema.dict_schema(values_schema=_schema(arguments[1]))
  if dataclasses.is_dataclass(hint):
    return _object(hint)
  if issubclass(hint, enum.Enum):
    wanted = f"one of {', '.join(hint)}"
    return _worded(core_schema.enum_schema(hint, list(hint)), wanted)
  if hint is str:
    return _worded(core_schema.str_schema(strict=True), "text")
  if hint is bool:
    return _worded(core_schema.bool_schema(strict=True), "true or false")
  if hint is float:
    number = core_schema.float_schema(strict=True, allow_inf_nan=not finite)
    return _worded(number, "a finite number")
  number = core_schema.int_schema(strict=True, gt=-(2**63), lt=2**63)
  return _worded(number, "a whole number of at most 64 bits")


def _worded(schema: core_schema.CoreSchema, wanted: str) -> core_schema.CoreSchema:
  return core_schema.custom_error_schema(schema, "wanted", custom_error_message=wanted)


def _object(cls: type) -> core_schema.CoreSchema:
  hints = typing.get_type_hints(cls)  # resolves annotations, which are strings
  fields = {}
  for f in dataclasses.fields(cls):
    schema = _schema(hints[f.name])
    if f.default is not dataclasses.MISSING:
      schema = core_schema.with_default_schema(schema, default=f.default)
    elif f.default_factory is not dataclasses.MISSING:
      schema = core_schema.with_default_schema(
        schema, default_factory=f.default_factory
      )
    fields[f.name] = core_schema.dataclass_field(f.name, schema)

  # An unknown field is a mistake in the file, or from a later version: never dropped.
  # This check comes first, because a missing field may be misspelt.
  def refuse_unknown(value: Any) -> Any:
    if isinstance(value, dict) and not value.keys() <= fields.keys():
      raise pydantic_core.PydanticCustomError("unknown", ", ".join(fields))
    return value

  arguments = core_schema.dataclass_args_schema(cls.__name__, list(fields.values()))
  schema = core_schema.dataclass_schema(cls, arguments, list(fields))
  return core_schema.no_info_before_validator_function(refuse_unknown, schema)

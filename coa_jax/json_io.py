"""Reads JSON that may hold anything: each fault is one ValueError that says where.

Python's own reader raises four kinds of errors (not JSON, not UTF-8, nested too deeply,
a number of too many digits), and what it returns may be of any type. Here a file or a
line becomes a value, and an object a dataclass whose fields have the types it names.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
# Deeper than any file of ours; Python's own functions (copies, repr) recurse per level.
MAX_DEPTH = 100
_TOO_DEEP = f"nested too deeply; at most {MAX_DEPTH} levels are read"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Reads a value found at a path such as "segments[2].text".
_Reader = Callable[[Any, str], Any]


def parse_json(text: str | bytes, where: str, surrogates: bool = False) -> Any:
  """Reads one JSON value.

  Args:
    text: the value; bytes are UTF-8, with or without a mark of byte order.
    where: how messages name its place, as "FILE:LINE".
    surrogates: accept half of a surrogate pair in a text.

  Raises:
    ValueError: it is not JSON, not UTF-8, nested more than `MAX_DEPTH` levels deep, or
      has a field twice, a number that is too long or half of a surrogate pair.
  """
  try:
    if isinstance(text, bytes):
      text = text.decode("utf-8-sig")
    value = json.loads(text, object_pairs_hook=_unique)
  except json.JSONDecodeError as e:
    line = ""
    if e.lineno > 1:  # in a file of one value; a line of JSON lines is in `where`
      line = f" at line {e.lineno}"
    raise ValueError(f"{where}: not JSON ({e.msg}{line})") from e
  except UnicodeDecodeError as e:
    raise ValueError(f"{where}: not UTF-8 ({e.reason} at byte {e.start})") from e
  except RecursionError:
    raise ValueError(f"{where}: {_TOO_DEEP}") from None
  except ValueError:  # more digits than Python converts
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
  """An object whose fields have different names."""
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
      # Most lists hold thousands of numbers: their types alone are looked at.
      if {dict, list} & set(map(type, one)):
        inside += [x for x in one if isinstance(x, dict | list)]
    containers = inside
  return bool(containers)


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
  """`parse_json` of what must be a JSON object.

  Raises:
    ValueError: as `parse_json`; or it is another value.
  """
  value = parse_json(text, where)
  if not isinstance(value, dict):
    raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
  return value


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """The JSON object that a file holds.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: as `parse_object`, naming the file.
  """
  with open(path, "rb") as f:
    return parse_object(f.read(), os.fspath(path))


def to_dataclass(row: Any, cls: type[T], where: str, needed: Iterable[str] = ()) -> T:
  """Builds a dataclass from a JSON object, checking the type of every field.

  A number must be finite, but not in a list: there may be many, and log-probs of -inf
  among them.

  Args:
    row: the object.
    cls: of fields that are text, numbers, bool, Any, enums or dataclasses, or None, and
      lists, tuples and dicts of those.
    where: how messages name the row, as "FILE:LINE".
    needed: fields that may not be left out, though the dataclass has a default.

  Raises:
    ValueError: a field is missing, unknown or of another type; named with its value.
  """
  try:
    value = _reader(cls)(row, "")
  except _BadField as e:
    raise ValueError(f"{where}: {e}") from None
  # A default stands for what an earlier version did not write, not for these.
  for name in needed:
    if name not in row:
      raise ValueError(f"{where}: field {name!r} is missing")
  return value


class _BadField(ValueError):
  """What is wrong with a field; who knows the row's place adds it."""


def _wrong(value: Any, path: str, wanted: str) -> _BadField:
  """The error of a value that is not what was wanted at a path."""
  field = "the row"
  if path:
    field = f"field {path.removeprefix('.')!r}"
  return _BadField(f"{field} is {shown(value)}; it must be {wanted}")


def shown(value: Any, most: int = 80) -> str:
  """A value as messages show it: short, and whatever it is."""
  try:
    text = repr(value)
  except (RecursionError, ValueError):  # an int of more digits than Python writes
    text = f"a {type(value).__name__}"
  if len(text) > most:
    text = text[: most - 3] + "..."
  return text


@functools.cache
def _reader(hint: Any) -> _Reader:
  """Checks and converts values of one type; made once, for rows are many."""
  if hint is Any:
    return lambda value, path: value
  if isinstance(hint, types.UnionType):  # T | None
    (inner,) = set(typing.get_args(hint)) - {types.NoneType}
    return _or_none(inner)
  origin = typing.get_origin(hint)  # of list[int]: list
  if origin in (list, tuple):
    return _sequence(typing.get_args(hint)[0], origin)
  if origin is dict:
    return _mapping(typing.get_args(hint)[1])
  if dataclasses.is_dataclass(hint):
    return _object(hint)
  if issubclass(hint, enum.Enum):
    return _choice(hint)
  return _plain(hint)


_WORDS = {
  str: "text",
  int: "a whole number of at most 64 bits",
  float: "a finite number",
  bool: "true or false",
  dict: "an object",
}


def _plain(hint: type) -> _Reader:
  """Of str, int, float, bool or dict."""

  def read(value: Any, path: str) -> Any:
    kind = type(value)  # not isinstance: true and false are no numbers
    if hint is float and kind is int and abs(value) < 2**63:
      return float(value)
    right = kind is hint
    # Python's own reader takes any number of digits, and NaN.
    if right and hint is int:
      right = abs(value) < 2**63
    elif right and hint is float:
      right = math.isfinite(value)
    if not right:
      raise _wrong(value, path, _WORDS[hint])
    return value

  return read


def _or_none(hint: Any) -> _Reader:
  inner = _reader(hint)
  return lambda value, path: None if value is None else inner(value, path)


def _choice(hint: type[enum.Enum]) -> _Reader:
  accepted = {member.value: member for member in hint}

  def read(value: Any, path: str) -> Any:
    if not isinstance(value, str) or value not in accepted:
      raise _wrong(value, path, f"one of {', '.join(accepted)}")
    return accepted[value]

  return read


def _sequence(of: Any, kind: type) -> _Reader:
  if of in (int, float):
    return _numbers(of, kind)
  inner = _reader(of)

  def read(value: Any, path: str) -> Any:
    if not isinstance(value, list | tuple):
      raise _wrong(value, path, "a list")
    return kind([inner(x, f"{path}[{i}]") for i, x in enumerate(value)])

  return read


def _numbers(of: type, kind: type) -> _Reader:
  """Of token ids or log-probs: too many to look at one by one, unless one is wrong."""
  accepted = {int, of}

  def read(value: Any, path: str) -> Any:
    if not isinstance(value, list | tuple):
      raise _wrong(value, path, "a list of numbers")
    # All at once, in C: nearly every list is right.
    right = set(map(type, value)) <= accepted
    if right and of is int and value:
      right = max(value) < 2**63 and -min(value) < 2**63
    if not right:
      for i, x in enumerate(value):
        if type(x) not in accepted or (of is int and abs(x) >= 2**63):
          raise _wrong(x, f"{path}[{i}]", _WORDS[of])
    return kind(value)

  return read


def _mapping(of: Any) -> _Reader:
  if of is Any:  # whatever the row has to say
    return _plain(dict)
  inner = _reader(of)

  # JSON has no other keys than text, so values alone are checked.
  def read(value: Any, path: str) -> Any:
    if type(value) is not dict:
      raise _wrong(value, path, "an object")
    return {key: inner(x, f"{path}.{key}") for key, x in value.items()}

  return read


def _object(cls: type) -> _Reader:
  # --- What reads each field, and which must be there; once for all rows.
  hints = typing.get_type_hints(cls)  # annotations are text until then
  readers = {}
  needed = []
  for f in dataclasses.fields(cls):
    readers[f.name] = _reader(hints[f.name])
    if f.default is f.default_factory is dataclasses.MISSING:
      needed.append(f.name)

  def read(value: Any, path: str) -> Any:
    if type(value) is not dict:
      raise _wrong(value, path, "an object")
    arguments = {}
    # An unknown field is a mistake in the file, or of a later version: never dropped.
    for name, x in value.items():
      reader = readers.get(name)
      if reader is None:
        field = f"{path}.{name}".removeprefix(".")
        raise _BadField(f"unknown field {field!r}; there are {', '.join(readers)}")
      arguments[name] = reader(x, f"{path}.{name}")
    for name in needed:
      if name not in arguments:
        field = f"{path}.{name}".removeprefix(".")
        raise _BadField(f"field {field!r} is missing")
    return cls(**arguments)

  return read

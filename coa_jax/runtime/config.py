"""Reads an ml_collections ConfigDict into a frozen dataclass.

Every program does this first, so a misspelt field is an error on line one, and
ConfigDicts never travel further (nor into jit). A journey's dataclass has a field for
each section, which is a dataclass of its own.

budget: reading, defaults and every message about a field are one subject.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import ml_collections
from ml_collections import config_dict

from coa_jax.runtime.fields import nearest
from coa_jax.runtime.json_io import shown

T = TypeVar("T")
Values = ml_collections.ConfigDict | Mapping


class ConfigError(ValueError):
  """A config that cannot be used; the message names section, field and remedy."""


def read_config(config: Values | None, cls: type[T], section: str = "") -> T:
  """Reads a config, or one section of it, into the dataclass `cls`.

  budget: one pass over the fields, in the order in which faults are named.

  Lists become tuples; an int is accepted where a float is asked for; a field that is
  itself a dataclass, or a dict of them, is read from a section inside. Fields that the
  config leaves out take the dataclass's defaults. In a whole config a section that is
  empty (None, "" or {}) says what one that is missing says: the defaults, or None where
  the dataclass allows that.

  A field with metadata "read" is made by that function, of what the config holds there
  and of the whole config: where the type of a section depends on others.

  Args:
    config: the values; None for none.
    cls: what to read them into.
    section: its name for messages, as "algo.loss"; "" for a whole config.

  Raises:
    ConfigError: a field is unknown (the nearest is suggested),
      missing, of the wrong type, NaN or infinite, or an integer of more than 64 bits; a
      section is a value; or `cls` itself refuses the values (ValueError).
  """
  values = _values(config, section)
  fields = {field.name: field for field in dataclasses.fields(cls)}
  hints = typing.get_type_hints(cls)
  where = "config"
  kind = "section"
  prefix = ""
  if section:
    where = f"config section {section!r}"
    kind = "field"
    prefix = f"{section}."

  # --- Every value belongs to a field.
  for name in values:
    if name not in fields:
      raise ConfigError(f"{where} has no {kind} {name!r}{_suggestion(name, cls)}")

  # --- Every field has a value of its type, or a default; what is given comes first.
  arguments = {}
  for name in sorted(fields, key=lambda name: name not in values):
    field = fields[name]
    path = prefix + name
    value = values.get(name, dataclasses.MISSING)
    if "read" in field.metadata:
      value = _values(value, path)
      arguments[name] = field.metadata["read"](value, values)
      continue
    if not section and _is_section(hints[name]):
      value = _section_or_nothing(value, hints[name], path)
    allows_none = type(None) in _kinds(hints[name])
    if value is None and _is_required(field) and not allows_none:
      value = dataclasses.MISSING  # a placeholder that no flag has filled
    if value is not dataclasses.MISSING:
      arguments[name] = _typed(value, hints[name], f"config.{path}")
    elif _is_required(field):
      raise ConfigError(f"{where} lacks field {name!r}")

  # --- The dataclass has checks of its own.
  try:
    return cls(**arguments)
  except ConfigError:
    raise
  except ValueError as e:
    if section:
      raise ConfigError(f"{where}: {e}") from e
    raise ConfigError(str(e)) from e


def fill_defaults(
  config: ml_collections.ConfigDict, cls: type, types_only: bool = False
) -> None:
  """Writes the defaults of `cls` into a config where it leaves a field out.

  So a flag can override every field, by its type. A field that has no default, or the
  default None, becomes a typed placeholder. A section that the config may do without
  stays away, and what `cls` does not know stays as it is.

  A section with metadata "read" gets types alone: its function knows better defaults.

  Args:
    config: of a whole journey, or a section of it.
    cls: the dataclass that it is read into.
    types_only: make every field that is left out a typed placeholder.
  """
  hints = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    name = field.name
    hint = hints[name]
    try:
      value = config.get(name)
    except config_dict.RequiredValueError:
      continue  # a placeholder of the file's own
    has_reader = "read" in field.metadata
    if hint is Any or (has_reader and not dataclasses.is_dataclass(hint)):
      continue  # of which of several classes it is, its function decides
    if _is_section(hint):
      is_dict = isinstance(value, ml_collections.ConfigDict)
      if is_empty(value) or (is_dict and not value):
        if type(None) in _kinds(hint):
          continue
        _put(config, name, ml_collections.ConfigDict())
        value = config[name]
      if isinstance(value, ml_collections.ConfigDict):
        fill_defaults(value, _section_class(hint), types_only or has_reader)
      continue
    if value is None:
      value = _placeholder(hint)
      if not types_only:
        value = _default_of(field, value)
      if value == math.inf:
        continue  # no value that a config can hold
    elif hint is float and type(value) is int:
      value = float(value)
    else:
      continue
    _put(config, name, value)


def _put(config: ml_collections.ConfigDict, name: str, value: Any) -> None:
  """Sets a field, of whatever type the value was that it had."""
  if name in config:
    del config[name]
  config[name] = value


def _default_of(field: dataclasses.Field[Any], otherwise: Any) -> Any:
  """A field's default; `otherwise` where that is None or there is none."""
  default = None
  if field.default is not dataclasses.MISSING:
    default = field.default
  elif field.default_factory is not dataclasses.MISSING:
    default = field.default_factory()
  return otherwise if default is None else default


def _placeholder(hint: Any) -> Any:
  """None that a flag fills with a value of the hint's type."""
  kinds = [kind for kind in _kinds(hint) if kind is not type(None)]
  # A tuple of strings is a tuple to the parser of flags.
  kind = typing.get_origin(kinds[0]) or kinds[0]
  return config_dict.placeholder(kind)


def _values(config: Any, section: str) -> dict[str, Any]:
  """The fields of a section; none where it is empty or missing."""
  if config is dataclasses.MISSING or config is None or config == "":
    return {}
  if not isinstance(config, Values):
    raise ConfigError(f"config.{section} is {shown(config)}; it must be a section")
  return dict(config)


def _section_or_nothing(value: Any, hint: Any, path: str) -> Any:
  """A section's values; None for an empty one that the journey can do without."""
  values = _values(value, path)
  if not values and type(None) in _kinds(hint):
    return None
  return values


def _kinds(hint: Any) -> tuple[Any, ...]:
  """The types of a union, or the one type."""
  if isinstance(hint, types.UnionType):
    return typing.get_args(hint)
  return (hint,)


def _section_class(hint: Any) -> type:
  """The dataclass among the types of a hint."""
  return next(kind for kind in _kinds(hint) if dataclasses.is_dataclass(kind))


def _is_section(hint: Any) -> bool:
  return any(dataclasses.is_dataclass(kind) for kind in _kinds(hint))


def _is_required(field: dataclasses.Field[Any]) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


def _suggestion(name: str, cls: type) -> str:
  """Names the section that has an unknown field, or the nearest field.

  Args:
    name: the field that `cls` does not have.
    cls: the dataclass of the section; its sections are looked into.
  """
  names = [field.name for field in dataclasses.fields(cls)]
  for path, field in _fields_within(cls):
    if field.name == name:
      return f"; did you mean {path!r}? There are {', '.join(names)}"
  suggestion = nearest(name, names)
  if suggestion.endswith("?"):
    suggestion += f" There are {', '.join(names)}"
  return suggestion


def _fields_within(
  cls: type, above: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
  """Yields the fields of a dataclass with their paths, then those of its sections."""
  hints = typing.get_type_hints(cls)
  fields = dataclasses.fields(cls)
  for field in fields:
    yield above + field.name, field
  for field in fields:
    for kind in (hints[field.name], *typing.get_args(hints[field.name])):
      if dataclasses.is_dataclass(kind):
        yield from _fields_within(kind, f"{above}{field.name}.")


def as_json(config: Any) -> dict[str, Any]:
  """A config, a dataclass or a ConfigDict, as JSON values.

  Defaults that are infinite, which JSON does not know, are left out.
  """
  if dataclasses.is_dataclass(config):
    values = dataclasses.asdict(config)
  else:
    values = config.to_dict()
  return json.loads(json.dumps(_without_infinities(values)))


def _without_infinities(values: dict[str, Any]) -> dict[str, Any]:
  out = {}
  for name, value in values.items():
    if isinstance(value, dict):
      out[name] = _without_infinities(value)
    elif value != math.inf:
      out[name] = value
  return out


def is_empty(section: Any) -> bool:
  """Whether a value says what a section that is missing says."""
  return section is None or section == "" or section == {}


def _typed(value: Any, hint: Any, where: str) -> Any:
  """The value as a field of this type; `where` names it in messages."""
  if isinstance(value, float) and not math.isfinite(value):
    raise ConfigError(f"{where} is {value}; it must be a finite number")
  if isinstance(value, int) and abs(value) >= 2**63:
    raise ConfigError(f"{where} is {shown(value)}; it must fit in 64 bits")
  # JSON knows no tuples, and a ConfigDict is no dict.
  if isinstance(value, list):
    value = tuple(value)
  if isinstance(value, ml_collections.ConfigDict):
    value = value.to_dict()

  # --- A container: each entry by its own type.
  for kind in _kinds(hint):
    origin = typing.get_origin(kind)
    of = typing.get_args(kind)
    if origin is dict and isinstance(value, dict):
      return {k: _typed(v, of[1], f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, tuple):
      if of[-1] is Ellipsis:
        of = of[:1] * len(value)
      if len(of) != len(value):
        raise ConfigError(f"{where} is {shown(value)}; it must have {len(of)} entries")
      entries = zip(value, of, range(len(of)), strict=True)
      return tuple(_typed(v, kind, f"{where}[{i}]") for v, kind, i in entries)

  # --- A section inside.
  kinds = tuple(typing.get_origin(kind) or kind for kind in _kinds(hint))
  for kind in kinds:
    if isinstance(value, dict) and dataclasses.is_dataclass(kind):
      return read_config(value, kind, where.removeprefix("config."))

  # --- A plain value; to Python True is an int, but no number to a reader.
  is_bool = isinstance(value, bool)
  if float in kinds and isinstance(value, int) and not is_bool:
    return float(value)
  if Any in kinds:
    return value
  fits = isinstance(value, kinds) and (bool in kinds or not is_bool)
  if not fits:
    accepted = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
    raise ConfigError(f"{where} is {shown(value)}; it must be of type {accepted}")
  return value

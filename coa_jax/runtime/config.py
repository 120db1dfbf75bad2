"""Reads an ml_collections ConfigDict into a frozen dataclass.

Every program reads its config first: a misspelt field is an error at once, and no
ConfigDict is passed on (nor into jit). A stage's dataclass has one field per section,
itself a dataclass.
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
  """An unusable config; the message names section, field and remedy."""


class UnknownFieldError(ConfigError):
  """A config has a field or section unknown to its dataclass.

  Attributes:
    path: the unknown name, as "section.field".
  """

  def __init__(self, message: str, path: str):
    super().__init__(message)
    self.path = path


def read_config(config: Values | None, cls: type[T], section: str = "") -> T:
  """Reads a config, or one section, into the dataclass `cls`.

  Lists become tuples; an int is accepted for a float; a dataclass field, or a dict of
  dataclasses, is read from a nested section. Missing fields get the dataclass's
  defaults. In a whole config an empty section (None, "" or {}) counts as missing: the
  section gets its defaults, or becomes None if its type allows None.

  If a section depends on other fields, the function in its metadata "read" builds the
  section from the section's values and the whole config.

  Args:
    section: the section's name for messages, e.g. "algo.loss"; "" for a whole config.

  Raises:
    ConfigError: a field is unknown (the nearest is suggested), missing, of the wrong
      type, NaN or infinite, or an integer beyond 64 bits; a section is a plain value;
      or `cls` itself refuses the values (ValueError).
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
      message = f"{where} has no {kind} {name!r}{_suggestion(name, cls)}"
      raise UnknownFieldError(message, prefix + name)

  # --- Every field has a value of its type, or a default; config values come first.
  arguments = {}
  for name in sorted(fields, key=lambda name: name not in values):
    field = fields[name]
    path = prefix + name
    value = values.get(name, dataclasses.MISSING)
    if "read" in field.metadata:
      value = _values(value, path)
      arguments[name] = field.metadata["read"](value, values)
      continue
    if not section and _section_class(hints[name]):
      value = _section_or_nothing(value, hints[name], path)
    allows_none = type(None) in kinds_of(hints[name])
    if value is None and _is_required(field) and not allows_none:
      value = dataclasses.MISSING  # a placeholder that no flag has filled
    if value is not dataclasses.MISSING:
      arguments[name] = _typed(value, hints[name], f"config.{path}")
    elif _is_required(field):
      raise ConfigError(f"{where} lacks field {name!r}")

  # --- The dataclass makes its own checks.
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
  """Writes `cls`'s defaults into a config's missing fields.

  A flag can then override every field, parsed by the field's type. A field without a
  default, or with default None, becomes a typed placeholder. An optional section stays
  missing, and fields unknown to `cls` are unchanged.

  A section with metadata "read" gets only typed placeholders, because that function
  knows better defaults.

  Args:
    types_only: make every missing field a typed placeholder.
  """
  hints = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    name = field.name
    hint = hints[name]
    value = config.get(name)
    has_reader = "read" in field.metadata
    if hint is Any or (has_reader and not dataclasses.is_dataclass(hint)):
      continue  # its function chooses between several classes
    if _section_class(hint):
      is_dict = isinstance(value, ml_collections.ConfigDict)
      if is_empty(value) or (is_dict and not value):
        if type(None) in kinds_of(hint):
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
        continue  # not a valid config value
    elif hint is float and type(value) is int:
      value = float(value)
    else:
      continue
    _put(config, name, value)


def _put(config: ml_collections.ConfigDict, name: str, value: Any) -> None:
  """Sets a field, regardless of its previous value's type."""
  if name in config:
    del config[name]
  config[name] = value


def _default_of(field: dataclasses.Field[Any], otherwise: Any) -> Any:
  """Returns a field's default, or `otherwise` if the default is None or missing."""
  default = None
  if field.default is not dataclasses.MISSING:
    default = field.default
  elif field.default_factory is not dataclasses.MISSING:
    default = field.default_factory()
  return otherwise if default is None else default


def _placeholder(hint: Any) -> Any:
  """Returns a placeholder of the hint's type, to be filled by a flag."""
  kinds = [kind for kind in kinds_of(hint) if kind is not type(None)]
  # For the flag parser tuple[str, ...] is a plain tuple.
  kind = typing.get_origin(kinds[0]) or kinds[0]
  return config_dict.placeholder(kind)


def _values(config: Any, section: str) -> dict[str, Any]:
  """Returns a section's fields; {} for an empty or missing section."""
  if config is dataclasses.MISSING or config is None or config == "":
    return {}
  if not isinstance(config, Values):
    raise ConfigError(f"config.{section} is {shown(config)}; it must be a section")
  return dict(config)


def _section_or_nothing(value: Any, hint: Any, path: str) -> Any:
  """Returns a section's values; None for an empty optional section."""
  values = _values(value, path)
  if not values and type(None) in kinds_of(hint):
    return None
  return values


def kinds_of(hint: Any) -> tuple[Any, ...]:
  """Returns a union's types, or a tuple with the single type."""
  if isinstance(hint, types.UnionType):
    return typing.get_args(hint)
  return (hint,)


def _section_class(hint: Any) -> type | None:
  """Returns the dataclass among a hint's types; None if the field is no section."""
  return next(filter(dataclasses.is_dataclass, kinds_of(hint)), None)


def _is_required(field: dataclasses.Field[Any]) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


def _suggestion(name: str, cls: type) -> str:
  """Suggests the path of a field `name` below `cls`, or the nearest name in `cls`."""
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
  """Yields a dataclass's fields with their paths, then its sections' fields."""
  hints = typing.get_type_hints(cls)
  fields = dataclasses.fields(cls)
  for field in fields:
    yield above + field.name, field
  for field in fields:
    for kind in (hints[field.name], *typing.get_args(hints[field.name])):
      if dataclasses.is_dataclass(kind):
        yield from _fields_within(kind, f"{above}{field.name}.")


def as_json(config: Any) -> dict[str, Any]:
  """Converts a config, a dataclass or a ConfigDict, to JSON values.

  Infinite defaults are left out, because JSON has no infinity.
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
  """Whether a section's value counts as missing."""
  return section is None or section == "" or section == {}


def _typed(value: Any, hint: Any, where: str) -> Any:
  """Converts a value to type `hint`; `where` is the value's name in messages."""
  if isinstance(value, float) and not math.isfinite(value):
    raise ConfigError(f"{where} is {value}; it must be a finite number")
  if isinstance(value, int) and abs(value) >= 2**63:
    raise ConfigError(f"{where} is {shown(value)}; it must fit in 64 bits")
  # JSON has no tuples, and a ConfigDict is not a dict.
  if isinstance(value, list):
    value = tuple(value)
  if isinstance(value, ml_collections.ConfigDict):
    value = value.to_dict()

  # --- A container: each entry by its own type.
  for kind in kinds_of(hint):
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

  # --- A nested section.
  kinds = tuple(typing.get_origin(kind) or kind for kind in kinds_of(hint))
  for kind in kinds:
    if isinstance(value, dict) and dataclasses.is_dataclass(kind):
      return read_config(value, kind, where.removeprefix("config."))

  # --- A plain value. Python's True is an int, but users do not mean it as a number.
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

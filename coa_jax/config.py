"""Turns a section of an ml_collections ConfigDict into a frozen dataclass.

Every consumer does this first, so a misspelt field is an error on line one, and
ConfigDicts never travel further (nor into jit).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import math
import os
import shutil
import subprocess
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import ml_collections

from coa_jax import lock
from coa_jax.disk import atomic_write
from coa_jax.json_io import read_object, shown

T = TypeVar("T")
_PATHS = ("init",)  # fields of a config that are in no section


class ConfigError(ValueError):
  """A config that cannot be used; the message names section, field and remedy."""


def section(config: ml_collections.ConfigDict, name: str, cls: type[T]) -> T:
  """Reads `config[name]` into the dataclass `cls`.

  Lists become tuples; an int is accepted where a float is asked for; a field that is
  itself a dataclass, or a dict of them, is read from sections inside. Fields that the
  config leaves out take the dataclass's defaults.

  Raises:
    ConfigError: the section has no fields; a field is unknown (the nearest known one is
      named), missing, of the wrong type, NaN or infinite, or an integer of more than 64
      bits; or `cls` itself refuses the values (ValueError).
  """
  return _build(fields_of(config, name), name, cls)


def fields_of(config: ml_collections.ConfigDict, name: str) -> dict[str, Any]:
  """The fields of a section; none where the config lacks it or leaves it empty.

  Raises:
    ConfigError: it is a value and has no fields.
  """
  value = config.get(name)
  if value is None or value == "":
    return {}
  if not isinstance(value, ml_collections.ConfigDict | Mapping):
    raise ConfigError(f"config.{name} is {shown(value)}; it must be a section")
  return dict(value)


def optional(config: ml_collections.ConfigDict, name: str, cls: type[T]) -> T | None:
  """As `section`; None where the config lacks the section or leaves it empty."""
  return section(config, name, cls) if fields_of(config, name) else None


def _build(values: dict[str, Any], name: str, cls: type[T]) -> T:
  """The dataclass `cls` from the values of section `name`."""
  known = {f.name: f for f in dataclasses.fields(cls)}
  for field in values:
    if field not in known:
      hint = _suggestion(field, cls)
      raise ConfigError(f"config section {name!r} has no field {field!r}{hint}")
  hints = typing.get_type_hints(cls)
  for field, value in values.items():
    values[field] = _typed(value, hints[field], f"config.{name}.{field}")
  for field, spec in known.items():
    missing = dataclasses.MISSING
    needed = spec.default is missing and spec.default_factory is missing
    if needed and field not in values:
      raise ConfigError(f"config section {name!r} lacks field {field!r}")
  try:
    return cls(**values)
  except ValueError as e:
    raise ConfigError(f"config section {name!r}: {e}") from e


def _suggestion(name: str, cls: type) -> str:
  """Says what an unknown field is called now, in which section it is, or what is near.

  Args:
    name: the field that `cls` does not have.
    cls: the dataclass of the section; its sections are looked into.
  """
  for path, field in _fields_within(cls):
    if field.metadata.get("was") == name:
      return f"; it is called {path!r} now"
  for path, field in _fields_within(cls):
    if field.name == name:
      return f"; did you mean {path!r}?"
  return nearest(name, [field.name for field in dataclasses.fields(cls)])


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


def check_sections(
  config: ml_collections.ConfigDict,
  known: tuple[str, ...],
  needed: tuple[str, ...] = (),
) -> None:
  """Refuses a section that the journey does not read or lacks, or that is a value."""
  for name in config:
    if name not in known:
      raise ConfigError(f"config has no section {name!r}{nearest(name, known)}")
    if name not in _PATHS:
      fields_of(config, name)
    elif not isinstance(config[name], str | None):
      raise ConfigError(f"config.{name} is {shown(config[name])}; it must be a path")
  for name in needed:
    if not config.get(name):
      raise ConfigError(f"config lacks field {name!r}")


def prepare_workdir(
  config: ml_collections.ConfigDict,
  workdir: str,
  may_change: tuple[str, ...] = (),
  inputs: Mapping[str, str] | None = None,
  derived: tuple[str, ...] = (),
) -> None:
  """Writes the resolved config and the commit to `workdir/config.json`.

  What is there already binds, unless nothing came of it: a run that was refused for
  what its config says can be started again with another.

  Args:
    config: of the run that begins or goes on here.
    workdir: where it writes.
    may_change: fields, as "section.field", or whole sections, that change nothing of
      what comes out: a run may go on with others than it began with.
    inputs: name -> hash of what was read (`hash_json`, `hash_files`): the same path may
      hold something else by the time that a run goes on.
    derived: folders of the workdir that are nothing come of it yet; where there is no
      more, and the config is another, they are removed.

  Raises:
    ConfigError: the workdir holds a run of another config or of other inputs; the
      section or the input that differs is named.
  """
  path = os.path.join(workdir, "config.json")
  wanted = json.loads(json.dumps(config.to_dict()))
  if os.path.exists(path) and not _alone(path):
    fault = _contradiction(path, wanted, may_change, inputs or {})
    if not fault:
      return
    if not _alone(path, derived):
      raise ConfigError(f"{workdir} holds {fault}; choose another workdir or delete it")
    for name in derived:
      shutil.rmtree(os.path.join(workdir, name), ignore_errors=True)
  record = {"config": wanted, "git_commit": git_commit(), "inputs": inputs or {}}
  with atomic_write(path) as f:
    json.dump(record, f, indent=2)


def read_run(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The config and the hashes of inputs in a `config.json` of `prepare_workdir`.

  Raises:
    FileNotFoundError: there is no such file.
    ConfigError: it is none that `prepare_workdir` wrote; the file is named.
  """
  try:
    record = read_object(path)
  except ValueError as e:
    raise ConfigError(f"{e}; it tells what a run was, and {_ANOTHER}") from e
  config = record.get("config")
  inputs = record.get("inputs", {})  # an older run's record has none
  for name, value in (("config", config), ("inputs", inputs)):
    if not isinstance(value, dict):
      raise ConfigError(
        f"{path}: field {name!r} is {shown(value)}, not an object; the file tells what "
        f"a run was, and {_ANOTHER}"
      )
  return config, inputs


_ANOTHER = "without it none can go on there: choose another workdir or delete this one"


def _contradiction(
  path: str,
  wanted: dict[str, Any],
  may_change: tuple[str, ...],
  inputs: Mapping[str, str],
) -> str:
  """How the run of a `config.json` differs from the one that is wanted; "" if not."""
  found, before = read_run(path)
  wanted = copy.deepcopy(wanted)
  for both in (wanted, found):
    for field in may_change:
      name, _, key = field.partition(".")
      if key:
        if isinstance(both.get(name), dict):
          both[name].pop(key, None)
      else:
        both.pop(name, None)
  for name in sorted({*wanted, *found}):
    # A section that is empty says what one that is missing says.
    if (wanted.get(name) or None) != (found.get(name) or None):
      return (
        f"a run whose section {name!r} was {found.get(name)!r} and not "
        f"{wanted.get(name)!r}"
      )
  for name, value in inputs.items():
    if before.get(name, value) != value:
      return f"a run that read other contents of {name}"
  return ""


def _alone(path: str, beside: tuple[str, ...] = ()) -> bool:
  """Whether a file is the only one with content in its folder and below.

  Args:
    path: the file; the lock beside it does not count.
    beside: folders beside it that do not count, either.
  """
  folder = os.path.dirname(path)
  left_out = [os.path.join(folder, name, "") for name in beside]
  files = (os.path.join(d, f) for d, _, fs in os.walk(folder) for f in fs)
  return all(
    file == path
    or os.path.basename(file) == lock.FILE
    or not os.path.getsize(file)
    or file.startswith((*left_out,))
    for file in files
  )


def hash_json(values: Iterable[Any]) -> str:
  """A hash of JSON values, one after the other."""
  out = hashlib.sha256()
  for value in values:
    out.update(json.dumps(value, sort_keys=True).encode() + b"\n")
  return out.hexdigest()


def hash_files(path: str | None, samples: int | None = None) -> str:
  """A hash of a file, or of a folder's files; of None the hash of nothing.

  Args:
    path: of the file or folder.
    samples: of each file only its size and 64 kB at so many places: quick for weights
      of any size, of which training changes every part. None reads all.
  """
  names = [path] if path else []
  if path and os.path.isdir(path):
    names = [os.path.join(path, name) for name in sorted(os.listdir(path))]
  out = hashlib.sha256()
  for name in filter(os.path.isfile, names):
    size = os.path.getsize(name)
    out.update(f"{os.path.basename(name)} {size}\n".encode())
    with open(name, "rb") as f:
      if samples is None:
        out.update(hashlib.file_digest(f, "sha256").digest())
      for i in range(samples or 0):
        f.seek(i * size // samples)
        out.update(f.read(1 << 16))
  return out.hexdigest()


def write_manifest(path: str, data: str, config: Any, **figures: Any) -> None:
  """Writes what a data file was made of: config, commit, figures and its sha256.

  Args:
    path: of the manifest, JSON.
    data: the file that it is about, complete.
    config: what was asked for.
    **figures: what else to say of it, e.g. counts.
  """
  with open(data, "rb") as f:
    digest = hashlib.file_digest(f, "sha256").hexdigest()
  value = {"config": config, "git_commit": git_commit(), **figures}
  value["sha256"] = {os.path.basename(data): digest}
  with atomic_write(path) as f:
    json.dump(value, f, indent=2, sort_keys=True)
    f.write("\n")


def git_commit() -> str | None:
  """The commit of this checkout; None outside one."""
  here = os.path.dirname(os.path.abspath(__file__))
  command = ["git", "-C", here, "rev-parse", "HEAD"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()


def nearest(name: str, known: Any) -> str:
  """`; did you mean 'x'?`, or the list of what there is where nothing is near."""
  close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
  if close:
    return f"; did you mean {close[0]!r}?"
  return f"; there are {', '.join(sorted(known))}"


def _typed(value: Any, hint: Any, where: str) -> Any:
  """The value as a field of this type; `where` names it in messages."""
  if isinstance(value, float) and not math.isfinite(value):
    raise ConfigError(f"{where} is {value}; it must be a finite number")
  if isinstance(value, int) and abs(value) >= 2**63:
    raise ConfigError(f"{where} is {shown(value)}; it must fit in 64 bits")
  if isinstance(value, list):
    value = tuple(value)
  if isinstance(value, ml_collections.ConfigDict):
    value = value.to_dict()
  kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
  for kind in kinds:
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict and isinstance(value, dict):
      return {k: _typed(v, of[1], f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and isinstance(value, tuple):
      if of[-1] is Ellipsis:
        of = of[:1] * len(value)
      if len(of) != len(value):
        raise ConfigError(f"{where} is {shown(value)}; it must have {len(of)} entries")
      pairs = enumerate(zip(value, of, strict=True))
      return tuple(_typed(v, kind, f"{where}[{i}]") for i, (v, kind) in pairs)
  kinds = tuple(typing.get_origin(k) or k for k in kinds)
  for kind in kinds:
    if isinstance(value, dict) and dataclasses.is_dataclass(kind):
      return _build(value, where.removeprefix("config."), kind)
  if float in kinds and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  wrong_bool = isinstance(value, bool) and bool not in kinds
  if Any not in kinds and (wrong_bool or not isinstance(value, kinds)):
    wanted = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
    raise ConfigError(f"{where} is {shown(value)}; it must be of type {wanted}")
  return value

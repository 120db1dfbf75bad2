"""Records what a run was made of: `workdir/config.json`, hashes of what was read.

A workdir belongs to one config and one set of inputs; `prepare_workdir` refuses to go
on there with others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from coa_jax import lock
from coa_jax.config import ConfigError, as_json, is_empty, read_config
from coa_jax.disk import atomic_write
from coa_jax.json_io import read_object, shown


def prepare_workdir(
  config: Any,
  workdir: str,
  may_change: tuple[str, ...] = (),
  inputs: Mapping[str, str] | None = None,
  scratch_dirs: tuple[str, ...] = (),
) -> None:
  """Writes the whole config and the commit to `workdir/config.json`.

  What is there already binds, unless nothing came of it: a run that was refused for
  what its config says can be started again with another. A field that the record lacks,
  since an earlier version wrote it, counts as its default.

  Args:
    config: of the run that begins or goes on here: a dataclass, or a ConfigDict.
    workdir: where it writes.
    may_change: fields, as "section.field", or whole sections, that change nothing of
      what comes out: a run may go on with others than it began with.
    inputs: name -> hash of what was read (`hash_json`, `hash_files`): the same path may
      hold something else by the time that a run goes on.
    scratch_dirs: folders of the workdir that can be made again; where it holds no more,
      and the config is another, they are removed.

  Raises:
    ConfigError: the workdir holds a run of another config or of other inputs; the
      field or the input that differs is named.
  """
  # --- A run that something came of goes on as it began.
  path = os.path.join(workdir, "config.json")
  if os.path.exists(path) and not _alone(path):
    difference = _difference_from_record(path, config, may_change, inputs or {})
    if not difference:
      return
    if not _alone(path, scratch_dirs):
      raise ConfigError(
        f"{workdir} holds {difference}; choose another workdir or delete it"
      )
    for name in scratch_dirs:
      shutil.rmtree(os.path.join(workdir, name), ignore_errors=True)
  # --- A new run, or one that nothing came of.
  record = {
    "config": as_json(config),
    "git_commit": git_commit(),
    "inputs": inputs or {},
  }
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


def _difference_from_record(
  path: str,
  config: Any,
  may_change: tuple[str, ...],
  inputs: Mapping[str, str],
) -> str:
  """How the run of a `config.json` differs from one of this config; "" if not."""
  before, inputs_before = read_run(path)
  now = as_json(config)
  for field in may_change:
    _overwrite(before, now, field)
  if dataclasses.is_dataclass(config):
    try:
      before = as_json(read_config(before, type(config)))
    except ConfigError as e:
      return f"a run of another config ({e})"
  difference = _difference(before, now, "")
  if difference:
    return difference
  for name, value in inputs.items():
    if inputs_before.get(name, value) != value:
      return f"a run that read other contents of {name}"
  return ""


def _overwrite(before: dict[str, Any], now: dict[str, Any], field: str) -> None:
  """Gives a field of a record, or a whole section, the value that it has now."""
  section, _, name = field.partition(".")
  if not name:
    before[section] = now.get(section)
    return
  values = dict(before.get(section) or {})
  values.pop(name, None)
  values_now = now.get(section) or {}
  if name in values_now:
    values[name] = values_now[name]
  elif values and not values_now:
    return  # the section is gone, which is a difference whatever its field was
  before[section] = values


def _difference(before: Any, now: Any, path: str) -> str:
  """The first field in which two configs differ, with both values; "" if none."""
  if isinstance(before, dict) and isinstance(now, dict):
    for name in sorted({*before, *now}):
      below = f"{path}.{name}" if path else name
      difference = _difference(before.get(name), now.get(name), below)
      if difference:
        return difference
    return ""
  if before == now or (is_empty(before) and is_empty(now)):
    return ""
  return f"a run whose {path} was {shown(before)} and not {shown(now)}"


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

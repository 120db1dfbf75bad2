"""Records what a run was made of: `workdir/config.json`, hashes of what was read.

A workdir belongs to one config and one set of inputs; `prepare_workdir` refuses to go
on there with others.

budget: what is recorded, and what of it binds, is one subject.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coa_jax.runtime import lock
from coa_jax.runtime.bucket.inputs import named
from coa_jax.runtime.config import ConfigError, as_json, is_empty, read_config
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object, shown


def prepare_workdir(
  config: Any,
  workdir: str,
  may_change: tuple[str, ...] = (),
  inputs: Mapping[str, str] | None = None,
  scratch_dirs: tuple[str, ...] = (),
  may_grow: Mapping[str, str] | None = None,
  origin: Mapping[str, Any] | None = None,
) -> None:
  """Writes the whole config, the commit and the time to `workdir/config.json`.

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
    may_grow: whole-numbered fields, as "section.field", with which a run is extended:
      a larger number takes the place of the one on record. Each with the reason why it
      can not be, "" for none.
    origin: what else to record of how the model is trained, for `read_origin_of`.

  Raises:
    ConfigError: the workdir holds a run of another config or of other inputs; the
      fields or the input that differ are named.

  budget: every argument is said; the rest is in two steps.
  """
  # --- A run that something came of goes on as it began; another config is refused.
  path = os.path.join(workdir, "config.json")
  if os.path.exists(path) and not _alone(path):
    grown, faults = _grown(path, config, may_grow or {})
    difference = _difference_from_record(
      path, config, (*may_change, *grown), inputs or {}
    )
    if not difference:
      _extend(path, grown)
      return
    if not _alone(path, scratch_dirs):
      raise ConfigError(
        f"{workdir} holds {difference}{faults}; choose another workdir or delete it"
      )
    for name in scratch_dirs:
      shutil.rmtree(os.path.join(workdir, name), ignore_errors=True)
  # --- A new run, or one that nothing came of.
  now = named(as_json(config))
  record = {
    "begun": _begun_with(path, now) or round(time.time(), 3),
    "config": now,
    "git_commit": git_commit(),
    "inputs": inputs or {},
    "origin": origin,
  }
  # Whole or absent: half of a record would refuse every run that goes on.
  with atomic_write(path) as f:
    json.dump(record, f, indent=2)


def read_run(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The config and the hashes of inputs in a `config.json` of `prepare_workdir`.

  Raises:
    FileNotFoundError: there is no such file.
    ConfigError: it is none that `prepare_workdir` wrote; the file is named.
  """
  record = _read_record(path)
  return record["config"], record["inputs"]


def _read_record(path: str) -> dict[str, Any]:
  """All that a `config.json` holds; raises as `read_run`."""
  try:
    record = read_object(path)
  except ValueError as e:
    raise ConfigError(f"{e}; it tells what a run was, and {_ANOTHER}") from e
  record.setdefault("inputs", {})  # an older run's record has none
  for name in ("config", "inputs"):
    value = record.get(name)
    if not isinstance(value, dict):
      raise ConfigError(
        f"{path}: field {name!r} is {shown(value)}, not an object; the file tells what "
        f"a run was, and {_ANOTHER}"
      )
  return record


def read_origin_of(workdir: str) -> dict[str, Any] | None:
  """What `prepare_workdir` was given as `origin`, with the commit that began the run.

  None of a run of an earlier version, which recorded none.

  Raises:
    FileNotFoundError, ConfigError: as `read_run`.
  """
  record = _read_record(os.path.join(workdir, "config.json"))
  origin = record.get("origin")
  if not isinstance(origin, dict):
    return None
  return {**origin, "commit": record.get("git_commit")}


def read_begun(workdir: str) -> float | None:
  """When `prepare_workdir` began a run, in Unix time; None where no record says so."""
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    return None
  begun = _read_record(path).get("begun")
  return begun if isinstance(begun, float) else None


def _begun_with(path: str, config: dict[str, Any]) -> float | None:
  """When a run of the same config began, of which nothing came yet; None for none."""
  try:
    before, _ = read_run(path)
  except (FileNotFoundError, ConfigError):
    return None
  # As it reads from JSON: lists for tuples.
  same = before == json.loads(json.dumps(config))
  return read_begun(os.path.dirname(path)) if same else None


def _grown(
  path: str, config: Any, may_grow: Mapping[str, str]
) -> tuple[dict[str, int], str]:
  """Fields that are larger now than in a `config.json`, and why others can not be.

  Returns:
    The former with their values now, and the latter's reasons in brackets.
  """
  before, _ = read_run(path)
  now = named(as_json(config))
  grown = {}
  faults = ""
  for field, fault in may_grow.items():
    section, _, name = field.partition(".")
    values = before.get(section)
    old = values.get(name) if isinstance(values, dict) else None
    new = now[section][name]
    if type(old) is not int or new <= old:
      continue
    if fault:
      faults += f" ({fault})"
    else:
      grown[field] = new
  return grown, faults


def _extend(path: str, grown: Mapping[str, int]) -> None:
  """Writes the larger numbers into a `config.json`."""
  if not grown:
    return
  record = _read_record(path)
  for field, value in grown.items():
    section, _, name = field.partition(".")
    record["config"][section][name] = value
  with atomic_write(path) as f:
    json.dump(record, f, indent=2)


_ANOTHER = "without it none can go on there: choose another workdir or delete this one"


def _difference_from_record(
  path: str,
  config: Any,
  may_change: tuple[str, ...],
  inputs: Mapping[str, str],
) -> str:
  """How the run of a `config.json` differs from one of this config; "" if not."""
  # --- The two configs, but for what may change; one of an earlier version first
  # gains the defaults of fields that it lacks.
  before, inputs_before = read_run(path)
  now = named(as_json(config))
  for field in may_change:
    _overwrite(before, now, field)
  if dataclasses.is_dataclass(config):
    try:
      before = as_json(read_config(before, type(config)))
    except ConfigError as e:
      return f"a run of another config ({e})"
  differences = list(_differences(before, now, ""))
  if differences:
    return f"a run whose {', '.join(differences)}"

  # --- What they read; an earlier version did not hash all that this one does.
  for name, value in inputs.items():
    if inputs_before.get(name, value) != value:
      return f"a run that read other contents of {name}"
  return ""


def _overwrite(before: dict[str, Any], now: dict[str, Any], field: str) -> None:
  """Gives a field of a record, or a whole section, the value that it has now."""
  section, _, name = field.partition(".")
  if not name:  # a whole section
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


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
  """Yields each field in which two configs differ, with both values."""
  if isinstance(before, dict) and isinstance(now, dict):
    for name in sorted({*before, *now}):
      below = f"{path}.{name}" if path else name
      yield from _differences(before.get(name), now.get(name), below)
    return
  # None, "" and {} all say that nothing was set.
  if before != now and not (is_empty(before) and is_empty(now)):
    yield f"{path} was {shown(before)} and not {shown(now)}"


def _alone(path: str, beside: tuple[str, ...] = ()) -> bool:
  """Whether a file is the only one with content in its folder and below.

  Args:
    path: the file; the lock beside it does not count.
    beside: folders beside it that do not count, either.
  """
  folder = os.path.dirname(path)
  left_out = tuple(os.path.join(folder, name, "") for name in beside)
  for parent, _, names in os.walk(folder):
    for name in names:
      file = os.path.join(parent, name)
      if file == path or name == lock.FILE or file.startswith(left_out):
        continue
      if os.path.getsize(file):
        return False
  return True


def hash_json(values: Iterable[Any]) -> str:
  """A hash of JSON values, one after the other."""
  # Keys in one order: equal values have equal hashes, however they were made.
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
  # --- The file, or those of the folder by name; its subfolders are left out.
  files = []
  if path and os.path.isdir(path):
    files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
  elif path:
    files = [path]

  # --- Of each its name and size, and its bytes or samples of them.
  out = hashlib.sha256()
  for name in filter(os.path.isfile, files):
    size = os.path.getsize(name)
    out.update(f"{os.path.basename(name)} {size}\n".encode())
    with open(name, "rb") as f:
      if samples is None:
        out.update(hashlib.file_digest(f, "sha256").digest())
        continue
      for i in range(samples):
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
    sha256 = hashlib.file_digest(f, "sha256").hexdigest()
  value = {"config": named(config), "git_commit": git_commit(), **figures}
  value["sha256"] = {os.path.basename(data): sha256}
  with atomic_write(path) as f:
    json.dump(value, f, indent=2, sort_keys=True)
    f.write("\n")


def git_commit() -> str | None:
  """The commit of this checkout; None outside one."""
  # Of the code that runs, wherever the program was started.
  here = os.path.dirname(os.path.abspath(__file__))
  command = ["git", "-C", here, "rev-parse", "HEAD"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()

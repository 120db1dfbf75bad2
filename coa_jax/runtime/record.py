"""Records a run's config and hashes of its inputs in `workdir/config.json`.

A workdir belongs to one config and one set of inputs; `prepare_workdir` refuses to
resume there with others.
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
from coa_jax.runtime.config import (
  ConfigError,
  UnknownFieldError,
  as_json,
  is_empty,
  read_config,
)
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

  An existing record is binding, unless its run has no output: after a refused config a
  run can start with another. A field missing in an earlier version's record counts as
  its default.

  Args:
    config: the new or resumed run's config, a dataclass or a ConfigDict.
    workdir: the run's output folder.
    may_change: fields ("section.field") or whole sections without effect on results: a
      run may resume with other values.
    inputs: name -> input hash (`hash_json`, `hash_files`): the same path may have other
      contents when a run resumes.
    scratch_dirs: reproducible folders in the workdir, removed if the config differs and
      the workdir contains nothing else.
    may_grow: integer fields ("section.field") that extend a run, each mapped to the
      reason why the field can not grow, or "". A larger number replaces the recorded
      one.
    origin: further facts on the model's training, for `read_origin_of`.

  Raises:
    ConfigError: the workdir has a run with another config or other inputs; the message
      names the differing fields or input. Or the run is from another version; the
      message names a field unknown to this version, and the run's commit.
  """
  # --- A run with output resumes with its config; another config is refused.
  path = os.path.join(workdir, "config.json")
  now = named(as_json(config))
  if os.path.exists(path) and not _alone(path):
    record = _read_record(path)
    grown, faults = _grown(record["config"], now, may_grow or {})
    difference, remedy = _difference(
      path, record, config, now, (*may_change, *grown), inputs or {}
    )
    if not difference:
      for field, value in grown.items():
        section, _, name = field.partition(".")
        record["config"][section][name] = value
      if grown:
        _write(path, record)
      return
    if not _alone(path, scratch_dirs):
      raise ConfigError(f"{workdir} holds {difference}{faults}; {remedy}")
    for name in scratch_dirs:
      shutil.rmtree(os.path.join(workdir, name), ignore_errors=True)
  # --- A new run, or one without output.
  record = {
    "begun": _begun_with(path, now) or round(time.time(), 3),
    "config": now,
    "git_commit": git_commit(),
    "inputs": inputs or {},
    "origin": origin,
  }
  _write(path, record)


def _write(path: str, record: dict[str, Any]) -> None:
  # Whole or absent: a partial record would refuse every resume.
  with atomic_write(path) as f:
    json.dump(record, f, indent=2)


def read_run(path: str) -> dict[str, Any]:
  """Returns the config from `prepare_workdir`'s `config.json`.

  Raises:
    FileNotFoundError: there is no such file.
    ConfigError: `prepare_workdir` did not write the file; the message names the path.
  """
  return _read_record(path)["config"]


def _read_record(path: str) -> dict[str, Any]:
  """Reads a whole `config.json`; raises as `read_run`."""
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
  """Returns `prepare_workdir`'s `origin`, with the run's first commit.

  Returns None if the record has no origin, as in earlier versions.

  Raises:
    FileNotFoundError, ConfigError: as `read_run`.
  """
  record = _read_record(os.path.join(workdir, "config.json"))
  origin = record.get("origin")
  if not isinstance(origin, dict):
    return None
  return {**origin, "commit": record.get("git_commit")}


def read_begun(workdir: str) -> float | None:
  """Returns the start recorded by `prepare_workdir`, in Unix time; None if missing."""
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    return None
  begun = _read_record(path).get("begun")
  return begun if isinstance(begun, float) else None


def _begun_with(path: str, config: dict[str, Any]) -> float | None:
  """Returns the recorded start if the record has the same config, else None."""
  try:
    record = _read_record(path)
  except (FileNotFoundError, ConfigError):
    return None
  # Compare as JSON, which has lists for tuples.
  same = record["config"] == json.loads(json.dumps(config))
  return read_begun(os.path.dirname(path)) if same else None


def _grown(
  before: dict[str, Any], now: dict[str, Any], may_grow: Mapping[str, str]
) -> tuple[dict[str, int], str]:
  """Finds the fields with larger values now than before.

  Returns:
    New values of the fields that may grow, and the others' reasons, in brackets.
  """
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


_ANOTHER = (
  "without it no run can resume there: choose another workdir or delete this one"
)


def _difference(
  path: str,
  record: dict[str, Any],
  config: Any,
  now: dict[str, Any],
  may_change: Iterable[str],
  inputs: Mapping[str, str],
) -> tuple[str, str]:
  """Compares a record with the current config, `now` in JSON, and inputs.

  Returns:
    A description of the difference ("" if none), and the remedy.
  """
  remedy = "choose another workdir or delete it"
  # --- Compare the configs, except for changeable fields; an earlier version's config
  # first gets defaults for missing fields.
  before = dict(record["config"])
  for field in may_change:
    _overwrite(before, now, field)
  if dataclasses.is_dataclass(config):
    try:
      before = as_json(read_config(before, type(config)))
    except UnknownFieldError as e:
      return _other_version(path, before, e.path)
    except ConfigError as e:
      return f"a run of another config ({e})", remedy
  differences = list(_differences(before, now, ""))
  if differences:
    return f"a run whose {', '.join(differences)}", remedy

  # --- Compare the inputs; an earlier version hashed fewer.
  for name, value in inputs.items():
    if record["inputs"].get(name, value) != value:
      return f"a run that read other contents of {name}", remedy
  return "", ""


def _other_version(path: str, config: dict[str, Any], unknown: str) -> tuple[str, str]:
  """Describes a record with a field that this version lacks, and the remedy."""
  value: Any = config
  for name in unknown.split("."):
    value = value[name] if isinstance(value, dict) and name in value else None
  difference = (
    f"a run of another version: {path} has the field {unknown!r} ({shown(value)}), "
    "which this version does not have"
  )
  commit = _read_record(path).get("git_commit")
  remedy = "choose another workdir"
  model = os.path.join(os.path.dirname(path), "model")
  if os.path.isdir(model):
    remedy += f", with --config.init={model} to start from its model"
  if isinstance(commit, str):
    remedy = f"finish it with commit {commit[:12]}, or {remedy}"
  return difference, remedy


def _overwrite(before: dict[str, Any], now: dict[str, Any], field: str) -> None:
  """Sets a record's field, or a whole section, to its current value."""
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
    return  # the section is gone: a difference, whatever the field was
  before[section] = values


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
  """Yields the fields that differ between two configs, with both values."""
  if isinstance(before, dict) and isinstance(now, dict):
    for name in sorted({*before, *now}):
      below = f"{path}.{name}" if path else name
      yield from _differences(before.get(name), now.get(name), below)
    return
  # None, "" and {} all mean unset.
  if before != now and not (is_empty(before) and is_empty(now)):
    yield f"{path} was {shown(before)} and not {shown(now)}"


def _alone(path: str, beside: tuple[str, ...] = ()) -> bool:
  """Whether a file is the only non-empty one in its folder and below.

  Args:
    path: the file; lock files do not count.
    beside: folders next to the file that do not count, either.
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
  """Returns a SHA-256 hash of a sequence of JSON values."""
  # Sorted keys: equal values have equal hashes.
  out = hashlib.sha256()
  for value in values:
    out.update(json.dumps(value, sort_keys=True).encode() + b"\n")
  return out.hexdigest()


def hash_files(path: str | None, samples: int | None = None) -> str:
  """Returns a SHA-256 hash of a file, or of a folder's files; None hashes nothing.

  Args:
    path: the file or folder.
    samples: the number of places where 64 kB are read in each file. Samples are quick
      for weights of any size, and suffice because training changes every part. None
      reads all.
  """
  # --- List the file, or the folder's files by name; subfolders are left out.
  files = []
  if path and os.path.isdir(path):
    files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
  elif path:
    files = [path]

  # --- Hash each file's name and size, and its bytes or samples.
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
  """Writes a data file's manifest: config, commit, figures and sha256."""
  with open(data, "rb") as f:
    sha256 = hashlib.file_digest(f, "sha256").hexdigest()
  value = {"config": named(config), "git_commit": git_commit(), **figures}
  value["sha256"] = {os.path.basename(data): sha256}
  with atomic_write(path) as f:
    json.dump(value, f, indent=2, sort_keys=True)
    f.write("\n")


def git_commit() -> str | None:
  """Returns this checkout's commit; None outside a checkout."""
  # The folder of the running code, not the current folder.
  here = os.path.dirname(os.path.abspath(__file__))
  command = ["git", "-C", here, "rev-parse", "HEAD"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()

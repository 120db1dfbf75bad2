"""Runs a stage in shards: separate processes; the last one joins their results.

`--shard=I/N` does part I of N (from 0) in `WORKDIR/shards/I-of-N`; `auto/N` takes I
from the job's index under Kubernetes or Slurm. The last shard to end copies all logs
into the workdir and resumes the stage there: the result equals one process's. A lost
shard resumes by the same command; nothing is done twice.

The workdir is on a shared disk or in a bucket. For a bucket, each shard works in a
local mirror of its part (`bucket.mirror`).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coa_jax.report.metrics import say, write_json
from coa_jax.runtime.bucket import mirror
from coa_jax.runtime.bucket.objects import Bucket, is_uri
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import parse_object, shown
from coa_jax.runtime.lock import InUseError, hold
from coa_jax.runtime.shard import Shard

_FOLDER = "shards"
_CLAIM = f"{_FOLDER}/shards.json"  # the common settings
_DONE = "done.json"  # in a shard's folder: its result; in shards/: all are joined
# Schedulers' variables for a process's index in its job.
_INDEX = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID")
_MOST = 10_000

# A stage with its config: takes (folder, shard). Without a shard it resumes from the
# logs in the folder.
Stage = Callable[[str, Shard | None], dict[str, Any]]


def read_shard(text: str) -> Shard:
  """Reads the flag --shard, I/N or auto/N; refuses other text."""
  match = re.fullmatch(r"(\d+|auto)/(\d+)", text)
  if not match:
    raise ValueError(
      f"--shard={text}: give I/N with I from 0, or auto/N under Kubernetes or Slurm"
    )
  count = int(match[2])
  index = match[1]
  if index == "auto":
    index = next((os.environ[name] for name in _INDEX if os.environ.get(name)), "")
    if not index.isdecimal():
      raise ValueError(
        f"--shard={text}: none of {', '.join(_INDEX)} says which shard this is"
      )
  if not 0 < count <= _MOST or int(index) >= count:
    raise ValueError(
      f"--shard={text}: {index} of {count}; I is below N, and N at most {_MOST:,}"
    )
  return Shard(int(index), count)


def run_shard(
  stage: Stage,
  settings: dict[str, Any],
  workdir: str,
  shard: Shard,
  logs: Sequence[str],
  scratch: str,
) -> tuple[dict[str, Any], bool]:
  """Does one shard of a stage, and joins all if it is the last.

  Args:
    stage: the stage; takes a folder and a shard.
    settings: JSON values common to all shards.
    workdir: for the whole stage: a folder, or an address in a bucket.
    shard: the part to do here.
    logs: names of a shard's result files.
    scratch: a folder on this machine's disk, if the workdir is in a bucket.

  Returns:
    The stage's result, and whether it covers all shards: true for the last one.

  Raises:
    ValueError: the other shards have other settings or another count, or the workdir
      holds a run that was not cut into shards.
    InUseError: another process does this shard.
  """
  place: _Disk | _InBucket = _Disk(workdir)
  if is_uri(workdir):
    place = _InBucket(workdir, scratch)
  _claim(place, settings, shard.count)

  # --- This shard, unless done before.
  own = _name(shard)
  done = place.read(f"{own}/{_DONE}")
  if done is None:
    with place.part(own) as folder:
      results = stage(folder, shard)
      _note(os.path.join(folder, _DONE), results)
  else:
    results = parse_object(done, f"{workdir}/{own}/{_DONE}")

  # --- All shards.
  names = [_name(Shard(i, shard.count)) for i in range(shard.count)]
  missing = set(names) - place.done()
  if missing:
    say(f"shard {shard.index} of {shard.count} is done; {len(missing)} are not yet")
    return results, False
  try:
    with place.whole() as folder:
      _join(folder, names, logs)
      return stage(folder, None), True
  except InUseError:
    say(f"shard {shard.index} of {shard.count} is done; another process joins them")
    return results, False


class _Disk:
  """A workdir on the shards' common disk."""

  def __init__(self, workdir: str):
    self.workdir = workdir

  def read(self, name: str) -> bytes | None:
    """Reads a file in the workdir; None if there is none."""
    path = os.path.join(self.workdir, name)
    if not os.path.exists(path):
      return None
    with open(path, "rb") as f:
      return f.read()

  def create(self, name: str, text: str) -> None:
    """Writes a file in the workdir unless it exists."""
    if self.read(name) is None:
      with atomic_write(os.path.join(self.workdir, name)) as f:
        f.write(text)

  def done(self) -> set[str]:
    """Lists finished shards' folders."""
    found = glob.glob(f"{_FOLDER}/*/{_DONE}", root_dir=self.workdir)
    return {os.path.dirname(name) for name in found}

  def part(self, name: str) -> contextlib.AbstractContextManager[str]:
    """Yields a shard's folder; the stage locks it."""
    return contextlib.nullcontext(os.path.join(self.workdir, name))

  @contextlib.contextmanager
  def whole(self) -> Iterator[str]:
    """Yields the common folder.

    Raises:
      InUseError: another process joins the shards.
    """
    with hold(os.path.join(self.workdir, _FOLDER)):
      yield self.workdir


class _InBucket:
  """A workdir in a bucket: like `_Disk`, with local mirrors."""

  def __init__(self, uri: str, scratch: str):
    self._bucket = Bucket(uri)
    self.workdir = self._bucket.uri
    self._scratch = scratch

  def read(self, name: str) -> bytes | None:
    return self._bucket.read(name)

  def create(self, name: str, text: str) -> None:
    self._bucket.create(name, text.encode())

  def done(self) -> set[str]:
    names = self._bucket.list(_FOLDER)
    return {os.path.dirname(name) for name in names if name.endswith(f"/{_DONE}")}

  def part(self, name: str) -> contextlib.AbstractContextManager[str]:
    return mirror.opened(f"{self.workdir}/{name}", self._scratch)

  def whole(self) -> contextlib.AbstractContextManager[str]:
    return mirror.opened(self.workdir, self._scratch)


def _name(shard: Shard) -> str:
  return f"{_FOLDER}/{shard.index}-of-{shard.count}"


def _claim(place: _Disk | _InBucket, settings: dict[str, Any], count: int) -> None:
  """Records the shards' settings, or refuses a shard with different ones."""
  settings = json.loads(json.dumps(settings))  # as read back from JSON
  known = place.read(_CLAIM)
  if known is None:
    if place.read("config.json") is not None:
      raise ValueError(
        f"{place.workdir} holds a run that was not cut into shards; choose another "
        "workdir"
      )
    place.create(_CLAIM, json.dumps({"config": settings, "shards": count}, indent=2))
    # Two shards may have begun at once: the stored record applies to both.
    known = place.read(_CLAIM)
  there = f"{place.workdir}/{_FOLDER}"
  noted = parse_object(known or b"", f"{place.workdir}/{_CLAIM}")
  if not isinstance(noted.get("config"), dict) or "shards" not in noted:
    raise ValueError(
      f"{place.workdir}/{_CLAIM}: lacks the fields 'config' and 'shards'; delete it, "
      "once no shard runs"
    )
  if noted["shards"] != count:
    raise ValueError(f"{there} has {noted['shards']} shards, not {count}")
  for name in sorted({*noted["config"], *settings}):
    before = noted["config"].get(name)
    now = settings.get(name)
    if before != now:
      raise ValueError(
        f"{there}: the other shards have {name}={shown(before)}, not {shown(now)}"
      )


def _join(workdir: str, names: Sequence[str], logs: Sequence[str]) -> None:
  """Concatenates the shards' logs into the workdir, only once."""
  joined = os.path.join(workdir, _FOLDER, _DONE)
  if os.path.exists(joined):  # the stage may have appended since
    return
  for log in logs:
    parts = [os.path.join(workdir, name, log) for name in names]
    parts = [part for part in parts if os.path.exists(part)]
    if not parts:
      continue
    with atomic_write(os.path.join(workdir, log)) as out:
      for part in parts:
        with open(part, encoding="utf-8") as f:
          shutil.copyfileobj(f, out)
  _note(joined, {"shards": len(names)})


def _note(path: str, value: dict[str, Any]) -> None:
  """Writes a marker for finished work; in a bucket, after all files of the work."""
  mirror.push(path)
  write_json(path, value)
  mirror.push(path)

"""Work that is cut into shards: each a process of its own, the last one joins them.

`--shard=I/N` does part I of N (from 0) in `WORKDIR/shards/I-of-N`; `auto/N` takes I
from the job's index under Kubernetes or Slurm. Whoever ends last puts the logs of all
into the workdir and has the journey go on there: what one process would have written is
then in it. A shard that was lost goes on by the same command; nothing is done twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from coa_jax.bucket.inputs import named
from coa_jax.config import as_json, read_config
from coa_jax.disk import atomic_write
from coa_jax.json_io import read_object, shown
from coa_jax.lock import InUseError, hold
from coa_jax.report.metrics import say, write_json
from coa_jax.shard import Shard
from experiments.refusal import stop

_FOLDER = "shards"
_DONE = "done.json"  # of a shard: what it returned; of the folder: all is joined
# Where schedulers say which of a job's processes this is.
_INDEX = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID")
_MOST = 10_000

# Takes (config, workdir, shard).
Journey = Callable[..., dict[str, Any]]


def read_shard(text: str) -> Shard:
  """Reads the flag --shard: I/N, or auto/N; ends the program where it is neither."""
  match = re.fullmatch(r"(\d+|auto)/(\d+)", text)
  if not match:
    stop(f"--shard={text}: give I/N with I from 0, or auto/N under Kubernetes or Slurm")
  count = int(match[2])
  index = match[1]
  if index == "auto":
    index = next((os.environ[name] for name in _INDEX if os.environ.get(name)), "")
    if not index.isdecimal():
      stop(f"--shard={text}: none of {', '.join(_INDEX)} says which shard this is")
  if not 0 < count <= _MOST or int(index) >= count:
    stop(f"--shard={text}: {index} of {count}; I is below N, and N at most {_MOST:,}")
  return Shard(int(index), count)


def run_shard(
  journey: Journey,
  config: ml_collections.ConfigDict,
  config_class: type,
  workdir: str,
  shard: Shard,
  logs: Sequence[str],
) -> tuple[dict[str, Any], bool]:
  """Does one shard of a journey, and joins all where it is the last.

  Args:
    journey: takes a config, a workdir and a shard; without a shard it goes on from
      logs.
    config: of the whole journey.
    config_class: the dataclass that the journey reads it into.
    workdir: of the whole journey.
    shard: which part is done here.
    logs: names of the files that a shard leaves behind.

  Returns:
    What the journey returns, and whether of all: so where this was the last shard.

  Raises:
    ValueError: the other shards there have another config or number, or the workdir
      holds a run that was not cut.
  """
  _claim(workdir, named(as_json(read_config(config, config_class))), shard.count)
  folder = os.path.join(workdir, _FOLDER)

  # --- This shard.
  own = _path(folder, shard)
  done_path = os.path.join(own, _DONE)
  if not os.path.exists(done_path):
    results = journey(config, own, shard=shard)
    write_json(done_path, results)
  with open(done_path, encoding="utf-8") as f:
    results = json.load(f)

  # --- All of them.
  paths = [_path(folder, Shard(i, shard.count)) for i in range(shard.count)]
  missing = [path for path in paths if not os.path.exists(os.path.join(path, _DONE))]
  if missing:
    say(f"shard {shard.index} of {shard.count} is done; {len(missing)} are not yet")
    return results, False
  try:
    with hold(folder):
      _join(folder, paths, workdir, logs)
  except InUseError:
    say(f"shard {shard.index} of {shard.count} is done; another process joins them")
    return results, False
  return journey(config, workdir), True


def _path(folder: str, shard: Shard) -> str:
  return os.path.join(folder, f"{shard.index}-of-{shard.count}")


def _claim(workdir: str, config: dict[str, Any], count: int) -> None:
  """Notes of what the shards are, or refuses one that does not fit the others."""
  folder = os.path.join(workdir, _FOLDER)
  path = os.path.join(folder, "shards.json")
  if not os.path.exists(path):
    if os.path.exists(os.path.join(workdir, "config.json")):
      raise ValueError(
        f"{workdir} holds a run that was not cut into shards; choose another workdir"
      )
    os.makedirs(folder, exist_ok=True)
    write_json(path, {"config": config, "shards": count})
  # Two may have begun at once: what is there now holds for both.
  known = read_object(path)
  if known["shards"] != count:
    raise ValueError(f"{folder} has {known['shards']} shards, not {count}")
  for name in sorted({*known["config"], *config}):
    before = known["config"].get(name)
    now = config.get(name)
    if before != now:
      raise ValueError(
        f"{folder}: the other shards have {name}={shown(before)}, not {shown(now)}"
      )


def _join(folder: str, paths: Sequence[str], workdir: str, logs: Sequence[str]) -> None:
  """Puts the shards' logs, one after the other, into the workdir; once."""
  joined = os.path.join(folder, _DONE)
  if os.path.exists(joined):  # the journey may have added to them since
    return
  for log in logs:
    parts = [os.path.join(path, log) for path in paths]
    parts = [part for part in parts if os.path.exists(part)]
    if not parts:
      continue
    with atomic_write(os.path.join(workdir, log)) as out:
      for part in parts:
        with open(part, encoding="utf-8") as f:
          shutil.copyfileobj(f, out)
  write_json(joined, {"shards": len(paths)})

"""Proves checkpoints that several processes write straight to a bucket.

Each process writes its own devices' part, so none can hash the whole. The proof is
`manifest.json`, written last: every object's size and store tag. The tag changes with
every write; the store itself keeps an object's bytes from changing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

from coa_jax.runtime.bucket.objects import Bucket, Stored, at_once
from coa_jax.runtime.json_io import parse_object
from coa_jax.runtime.manifest import MANIFEST, TAG

# Orbax's marker of a complete write; a single process on a disk writes none.
_COMMITTED = "commit_success.txt"
_PARTS = ("", "state/", "cursor/")
_log = logging.getLogger(__name__)


def name_of(step: int, epoch: int) -> str:
  """Returns the folder name of a step written under a lease; each run has a new lease.

  So a stopped process's late writes never enter the next run's checkpoint.
  """
  return f"{step}.{epoch:06d}"


def step_of(folder: str) -> int:
  """Returns the step in a folder name, with or without a lease; -1 for other names."""
  match = re.fullmatch(r"(\d+)(\.\d{6,})?", folder)
  return int(match[1]) if match else -1


def whole_in(bucket: Bucket) -> list[str]:
  """Lists the proven steps' folders, in order."""
  found = [n.partition("/")[0] for n in bucket.list() if n.endswith(f"/{MANIFEST}")]
  return sorted((f for f in found if step_of(f) >= 0), key=order)


def prove(bucket: Bucket, folder: str, check: Callable[[], None]) -> None:
  """Writes a complete step's manifest.

  Args:
    check: raises if another run has taken over.
  """
  files = {}
  for name, stored in bucket.list(folder).items():
    files[name.removeprefix(f"{folder}/")] = [stored.size, TAG + stored.tag]
  text = json.dumps(files, indent=1, sort_keys=True)
  # A successor deletes unproven steps: a late proof is worthless.
  check()
  bucket.write(f"{folder}/{MANIFEST}", text.encode())


def forget(bucket: Bucket, folder: str) -> None:
  """Deletes a step, its proof first."""
  bucket.delete(f"{folder}/{MANIFEST}")
  at_once(bucket.delete, bucket.list(folder))


def choose(bucket: Bucket) -> tuple[int, str]:
  """Finds the newest whole step and its folder.

  The step is -1 if there is no checkpoint yet, and -2 if all are damaged. Damaged newer
  steps and all unfinished steps are deleted; the run repeats the newer ones.
  """
  # --- Each begun step's objects, and the folders of unfinished ones: Orbax gives an
  # uncommitted step a longer name on some stores.
  objects: dict[str, dict[str, Stored]] = {}
  uncommitted: set[str] = set()
  for name, stored in bucket.list().items():
    folder, _, file = name.partition("/")
    if step_of(folder) >= 0:
      objects.setdefault(folder, {})[file] = stored
    elif step_of(folder.partition(".orbax-checkpoint-tmp")[0]) >= 0:
      uncommitted.add(folder)

  # --- The newest whole step, and newer steps' faults.
  notes = [f"checkpoint {folder} was not finished" for folder in sorted(uncommitted)]
  bad = [*uncommitted]
  damaged = False
  newest = ""
  for folder in sorted(objects, key=order, reverse=True):
    if MANIFEST not in objects[folder]:
      if not newest:
        notes.append(f"checkpoint {folder} was not finished")
    elif newest:
      continue
    elif fault := _fault(bucket, folder, objects[folder]):
      notes.append(f"checkpoint {folder} is damaged ({fault})")
      damaged = True
    else:
      newest = folder
      continue
    bad.append(folder)
  step = step_of(newest)
  if notes:
    start = f"resuming from {step}" if newest else "no whole checkpoint is left"
    _log.warning("%s: %s; %s", bucket.uri, "; ".join(notes), start)
  if not newest and damaged:
    return -2, ""
  for folder in bad:
    forget(bucket, folder)

  # --- Add commit files to a step pushed from a single process's disk: it has none.
  if newest:
    for part in _PARTS:
      if part + _COMMITTED not in objects[newest]:
        bucket.write(
          f"{newest}/{part}{_COMMITTED}", b"Checkpoint commit was successful"
        )
  return step, newest


def order(folder: str) -> tuple[int, int]:
  """Returns a folder's sort key: step, then lease."""
  step, _, epoch = folder.partition(".")
  return int(step), int(epoch or 0)


def _fault(bucket: Bucket, folder: str, objects: dict[str, Stored]) -> str:
  """Describes a step's difference from its manifest; "" if the step is whole."""
  try:
    files = parse_object(bucket.read(f"{folder}/{MANIFEST}") or b"", MANIFEST)
    if not files:
      return f"{MANIFEST} names no file"
    for name, (size, proof) in files.items():
      stored = objects.get(name)
      if stored is None:
        return f"{name} is missing"
      if stored.size != size:
        return f"{name} has {stored.size} of {size} bytes"
      # A single process proves bytes by their hash, unknown to the store.
      if proof.startswith(TAG) and proof != TAG + stored.tag:
        return f"{name} has other bytes than were written"
  except (ValueError, TypeError, AttributeError) as e:
    return f"{MANIFEST} can not be used: {e}"
  return ""

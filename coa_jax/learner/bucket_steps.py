"""Checkpoints written by several processes straight to a bucket, and their proof.

Each writes its own devices' part, so none has the whole to hash. The proof is
`manifest.json`, written last: every object's size and its tag from the store, which
changes with every write. The store itself keeps an object's bytes from changing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

from coa_jax.runtime.bucket.objects import Bucket, Stored, at_once
from coa_jax.runtime.json_io import parse_object
from coa_jax.runtime.manifest import MANIFEST, TAG

# orbax's markers of a complete write; a single process, on a disk, writes none.
_COMMITTED = "commit_success.txt"
_PARTS = ("", "state/", "cursor/")
_log = logging.getLogger(__name__)


def name_of(step: int, epoch: int) -> str:
  """The folder of a step that processes write under a lease; a run before had another.

  So late writes of a stopped process never enter the next run's checkpoint.
  """
  return f"{step}.{epoch:06d}"


def step_of(folder: str) -> int:
  """Returns the step of such a folder, or of a single process's; -1 for others."""
  match = re.fullmatch(r"(\d+)(\.\d{6,})?", folder)
  return int(match[1]) if match else -1


def whole_in(bucket: Bucket) -> list[str]:
  """Lists the proven steps' folders, in order."""
  found = [n.partition("/")[0] for n in bucket.list() if n.endswith(f"/{MANIFEST}")]
  return sorted((f for f in found if step_of(f) >= 0), key=order)


def prove(bucket: Bucket, folder: str, check: Callable[[], None]) -> None:
  """Writes a complete step's manifest.

  Args:
    bucket: of the checkpoints.
    folder: of the step.
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

  The step is -1 if there is none yet, and -2 if all are damaged. Newer ones, damaged or
  unfinished, are deleted: the run makes these steps again.
  """
  # --- The objects of each begun step.
  objects: dict[str, dict[str, Stored]] = {}
  for name, stored in bucket.list().items():
    folder, _, file = name.partition("/")
    # Orbax gives an uncommitted step a longer name on some stores.
    if match := re.match(r"\d+(\.\d{6,})?", folder):
      objects.setdefault(match[0], {})[file] = stored

  # --- The newest whole one, and the faults of newer ones.
  notes = []
  bad = []
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
    _log.warning("%s: %s; resuming from %d", bucket.uri, "; ".join(notes), step)
  if not newest and damaged:
    return -2, ""
  for folder in bad:
    forget(bucket, folder)

  # --- One written by a single process, and pushed from its disk, is committed, too.
  if newest:
    for part in _PARTS:
      if part + _COMMITTED not in objects[newest]:
        bucket.write(
          f"{newest}/{part}{_COMMITTED}", b"Checkpoint commit was successful"
        )
  return step, newest


def order(folder: str) -> tuple[int, int]:
  """Sorts folders by step, then by lease."""
  step, _, epoch = folder.partition(".")
  return int(step), int(epoch or 0)


def _fault(bucket: Bucket, folder: str, objects: dict[str, Stored]) -> str:
  """Describes a step's differences from its manifest; "" if it is whole."""
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

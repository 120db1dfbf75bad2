"""Checkpoints that several processes write straight to a bucket, and what proves them.

Each writes its own devices' part, so none has the whole to hash. The proof of one is
its `manifest.json`, written last: of every object its size and the tag that the store
gave it, which is another one whenever the object is written. The store itself keeps an
object's bytes from changing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

from coa_jax.runtime.bucket.objects import Bucket, Stored, at_once
from coa_jax.runtime.json_io import parse_object
from coa_jax.runtime.manifest import MANIFEST, TAG

# By these orbax knows that it has written all; a process alone, on a disk, writes none.
_COMMITTED = "commit_success.txt"
_PARTS = ("", "state/", "cursor/")
_log = logging.getLogger(__name__)


def name_of(step: int, epoch: int) -> str:
  """The folder of a step that processes write under a lease; a run before had another.

  So nothing that a stopped process writes late is part of the checkpoint of the run
  that took over.
  """
  return f"{step}.{epoch:06d}"


def step_of(folder: str) -> int:
  """The step of such a folder, or of one that a process alone wrote; -1 for others."""
  match = re.fullmatch(r"(\d+)(\.\d{6,})?", folder)
  return int(match[1]) if match else -1


def whole_in(bucket: Bucket) -> list[str]:
  """Lists the folders of steps that were proven whole, in the order of the steps."""
  found = [n.partition("/")[0] for n in bucket.list() if n.endswith(f"/{MANIFEST}")]
  return sorted((f for f in found if step_of(f) >= 0), key=order)


def prove(bucket: Bucket, folder: str, check: Callable[[], None]) -> None:
  """Writes the manifest of a step whose objects are all there.

  Args:
    bucket: of the checkpoints.
    folder: of the step.
    check: raises where another run has taken over.
  """
  files = {}
  for name, stored in bucket.list(folder).items():
    files[name.removeprefix(f"{folder}/")] = [stored.size, TAG + stored.tag]
  text = json.dumps(files, indent=1, sort_keys=True)
  # Who takes over deletes what is not proven: a proof that is late proves nothing.
  check()
  bucket.write(f"{folder}/{MANIFEST}", text.encode())


def forget(bucket: Bucket, folder: str) -> None:
  """Deletes a step, its proof first."""
  bucket.delete(f"{folder}/{MANIFEST}")
  at_once(bucket.delete, bucket.list(folder))


def choose(bucket: Bucket) -> tuple[int, str]:
  """Finds the newest whole step and its folder.

  The step is -1 where there is none yet, and -2 where all are damaged. Newer ones,
  damaged or unfinished, are deleted: the run makes these steps again.
  """
  # --- The objects of each step that was begun.
  objects: dict[str, dict[str, Stored]] = {}
  for name, stored in bucket.list().items():
    folder, _, file = name.partition("/")
    # Orbax gives a step that it has not committed a longer name on some stores.
    if match := re.match(r"\d+(\.\d{6,})?", folder):
      objects.setdefault(match[0], {})[file] = stored

  # --- The newest whole one, and what is wrong with those that are newer.
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
    _log.warning("%s: %s; going on from %d", bucket.uri, "; ".join(notes), step)
  if not newest and damaged:
    return -2, ""
  for folder in bad:
    forget(bucket, folder)

  # --- One that a process alone wrote, and pushed from its disk, is committed, too.
  if newest:
    for part in _PARTS:
      if part + _COMMITTED not in objects[newest]:
        bucket.write(
          f"{newest}/{part}{_COMMITTED}", b"Checkpoint commit was successful"
        )
  return step, newest


def order(folder: str) -> tuple[int, int]:
  """Sorts folders by their step, and by the lease that they were written under."""
  step, _, epoch = folder.partition(".")
  return int(step), int(epoch or 0)


def _fault(bucket: Bucket, folder: str, objects: dict[str, Stored]) -> str:
  """Says in words what a step lacks of its manifest; "" where it is whole."""
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
      # A process alone proves bytes by their hash, which the store does not know.
      if proof.startswith(TAG) and proof != TAG + stored.tag:
        return f"{name} has other bytes than were written"
  except (ValueError, TypeError, AttributeError) as e:
    return f"{MANIFEST} can not be used: {e}"
  return ""

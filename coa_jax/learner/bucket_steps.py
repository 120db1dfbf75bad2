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

from coa_jax.bucket.objects import Bucket, Stored, at_once
from coa_jax.learner.manifest import MANIFEST, TAG

# By these orbax knows that it has written all; a process alone, on a disk, writes none.
_COMMITTED = "commit_success.txt"
_PARTS = ("", "state/", "cursor/")
_log = logging.getLogger(__name__)


def whole_in(bucket: Bucket) -> list[int]:
  """Lists the steps that were proven whole, in order."""
  found = (re.fullmatch(rf"(\d+)/{MANIFEST}", name) for name in bucket.list())
  return sorted(int(match[1]) for match in found if match)


def prove(bucket: Bucket, step: int) -> None:
  """Writes the manifest of a step whose objects are all there."""
  files = {}
  for name, stored in bucket.list(str(step)).items():
    files[name.removeprefix(f"{step}/")] = [stored.size, TAG + stored.tag]
  text = json.dumps(files, indent=1, sort_keys=True)
  bucket.write(f"{step}/{MANIFEST}", text.encode())


def forget(bucket: Bucket, step: int) -> None:
  """Deletes a step, its proof first."""
  bucket.delete(f"{step}/{MANIFEST}")
  at_once(bucket.delete, bucket.list(str(step)))


def choose(bucket: Bucket) -> int:
  """Finds the newest whole step; -1 where there is none yet, -2 where all are damaged.

  Newer ones, damaged or unfinished, are deleted: the run makes these steps again.
  """
  # --- The objects of each step that was begun.
  objects: dict[int, dict[str, Stored]] = {}
  for name, stored in bucket.list().items():
    step, _, file = name.partition("/")
    # Orbax gives a step that it has not committed a longer name on some stores.
    if match := re.match(r"\d+", step):
      objects.setdefault(int(match[0]), {})[file] = stored

  # --- The newest whole one, and what is wrong with those that are newer.
  notes = []
  bad = []
  damaged = False
  newest = -1
  for step in sorted(objects, reverse=True):
    if MANIFEST not in objects[step]:
      notes.append(f"checkpoint {step} was not finished")
    elif fault := _fault(bucket, step, objects[step]):
      notes.append(f"checkpoint {step} is damaged ({fault})")
      damaged = True
    else:
      newest = step
      break
    bad.append(step)
  if notes:
    _log.warning("%s: %s; going on from %d", bucket.uri, "; ".join(notes), newest)
  if newest < 0 and damaged:
    return -2
  for step in bad:
    forget(bucket, step)

  # --- One that a process alone wrote, and pushed from its disk, is committed, too.
  if newest >= 0:
    for part in _PARTS:
      if part + _COMMITTED not in objects[newest]:
        bucket.write(
          f"{newest}/{part}{_COMMITTED}", b"Checkpoint commit was successful"
        )
  return newest


def _fault(bucket: Bucket, step: int, objects: dict[str, Stored]) -> str:
  """Says in words what a step lacks of its manifest; "" where it is whole."""
  try:
    files = json.loads(bucket.read(f"{step}/{MANIFEST}") or b"")
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

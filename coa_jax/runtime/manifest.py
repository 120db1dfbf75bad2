"""Finds damaged folders by their manifests: the files' hashes at writing time.

A manifest has every file's size and SHA-256, and is written last and atomically.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

from coa_jax.runtime.disk import atomic_path, atomic_write, fsync_file
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.names import path_below

MANIFEST = "manifest.json"
TAG = "tag "  # before an object's tag, instead of a hash (bucket_steps)
_log = logging.getLogger(__name__)


def derive(folder: str, make: Callable[[str], None], source: str) -> None:
  """Makes a folder, or replaces a damaged one; the new folder appears when complete.

  `make` writes the data to its argument, a path; `source` is the data's origin, for the
  message about damage.

  Raises:
    OSError: the folder can not be written.
  """
  # --- An existing folder is kept, unless damaged.
  if os.path.exists(folder):
    fault = fault_of(folder)
    if not fault:
      return
    _log.warning("%s is damaged (%s); made anew from %s", folder, fault, source)
    shutil.rmtree(folder)

  # --- Make the folder.
  with atomic_path(folder) as unfinished:
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    make(unfinished)
    write_manifest(unfinished)


def write_manifest(folder: str) -> None:
  """Fsyncs a folder's files, then writes their sizes and SHA-256 to the manifest."""
  # The manifest is written after this loop, so it does not list itself.
  files = {}
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      fsync_file(path)  # otherwise a power cut could leave the proof without the bytes
      files[os.path.relpath(path, folder)] = _size_and_hash(path)
  with atomic_write(os.path.join(folder, MANIFEST), fsync=True) as f:
    json.dump(files, f, indent=1, sort_keys=True)


def _size_and_hash(path: str) -> list[Any]:
  with open(path, "rb") as f:
    sha256 = hashlib.file_digest(f, "sha256").hexdigest()
  return [os.path.getsize(path), sha256]


def fault_of(folder: str) -> str:
  """Describes a folder's deviation from its manifest; "" if undamaged."""
  try:
    files = read_object(os.path.join(folder, MANIFEST))
    if not files:
      return f"{MANIFEST} names no file"
    for name, (size, sha256) in files.items():
      path = path_below(folder, name, MANIFEST)
      if not os.path.isfile(path):
        return f"{name} is missing"
      actual_size = os.path.getsize(path)
      if actual_size != size:
        return f"{name} has {actual_size} of {size} bytes"
      _, actual_sha256 = _size_and_hash(path)
      if actual_sha256 != sha256 and not sha256.startswith(TAG):
        return f"{name} has other bytes than were written"
  # The manifest itself may be damaged, with any content.
  except (OSError, ValueError, TypeError, AttributeError) as e:
    return f"{MANIFEST} can not be used: {e}"
  return ""

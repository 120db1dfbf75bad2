"""Fetches a config's inputs from buckets to this machine, once.

A stage reads local files, so every address in its config first becomes a local copy's
path (`localized`). The run's records (config.json, the adapters' base) name the address
again (`named`), because the next machine has its copies elsewhere.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
import shutil
import tempfile
from typing import Any

from coa_jax.runtime.bucket.objects import Bucket, BucketError

# Within a value, commas separate files, and a weight may follow a file after "=".
_ADDRESS = re.compile(r"(?:gs|s3)://[^\s,=]+")
_COPIES: dict[str, str] = {}  # local folder or file -> its address


def localized(value: Any, cache: str) -> Any:
  """Fetches every gs:// and s3:// address in a value; returns the copies' paths.

  Args:
    cache: the folder for copies. An existing copy is fetched again only if the objects
      have changed.

  Raises:
    BucketError: an address can not be read, or has no objects.
  """
  if not isinstance(value, str):
    return value
  return _ADDRESS.sub(lambda found: _fetch(found[0], cache), value)


def named(value: Any) -> Any:
  """Replaces local copies' paths by their addresses, at any depth in a JSON value."""
  if isinstance(value, dict):
    return {key: named(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(named(v) for v in value)
  if isinstance(value, str):
    for copy, address in _COPIES.items():
      value = value.replace(copy, address)
  return value


def _fetch(address: str, cache: str) -> str:
  """Returns a local path for an object, a folder, or a glob's matches."""
  # --- A glob is left to its reader: list the folder above the pattern.
  address = address.rstrip("/")
  pattern = ""
  bucket = Bucket(address)
  stored = bucket.list()
  if not stored and glob.has_magic(address):  # else an object's name
    while glob.has_magic(address):
      address, _, last = address.rpartition("/")
      pattern = f"/{last}{pattern}"
    bucket = Bucket(address)
    stored = bucket.list()

  # --- The current objects, which determine the copy's name.
  if pattern:
    matches = fnmatch.translate(pattern[1:])
    stored = {n: s for n, s in stored.items() if re.match(matches, n)}
  if not stored:
    raise BucketError(f"{address}{pattern}: there is nothing")
  state = hashlib.sha256(repr((address, pattern, sorted(stored.items()))).encode())
  folder = os.path.join(os.path.abspath(cache), state.hexdigest()[:16])
  copy = os.path.join(folder, os.path.basename(address))
  _COPIES[copy] = address
  if pattern:
    copy = glob.escape(copy)
    _COPIES[copy] = address

  # --- Fetch into a folder of our own: other processes may do the same now.
  if not os.path.exists(folder):
    os.makedirs(cache, exist_ok=True)
    mine = tempfile.mkdtemp(suffix=".tmp", dir=cache)
    try:
      bucket.get_all(stored, os.path.join(mine, os.path.basename(address)))
      os.rename(mine, folder)
    except OSError:
      if not os.path.exists(folder):  # else another process was quicker
        raise
    finally:
      shutil.rmtree(mine, ignore_errors=True)
  return copy + pattern

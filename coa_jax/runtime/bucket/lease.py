"""Leases a bucket's workdir to one run at a time; a refused run learns the owner.

Each lease is a separate object: `.lease/000001`, then `.lease/000002`. An object is
created only if missing (`ifGenerationMatch=0`, `If-None-Match: *`), so exactly one of
several candidates succeeds, and the highest number is the valid lease. Its owner
rewrites the object every few seconds. A second run watches: if the owner writes, it is
alive, and the second run is refused; if the owner is silent for long enough, the second
run takes the next number. No clocks are compared.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from coa_jax.runtime.bucket.objects import Bucket, BucketError
from coa_jax.runtime.json_io import parse_object, shown
from coa_jax.runtime.lock import InUseError

FOLDER = ".lease"
BEAT_S = 10.0
SILENT_S = 60.0  # after which an owner counts as dead
_MOST_BYTES = 10_000  # per lease
_log = logging.getLogger(__name__)


class Lease:
  """The right to write below an address; use as a context manager."""

  def __init__(
    self, bucket: Bucket, beat_s: float = BEAT_S, silent_s: float = SILENT_S
  ):
    """Takes no lease yet.

    Another owner counts as dead after `silent_s` seconds of silence: several times
    `beat_s`, the interval between signs of life.
    """
    self._bucket = bucket
    self._beat_s = beat_s
    self._silent_s = silent_s
    self.number = 0  # of this lease: the epoch of its writes
    self._beat = 0
    # Unique text, so that we recognise our own write.
    self._value = {
      "owner": f"process {os.getpid()} on {platform.node()}",
      "token": secrets.token_hex(8),
    }
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._live, name="lease", daemon=True)

  def __enter__(self) -> Lease:
    """Takes the lease.

    Raises:
      InUseError: another run is alive there.
      BucketError: the bucket is missing or not writable.
    """
    try:
      self._take()
    except FileNotFoundError as e:
      raise BucketError(f"{self._bucket.uri}: there is no such bucket ({e})") from e
    self._thread.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._ended.set()
    self._thread.join()
    try:
      # Mark as released, do not delete: numbers only grow.
      self._bucket.write(_name(self.number), self._say(released=True))
    except BucketError as e:
      _log.warning("%s; the next run there waits %g s", e, self._silent_s)

  def _take(self) -> None:
    seen = None
    since = 0.0
    while True:
      # --- Read the newest lease.
      stored = self._bucket.list(FOLDER)
      newest = newest_of(stored)
      name = _name(newest)
      held = None
      if newest and stored[name].size > _MOST_BYTES:
        raise self._odd(name, f"it has {stored[name].size:,} bytes")
      if newest:
        held = self._bucket.read(name)
      value = self._parsed(held, name) if held is not None else {"released": True}

      # --- An owner is alive if it writes.
      if not value.get("released"):
        if seen is None:
          _log.warning(
            "%s: held by %s; waiting up to %g s to see whether it is alive",
            self._bucket.uri,
            value["owner"],
            self._silent_s,
          )
        elif held != seen:
          raise InUseError(
            f"{self._bucket.uri}: {value['owner']} works there. Wait until it ends, "
            "stop it, or choose another workdir"
          )
        if held != seen:
          seen = held
          since = time.monotonic()
        if time.monotonic() - since < self._silent_s:
          time.sleep(min(self._beat_s, self._silent_s) / 4)
          continue

      # --- No owner is alive: take the next number, unless another run is quicker.
      if self._bucket.create(_name(newest + 1), self._say()):
        self.number = newest + 1
        for name in self._bucket.list(FOLDER):
          if 0 < newest_of([name]) < self.number:
            self._bucket.delete(name)
        return

  def _live(self) -> None:
    while not self._ended.wait(self._beat_s):
      try:
        if newest_of(self._bucket.list(FOLDER)) != self.number:
          return  # lease lost: the next push tells the run
        self._bucket.write(_name(self.number), self._say())
      except Exception as e:  # whatever the error, the next beat may succeed
        _log.warning("%s", e)

  def _parsed(self, held: bytes, name: str) -> dict[str, Any]:
    """Reads a lease's content, which is untrusted."""
    try:
      value = parse_object(held, "it")
    except ValueError as e:
      raise self._odd(name, str(e)) from None
    owner = value.get("owner")
    if not isinstance(owner, str) or not owner.isprintable() or len(owner) > 300:
      raise self._odd(name, f"its owner is {shown(owner)}")
    return value

  def _odd(self, name: str, why: str) -> BucketError:
    return BucketError(
      f"{self._bucket.uri}/{name}: is not the lease of a run ({why}); delete it, once "
      "no run works there"
    )

  def _say(self, **more: Any) -> bytes:
    self._beat += 1
    return json.dumps({**self._value, "beat": self._beat, **more}).encode()


def check(bucket: Bucket, number: int, names: Iterable[str] | None = None) -> None:
  """Refuses a run's writes unless its lease `number` is the newest.

  `names` are the bucket's objects, if just listed.

  Raises:
    InUseError: there is a newer lease.
    BucketError: the bucket can not be read.
  """
  if names is None:
    names = bucket.list(FOLDER)
  if newest_of(names) != number:
    raise InUseError(
      f"{bucket.uri}: another run took over, since this one was silent for "
      f"{SILENT_S:g} s; it resumes from the last checkpoint there"
    )


def newest_of(names: Iterable[str]) -> int:
  """Returns the highest lease number among object names; 0 without a lease."""
  found = (re.fullmatch(rf"{FOLDER}/([0-9]{{6,15}})", name) for name in names)
  return max((int(m[1]) for m in found if m and _name(int(m[1])) == m[0]), default=0)


def _name(number: int) -> str:
  return f"{FOLDER}/{number:06d}"

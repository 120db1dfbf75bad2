"""One run at a time works on a bucket's workdir: the second is refused by name.

A lease is an object of its own, `.lease/000001`, the next one `.lease/000002`: each is
created where there is none (`ifGenerationMatch=0`, `If-None-Match: *`), so of several
who want it one gets it, and the highest number holds. Its owner writes it anew every
few seconds. Who comes second watches: an owner that writes is alive, and the second is
refused; of one that has been silent for long enough the next number is taken. Nobody's
clock is compared with another's.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import threading
import time
from types import TracebackType
from typing import Any

from coa_jax.bucket.objects import Bucket, BucketError
from coa_jax.lock import InUseError

FOLDER = ".lease"
BEAT_S = 10.0
SILENT_S = 60.0  # after which an owner counts as dead
_log = logging.getLogger(__name__)


class Lease:
  """The right to write below an address; use as a context manager."""

  def __init__(
    self, bucket: Bucket, beat_s: float = BEAT_S, silent_s: float = SILENT_S
  ):
    """Takes nothing yet.

    Args:
      bucket: whose address is held.
      beat_s: seconds from one sign of life to the next.
      silent_s: seconds after which another one's silence is its end; several times
        `beat_s`.
    """
    self._bucket = bucket
    self._beat_s = beat_s
    self._silent_s = silent_s
    self._number = 0
    self._beat = 0
    # Whoever asks gets an answer that nobody else could have written.
    self._value = {
      "owner": f"process {os.getpid()} on {platform.node()}",
      "token": secrets.token_hex(8),
    }
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._live, name="lease", daemon=True)

  def __enter__(self) -> Lease:
    """Takes it.

    Raises:
      InUseError: another run is alive there.
      BucketError: there is no such bucket, or we may not write there.
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
      # Written, not deleted: numbers only grow.
      self._bucket.write(self._name(self._number), self._say(released=True))
    except BucketError as e:
      _log.warning("%s; the next run there waits %g s", e, self._silent_s)

  def check(self) -> None:
    """Raises InUseError where another run has taken over: nothing of ours counts."""
    if self._newest() != self._number:
      raise InUseError(
        f"{self._bucket.uri}: another run took over, since this one was silent for "
        f"{self._silent_s:g} s; it goes on from the last checkpoint there"
      )

  def _take(self) -> None:
    seen = None
    since = 0.0
    while True:
      # --- Who has it?
      newest = self._newest()
      held = self._bucket.read(self._name(newest)) if newest else None
      value = json.loads(held) if held else {"released": True}

      # --- Somebody: alive if it writes.
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

      # --- Nobody, or nobody alive: the next number, unless another one is quicker.
      if self._bucket.create(self._name(newest + 1), self._say()):
        self._number = newest + 1
        for number in self._numbers():
          if number < self._number:
            self._bucket.delete(self._name(number))
        return

  def _live(self) -> None:
    while not self._ended.wait(self._beat_s):
      try:
        if self._newest() != self._number:
          return  # `check` says so to the run
        self._bucket.write(self._name(self._number), self._say())
      except (BucketError, FileNotFoundError) as e:
        _log.warning("%s", e)

  def _newest(self) -> int:
    return max(self._numbers(), default=0)

  def _numbers(self) -> list[int]:
    return [int(name.rpartition("/")[2]) for name in self._bucket.list(FOLDER)]

  def _name(self, number: int) -> str:
    return f"{FOLDER}/{number:06d}"

  def _say(self, **more: Any) -> bytes:
    self._beat += 1
    return json.dumps({**self._value, "beat": self._beat, **more}).encode()

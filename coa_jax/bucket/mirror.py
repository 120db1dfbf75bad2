"""A workdir in a bucket: a local folder, fetched at the start and pushed as it grows.

All code works in the local folder, as in any other. What is in the bucket is true up to
the last checkpoint that was sealed there, and what lies after it is void, as on a disk:

* at the start everything is fetched, whatever the local folder held before;
* when a checkpoint is sealed (`push`), every file that is new or has changed is
  written, the proof of the checkpoint last;
* in between, every minute, so that progress can be seen.

So every file in the bucket is at least as new as the checkpoint there, and a checkpoint
without its proof does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator

from coa_jax.bucket import lease
from coa_jax.bucket.objects import Bucket, BucketError, at_once
from coa_jax.lock import FILE as LOCK_FILE
from coa_jax.lock import InUseError

CHECKPOINTS = "checkpoints"
PROOF = "manifest.json"  # of a checkpoint: learner.manifest
PUSH_EVERY_S = 60.0
_OPEN: list[Mirror] = []
_log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]  # of a file: size, time of its last change, inode


class Mirror:
  """A local folder and the address that it stands for; use as a context manager."""

  def __init__(self, uri: str, scratch: str):
    """Fetches nothing yet.

    Args:
      uri: of the workdir in the bucket.
      scratch: a folder on this machine's disk; the local folder is made in it.

    Raises:
      BucketError: the scheme is unknown, or its library is missing.
    """
    self._bucket = Bucket(uri)
    digest = hashlib.sha256(self._bucket.uri.encode()).hexdigest()[:16]
    # Its name is the run's, in titles and elsewhere.
    name = os.path.basename(self._bucket.uri)
    self.folder = os.path.join(os.path.abspath(scratch), digest, name)
    self._lease = lease.Lease(self._bucket, lease.BEAT_S, lease.SILENT_S)
    self._lock = threading.Lock()
    self._pushed: dict[str, Stamp | None] = {}  # None: there, but not as it is here
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._live, name="mirror", daemon=True)

  def __enter__(self) -> Mirror:
    """Takes the address, and fetches what is there.

    Raises:
      InUseError: another run works there.
      BucketError: it can not be read or written.
    """
    self._lease.__enter__()
    try:
      self._fetch()
    except BaseException:
      self._lease.__exit__(None, None, None)
      raise
    self._thread.start()
    _OPEN.append(self)
    return self

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    _OPEN.remove(self)
    self._ended.set()
    self._thread.join()
    try:
      self.push()
      # All of it is there; the next start would not read it.
      shutil.rmtree(os.path.dirname(self.folder), ignore_errors=True)
    except (BucketError, InUseError) as e:
      if error is None:
        raise
      _log.warning("%s", e)  # what ended the run is raised already
    finally:
      self._lease.__exit__(None, None, None)

  def push(self) -> None:
    """Writes what is new or has changed since the last time, and deletes what is gone.

    Proofs are written after, and deleted before, what they prove.

    Raises:
      InUseError: another run has taken over.
      BucketError: it can not be written.
    """
    with self._lock:
      self._lease.check()
      files = self._files()
      changed = {n: s for n, s in files.items() if self._pushed.get(n) != s}
      proofs = {n for n in changed if _is_proof(n)}
      at_once(self._put, set(changed) - proofs)
      at_once(self._put, proofs)
      gone = [name for name in self._pushed if name not in files]
      for name in sorted(gone, key=_is_proof, reverse=True):
        self._bucket.delete(name)
      self._pushed = dict(files)

  def _put(self, name: str) -> None:
    path = os.path.join(self.folder, name)
    try:
      self._bucket.put(path, name)
    except FileNotFoundError:
      if os.path.exists(path):
        raise
      # It was deleted since it was listed; the next time says so.

  def _fetch(self) -> None:
    """Makes the local folder what the bucket holds."""
    shutil.rmtree(os.path.dirname(self.folder), ignore_errors=True)
    os.makedirs(self.folder)
    stored = {n: s for n, s in self._bucket.list().items() if not _is_lease(n)}
    # What a kill left of a checkpoint is deleted there by the next push.
    proven = {os.path.dirname(name) for name in stored if _is_proof(name)}
    wanted = [n for n in stored if _step(n) is None or _step(n) in proven]

    def get(name: str) -> None:
      path = os.path.join(self.folder, name)
      self._bucket.get(name, path, stored[name].size)

    at_once(get, wanted)
    self._pushed = {**dict.fromkeys(stored), **self._files()}

  def _files(self) -> dict[str, Stamp]:
    """All files that belong there, with what tells of a change."""
    out = {}
    for parent, folders, names in os.walk(self.folder):
      inside = os.path.relpath(parent, self.folder)
      # --- What is being written, and checkpoints that nothing proves.
      folders[:] = [name for name in folders if not name.endswith(".tmp")]
      if inside == CHECKPOINTS:
        folders[:] = [
          name for name in folders if os.path.exists(os.path.join(parent, name, PROOF))
        ]
      for name in names:
        if name == LOCK_FILE or name.endswith(".tmp"):
          continue
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
          stat = os.stat(os.path.join(parent, name))
          key = os.path.normpath(os.path.join(inside, name))
          out[key] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return out

  def _live(self) -> None:
    while not self._ended.wait(PUSH_EVERY_S):
      try:
        self.push()
      except (BucketError, InUseError, OSError) as e:
        # The next checkpoint's push raises it, if it lasts.
        _log.warning("%s", e)


def push(path: str) -> None:
  """Pushes the workdir that a path lies in; nothing where it is no mirror's."""
  for mirror in _OPEN:
    if os.path.abspath(path).startswith(mirror.folder + os.sep):
      mirror.push()


@contextlib.contextmanager
def opened(uri: str, scratch: str) -> Iterator[str]:
  """Yields the local folder of a workdir in a bucket; see `Mirror`."""
  with Mirror(uri, scratch) as mirror:
    yield mirror.folder


def _step(name: str) -> str | None:
  """The folder of the checkpoint that a file belongs to; None for any other file."""
  parts = name.split("/")
  return "/".join(parts[:2]) if parts[0] == CHECKPOINTS and len(parts) > 2 else None


def _is_proof(name: str) -> bool:
  return os.path.basename(name) == PROOF


def _is_lease(name: str) -> bool:
  return name.startswith(lease.FOLDER + "/")

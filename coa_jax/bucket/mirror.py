"""A workdir in a bucket: a local folder, fetched at the start and pushed as it grows.

All code works in the local folder, as in any other. What is in the bucket is true up to
the last checkpoint that was sealed there, and what lies after it is void, as on a disk:

* at the start everything is fetched, whatever the local folder held before;
* when a checkpoint is sealed (`push`), every file that is new or has changed is
  written, the proof of the checkpoint last;
* in between, every minute, so that progress can be seen.

So every file in the bucket is at least as new as the checkpoint there, and a checkpoint
without its proof does not count.

Of several processes each has a local folder, in which it writes what is its own; the
first one holds the lease. Their checkpoints are no part of the mirror: each writes its
share of them straight to the bucket (`learner.bucket_steps`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
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
# What any process may need of the others: with another number of processes than before
# one joins the log, and plays what another one played.
_OF_OTHERS = re.compile(
  r"metrics\.jsonl|config\.json|(process_\d+/)?(verdicts\.jsonl|tool_calls/[^/]+)"
)
_OPEN: list[Mirror] = []
_log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]  # of a file: size, time of its last change, inode


class Mirror:
  """A local folder and the address that it stands for; use as a context manager."""

  def __init__(self, uri: str, scratch: str, process: int = 0, processes: int = 1):
    """Fetches nothing yet.

    Args:
      uri: of the workdir in the bucket.
      scratch: a folder on this machine's disk; the local folder is made in it.
      process: which one of `processes` this is; all but the first write into
        `process_N` of the workdir.
      processes: that work in it together.

    Raises:
      BucketError: the scheme is unknown, or its library is missing.
    """
    self.bucket = Bucket(uri)
    self._process = process
    self._has_checkpoints = processes == 1
    digest = hashlib.sha256(self.bucket.uri.encode()).hexdigest()[:16]
    # Its name is the run's, in titles and elsewhere.
    name = os.path.basename(self.bucket.uri)
    scratch = os.path.abspath(scratch)
    self.folder = os.path.join(scratch, f"{digest}.{process}", name)
    self._lease = None
    if process == 0:
      self._lease = lease.Lease(self.bucket, lease.BEAT_S, lease.SILENT_S)
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
    with contextlib.ExitStack() as stack:
      if self._lease:
        stack.enter_context(self._lease)
      self._fetch()
      self._held = stack.pop_all()
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
      self._held.close()

  def push(self) -> None:
    """Writes what is new or has changed since the last time, and deletes what is gone.

    Proofs are written after, and deleted before, what they prove.

    Raises:
      InUseError: another run has taken over.
      BucketError: it can not be written.
    """
    with self._lock:
      if self._lease:
        self._lease.check()
      files = self._files()
      changed = {n: s for n, s in files.items() if self._pushed.get(n) != s}
      proofs = {n for n in changed if _is_proof(n)}
      at_once(self._put, set(changed) - proofs)
      at_once(self._put, proofs)
      gone = [name for name in self._pushed if name not in files]
      for name in sorted(gone, key=_is_proof, reverse=True):
        self.bucket.delete(name)
      self._pushed = dict(files)

  def _put(self, name: str) -> None:
    path = os.path.join(self.folder, name)
    try:
      self.bucket.put(path, name)
    except FileNotFoundError:
      if os.path.exists(path):
        raise
      # It was deleted since it was listed; the next time says so.

  def _fetch(self) -> None:
    """Makes the local folder what the bucket holds."""
    shutil.rmtree(os.path.dirname(self.folder), ignore_errors=True)
    os.makedirs(self.folder)
    every = self.bucket.list()
    stored = {name: each for name, each in every.items() if self._is_ours(name)}
    # What a kill left of a checkpoint is deleted there by the next push.
    proven = {os.path.dirname(name) for name in stored if _is_proof(name)}
    wanted = [n for n in stored if _step(n) is None or _step(n) in proven]

    def get(name: str) -> None:
      path = os.path.join(self.folder, name)
      self.bucket.get(name, path, every[name].size)

    at_once(get, wanted)
    self._pushed = {**dict.fromkeys(stored), **self._files()}
    others = every.keys() - stored.keys()
    at_once(get, [name for name in others if _OF_OTHERS.fullmatch(name)])

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
          if self._is_ours(key):
            out[key] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return out

  def _is_ours(self, name: str) -> bool:
    """Whether it is this process that fetches and pushes a file."""
    folders = name.split("/")[:-1]
    first = name.split("/")[0]
    # Parts of a workdir that others work in have leases of their own.
    if lease.FOLDER in folders or (first == CHECKPOINTS and not self._has_checkpoints):
      return False
    other = re.fullmatch(r"process_(\d+)", first)
    return (int(other[1]) if other else 0) == self._process

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


def bucket_of(path: str) -> Bucket | None:
  """The address that a local path stands for; None where it is no mirror's."""
  for mirror in _OPEN:
    if os.path.abspath(path).startswith(mirror.folder + os.sep):
      return Bucket(f"{mirror.bucket.uri}/{os.path.relpath(path, mirror.folder)}")
  return None


@contextlib.contextmanager
def opened(
  uri: str, scratch: str, process: int = 0, processes: int = 1
) -> Iterator[str]:
  """Yields the local folder of a workdir in a bucket; see `Mirror`."""
  with Mirror(uri, scratch, process, processes) as mirror:
    yield mirror.folder


def _step(name: str) -> str | None:
  """The folder of the checkpoint that a file belongs to; None for any other file."""
  parts = name.split("/")
  return "/".join(parts[:2]) if parts[0] == CHECKPOINTS and len(parts) > 2 else None


def _is_proof(name: str) -> bool:
  return os.path.basename(name) == PROOF

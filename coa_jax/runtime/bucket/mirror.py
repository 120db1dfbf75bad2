"""Mirrors a bucket's workdir in a local folder: fetches at the start, pushes changes.

All code works in the local folder, as in any other. As on a disk, the bucket's contents
are valid up to the last sealed checkpoint, and later contents are void:

* at the start everything is fetched, replacing the local folder;
* when a checkpoint is sealed, `push` writes every new or changed file, the checkpoint's
proof last;
* in between, files are pushed every minute, so that progress can be seen.

So every file in the bucket is at least as new as the checkpoint there, and a checkpoint
without its proof does not count.

A run stopped for a while may have lost its lease unnoticed. So each push first lists
all objects. The list shows whether the lease is still ours, and every write and delete
in the push applies only to an object unchanged since. The new owner's writes are not
overwritten, and its next push finds and repairs late writes.

If a run has several processes, each has a local folder for its own files, and the first
process holds the lease. Their checkpoints are not mirrored: each process writes its
share straight to the bucket, in a folder named with the lease number
(`learner.bucket_steps`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator

from coa_jax.runtime.bucket import lease
from coa_jax.runtime.bucket.objects import Bucket, BucketError, at_once
from coa_jax.runtime.lock import FILE as LOCK_FILE
from coa_jax.runtime.lock import InUseError, hold
from coa_jax.runtime.manifest import MANIFEST

CHECKPOINTS = "checkpoints"
PUSH_EVERY_S = 60.0
_TRIES = 5  # for a push disturbed by a late write
# Other processes' files, needed by any process: if the number of processes has changed,
# one process joins the log and replays another's part.
_OF_OTHERS = re.compile(
  r"metrics\.jsonl|config\.json|(process_\d+/)?(verdicts\.jsonl|tool_calls/[^/]+)"
)
_OPEN: list[Mirror] = []
_log = logging.getLogger(__name__)

Stamp = tuple[int, int, int]  # a file's size, modification time and inode


class Mirror:
  """A local folder mirroring an address; use as a context manager."""

  def __init__(
    self,
    uri: str,
    scratch: str,
    process: int = 0,
    processes: int = 1,
    epoch: int = 0,
  ):
    """Fetches nothing yet.

    Args:
      uri: the workdir's address in the bucket.
      scratch: a folder on this machine's disk, in which the local folder is made.
      process: this process's number; all but the first write into the workdir's
        `process_N`.
      processes: the number of processes that share the workdir.
      epoch: the first process's lease number, if this is another process.

    Raises:
      BucketError: the scheme is unknown, or its library is missing.
    """
    self.bucket = Bucket(uri)
    self._process = process
    self._has_checkpoints = processes == 1
    digest = hashlib.sha256(self.bucket.uri.encode()).hexdigest()[:16]
    # Each run has its own folder: a stopped run may continue in its own.
    self._place = os.path.join(os.path.abspath(scratch), f"{digest}.{process}")
    self.folder = ""
    self.epoch = epoch
    self._lease = None
    if process == 0:
      self._lease = lease.Lease(self.bucket, lease.BEAT_S, lease.SILENT_S)
    self._lock = threading.Lock()
    self._pushed: dict[str, Stamp | None] = {}  # None: stored, but no file to push
    self._tags: dict[str, str] = {}  # last seen; none after our own write
    self._checked = 0.0  # when the lease was last seen to be ours
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._live, name="mirror", daemon=True)

  def __enter__(self) -> Mirror:
    """Takes the lease, if this is the first process, and fetches the contents.

    Raises:
      InUseError: another run works there.
      BucketError: the bucket can not be read or written.
    """
    with contextlib.ExitStack() as stack:
      if self._lease:
        self.epoch = stack.enter_context(self._lease).number
      stack.enter_context(self._own_folder())
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
      # The bucket has everything; the next start would not read the folder.
      shutil.rmtree(self.folder, ignore_errors=True)
    except (BucketError, InUseError) as e:
      if error is None:
        raise
      if not isinstance(error, InUseError):  # the run's own failure is raised already
        _log.warning("%s", e)
    finally:
      self._held.close()

  def push(self) -> None:
    """Writes files that are new or changed since the last push; deletes missing ones.

    Proofs are written after their files, and deleted before them.

    Raises:
      InUseError: another run has taken over.
      BucketError: the bucket can not be written.
    """
    with self._lock:
      for _ in range(_TRIES):
        try:
          return self._push()
        except FileExistsError as e:
          # Whoever wrote: the next list shows whether the lease is still ours.
          error = e
      raise BucketError(f"{self.bucket.uri}: somebody else writes there") from error

  def check(self) -> None:
    """Raises InUseError if another run has taken over."""
    lease.check(self.bucket, self.epoch)
    self._checked = time.monotonic()

  def bucket_below(self, path: str) -> Bucket:
    """Returns the bucket address for a local path in the folder."""
    return Bucket(f"{self.bucket.uri}/{os.path.relpath(path, self.folder)}")

  def _push(self) -> None:
    # --- List the bucket's objects, and check the lease.
    began = time.monotonic()
    stored = self.bucket.list()
    lease.check(self.bucket, self.epoch, stored)
    self._checked = began

    # --- Find local changes, and objects written by others since.
    files = self._files()
    changed = set()
    for name, stamp in files.items():
      there = stored.get(name)
      is_same = there and there.tag == self._tags.setdefault(name, there.tag)
      if self._pushed.get(name) != stamp or not is_same:
        changed.add(name)

    def put(name: str) -> None:
      self._check_lately()
      path = os.path.join(self.folder, name)
      try:
        self.bucket.put(path, name, stored.get(name))
      except FileNotFoundError:
        if os.path.exists(path):
          raise
        return  # deleted since the listing; the next push sees that
      self._tags.pop(name, None)  # the next list has the new tag
      self._pushed[name] = files[name]

    proofs = {n for n in changed if _is_proof(n)}
    at_once(put, changed - proofs)
    at_once(put, proofs)

    # --- Delete objects for deleted files, and others' checkpoints.
    gone = {n for n in stored if n not in files and self._may_delete(n)}
    for name in sorted(gone, key=_is_proof, reverse=True):
      self._check_lately()
      self.bucket.delete(name, stored[name])
    self._pushed = dict(files)

  def _may_delete(self, name: str) -> bool:
    return name in self._pushed or (self._is_ours(name) and _step(name) is not None)

  def _check_lately(self) -> None:
    """Raises InUseError if another run has taken over; asks only now and then."""
    if time.monotonic() - self._checked > lease.SILENT_S / 2:
      self.check()

  @contextlib.contextmanager
  def _own_folder(self) -> Iterator[None]:
    """Makes the local folder, and deletes folders left by a kill."""
    for left in glob.glob(f"{glob.escape(self._place)}.*"):
      with contextlib.suppress(InUseError), hold(left):
        shutil.rmtree(left)
    place = f"{self._place}.{self.epoch}"
    with hold(place):
      # The folder's name is the run's name, in titles and elsewhere.
      self.folder = os.path.join(place, os.path.basename(self.bucket.uri))
      os.makedirs(self.folder)
      try:
        yield
      except BaseException:  # the fetch failed
        shutil.rmtree(self.folder, ignore_errors=True)
        raise

  def _fetch(self) -> None:
    """Fetches the files that this process needs; deletes void checkpoints."""
    every = self.bucket.list()
    stored = {name: each for name, each in every.items() if self._is_ours(name)}
    # A checkpoint cut short by a kill never counts, whatever a late write adds.
    proven = {_step(name) for name in stored if _is_proof(name)}
    void = [n for n in stored if _step(n) is not None and _step(n) not in proven]
    at_once(lambda name: self.bucket.delete(name, stored[name]), void)
    wanted = {n: each for n, each in stored.items() if n not in void}
    self.bucket.get_all(wanted, self.folder)
    self._pushed = {**dict.fromkeys(wanted), **self._files()}
    self._tags = {name: each.tag for name, each in wanted.items()}
    others = every.keys() - stored.keys()
    needed = {n: every[n] for n in others if _OF_OTHERS.fullmatch(n)}
    self.bucket.get_all(needed, self.folder)

  def _files(self) -> dict[str, Stamp]:
    """Returns the stamps of all local files to be kept in the bucket."""
    out = {}
    for parent, folders, names in os.walk(self.folder):
      inside = os.path.relpath(parent, self.folder)
      # --- Skip files being written, and unproven checkpoints.
      folders[:] = [name for name in folders if not name.endswith(".tmp")]
      if inside == CHECKPOINTS:
        folders[:] = [
          name
          for name in folders
          if os.path.exists(os.path.join(parent, name, MANIFEST))
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
    """Whether this process fetches and pushes a file."""
    folders = name.split("/")[:-1]
    first = name.split("/")[0]
    # Leases are not mirrored; parts done by other processes have their own.
    if lease.FOLDER in folders or (first == CHECKPOINTS and not self._has_checkpoints):
      return False
    other = re.fullmatch(r"process_(\d+)", first)
    return (int(other[1]) if other else 0) == self._process

  def _live(self) -> None:
    while not self._ended.wait(PUSH_EVERY_S):
      try:
        self.push()
      except (BucketError, InUseError, OSError) as e:
        # If the fault lasts, the next checkpoint's push raises it.
        _log.warning("%s", e)
        if isinstance(e, InUseError):
          return


def push(path: str) -> None:
  """Pushes the workdir of a local path; no effect outside a mirror."""
  if mirror := of(path):
    mirror.push()


def of(path: str) -> Mirror | None:
  """Returns a local path's mirror; None outside a mirror."""
  for mirror in _OPEN:
    if os.path.abspath(path).startswith(mirror.folder + os.sep):
      return mirror
  return None


@contextlib.contextmanager
def opened(
  uri: str, scratch: str, process: int = 0, processes: int = 1, epoch: int = 0
) -> Iterator[str]:
  """Yields the local folder for a workdir in a bucket; see `Mirror`."""
  with Mirror(uri, scratch, process, processes, epoch) as mirror:
    yield mirror.folder


def _step(name: str) -> str | None:
  """Returns a file's checkpoint folder; None outside a checkpoint."""
  match = re.match(rf"({CHECKPOINTS}/[^/]+)/", name)
  return match[1] if match else None


def _is_proof(name: str) -> bool:
  return os.path.basename(name) == MANIFEST

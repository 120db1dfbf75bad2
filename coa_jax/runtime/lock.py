"""Locks a workdir for one process at a time; a refused process learns the owner.

This is a POSIX lock (`fcntl.lockf`). The kernel drops the lock when its process dies,
even by SIGKILL or a power cut. An NFS server does so, too, and enforces the lock for
all hosts. Unlike a `flock` lock, this one belongs to its process only: surviving
children do not keep it. But closing any descriptor of the file would drop the lock, so
a process opens the file once: `_HELD` records open files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import platform
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any

from coa_jax.runtime.disk import kind_of_file
from coa_jax.runtime.names import check_workdir

FILE = ".lock"  # in a workdir
_LOCKED = (errno.EACCES, errno.EAGAIN)  # POSIX allows either
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_HELD: dict[str, int] = {}  # lock file -> process: a forked child holds nothing
_GUARD = threading.Lock()
_log = logging.getLogger(__name__)

Stage = Callable[..., dict[str, Any]]


class InUseError(ValueError):
  """Another process uses the workdir; the message has the place, owner and remedy."""


def exclusive(
  folder_of: Callable[[str], str] = lambda workdir: workdir,
) -> Callable[[Stage], Stage]:
  """Decorates `run(config, workdir)` to hold the workdir's lock while running."""

  def decorate(run: Stage) -> Stage:
    @functools.wraps(run)
    def alone(config: Any, workdir: str, *rest: Any, **named: Any) -> dict[str, Any]:
      # Lock before the config is read: two processes may begin at once.
      with hold(folder_of(workdir)):
        return run(config, workdir, *rest, **named)

    return alone

  return decorate


@contextlib.contextmanager
def hold(workdir: str, file: str = FILE) -> Iterator[None]:
  """Locks a workdir, and makes the folder if missing.

  A workdir made here is removed if it stays empty. If the file system has no locks,
  the log names the folder, and other processes are not excluded.

  Args:
    file: the lock file's name: a folder may have several locks, for its parts.

  Raises:
    InUseError: another process, or another stage in this one, works there.
    OSError: the lock file can not be written.
    ValueError: the lock file exists but is not a regular file, or the folder's name is
      not UTF-8.
  """
  # --- Lock. A POSIX lock excludes only other processes; _HELD excludes this one.
  check_workdir(workdir)
  path = os.path.join(os.path.realpath(workdir), file)
  with _GUARD:
    if _HELD.get(path) == os.getpid():
      raise _in_use(path, _this())
    is_new = not os.path.exists(workdir)  # before `_open_locked` makes the folder
    fd = _open_locked(path)
    _HELD[path] = os.getpid()
  try:
    yield
  finally:
    # --- Release the lock; remove a folder that was made here and is still empty.
    with _GUARD:
      mine = _HELD.pop(path) == os.getpid()
      with contextlib.suppress(OSError):  # others may use or remove the folder
        # A child forked meanwhile leaves the folder to its parent.
        if mine and is_new and os.listdir(workdir) == [file]:
          os.remove(path)
          os.rmdir(workdir)
      os.close(fd)


def _open_locked(path: str) -> int:
  """Opens and locks the file, and writes the owner; returns the file descriptor."""
  while True:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = _open(path)
    try:
      _lock(fd, path)
      # Write only to a file with a single name: a hard link may be another's file.
      if os.fstat(fd).st_nlink > 1:
        os.remove(path)
      # The previous holder may have removed the file after we opened it.
      if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(fd)):
        os.ftruncate(fd, 0)
        os.pwrite(fd, _this().encode() + b"\n", 0)
        os.fsync(fd)  # for other hosts
        return fd
    except BaseException:
      os.close(fd)
      raise
    os.close(fd)  # the file is gone: try its replacement


def _open(path: str) -> int:
  """Opens a lock file; refuses links, FIFOs and devices."""
  # O_NONBLOCK: do not wait for a FIFO's other end.
  flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
  try:
    fd = os.open(path, flags, 0o644)
    mode = os.fstat(fd).st_mode
  except OSError as e:
    if e.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
      raise
    fd = -1
    mode = os.lstat(path).st_mode
  if not stat.S_ISREG(mode):
    if fd >= 0:
      os.close(fd)
    raise ValueError(f"{path}: is {kind_of_file(mode)}, not a lock's file; remove it")
  return fd


def _lock(fd: int, path: str) -> None:
  try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as e:
    if e.errno in _LOCKED:
      holder = os.pread(fd, 1000, 0).decode("utf-8", "replace").strip()
      raise _in_use(path, holder or "another process") from None
    if e.errno not in _NO_LOCKS:
      raise
    # Better no lock than no run: some network file systems have none.
    folder = os.path.dirname(path)
    message = "%s: the file system has no locks (%s); let nobody else work there"
    _log.warning(message, folder, e.strerror)


def _this() -> str:
  return f"process {os.getpid()} on {platform.node()}"


def _in_use(path: str, holder: str) -> InUseError:
  return InUseError(
    f"{os.path.dirname(path)}: {holder} works there. Wait until it ends, stop it, or "
    "choose another workdir. The lock ends with its process; if that host is gone for "
    f"good, delete {path}"
  )

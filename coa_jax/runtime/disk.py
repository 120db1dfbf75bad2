"""Writes files whole or not at all, and reports disk errors in one line.

A full or read-only disk, or a refused name, ends the work with a `DiskError`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from typing import IO, Any

_MAKE_ROOM = "make room"
_OTHER_PLACE = "choose another place"
# Errors from disks and file limits -> remedies.
REMEDIES = {
  errno.ENOSPC: _MAKE_ROOM,
  errno.EDQUOT: _MAKE_ROOM,
  errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
  errno.EROFS: _OTHER_PLACE,
  errno.ENAMETOOLONG: "choose a shorter name",
  errno.EMFILE: "raise the limit of open files (ulimit -n)",
  errno.ENFILE: "raise the limit of open files (sysctl fs.file-max)",
  errno.EIO: "look after the disk",
  errno.ESTALE: "mount the disk again",
}

_STATUS = re.compile(r"[A-Z_]+: ")  # the beginning of TensorStore's errors


class DiskError(ValueError):
  """The disk, or a file limit, ended the work; the message has the remedy."""


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[str]:
  """Yields a temporary path for a file or folder, then renames it to `path`.

  A reader sees the whole output or nothing, even if the writer is killed. Missing
  parent folders are made. If the block raises, its output is removed and the previous
  file stays.

  Raises:
    DiskError: `path` exists but is not a regular file; only regular ones are replaced.
  """
  path = os.fspath(path)
  unfinished = path + ".tmp"
  _check_replaceable(path)
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  # Remove a killed writer's file, or a link or FIFO, which `open` would follow.
  if os.path.islink(unfinished) or not os.path.isdir(unfinished):
    with contextlib.suppress(FileNotFoundError):
      os.remove(unfinished)
  try:
    yield unfinished
    os.replace(unfinished, path)  # atomic on POSIX
  except BaseException:
    # Also at Ctrl-C: a partial file may be large.
    if os.path.isdir(unfinished):
      shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):
      os.remove(unfinished)
    raise


def _check_replaceable(path: str) -> None:
  """Raises DiskError unless the path is a regular file or free."""
  try:
    kind = kind_of_file(os.lstat(path).st_mode)
  except FileNotFoundError:
    return
  except ValueError as e:  # the path has a NUL
    raise DiskError(f"{path!r}: is not a file's name ({e})") from None
  if kind != "a regular file":
    raise DiskError(f"{path}: is {kind}; give the name of a new or a regular file")


def kind_of_file(mode: int) -> str:
  """Returns a file's kind in words, for a mode from `os.stat`."""
  for is_kind, name in _KINDS.items():
    if is_kind(mode):
      return name
  return "a special file"


_KINDS = {
  stat.S_ISREG: "a regular file",
  stat.S_ISDIR: "a folder",
  stat.S_ISLNK: "a symbolic link",
  stat.S_ISFIFO: "a FIFO",
  stat.S_ISSOCK: "a socket",
  stat.S_ISCHR: "a device",
  stat.S_ISBLK: "a device",
}


@contextlib.contextmanager
def atomic_write(
  path: str | os.PathLike[str], fsync: bool = False
) -> Iterator[IO[str]]:
  """Yields an open text file (UTF-8); renames it to `path` when complete.

  With `fsync` the bytes reach the disk before the rename, to survive a power cut.
  """
  with atomic_path(path) as unfinished:
    with open(unfinished, "w", encoding="utf-8") as f:
      yield f
    if fsync:
      fsync_file(unfinished)


def fsync_file(path: str) -> None:
  """Waits until all bytes in a file are on the disk."""
  with open(path, "rb") as f:
    os.fsync(f.fileno())


@contextlib.contextmanager
def clear_errors(where: str = "") -> Iterator[None]:
  """Converts a disk error, at any depth inside another error, to a DiskError.

  Libraries wrap disk errors in their own, or only quote the system's words. Any other
  ValueError is unchanged: its message already names the user's file.
  """
  try:
    yield
  except Exception as e:
    # This message is already for the user, whatever the cause.
    if isinstance(e, ValueError) and not _number(e):
      raise
    if message := _refusal(e, where, set()):
      raise DiskError(message) from e
    raise


def report_once() -> None:
  """Stops libraries from also printing the errors they raise.

  When a checkpoint fails, each thread writing a part raises an error. Orbax and asyncio
  log all of them, and TensorStore prints one for every part that ends after the first
  failure, when nobody listens any more.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_no_repetition)
  sys.unraisablehook = _print_unless_late


def _is_no_repetition(record: logging.LogRecord) -> bool:
  if not record.exc_info:
    return True
  by_orbax = f"{os.sep}orbax{os.sep}" in record.pathname
  return not (by_orbax or _refusal(record.exc_info[1], "", set()))


def _print_unless_late(unraisable: Any) -> None:
  error = unraisable.exc_value
  # TensorStore's late parts find asyncio's loop closed.
  if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def _refusal(error: BaseException | None, where: str, seen: set[int]) -> str:
  """Describes the disk error in an error, its causes or members; "" if none."""
  # --- This error itself. Causes may be cyclic: none is read twice.
  if error is None or id(error) in seen:
    return ""
  seen.add(id(error))
  number = _number(error)
  if number:
    file = getattr(error, "filename", None)
    if isinstance(file, str | bytes):
      where = os.fsdecode(file)
    return (
      f"{where or 'the disk'}: {os.strerror(number)}; {REMEDIES[number]}, and the same "
      "command resumes from what was saved before"
    )

  # --- A group's members, its cause, and its context.
  inside = list(getattr(error, "exceptions", ()))
  inside.append(error.__cause__)
  if not error.__suppress_context__:
    inside.append(error.__context__)
  for e in inside:
    refusal = _refusal(e, where, seen)
    if refusal:
      return refusal
  return ""


def _number(error: BaseException) -> int:
  """Returns a disk error's number; 0 for any other error."""
  if isinstance(error, OSError) and error.errno:
    if error.errno in REMEDIES:
      return error.errno
    return 0
  # C++ and Rust libraries quote the system's words. Our own ValueErrors may, too, so
  # a ValueError also needs TensorStore's prefix.
  words = str(error)
  if isinstance(error, ValueError) and not _STATUS.match(words):
    return 0
  for number in REMEDIES:
    if os.strerror(number) in words:
      return number
  return 0

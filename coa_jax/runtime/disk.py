"""Files that are whole or absent, and what a disk refuses, in one line.

A disk that is full or read-only or refuses a name ends the work with a `DiskError`.
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
# What nobody can write into, and what helps.
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

_STATUS = re.compile(r"[A-Z_]+: ")  # how TensorStore's errors begin


class DiskError(ValueError):
  """The disk, or a limit of files, ended the work; the message says how to go on."""


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[str]:
  """Yields a path to write a file or a folder to, which then takes the name `path`.

  So a reader sees all of it or nothing, even where the writer is killed. Folders above
  are made where they are missing. Where the block raises, what it wrote is removed and
  what was there before stays.

  Raises:
    DiskError: something other than a regular file has the name: it is not replaced.
  """
  path = os.fspath(path)
  unfinished = path + ".tmp"
  _check_replaceable(path)
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  # A file that a killed writer left, or a link or a FIFO, which `open` would follow.
  if os.path.islink(unfinished) or not os.path.isdir(unfinished):
    with contextlib.suppress(FileNotFoundError):
      os.remove(unfinished)
  try:
    yield unfinished
    os.replace(unfinished, path)  # at once, on POSIX
  except BaseException:
    # Also at Ctrl-C: what is half written may be large.
    if os.path.isdir(unfinished):
      shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):
      os.remove(unfinished)
    raise


def _check_replaceable(path: str) -> None:
  """Raises DiskError unless the path is a regular file's or nobody's."""
  try:
    kind = kind_of_file(os.lstat(path).st_mode)
  except FileNotFoundError:
    return
  except ValueError as e:  # a NUL in it
    raise DiskError(f"{path!r}: is not a file's name ({e})") from None
  if kind != "a regular file":
    raise DiskError(f"{path}: is {kind}; give the name of a new or a regular file")


def kind_of_file(mode: int) -> str:
  """Says in words what kind of file a mode of `os.stat` tells of."""
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
  """Yields an open text file (UTF-8) that takes the name `path` when it is complete.

  Args:
    path: as for `atomic_path`.
    fsync: wait until its bytes are on the disk, so that a power cut does not cost them.
  """
  with atomic_path(path) as unfinished:
    with open(unfinished, "w", encoding="utf-8") as f:
      yield f
    if fsync:
      fsync_file(unfinished)


def fsync_file(path: str) -> None:
  """Waits until all bytes of a file are on the disk."""
  with open(path, "rb") as f:
    os.fsync(f.fileno())


@contextlib.contextmanager
def clear_errors(where: str = "") -> Iterator[None]:
  """Turns what a disk refused, however deep it lies in an error, into a DiskError.

  Libraries wrap it in errors of their own, or only quote the system's words. A
  ValueError that does not is left as it is: it names a file of the user's already.

  Args:
    where: the work writes, for errors that do not say it.
  """
  try:
    yield
  except Exception as e:
    # Its message is for the user already, whatever it was raised from.
    if isinstance(e, ValueError) and not _number(e):
      raise
    if message := _refusal(e, where, set()):
      raise DiskError(message) from e
    raise


def report_once() -> None:
  """Keeps a program's libraries from printing the errors that they raise as well.

  A checkpoint that can not be written is the error of each thread that wrote a part of
  it: orbax and asyncio log every one, and TensorStore prints one for every part that
  ends after the first failed, when nobody listens any more.
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
  # TensorStore's late parts find the loop of asyncio closed.
  if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def _refusal(error: BaseException | None, where: str, seen: set[int]) -> str:
  """What the disk refused in the error, its causes or its members; "" for nothing."""
  # --- This error itself. Errors may be each other's causes: none is read twice.
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
      "command goes on: what was saved before stands"
    )

  # --- The members of a group, its cause, and what was handled when it was raised.
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
  """The number of what a disk refused; 0 for any other error."""
  if isinstance(error, OSError) and error.errno:
    if error.errno in REMEDIES:
      return error.errno
    return 0
  # Libraries in C++ and Rust quote the system's words; a ValueError of ours may, too.
  words = str(error)
  if isinstance(error, ValueError) and not _STATUS.match(words):
    return 0
  for number in REMEDIES:
    if os.strerror(number) in words:
      return number
  return 0

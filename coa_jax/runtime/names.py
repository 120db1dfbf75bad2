"""The one check of external names before they become paths.

Bucket objects, archive members, and files listed in a manifest or an index have names
from untrusted authors. An accepted name leads to a file below its folder.
"""

from __future__ import annotations

import glob
import os
import unicodedata
from collections.abc import Iterable

from coa_jax.runtime.json_io import shown

_MOST_BYTES = 1024  # per name, as in buckets
_MOST_BYTES_OF_A_PART = 255  # as on disks


def check_name(name: str, where: str) -> None:
  """Refuses a name unless it leads to a file below its folder on every system.

  `name` is a relative path with "/" between the parts; `where` is its place for
  messages.

  Raises:
    ValueError: naming the place, the name and the reason.
  """
  if fault := _fault(name):
    raise ValueError(
      f"{where}: file name {shown(name)} {fault}; accepted: names below the folder, as "
      "a/b.json"
    )


def check_names(names: Iterable[str], where: str) -> None:
  """Refuses names unless all can be files in one folder.

  Raises:
    ValueError: as `check_name`; or two names differ only in their Unicode normal form,
      or one name is both a file and a folder.
  """
  seen: dict[str, str] = {}
  for name in names:
    check_name(name, where)
    other = seen.setdefault(unicodedata.normalize("NFC", name), name)
    if other != name:
      raise ValueError(
        f"{where}: file names {shown(other)} and {shown(name)} differ in their Unicode "
        "form alone"
      )
  for name in seen:
    parent = os.path.dirname(name)
    while parent:
      if parent in seen:
        raise ValueError(f"{where}: {shown(seen[parent])} is a file and a folder")
      parent = os.path.dirname(parent)


def path_below(folder: str, name: str, where: str) -> str:
  """Checks a name and returns its path; refuses symlinks out of the folder.

  Raises:
    ValueError: as `check_name`, or a symlink leads out of the folder.
  """
  check_name(name, where)
  path = os.path.join(folder, name)
  root = os.path.realpath(folder)
  if os.path.commonpath([root, os.path.realpath(path)]) != root:
    raise ValueError(
      f"{where}: file name {shown(name)} leads out of the folder by a symlink"
    )
  return path


def check_workdir(path: str | os.PathLike[str], with_globs: bool = True) -> None:
  """Refuses a folder path that the writing libraries do not support.

  Without `with_globs`, as for checkpoints, glob characters are refused, too.

  Raises:
    ValueError: naming the folder and the reason.
  """
  path = os.fspath(path)
  try:
    path.encode()
  except UnicodeEncodeError:
    raise ValueError(f"{path!a}: the folder's name is not UTF-8; rename it") from None
  if glob.has_magic(path) and not with_globs:
    raise ValueError(
      f"{path}: checkpoints can not be written where a folder's name has *, ? or [; "
      "choose another workdir"
    )


def _fault(name: str) -> str:
  """Returns the reason to refuse a name; "" if it is accepted."""
  if not isinstance(name, str):
    return "is not a text"
  try:
    encoded = name.encode()
  except UnicodeEncodeError:
    return "is not UTF-8"
  if name.startswith("/"):
    return "is an absolute path"
  if "\\" in name:
    return "has a backslash"
  if any(unicodedata.category(c) == "Cc" for c in name):
    return "has a control character"
  if len(encoded) > _MOST_BYTES:
    return f"is longer than {_MOST_BYTES} bytes"
  for part in name.split("/"):
    if part in ("", ".", ".."):
      return f"has the part {part!r}"
    if len(part.encode()) > _MOST_BYTES_OF_A_PART:
      return f"has a part longer than {_MOST_BYTES_OF_A_PART} bytes"
  return ""

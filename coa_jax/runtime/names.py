"""The one check of names from outside before they become paths.

Objects of a bucket, members of archives, files that a manifest or an index names: who
wrote them may be a stranger. A name that passes leads to a file below its folder.
"""

from __future__ import annotations

import glob
import os
import unicodedata
from collections.abc import Iterable

from coa_jax.runtime.json_io import shown

_MOST_BYTES = 1024  # of a name, as in buckets
_MOST_BYTES_OF_A_PART = 255  # as on a disk


def check_name(name: str, where: str) -> None:
  """Refuses a name that does not lead to a file below its folder on any system.

  Args:
    name: relative to its folder, with "/" between its parts.
    where: how messages name its place.

  Raises:
    ValueError: naming the place, the name and the reason.
  """
  if fault := _fault(name):
    raise ValueError(
      f"{where}: file name {shown(name)} {fault}; accepted: names below the folder, as "
      "a/b.json"
    )


def check_names(names: Iterable[str], where: str) -> None:
  """Refuses names that are not all files of one folder.

  Raises:
    ValueError: as `check_name`; or two are the same but for Unicode's normal form, or
      one is a file and a folder.
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
  """Returns the path of a checked name in a folder; no symlink leads out of that.

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
  """Refuses a folder whose path the libraries that write there can not take.

  Args:
    path: of the folder.
    with_globs: whether it may have the characters of a glob; of checkpoints it may not.

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
  """Says in words why a name is refused; "" where it is not."""
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

"""Files are whole or absent; a disk error is one line."""

from __future__ import annotations

import errno
import os
import pathlib
import socket

import pytest

from coa_jax.runtime.disk import (
  REMEDIES,
  DiskError,
  atomic_path,
  atomic_write,
  clear_errors,
)


@pytest.mark.parametrize("number", REMEDIES)
def test_each_is_named_with_its_file_and_what_helps(number):
  with pytest.raises(DiskError) as refusal, clear_errors("w"):
    raise OSError(number, os.strerror(number), "w/data")
  assert str(refusal.value).startswith(
    f"w/data: {os.strerror(number)}; {REMEDIES[number]}"
  )
  with pytest.raises(DiskError, match=r"^w: "), clear_errors("w"):
    raise OSError(number, os.strerror(number))  # as `write` raises it


def test_a_full_disk_is_found_behind_a_librarys_own_error():
  def wrapped() -> None:
    try:
      raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as e:
      raise RuntimeError("a worker ended") from e

  def quoted() -> None:
    raise ValueError("RESOURCE_EXHAUSTED: x: No space left on device [at file.cc:1]")

  def grouped() -> None:
    raise ExceptionGroup("2 tasks", [KeyError("x"), OSError(errno.EDQUOT, "quota")])

  def unnumbered() -> None:  # as safetensors raises it
    raise Exception("I/O error: No space left on device (os error 28)")

  for work in (wrapped, quoted, grouped, unnumbered):
    with pytest.raises(DiskError) as refusal, clear_errors(), clear_errors("w"):
      work()
    assert str(refusal.value).startswith("w: ") and "\n" not in str(refusal.value)


def test_other_errors_stay_what_they_are():
  named = ValueError("data.tasks: x.parquet: File name too long")
  named.__cause__ = OSError(errno.ENAMETOOLONG, "File name too long")
  for error in (named, FileNotFoundError(errno.ENOENT, "no", "f")):
    with pytest.raises(type(error)) as raised, clear_errors("w"):
      raise error
    assert raised.value is error


def test_a_real_refusal(tmp_path):
  reason = "File name too long; choose a shorter name"
  with pytest.raises(DiskError, match=reason), clear_errors():
    (tmp_path / ("x" * 300)).touch()


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_appears_when_it_is_complete(fsync, tmp_path):
  path = tmp_path / "new" / "folder" / "f"
  with atomic_write(path, fsync) as f:
    f.write("first")
    f.flush()
    assert not path.exists()
  assert path.read_text() == "first"
  with pytest.raises(KeyboardInterrupt), atomic_write(path, fsync) as f:
    f.write("half of the sec")
    raise KeyboardInterrupt
  assert path.read_text() == "first"
  assert list(path.parent.iterdir()) == [path]


def test_a_folder_appears_when_it_is_complete(tmp_path):
  path = tmp_path / "folder"
  with pytest.raises(KeyError), atomic_path(path) as unfinished:
    os.makedirs(os.path.join(unfinished, "inner"))
    raise KeyError
  assert not list(tmp_path.iterdir())
  with atomic_path(path) as unfinished:
    os.makedirs(os.path.join(unfinished, "inner"))
  assert list(tmp_path.iterdir()) == [path] and list(path.iterdir())


def odd_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Creates special files; the keys are their names in messages."""
  (folder / "dir").mkdir()
  os.mkfifo(folder / "fifo")
  (folder / "target").write_text("mine")
  (folder / "link").symlink_to(folder / "target")
  (folder / "dangling").symlink_to(folder / "nothing")
  names = {"a folder": "dir", "a FIFO": "fifo", "a symbolic link": "link"}
  found = {kind: folder / name for kind, name in names.items()}
  return {**found, "a device": pathlib.Path("/dev/null")}


@pytest.mark.parametrize(
  "kind", ["a folder", "a FIFO", "a symbolic link", "a device", "a socket"]
)
def test_only_a_regular_file_is_replaced(kind, tmp_path):
  if kind == "a socket":
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as s:
      s.bind(str(path))
  else:
    path = odd_files(tmp_path)[kind]
  before = os.lstat(path)
  with pytest.raises(DiskError, match=f"^{path}: is {kind}; give"), atomic_write(path):
    pass
  after = os.lstat(path)
  assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
  assert kind != "a symbolic link" or (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("name", ["link", "dangling", "fifo", "target"])
def test_a_file_of_the_unfinished_name_is_not_written_to(name, tmp_path):
  odd_files(tmp_path)
  os.rename(tmp_path / name, tmp_path / "x.tmp")
  with atomic_write(tmp_path / "x") as f:
    f.write("new")
  assert (tmp_path / "x").read_text() == "new"
  assert not (tmp_path / "nothing").exists() and not (tmp_path / "x.tmp").exists()
  assert name == "target" or (tmp_path / "target").read_text() == "mine"

"""Files are whole or absent; what a disk refuses is one line."""

from __future__ import annotations

import errno
import os

import pytest

from coa_jax.disk import REMEDIES, DiskError, atomic_path, atomic_write, clear_errors


@pytest.mark.parametrize("number", REMEDIES)
def test_each_is_named_with_its_file_and_what_helps(number):
  with pytest.raises(DiskError) as refusal, clear_errors("w"):
    raise OSError(number, os.strerror(number), "w/data")
  assert str(refusal.value).startswith(
    f"w/data: {os.strerror(number)}; {REMEDIES[number]}"
  )
  with pytest.raises(DiskError, match=r"^w: "), clear_errors("w"):
    raise OSError(number, os.strerror(number))  # as `write` raises it


def test_what_libraries_make_of_it_is_found():
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

"""Derived folders: whole, recreated, or absent."""

from __future__ import annotations

import os
import pathlib

import pytest

from coa_jax.runtime.manifest import derive, fault_of


def test_a_folder_is_made_once_and_anew_where_it_is_damaged(tmp_path, caplog):
  folder, written = tmp_path / "d", []

  def make(path: str) -> None:
    os.makedirs(path)
    pathlib.Path(path, "tokens").write_bytes(b"12345678")
    written.append(path)

  for _ in range(2):
    derive(str(folder), make, "data.jsonl")
    assert len(written) == 1 and not caplog.text
  faults = {
    "has other bytes than were written": lambda f: f.write_bytes(b"12345679"),
    "has 3 of 8 bytes": lambda f: f.write_bytes(b"123"),
    "is missing": lambda f: f.unlink(),
    "manifest.json can not be used": lambda f: (folder / "manifest.json").unlink(),
  }
  for fault, damage in faults.items():
    damage(folder / "tokens")
    caplog.clear()
    derive(str(folder), make, "data.jsonl")
    assert fault in caplog.text and "made anew from data.jsonl" in caplog.text
    assert not fault_of(str(folder))
  assert len(written) == 5


def test_a_fault_leaves_no_folder(tmp_path):
  def broken(path: str) -> None:
    os.makedirs(path)
    raise ValueError("row 2")

  with pytest.raises(ValueError, match="row 2"):
    derive(str(tmp_path / "d"), broken, "data.jsonl")
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("text", "fault"),
  [
    ("{}", "names no file"),
    ("[]", "can not be used"),
    ("5", "can not be used"),
    ('{"x": 1}', "can not be used"),
    ('{"/dev/zero": [0, "x"]}', "is an absolute path"),
    ('{"../x": [1, "x"]}', "has the part '..'"),
    ('{"fifo": [0, "x"]}', "fifo is missing"),
    ('{"link": [0, "x"]}', "leads out of the folder"),
    ("\xff", "can not be used"),
  ],
)
def test_an_odd_manifest_is_damage(text, fault, tmp_path):
  folder = tmp_path / "d"
  folder.mkdir()
  os.mkfifo(folder / "fifo")  # reading it would block forever
  (folder / "link").symlink_to("/dev/zero")
  (folder / "manifest.json").write_bytes(text.encode("latin-1"))
  found = fault_of(str(folder))
  assert fault in found and "\n" not in found

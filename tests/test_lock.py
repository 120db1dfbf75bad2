"""Workdir locks between real processes: named in refusals, freed by a kill."""

from __future__ import annotations

import os
import pathlib
import platform
import signal
import socket
import subprocess
import sys

import pytest

from coa_jax.runtime.lock import InUseError, hold

ROOT = pathlib.Path(__file__).parent.parent
HOLDER = """
import subprocess, sys, time
from coa_jax.runtime.lock import hold
with hold(sys.argv[1]):
  # As a tool's sandbox: it goes on after its parent, with all that it inherited.
  child = subprocess.Popen(["sleep", "600"], close_fds=False)
  print(child.pid, flush=True)
  time.sleep(600)
"""
FORKED = """
import os, sys, time
from coa_jax.runtime.lock import hold
with hold(sys.argv[1]):
  child = os.fork()
  if child:
    print(child, flush=True)
  time.sleep(600)
"""


def start(program: str, workdir: pathlib.Path) -> tuple[subprocess.Popen, int]:
  """Starts a process that locks the workdir; returns it and its child's id."""
  process = subprocess.Popen(
    [sys.executable, "-c", program, str(workdir)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  )
  return process, int(process.stdout.readline())


@pytest.mark.parametrize("program", [HOLDER, FORKED], ids=["started", "forked"])
def test_a_second_run_is_refused_until_the_first_is_killed(program, tmp_path):
  workdir = tmp_path / "w"
  process, child = start(program, workdir)
  try:
    for where in (workdir, tmp_path / "link"):
      if where != workdir:
        where.symlink_to(workdir)
      with pytest.raises(InUseError) as refusal, hold(str(where)):
        pass
      line = str(refusal.value)
      assert line.startswith(f"{workdir}: process {process.pid} on {platform.node()}")
      assert "\n" not in line
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # the child is alive
    with hold(str(workdir)):
      pass
  finally:
    process.kill()
    os.kill(child, signal.SIGKILL)
    process.communicate()


def test_one_process_holds_a_workdir_once_and_others_beside_it(tmp_path):
  whole = tmp_path / "w"
  with hold(str(whole)), hold(str(whole / "sft")), hold(str(tmp_path / "other")):
    for _ in range(2):  # a refusal does not release the lock
      holder = f"process {os.getpid()} on "
      with pytest.raises(InUseError, match=holder), hold(str(whole)):
        pass
    (whole / "results.json").write_text("{}")
  with hold(str(whole)):
    pass
  assert (whole / "results.json").exists()


def test_a_run_that_never_began_leaves_nothing(tmp_path):
  with pytest.raises(ValueError, match="wrong"), hold(str(tmp_path / "w")):
    raise ValueError("wrong")
  assert not list(tmp_path.iterdir())
  (tmp_path / "there").mkdir()
  with hold(str(tmp_path / "there")):
    pass
  assert (tmp_path / "there").exists()


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
  def none(*unused):
    raise OSError(37, "No locks available")

  monkeypatch.setattr("fcntl.lockf", none)
  with hold(str(tmp_path)):
    pass
  assert "has no locks (No locks available)" in caplog.text


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "socket"])
def test_only_a_file_is_a_lock(kind, tmp_path):
  lock = tmp_path / ".lock"
  target = tmp_path / "target"
  target.write_text("mine")
  if kind == "link":
    lock.symlink_to(target)
  elif kind == "dangling":
    lock.symlink_to(tmp_path / "nothing")
  elif kind == "fifo":
    os.mkfifo(lock)
  elif kind == "folder":
    lock.mkdir()
  else:
    with socket.socket(socket.AF_UNIX) as s:
      s.bind(str(lock))
  before = os.lstat(lock)
  with (
    pytest.raises(ValueError, match=rf"^{lock}: is a .*, not a lock's file; remove it"),
    hold(str(tmp_path)),
  ):
    pass
  assert os.lstat(lock) == before
  assert target.read_text() == "mine" and not (tmp_path / "nothing").exists()


def test_a_device_is_no_lock():
  with pytest.raises(ValueError, match="/dev/null: is a device"), hold("/dev", "null"):
    pass


def test_a_lock_with_another_name_is_left_to_that(tmp_path):
  target = tmp_path / "target"
  target.write_text("mine")
  (tmp_path / "w").mkdir()
  os.link(target, tmp_path / "w" / ".lock")
  with hold(str(tmp_path / "w")):
    assert (tmp_path / "w" / ".lock").read_text().startswith("process ")
  assert target.read_text() == "mine"


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path):
  workdir = os.path.join(tmp_path, os.fsdecode(b"w\xff"))
  fault = "w.*: the folder's name is not UTF-8"
  with pytest.raises(ValueError, match=fault) as e, hold(workdir):
    pass
  assert str(e.value).isascii() and not os.path.exists(workdir)

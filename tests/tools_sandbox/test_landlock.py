"""Landlock, the second wall, works alone: without namespaces and seccomp."""

from __future__ import annotations

import pathlib
import socket
import subprocess
import sys

import pytest

from tests.backend import needs_jail
from tools_sandbox.client import Sandbox
from tools_sandbox.jail import keeper, landlock

VERSION = landlock.version()
pytestmark = pytest.mark.skipif(not VERSION, reason="this kernel has no Landlock")

_PROGRAM = """
import os, signal, socket, sys
from tools_sandbox.jail import child, landlock
child.prctl(38, 1)
inside, outside, devices = sys.argv[1:4]
port, version = map(int, sys.argv[4:])
landlock.restrict(version, inside, devices)
def tried(what):
  try:
    what()
    return "done"
  except OSError as e:
    return type(e).__name__
print(tried(lambda: open(f"{inside}/new", "w").write("x")))
print(tried(lambda: os.rename(f"{inside}/new", f"{inside}/newer")))
print(tried(lambda: open(f"{devices}/null", "r+").write("x")))
print(tried(lambda: open(outside).read()))
print(tried(lambda: open(outside, "a")))
print(tried(lambda: open(outside + "2", "w")))
print(tried(lambda: os.unlink(outside)))
print(tried(lambda: open(f"{devices}/made", "w")))
if version >= 4:
  print(tried(lambda: socket.create_connection(("127.0.0.1", port), 5)))
if version >= 6:
  print(tried(lambda: os.kill(os.getppid(), 0)))
print(tried(lambda: os.kill(os.getpid(), 0)))
"""


def _outcomes(tmp_path, version: int) -> list[str]:
  """What each operation of the program ends in, under this version of Landlock."""
  inside, outside = tmp_path / "inside", tmp_path / "outside"
  devices = tmp_path / "devices"  # in the place of /dev
  for folder in (inside, devices):
    folder.mkdir()
  for file in (outside, devices / "null"):
    file.write_text("x")
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    command = [sys.executable, "-c", _PROGRAM, inside, outside, devices, port, version]
    # The jail's modules import each other by bare names, as inside a jail.
    command[2] = (
      f"import sys; sys.path.append({str(pathlib.Path(keeper.__file__).parent)!r})\n"
      + _PROGRAM
    )
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


@pytest.mark.parametrize("version", sorted({0, 1, VERSION}))
def test_only_the_writable_folder_and_devices_are_written_to(tmp_path, version):
  """Version 0 restricts nothing, so only Landlock refuses the others' operations."""
  names = (VERSION >= 4 <= version) + (VERSION >= 6 <= version)
  refused = "PermissionError" if version else "done"
  expected = ["done"] * 4 + [refused] * (4 + names) + ["done"]
  assert _outcomes(tmp_path, version) == expected


@needs_jail
def test_jailed_programs_are_restricted():
  # The mounts leave a program's own /proc files writable; only Landlock refuses them.
  program = "open('/proc/self/comm', 'w').write('x')"
  with Sandbox(slots=1, preload=()) as sandbox:
    assert "PermissionError" in sandbox.run(program).stderr

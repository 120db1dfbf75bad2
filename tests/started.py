"""Starts Python programs that must succeed."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

import virtual_devices

ROOT = pathlib.Path(__file__).parent.parent


def free_address() -> str:
  """A free local address for the first of several JAX processes to listen on."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{s.getsockname()[1]}"


def outputs(*commands: Sequence[str | os.PathLike], **variables: str) -> list[str]:
  """Runs programs in parallel to their ends; returns their standard outputs.

  Args:
    *commands: each program's arguments for the interpreter.
    **variables: added to our environment.
  """
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  env = {**os.environ, "PYTHONPATH": path, **variables}

  def run(command: Sequence[str | os.PathLike]) -> str:
    done = subprocess.run(
      [sys.executable, *command],
      cwd=ROOT,
      env=env,
      capture_output=True,
      text=True,
      timeout=1800,
    )
    # Its own error comes first; last, the report that another program ended.
    said = f"{done.stderr[:3000]}\n...\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{said}"
    return done.stdout

  with concurrent.futures.ThreadPoolExecutor(len(commands)) as threads:
    return list(threads.map(run, commands))


def run_tests_on_devices(file: str, count: int) -> None:
  """Runs a file's tests in a process with virtual devices; the first one skips."""
  # All of the file's tests, slow ones too: the calling test is slow itself.
  options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
  command = ["-m", "pytest", *options, file]
  # Bits are only compared between programs of the same process.
  env = virtual_devices.environment(count, virtual_devices.QUICK)
  (said,) = outputs(command, **env)
  assert "s..." in said

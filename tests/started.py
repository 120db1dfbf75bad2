"""Python programs that tests start and that must end well."""

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
  """A free port of this machine, where the first of several JAX processes listens."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{s.getsockname()[1]}"


def outputs(*commands: Sequence[str | os.PathLike], **variables: str) -> list[str]:
  """Runs programs side by side to their ends; returns what each of them printed.

  Args:
    *commands: the interpreter's arguments, for each program.
    **variables: of their environment, besides ours.
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
    # Its own error comes first; last, that another program ended.
    said = f"{done.stderr[:3000]}\n...\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{said}"
    return done.stdout

  with concurrent.futures.ThreadPoolExecutor(len(commands)) as threads:
    return list(threads.map(run, commands))


def run_tests_on_devices(file: str, count: int) -> None:
  """Runs a file's tests where JAX sees virtual devices; the first of them skips."""
  # All of the file's tests, for the test that calls this is a slow one.
  options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
  command = ["-m", "pytest", *options, file]
  # Bits are compared with those of other programs of the same process.
  env = virtual_devices.environment(count, virtual_devices.QUICK)
  (said,) = outputs(command, **env)
  assert "s..." in said

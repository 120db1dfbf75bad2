"""The first process finds its compiled programs in the cache at the next start."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from programs import free_address

PROGRAM = pathlib.Path(__file__).parent / "compile_in_processes.py"


def start(cache: pathlib.Path) -> list[list[str]]:
  """Returns cache hits of two processes: for a replica's program, then a shared one."""
  address = free_address()
  env = {**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)}
  started = [
    subprocess.Popen(
      [sys.executable, str(PROGRAM), str(cache), address, str(i)],
      env=env,
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  return [process.communicate(timeout=300)[0].split() for process in started]


@pytest.mark.slow
def test_only_the_first_process_finds_its_programs_at_the_next_start(tmp_path):
  """In JAX only process 0 writes the cache; on CPUs each process has its own keys."""
  assert start(tmp_path) == [["0", "0"], ["0", "0"]]
  assert len([f for f in os.listdir(tmp_path) if f.endswith("-cache")]) == 2
  assert start(tmp_path) == [["1", "1"], ["0", "0"]]

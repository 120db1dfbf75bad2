"""Processes of this machine, as /proc shows them, and control groups of slots."""

from __future__ import annotations

import contextlib
import os
import pathlib

from tools_sandbox.jail import cgroup

PROC = pathlib.Path("/proc")


def _fields(pid: int) -> list[str]:
  """State, parent and more of a process; [] where there is none."""
  try:
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
  except OSError:
    return []


def parents() -> dict[int, int]:
  """Process -> its parent."""
  stats = {int(p.name): _fields(p.name) for p in PROC.iterdir() if p.name.isdigit()}
  return {pid: int(fields[1]) for pid, fields in stats.items() if fields}


def descendants(of: int | None = None) -> set[int]:
  """Processes below one; below this one if none is named."""
  everyone = parents()
  below: set[int] = set()
  queue = [os.getpid() if of is None else of]
  while queue:
    parent = queue.pop()
    children = [pid for pid, above in everyone.items() if above == parent]
    below.update(children)
    queue += children
  return below


def ended(pid: int) -> bool:
  """Whether a process is there no more, or is only not waited for."""
  return _fields(pid)[:1] in ([], ["Z"])


def command(pid: int) -> list[str]:
  """A process's command line; [] where there is none."""
  with contextlib.suppress(OSError):
    return (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
  return []


def naming(word: str) -> list[int]:
  """Processes with that word on their command lines."""
  pids = [int(p.name) for p in PROC.iterdir() if p.name.isdigit()]
  return [pid for pid in pids if word in command(pid)]


def descriptors(pid: int) -> int:
  """How many files a process has open; 0 where there is none."""
  with contextlib.suppress(OSError):
    return len(os.listdir(PROC / str(pid) / "fd"))
  return 0


def mounts(pid: int) -> int:
  """How many mounts a process sees; 0 where there is none."""
  with contextlib.suppress(OSError):
    return len((PROC / str(pid) / "mountinfo").read_text().splitlines())
  return 0


# Where groups of slots are made: a folder for each controller, or one for both.
FOLDERS = sorted(set(cgroup._own_folders().values())) if not cgroup.check() else []


def groups(pid: int) -> list[str]:
  """Names of the control groups that a host process has made."""
  mine = f"tools-sandbox-{pid}-"
  return [n for folder in FOLDERS for n in os.listdir(folder) if mine in n]

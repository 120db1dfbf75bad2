"""This machine's processes, read from /proc, and slots' control groups."""

from __future__ import annotations

import contextlib
import os
import pathlib

from tools_sandbox.jail import cgroup

PROC = pathlib.Path("/proc")


def _fields(pid: int) -> list[str]:
  """A process's state, parent and further fields; [] if it does not exist."""
  try:
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
  except OSError:
    return []


def parents() -> dict[int, int]:
  """Process -> its parent."""
  stats = {int(p.name): _fields(p.name) for p in PROC.iterdir() if p.name.isdigit()}
  return {pid: int(fields[1]) for pid, fields in stats.items() if fields}


def descendants(of: int | None = None) -> set[int]:
  """All descendants of a process; of this process by default."""
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
  """Whether a process is gone or a zombie."""
  return _fields(pid)[:1] in ([], ["Z"])


def command(pid: int) -> list[str]:
  """A process's command line; [] if it does not exist."""
  with contextlib.suppress(OSError):
    return (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
  return []


def naming(word: str) -> list[int]:
  """Processes with `word` as an argument on their command lines."""
  pids = [int(p.name) for p in PROC.iterdir() if p.name.isdigit()]
  return [pid for pid in pids if word in command(pid)]


def descriptors(pid: int) -> int:
  """The number of a process's open files; 0 if it does not exist."""
  with contextlib.suppress(OSError):
    return len(os.listdir(PROC / str(pid) / "fd"))
  return 0


def mounts(pid: int) -> int:
  """The number of mounts a process sees; 0 if it does not exist."""
  with contextlib.suppress(OSError):
    return len((PROC / str(pid) / "mountinfo").read_text().splitlines())
  return 0


# Parent folders of slots' groups: one for each controller, or one for both.
FOLDERS = sorted(set(cgroup._own_folders().values())) if not cgroup.check() else []


def groups(pid: int) -> list[str]:
  """Names of the control groups made by a host process."""
  mine = f"tools-sandbox-{pid}-"
  return [n for folder in FOLDERS for n in os.listdir(folder) if mine in n]

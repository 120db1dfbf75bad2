"""A control group of a slot: bounds on memory and tasks that the kernel keeps.

Version 1 only, below the groups that this process is in, where it may make one; else
`create` gives None and the slot's other limits stand alone. Version 2 is left out: it
forbids groups below one that has processes, so a pool would have to move its host.

A group is made once per slot, and the slot joins it before it imports anything: to move
a process later takes milliseconds. So it holds the template too, and its bound is what
that takes plus what a run may add, with room for pages that are copied. It is there for
what comes between two samples of `run`, which keeps the exact limits.

Files: Documentation/admin-guide/cgroup-v1/{memory,pids}.rst of the kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time

_PREFIX = "tools-sandbox-"
_CONTROLLERS = ("memory", "pids")
# Of a slot besides its program: first process, template, two inits, keeper; and forks
# that wait for a request.
_OWN_TASKS = 16
_ROOM = 64 << 20  # of the kernel, for page tables, pipes and inodes
_REMOVE_S = 5.0
_numbers = itertools.count()


def _own_folders() -> dict[str, str]:
  """Controller -> the folder of the group that this process is in; {} without any."""
  groups, mounts = {}, {}
  try:
    with open("/proc/self/cgroup", encoding="ascii") as f:
      for line in f:
        _, names, path = line.rstrip("\n").split(":", 2)
        groups.update(dict.fromkeys(names.split(","), path))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as f:
      for line in f:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        if kind == "cgroup":
          root, place = left.split()[3:5]
          mounts.update(dict.fromkeys(options.split(","), (root, place)))
  except (OSError, ValueError):
    return {}
  out = {}
  for name in _CONTROLLERS:
    root, place = mounts.get(name, ("", ""))
    if name in groups and place:
      inner = os.path.relpath(groups[name], root)
      if not inner.startswith(".."):
        out[name] = os.path.normpath(os.path.join(place, inner))
  return out


def check() -> list[str]:
  """Why slots get no control group here, in words; [] where they do."""
  folders = _own_folders()
  missing = [name for name in _CONTROLLERS if name not in folders]
  if missing:
    return [f"no controller {' or '.join(missing)} of version 1"]
  closed = [f for f in folders.values() if not os.access(f, os.W_OK | os.X_OK)]
  return [f"{f} is not writable" for f in closed]


class Group:
  """The group of one slot. Not thread-safe: one caller at a time."""

  def __init__(self, folders: dict[str, str]):
    """Args: controller -> the group's folder, made already."""
    self._folders = folders
    self._set: tuple[int, int] | None = None
    self._base = self._killed = 0

  @classmethod
  def create(cls) -> Group | None:
    """Makes one; None where that is not allowed. Removes those of hosts that died."""
    own = _own_folders()
    if len(own) < len(_CONTROLLERS):
      return None
    name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    made: dict[str, str] = {}
    try:
      for controller, folder in own.items():
        _sweep(folder)
        made[controller] = os.path.join(folder, name)
        os.mkdir(made[controller])
    except OSError:
      remove(list(made.values()))
      return None
    return cls(made)

  @property
  def folders(self) -> list[str]:
    """Where it is: a process joins by writing 0 to `cgroup.procs` of each."""
    return list(self._folders.values())

  def settle(self) -> None:
    """Takes what it holds now for what the slot needs itself; once it has imported."""
    self._base = self._number("memory", "memory.usage_in_bytes")

  def limit(self, mb: int, tasks: int) -> None:
    """Sets the bounds of the next run.

    Args:
      mb: MiB that it may add, files included.
      tasks: processes and threads that it may have.

    Raises:
      OSError: the kernel refused.
    """
    wanted = 2 * self._base + _ROOM + (mb << 20), tasks + _OWN_TASKS
    if wanted != self._set:
      self._write("memory", "memory.limit_in_bytes", wanted[0])
      self._write("pids", "pids.max", wanted[1])
      self._set = wanted

  def killed(self) -> bool:
    """Whether the kernel has ended a process of it since this was last asked."""
    before = self._killed
    with contextlib.suppress(OSError):
      with open(f"{self._folders['memory']}/memory.oom_control", encoding="ascii") as f:
        match = re.search(r"^oom_kill (\d+)$", f.read(), re.MULTILINE)
      self._killed = int(match[1]) if match else 0
    return self._killed > before

  def remove(self) -> None:
    """Removes it; whatever was in it must have been killed."""
    remove(self.folders)

  def _number(self, controller: str, name: str) -> int:
    with open(f"{self._folders[controller]}/{name}", encoding="ascii") as f:
      return int(f.read())

  def _write(self, controller: str, name: str, value: int) -> None:
    with open(f"{self._folders[controller]}/{name}", "w", encoding="ascii") as f:
      f.write(str(value))


def remove(folders: list[str]) -> None:
  """Removes groups whose processes are on their way out; leaves what does not empty."""
  deadline = time.monotonic() + _REMOVE_S
  for folder in folders:
    while True:
      try:
        os.rmdir(folder)
      except FileNotFoundError:
        pass
      except OSError:  # a process that was killed has not gone yet
        if time.monotonic() < deadline:
          time.sleep(0.005)
          continue
      break


def _sweep(folder: str) -> None:
  """Removes groups that were left by hosts that were killed."""
  for name in os.listdir(folder):
    match = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", name)
    if match and not os.path.exists(f"/proc/{match[1]}"):
      with contextlib.suppress(OSError):  # not empty: a host of another namespace
        os.rmdir(os.path.join(folder, name))

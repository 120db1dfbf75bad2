"""A control group of a slot: bounds on memory and tasks that the kernel keeps.

Of version 1 it is made below the groups that this process is in. Version 2 forbids
groups below one that has processes, but for the root, and to move our host to a group
of its own is not ours to do: there it is made in the nearest group above this process
that hands both controllers down (`cgroup.subtree_control`), as systemd's slices do.
Where we may make none `create` gives None, and the slot's other limits stand alone.

A group is made once per slot, and the slot joins it before it imports anything: to move
a process later takes milliseconds. So it holds the template too, and its bound is what
that takes plus what a run may add, with room for pages that are copied. It is there for
what comes between two samples of `run`, which keeps the exact limits.

Files: Documentation/admin-guide/cgroup-v1/{memory,pids}.rst and cgroup-v2.rst of the
kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time

_PREFIX = "tools-sandbox-"
_CONTROLLERS = ("memory", "pids")
# What is in the files of version 1 and of version 2; `pids.max` is in both.
_USED = ("memory.usage_in_bytes", "memory.current")
_LIMIT = ("memory.limit_in_bytes", "memory.max")
_EVENTS = ("memory.oom_control", "memory.events")
# Of a slot besides its program: first process, template, two inits, keeper; and forks
# that wait for a request.
_OWN_TASKS = 16
_ROOM = 64 << 20  # of the kernel, for page tables, pipes and inodes
_REMOVE_S = 5.0
_numbers = itertools.count()


def _own_folders() -> dict[str, str]:
  """Controller -> the folder of the group that is to hold those of slots.

  Without controllers that are not mounted or, of version 2, not handed down.
  """
  # --- Controller -> our group, and controller -> where its tree is mounted.
  groups = {}
  mounts = {}
  try:
    with open("/proc/self/cgroup", encoding="ascii") as f:
      for line in f:
        _, names, path = line.rstrip("\n").split(":", 2)
        groups.update(dict.fromkeys(names.split(","), path))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as f:
      for line in f:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        # Version 2 has one tree, which has no name.
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        mounts.update(dict.fromkeys(names, tuple(left.split()[3:5])))
  except (OSError, ValueError):
    return {}

  # --- Our group as a folder; not where it lies outside of what is mounted here.
  inner = {}  # name -> mount, and the path of our group below it
  for name in mounts.keys() & groups.keys():
    root, place = mounts[name]
    path = os.path.relpath(groups[name], root)
    if not path.startswith(".."):
      inner[name] = place, path

  # --- A controller of version 1 has a tree of its own; the rest are version 2's.
  first = [name for name in _CONTROLLERS if name in inner]
  out = {name: os.path.normpath(os.path.join(*inner[name])) for name in first}
  second = [name for name in _CONTROLLERS if name not in inner]
  if second and "" in inner:  # a process is in one group of version 2 only
    folder = _handing_down(*inner[""], set(second))
    if folder is not None:
      out |= dict.fromkeys(second, folder)
  return out


def _handing_down(place: str, path: str, controllers: set[str]) -> str | None:
  """The nearest group at or above `path` that hands these down to groups below it.

  None where there is none that this process may move others through.
  """
  while True:
    folder = os.path.normpath(os.path.join(place, path))
    try:
      with open(f"{folder}/cgroup.subtree_control", encoding="ascii") as f:
        handed_down = set(f.read().split())
    except OSError:
      handed_down = set()
    # To move a process takes writing to `cgroup.procs` of the group above both.
    if controllers <= handed_down and os.access(f"{folder}/cgroup.procs", os.W_OK):
      return folder
    if path in ("", "."):
      return None
    path = os.path.dirname(path)


def check() -> list[str]:
  """Says why slots get no control group here; [] where they do."""
  folders = _own_folders()
  missing = [name for name in _CONTROLLERS if name not in folders]
  if missing:
    return [
      f"no controller {' or '.join(missing)}: not mounted, or (version 2) in no "
      "cgroup.subtree_control at or above this process's group that it may write to"
    ]
  closed = [f for f in folders.values() if not os.access(f, os.W_OK | os.X_OK)]
  return [f"{f} is not writable" for f in dict.fromkeys(closed)]


class Group:
  """The group of one slot. Not thread-safe: one caller at a time."""

  def __init__(self, folders: dict[str, str]):
    """Args: controller -> the group's folder, made already."""
    self._folders = folders
    self._second = os.path.exists(f"{folders['memory']}/{_LIMIT[1]}")  # version 2
    self._set: tuple[int, int] | None = None
    self._base = self._killed = 0

  @classmethod
  def create(cls) -> Group | None:
    """Makes one; None where that is not allowed. Removes those of hosts that died."""
    own = _own_folders()
    if len(own) < len(_CONTROLLERS):
      return None
    name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    folders: dict[str, str] = {}
    try:
      for controller, folder in own.items():
        path = os.path.join(folder, name)
        if path not in folders.values():  # of version 2 it is one for both
          _sweep(folder)
          os.mkdir(path)
        folders[controller] = path
    except OSError:
      remove(list(folders.values()))
      return None
    return cls(folders)

  @property
  def folders(self) -> list[str]:
    """Where it is: a process joins by writing 0 to `cgroup.procs` of each."""
    return list(dict.fromkeys(self._folders.values()))

  def settle(self) -> None:
    """Takes what it holds now for what the slot needs itself; once it has imported."""
    with open(self._memory(_USED), encoding="ascii") as f:
      self._base = int(f.read())

  def limit(self, mb: int, tasks: int) -> None:
    """Sets the bounds of the next run.

    Args:
      mb: MiB that it may add, files included.
      tasks: processes and threads that it may have.

    Raises:
      OSError: the kernel refused.
    """
    # Twice what the template holds: a run may copy every page of it.
    bounds = 2 * self._base + _ROOM + (mb << 20), tasks + _OWN_TASKS
    if bounds != self._set:  # two writes fewer for most runs, which are alike
      files = self._memory(_LIMIT), f"{self._folders['pids']}/pids.max"
      for file, value in zip(files, bounds, strict=True):
        with open(file, "w", encoding="ascii") as f:
          f.write(str(value))
      self._set = bounds

  def killed(self) -> bool:
    """Whether the kernel has ended a process of it since this was last asked."""
    # The kernel counts over the group's life; only a new one says anything of this run.
    before = self._killed
    with contextlib.suppress(OSError):
      with open(self._memory(_EVENTS), encoding="ascii") as f:
        match = re.search(r"^oom_kill (\d+)$", f.read(), re.MULTILINE)
      self._killed = int(match[1]) if match else 0
    return self._killed > before

  def remove(self) -> None:
    """Removes it; whatever was in it must have been killed."""
    remove(self.folders)

  def _memory(self, names: tuple[str, str]) -> str:
    return f"{self._folders['memory']}/{names[self._second]}"


def remove(folders: list[str]) -> None:
  """Removes groups whose processes are on their way out; leaves what does not empty."""
  deadline = time.monotonic() + _REMOVE_S
  for folder in folders:
    # Not `rmtree`: a group's files cannot be removed, only the empty folder can.
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

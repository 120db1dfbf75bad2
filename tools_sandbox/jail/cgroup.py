"""A slot's control group: kernel-enforced limits on memory and tasks.

Version 1: the group is made below this process's groups. Version 2 forbids groups below
a group with processes, except the root, and we must not move our host to another group:
the group is made in the nearest ancestor that delegates both controllers
(`cgroup.subtree_control`), like systemd's slices. If no group can be made, `create`
returns None, and the slot has only its other limits.

A group is made once per slot, and the slot joins it before its imports, because moving
a process later takes milliseconds. So the group also holds the template, and its limit
is the template's memory plus a run's limit, with room for copied pages. The group's
limit covers the time between two samples of `run`, which enforces the exact limits.

Source: the kernel's Documentation/admin-guide/cgroup-v1/{memory,pids}.rst and
cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time

_PREFIX = "tools-sandbox-"
_CONTROLLERS = ("memory", "pids")
# File names in version 1 and version 2; `pids.max` is in both.
_USED = ("memory.usage_in_bytes", "memory.current")
_LIMIT = ("memory.limit_in_bytes", "memory.max")
_EVENTS = ("memory.oom_control", "memory.events")
_SWAP = ("memory.swappiness", "memory.swap.max")  # 0 in either: the group never swaps
# A slot's own tasks: first process, template, two inits, keeper; and forks waiting for
# a request.
_OWN_TASKS = 16
_ROOM = 64 << 20  # for the kernel's page tables, pipes and inodes
_REMOVE_S = 5.0
_numbers = itertools.count()


def _own_folders() -> dict[str, str]:
  """Returns controller -> the parent folder for slots' groups.

  Omits controllers that are not mounted or, in version 2, not delegated.
  """
  # --- Controller -> our group, and controller -> its mount.
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
        # Version 2 has one tree, without a name.
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        mounts.update(dict.fromkeys(names, tuple(left.split()[3:5])))
  except (OSError, ValueError):
    return {}

  # --- Our group as a folder; omitted if it is outside the mount.
  inner = {}  # name -> mount, our group's path below the mount
  for name in mounts.keys() & groups.keys():
    root, place = mounts[name]
    path = os.path.relpath(groups[name], root)
    if not path.startswith(".."):
      inner[name] = place, path

  # --- Each version 1 controller has its own tree; the rest are version 2's.
  first = [name for name in _CONTROLLERS if name in inner]
  out = {name: os.path.normpath(os.path.join(*inner[name])) for name in first}
  second = [name for name in _CONTROLLERS if name not in inner]
  if second and "" in inner:  # a process has only one version 2 group
    folder = _handing_down(*inner[""], set(second))
    if folder is not None:
      out |= dict.fromkeys(second, folder)
  return out


def _handing_down(place: str, path: str, controllers: set[str]) -> str | None:
  """Finds the nearest group at or above `path` that delegates these controllers.

  Returns None if there is no such group or this process cannot move others through it.
  """
  while True:
    folder = os.path.normpath(os.path.join(place, path))
    try:
      with open(f"{folder}/cgroup.subtree_control", encoding="ascii") as f:
        handed_down = set(f.read().split())
    except OSError:
      handed_down = set()
    # Moving a process needs write access to the common ancestor's `cgroup.procs`.
    if controllers <= handed_down and os.access(f"{folder}/cgroup.procs", os.W_OK):
      return folder
    if path in ("", "."):
      return None
    path = os.path.dirname(path)


def check() -> list[str]:
  """Lists the reasons why slots get no control group here; [] if they get one."""
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
  """One slot's group. Not thread-safe: one caller at a time."""

  def __init__(self, folders: dict[str, str]):
    """Args: controller -> the group's existing folder."""
    self._folders = folders
    self._second = os.path.exists(f"{folders['memory']}/{_LIMIT[1]}")  # version 2
    self._set: tuple[int, int] | None = None
    self._base = self._killed = 0
    # Otherwise memory beyond the limit would fill the machine's swap space.
    if os.path.exists(self._memory(_SWAP)):  # the kernel may have no swap
      with open(self._memory(_SWAP), "w", encoding="ascii") as f:
        f.write("0")

  @classmethod
  def create(cls) -> Group | None:
    """Makes a group, None if not allowed; removes dead hosts' groups."""
    own = _own_folders()
    if len(own) < len(_CONTROLLERS):
      return None
    name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    folders: dict[str, str] = {}
    try:
      for controller, folder in own.items():
        path = os.path.join(folder, name)
        if path not in folders.values():  # version 2 has one for both
          _sweep(folder)
          os.mkdir(path)
        folders[controller] = path
      return cls(folders)
    except OSError:
      remove(list(folders.values()))
      return None

  @property
  def folders(self) -> list[str]:
    """The group's folders; a process joins by writing 0 to each `cgroup.procs`."""
    return list(dict.fromkeys(self._folders.values()))

  def settle(self) -> None:
    """Records the current memory as the slot's own; called after the imports."""
    with open(self._memory(_USED), encoding="ascii") as f:
      self._base = int(f.read())

  def limit(self, mb: int, tasks: int) -> None:
    """Sets the next run's bounds.

    Args:
      mb: MiB the run may add, files included.
      tasks: the most processes and threads.

    Raises:
      OSError: the kernel refused.
    """
    # Twice the template's memory: a run may copy all its pages.
    bounds = 2 * self._base + _ROOM + (mb << 20), tasks + _OWN_TASKS
    if bounds != self._set:  # saves two writes: most runs have equal bounds
      files = self._memory(_LIMIT), f"{self._folders['pids']}/pids.max"
      for file, value in zip(files, bounds, strict=True):
        with open(file, "w", encoding="ascii") as f:
          f.write(str(value))
      self._set = bounds

  def killed(self) -> bool:
    """Whether the kernel has killed a process in the group since the last call."""
    # The kernel counts over the group's life; only a new kill concerns this run.
    before = self._killed
    with contextlib.suppress(OSError):
      with open(self._memory(_EVENTS), encoding="ascii") as f:
        match = re.search(r"^oom_kill (\d+)$", f.read(), re.MULTILINE)
      self._killed = int(match[1]) if match else 0
    return self._killed > before

  def remove(self) -> None:
    """Removes the group, whose processes must have been killed."""
    remove(self.folders)

  def _memory(self, names: tuple[str, str]) -> str:
    return f"{self._folders['memory']}/{names[self._second]}"


def remove(folders: list[str]) -> None:
  """Removes groups, waiting for their processes to end; leaves nonempty groups."""
  deadline = time.monotonic() + _REMOVE_S
  for folder in folders:
    # Not `rmtree`: a group's files cannot be removed, only the empty folder can.
    while True:
      try:
        os.rmdir(folder)
      except FileNotFoundError:
        pass
      except OSError:  # a killed process still exists
        if time.monotonic() < deadline:
          time.sleep(0.005)
          continue
      break


def _sweep(folder: str) -> None:
  """Removes killed hosts' groups."""
  for name in os.listdir(folder):
    match = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", name)
    if match and not os.path.exists(f"/proc/{match[1]}"):
      with contextlib.suppress(OSError):  # not empty: its host is in another namespace
        os.rmdir(os.path.join(folder, name))

"""The keeper of a jailed slot: builds its root, enters namespaces, starts `inside`.

Started by `slot` as its own program: keeper.py DIRECTORY HOST_PID CANCEL_FD CGROUPS
MODULE... There are three processes: a watcher on the host, the keeper, and the slot
itself, the first process in its namespace; each dies with its parent. The keeper builds
the file system once per slot: a root on tmpfs with the interpreter, the system's
libraries and four devices, all read-only. If the host is root, the slot belongs to an
ordinary user, who cannot write root's files in /proc/sys.

budget: a slot's walls in their building order, with reasons.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from typing import Any, NoReturn

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CODE = "/jail"  # this folder's place in the slot
_NOBODY = 65534
_FIRST_KERNEL = (5, 14)  # since then, process limits count per user namespace
_PROBE_S = 60.0
_DEVICES = ("null", "full", "random", "urandom")
# Files shared by all slots, besides one eventfd: the kernel has one inode for all
# eventfds, timers and signalfds.
_SHARED = (*(f"/dev/{name}" for name in _DEVICES), "/proc/self/ns/time")
_LINKS = {
  # /dev/full reads as zeros too. No process or limit counts the memory in shared
  # mappings of the real /dev/zero.
  "zero": "full",
  "fd": "/proc/self/fd",
  "stdin": "/proc/self/fd/0",
  "stdout": "/proc/self/fd/1",
  "stderr": "/proc/self/fd/2",
  "shm": "/tmp",  # the run's own; multiprocessing's semaphores live there
}
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
_INSTALLED = {"site-packages", "dist-packages"}
_built: list[bool] = []  # not empty after a successful probe
_ENVIRONMENT = ("PYTHONHASHSEED", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
_ROOT_INODES = 4096  # in a slot's root; the default reveals the machine's memory
_PASSWD = "sandbox:x:1000:1000::/tmp:/bin/false\n"


def check() -> list[str]:
  """Lists this machine's missing requirements for the jail; [] if it can be used.

  Builds a jail, as a slot would, and runs a program in it. This takes some tenths of a
  second, once per process if it succeeds.

  Raises:
    OSError: no requirement is missing, but the jail does not work.
  """
  if _built:
    return []

  # --- Requirements that can be read: each line names one thing to change.
  missing = []
  if sys.platform != "linux":
    return [f"Linux is needed, this is {sys.platform}"]
  if platform.machine() != "x86_64":
    missing.append(f"system call tables exist for x86_64, not {platform.machine()}")
  release = tuple(int(n) for n in re.findall(r"\d+", platform.release())[:2])
  if release < _FIRST_KERNEL:
    missing.append(f"kernel 5.14 or later is needed, this is {platform.release()}")
  for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
    if not os.path.exists(f"/proc/self/ns/{name}"):
      missing.append(f"the kernel has no {name} namespaces")
  if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
    missing.append("the kernel has no seccomp filters")
  for name in ("max_user_namespaces", "max_pid_namespaces", "max_net_namespaces"):
    if _number(f"/proc/sys/user/{name}") == 0:
      missing.append(f"/proc/sys/user/{name} is 0")
  if _number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
    missing.append("/proc/sys/kernel/unprivileged_userns_clone is 0")

  # --- The rest must be tried: containers refuse single steps, each in its own way.
  if not missing:
    missing += _probe()
  if not missing:
    _built.append(True)
  return missing


def _number(path: str) -> int | None:
  try:
    with open(path, encoding="ascii") as f:
      return int(f.read())
  except (OSError, ValueError):
    return None


def _probe() -> list[str]:
  """Starts a slot without modules for one run.

  Returns the kernel's refusals; [] if none.

  Raises:
    OSError: the slot failed for another reason.
  """
  with tempfile.TemporaryDirectory(prefix="tools-sandbox-") as directory:
    command = [sys.executable, "-s", "-X", "utf8", os.path.abspath(__file__)]
    try:
      done = subprocess.run(
        [*command, directory, str(os.getpid()), "-1", "", "--probe"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PROBE_S,
        env={"PYTHONHASHSEED": "0"},
        start_new_session=True,
        check=False,
      )
    except (OSError, subprocess.TimeoutExpired) as e:
      raise OSError(f"the jail's probe did not run: {e}") from e
  if done.returncode == 0:
    return []
  text = done.stderr.decode("utf-8", "replace").strip()
  line = text.splitlines()[-1] if text else f"it ended with {done.returncode}"
  if "Refused" in line:  # kernel.Refused
    return [line]
  raise OSError(f"the jail's probe failed: {line}")


def _below(path: str, folder: str) -> bool:
  return path == folder or path.startswith(folder.rstrip("/") + "/")


def _layout() -> tuple[dict[str, str], list[str], str]:
  """Returns host folder -> place inside, sys.path inside, the interpreter inside.

  Folders are renamed, so that programs and error messages name no host folder. From
  sys.path only installed packages are used: an editable install names a whole
  repository.
  """
  # --- The interpreter and this folder.
  base = os.path.realpath(sys.base_prefix)
  mounts = {base: base if _below(base, "/usr") else "/python", _FOLDER: _CODE}

  # --- Installed packages: below the interpreter, or folders of their own (a venv's).
  path = []
  for entry in dict.fromkeys(os.path.realpath(p) for p in sys.path[1:] if p):
    if _below(entry, base):
      path.append(mounts[base] + entry[len(base) :])
    elif os.path.isdir(entry) and not _INSTALLED.isdisjoint(entry.split("/")):
      mounts[entry] = f"/site/{len(mounts)}"
      path.append(mounts[entry])

  # --- The system's libraries; `_build` recreates its links (/lib -> usr/lib).
  python = os.path.realpath(sys.executable)
  if not _below(python, base):
    raise OSError(f"{python} is not below {base}: cannot start it inside")
  for folder in _SYSTEM:
    if os.path.isdir(folder) and not os.path.islink(folder):
      mounts.setdefault(folder, folder)
  return mounts, path, mounts[base] + python[len(base) :]


def _build(root: str, mounts: dict[str, str]) -> None:
  # Imported in functions: the keeper finds `kernel` by path, but the host, which only
  # imports `check`, does not.
  import kernel

  # --- An empty root, only for mount points and links.
  options = f"size=1m,nr_inodes={_ROOT_INODES},mode=755"
  kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, options)
  for name in ("/dev", "/proc", "/tmp", "/etc"):
    os.mkdir(root + name)

  # --- The host's folders, parents before children.
  for source, place in sorted(mounts.items(), key=lambda item: item[1]):
    target = root + place
    if not os.path.isdir(target):  # otherwise it is below a mounted folder
      os.makedirs(target)
    _mount_own(source, target, f"{root}/tmp")
  for link in _SYSTEM:
    if os.path.islink(link) and not os.path.lexists(root + link):
      os.symlink(os.readlink(link), root + link)

  # --- Devices: the host's own, because an ordinary user can make none.
  for name in _DEVICES:
    with open(f"{root}/dev/{name}", "wb"):
      pass
    kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", "", kernel.MS_BIND)
    restrictions = kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_EXEC
    kernel.restrict_mount(f"{root}/dev/{name}", restrictions)
  for name, target in _LINKS.items():
    os.symlink(target, f"{root}/dev/{name}")
  with open(f"{root}/etc/passwd", "w", encoding="ascii") as f:
    f.write(_PASSWD)
  # The kernel lets a user namespace mount /proc only if a full /proc is visible.
  kernel.mount("/proc", f"{root}/proc", "", kernel.MS_BIND | kernel.MS_REC)


def _mount_own(source: str, target: str, empty: str) -> None:
  """Mounts a folder read-only; its files' locks and leases are private to the slot.

  Args:
    source: the shared folder.
    target: its path in this slot.
    empty: a folder without files; the kernel wants two layers.
  """
  import kernel

  # The kernel keeps locks and leases per file system, and each slot has its own
  # overlay: with a bind mount, two slots would see each other's. Also, an overlay's
  # files in /proc name no host folder.
  layers = [os.open(folder, os.O_PATH) for folder in (source, empty)]
  try:
    lower = ":".join(f"/proc/self/fd/{layer}" for layer in layers)
    flags = kernel.MS_READ_ONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("overlay", target, "overlay", flags, f"lowerdir={lower}")
  finally:
    for layer in layers:
      os.close(layer)


def _hold_locks() -> None:
  """Locks the files shared by all slots until this process ends.

  Otherwise one run's lock would be visible in another slot. Under an earlier shared
  lock of all bytes, every exclusive lock fails, every shared one succeeds and F_GETLK
  reports this one, whatever other runs do.

  Raises:
    OSError: an outside program holds an exclusive lock on one of the files.
  """
  whole = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
  held = {"an eventfd": os.eventfd(0)}
  for path in filter(os.path.exists, _SHARED):
    held[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  for path, fd in held.items():
    try:
      fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
      fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole)
    except BlockingIOError as e:
      raise OSError(e.errno, f"another program holds a lock on {path}") from e


def _become_inside(python: str, arguments: list[str]) -> NoReturn:
  """Makes the first process of the slot's namespaces run inside.py."""
  import child
  import kernel

  child.prctl(1, signal.SIGKILL)  # dies with the keeper; see child.die_with_parent
  flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
  kernel.mount("proc", "/proc", "proc", flags)
  kernel.restrict_mount("/", kernel.READ_ONLY, recursive=False)
  kernel.set_host_name("sandbox")
  # The environment keeps only variables for imports; LD_LIBRARY_PATH is needed because
  # the interpreter's own libraries are not on the host linker's path.
  library = os.path.dirname(os.path.dirname(python)) + "/lib"
  environment = {n: os.environ[n] for n in _ENVIRONMENT if n in os.environ}
  environment.update(MALLOC_ARENA_MAX="2", LD_LIBRARY_PATH=library)
  os.execve(
    python,
    [python, "-s", "-X", "utf8", f"{_CODE}/inside.py", *arguments],
    environment,
  )


def _keep(
  directory: str, cancel: str, groups: list[str], modules: list[str]
) -> NoReturn:
  """Builds the slot and waits for its end.

  Raises:
    OSError: the kernel refused a step; the message names it.
  """
  import child
  import kernel

  # --- Tie this process to its parent, and put it under the slot's limits.
  watcher = os.getppid()
  child.die_with_parent(watcher, signal.SIGKILL)
  for group in groups:
    with open(f"{group}/cgroup.procs", "wb") as f:
      f.write(b"0")  # this process, and all its descendants

  # --- Build the root in its own mount namespace; file modes ignore the caller's umask.
  os.umask(0o022)
  mounts, path, python = _layout()
  uid = os.geteuid()
  gid = os.getegid()
  kernel.unshare(kernel.NEWNS if uid == 0 else kernel.NEWNS | kernel.NEWUSER)
  if uid:
    kernel.map_ids(0, uid, gid)
  kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
  _hold_locks()
  # Mounted over the slot's folder: the host, which removes the folder, sees no mount.
  _build(directory, mounts)
  kernel.change_root(directory)

  # --- Become an ordinary user, in new namespaces of every kind.
  inner = _NOBODY if uid == 0 else 0
  if uid == 0:
    os.setgroups([])
    os.setresgid(inner, inner, inner)
    os.setresuid(inner, inner, inner)
    child.set_dumpable(True)  # to write its own maps
  kernel.unshare(kernel.ALL_NAMESPACES)
  kernel.map_ids(0, inner, inner)
  child.die_with_parent(watcher, signal.SIGKILL)  # a change of user cleared the signal

  # --- The slot itself is the first process in its process namespace.
  pid = os.fork()
  if not pid:
    try:
      _become_inside(python, [":".join(path), cancel, *modules])
    except BaseException as e:
      os.write(2, f"{type(e).__name__}: {e}\n".encode("ascii", "replace"))
      os._exit(1)
  _release_pipes()
  os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _release_pipes() -> None:
  # Only the slot may hold its pipes: the host must hear when it closes them.
  for fd in (0, 1):
    os.close(fd)


def main() -> None:
  """Starts and watches the keeper; removes the slot's files if the host is gone."""
  import cgroup
  import child

  # --- The keeper, below this process.
  directory, host, cancel, groups, *modules = sys.argv[1:]
  cgroups = groups.splitlines()
  keeper = os.fork()
  if not keeper:
    try:
      _keep(directory, cancel, cgroups, modules)
    except BaseException as e:
      os.write(2, f"{type(e).__name__}: {e}\n".encode("ascii", "replace"))
      os._exit(1)
  _release_pipes()

  # --- The keeper dies with the host, then this process ends.
  def leave(number: int, frame: Any) -> None:
    # As in `zygote`: also sent if only the thread that started us has ended.
    if os.getppid() != int(host):
      os.kill(keeper, signal.SIGKILL)  # and the slot dies with it

  signal.signal(signal.SIGTERM, leave)
  child.prctl(1, signal.SIGTERM)
  leave(0, None)  # the host may have gone before
  code = os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
  if os.getppid() != int(host):
    shutil.rmtree(directory, ignore_errors=True)  # otherwise the host does
    cgroup.remove(cgroups)
  os._exit(abs(code))


if __name__ == "__main__":
  main()

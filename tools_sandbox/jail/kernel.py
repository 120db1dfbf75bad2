"""Linux system calls missing from Python 3.11, through ctypes.

Nothing but the standard library: processes inside a jail load this file by path.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NEWNS = 0x00020000
NEWCGROUP = 0x02000000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
ALL_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

MS_READ_ONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
# Attributes for `restrict_mount`.
READ_ONLY = 1
NO_SUID = 2
NO_EXEC = 8

_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_SIGCHLD = 17
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_CAPBSET_READ = 23
_MODE_FILTER = 2
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_NR_MOUNT_SETATTR = 442  # the same number on every architecture
_NR = {
  "x86_64": {"clone": 56, "pivot_root": 155},
}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)
# Holds the GIL during a call: a child not forked by Python could never take it.
_libc_locked = ctypes.PyDLL(None, use_errno=True)


class Refused(OSError):
  """The kernel refused a step of the jail's setup."""


def _check(result: int, action: str) -> int:
  if result < 0:
    number = ctypes.get_errno()
    raise Refused(number, f"{action}: {os.strerror(number)}")
  return result


def _nr(name: str) -> int:
  if _NR is None:
    raise OSError(f"no system call numbers for {platform.machine()}")
  return _NR[name]


def unshare(flags: int) -> None:
  """Moves this process (for NEWPID: its children) into new namespaces.

  Raises:
    Refused: the kernel refused; this file's other functions raise it too.
  """
  _check(_libc.unshare(flags), f"unshare({flags:#x})")


def clone(flags: int) -> int:
  """Forks into new namespaces; returns 0 in the child, its process id in the parent.

  For a single-threaded process only. The child must not return to the parent's code.
  """
  result = _libc_locked.syscall(
    ctypes.c_long(_nr("clone")), ctypes.c_ulong(flags | _SIGCHLD), 0, 0, 0, 0
  )
  return _check(result, f"clone({flags:#x})")


def fork() -> int:
  """Forks with the C library, without Python's fork handlers."""
  # Python's handlers restore locks and threads, which a single-threaded process does
  # not need, and seed `random`; on copied huge pages they cost half a millisecond.
  return _check(_libc_locked.fork(), "fork")


def collapse_pages() -> None:
  """Moves this process's memory to huge pages if the kernel supports it.

  A fork then copies fewer page table entries. Needs Linux 6.1, else changes nothing.
  """
  # Read the whole file first: the loop changes the memory listed there.
  with open("/proc/self/maps", encoding="ascii", errors="replace") as f:
    rows = [line.split() for line in f]
  for row in rows:
    first, last = (int(n, 16) for n in row[0].split("-"))
    first = -(-first // _HUGE) * _HUGE
    last = last // _HUGE * _HUGE
    # Private, writable, not file-backed: memory that programs copy.
    if row[1] == "rw-p" and row[4] == "0" and first < last:
      _libc.madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE
      )


def join(process: int, flags: int) -> None:
  """Moves this process (for NEWPID: its children) into another one's namespaces.

  Args:
    process: the other process's pidfd.
    flags: the namespaces to join.
  """
  _check(_libc.setns(process, flags), f"setns({flags:#x})")


def map_ids(inside: int, uid: int, gid: int) -> None:
  """Maps one user and one group in the outer user namespace to `inside`."""
  # In this order: an ordinary user may map a group only once `setgroups` is denied.
  for name, line in (
    ("setgroups", "deny"),
    ("uid_map", f"{inside} {uid} 1"),
    ("gid_map", f"{inside} {gid} 1"),
  ):
    try:
      with open(f"/proc/self/{name}", "wb") as f:  # text may have to load a codec
        f.write(line.encode())
    except OSError as e:
      raise Refused(e.errno, f"write {name}: {e.strerror}") from e


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
  """Calls mount(2)."""
  result = _libc.mount(
    *(text.encode() for text in (source, target, kind)),
    ctypes.c_ulong(flags),
    options.encode(),
  )
  _check(result, f"mount {kind} {source} on {target}")


def restrict_mount(target: str, attributes: int, recursive: bool = True) -> None:
  """Adds attributes (READ_ONLY and so on) to a mount, and to the mounts below it."""
  attr = struct.pack("QQQQ", attributes, 0, 0, 0)
  result = _libc.syscall(
    ctypes.c_long(_NR_MOUNT_SETATTR),
    ctypes.c_int(_AT_FDCWD),
    ctypes.c_char_p(target.encode()),
    ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
    ctypes.c_char_p(attr),
    ctypes.c_size_t(len(attr)),
  )
  _check(result, f"mount_setattr {target}")


def change_root(target: str) -> None:
  """Makes a mount this mount namespace's root and unmounts the old root."""
  # Same path for both: the old root then covers the new one, and the second call
  # unmounts the old one.
  os.chdir(target)
  _check(
    _libc.syscall(ctypes.c_long(_nr("pivot_root")), b".", b"."), f"pivot_root {target}"
  )
  _check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
  os.chdir("/")


def set_host_name(name: str) -> None:
  """Sets the host name of this UTS namespace."""
  _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def capabilities() -> list[int]:
  """Lists the kernel's capabilities."""
  # The kernel refuses unknown numbers; a capability mask has 64 bits.
  every = range(64)
  return [n for n in every if _libc.prctl(_PR_CAPBSET_READ, n, 0, 0, 0) >= 0]


def drop_bounding_set(numbers: list[int]) -> None:
  """Drops capabilities that a later execve could regain."""
  for number in numbers:
    _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), f"drop {number}")


def set_filter(program: bytes) -> None:
  """Installs a seccomp filter (8 bytes per instruction) in this process for good."""
  # The header holds the filter's address: `program` must live until the call.
  address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
  header = struct.pack("HxxxxxxP", len(program) // 8, address)  # struct sock_fprog
  result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header, 0, 0)
  _check(result, "seccomp")

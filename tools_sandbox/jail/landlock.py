"""Landlock: the file, network and signal limits of a jail once more, as a second wall.

Should the walls of mounts and namespaces have a hole, a program still can only read
below the root it was given, write to its own folder and devices, and signal its own
processes. Linux 5.13 has files, 6.7 TCP, 6.12 signals and abstract sockets; what a
kernel lacks is left out, for the first wall does not lean on this one.

Numbers: include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct

# Of system calls, the same on every architecture
_NR_CREATE = 444
_NR_ADD = 445
_NR_RESTRICT = 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_IOCTL_DEV = 1 << 15
# Version -> all that it knows of files.
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 3  # bind and connect
_SCOPES = 3  # abstract sockets and signals
_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes | None) -> int:
  result = _libc.syscall(ctypes.c_long(number), *arguments)
  if result < 0:
    error = ctypes.get_errno()
    raise OSError(error, f"landlock({number}): {os.strerror(error)}")
  return result


def version() -> int:
  """Asks the kernel for its Landlock's version; 0 where it has none, or it is off."""
  try:
    return _call(_NR_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)
  except OSError:
    return 0


def restrict(kernel_version: int, writable: str, devices: str) -> None:
  """Confines this process, which must have `no_new_privs`, and all it will start.

  Args:
    kernel_version: what `version` says; nothing is done where it is 0.
    writable: the folder in which everything is allowed.
    devices: a folder whose files may be written to, but not made.

  Raises:
    OSError: the kernel refused.
  """
  if not kernel_version:
    return
  # --- What this kernel can refuse; of a ruleset all that is named here is refused.
  files = _FILES[max(v for v in _FILES if v <= kernel_version)]
  tcp = _TCP if kernel_version >= 4 else 0
  scopes = _SCOPES if kernel_version >= 6 else 0
  handled = struct.pack("QQQ", files, tcp, scopes)

  # --- But for these folders and what lies below them; of TCP and scopes nothing.
  rules = _call(_NR_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
  try:
    for path, allowed in (
      ("/", _EXECUTE | _READ_FILE | _READ_DIR),
      (devices, _READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV),
      (writable, files),
    ):
      beneath = os.open(path, os.O_PATH | os.O_DIRECTORY)
      try:
        # An old kernel refuses a rule with a right that it has never heard of.
        rule = struct.pack("=Qi", allowed & files, beneath)
        _call(_NR_ADD, rules, _PATH_BENEATH, rule, 0)
      finally:
        os.close(beneath)
    _call(_NR_RESTRICT, rules, 0)
  finally:
    os.close(rules)

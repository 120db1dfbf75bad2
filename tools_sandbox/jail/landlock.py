"""Landlock: enforces a jail's file, network and signal limits as a second wall.

If mounts and namespaces have a hole, a program can still only read below its root,
write to its own folder and devices, and signal its own processes. Linux 5.13 supports
files, 6.7 TCP, 6.12 signals and abstract sockets; limits the kernel does not support
are left out, because the first wall does not depend on the second.

Numbers: include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import os
import struct

# System call numbers, the same on every architecture.
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
# Version -> mask of the version's file rights.
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
  """Returns the kernel's Landlock version; 0 if it is missing or off."""
  try:
    return _call(_NR_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)
  except OSError:
    return 0


def restrict(kernel_version: int, writable: str, devices: str) -> None:
  """Confines this process, which must have `no_new_privs`, and its future children.

  Args:
    kernel_version: the result of `version`; 0 does nothing.
    writable: the folder with full access.
    devices: a folder with write access to existing files only.

  Raises:
    OSError: the kernel refused.
  """
  if not kernel_version:
    return
  # --- The rights this kernel can restrict; a ruleset refuses every right it handles.
  files = _FILES[max(v for v in _FILES if v <= kernel_version)]
  tcp = _TCP if kernel_version >= 4 else 0
  scopes = _SCOPES if kernel_version >= 6 else 0
  handled = struct.pack("QQQ", files, tcp, scopes)

  # --- Exceptions for these folders and everything below them; none for TCP and scopes.
  rules = _call(_NR_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
  try:
    for path, allowed in (
      ("/", _EXECUTE | _READ_FILE | _READ_DIR),
      (devices, _READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV),
      (writable, files),
    ):
      beneath = os.open(path, os.O_PATH | os.O_DIRECTORY)
      try:
        # An old kernel refuses a rule with an unknown right.
        rule = struct.pack("=Qi", allowed & files, beneath)
        _call(_NR_ADD, rules, _PATH_BENEATH, rule, 0)
      finally:
        os.close(beneath)
    _call(_NR_RESTRICT, rules, 0)
  finally:
    os.close(rules)

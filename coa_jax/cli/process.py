"""Sets up a program's process: devices, memory allocator, log."""

from __future__ import annotations

import contextlib
import ctypes
import logging as python_logging
import os
from collections.abc import Iterator

from absl import logging

_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
# Parameters of mallopt and madvise, from glibc's headers.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20  # bytes, on x86 and most others


def check_devices(cpu_devices: int = 1) -> None:
  """Makes JAX find the requested devices; without a request, does nothing.

  Each of several processes must join the others first.

  Raises:
    ValueError: the environment or the flag asks for missing devices.
  """
  asked = [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
  if cpu_devices > 1:
    asked.append(f"--cpu_devices={cpu_devices}")
  if not asked:
    return
  import jax

  try:
    jax.devices()
  except (AssertionError, RuntimeError, ValueError) as e:
    # JAX reports a missing GPU by a bare assertion.
    reason = str(e).partition(" (set JAX_PLATFORMS")[0] or "there is no such device"
    raise ValueError(
      f"{' '.join(asked)}: {reason.rstrip('.')}. Found: {_found()}; accepted: a "
      "platform that is found, or none of these"
    ) from e


def _found() -> str:
  """Returns the platforms found by JAX without any request."""
  import jax
  from jax.extend import backend

  jax.config.update("jax_platforms", "")
  jax.config.update("jax_platform_name", "")
  jax.config.update("jax_num_cpu_devices", -1)
  with _silent():
    backend.clear_backends()
    try:
      return ", ".join(sorted({device.platform for device in jax.devices()}))
    except (AssertionError, RuntimeError):
      return "nothing"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
  """Discards the output of C++ libraries to standard error."""
  kept = os.dup(2)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


def log_plainly() -> None:
  """Makes absl log warnings for the user: without time, thread and line of code."""
  logging.set_verbosity(logging.WARNING)
  handler = logging.get_absl_handler()
  handler.setFormatter(PlainFormatter())
  handler.addFilter(is_for_the_user)
  # Orbax logs while it is imported: that adds a handler, which would repeat each line.
  for other in python_logging.root.handlers[:]:
    if type(other) is python_logging.StreamHandler:
      python_logging.root.removeHandler(other)
  # httpx logs every request, so every tool call, at a visible level.
  python_logging.getLogger("httpx").setLevel(python_logging.WARNING)


def is_for_the_user(record: python_logging.LogRecord) -> bool:
  """Filters out Orbax's warnings: they concern files that we write in another way."""
  of_orbax = f"{os.sep}orbax{os.sep}" in record.pathname
  return not of_orbax or record.levelno >= python_logging.ERROR


class PlainFormatter(python_logging.Formatter):
  """Formats a message like the program's own lines: `warning: ...`."""

  def format(self, record: python_logging.LogRecord) -> str:
    """Returns the line, and the traceback if there is one."""
    return f"{record.levelname.lower()}: {super().format(record)}"


def keep_freed_memory() -> None:
  """Makes glibc keep large temporaries, in huge pages, instead of remapping them.

  Page faults and TLB misses would cost a small model on a CPU more than its arithmetic:
  kept memory reduces a quickstart training step to two thirds of the time, huge pages
  to about nine tenths of that. glibc's mapping threshold cannot exceed 32 MiB, so
  mapping is turned off instead, and one arena keeps the memory for all threads.
  """
  try:
    libc = ctypes.CDLL(None, use_errno=True)
    mallopt = libc.mallopt
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  except (OSError, AttributeError):  # not glibc
    return
  mallopt(_MMAP_MAX, 0)
  mallopt(_ARENA_MAX, 1)
  mallopt(_TRIM_THRESHOLD, -1)
  mallopt(_TOP_PAD, 1 << 28)
  # The heap grows only once, because madvise does not apply to later extensions. Unused
  # memory costs nothing.
  room = min(8 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
  block = libc.malloc(room)
  if not block:
    return
  start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
  libc.madvise(start, room - (start - block), _MADV_HUGEPAGE)
  libc.free(block)

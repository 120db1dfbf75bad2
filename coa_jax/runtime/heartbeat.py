"""Ends a program in which nothing has moved for too long, and shows where it hangs.

A process that hangs holds up all the others of its run, and a scheduler sees nothing of
it. `beat` is called wherever work moves on; who starts no watch pays nothing.
"""

from __future__ import annotations

import faulthandler
import threading
import time

_EVERY_S = 1.0  # more often than this a watch is not wound up again

_lock = threading.Lock()
_seconds = 0.0
_wound = 0.0


def watch(seconds: float) -> None:
  """Begins to watch; 0 ends it.

  Args:
    seconds: the longest time between two beats. After it the stacks of all threads are
      written to standard error and the process ends with status 1, whatever hangs.
  """
  global _seconds, _wound
  with _lock:
    _seconds = seconds
    _wound = 0.0
    if not seconds:
      faulthandler.cancel_dump_traceback_later()
  beat()


def beat() -> None:
  """Says that work moves on; from any thread."""
  global _wound
  if not _seconds:
    return
  with _lock:
    now = time.monotonic()
    if _seconds and now - _wound >= min(_EVERY_S, _seconds / 4):
      # A thread of C's, which no Python that hangs can hold up.
      faulthandler.dump_traceback_later(_seconds, exit=True)
      _wound = now

"""Ends a program after too long without progress, and shows where it hangs.

A hanging process blocks its run's other processes, and no scheduler can see the hang.
The program calls `beat` whenever work progresses; without a watch the call costs
nothing.
"""

from __future__ import annotations

import faulthandler
import threading
import time

_EVERY_S = 1.0  # the timer is not reset more often

_lock = threading.Lock()
_seconds = 0.0
_wound = 0.0


def watch(seconds: float) -> None:
  """Starts a watch; 0 seconds end the watch.

  Args:
    seconds: the longest time between two beats. After a longer silence all threads'
      stacks go to standard error and the process exits with status 1, whatever hangs.
  """
  global _seconds, _wound
  with _lock:
    _seconds = seconds
    _wound = 0.0
    if not seconds:
      faulthandler.cancel_dump_traceback_later()
  beat()


def beat() -> None:
  """Reports progress; may be called from any thread."""
  global _wound
  if not _seconds:
    return
  with _lock:
    now = time.monotonic()
    if _seconds and now - _wound >= min(_EVERY_S, _seconds / 4):
      # A C thread, which hanging Python code can not block.
      faulthandler.dump_traceback_later(_seconds, exit=True)
      _wound = now

"""A session as the host sees it: cells that share one process of a pool's slot.

What its jail does is in `jail.session`; which slot it gets, and until when, in `pool`.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

from tools_sandbox.faults import SessionEnded
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.jail import wire

CELLS_OF_CPU = 10  # whose whole time a session may use, unless it says otherwise


class SessionSlot(Protocol):
  """The slot that a session holds, as the pool lends it."""

  def run(
    self, program: str, stdin: str, cancel: Cancel | None
  ) -> tuple[wire.Result, bool]:
    """Runs a cell; says whether there can be another. Else the slot is free again."""

  def close(self) -> None:
    """Ends the session's process and frees the slot."""


class Session:
  """Cells that share one process: variables live until it ends. Thread-safe.

  It ends with `close`, with a cell that used up its time or memory, was called off, or
  whose process ended (that cell's result says which), and when no cell came for as long
  as its lease says; `alive` is False from then on.

  Attributes:
    lease_s: seconds without a cell that end it.
    expires: `time.monotonic()` seconds of its lease's end; inf while a cell runs.
  """

  def __init__(self, slot: SessionSlot, lease_s: float):
    """Only `SandboxPool.session` makes one."""
    self._slot = slot
    self.lease_s = lease_s
    self.expires = time.monotonic() + lease_s
    self._lock = threading.Lock()
    self._alive = True
    self._why = "the session has ended"

  @property
  def alive(self) -> bool:
    """Whether there can be another cell."""
    return self._alive

  def run(
    self, program: str, stdin: str = "", cancel: Cancel | None = None
  ) -> wire.Result:
    """Runs a cell with the variables that earlier cells have left.

    Args:
      program: Python source.
      stdin: what it reads from `sys.stdin`, hence by `input()`; nothing else of its
        process sees it.
      cancel: calls it off, and the session ends with it.

    Returns:
      The result of this cell. One that raised, or called sys.exit, is `error` or `ok`
      as a run would be, and the session goes on.

    Raises:
      TypeError: program is not a string.
      ValueError: it is longer than wire.MAX_INPUT.
      SessionEnded: a cell before this one has ended it, its lease has, or it is closed.
    """
    # Before the lock: what cannot be run does not wait, and costs no session.
    wire.check_texts(program, stdin)
    with self._lock:
      if not self._alive:
        raise SessionEnded(f"{self._why}; open another one")
      # The lease stands still while a cell runs, and begins anew when it has ended.
      self.expires = math.inf
      try:
        result, self._alive = self._slot.run(program, stdin, cancel)
      except BaseException:  # interrupted
        self._alive = False
        raise
      self.expires = time.monotonic() + self.lease_s
      return result

  def expire(self) -> None:
    """Closes it if its lease is over; the pool's own thread asks."""
    if not self._lock.acquire(blocking=False):
      return  # a cell has just begun
    try:
      # Looked at again: a cell may have come and gone since the pool's thread looked.
      if self._alive and self.expires <= time.monotonic():
        self._why = f"the session was not used for {self.lease_s:g} s and has ended"
        self._alive = False
        self._slot.close()
    finally:
      self._lock.release()

  def close(self) -> None:
    """Ends its process and gives the slot back; waits for a cell that runs."""
    with self._lock:
      if self._alive:
        self._alive = False
        self._slot.close()

  def __enter__(self) -> Session:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

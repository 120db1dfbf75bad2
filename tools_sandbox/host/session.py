"""The caller's side of a session: cells share one process in a slot.

`jail.session` is the other side, in the jail. `pool` assigns slots and leases;
`service.remote` has the slots on services.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

from tools_sandbox.faults import SessionEnded
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.jail import wire

CELLS_OF_CPU = 10  # a session's default CPU limit, in wall limits of a cell


class CellRefused(ValueError):
  """A slot refused this cell: the cell has not run, and the session continues."""


class SessionSlot(Protocol):
  """The interface to a session's slot, in a pool or on a service."""

  def run(
    self, program: str, stdin: str, cancel: Cancel | None
  ) -> tuple[wire.Result, bool]:
    """Runs a cell; returns its result and whether another cell can follow.

    If no cell can follow, the slot is free again.

    Raises:
      CellRefused: the cell has not run. After any other exception no cell can follow.
      SessionEnded: the session has ended.
    """

  def close(self) -> None:
    """Ends the session's process and frees its slot."""


class Session:
  """Runs cells in one process, whose variables live until it ends. Thread-safe.

  The session ends with `close`; with a cell that exceeds its time or memory, is
  cancelled, or ends its process (the cell's result says which); or when its lease
  expires without a cell. `alive` is False from then on.

  Attributes:
    lease_s: idle seconds before the session ends.
    expires: the lease's end in `time.monotonic()` seconds; inf while a cell runs.
  """

  def __init__(self, slot: SessionSlot, lease_s: float):
    """Takes a slot; only the pools' method `session` calls this."""
    self._slot = slot
    self.lease_s = lease_s
    self.expires = time.monotonic() + lease_s
    self._lock = threading.Lock()
    self._alive = True
    self._why = "the session has ended"

  @property
  def alive(self) -> bool:
    """Whether another cell can run."""
    return self._alive

  def run(
    self, program: str, stdin: str = "", cancel: Cancel | None = None
  ) -> wire.Result:
    """Runs a cell with the variables of earlier cells.

    Args:
      program: Python source.
      stdin: the text of `sys.stdin` and `input()`; the process's real stdin stays
        unchanged.
      cancel: cancels the cell and ends the session; a remote service ignores it.

    Returns:
      The cell's result. A cell that raises or calls sys.exit gets the same verdict as a
      run (`error` or `ok`), and the session continues.

    Raises:
      TypeError: program or stdin is not a string.
      ValueError: both together exceed wire.MAX_INPUT, or a service refuses the cell;
        the session continues.
      SessionEnded: an earlier cell, the lease or `close` has ended the session.
    """
    # Before the lock: an invalid program does not wait and does not end the session.
    wire.check_texts(program, stdin)
    with self._lock:
      if not self._alive:
        raise SessionEnded(f"{self._why}; open another one")
      # The lease stops while a cell runs, and restarts after the cell.
      self.expires = math.inf
      try:
        result, self._alive = self._slot.run(program, stdin, cancel)
        return result
      except CellRefused:
        raise
      except BaseException:  # interrupted, or ended by the service
        self._alive = False
        raise
      finally:
        self.expires = time.monotonic() + self.lease_s

  def expire(self) -> None:
    """Closes the session if its lease is over; the pool's lease thread calls this."""
    if not self._lock.acquire(blocking=False):
      return  # a cell has just begun
    try:
      # Check again: a cell may have come and gone since the pool's thread checked.
      if self._alive and self.expires <= time.monotonic():
        self._why = f"the session was not used for {self.lease_s:g} s and has ended"
        self._alive = False
        self._slot.close()
    finally:
      self._lock.release()

  def close(self) -> None:
    """Ends the process and gives the slot back; waits for a running cell."""
    with self._lock:
      if self._alive:
        self._alive = False
        self._slot.close()

  def __enter__(self) -> Session:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

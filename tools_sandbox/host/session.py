"""A session as the host sees it: cells that share one process of a pool's slot.

What its jail does is in `session`; which slot it gets, and until when, in `pool`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tools_sandbox.host import slot
from tools_sandbox.jail import wire

CELLS_OF_CPU = 10  # whose whole time a session may use, unless it says otherwise
LEASE_S = 600.0  # longer than a policy takes from one call to its next


class Owner(Protocol):
  """The pool whose slot a session has."""

  def retire(self, zygote: slot.Zygote | None) -> None:
    """Puts a zygote away for good."""

  def end_session(self, session: Session, zygote: slot.Zygote | None) -> None:
    """Takes the slot back."""


class SessionEnded(RuntimeError):
  """A cell was given to a session that has ended."""


class Session:
  """Cells that share one process: variables live until it ends. Thread-safe.

  It ends with `close`, with a cell that used up its time or memory, was called off, or
  whose process ended (that cell's result says which), and when no cell came for as long
  as its lease says; `alive` is False from then on.

  Attributes:
    lease_s: seconds without a cell that end it.
    expires: `time.monotonic()` seconds of its lease's end; inf while a cell runs.
    ended: as given to `SandboxPool.session`.
  """

  def __init__(
    self,
    pool: Owner,
    zygote: slot.Zygote,
    wall_s: float,
    lease_s: float,
    ended: Callable[[], None] | None,
  ):
    """Only `SandboxPool.session` makes one."""
    self._pool, self._zygote, self._wall_s = pool, zygote, wall_s
    self.lease_s, self.ended = lease_s, ended
    self.expires = time.monotonic() + lease_s
    self._lock = threading.Lock()
    self._alive = True
    self._why = "the session has ended"

  @property
  def alive(self) -> bool:
    """Whether there can be another cell."""
    return self._alive

  def run(
    self, program: str, stdin: str = "", cancel: slot.Cancel | None = None
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
    check_texts(program, stdin)
    with self._lock:
      if not self._alive:
        raise SessionEnded(f"{self._why}; open another one")
      zygote, self.expires = self._zygote, math.inf
      try:
        result, self._alive = zygote.cell(program, stdin, self._wall_s, cancel)
      except (slot.ZygoteDied, OSError) as e:
        self._alive = False
        zygote = self._pool.retire(zygote)
        result = died(e) if isinstance(e, slot.ZygoteDied) else failure(str(e))
      except BaseException:  # interrupted: its answer would be taken for the next one's
        self._alive = False
        self._pool.end_session(self, self._pool.retire(zygote))
        raise
      if not self._alive:
        self._pool.end_session(self, zygote)
      self.expires = time.monotonic() + self.lease_s
      return result

  def expire(self) -> None:
    """Closes it if its lease is over; the pool's own thread asks."""
    if not self._lock.acquire(blocking=False):
      return  # a cell has just begun
    try:
      if self._alive and self.expires <= time.monotonic():
        self._why = f"the session was not used for {self.lease_s:g} s and has ended"
        self._close()
    finally:
      self._lock.release()

  def close(self) -> None:
    """Ends its process and gives the slot back; waits for a cell that runs."""
    with self._lock:
      if self._alive:
        self._close()

  def _close(self) -> None:
    self._alive = False
    zygote: slot.Zygote | None = self._zygote
    try:
      zygote.end_session()
    except BaseException as e:
      zygote = self._pool.retire(zygote)
      if not isinstance(e, (slot.ZygoteDied, OSError)):
        raise
    finally:
      self._pool.end_session(self, zygote)

  def __enter__(self) -> Session:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def check_texts(program: str, stdin: str) -> None:
  """Refuses what cannot be run.

  Raises:
    TypeError: one is not a string.
    ValueError: together they are longer than wire.MAX_INPUT.
  """
  for name, value in (("program", program), ("stdin", stdin)):
    if not isinstance(value, str):
      raise TypeError(f"{name} must be a string, got {type(value).__name__}")
  if len(program) + len(stdin) > wire.MAX_INPUT:
    raise ValueError(f"program and stdin exceed {wire.MAX_INPUT} characters")


def died(e: slot.ZygoteDied) -> wire.Result:
  """Of a run whose slot ended: for the memory it took, or for no fault of its own."""
  if not e.memory:
    return failure(str(e))
  note = "[killed: used more memory than it may]\n"
  return wire.Result("", note, -9, wire.Verdict.MEMORY, 0.0)


def failure(reason: str) -> wire.Result:
  """Of a run that the service failed."""
  return wire.Result("", reason, None, wire.Verdict.INFRASTRUCTURE, 0.0)

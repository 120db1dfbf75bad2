"""Cells: the session of one trajectory's programs, from its first call to its end.

It may end before its trajectory does: a program uses up its time or memory, or the
sandbox loses it. The next call then opens another one.

A session keeps the time limit that it was opened with. A later program that is given
less is not ended then: `Toolbox` answers for it, and it runs on at most until that
limit. Only a trajectory whose tool time runs out gives less, and it ends with the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tools_sandbox.client import RemoteSession, Result, Session, SessionEnded


class Cells:
  """Where a trajectory's session is, once it has one. Thread-safe; close it."""

  def __init__(self, ended: Callable[[Cells], None]):
    """Opens nothing yet.

    Args:
      ended: called once after `close`, when the session's slot is free.
    """
    self.lost = False  # a session, by what a program did or the sandbox
    self.seconds = 0.0  # that a program may take in it, or in the last one
    self._ended = ended
    self._session: Session | RemoteSession | None = None
    self._closed = False
    self._lock = threading.Lock()

  @property
  def closed(self) -> bool:
    """Whether the trajectory is over, so that nothing is opened any more."""
    return self._closed

  def allows_more_than(self, seconds: float) -> bool:
    """Whether there is a session, in which a program may run for longer than that."""
    return self._session is not None and seconds < self.seconds

  def open(
    self, make: Callable[[float], Session | RemoteSession], seconds: float
  ) -> None:
    """Opens a session.

    Args:
      make: gives one, in which each program has so many seconds.
      seconds: the same.

    Raises:
      TimeoutError, RuntimeError: there can be none now, or this is closed.
    """
    if self._closed:
      raise RuntimeError("the trajectory has ended")
    session = make(seconds)
    with self._lock:
      self._session, self.seconds, self.lost = session, seconds, False
      closed = self._closed
    if closed:  # while it was opened
      session.close()
      raise RuntimeError("the trajectory has ended")

  def run(self, program: str, stdin: str) -> Result | None:
    """Runs a program in the session; None where there is none, or none any more."""
    session = self._session
    if session is None:
      return None
    try:
      result = session.run(program, stdin)
    except SessionEnded:
      result = None
    if not session.alive:
      self.lost = True
      with self._lock:
        self._session = None
    return result

  def close(self) -> None:
    """Ends the session in the background; does not wait for a program that runs."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      session, self._session = self._session, None
    if session is None:
      self._ended(self)
      return
    # A daemon: it may wait for a program, whose own limits end it.
    threading.Thread(
      target=self._end, args=(session,), name="end of session", daemon=True
    ).start()

  def _end(self, session: Session | RemoteSession) -> None:
    session.close()
    self._ended(self)

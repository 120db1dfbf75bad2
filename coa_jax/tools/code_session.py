"""One trajectory's code session: its programs share variables across calls.

The sandbox session opens with the trajectory's first program. It may end before the
trajectory: a program uses up its time or memory, or the sandbox loses the session. The
next call then opens a new session.

A session keeps its initial time limit. A later program with a shorter limit does not
end the session: `Toolbox` answers for the program, which continues at most to the
session's limit. Only a trajectory out of tool time has a shorter limit, and the
trajectory ends with this call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tools_sandbox.faults import SessionEnded
from tools_sandbox.jail.wire import Result


class SandboxSession(Protocol):
  """A sandbox's session: see `tools_sandbox.client.Sandbox.session`."""

  @property
  def alive(self) -> bool:
    """Whether another program can run."""
    ...

  def run(self, program: str, stdin: str = "") -> Result:
    """Runs a program with earlier programs' variables."""
    ...

  def close(self) -> None:
    """Ends the session."""
    ...


class CodeSession:
  """A trajectory's session, from its first program to its end. Thread-safe.

  Attributes:
    lost: True once a session ended early, because of a program or the sandbox.
    seconds: a program's time limit in the current or last session.
  """

  def __init__(self, ended: Callable[[CodeSession], None]):
    """Opens nothing yet.

    Args:
      ended: called once after `close`, when the session's slot is free.
    """
    self.lost = False
    self.seconds = 0.0
    self._ended = ended
    self._session: SandboxSession | None = None
    self._closed = False
    self._lock = threading.Lock()

  @property
  def closed(self) -> bool:
    """Whether the trajectory is over; then no session is opened."""
    return self._closed

  def allows_more_than(self, seconds: float) -> bool:
    """Whether an open session allows a program more than `seconds`."""
    return self._session is not None and seconds < self.seconds

  def open(
    self, open_session: Callable[[float], SandboxSession], seconds: float
  ) -> None:
    """Opens a session.

    Args:
      open_session: opens a session with a time limit per program, in seconds.
      seconds: this limit.

    Raises:
      TimeoutError, RuntimeError: no session is available now, or `close` was called.
    """
    if self._closed:
      raise RuntimeError("the trajectory has ended")
    session = open_session(seconds)  # without the lock: it may take seconds
    with self._lock:
      self._session = session
      self.seconds = seconds
      self.lost = False
      closed = self._closed
    if closed:  # by another thread, during the opening
      session.close()
      raise RuntimeError("the trajectory has ended")

  def run(self, program: str, stdin: str) -> Result | None:
    """Runs a program in the session; returns None if no session is open or it ended."""
    # Without the lock: `close` must not wait for a program.
    session = self._session
    if session is None:
      return None
    try:
      result = session.run(program, stdin)
    except SessionEnded:
      result = None
    # The program may have ended the session: its result stands, its variables are gone.
    if not session.alive:
      self.lost = True
      with self._lock:
        self._session = None
    return result

  def close(self) -> None:
    """Ends the session in the background; does not wait for a running program."""
    # Only once: an ended episode calls it, and so does its finalizer.
    with self._lock:
      if self._closed:
        return
      self._closed = True
      session = self._session
      self._session = None
    if session is None:
      self._ended(self)
      return
    # A daemon thread: it may wait for a program, until the program's own limits.
    threading.Thread(
      target=self._end, args=(session,), name="end of session", daemon=True
    ).start()

  def _end(self, session: SandboxSession) -> None:
    session.close()
    self._ended(self)

"""The code session of one trajectory: its programs share variables, call by call.

The sandbox's session opens with the trajectory's first program. It may end before the
trajectory does: a program uses up its time or memory, or the sandbox loses it. The next
call then opens another one.

A session keeps the time limit that it was opened with. A later program with a shorter
limit does not end it: `Toolbox` answers for the program, which runs on at most until
the session's limit. Only a trajectory whose tool time runs out has a shorter limit, and
it ends with that call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tools_sandbox.faults import SessionEnded
from tools_sandbox.jail.wire import Result


class SandboxSession(Protocol):
  """What a sandbox opens: see `tools_sandbox.client.Sandbox.session`."""

  @property
  def alive(self) -> bool:
    """Whether another program can run."""
    ...

  def run(self, program: str, stdin: str = "") -> Result:
    """Runs a program with the variables that earlier ones left."""
    ...

  def close(self) -> None:
    """Ends it."""
    ...


class CodeSession:
  """A trajectory's session, from its first program to its end. Thread-safe.

  Attributes:
    lost: True once a session ended early, by what a program did or the sandbox.
    seconds: that a program may take in the session, or in the last one.
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
    """Whether the trajectory is over, so that nothing is opened any more."""
    return self._closed

  def allows_more_than(self, seconds: float) -> bool:
    """Whether a session is open in which a program may run for longer than that."""
    return self._session is not None and seconds < self.seconds

  def open(
    self, open_session: Callable[[float], SandboxSession], seconds: float
  ) -> None:
    """Opens a session.

    Args:
      open_session: opens one in which each program has so many seconds.
      seconds: the same.

    Raises:
      TimeoutError, RuntimeError: no session can be had now, or this is closed.
    """
    if self._closed:
      raise RuntimeError("the trajectory has ended")
    session = open_session(seconds)  # without the lock: it may take seconds
    with self._lock:
      self._session = session
      self.seconds = seconds
      self.lost = False
      closed = self._closed
    if closed:  # by another thread, while it was opened
      session.close()
      raise RuntimeError("the trajectory has ended")

  def run(self, program: str, stdin: str) -> Result | None:
    """Runs a program in the session; None where none is open, or it ended before."""
    # Without the lock: `close` must not wait for a program.
    session = self._session
    if session is None:
      return None
    try:
      result = session.run(program, stdin)
    except SessionEnded:
      result = None
    # The program itself may have ended it: it has a result, and its variables are gone.
    if not session.alive:
      self.lost = True
      with self._lock:
        self._session = None
    return result

  def close(self) -> None:
    """Ends the session in the background; does not wait for a program that runs."""
    # Once: an episode that has ended is dropped afterwards.
    with self._lock:
      if self._closed:
        return
      self._closed = True
      session = self._session
      self._session = None
    if session is None:
      self._ended(self)
      return
    # A daemon: it may wait for a program, whose own limits end it.
    threading.Thread(
      target=self._end, args=(session,), name="end of session", daemon=True
    ).start()

  def _end(self, session: SandboxSession) -> None:
    session.close()
    self._ended(self)

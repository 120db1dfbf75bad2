"""Cancels one run, or one cell of a session."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class Cancel:
  """Cancels one run or cell when called, from any thread, even before the start."""

  def __init__(self) -> None:
    """Creates a cancel for a future run."""
    self.requested = False
    self._lock = threading.Lock()
    self._fd = -1  # write end of the zygote's cancel pipe

  def __call__(self) -> None:
    """Cancels the run (verdict `infrastructure`); does nothing after the run's end."""
    with self._lock:
      if not self.requested:  # one byte per run: `bound` reads one
        self.requested = True
        if self._fd >= 0:
          os.write(self._fd, b"c")

  @contextlib.contextmanager
  def bound(self, write_fd: int, read_fd: int) -> Iterator[None]:
    """Connects this cancel to the run inside the `with`.

    Args:
      write_fd: write end of the zygote's cancel pipe.
      read_fd: the pipe's other end.
    """
    # If cancelled before this, the run sees the byte at its first poll.
    with self._lock:
      self._fd = write_fd
      if self.requested:
        os.write(write_fd, b"c")
    try:
      yield
    finally:
      with self._lock:
        self._fd = -1
        if self.requested:
          os.read(read_fd, 1)  # this run's byte must not cancel the next run

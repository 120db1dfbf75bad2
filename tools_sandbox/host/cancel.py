"""Calls off one run or one cell of a session."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class Cancel:
  """Calls off one run or cell, from any thread, before it starts too; call it."""

  def __init__(self) -> None:
    """Creates a cancel for a future run."""
    self.requested = False
    self._lock = threading.Lock()
    self._fd = -1  # of the run's zygote

  def __call__(self) -> None:
    """Cancels the run; its verdict is `infrastructure`. Does nothing after its end."""
    with self._lock:
      if not self.requested:  # one byte for each run: `bound` takes out one
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
    # Called off before it was bound: the run hears of it as soon as it looks.
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
          os.read(read_fd, 1)  # it was for this run, not for the next one

"""Ends a run in good order at SIGTERM (a preempted machine) or SIGINT (Ctrl-C).

After the first signal the run saves at its next boundary and exits. A second signal
ends the process at once, whatever the process is doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import jax
from orbax.checkpoint import multihost

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHARE_EVERY_S = 0.5
_KEY = "coa_jax/signal"


class Interrupted(KeyboardInterrupt):
  """A signal has ended the run, and its state is saved."""

  def __init__(self, number: int, message: str = ""):
    """Takes the signal's number and a message for the user."""
    super().__init__(message)
    self.number = number
    self.status = 128 + number


class SharedSignal:
  """Shares a signal among a run's processes; use as a context manager.

  A scheduler may signal only one process, and the others would continue. The signal's
  number travels through JAX's coordination service, so no device waits.
  """

  def __init__(self, interruption: Interruption):
    """Sends the signal of `interruption`, or sets its number from another process."""
    self._interruption = interruption
    self._left = threading.Event()
    self._thread = threading.Thread(target=self._share, name="signal", daemon=True)

  def __enter__(self) -> SharedSignal:
    self._thread.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._left.set()
    self._thread.join()

  def _share(self) -> None:
    client = multihost.get_jax_distributed_client()
    while not self._left.wait(_SHARE_EVERY_S):
      try:
        if self._interruption.number:
          number = str(self._interruption.number)
          client.key_value_set(_KEY, number, allow_overwrite=True)
          return
        self._interruption.number = int(client.key_value_try_get(_KEY))
        return
      except jax.errors.JaxRuntimeError:
        pass  # no process has a signal yet, or the first process is gone


class Interruption:
  """Listens for signals inside its context, if entered from the main thread.

  A thread reads the signals from a pipe that Python's C handler fills. So a second
  signal counts even while the main thread waits for a device or a compiler.

  Attributes:
    number: the first signal's number, 0 for none.
  """

  def __init__(self):
    """Listens to nothing yet."""
    self.number = 0
    self._at_once = False
    self._entered = False

  def __enter__(self) -> Interruption:
    self._entered = threading.current_thread() is threading.main_thread()
    if not self._entered:
      return self
    # The C handler may not block when writing; the reading thread may.
    self._pipe = os.pipe()
    os.set_blocking(self._pipe[1], False)
    self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
    self._handlers = [signal.signal(number, self._handle) for number in _SIGNALS]
    threading.Thread(target=self._listen, name="signals", daemon=True).start()
    return self

  def __exit__(self, *unused: object) -> None:
    if not self._entered:
      return
    # Restore the handlers for later code: Ctrl-C ends the program again.
    for number, handler in zip(_SIGNALS, self._handlers, strict=True):
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._wakeup)
    os.close(self._pipe[1])  # ends the thread, which closes the other end

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Inside this context the first signal raises `Interrupted` in the main thread."""
    self._at_once = self._entered
    try:
      # An earlier signal counts, too.
      if self.number and self._entered:
        raise Interrupted(self.number)
      yield
    finally:
      self._at_once = False

  def _handle(self, number: int, frame: object) -> None:
    """Handles a signal in Python, once the main thread returns to Python code."""
    del frame
    self.number = self.number or number
    if self._at_once:
      self._at_once = False  # once: the following save must not be interrupted
      raise Interrupted(number)

  def _listen(self) -> None:
    """Reports signals from a thread, without waiting for the main thread."""
    # The loop ends when the pipe is closed: the read is then empty.
    count = 0
    while byte := os.read(self._pipe[0], 1):
      if byte[0] not in _SIGNALS:  # Python writes every signal's number
        continue
      count += 1
      name = signal.Signals(byte[0]).name
      if count > 1:
        # Not sys.exit: the main thread may be waiting forever.
        os.write(2, f"\n{name} again: ended at once\n".encode())
        os._exit(128 + byte[0])
      text = f"\n{name}: saving at the next boundary, then leaving; again to end now\n"
      os.write(2, text.encode())
    os.close(self._pipe[0])

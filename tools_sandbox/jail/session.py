"""Serves a session in its init: one process runs one cell after another.

The hostile program owns the process from its first cell on. Unlike a run's program, it
holds two more pipe ends, one for cells and one to report each cell's end and status.
Its reports may be false, but only about its own cells. This file decides everything
that concerns others: the limits, how the session ended, and every byte sent to the
host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import time
from typing import Any

import run
import wire

_MANY = 4096  # the most bytes read at once from a program's reports
_LOST = "[the session has ended, its variables are lost]\n"


class _CellsRun(run.JailRun):
  """A run whose input is cells."""

  def __init__(
    self, request: dict[str, Any], starter: run.Starter, template: run.Template
  ):
    """Starts the process."""
    super().__init__(request, starter, template)
    self.cell_end = self.ends[1]  # after the process: see `JailRun`
    # A hostile program has the other end: a blocking read could wait forever.
    os.set_blocking(self.cell_end, False)
    self.alive = True
    self._ended: tuple[int | None, float, float] | None = None

  def wait(self, control: int) -> None:
    """Waits until the host writes. Limits stay in force: threads may keep running."""
    poll = select.poll()
    for fd in (self.process, control):
      poll.register(fd, select.POLLIN)
    # After the process's end, only the host is left to wait for.
    while self._ended is None:
      ready = dict(poll.poll(run.SAMPLE_S * 1000))
      if control in ready:
        return
      if self.process in ready or self._over_limits():
        self.stop()

  def stop(self) -> None:
    """Kills the session's remaining processes."""
    if self._ended is None:
      self._ended = self._end()

  def cell(self, request: dict[str, Any], host: run.Host) -> wire.Result:
    """Runs one cell; afterwards `alive` says whether another can follow.

    Raises:
      SystemExit: the host has gone.
    """
    # --- Feed the cell; a process that ended between cells gets none.
    self.start = time.monotonic()
    if self._ended is None:
      with contextlib.suppress(BlockingIOError):
        os.read(self.cell_end, _MANY)  # drop unasked reports
      self.input = memoryview(wire.frame(request))
      self._pump(host)

    # --- The process ended, was killed or closed its pipe: no other cell can follow.
    status = None
    if self._ended is None and not self.killed:
      status = self._status()
    if status is None:
      self.alive = False
      self.stop()
      result = self._result(*self._ended)
      if result.verdict == wire.Verdict.INFRASTRUCTURE:
        return result
      return dataclasses.replace(result, stderr=result.stderr + _LOST)

    # --- The process continues: cut off this cell's output here.
    for fd in self.clips:
      # Read once, what the pipe holds at the cell's end: a thread may write forever.
      self._read(fd)
    result = self._result(status, 0.0, time.monotonic() - self.start)
    self.clips = {fd: wire.Clip(self.limits.output_bytes) for fd in self.clips}
    return result

  def _status(self) -> int | None:
    """Reads the cell's exit status from the process; None if there is no report."""
    try:
      data = os.read(self.cell_end, _MANY)
    except BlockingIOError:
      return None
    return data[0] if data else None

  def _close_input(self) -> None:
    pass  # stays open for the next cell


def serve(
  request: dict[str, Any],
  host: run.Host,
  starter: run.Starter,
  template: run.Template,
) -> None:
  """Serves cells from `host` until one ends the session or the host closes it.

  Args: as `run.serve`.

  Raises:
    EOFError, SystemExit: the host has gone.
  """
  wire.write_frame(host.results, {"event": "started"})
  session = _CellsRun(request, starter, template)
  while session.alive:
    session.wait(host.requests)
    cell = wire.read_frame(host.requests)
    # The host ends a session with a cell without a program.
    if cell["program"] is None:
      session.stop()
      wire.write_frame(host.results, {"event": "closed"})
      return
    result = session.cell(cell, host).to_json()
    answer = {"event": "result", "result": result, "alive": session.alive}
    wire.write_frame(host.results, answer)

"""The host's handle on a slot's process: starts it, sends requests, ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tools_sandbox.host.cancel import Cancel
from tools_sandbox.jail import cgroup, wire

_JAIL = str(pathlib.Path(__file__).resolve().parents[1] / "jail")
# Back-end -> a slot's program.
_PROGRAMS = {
  "subprocess": os.path.join(_JAIL, "zygote.py"),
  "jail": os.path.join(_JAIL, "keeper.py"),
}
_START_S = 60.0  # imports on a starved machine
_SWEEPS = 100  # passes: a daemon may fork during one
_GRACE_S = 15.0  # beyond a run's wall limit: to kill, reap and remove files
# The zygote's whole environment. -I would be tidier than -s, but it makes the
# interpreter ignore PYTHONHASHSEED, and set order would then differ between slots.
_ENVIRONMENT = {
  "PYTHONHASHSEED": "0",
  "OPENBLAS_NUM_THREADS": "1",  # threads do not survive the fork
  "OMP_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
  "MALLOC_ARENA_MAX": "2",  # an arena reserves 64 MiB of a limited address space
}


class ZygoteDied(Exception):
  """The zygote cannot serve any more.

  `started` says whether the program may have run; `memory` says whether the kernel
  killed the slot for using too much memory.
  """

  def __init__(self, message: str, started: bool, memory: bool = False):
    super().__init__(message)
    self.started = started
    self.memory = memory

  def result(self) -> wire.Result:
    """Returns the run's result: verdict `memory`, or else `infrastructure`."""
    if not self.memory:
      return wire.failure(str(self))
    note = "[killed: used more memory than it may]\n"
    return wire.Result("", note, -9, wire.Verdict.MEMORY, 0.0)


class Zygote:
  """Handles one zygote process for the host. Not thread-safe: one caller at a time."""

  def __init__(self, preload: Sequence[str], backend: str):
    """Starts the process; it imports `preload` while the caller continues.

    Raises:
      OSError: no process, descriptor or disk for the zygote.
    """
    # --- The slot's resources: a folder, a control group, a pipe for cancelling runs.
    self.runs = 0
    self.ready = False
    self.directory = tempfile.mkdtemp(prefix="tools-sandbox-")
    self._group = cgroup.Group.create() if backend == "jail" else None
    self._cancel = os.pipe()
    self._log = os.path.join(self.directory, "zygote.log")

    # --- Start it. Its first argument is the folder, by which `kill` finds strays.
    flags = ["-s", "-X", "utf8", _PROGRAMS[backend]]
    arguments = [self.directory, str(os.getpid()), str(self._cancel[0])]
    if backend == "jail":
      arguments.append("\n".join(self._group.folders if self._group else []))
    try:
      with open(self._log, "wb") as log:
        self.process = subprocess.Popen(
          [sys.executable, *flags, *arguments, *preload],
          pass_fds=self._cancel[:1],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          cwd=self.directory,
          env=_ENVIRONMENT,
          start_new_session=True,
          bufsize=0,
        )
    except OSError:
      self._remove_files()
      raise

    # --- Non-blocking, so that deadlines hold if the zygote does not read.
    self._requests = self.process.stdin.fileno()
    self._results = self.process.stdout.fileno()
    for fd in (self._requests, self._results):
      os.set_blocking(fd, False)

  def run(
    self, request: dict[str, Any], wall_s: float, cancel: Cancel | None = None
  ) -> wire.Result:
    """Sends one request and waits for its result.

    Raises:
      ZygoteDied: no result will come; the caller must `kill`.
    """
    with self._bound(cancel):
      self.open(request)
      with self._talk(started=True):
        return self._result(wall_s)[0]

  def open(self, request: dict[str, Any]) -> None:
    """Sends one request and waits for its start; a session's cells may follow.

    Raises:
      ZygoteDied: the request did not start; the caller must `kill`.
    """
    with self._talk(started=False):
      # --- On the first request: wait for the imports, and measure memory after them.
      if not self.ready:
        self._expect("ready", _START_S)
        self.ready = True
        if self._group is not None:
          self._group.settle()

      # --- Set the group's limits for this run.
      if self._group is not None:
        limits = request["limits"]
        mb = limits["memory_mb"] + limits["disk_mb"]
        self._group.limit(mb, limits["processes"])
        self._group.killed()  # so that earlier runs' kills do not count

      # --- After "started" the program may run, so nobody retries it.
      wire.write_frame(self._requests, request, time.monotonic() + _GRACE_S)
      self._expect("started", _GRACE_S)
    self.runs += 1

  def cell(
    self, program: str, stdin: str, wall_s: float, cancel: Cancel | None = None
  ) -> tuple[wire.Result, bool]:
    """Runs the session's next cell; returns its result and whether another may follow.

    Raises:
      ZygoteDied: no result will come; the caller must `kill`.
    """
    with self._bound(cancel), self._talk(started=True):
      cell = {"program": program, "stdin": stdin}
      wire.write_frame(self._requests, cell, time.monotonic() + _GRACE_S)
      return self._result(wall_s)

  def end_session(self) -> None:
    """Ends the open session and waits until its processes are gone.

    Raises:
      ZygoteDied: the zygote did not confirm; the caller must `kill`.
    """
    with self._talk(started=True):
      end = {"program": None, "stdin": ""}
      wire.write_frame(self._requests, end, time.monotonic() + _GRACE_S)
      self._expect("closed", _GRACE_S)

  def _bound(self, cancel: Cancel | None) -> contextlib.AbstractContextManager[None]:
    if cancel is None:
      return contextlib.nullcontext()
    return cancel.bound(self._cancel[1], self._cancel[0])

  @contextlib.contextmanager
  def _talk(self, started: bool) -> Iterator[None]:
    # After a missing, late or wrong reply the zygote is useless.
    try:
      yield
    except (EOFError, TimeoutError, ValueError, KeyError) as e:
      memory = started and self._group is not None and self._group.killed()
      why = f"the zygote failed: {e}\n{self._last_words()}"
      raise ZygoteDied(why, started, memory) from e

  def _result(self, wall_s: float) -> tuple[wire.Result, bool]:
    message = self._expect("result", wall_s + _GRACE_S)
    result = wire.Result.from_json(message["result"])
    # Only the group knows whether the kernel killed the program for its memory.
    how = result.exit_code, result.verdict
    killed = how == (-signal.SIGKILL, wire.Verdict.ERROR)
    if killed and self._group is not None and self._group.killed():
      stderr = result.stderr + "[killed: used more memory than it may]\n"
      verdict = wire.Verdict.MEMORY
      result = dataclasses.replace(result, stderr=stderr, verdict=verdict)
    return result, message.get("alive", False)

  def _expect(self, event: str, seconds: float) -> dict[str, Any]:
    message = wire.read_frame(self._results, time.monotonic() + seconds)
    if message.get("event") != event:
      raise ValueError(f"expected {event!r} of the zygote, got {message!r:.200}")
    return message

  def _last_words(self) -> str:
    try:
      with open(self._log, encoding="utf-8", errors="replace") as f:
        return f.read()[-2000:]
    except OSError:
      return ""

  def kill(self) -> None:
    """Kills the zygote and its descendants, and removes its files."""
    self.process.kill()
    self.process.wait()
    self.process.stdin.close()
    self.process.stdout.close()
    # Kill daemons before removing files: a live one could write them again.
    _kill_by_argument(self.directory)
    self._remove_files()

  def _remove_files(self) -> None:
    shutil.rmtree(self.directory, ignore_errors=True)
    if self._group is not None:
      self._group.remove()
    for fd in self._cancel:
      os.close(fd)


def _kill_by_argument(argument: str) -> None:
  """Kills all processes with `argument` on their command line."""
  # The zygote kills its own stragglers. If the zygote itself was killed, its daemons
  # belong to init, but a fork keeps its parent's command line with the slot's folder.
  marker = argument.encode() + b"\0"
  # Repeat until a pass finds none: a process may fork during a pass.
  for _ in range(_SWEEPS):
    found_one = False
    for name in os.listdir("/proc"):
      try:
        with open(f"/proc/{name}/cmdline", "rb") as f:
          if name.isdigit() and marker in f.read():
            os.kill(int(name), signal.SIGKILL)
            found_one = True
      except OSError:
        continue  # not a process, or it has just ended
    if not found_one:
      return

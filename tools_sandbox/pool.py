"""SandboxPool: runs programs on zygotes, one per slot, from any number of threads.

Two back-ends. "jail": namespaces, a root of its own and a seccomp filter for every run.
"subprocess": separate processes with resource limits, no namespaces and no seccomp; it
contains accidents and much abuse, not a determined attacker. README.md says what each
leaves open.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from tools_sandbox import jail, wire

BACKENDS = ("jail", "subprocess")
_WEAKER = (
  "Nothing weaker is taken unasked. backend='subprocess' is there for programs you "
  "trust: they can read and change what this user's files are, and use the network. "
  "tools_sandbox/README.md says what a container needs for the jail"
)
# What programs of the code and math variants import, and what sympy imports only when
# it is first asked to solve, simplify or lambdify: 25 to 150 ms that a run then saves.
DEFAULT_PRELOAD = (
  *("heapq", "queue", "statistics", "csv", "calendar", "logging", "unittest"),
  *("concurrent.futures", "multiprocessing", "numpy", "numpy.random", "sympy"),
  *("sympy.combinatorics", "sympy.assumptions.wrapper", "sympy.integrals.heurisch"),
  *("sympy.integrals.risch", "sympy.physics.units", "sympy.tensor.tensor"),
  *("sympy.codegen.ast", "sympy.sets.setexpr", "scipy.special"),
)

_CLOSED = "the sandbox pool is closed"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
# Back-end -> the program of a slot.
_PROGRAMS = {
  "subprocess": os.path.join(_FOLDER, "zygote.py"),
  "jail": os.path.join(_FOLDER, "jail.py"),
}
_START_S = 60.0  # imports on a starved machine
_SWEEPS = 100  # a daemon may fork while it is looked for
_GRACE_S = 15.0  # on top of a run's wall limit: killing, reaping, removing its files
# All that a zygote inherits. -I would be tidier than -s, but it makes the interpreter
# ignore PYTHONHASHSEED, and set order would then differ between slots.
_ENVIRONMENT = {
  "PYTHONHASHSEED": "0",
  "OPENBLAS_NUM_THREADS": "1",  # threads do not survive the fork
  "OMP_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
  "MALLOC_ARENA_MAX": "2",  # an arena reserves 64 MiB of a limited address space
}


class _ZygoteDied(Exception):
  """The zygote is of no more use. `started` says whether the program may have run."""

  def __init__(self, message: str, started: bool):
    super().__init__(message)
    self.started = started


class _Zygote:
  """The host's handle on one zygote process. Not thread-safe: one caller at a time."""

  def __init__(self, preload: Sequence[str], backend: str):
    """Starts the process; it imports `preload` while the caller goes on.

    Raises:
      OSError: no process, no descriptor, or no disk for it.
    """
    self.runs = 0
    self.ready = False
    self.directory = tempfile.mkdtemp(prefix="tools-sandbox-")
    self._log = os.path.join(self.directory, "zygote.log")
    flags = ["-s", "-X", "utf8", _PROGRAMS[backend]]
    try:
      with open(self._log, "wb") as log:
        self.process = subprocess.Popen(
          [sys.executable, *flags, self.directory, str(os.getpid()), *preload],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          cwd=self.directory,
          env=_ENVIRONMENT,
          start_new_session=True,
          bufsize=0,
        )
    except OSError:
      shutil.rmtree(self.directory, ignore_errors=True)
      raise
    self._requests = self.process.stdin.fileno()
    self._results = self.process.stdout.fileno()
    for fd in (self._requests, self._results):
      os.set_blocking(fd, False)

  def run(self, request: dict[str, Any], wall_s: float) -> wire.Result:
    """Sends one request and waits for its result.

    Raises:
      _ZygoteDied: no result will come; the caller must `kill`.
    """
    started = False
    try:
      if not self.ready:
        self._expect("ready", _START_S)
        self.ready = True
      deadline = time.monotonic() + _GRACE_S
      wire.write_frame(self._requests, request, deadline)
      self._expect("started", _GRACE_S)
      started = True
      message = self._expect("result", wall_s + _GRACE_S)
      self.runs += 1
      return wire.Result.from_json(message["result"])
    except (EOFError, TimeoutError, ValueError, KeyError) as e:
      raise _ZygoteDied(f"the zygote failed: {e}\n{self._last_words()}", started) from e

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
    """Ends the zygote and what runs below it, and removes its files."""
    self.process.kill()
    self.process.wait()
    self.process.stdin.close()
    self.process.stdout.close()
    _kill_by_argument(self.directory)
    shutil.rmtree(self.directory, ignore_errors=True)


def _kill_by_argument(argument: str) -> None:
  """Kills processes that carry `argument` on their command line.

  The zygote kills its own stragglers. Where it was itself killed, daemons have gone to
  init, but a fork keeps its parent's command line, and there the slot's directory is.
  """
  wanted = argument.encode() + b"\0"
  for _ in range(_SWEEPS):
    found = False
    for name in os.listdir("/proc"):
      try:
        with open(f"/proc/{name}/cmdline", "rb") as f:
          if name.isdigit() and wanted in f.read():
            os.kill(int(name), signal.SIGKILL)
            found = True
      except OSError:
        continue  # not a process, or one that has just ended
    if not found:
      return


class SandboxPool:
  """Slots that each run one program at a time. Thread-safe; first come, first served.

  A slot's zygote starts when it is first needed, in the calling thread, so several
  start in parallel. It is replaced when it dies and after `runs_per_zygote` runs.
  """

  def __init__(
    self,
    slots: int = 4,
    limits: wire.Limits | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    runs_per_zygote: int = 2000,
    backend: str = "jail",
  ):
    """Starts nothing yet.

    Args:
      slots: programs that may run at once.
      limits: what a run may use unless it says otherwise; None for `Limits()`.
      preload: modules imported ahead of every program; those that are not installed
        are skipped.
      runs_per_zygote: runs after which a zygote is replaced by a fresh one.
      backend: one of `BACKENDS`.

    Raises:
      ValueError: a count is below 1, or there is no such back-end.
      RuntimeError: this machine cannot build jails; the message says what it lacks.
    """
    if backend not in BACKENDS:
      raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    for name, value in (("slots", slots), ("runs_per_zygote", runs_per_zygote)):
      if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    if backend == "jail" and (missing := jail.check()):
      # Never another back-end in its place: that is the caller's to choose.
      raise RuntimeError(
        f"backend 'jail' cannot be used here: {'; '.join(missing)}. {_WEAKER}"
      )
    self.limits = limits or wire.Limits()
    self._backend = backend
    self._preload = tuple(preload)
    self._runs_per_zygote = runs_per_zygote
    self._changed = threading.Condition()
    self._idle: list[_Zygote] = []
    self._unstarted = slots
    # Callers without a slot, in the order of their arrival; a slot that comes free is
    # handed to the first. None waits while one is free.
    self._waiting: deque[Future[_Zygote | None]] = deque()
    self._live: set[_Zygote] = set()
    self._closed = False
    self._replaced = 0

  def run(
    self, program: str, stdin: str = "", limits: wire.Limits | None = None
  ) -> wire.Result:
    """Runs a program in a fresh process; waits for a free slot and for its end.

    Args:
      program: Python source, run as `__main__`.
      stdin: what it reads on standard input.
      limits: what it may use; None for the pool's.

    Returns:
      The result. A failure of the service is a result too (`infrastructure`, with the
      reason in stderr); a run whose zygote died before the program started is tried
      once more on a fresh one.

    Raises:
      TypeError: program or stdin is not a string.
      ValueError: together they are longer than wire.MAX_INPUT.
      RuntimeError: the pool is closed.
    """
    for name, value in (("program", program), ("stdin", stdin)):
      if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    if len(program) + len(stdin) > wire.MAX_INPUT:
      raise ValueError(f"program and stdin exceed {wire.MAX_INPUT} characters")
    limits = limits or self.limits
    request = {"program": program, "stdin": stdin, "limits": limits.to_json()}
    zygote = self._acquire()
    try:
      for last in (False, True):
        try:
          zygote = zygote or self._start()
          result = zygote.run(request, limits.wall_s)
          break
        except _ZygoteDied as e:
          zygote = self._retire(zygote)
          if e.started or last:
            zygote = self._spare()
            return _failure(str(e))
      if zygote.runs >= self._runs_per_zygote:
        self._retire(zygote)
        zygote = self._spare()
      return result
    except OSError as e:  # no process, no descriptor, no disk for a zygote
      zygote = self._retire(zygote)
      return _failure(f"{type(e).__name__}: {e}")
    except BaseException:
      # A caller that is interrupted leaves a zygote with an answer nobody wants.
      zygote = self._retire(zygote)
      raise
    finally:
      self._release(zygote)

  @property
  def replaced(self) -> int:
    """Zygotes that were put away so far: worn out, broken, or killed."""
    return self._replaced

  def close(self) -> None:
    """Kills every zygote, busy ones too; runs in flight end as `infrastructure`."""
    with self._changed:
      self._closed = True
      idle, self._idle = self._idle, []
      while self._waiting:
        self._waiting.popleft().set_exception(RuntimeError(_CLOSED))
      # A busy one is put away by its caller, who still reads from its pipes.
      for zygote in self._live:
        zygote.process.kill()
    for zygote in idle:
      self._retire(zygote)
    with self._changed:
      self._changed.wait_for(lambda: not self._live)

  def __enter__(self) -> SandboxPool:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _acquire(self) -> _Zygote | None:
    """Takes a slot: its zygote, or None where it has to be started."""
    with self._changed:
      self._check_open()
      if self._idle or self._unstarted:
        return self._take()
      place: Future[_Zygote | None] = Future()
      self._waiting.append(place)
    try:
      return place.result()
    except BaseException:  # closed, or a caller that is interrupted
      with self._changed:
        waits = place in self._waiting
        if waits:
          self._waiting.remove(place)
      if not waits and place.exception() is None:
        self._release(place.result())  # it was handed over in the same moment
      raise

  def _take(self) -> _Zygote | None:
    """A free slot; with the lock held, where there is one."""
    if self._idle:
      return self._idle.pop()
    self._unstarted -= 1
    return None

  def _start(self) -> _Zygote:
    zygote = _Zygote(self._preload, self._backend)
    with self._changed:
      self._live.add(zygote)
      closed = self._closed
    if closed:
      self._retire(zygote)
    self._check_open()
    return zygote

  def _spare(self) -> _Zygote | None:
    """A new zygote that imports before anybody waits for it; None if there can't be."""
    try:
      return None if self._closed else self._start()
    except (OSError, RuntimeError):  # RuntimeError: closed by now
      return None

  def _retire(self, zygote: _Zygote | None) -> None:
    if zygote is not None:
      zygote.kill()
      with self._changed:
        self._live.discard(zygote)
        self._replaced += 1
        self._changed.notify_all()

  def _release(self, zygote: _Zygote | None) -> None:
    with self._changed:
      closed = self._closed
      if zygote is None or closed:
        self._unstarted += 1
      elif zygote.ready:
        self._idle.append(zygote)
      else:
        self._idle.insert(0, zygote)  # taken last: it is still importing
      while self._waiting and (self._idle or self._unstarted):
        self._waiting.popleft().set_result(self._take())
    if closed:
      self._retire(zygote)

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError(_CLOSED)


def _failure(reason: str) -> wire.Result:
  return wire.Result("", reason, None, wire.Verdict.INFRASTRUCTURE, 0.0)

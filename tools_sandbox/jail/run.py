"""One run from start to answer, independent of the back-end.

Shared by `zygote` and, in a jail, `inside`: feeds a program, reads its output, kills it
at its limits, and reports its verdict.

budget: a run's start, pipes, limits and end are one state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import signal
import time
from typing import Any, Protocol

import child
import wire

_PAGE = os.sysconf("SC_PAGESIZE")
_CHUNK = 65536
# Time for a program to flush its buffers after its time limit. Most end sooner: the
# margin is for a crowded machine, so that output does not depend on neighbours.
_FLUSH_S = 0.25
# Exit code -> used share of the CPU limit above which the kernel's CPU limit counts as
# the cause. The kernel counts ticks, and on a crowded core ends programs too early.
_CPU_SHARE = {-signal.SIGXCPU: 0.5, -signal.SIGKILL: 0.9}
_SOCKETS = 512  # limit for a jailed run: the kernel's buffers use up to 0.2 MB each
SAMPLE_S = 0.1  # between two counts of a run's processes; shorter runs have none


@dataclasses.dataclass(frozen=True)
class _Use:
  """This process's descendants, their tasks, and an upper bound on their memory."""

  pids: list[int]
  tasks: int
  bytes: int


def descendants() -> _Use:
  """Finds all descendants of this process, in any process group or session."""
  # --- Every process: parent -> its children, with their threads and memory. Read from
  # /proc/*/status, because ordinary kernels lack /proc/PID/task/TID/children. Includes
  # zombies, because a zombie with live threads looks like a dead process.
  own = os.getpid()
  children: dict[int, list[tuple[int, int, int]]] = {}
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    fields = _fields(name, "status", b"VmRSS")
    if b"Threads" not in fields:
      continue
    row = int(name), int(fields[b"Threads"]), _bytes(fields, b"VmRSS", b"VmSwap")
    # The first process of a process namespace owns all others in it.
    if own != 1:
      children.setdefault(int(fields[b"PPid"]), []).append(row)
    elif name != "1":
      children.setdefault(1, []).append(row)

  # --- The processes below this one, generation by generation.
  pids = []
  tasks = 0
  size = 0
  queue = [own]
  while queue:
    for pid, threads, held in children.pop(queue.pop(), ()):
      pids.append(pid)
      queue.append(pid)
      tasks += threads
      size += held
  return _Use(pids, tasks, size)


def _fields(pid: int | str, file: str, sign: bytes) -> dict[bytes, bytes]:
  """Reads a process's file in /proc that has a name and a value in each line.

  If the first thread has ended, reads another thread's file, because the first thread
  is then a zombie without memory fields.

  Args:
    pid: the process.
    file: the file's name below /proc/PID.
    sign: a field present only in threads with memory.

  Returns the first thread's fields if no thread has the field `sign`; {} if the process
  ended.
  """
  first: dict[bytes, bytes] = {}
  folder = f"/proc/{pid}"
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):
    for thread in ("", *(f"task/{tid}/" for tid in os.listdir(f"{folder}/task"))):
      with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(f"{folder}/{thread}{file}", "rb") as f:
          pairs = [line.partition(b":") for line in f]
        fields = {name: value.strip() for name, _, value in pairs}
        # A kernel thread has no memory and is not a zombie.
        if sign in fields or not fields.get(b"State", b"Z").startswith(b"Z"):
          return first | fields
        first = first or fields
  return first


def _bytes(fields: dict[bytes, bytes], *names: bytes) -> int:
  """Sums fields in kB; a missing field counts as 0."""
  return sum(int(fields.get(name, b"0").split()[0]) for name in names) << 10


def _held(pids: list[int]) -> int:
  """Returns the bytes held by all processes together; shared pages count once."""
  size = 0
  for pid in pids:
    try:
      size += _bytes(_fields(pid, "smaps_rollup", b"Pss"), b"Pss", b"SwapPss")
    except PermissionError:  # executes a file without read permission
      size += _bytes(_fields(pid, "status", b"VmRSS"), b"VmRSS", b"VmSwap")
  return size


def _sockets() -> int:
  """Counts the sockets in this process's network (in a jail, the run's own)."""
  with open("/proc/self/net/sockstat", encoding="ascii") as f:
    return int(f.readline().split()[2])


@dataclasses.dataclass(frozen=True)
class Host:
  """The pipes to the host.

  Attributes:
    requests: brings the host's frames; hangs up when the host has gone.
    results: takes frames for the host.
    cancel: holds a byte from a run's cancellation to its answer. Only the host reads
      the byte.
  """

  requests: int
  results: int
  cancel: int


@dataclasses.dataclass(frozen=True)
class Started:
  """A program's process (a pidfd), and our ends of its pipes."""

  process: int
  stdin: int
  stdout: int
  stderr: int
  # For a session (cells go to `stdin`): one byte arrives here at each cell's end.
  cell_end: int = -1


class Starter(Protocol):
  """Starts a program, and later removes all its processes and files."""

  def start(self, request: dict[str, Any], limits: wire.Limits) -> Started:
    """Starts a program."""

  def end(self) -> tuple[int | None, float]:
    """Removes all the run's processes and files.

    Returns the exit status (-N for signal N, None if the program never began) and the
    CPU seconds used.
    """


def make_pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
  """Makes pipes for stdin, stdout and stderr; returns the program's ends, then ours."""
  (stdin, feed), (out, stdout), (err, stderr) = (os.pipe() for _ in range(3))
  return (stdin, stdout, stderr), (feed, out, err)


class JailRun:
  """One run, from the fork to the last byte of its output."""

  def __init__(self, request: dict[str, Any], starter: Starter, template: Template):
    """Starts the program."""
    # --- Its limits, and its state so far.
    self.limits = wire.Limits.from_json(request["limits"])
    self.starter = starter
    self.template = template
    self.killed: wire.Verdict | None = None  # the sandbox's reason for a kill
    self.note = ""
    self.input = memoryview(request["stdin"].encode("utf-8", "replace"))

    # --- Its process and its pipes.
    self.start = time.monotonic()
    started = starter.start(request, self.limits)
    self.process = started.process
    self.input_fd = started.stdin
    outputs = started.stdout, started.stderr
    self.clips = {fd: wire.Clip(self.limits.output_bytes) for fd in outputs}
    for fd in (self.input_fd, *outputs):
      os.set_blocking(fd, False)
    # Descriptors that become readable at the end; one suffices.
    self.ends = [self.process]
    if started.cell_end >= 0:
      self.ends.append(started.cell_end)

  def finish(self, host: Host) -> wire.Result:
    """Serves the program until it ends, then kills its remaining processes.

    Raises:
      SystemExit: the host has gone; the program is dead by then.
    """
    try:
      self._pump(host)
    finally:
      ended = self._end()
    return self._result(*ended)

  def _end(self) -> tuple[int | None, float, float]:
    """Ends the run, closes descriptors; returns exit status, CPU and wall seconds."""
    code, cpu_s = self.starter.end()
    seconds = time.monotonic() - self.start
    os.close(self.process)
    self._close_input()
    for fd in self.clips:  # read the bytes left in the pipes
      while self._read(fd):
        pass
      os.close(fd)
    return code, cpu_s, seconds

  def _pump(self, host: Host) -> None:
    # --- The events: the program's end and output, and the host.
    poll = select.poll()
    for fd in (*self.ends, *self.clips, host.cancel):
      poll.register(fd, select.POLLIN)
    poll.register(host.requests, 0)  # even without flags, reports a hang-up
    if self.input:
      poll.register(self.input_fd, select.POLLOUT)
    else:
      self._close_input()

    # --- Serve until the program ends or must be killed.
    deadline = self.start + self.limits.wall_s
    sample = self.start + SAMPLE_S
    while True:
      left = min(deadline, sample) - time.monotonic()
      ready = dict(poll.poll(max(0, math.ceil(left * 1000))))
      if host.requests in ready:
        raise SystemExit("the host has gone")
      if host.cancel in ready:
        self.killed = wire.Verdict.INFRASTRUCTURE
        self.note = "[called off]\n"
        return None
      if self.input_fd in ready and not self._write():
        poll.unregister(self.input_fd)
        self._close_input()
      for fd in self.clips:
        if fd in ready and not self._read(fd):
          poll.unregister(fd)
      if any(fd in ready for fd in self.ends):
        return None
      # Read the clock after the check for the end: an ended program was in time.
      now = time.monotonic()
      if now >= deadline:
        self._condemn(wire.Verdict.TIMEOUT, f"{self.limits.wall_s:g} s")
        return self._ask_to_flush()
      if now >= sample:
        if self._over_limits():
          return None
        sample = time.monotonic() + SAMPLE_S

  def _ask_to_flush(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      signal.pidfd_send_signal(self.process, signal.SIGXCPU)
    poll = select.poll()
    poll.register(self.process, select.POLLIN)
    poll.poll(_FLUSH_S * 1000)

  def _over_limits(self) -> bool:
    use = descendants()
    # One process's memory at its start comes on top; its forks share these pages.
    most_bytes = (self.template.pages * _PAGE) + (self.limits.memory_mb << 20)
    if use.tasks > self.limits.processes:
      most = f"{self.limits.processes} processes and threads"
      self._condemn(wire.Verdict.ERROR, most)
    elif use.bytes > most_bytes and _held(use.pids) > most_bytes:
      self._condemn(wire.Verdict.MEMORY, f"{self.limits.memory_mb} MiB")
    elif os.getpid() == 1 and _sockets() > _SOCKETS:
      self._condemn(wire.Verdict.ERROR, f"{_SOCKETS} sockets")
    return self.killed is not None

  def _condemn(self, verdict: wire.Verdict, limit: str) -> None:
    self.killed = verdict
    self.note = f"[killed: used more than {limit}]\n"

  def _write(self) -> bool:
    """Feeds stdin; False if nothing is left to write or the reader is gone."""
    try:
      self.input = self.input[os.write(self.input_fd, self.input[:_CHUNK]) :]
    except BlockingIOError:
      return True
    except OSError:
      return False
    return len(self.input) > 0

  def _read(self, fd: int) -> bool:
    """Reads some output; False at its end, or if none is available."""
    try:
      data = os.read(fd, _CHUNK)
    except BlockingIOError:
      return False
    self.clips[fd].feed(data)
    return bool(data)

  def _close_input(self) -> None:
    if self.input_fd >= 0:
      os.close(self.input_fd)
      self.input_fd = -1

  def _result(self, code: int | None, cpu_s: float, seconds: float) -> wire.Result:
    (stdout, cut_out), (stderr, cut_err) = (c.text() for c in self.clips.values())
    cut = cut_out or cut_err

    # --- Cancelled or never started: no verdict on the program.
    failed = wire.Verdict.INFRASTRUCTURE
    if self.killed == failed:
      return wire.Result(stdout, stderr + self.note, None, failed, seconds, cut)
    if code is None and not self.killed:
      return wire.Result(stdout, stderr, None, failed, seconds, cut)

    # --- The kernel's report: an exit status, or the signal that killed it.
    if code is None:
      code = -signal.SIGKILL
    verdict = wire.Verdict.ERROR if code else wire.Verdict.OK

    # --- If a limit ended it, the limit overrides the status.
    limits = self.limits
    # A program's handler for the flush signal may exit with any status.
    if self.killed and (code < 0 or self.killed == wire.Verdict.TIMEOUT):
      verdict = self.killed
      stderr = stderr + self.note
    elif code in _CPU_SHARE and cpu_s > _CPU_SHARE[code] * limits.cpu_s:
      verdict = wire.Verdict.TIMEOUT
      # If both limits are equal, a busy program reaches both at about the same time:
      # the message must not depend on which came first.
      unit = "CPU s" if limits.cpu_s < limits.wall_s else "s"
      stderr += f"[killed: used more than {limits.cpu_s:g} {unit}]\n"
    elif code == -child.MEMORY_SIGNAL:
      verdict = wire.Verdict.MEMORY
      code = 1
    if verdict is wire.Verdict.TIMEOUT:  # the code must not depend on the flush either
      code = -signal.SIGKILL
    return wire.Result(stdout, stderr, code, verdict, seconds, cut)


@dataclasses.dataclass(frozen=True)
class Template:
  """This process's memory before a program adds to it."""

  bytes: int  # of address space
  pages: int  # resident

  @classmethod
  def measure(cls) -> Template:
    """Measures this process now."""
    with open("/proc/self/statm", encoding="ascii") as f:
      size, resident = f.read().split()[:2]
    return cls(int(size) * _PAGE, int(resident))


def serve(
  request: dict[str, Any],
  host: Host,
  starter: Starter,
  template: Template,
) -> None:
  """Runs a request's program and answers.

  Args:
    request: a frame read from `host.requests`.
    host: the requesting host.
    starter: starts and ends the program.
    template: each process's memory at its start.

  Raises:
    EOFError, SystemExit: the host has gone.
  """
  wire.write_frame(host.results, {"event": "started"})
  result = JailRun(request, starter, template).finish(host)
  wire.write_frame(host.results, {"event": "result", "result": result.to_json()})

"""One run, from its start to its answer, whatever walls stand around it.

Shared by `zygote` and, in a jail, the run's `inside`: feeds a program, reads what
it prints, ends it at its limits, and says how it ended.

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
# To write out its buffers when its time is up. It ends sooner if it can: this is for a
# crowded machine, where what it printed must not depend on its neighbours.
_FLUSH_S = 0.25
# Death by these signals is the kernel's limit on CPU seconds where so much of it is
# used. The limit counts by ticks: on a crowded core it ends programs too early.
_CPU_SHARE = {-signal.SIGXCPU: 0.5, -signal.SIGKILL: 0.9}
_SOCKETS = 512  # of a jailed run: the kernel's buffers of each take up to 0.2 MB
SAMPLE_S = 0.1  # how often a run's processes are counted; shorter runs never pay


@dataclasses.dataclass(frozen=True)
class _Use:
  """The processes below this one, their tasks, and an upper bound of their memory."""

  pids: list[int]
  tasks: int
  bytes: int


def descendants() -> _Use:
  """Finds every process below this one, wherever it has put itself."""
  # --- Every process: parent -> its children, with their threads and memory. From
  # /proc/*/status, for /proc/PID/task/TID/children is a kernel option that ordinary
  # machines lack. Zombies too: one whose threads live on looks the same as a dead one.
  own = os.getpid()
  children: dict[int, list[tuple[int, int, int]]] = {}
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    fields = _fields(name, "status", b"VmRSS")
    if b"Threads" not in fields:
      continue
    row = int(name), int(fields[b"Threads"]), _bytes(fields, b"VmRSS", b"VmSwap")
    # The first of a process namespace owns all of it, whoever made the others.
    if own != 1:
      children.setdefault(int(fields[b"PPid"]), []).append(row)
    elif name != "1":
      children.setdefault(1, []).append(row)

  # --- Those below this one, generation by generation.
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
  """Reads a file in /proc of a process, with a name and a value in each line.

  Of a process whose first thread has ended, another thread's: the first is a zombie
  then, without the memory that the others hold.

  Args:
    pid: the process.
    file: its name below /proc/PID.
    sign: a field that a thread with memory has.

  Returns what the first thread's has where no thread has such a field; {} if it ended.
  """
  first: dict[bytes, bytes] = {}
  folder = f"/proc/{pid}"
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):
    for thread in ("", *(f"task/{tid}/" for tid in os.listdir(f"{folder}/task"))):
      with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(f"{folder}/{thread}{file}", "rb") as f:
          pairs = [line.partition(b":") for line in f]
        fields = {name: value.strip() for name, _, value in pairs}
        # A thread of the kernel has no memory, and is no zombie.
        if sign in fields or not fields.get(b"State", b"Z").startswith(b"Z"):
          return first | fields
        first = first or fields
  return first


def _bytes(fields: dict[bytes, bytes], *names: bytes) -> int:
  """Adds up fields that are in kB; one that is not there counts nothing."""
  return sum(int(fields.get(name, b"0").split()[0]) for name in names) << 10


def _held(pids: list[int]) -> int:
  """Bytes of memory that processes hold together; pages they share count once."""
  size = 0
  for pid in pids:
    try:
      size += _bytes(_fields(pid, "smaps_rollup", b"Pss"), b"Pss", b"SwapPss")
    except PermissionError:  # it executes a file that it may not read
      size += _bytes(_fields(pid, "status", b"VmRSS"), b"VmRSS", b"VmSwap")
  return size


def _sockets() -> int:
  """Counts those of this process's network, which is the run's own in a jail."""
  with open("/proc/self/net/sockstat", encoding="ascii") as f:
    return int(f.readline().split()[2])


@dataclasses.dataclass(frozen=True)
class Host:
  """The pipes to the host.

  Attributes:
    requests: frames come from it; the host has gone when it hangs up.
    results: frames go to it.
    cancel: holds a byte from when the host calls the run off until it is answered. Only
      the host reads it.
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
  # Of a session, whose cells go to `stdin`: a byte comes from here at the end of each.
  cell_end: int = -1


class Starter(Protocol):
  """How a program is started, and how everything of it is ended."""

  def start(self, request: dict[str, Any], limits: wire.Limits) -> Started:
    """Starts a program."""

  def end(self) -> tuple[int | None, float]:
    """Leaves neither process nor file of the run.

    Returns its exit status (-N for signal N, None where it never began) and the CPU
    seconds it used.
    """


def make_pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
  """Makes a program's stdin, stdout and stderr, and our ends of them."""
  (stdin, feed), (out, stdout), (err, stderr) = (os.pipe() for _ in range(3))
  return (stdin, stdout, stderr), (feed, out, err)


class JailRun:
  """One run, from the fork to the last byte of its output."""

  def __init__(self, request: dict[str, Any], starter: Starter, template: Template):
    """Starts the program."""
    # --- What it may use, and what is known of it so far.
    self.limits = wire.Limits.from_json(request["limits"])
    self.starter = starter
    self.template = template
    self.killed: wire.Verdict | None = None  # what the sandbox killed it for
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
    # Descriptors of which any says that it is over.
    self.ends = [self.process]
    if started.cell_end >= 0:
      self.ends.append(started.cell_end)

  def finish(self, host: Host) -> wire.Result:
    """Serves the program until it ends, then leaves nothing of it alive.

    Raises:
      SystemExit: the host has gone; the program is dead by then.
    """
    try:
      self._pump(host)
    finally:
      ended = self._end()
    return self._result(*ended)

  def _end(self) -> tuple[int | None, float, float]:
    """Exit status, CPU and wall seconds; nothing of it lives, no descriptor is open."""
    code, cpu_s = self.starter.end()
    seconds = time.monotonic() - self.start
    os.close(self.process)
    self._close_input()
    for fd in self.clips:  # what the pipes still hold
      while self._read(fd):
        pass
      os.close(fd)
    return code, cpu_s, seconds

  def _pump(self, host: Host) -> None:
    # --- What is waited for: its end, its output, the host.
    poll = select.poll()
    for fd in (*self.ends, *self.clips, host.cancel):
      poll.register(fd, select.POLLIN)
    poll.register(host.requests, 0)  # reports its hang-up all the same
    if self.input:
      poll.register(self.input_fd, select.POLLOUT)
    else:
      self._close_input()

    # --- Until it ends, or has to.
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
      # After that: one that has ended was in time, however late it is noticed.
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
    # What one process begins with; of those that it forks these are the same pages.
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
    """Feeds stdin; False when there is no more to feed or nobody to read it."""
    try:
      self.input = self.input[os.write(self.input_fd, self.input[:_CHUNK]) :]
    except BlockingIOError:
      return True
    except OSError:
      return False
    return len(self.input) > 0

  def _read(self, fd: int) -> bool:
    """Reads some output; False at its end, or where there is none for now."""
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

    # --- It was called off, or never began: that says nothing of the program.
    failed = wire.Verdict.INFRASTRUCTURE
    if self.killed == failed:
      return wire.Result(stdout, stderr + self.note, None, failed, seconds, cut)
    if code is None and not self.killed:
      return wire.Result(stdout, stderr, None, failed, seconds, cut)

    # --- The kernel's word: an exit status, or the signal that it died of.
    if code is None:
      code = -signal.SIGKILL
    verdict = wire.Verdict.ERROR if code else wire.Verdict.OK

    # --- A limit's word counts for more, where a limit ended it.
    limits = self.limits
    # Its handler of the signal that asks it to flush may end it with any status.
    if self.killed and (code < 0 or self.killed == wire.Verdict.TIMEOUT):
      verdict = self.killed
      stderr = stderr + self.note
    elif code in _CPU_SHARE and cpu_s > _CPU_SHARE[code] * limits.cpu_s:
      verdict = wire.Verdict.TIMEOUT
      # Where both limits are one number, a busy program races towards both: what its
      # author reads must not say which of the two was first.
      unit = "CPU s" if limits.cpu_s < limits.wall_s else "s"
      stderr += f"[killed: used more than {limits.cpu_s:g} {unit}]\n"
    elif code == -child.MEMORY_SIGNAL:
      verdict = wire.Verdict.MEMORY
      code = 1
    if verdict is wire.Verdict.TIMEOUT:  # nor whether it ended when asked to
      code = -signal.SIGKILL
    return wire.Result(stdout, stderr, code, verdict, seconds, cut)


@dataclasses.dataclass(frozen=True)
class Template:
  """What this process holds before a program adds to it."""

  bytes: int  # of address space
  pages: int  # resident

  @classmethod
  def measure(cls) -> Template:
    """Measures this process, now."""
    with open("/proc/self/statm", encoding="ascii") as f:
      size, resident = f.read().split()[:2]
    return cls(int(size) * _PAGE, int(resident))


def serve(
  request: dict[str, Any],
  host: Host,
  starter: Starter,
  template: Template,
) -> None:
  """Runs what a request asks for, and answers.

  Args:
    request: a frame that was read from `host.requests`.
    host: who asks.
    starter: starts the program.
    template: what each process of it holds to begin with.

  Raises:
    EOFError, SystemExit: the host has gone.
  """
  wire.write_frame(host.results, {"event": "started"})
  result = JailRun(request, starter, template).finish(host)
  wire.write_frame(host.results, {"event": "result", "result": result.to_json()})

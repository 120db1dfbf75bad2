"""Serves runs inside a jailed slot: `zygote` with other walls.

Started by `keeper` inside the slot's namespaces: inside.py SYS_PATH CANCEL_FD MODULE...
Two processes live as long as the slot. This one, the first in its process namespace, is
thin: it clones an *init* for each run, ahead of the request, into the run's own
namespaces. The other, the *template*, has imported the modules: at each init's request
it forks a process into the init's namespaces, and the fork waits to become the program.

The init has pid 1 in the run's namespaces. It mounts the run's /proc, reads the
request, mounts the only writable folder, passes the program on, pumps the pipes and
answers the host. When the init ends, the kernel kills the rest of the run. The two
lasting processes never read a request or an output: the next run inherits the
template's memory and could search it for them. As the parent, the template reports the
program's end to the init in two numbers, exit status and CPU seconds.

An init that cannot continue writes the reason to stderr, the slot's log, and does not
answer; the slot then ends, and the host replaces it.

budget: the two processes of a slot and their messages to each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import mmap
import os
import resource
import select
import selectors
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

import child
import kernel
import landlock
import run
import seccomp
import session
import wire
import zygote

_HOME = "/tmp"  # a program's working directory and only writable folder
_UID = 1000  # a program's user id, as the program sees it
_PID = 2  # the program's pid: the first after its init's
_PROBE = "--probe"  # instead of modules: one run, then exit
_RLIMIT_SIGPENDING = 11  # Python has no name for it
_SIGNALS = 256  # the most pending signals and timers of a run
_ENDED = struct.Struct("id")  # exit status, CPU seconds
_RUN_NAMESPACES = kernel.ALL_NAMESPACES & ~kernel.NEWPID


class _Template:
  """The slot's handle on the process with the imported modules."""

  def __init__(self, modules: list[str], code: bytes):
    """Starts the process and waits for its imports.

    Args:
      modules: modules to import if installed.
      code: the programs' seccomp filter.

    Raises:
      EOFError: the process ended.
    """
    # Packets: any init may send an order, one byte with descriptors, at any time.
    self.orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
      self.orders.close()
      try:
        _fork_programs(orders, modules, code)
      except BaseException as e:
        _log("the template", e)
      os._exit(0)
    orders.close()
    self.process = os.pidfd_open(pid)
    sizes = self.orders.recv(_SIZES.size)
    if not sizes:
      raise EOFError("the template ended")
    self.holds = run.Template(*_SIZES.unpack(sizes))


_SIZES = struct.Struct("qq")  # a run.Template


def _log(who: str, error: BaseException) -> None:
  text = f"{who} failed: {type(error).__name__}: {error}\n"
  os.write(2, text.encode("ascii", "replace"))


@dataclasses.dataclass(frozen=True)
class _Walls:
  """The walls around every program of the slot."""

  filter: bytes  # of seccomp
  capabilities: list[int]  # to give up for good
  landlock: int  # its version, 0 if missing


def _fork_programs(orders: socket.socket, modules: list[str], code: bytes) -> None:
  """Runs in the template: forks at every init's request and reports each fork's end."""
  # The default was chosen for this process's system calls; programs have fewer.
  selectors.DefaultSelector = selectors.PollSelector
  _replace_shared_maps()
  template = zygote.warm_up(modules)
  kernel.collapse_pages()
  child.set_environment(_HOME)
  walls = _Walls(code, kernel.capabilities(), landlock.version())
  orders.send(_SIZES.pack(template.bytes, template.pages))
  poll = select.poll()
  poll.register(orders, select.POLLIN)
  alive: dict[int, tuple[int, int]] = {}  # pidfd -> pid, pipe to its init
  while True:
    for fd, _ in poll.poll():
      # --- A fork has ended: tell its init how.
      if fd in alive:
        pid, tell = alive.pop(fd)
        _, status, usage = os.wait4(pid, 0)
        cpu_s = usage.ru_utime + usage.ru_stime
        with contextlib.suppress(BrokenPipeError):  # its init has died
          os.write(tell, _ENDED.pack(os.waitstatus_to_exitcode(status), cpu_s))
        poll.unregister(fd)
        os.close(fd)
        os.close(tell)
        continue

      # --- An init asks for a fork, which starts in the init's process namespace.
      order, fds, _, _ = socket.recv_fds(orders, 1, 7)
      if not order:
        return  # the slot ends
      init, tell = fds[:2]
      try:
        kernel.join(init, kernel.NEWPID)
        pid = kernel.fork()
      except OSError as e:  # its init has died
        _log("a fork of the template", e)
        pid = -1
      if not pid:
        _wait_in(fds, walls, template.bytes)
      for other in (init, *fds[2:]):
        os.close(other)
      if pid < 0:
        os.close(tell)
        continue
      pidfd = os.pidfd_open(pid)
      alive[pidfd] = pid, tell
      poll.register(pidfd, select.POLLIN)


def _wait_in(fds: list[int], walls: _Walls, template_bytes: int) -> NoReturn:
  """Runs in a fork of the template: enters the run's namespaces, waits to begin."""
  # --- The walls that do not depend on the request.
  init, _, request, began, *pipes = fds
  try:
    kernel.join(init, _RUN_NAMESPACES)
    kernel.drop_bounding_set(walls.capabilities)
  except BaseException as e:
    _log("joining the run's init", e)
    os._exit(1)

  # --- Wait for the request; `began` signals that this process is reading it.
  def get() -> child.ProgramRequest:
    os.write(began, b"w")
    row = wire.read_frame(request)
    # If the group or the machine runs out of memory, programs die first. Set only now,
    # or a waiting process would be killed for the current run.
    with open("/proc/self/oom_score_adj", "wb", 0) as f:
      f.write(b"1000")
    cells = (request, began) if row["session"] else None
    if cells is None:
      os.close(request)
    limits = wire.Limits.from_json(row["limits"])
    os.chdir(_HOME)
    return child.ProgramRequest(row["program"], row["stdin"], limits, cells)

  confine = functools.partial(_confine, walls, began)
  inner = pipes[0], pipes[1], pipes[2]
  child.become_program(get, inner, template_bytes, confine, (request, began))


class _Jailed:
  """Starts the program of an init. See `run.Starter`."""

  def __init__(self, template: _Template):
    """Asks the template to fork the program's process.

    Raises:
      OSError: the template has ended, or could not fork into these namespaces.
    """
    self._template = template.process
    inner, self._outer = run.make_pipes()
    self._ended, tell = os.pipe()
    request, self._request = os.pipe()
    self._began, began = os.pipe()
    self._start = b""  # a session process's byte before its first cell
    init = os.pidfd_open(os.getpid())
    fds = [init, tell, request, began, *inner]
    socket.send_fds(template.orders, [b"f"], fds)
    for fd in fds:
      os.close(fd)
    if os.read(self._began, 1) != b"w":
      raise OSError("the template did not fork")
    # Opened while the fork waits: after its end the template reaps it.
    self._process = os.pidfd_open(_PID)

  def check(self) -> None:
    """Checks, before the run starts, that an earlier run has not damaged this one.

    Raises:
      OSError: when that run used up memory, the kernel killed this one's processes too.
    """
    if select.select([self._template, self._process], [], [], 0)[0]:
      raise OSError("killed with an earlier run, for want of memory")

  def start(self, request: dict[str, Any], limits: wire.Limits) -> run.Started:
    # First the folder, which the process enters as soon as it has its request.
    _give_files(limits)
    wire.write_frame(self._request, request)
    if not request["session"]:
      os.close(self._request)
      return run.Started(self._process, *self._outer)
    stdin, *outputs = self._outer
    os.close(stdin)  # cells see the end of the real standard input
    self._start = os.read(self._began, 1)
    return run.Started(self._process, self._request, *outputs, self._began)

  def end(self) -> tuple[int | None, float]:
    with contextlib.suppress(ProcessLookupError):
      os.kill(-1, signal.SIGKILL)  # all but this process, in one step
    code, cpu_s = _ENDED.unpack(os.read(self._ended, _ENDED.size))
    # This process has inherited the orphans.
    with contextlib.suppress(ChildProcessError):
      while True:
        os.wait4(-1, 0)
    # The program cannot forge this byte: the pipe was closed before its start.
    return (code if self._start or os.read(self._began, 1) else None), cpu_s


def _furnish() -> None:
  """Maps the run's user and mounts its /proc, in fresh namespaces."""
  kernel.map_ids(_UID, 0, 0)
  flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
  # Shows only the run's own processes, and nothing about the machine.
  kernel.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")


def _give_files(limits: wire.Limits) -> None:
  size = f"size={limits.disk_mb}m,nr_inodes={limits.inodes}"
  owner = f"mode=700,uid={_UID},gid={_UID}"
  flags = kernel.MS_NOSUID | kernel.MS_NODEV
  kernel.mount("tmpfs", _HOME, "tmpfs", flags, f"{size},{owner}")


def _confine(walls: _Walls, began: int, task: child.ProgramRequest) -> None:
  """Builds the last walls around the program; signals its start."""
  # Both limits count per user namespace: this run's processes plus the init.
  most = task.limits.processes + 1
  resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
  resource.setrlimit(_RLIMIT_SIGPENDING, (_SIGNALS, _SIGNALS))
  _tell_memory(task.limits.memory_mb)
  landlock.restrict(walls.landlock, _HOME, "/dev")
  kernel.set_filter(walls.filter)
  os.write(began, b"b")
  if task.cells is None:
    os.close(began)


def _tell_memory(mb: int) -> None:
  """Makes `os.sysconf` report the run's memory, by which libraries plan."""
  # The C library's own sysconf uses a system call that programs do not have.
  names = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
  spellings = {*names, *(os.sysconf_names[n] for n in names)}
  pages = (mb << 20) // os.sysconf("SC_PAGESIZE")
  ask = os.sysconf
  os.sysconf = lambda name: pages if name in spellings else ask(name)


def _replace_shared_maps() -> None:
  """Backs Python's shared anonymous maps with files, which the disk limit counts.

  The filter refuses real anonymous maps: see `seccomp._ANONYMOUS`.
  """

  class SharedMap(mmap.mmap):
    def __new__(cls, fileno, length, flags=mmap.MAP_SHARED, *more, **named):
      access = named.get("access", more[1] if len(more) > 1 else mmap.ACCESS_DEFAULT)
      private = flags & mmap.MAP_PRIVATE or access == mmap.ACCESS_COPY
      if fileno != -1 or private or length <= 0:
        return super().__new__(cls, fileno, length, flags, *more, **named)
      fd = os.open(_HOME, os.O_TMPFILE | os.O_RDWR, 0o600)
      try:
        os.posix_fallocate(fd, 0, length)  # a full disk is an error here, not a signal
        flags &= ~mmap.MAP_ANONYMOUS
        return super().__new__(cls, fd, length, flags, *more, **named)
      finally:
        os.close(fd)

  SharedMap.__name__ = SharedMap.__qualname__ = "mmap"
  SharedMap.__module__ = "mmap"
  mmap.mmap = SharedMap


class _Init:
  """The slot's handle on one init, made ahead of its request."""

  def __init__(self, host: run.Host, template: _Template):
    """Clones the init into new namespaces, where it waits for a request."""
    self._answers, answer = os.pipe()
    if not kernel.clone(kernel.ALL_NAMESPACES):
      os.close(self._answers)
      try:
        # Without handlers, signals from its own namespace cannot hurt pid 1.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._serve(host, template, answer)
      except BaseException as e:
        _log("the run's init", e)
      os._exit(0)
    os.close(answer)  # so that this process sees the init's end

  @staticmethod
  def _serve(host: run.Host, template: _Template, answer: int) -> None:
    # --- All steps before the request arrives.
    _furnish()
    starter = _Jailed(template)
    template.orders.close()
    # Touch the pages that serving will write, while nobody waits.
    wire.Limits.from_json(json.loads(json.dumps(wire.Limits().to_json())))

    # --- The request, and its answer.
    try:
      request = wire.read_frame(host.requests)
    except EOFError:
      return  # the host has gone
    starter.check()
    # Only after the read: the next init reads the same pipe.
    os.write(answer, b"s" if request["session"] else b"r")
    serve = session.serve if request["session"] else run.serve
    serve(request, host, starter, template.holds)
    os.write(answer, b"a")

  def request(self) -> str:
    """Waits for the request; returns "run" or "session", "" if none will come."""
    return {b"r": "run", b"s": "session"}.get(os.read(self._answers, 1), "")

  def answered(self) -> bool:
    """Waits for the run's end; returns False if the init could not answer."""
    answered = os.read(self._answers, 1) == b"a"
    os.close(self._answers)
    return answered


def _serve(host: run.Host, template: _Template) -> None:
  """Serves each request with its own init until the host closes the pipe."""
  spare = _Init(host, template)
  while kind := spare.request():
    running = spare
    if kind == "run":
      # Made while another core runs the program: takes half of a short run's time.
      spare = _Init(host, template)
    if not running.answered():
      return  # the pipes may hold unknown leftovers
    if kind == "session":  # not earlier: the cells came through the same pipe
      spare = _Init(host, template)
    # Reap inits whose namespaces are gone; of the last run only its init remains.
    while os.waitpid(-1, os.WNOHANG)[0]:
      pass


def _probe(code: bytes) -> NoReturn:
  """Runs an empty program once; exits with 0 if the jail could be built."""
  (requests, ask), (answer, results), (cancel, _) = (os.pipe() for _ in range(3))
  template = _Template([], code)
  init = _Init(run.Host(requests, results, cancel), template)
  limits = wire.Limits().to_json()
  request = {"program": "", "stdin": "", "limits": limits, "session": False}
  wire.write_frame(ask, request)
  if not (init.request() and init.answered()):
    os._exit(1)
  wire.read_frame(answer)
  result = wire.Result.from_json(wire.read_frame(answer)["result"])
  os.write(2, result.stderr.encode("utf-8", "replace"))
  os._exit(result.verdict != wire.Verdict.OK)


def main() -> None:
  """Serves runs until the host closes stdin."""
  path, cancel, *modules = sys.argv[1:]
  own = ("wire", "child", "kernel", "landlock", "run", "seccomp", "session", "zygote")
  requests, results = zygote.take_pipes(own)
  sys.path[:] = path.split(":")
  child.set_dumpable(False)
  code = seccomp.build()
  if modules == [_PROBE]:
    _probe(code)
  template = _Template(modules, code)
  gc.freeze()
  gc.disable()  # here and in inits: a collection would write to every page
  wire.write_frame(results, {"event": "ready"})
  _serve(run.Host(requests, results, int(cancel)), template)


if __name__ == "__main__":
  main()

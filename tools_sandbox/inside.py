"""The template of a jailed slot, and the init of each run: `zygote` with other walls.

Started by `jail` inside the slot's namespaces: inside.py SYS_PATH MODULE...
Each run is a clone of this process into namespaces of its own, where it is pid 1: the
init. It mounts the run's /proc and its only writable place, forks the program, and
tells the template how that ended over a pipe that the program does not have. When the
init dies, the kernel kills all that is left of the run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

import child
import kernel
import seccomp
import wire
import zygote

_HOME = "/tmp"  # of a program: working directory, and the only place it may write to
_UID = 1000  # of a program, as it sees itself
_STATUS = struct.Struct("=?id")  # began, wait status, CPU seconds
_PROBE = "--probe"  # instead of modules: one run, and out


class Jailed:
  """Starts programs in namespaces of their own. See `zygote.Starter`."""

  def __init__(self) -> None:
    self._filter = seccomp.build()
    self._status = -1

  def start(
    self,
    request: dict[str, Any],
    pipes: tuple[int, int, int],
    limits: wire.Limits,
    template_bytes: int,
  ) -> int:
    self._status, report = os.pipe()
    pid = kernel.clone(kernel.ALL_NAMESPACES)
    if not pid:
      self._be_init(request, pipes, limits, template_bytes, report)
    os.close(report)
    return pid

  def ask_to_flush(self, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGTERM)

  def end(self, pid: int) -> tuple[int | None, float]:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # returns when everything of its process namespace is dead
    data = os.read(self._status, _STATUS.size)
    os.close(self._status)
    if len(data) != _STATUS.size:
      return None, 0.0
    began, status, cpu_s = _STATUS.unpack(data)
    return (os.waitstatus_to_exitcode(status) if began else None), cpu_s

  def clean(self) -> None:
    """Nothing to do: the run's files went with its mount namespace."""

  def _be_init(
    self,
    request: dict[str, Any],
    pipes: tuple[int, int, int],
    limits: wire.Limits,
    template_bytes: int,
    report: int,
  ) -> NoReturn:
    try:
      # Handlers of the template; a pid 1 without one cannot be hurt from inside.
      signal.signal(signal.SIGINT, signal.SIG_DFL)
      _furnish(limits)
      began, tell = os.pipe()
      pid = os.fork()
      if not pid:
        confine = functools.partial(_confine, self._filter, limits, tell)
        program, stdin = request["program"], request["stdin"]
        child.become_program(
          program, stdin, _HOME, pipes, limits, template_bytes, confine, tell
        )
      os.close(tell)
      for fd in pipes:
        os.close(fd)
      signal.signal(signal.SIGTERM, functools.partial(_pass_on, pid))
      status, cpu_s = _wait(pid)
      data = _STATUS.pack(os.read(began, 1) == b"b", status, cpu_s)
      os.write(report, data)
    except BaseException as e:
      text = f"cannot build the run's namespaces: {type(e).__name__}: {e}\n"
      os.write(pipes[2], text.encode("ascii", "replace"))
    os._exit(0)


def _furnish(limits: wire.Limits) -> None:
  """Maps the run's user and mounts what is its own; in a fresh set of namespaces."""
  kernel.map_ids(_UID, 0, 0)
  flags = kernel.MS_NOSUID | kernel.MS_NODEV
  kernel.mount(
    "tmpfs",
    _HOME,
    "tmpfs",
    flags,
    f"size={limits.disk_mb}m,nr_inodes={limits.inodes},mode=700,uid={_UID},gid={_UID}",
  )
  # Only processes, and of those only its own: nothing about the machine.
  options = "subset=pid,hidepid=invisible"
  kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC, options)
  kernel.drop_bounding_set()


def _confine(code: bytes, limits: wire.Limits, tell: int) -> None:
  """The last walls around the program; says that it begins."""
  # Counted per user namespace: those of this run, of which one is the init.
  resource.setrlimit(
    resource.RLIMIT_NPROC, (limits.processes + 1, limits.processes + 1)
  )
  kernel.set_filter(code)
  os.write(tell, b"b")
  os.close(tell)


def _pass_on(pid: int, number: int, frame: Any) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, signal.SIGXCPU)


def _wait(pid: int) -> tuple[int, float]:
  """Reaps orphans until the program itself ends: its wait status and CPU seconds."""
  while True:
    done, status, usage = os.wait4(-1, 0)
    if done == pid:
      return status, usage.ru_utime + usage.ru_stime


def _probe(starter: Jailed) -> None:
  """One run of an empty program, on this process's own streams."""
  request = {"program": "", "stdin": ""}
  streams = tuple(os.dup(2) for _ in range(3))
  pid = starter.start(request, streams, wire.Limits(), 1 << 32)
  os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
  code, _ = starter.end(pid)
  os._exit(0 if code == 0 else 1)


def main() -> None:
  """Serves runs until the host closes stdin."""
  path, *modules = sys.argv[1:]
  own = ("wire", "child", "kernel", "seccomp", "zygote")
  requests, results = zygote.take_pipes(own)
  sys.path[:] = path.split(":")
  child.set_dumpable(False)
  starter = Jailed()
  if modules == [_PROBE]:
    _probe(starter)
  with contextlib.suppress(EOFError, SystemExit):
    zygote.serve(requests, results, starter, modules)


if __name__ == "__main__":
  main()

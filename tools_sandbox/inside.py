"""The template of a jailed slot, and the init of each run: `zygote` with other walls.

Started by `jail` inside the slot's namespaces: inside.py SYS_PATH MODULE...
Each run is a clone of this process into namespaces of its own, where it is pid 1: the
init. It reads the request, mounts the run's /proc and its only writable place, forks
the program, pumps its pipes and answers the host; when it ends, the kernel kills all
that is left of the run. The template itself never reads a request or an output: the
next run, which inherits its memory, could search it for them.

An init that cannot go on says why on stderr, the slot's log, and does not answer; the
template then ends, and the host replaces the slot.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

import child
import kernel
import seccomp
import wire
import zygote

_HOME = "/tmp"  # of a program: working directory, and the only place it may write to
_UID = 1000  # of a program, as it sees itself
_PROBE = "--probe"  # instead of modules: one run, and out


class _Jailed:
  """Starts a program; only for an init. See `zygote.Starter`."""

  def __init__(self, code: bytes):
    """Args: code: the program's seccomp filter."""
    self._code = code
    self._began = -1

  def start(
    self,
    request: dict[str, Any],
    pipes: tuple[int, int, int],
    limits: wire.Limits,
    template_bytes: int,
  ) -> int:
    _give_files(limits)
    self._began, tell = os.pipe()
    pid = os.fork()
    if not pid:
      confine = functools.partial(_confine, self._code, limits, tell)
      program, stdin = request["program"], request["stdin"]
      child.become_program(
        program, stdin, _HOME, pipes, limits, template_bytes, confine, tell
      )
    os.close(tell)
    return pid

  def end(self, pid: int) -> tuple[int | None, float]:
    with contextlib.suppress(ProcessLookupError):
      os.kill(-1, signal.SIGKILL)  # all but this process, in one step
    code, cpu_s = 0, 0.0
    while True:
      try:
        done, status, usage = os.wait4(-1, 0)
      except ChildProcessError:
        break
      if done == pid:
        code = os.waitstatus_to_exitcode(status)
        cpu_s = usage.ru_utime + usage.ru_stime
    # Not the program's to say: the pipe was closed before it began.
    return (code if os.read(self._began, 1) else None), cpu_s


def _furnish() -> None:
  """Maps the run's user and mounts its /proc; in a fresh set of namespaces."""
  kernel.map_ids(_UID, 0, 0)
  flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
  # Only processes, and of those only its own: nothing about the machine.
  kernel.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=invisible")
  kernel.drop_bounding_set()


def _give_files(limits: wire.Limits) -> None:
  size = f"size={limits.disk_mb}m,nr_inodes={limits.inodes}"
  owner = f"mode=700,uid={_UID},gid={_UID}"
  flags = kernel.MS_NOSUID | kernel.MS_NODEV
  kernel.mount("tmpfs", _HOME, "tmpfs", flags, f"{size},{owner}")


def _confine(code: bytes, limits: wire.Limits, tell: int) -> None:
  """The last walls around the program; says that it begins."""
  # Counted per user namespace: those of this run, of which one is the init.
  most = limits.processes + 1
  resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
  kernel.set_filter(code)
  os.write(tell, b"b")
  os.close(tell)


class _Init:
  """The template's handle on one init, made ahead of the request that it will serve."""

  def __init__(
    self, requests: int, results: int, code: bytes, template: zygote.Template
  ):
    """Clones it into new namespaces, where it waits for `go`."""
    wait, self._go = os.pipe()
    self._answered, answered = os.pipe()
    if not kernel.clone(kernel.ALL_NAMESPACES):
      os.close(self._go)
      try:
        # A pid 1 without handlers cannot be hurt by signals of its namespace.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _furnish()
        # Copies the pages that serving will write to while nobody waits for it.
        wire.Limits.from_json(json.loads(json.dumps(wire.Limits().to_json())))
        if os.read(wait, 1):
          zygote.serve_one(requests, results, _Jailed(code), template)
          os.write(answered, b"a")
      except BaseException as e:
        text = f"the run's init failed: {type(e).__name__}: {e}\n"
        os.write(2, text.encode("ascii", "replace"))
      os._exit(0)
    os.close(wait)
    os.close(answered)

  def go(self) -> None:
    """Lets it read a request."""
    with contextlib.suppress(BrokenPipeError):  # then it will not have answered
      os.write(self._go, b"g")
    os.close(self._go)

  def answered(self) -> bool:
    """Waits for its run to end; False if it could not answer."""
    answered = os.read(self._answered, 1) == b"a"
    os.close(self._answered)
    return answered


def _serve(requests: int, results: int, code: bytes, template: zygote.Template) -> None:
  """Has an init serve every request that comes, until there will be no more."""
  poll = select.poll()
  poll.register(requests, select.POLLIN)
  spare = _Init(requests, results, code, template)
  while poll.poll()[0][1] & select.POLLIN:
    running = spare
    running.go()
    # Made while another core runs the program: a third of a short run's time.
    spare = _Init(requests, results, code, template)
    if not running.answered():
      return  # nobody knows what it left in the pipes
    # Those whose namespaces are gone; of the last one nothing but the init is left.
    while os.waitpid(-1, os.WNOHANG)[0]:
      pass


def _probe(code: bytes) -> NoReturn:
  """One run of an empty program; ends with 0 where it could be built."""
  (requests, ask), (answer, results) = os.pipe(), os.pipe()
  init = _Init(requests, results, code, zygote.Template.measure())
  limits = wire.Limits().to_json()
  wire.write_frame(ask, {"program": "", "stdin": "", "limits": limits})
  init.go()
  if not init.answered():
    os._exit(1)
  wire.read_frame(answer)
  result = wire.Result.from_json(wire.read_frame(answer)["result"])
  os.write(2, result.stderr.encode("utf-8", "replace"))
  os._exit(result.verdict != wire.Verdict.OK)


def main() -> None:
  """Serves runs until the host closes stdin."""
  path, *modules = sys.argv[1:]
  own = ("wire", "child", "kernel", "seccomp", "zygote")
  requests, results = zygote.take_pipes(own)
  sys.path[:] = path.split(":")
  child.set_dumpable(False)
  code = seccomp.build()
  if modules == [_PROBE]:
    _probe(code)
  template = zygote.warm_up(modules)
  wire.write_frame(results, {"event": "ready"})
  _serve(requests, results, code, template)


if __name__ == "__main__":
  main()

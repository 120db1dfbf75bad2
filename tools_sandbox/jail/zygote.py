"""The zygote: a process that imports numpy and sympy once and forks for every run.

Started by `slot` as its own program: zygote.py DIRECTORY HOST_PID CANCEL_FD MODULE...
In a jail, `inside` replaces the zygote and starts and kills programs its own way. Both
answer on stdin and stdout with `wire` frames, until stdin closes:

  zygote -> host   {"event": "ready"}                     once
  host -> zygote   {"program", "stdin", "limits"}         per run
  zygote -> host   {"event": "started"}                   before the fork
  zygote -> host   {"event": "result", "result": ...}     when no process is left

Linux only: it needs /proc, pidfd_open and the child-subreaper attribute.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

# This file's folder leads sys.path, as for any program; `take_pipes` removes it.
import child
import run
import wire

_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 0.0005


def _end_all(pid: int) -> tuple[int, float]:
  """Kills and reaps all descendants; as a subreaper, this process inherits daemons.

  Returns the exit status of `pid` (-N for signal N) and its CPU seconds.
  """
  with contextlib.suppress(ProcessLookupError):  # before the child has its own group
    os.killpg(pid, signal.SIGKILL)  # atomic: no fork escapes within the group
  code = 0
  cpu = 0.0
  while True:
    try:
      done, status, usage = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
      return code, cpu
    if done == pid:
      code = os.waitstatus_to_exitcode(status)
      cpu = usage.ru_utime + usage.ru_stime
    elif not done:
      # Repeated: a process may start while the others are listed.
      for straggler in run.descendants().pids:
        with contextlib.suppress(ProcessLookupError):
          os.kill(straggler, signal.SIGKILL)
      time.sleep(_REAP_S)


class _Plain:
  """Starts programs in host directories, without a jail. See `run.Starter`."""

  def __init__(self, directory: str, template: run.Template):
    self._directory = directory
    self._template = template
    self._path = ""
    self._pid = 0
    self._numbers = itertools.count()

  def start(self, request: dict[str, Any], limits: wire.Limits) -> run.Started:
    self._path = os.path.join(self._directory, f"run-{next(self._numbers)}")
    os.mkdir(self._path, 0o700)
    inner, outer = run.make_pipes()
    zygote = os.getpid()
    self._pid = os.fork()
    if not self._pid:
      task = child.ProgramRequest(request["program"], request["stdin"], limits)

      def get() -> child.ProgramRequest:
        child.die_with_parent(zygote, signal.SIGKILL)
        os.chdir(self._path)
        child.set_environment(self._path)
        return task

      child.become_program(get, inner, self._template.bytes)
    for fd in inner:
      os.close(fd)
    return run.Started(os.pidfd_open(self._pid), *outer)

  def end(self) -> tuple[int | None, float]:
    code, cpu_s = _end_all(self._pid)
    _remove(self._path)
    return (None if code == -child.SETUP_SIGNAL else code), cpu_s


def _remove(directory: str) -> None:
  """Removes a run's directory, whatever the program did to it.

  Raises:
    subprocess.CalledProcessError: something is left; the slot is unusable.
  """
  try:
    os.rmdir(directory)  # most programs write nothing
  except OSError:
    # Folders without rights, or nested deeper than shutil.rmtree can recurse.
    subprocess.run(["chmod", "-R", "u+rwX", directory], check=False)
    subprocess.run(["rm", "-rf", "--", directory], check=True)


def warm_up(modules: list[str]) -> run.Template:
  """Imports the installed modules; measures a program's memory at its start."""
  for module in modules:
    with contextlib.suppress(ModuleNotFoundError):
      importlib.import_module(module)
  gc.collect()
  gc.freeze()  # a child's collections then leave the shared pages alone
  return run.Template.measure()


def take_pipes(own_modules: tuple[str, ...]) -> tuple[int, int]:
  """Moves the frames' pipes away from 0 and 1, and hides this package's modules."""
  # Programs and imports must not write to the frames' descriptor.
  requests = os.dup(0)
  results = os.dup(1)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  del sys.path[0]
  for name in own_modules:  # a program may have modules of these names
    del sys.modules[name]
  return requests, results


def main() -> None:
  """Serves runs until the host closes stdin."""
  directory, host, cancel, *modules = sys.argv[1:]
  requests, results = take_pipes(("wire", "child", "run"))
  pipes = run.Host(requests, results, int(cancel))
  hung_up, writer = os.pipe()
  os.close(writer)

  def leave(number: int, frame: Any) -> None:
    # For a dead host whose forked process keeps our pipe open. Handled as a hang-up,
    # because an exception here could strike during clean-up. The kernel also sends this
    # signal if only the thread that started us has ended.
    if os.getppid() != int(host):
      os.dup2(hung_up, requests)

  signal.signal(signal.SIGTERM, leave)
  child.die_with_parent(int(host), signal.SIGTERM)
  child.prctl(_PR_SET_CHILD_SUBREAPER, 1)
  child.set_dumpable(False)
  try:
    template = warm_up(modules)
    starter = _Plain(directory, template)
    wire.write_frame(results, {"event": "ready"})
    while True:
      request = wire.read_frame(requests)
      run.serve(request, pipes, starter, template)
  except (EOFError, SystemExit):
    # The host died without `kill`: nobody else would remove the directory.
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
  main()

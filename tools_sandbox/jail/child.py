"""The forked child: drops inherited resources, then becomes the program.

Runs only in a process that the zygote forked for one run. Its reports are not trusted:
the zygote reads the verdict from waitpid. Two reserved signals, which end no program by
accident, report a MemoryError and a failed set-up: programs keep all exit statuses.

budget: the steps that confine a child, in their safe order.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import io
import itertools
import linecache
import math
import os
import re
import resource
import signal
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import wire

NAME = "<program>"
MEMORY_SIGNAL = signal.SIGRTMAX  # the program ended with MemoryError
SETUP_SIGNAL = signal.SIGRTMAX - 1  # the child never became the program

# File names of source texts: the program's, and each cell's in a session.
_sources = {NAME}
_FRAMES = 5  # the last frames of a traceback help a model most
_STACK_BYTES = 64 << 20  # for ordinary programs' deep C recursion; grows on demand
# Address space kept free to report a MemoryError.
_RESERVE_BYTES = 32 << 20
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CAPSET_HEADER = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
_NO_CAPABILITIES = bytes(24)
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
  """Calls prctl(2).

  Raises:
    OSError: the kernel refused.
  """
  if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
    number = ctypes.get_errno()
    raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int, number: int) -> None:
  """Asks for signal `number` when process `parent` ends; exits if it has ended."""
  prctl(_PR_SET_PDEATHSIG, number)
  if os.getppid() != parent:
    os._exit(1)


def set_dumpable(dumpable: bool) -> None:
  """Sets whether processes without capabilities may open this one's /proc files."""
  prctl(_PR_SET_DUMPABLE, int(dumpable))


@dataclasses.dataclass(frozen=True)
class ProgramRequest:
  """The program that a child runs, with its limits.

  Attributes:
    program: Python source.
    seed_text: seeds the random generators together with `program`, unless the limits
      hold a seed.
    limits: the program's limits.
    cells: for a session: a pipe with cells as frames, and a pipe for one byte, the exit
      status, at each cell's end.
  """

  program: str
  seed_text: str
  limits: wire.Limits
  cells: tuple[int, int] | None = None


def become_program(
  get: Callable[[], ProgramRequest],
  pipes: tuple[int, int, int],
  template_bytes: int,
  confine: Callable[[ProgramRequest], None] | None = None,
  keep_fds: Collection[int] = (),
) -> NoReturn:
  """Runs a program as `__main__` in this process and ends the process.

  Args:
    get: waits for the request and enters the working directory; all steps independent
      of the request run before.
    pipes: descriptors that become the program's stdin, stdout and stderr.
    template_bytes: the template's address space, which the memory limit leaves out.
    confine: the last step before the program.
    keep_fds: descriptors that `get` and `confine` use and close, except a session's.
  """
  # --- Get ready, then wait for the program.
  try:
    _enter(pipes, keep_fds)
    _drop_privileges()
    _open_streams()
    task = get()

    # --- This run's limits, seed and clock, and the last walls.
    _limit(task.limits, template_bytes)
    seed = task.limits.seed
    clock_s = task.limits.clock_s
    _reseed(task.program + "\0" + task.seed_text if seed is None else str(seed))
    if clock_s is not None:
      _stop_clock(clock_s)
    if confine is not None:
      confine(task)
  except BaseException as e:
    os.write(2, f"cannot set up the run: {e!r}\n".encode("ascii", "replace"))
    _end_by(SETUP_SIGNAL)

  # --- Hand over to the program; afterwards this code only ends the process.
  if task.cells is not None:
    try:
      _run_cells(*task.cells)
    finally:  # whatever the program does to its pipes: never return to our code
      os._exit(1)
  code, out_of_memory = _run(task.program)
  if out_of_memory:
    _end_by(MEMORY_SIGNAL)
  os._exit(code)


def _end_by(number: int) -> NoReturn:
  signal.signal(number, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
  os.kill(os.getpid(), number)
  os._exit(1)


def _enter(pipes: tuple[int, int, int], keep_fds: Collection[int]) -> None:
  os.setsid()
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  for target, fd in enumerate(pipes):
    os.dup2(fd, target)
  close_all_but({0, 1, 2, *keep_fds})
  os.umask(0o077)


def close_all_but(keep_fds: Collection[int]) -> None:
  """Closes all other descriptors of this process."""
  for name in os.listdir("/proc/self/fd"):
    if int(name) not in keep_fds:
      with contextlib.suppress(OSError):  # the listing's own, closed already
        os.close(int(name))


def set_environment(directory: str) -> None:
  """Clears the host's variables; `directory` becomes home and temporary folder."""
  libraries = os.environ.get("LD_LIBRARY_PATH")  # a jailed interpreter needs it
  os.environ.clear()
  # Temporary files land in the run's directory, and are removed with the run.
  os.environ.update(HOME=directory, TMPDIR=directory)
  if libraries is not None:
    os.environ["LD_LIBRARY_PATH"] = libraries
  if "tempfile" in sys.modules:
    sys.modules["tempfile"].tempdir = None


def _limit(limits: wire.Limits, template_bytes: int) -> None:
  memory = template_bytes + (limits.memory_mb << 20)
  cpu = math.ceil(limits.cpu_s)
  file_bytes = limits.file_mb << 20
  bounds = {
    resource.RLIMIT_CPU: (cpu, cpu + 1),  # SIGXCPU may be caught; SIGKILL follows
    resource.RLIMIT_AS: (memory, memory + _RESERVE_BYTES),
    resource.RLIMIT_FSIZE: (file_bytes, file_bytes),
    resource.RLIMIT_CORE: (0, 0),
    resource.RLIMIT_NOFILE: (256, 256),
    resource.RLIMIT_STACK: (_STACK_BYTES, _STACK_BYTES),
  }
  # No RLIMIT_NPROC: the kernel counts all the user's processes, the host and other
  # slots included, and never applies the limit to root. The zygote counts instead.
  for resource_type, (soft, hard) in bounds.items():
    ceiling = resource.getrlimit(resource_type)[1]
    if ceiling != resource.RLIM_INFINITY:
      soft = min(soft, ceiling)
      hard = min(hard, ceiling)
    resource.setrlimit(resource_type, (soft, hard))


def _drop_privileges() -> None:
  # Without capabilities even root cannot raise its limits, or open the zygote's pipes
  # (the zygote is not dumpable) to write its own result.
  prctl(_PR_SET_NO_NEW_PRIVS, 1)
  if _libc.capset(_CAPSET_HEADER, _NO_CAPABILITIES) != 0:
    raise OSError(ctypes.get_errno(), "capset")
  set_dumpable(True)  # its own /proc/self/fd, and so /dev/stdin


def _open_streams() -> None:
  # New streams: the zygote's may hold text, and have the host's encoding.
  stream = functools.partial(open, encoding="utf-8", closefd=False)
  sys.stdin = sys.__stdin__ = stream(0, errors="surrogateescape")
  sys.stdout = sys.__stdout__ = stream(1, "w", errors="surrogateescape")
  sys.stderr = sys.__stderr__ = stream(2, "w", 1, errors="backslashreplace")


def _reseed(text: str) -> None:
  # The same call draws the same numbers in every slot, so a trajectory does not depend
  # on its slot; different programs draw different numbers. blake2b avoids OpenSSL,
  # which costs every run a third of a millisecond to start.
  hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
  seed = int.from_bytes(hashed[:4], "big")
  for name in ("random", "numpy.random", "sympy.core.random"):
    if name in sys.modules:
      sys.modules[name].seed(seed)


def _stop_clock(clock_s: float) -> None:
  """Makes Python's clock return one time; C code still sees the real time."""
  import datetime  # both imported here: few runs need them
  import time

  def at(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda seconds=None: function(clock_s if seconds is None else seconds)

  local = time.localtime
  text = time.asctime
  form = time.strftime
  changes = {name: at(getattr(time, name)) for name in ("localtime", "gmtime", "ctime")}
  changes["time"] = lambda: float(clock_s)
  changes["time_ns"] = lambda: int(clock_s * 10**9)
  changes["asctime"] = lambda t=None: text(local(clock_s) if t is None else t)
  changes["strftime"] = lambda f, t=None: form(f, local(clock_s) if t is None else t)
  for name, function in changes.items():
    setattr(time, name, function)
  # `today` calls time.time. The other methods ask the kernel, and their built-in type's
  # attributes cannot be set, while imported modules hold references to the type.
  (names,) = gc.get_referents(datetime.datetime.__dict__)
  names["now"] = classmethod(lambda cls, tz=None: cls.fromtimestamp(clock_s, tz))
  names["utcnow"] = classmethod(lambda cls: cls.utcfromtimestamp(clock_s))
  ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


def _run(program: str) -> tuple[int, bool]:
  """Executes the program; returns its exit status and whether memory ran out."""
  names = _become_main()
  stdout = sys.stdout
  stderr = sys.stderr
  code, out_of_memory = _execute(program, NAME, names)
  # The interpreter's steps at exit, without its teardown, which costs more than most
  # programs.
  for step in (threading._shutdown, atexit._run_exitfuncs, stdout.flush, stderr.flush):
    # Ignores closed streams and raising hooks: they do not change the status.
    with contextlib.suppress(BaseException):
      step()
  return code, out_of_memory


def _run_cells(cells: int, tell: int) -> None:
  """Executes a session's cells until the init ends this process.

  The program controls this process from its first cell on. At most it can report an
  early end or a false exit status, for its own cells only.
  """
  names = _become_main()
  stdout = sys.stdout
  stderr = sys.stderr
  own = os.getpid()
  for number in itertools.count(1):
    cell = wire.read_frame(cells)
    program = cell["program"]
    sys.stdin = io.StringIO(cell["stdin"])
    code, out_of_memory = _execute(program, f"<cell {number}>", names)
    for stream in (stdout, stderr, sys.stdout, sys.stderr):
      with contextlib.suppress(BaseException):
        stream.flush()
    if out_of_memory:
      _end_by(MEMORY_SIGNAL)
    if os.getpid() != own:  # a fork reached the end of its cell
      os._exit(code)
    os.write(tell, bytes([code]))


def _become_main() -> dict[str, Any]:
  """Makes this process look like a fresh interpreter; returns `__main__`'s names."""
  main = types.ModuleType("__main__")
  main.__dict__.update(__file__=NAME, __builtins__=builtins)
  sys.modules["__main__"] = main
  sys.argv = [NAME]
  sys.path.insert(0, "")
  sys.excepthook = _report
  threading.excepthook = lambda e: _report(e.exc_type, e.exc_value, e.exc_traceback)
  signal.signal(signal.SIGXCPU, _out_of_time)
  return main.__dict__


def _execute(program: str, name: str, names: dict[str, Any]) -> tuple[int, bool]:
  """Executes source named `name`; returns exit status and whether memory ran out."""
  _sources.add(name)
  linecache.cache[name] = (len(program), None, program.splitlines(True), name)
  code = 0
  out_of_memory = False
  try:
    exec(compile(program, name, "exec", dont_inherit=True), names)
  except SystemExit as e:
    code = _exit_status(e.code)
  except BaseException as e:
    code = 1
    out_of_memory = isinstance(e, MemoryError)
    if out_of_memory:
      hard = resource.getrlimit(resource.RLIMIT_AS)[1]
      resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
      sys.excepthook(type(e), e, e.__traceback__)
    except BaseException:  # the exception cannot be printed, or the hook is broken
      os.write(2, f"{type(e).__name__}\n".encode("ascii", "replace"))
  return code, out_of_memory


def _out_of_time(number: int, frame: types.FrameType | None) -> NoReturn:
  # Flush the output printed before a hang: its author wants to see it.
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(BaseException):  # interrupted inside a write, or closed
      stream.flush()
  _end_by(number)


def _exit_status(code: object) -> int:
  if code is None:
    return 0
  if isinstance(code, int):
    return code & 0xFF
  print(code, file=sys.stderr)
  return 1


def _report(
  kind: type[BaseException], value: BaseException, tb: types.TracebackType | None
) -> None:
  """Prints a short traceback to stderr: the program's own frames, no host paths."""
  here = os.getcwd() + os.sep
  frames = []
  for frame in traceback.extract_tb(tb):
    if frame.filename in _sources or frame.filename.startswith(here):
      frame.filename = frame.filename.removeprefix(here)
      frames.append(frame)
  lines = []
  if frames:
    lines.append("Traceback (most recent call last):\n")
    if len(frames) > _FRAMES:
      lines.append(f"  ... {len(frames) - _FRAMES} frames ...\n")
    lines += traceback.StackSummary.from_list(frames[-_FRAMES:]).format()
  lines += traceback.format_exception_only(kind, value)
  text = "".join(lines).replace(here, "")
  for path in {sys.prefix, sys.base_prefix, "/site"}:
    text = re.sub(re.escape(path) + r"[^\s'\")]*/", "", text)
  sys.stderr.write(text)

"""What every launcher does before its journey: flags, config, compile cache, errors."""

from __future__ import annotations

import ast
import ctypes
import json
import logging as python_logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_dict import RequiredValueError

from coa_jax import disk
from coa_jax.config import ConfigError
from coa_jax.learner.interruption import Interrupted
from experiments import distributed
from experiments.refusal import stop

Journey = Callable[[ml_collections.ConfigDict, str], dict[str, Any]]

COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "xla"),
  "Folder of compiled programs, kept between runs; empty turns it off.",
)

CPU_DEVICES = flags.DEFINE_integer(
  "cpu_devices",
  1,
  "Devices that a CPU is split into for section mesh: with as many as it has cores "
  "small models sample up to 1.6 times as fast, each on slots of its own.",
  lower_bound=1,
  upper_bound=1024,
)


def launch(journey: Journey) -> None:
  """Runs `journey(config, workdir)` from --config, --config.FIELD and --workdir.

  A field that the config file leaves out can be given, too, as a Python literal or a
  string; the journey says if there is none of that name.
  A config, a file or a value that can not be used ends the program with one line on
  standard error and exit status 2, before any work.
  """
  workdir = flags.DEFINE_string("workdir", None, "Where the run writes and goes on.")
  flags.mark_flag_as_required("workdir")

  def work(config: ml_collections.ConfigDict) -> None:
    if not workdir.value:
      stop("--workdir is empty; name the folder where the run writes and goes on")
    if "://" in workdir.value:
      stop(f"--workdir={workdir.value} is no path; mount the bucket, as by gcsfuse")
    if distributed.WHERE.value:
      distributed.join(distributed.WHERE.value)
      distributed.check_shared(workdir.value)
    with disk.clear_errors(workdir.value):
      results = journey(config, workdir.value)
    show(results)

  start(work)


def start(work: Callable[[ml_collections.ConfigDict], None]) -> None:
  """As `launch`, for a program that needs a config and no workdir."""
  # It tells of every request, so of every tool call, at a level that we show.
  python_logging.getLogger("httpx").setLevel(python_logging.WARNING)
  config = config_flags.DEFINE_config_file("config", None, "configs/X.py[:ARGUMENT]")
  flags.mark_flag_as_required("config")
  for name in ("config", "workdir", "cpu_devices", "distributed", "compile_cache"):
    if name in flags.FLAGS:  # --help lists them
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

  def parse(argv: list[str]) -> list[str]:
    file, argument = _config_file(argv)
    given = _read_config(file, argument) if file else None
    try:
      argv, added = _split(argv, given)
      sys.argv = argv  # where ml_collections looks for overrides
      rest = flags.FLAGS(argv)
      for path, value in added:
        _add(config.value, path, value)
      return rest
    except (AttributeError, KeyError, TypeError, ValueError, flags.Error) as e:
      stop(_override_error(e, argv))

  def main(argv: list[str]) -> None:
    if argv[1:]:
      stop(f"unexpected argument {argv[1]!r}")
    prepare(COMPILE_CACHE.value, CPU_DEVICES.value)
    with_clear_errors(lambda: work(config.value), _config_file(sys.argv)[0])

  app.run(main, flags_parser=parse)


def run_program(main: Callable[[], Any]) -> None:
  """Runs a program that has flags of its own and no config; errors as of `launch`."""

  def parse(argv: list[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except flags.Error as e:
      stop(str(e))

  def checked(argv: list[str]) -> None:
    if argv[1:]:
      stop(f"unexpected argument {argv[1]!r}; quote what has spaces or is a glob")
    with_clear_errors(main)

  app.run(checked, flags_parser=parse)


def prepare(compile_cache: str, cpu_devices: int = 1) -> None:
  """Settles the process: allocator, log, compile cache, devices of a CPU.

  Call it before JAX is used.
  """
  _keep_freed_memory()
  disk.report_once()
  logging.set_verbosity(logging.WARNING)
  import jax

  if cpu_devices > 1:
    jax.config.update("jax_num_cpu_devices", cpu_devices)
  if compile_cache:
    jax.config.update("jax_compilation_cache_dir", compile_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _keep_freed_memory() -> None:
  """Has glibc keep large temporaries, in huge pages, instead of mapping them anew.

  Page faults and misses of the address translation would cost a small model on a CPU
  more than its arithmetic: kept memory brings a training step of the quickstart to two
  thirds of the time, huge pages to about nine tenths of that. The threshold above which
  glibc maps can not be raised past 32 MiB, so mapping is turned off instead, and one
  arena keeps the memory for all threads.
  """
  trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # malloc.h
  try:
    libc = ctypes.CDLL(None, use_errno=True)
    mallopt = libc.mallopt
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  except (OSError, AttributeError):  # not glibc
    return
  mallopt(mmap_max, 0)
  mallopt(arena_max, 1)
  mallopt(trim_threshold, -1)
  mallopt(top_pad, 1 << 28)
  # The heap grows once, to a size that costs nothing until it is used: what the kernel
  # is told of an area does not carry over to what is added to it later.
  room = min(8 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
  block = libc.malloc(room)
  if not block:
    return
  huge, page = 14, 2 << 20  # MADV_HUGEPAGE; x86's and most others' huge page
  start = -(-block // page) * page
  libc.madvise(start, room - (start - block), huge)
  libc.free(block)


def with_clear_errors(work: Callable[[], Any], config_file: str = "") -> Any:
  """Runs `work`; wrong input becomes one line and exit status 2.

  Ctrl-C is status 130, and SIGTERM in a journey that saves before it leaves 143.
  """
  try:
    with disk.clear_errors():
      return work()
  except ConfigError as e:
    stop(f"{config_file}: {e}" if config_file else str(e))
  except (ValueError, RequiredValueError) as e:
    stop(str(e))
  except OSError as e:
    # The system's own words stand in brackets before the path; ours need no change.
    stop(f"{e.filename}: {e.strerror}" if e.filename else str(e))
  except Interrupted as e:
    print(e, file=sys.stderr)
    sys.exit(e.status)
  except KeyboardInterrupt:
    print("\ninterrupted; the same command goes on from here", file=sys.stderr)
    sys.exit(130)


def show(results: dict[str, Any]) -> None:
  """Prints a journey's results as JSON."""
  print(json.dumps(results, indent=2, sort_keys=True))


def _config_file(argv: list[str]) -> tuple[str, list[str]]:
  """The file of --config, "" where there is none, and its :ARGUMENT if it has one.

  Of several the last one counts, as for any flag.
  """
  found, argument = "", []
  for i, word in enumerate(argv):
    name, _, value = word.lstrip("-").partition("=")
    if name == "config":
      value = value or (argv[i + 1] if i + 1 < len(argv) else "")
      found, *argument = value.split(":", 1)
  return found, argument


def _read_config(file: str, argument: list[str]) -> ml_collections.ConfigDict:
  """What a config file answers; it is foreign code, and may fail in any way.

  The flag --config reads it again: its own words for a file that fails are many lines.
  """
  if not os.path.isfile(file):
    stop(f"{file}: there is no such config file")
  get_config = config = None
  try:
    get_config = runpy.run_path(file).get("get_config")
    if callable(get_config):
      config = get_config(*argument)
  except ValueError as e:  # its own words for an argument that it does not know
    stop(f"{file}: {e}")
  except SyntaxError as e:
    stop(f"{file}:{e.lineno or 1}: {e.msg}")
  except (Exception, SystemExit) as e:
    frames = traceback.extract_tb(e.__traceback__)
    lines = [str(frame.lineno) for frame in frames if frame.filename == file]
    where = ":".join([file, *lines[-1:]])
    stop(f"{where}: {type(e).__name__}: {e}")
  if not callable(get_config):
    stop(f"{file}: defines no function get_config")
  if not isinstance(config, ml_collections.ConfigDict):
    kind = type(config).__name__
    stop(f"{file}: get_config returns a {kind}, not an ml_collections.ConfigDict")
  return config


def _split(
  argv: list[str], given: ml_collections.ConfigDict | None
) -> tuple[list[str], list[tuple[str, str]]]:
  """The command line without overrides of fields that the config file leaves out.

  Args:
    argv: the command line.
    given: what the config file answers; None without one.

  Returns:
    The rest, and of each such override the field's path and its value.
  """
  rest, added = [], []
  words = iter(argv)
  for word in words:
    path, equals, value = word.lstrip("-").partition("=")
    if word.startswith("-") and path.startswith("config."):
      if given is None:
        stop(f"{word} needs a config to change: give --config=FILE, too")
      if _lacks(given, path.split(".")[1:]):
        value = value if equals else next(words, "")
        added.append((path.removeprefix("config."), value))
        continue
    rest.append(word)
  return rest, added


def _lacks(config: Any, names: list[str]) -> bool:
  """Whether a path leads to no field of the config."""
  for name in names:
    if not isinstance(config, ml_collections.ConfigDict) or name not in config:
      return True
    config = config[name]
  return False


def _add(config: ml_collections.ConfigDict, path: str, value: str) -> None:
  *sections, field = path.split(".")
  with config.unlocked():
    for name in sections:
      if config.get(name) is None:
        config[name] = ml_collections.ConfigDict()
      config = config[name]
      if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(f"config.{path}: {name} is a value and has no fields")
    try:
      config[field] = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
      config[field] = value


def _override_error(error: Exception, argv: list[str]) -> str:
  """A misspelt or mistyped flag, or a config file that fails, in words."""
  file, _ = _config_file(argv)
  ours = isinstance(error, flags.Error) and "--config." not in str(error)
  return str(error) if ours else f"{file}: {error}"

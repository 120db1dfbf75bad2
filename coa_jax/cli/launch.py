"""Every stage's preparation: flags, config, compile cache, errors.

budget: everything before a stage, in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging as python_logging
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_collections
import rich
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_dict import RequiredValueError, placeholder

from coa_jax.cli import distributed
from coa_jax.cli.config_help import explain
from coa_jax.cli.devices import check_devices
from coa_jax.cli.refusal import stop
from coa_jax.cli.shards import read_shard, run_shard
from coa_jax.cli.streams import outlive_readers
from coa_jax.report.tables import Table, rich_table
from coa_jax.runtime import disk, heartbeat
from coa_jax.runtime.bucket import inputs
from coa_jax.runtime.bucket.objects import Bucket, is_uri
from coa_jax.runtime.config import ConfigError, as_json, fill_defaults, read_config
from coa_jax.runtime.interruption import Interrupted
from coa_jax.runtime.shard import Shard

# Takes (config, workdir), and a shard if it supports shards.
Journey = Callable[..., dict[str, Any]]

_CONFIG_HELP = (
  "configs/X.py[:ARGUMENT]; --config.help lists its fields, --config.help=SECTION "
  "those of one section."
)

COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "xla"),
  "Folder of compiled programs, kept between runs; gs:// too; empty turns it off.",
)

SCRATCH = flags.DEFINE_string(
  "scratch",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "scratch"),
  "Folder on this machine's disk for what is in a bucket (gs://, s3://): the workdir "
  "while a run works, and copies of what its config names.",
)

CPU_DEVICES = flags.DEFINE_integer(
  "cpu_devices",
  1,
  "Devices that a CPU is split into for section mesh: with as many as it has cores "
  "small models sample up to 1.6 times as fast, each on slots of its own.",
  lower_bound=1,
  upper_bound=1024,
)


HANG_S = flags.DEFINE_integer(
  "hang_s",
  0,
  "Seconds without progress after which the program ends with the stacks of its "
  "threads; a step and its compilation must fit. 0: never.",
  lower_bound=0,
)


_FLAGS = (
  "config",
  "workdir",
  "scratch",
  "cpu_devices",
  "distributed",
  "compile_cache",
  "hang_s",
)


def show(results: dict[str, Any]) -> None:
  """Prints a stage's results as JSON."""
  print(json.dumps(results, indent=2, sort_keys=True))


def launch(
  journey: Journey,
  config_class: type,
  tables: Callable[[dict[str, Any]], Sequence[Table]] | None = None,
  logs: tuple[str, ...] = (),
) -> None:
  """Runs `journey(config, workdir)` from --config, --config.FIELD and --workdir.

  budget: its flags and its work share them.

  Any field can be set, whether the config file has it or not; None empties it, or
  removes an optional section. An unusable config, file or value ends the program with
  one line on standard error and exit status 2, before any work.

  Args:
    journey: the stage's function.
    config_class: the dataclass of its config; its defaults fill missing fields.
    tables: makes the results' tables, printed at the end; --json prints the results
      themselves, like programs without tables.
    logs: files from which the stage resumes, if it supports shards: see
      `coa_jax.cli.shards`.
  """
  # --- Its own flags.
  if logs:
    flags.DEFINE_string(
      "shard", "", "Do part I of N alone, as 0/8; the last one joins. auto/8: by index."
    )
  if tables:
    flags.DEFINE_bool("json", False, "Print the results as JSON in place of tables.")
  workdir = flags.DEFINE_string("workdir", None, "Where the run writes and goes on.")
  flags.mark_flag_as_required("workdir")

  def work(config: ml_collections.ConfigDict) -> None:
    # --- The workdir and the other processes.
    if not workdir.value:
      stop("--workdir is empty; name the folder where the run writes and goes on")
    shard = _shard() if logs else None
    if distributed.WHERE.value:
      distributed.join(distributed.WHERE.value)
      check_devices(CPU_DEVICES.value)
      if (config.get("mesh") or {}).get("rollout"):
        distributed.leave_devices_alone()
      if not is_uri(workdir.value):
        distributed.check_shared(workdir.value)

    # --- A part of the work, or all; in a bucket both work in a local folder.
    run = _watched(journey, config)
    if shard:
      settings = inputs.named(as_json(read_config(config, config_class)))
      results, is_all = run_shard(
        run, settings, workdir.value, shard, logs, SCRATCH.value
      )
      if not is_all:
        show(results)
        return
    else:
      with contextlib.ExitStack() as stack:
        folder = workdir.value
        if is_uri(folder):
          folder = stack.enter_context(distributed.in_bucket(folder, SCRATCH.value))
        results = run(folder, None)
    if tables and not flags.FLAGS.json:
      for table in tables(results):
        rich.print(rich_table(table))
    else:
      show(results)

  start(work, config_class)


def _watched(
  journey: Journey, config: ml_collections.ConfigDict
) -> Callable[[str, Shard | None], dict[str, Any]]:
  """Returns the stage with its config; it may hang for --hang_s at most."""

  def run(folder: str, shard: Shard | None) -> dict[str, Any]:
    # Not during access to a bucket: it may last, and has its own timeouts.
    heartbeat.watch(HANG_S.value)
    try:
      with disk.clear_errors(folder):
        if shard:
          return journey(config, folder, shard=shard)
        return journey(config, folder)
    finally:
      heartbeat.watch(0)

  return run


def _shard() -> Shard | None:
  """Reads the flag --shard; None if it is empty."""
  if not flags.FLAGS.shard:
    return None
  if distributed.WHERE.value:
    stop("--shard and --distributed: shards never meet; give one of them")
  return read_shard(flags.FLAGS.shard)


def start(
  work: Callable[[ml_collections.ConfigDict], None], config_class: type
) -> None:
  """Like `launch`, for a program with a config and without a workdir."""
  outlive_readers()
  # It logs every request, so every tool call, at a visible level.
  python_logging.getLogger("httpx").setLevel(python_logging.WARNING)
  file = ""

  def parse(argv: list[str]) -> list[str]:
    nonlocal file
    try:
      argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
      file, argument, rest = _take_config(argv)
      _answer_help(file, argument, rest, config_class)
      rest, required = _define_config(file, argument, _join_values(rest), config_class)
      arguments = flags.FLAGS(rest)
      _check_filled(flags.FLAGS.config, required, file)
      return arguments
    except KeyboardInterrupt:
      _end_interrupted()
    except (AttributeError, KeyError, TypeError, ValueError, flags.Error) as e:
      stop(_override_error(e, file))
    except (RecursionError, MemoryError):  # a literal with thousands of brackets
      stop(f"{file}: a value of --config.FIELD is nested too deeply")

  def main(argv: list[str]) -> None:
    if argv[1:]:
      stop(f"unexpected argument {argv[1]!r}")
    prepare(COMPILE_CACHE.value, CPU_DEVICES.value)

    def fetch_and_work() -> None:
      fetch_inputs(flags.FLAGS.config)
      work(flags.FLAGS.config)

    with_clear_errors(fetch_and_work, file)

  app.run(main, flags_parser=parse)


def config_of_words(words: list[str], config_class: type) -> ml_collections.ConfigDict:
  """Reads a command line's config, like `launch`.

  Args:
    words: the command line without the program; flags other than --config.FIELD are
      ignored.
    config_class: the stage's config dataclass.
  """
  file, argument, rest = _take_config(words)
  if not file:
    stop("--config must be given: the program reads one")
  fields = [word for word in _join_values(rest) if _path_of(word)]
  try:
    fields, required = _define_config(file, argument, fields, config_class)
    flags.FLAGS([sys.argv[0], *fields])
    _check_filled(flags.FLAGS.config, required, file)
  except (AttributeError, KeyError, TypeError, ValueError, flags.Error) as e:
    stop(_override_error(e, file))
  except (RecursionError, MemoryError):
    stop(f"{file}: a value of --config.FIELD is nested too deeply")
  return flags.FLAGS.config


def fetch_inputs(config: ml_collections.ConfigDict) -> None:
  """Replaces gs:// and s3:// addresses by local copies' paths."""
  cache = os.path.join(SCRATCH.value, "inputs")
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      fetch_inputs(value)
    elif isinstance(value, list | tuple):
      config[name] = type(value)(inputs.localized(one, cache) for one in value)
    elif isinstance(value, str):
      config[name] = inputs.localized(value, cache)


def _define_config(
  file: str, argument: list[str], argv: list[str], config_class: type
) -> tuple[list[str], list[str]]:
  """Defines the flag --config: the file's values, the defaults, a flag for each field.

  Args:
    file: the config file; "" for none, then refused by the flag's parser.
    argument: of its `get_config`, if it has one.
    argv: the command line without --config.
    config_class: the stage's config dataclass.

  Returns:
    The command line without flags set to None, unreadable to typed flags (their fields
    are None now), and the paths of the file's required placeholders.
  """
  required = []
  paths = []
  empty_paths = []
  rest = []
  for word in argv:
    path = _path_of(word)
    if re.match(r"--?config\.([^=]*\.)?(\.|=|$)", word):
      stop(f"{word.partition('=')[0]}: names no field; give --config.SECTION.FIELD")
    if path and not file:
      stop(f"{word} needs a config to change: give --config=FILE, too")
    if path:
      paths.append(path)
    if path and word.partition("=")[2] == "None":
      empty_paths.append(path)
    else:
      rest.append(word)
  if file:
    config = _read_config(file, argument)
    required = _release_placeholders(config)
    with config.unlocked():
      fill_defaults(config, config_class)
      for path in paths:
        section = _make_sections(config, path)
        if path in empty_paths:
          _set_none(section, path.rpartition(".")[2])
      _refuse_texts_for_sections(rest, config)
    config_flags.DEFINE_config_dict(
      "config",
      config,
      _CONFIG_HELP,
      # Entries of a free dict, and misspelt fields; the stage refuses the latter.
      accept_new_attributes=True,
      lock_config=False,
      sys_argv=rest,
    )
  else:
    flags.DEFINE_string("config", None, _CONFIG_HELP)
    flags.mark_flag_as_required("config")
  for name in _FLAGS:
    if name in flags.FLAGS:  # --help lists them
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
  return rest, required


def _release_placeholders(
  config: ml_collections.ConfigDict, above: str = ""
) -> list[str]:
  """Makes required placeholders optional: flags can not show required ones.

  Returns:
    Their paths, e.g. "section.field".
  """
  paths = []
  for name in config:
    try:
      value = config[name]
    except RequiredValueError:
      kind = config.get_ref(name).get_type()
      with config.unlocked():
        del config[name]
        config[name] = placeholder(kind)
      paths.append(above + name)
      continue
    if isinstance(value, ml_collections.ConfigDict):
      paths += _release_placeholders(value, f"{above}{name}.")
  return paths


def _check_filled(
  config: ml_collections.ConfigDict, paths: list[str], file: str
) -> None:
  """Refuses a config with empty required placeholders."""
  for path in paths:
    value: Any = config
    for name in path.split("."):
      value = None if value is None else value.get(name)
    if value is None:
      stop(f"{file}: config.{path} has no value; give --config.{path}=VALUE")


def _answer_help(
  file: str, argument: list[str], argv: list[str], config_class: type
) -> None:
  """Answers --config.help or --config.help=SECTION, and ends the program."""
  for word in argv:
    path, _, wanted = word.lstrip("-").partition("=")
    if word.startswith("-") and path == "config.help":
      config = _read_config(file, argument) if file else {}
      try:
        print(explain(config_class, wanted, config))
      except ConfigError as e:
        stop(str(e))
      sys.exit(0)


def _path_of(word: str) -> str:
  """Returns the field set by a command line's word, as "section.field", or ""."""
  name = word.lstrip("-").partition("=")[0].removeprefix("no")
  if word.startswith("-") and name.startswith("config."):
    return name.removeprefix("config.")
  return ""


def _join_values(argv: list[str]) -> list[str]:
  """Joins `--config.FIELD VALUE` to one word.

  Otherwise the flag of a field missing in the config would treat the value as an
  argument.
  """
  out = []
  for word in argv:
    is_value = out and _path_of(out[-1]) and "=" not in out[-1]
    if is_value and not word.startswith("-"):
      out[-1] += f"={word}"
    else:
      out.append(word)
  return out


def _set_none(section: ml_collections.ConfigDict, field: str) -> None:
  """Empties a field, or an optional section."""
  if field in section:
    del section[field]  # its type goes with it
  section[field] = None


def _make_sections(
  config: ml_collections.ConfigDict, path: str
) -> ml_collections.ConfigDict:
  """Makes missing sections on a flag field's path.

  Returns:
    The field's section.

  Raises:
    ValueError: one of them is a value.
  """
  *sections, _ = path.split(".")
  for name in sections:
    if config.get(name) is None:
      config[name] = ml_collections.ConfigDict()
    config = config[name]
    if not isinstance(config, ml_collections.ConfigDict):
      raise ValueError(f"config.{path}: {name} is a value and has no fields")
  return config


def _refuse_texts_for_sections(
  argv: list[str], config: ml_collections.ConfigDict
) -> None:
  """Refuses a text as a section's value, and explains how to set its fields.

  Raises:
    ValueError: a flag has one; a Python dict literal is accepted.
  """
  for word in argv:
    path = _path_of(word)
    found: Any = config
    for name in path.split("."):
      found = found.get(name) if isinstance(found, ml_collections.ConfigDict) else None
    value = word.partition("=")[2].strip()
    if path and isinstance(found, ml_collections.ConfigDict) and value[:1] != "{":
      raise ValueError(
        f"--config.{path}={value}: {path} is a section; set its fields by "
        f"--config.{path}.FIELD=VALUE (--config.help={path} lists them)"
      )


def run_program(main: Callable[..., Any], takes_words: bool = False) -> None:
  """Runs a program with its own flags and without a config; errors as in `launch`.

  Args:
    main: the program's function.
    takes_words: whether it gets the command line's words other than flags; otherwise
      there must be none.
  """

  def parse(argv: list[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except flags.Error as e:
      stop(_flag_error(e))

  outlive_readers()

  def checked(argv: list[str]) -> None:
    if takes_words:
      with_clear_errors(lambda: main(argv[1:]))
      return
    if argv[1:]:
      stop(f"unexpected argument {argv[1]!r}; quote what has spaces or is a glob")
    with_clear_errors(main)

  app.run(checked, flags_parser=parse)


def prepare(compile_cache: str, cpu_devices: int = 1) -> None:
  """Sets up the process: allocator, log, compile cache, CPU devices.

  Call it before using JAX.
  """
  _keep_freed_memory()
  disk.report_once()
  logging.set_verbosity(logging.WARNING)
  # Lines for the user: without time, thread and line of code.
  handler = logging.get_absl_handler()
  handler.setFormatter(_PlainFormatter())
  handler.addFilter(_is_for_the_user)
  import jax

  if cpu_devices > 1:
    jax.config.update("jax_num_cpu_devices", cpu_devices)
  if is_uri(compile_cache):
    with_clear_errors(lambda: Bucket(compile_cache))
  if compile_cache:
    jax.config.update("jax_compilation_cache_dir", compile_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  joins = flags.FLAGS.is_parsed() and distributed.WHERE.value
  if not joins:  # otherwise after joining
    check_devices(cpu_devices)


def _is_for_the_user(record: python_logging.LogRecord) -> bool:
  """Filters Orbax's messages about files written by us in another way."""
  of_orbax = f"{os.sep}orbax{os.sep}" in record.pathname
  return not of_orbax or record.levelno >= python_logging.ERROR


class _PlainFormatter(python_logging.Formatter):
  """Formats a message like the program's own lines: `warning: ...`."""

  def format(self, record: python_logging.LogRecord) -> str:
    """Returns the line, and the traceback if there is one."""
    return f"{record.levelname.lower()}: {super().format(record)}"


def _keep_freed_memory() -> None:
  """Makes glibc keep large temporaries, in huge pages, instead of remapping them.

  Page faults and TLB misses would cost a small model on a CPU more than its arithmetic:
  kept memory reduces a quickstart training step to two thirds of the time, huge pages
  to about nine tenths of that. glibc's mapping threshold can not exceed 32 MiB, so
  mapping is turned off instead, and one arena keeps the memory for all threads.
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
  # The heap grows once; its size costs nothing until it is used: madvise does not apply
  # to later extensions.
  room = min(8 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
  block = libc.malloc(room)
  if not block:
    return
  huge, page = 14, 2 << 20  # MADV_HUGEPAGE; huge page of x86 and most others
  start = -(-block // page) * page
  libc.madvise(start, room - (start - block), huge)
  libc.free(block)


def with_clear_errors(work: Callable[[], Any], config_file: str = "") -> Any:
  """Runs `work`; wrong input becomes one line and exit status 2.

  Ctrl-C is status 130, and SIGTERM in a stage that saves before its end 143.
  """
  try:
    with disk.clear_errors():
      return work()
  except ConfigError as e:
    stop(f"{config_file}: {e}" if config_file else str(e))
  except (ValueError, RequiredValueError) as e:
    stop(str(e))
  except OSError as e:
    # The system puts its words in brackets before the path; ours need no change.
    stop(f"{e.filename}: {e.strerror}" if e.filename else str(e))
  except Interrupted as e:
    print(e, file=sys.stderr)
    sys.exit(e.status)
  except KeyboardInterrupt:
    _end_interrupted()


def _end_interrupted() -> NoReturn:
  print("\ninterrupted; the same command resumes from here", file=sys.stderr)
  sys.exit(130)


def _take_config(argv: list[str]) -> tuple[str, list[str], list[str]]:
  """Takes --config from a command line.

  Returns:
    The file, "" if there is none; its :ARGUMENT if it has one; and the rest of the
    command line. Of several files the last one counts, as for any flag.
  """
  value = ""
  rest = []
  words = iter(argv)
  for word in words:
    name, equals, text = word.partition("=")
    if name in ("-config", "--config"):
      value = text if equals else next(words, "")
    else:
      rest.append(word)
  file, *argument = value.split(":", 1)
  return file, argument, rest


def _read_config(file: str, argument: list[str]) -> ml_collections.ConfigDict:
  """Runs a config file's `get_config`; foreign code may fail in any way."""
  if not os.path.isfile(file):
    stop(f"{file}: there is no such config file")
  get_config = config = None
  try:
    get_config = runpy.run_path(file).get("get_config")
    if callable(get_config):
      config = get_config(*argument)
  except ValueError as e:  # its own words for an unknown argument
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
  _refuse_cycles(config, f"{file}: config", ())
  return config


def _refuse_cycles(value: Any, path: str, above: tuple[int, ...]) -> None:
  """Refuses a section, list or dict containing itself."""
  if id(value) in above:
    stop(f"{path} contains itself")
  above = (*above, id(value))
  if isinstance(value, ml_collections.ConfigDict):
    value = dict(value.items(preserve_field_references=True))
  if isinstance(value, dict):
    for name, inner in value.items():
      _refuse_cycles(inner, f"{path}.{name}", above)
  elif isinstance(value, list | tuple):
    for i, inner in enumerate(value):
      _refuse_cycles(inner, f"{path}[{i}]", above)


def _override_error(error: Exception, file: str) -> str:
  """Describes a misspelt or mistyped flag."""
  ours = isinstance(error, flags.Error) and "--config." not in str(error)
  return _flag_error(error) if ours or not file else f"{file}: {error}"


def _flag_error(error: Exception) -> str:
  """Describes an absl error; of required flags it gives only the names."""
  missing = re.findall(r"flag --(\w+)=None: Flag --\1 must", str(error))
  if not missing:
    return str(error)
  return f"{' and '.join(f'--{name}' for name in missing)} must be given; see --help"

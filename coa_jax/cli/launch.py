"""Prepares every command: flags, config, workdir, errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_collections
import rich
from absl import app, flags

from coa_jax.cli import config_file, distributed, process
from coa_jax.cli.config_help import explain, reference
from coa_jax.cli.shards import read_shard, run_shard
from coa_jax.cli.streams import outlive_readers
from coa_jax.data.teacher.backend import InfrastructureError, RefusedError
from coa_jax.report.tables import Table
from coa_jax.runtime import disk, heartbeat
from coa_jax.runtime.bucket import inputs
from coa_jax.runtime.bucket.objects import Bucket, is_uri
from coa_jax.runtime.config import ConfigError, as_json, read_config
from coa_jax.runtime.interruption import Interrupted
from coa_jax.runtime.shard import Shard

# A stage's function: takes (config, workdir), and a shard if it supports shards.
Stage = Callable[..., dict[str, Any]]

COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "xla"),
  "Folder that keeps compiled programs between runs; gs:// too; empty turns it off.",
)

SCRATCH = flags.DEFINE_string(
  "scratch",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "scratch"),
  "Local folder for runs in a bucket (gs://, s3://): the workdir's mirror, and copies "
  "of the config's files.",
)

CPU_DEVICES = flags.DEFINE_integer(
  "cpu_devices",
  1,
  "Number of devices to split the CPU into, for section mesh. One per core makes small "
  "models sample up to 1.6 times as fast; each device has its own slots.",
  lower_bound=1,
  upper_bound=1024,
)

HANG_S = flags.DEFINE_integer(
  "hang_s",
  0,
  "Seconds without progress after which the program prints its threads' stacks and "
  "ends; more than a step and its compilation take. 0: never.",
  lower_bound=0,
)

# Shared flags that a command's --help lists besides the command's own.
_LISTED = (
  "config",
  "config.help",
  "workdir",
  "shard",
  "json",
  "scratch",
  "cpu_devices",
  "distributed",
  "compile_cache",
  "hang_s",
)
_MAX_LINE = 2000  # characters of an error; longer lines are cut in the middle


def launch(
  stage: Stage,
  config_class: type,
  tables: Callable[[dict[str, Any]], Sequence[Table]] | None = None,
  logs: tuple[str, ...] = (),
  without_workdir: Callable[[ml_collections.ConfigDict], None] | None = None,
) -> None:
  """Runs `stage(config, workdir)` from --config, --config.FIELD and --workdir.

  An unusable config, file or value ends the program with one line on standard error and
  exit status 2, before any work.

  Args:
    stage: the stage's function.
    config_class: the stage's config dataclass; its defaults fill missing fields.
    tables: makes tables of the results, printed at the end; --json prints the results
      themselves, like programs without tables.
    logs: files from which the stage resumes, if it supports shards: see
      `coa_jax.cli.shards`.
    without_workdir: runs instead if --workdir is missing; None requires --workdir.
  """
  if logs:
    flags.DEFINE_string(
      "shard", "", "Do part I of N alone, as 0/8; the last one joins. auto/8: by index."
    )
  if tables:
    flags.DEFINE_bool("json", False, "Print the results as JSON in place of tables.")
  flags.DEFINE_string(
    "workdir",
    None,
    "The folder that the run writes, and resumes from.",
    required=without_workdir is None,
  )

  def work(config: ml_collections.ConfigDict) -> None:
    if flags.FLAGS.workdir is None and without_workdir:
      without_workdir(config)
      return
    results, is_all = _run_stage(stage, config, config_class, logs)
    if tables and is_all and not flags.FLAGS.json:
      for table in tables(results):
        rich.print(table)
    else:
      print(json.dumps(results, indent=2, sort_keys=True))

  start(work, config_class)


def _run_stage(
  stage: Stage,
  config: ml_collections.ConfigDict,
  config_class: type,
  logs: tuple[str, ...],
) -> tuple[dict[str, Any], bool]:
  """Runs a stage or one shard, together with the other processes.

  Returns:
    The results, and whether they cover all shards.
  """
  workdir = flags.FLAGS.workdir
  if not workdir:
    raise ValueError("--workdir is empty; name the folder that the run writes")
  shard = read_shard(flags.FLAGS.shard) if logs and flags.FLAGS.shard else None
  if shard and distributed.WHERE.value:
    raise ValueError("--shard and --distributed: shards never meet; give one of them")
  if distributed.WHERE.value:
    distributed.join(distributed.WHERE.value)
    process.check_devices(CPU_DEVICES.value)
    if (config.get("mesh") or {}).get("rollout"):
      distributed.leave_devices_alone()
    if not is_uri(workdir):
      distributed.check_shared(workdir)

  def run(folder: str, shard: Shard | None) -> dict[str, Any]:
    # Bucket access is not watched: a transfer may be long, and has its own timeouts.
    heartbeat.watch(HANG_S.value)
    try:
      with disk.clear_errors(folder):
        options = {"shard": shard} if shard else {}
        return stage(config, folder, **options)
    finally:
      heartbeat.watch(0)

  if shard:
    settings = inputs.named(as_json(read_config(config, config_class)))
    return run_shard(run, settings, workdir, shard, logs, SCRATCH.value)
  with contextlib.ExitStack() as stack:
    folder = workdir
    if is_uri(workdir):
      folder = stack.enter_context(distributed.in_bucket(workdir, SCRATCH.value))
    return run(folder, None), True


def start(
  work: Callable[[ml_collections.ConfigDict], None], config_class: type
) -> None:
  """Like `launch`, for a program with a config and without a workdir."""
  outlive_readers()
  config_file.define(flags.FLAGS)
  for name in _LISTED:
    if name in flags.FLAGS:
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
  config = ml_collections.ConfigDict()
  file = ""

  def parse(argv: list[str]) -> list[str]:
    nonlocal config, file
    try:
      values, overrides, rest = config_file.split(argv[1:])
      file = (values.config or "").partition(":")[0]
      if values["config.help"].present:
        print(_config_help(values, config_class))
        sys.exit(0)
      arguments = flags.FLAGS([argv[0], *rest])
      config = config_file.read(values.config, overrides, config_class)
      return arguments
    except KeyboardInterrupt:
      _end_interrupted()
    except (ConfigError, flags.Error) as e:
      stop(_flag_error(e))

  def main(argv: list[str]) -> None:
    if argv[1:]:
      stop(f"unexpected argument {argv[1]!r}; a flag's value follows it after =")

    def prepare_and_work() -> None:
      prepare(COMPILE_CACHE.value, CPU_DEVICES.value)
      fetch_inputs(config)
      work(config)

    with_clear_errors(prepare_and_work, file)

  app.run(main, flags_parser=parse)


def _config_help(values: flags.FlagValues, config_class: type) -> str:
  """Returns the answer to --config.help, --config.help=SECTION or =markdown."""
  section = values["config.help"].value
  if section == "markdown":
    return reference()
  config = config_file.read_file(values.config) if values.config else {}
  return explain(config_class, "" if section == "true" else section, config)


def config_of_words(words: list[str], config_class: type) -> ml_collections.ConfigDict:
  """Reads the config in another program's command line; ignores all other flags.

  Raises:
    ConfigError: the config is missing or unusable.
  """
  values, overrides, _ = config_file.split(words)
  return config_file.read(values.config, overrides, config_class)


def fetch_inputs(config: ml_collections.ConfigDict) -> None:
  """Replaces the config's gs:// and s3:// addresses by paths of local copies."""
  cache = os.path.join(SCRATCH.value, "inputs")
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      fetch_inputs(value)
    elif isinstance(value, list | tuple):
      config[name] = type(value)(inputs.localized(one, cache) for one in value)
    elif isinstance(value, str):
      config[name] = inputs.localized(value, cache)


def run_program(main: Callable[..., Any], takes_words: bool = False) -> None:
  """Runs a program with its own flags and without a config; errors as in `launch`.

  With `takes_words`, `main` gets the command line's words other than flags; otherwise
  such words are refused.
  """

  def parse(argv: list[str]) -> list[str]:
    try:
      return flags.FLAGS(argv)
    except flags.Error as e:
      stop(_flag_error(e))

  outlive_readers()
  process.log_plainly()

  def checked(argv: list[str]) -> None:
    if takes_words:
      with_clear_errors(lambda: main(argv[1:]))
      return
    if argv[1:]:
      stop(f"unexpected argument {argv[1]!r}; quote values with spaces, and globs")
    with_clear_errors(main)

  app.run(checked, flags_parser=parse)


def prepare(compile_cache: str, cpu_devices: int = 1) -> None:
  """Sets up the process: allocator, log, compile cache, CPU devices.

  Must be called before JAX is used.

  Raises:
    ValueError: the cache or a device cannot be used.
  """
  process.keep_freed_memory()
  process.log_plainly()
  disk.report_once()
  import jax

  if cpu_devices > 1:
    jax.config.update("jax_num_cpu_devices", cpu_devices)
  if is_uri(compile_cache):
    Bucket(compile_cache)  # refused unless its store answers
  if compile_cache:
    jax.config.update("jax_compilation_cache_dir", compile_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  joins = flags.FLAGS.is_parsed() and distributed.WHERE.value
  if not joins:  # otherwise checked after joining
    process.check_devices(cpu_devices)


def with_clear_errors(work: Callable[[], Any], file: str = "") -> Any:
  """Runs `work`; wrong input or a failed service becomes one line and exit status 2.

  Ctrl-C gives status 130; SIGTERM, in a stage that saves before ending, 143.
  """
  try:
    with disk.clear_errors():
      return work()
  except ConfigError as e:
    stop(f"{file}: {e}" if file else str(e))
  except (ValueError, InfrastructureError, RefusedError) as e:
    stop(str(e))
  except OSError as e:
    # A system error's text begins with [Errno N]; our own messages need no change.
    stop(f"{e.filename}: {e.strerror}" if e.filename else str(e))
  except Interrupted as e:
    print(e, file=sys.stderr)
    sys.exit(e.status)
  except KeyboardInterrupt:
    _end_interrupted()


def _end_interrupted() -> NoReturn:
  print("\ninterrupted; the same command resumes from here", file=sys.stderr)
  sys.exit(130)


def stop(message: str) -> NoReturn:
  """Ends the program with one line on standard error and exit status 2."""
  line = " ".join(message.split())
  if len(line) > _MAX_LINE:
    line = f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 2 :]}"
  print(f"error: {line}", file=sys.stderr)
  sys.exit(2)


def _flag_error(error: Exception) -> str:
  """Describes an absl error; lists missing required flags only by name."""
  missing = re.findall(r"flag --(\w+)=None: Flag --\1 must", str(error))
  if not missing:
    return str(error)
  return f"{' and '.join(f'--{name}' for name in missing)} must be given; see --help"

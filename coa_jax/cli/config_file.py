"""The flags --config=FILE and --config.FIELD=VALUE of a command line."""

from __future__ import annotations

import os
import re
import runpy
import traceback
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags
from ml_collections.config_dict import RequiredValueError

from coa_jax.runtime.config import ConfigError, fill_defaults


def define(values: flags.FlagValues) -> None:
  """Defines --config and --config.help."""
  flags.DEFINE_string(
    "config",
    None,
    "configs/X.py[:ARGUMENT]; --config.FIELD=VALUE overrides a field.",
    flag_values=values,
  )
  help_flag = flags.Flag(
    name="config.help",
    parser=flags.ArgumentParser(),
    serializer=flags.ArgumentSerializer(),
    default=None,
    help_string="Explains the config's fields; --config.help=SECTION those of one "
    "section, --config.help=markdown those of every stage.",
    boolean=True,  # the value is optional
  )
  flags.DEFINE_flag(help_flag, values)


def split(words: Sequence[str]) -> tuple[flags.FlagValues, list[str], list[str]]:
  """Takes the config's flags out of a command line without the program name.

  Returns:
    The values of --config and --config.help; the words --config.FIELD=VALUE; the rest.

  Raises:
    ConfigError: --config has no value.
  """
  values = flags.FlagValues()
  values.set_gnu_getopt()  # flags may follow other words
  define(values)
  try:
    unknown = values(["", *words], known_only=True)[1:]
  except flags.Error as e:
    raise ConfigError(str(e)) from e
  overrides = []
  rest = []
  for word in unknown:
    is_override = re.match(r"--?(no)?config\.", word)
    (overrides if is_override else rest).append(word)
  return values, overrides, rest


def read(
  file: str, overrides: Sequence[str], config_class: type
) -> ml_collections.ConfigDict:
  """Reads a config file and its overrides.

  Overrides can set any field, even one missing in the file; None empties a field, or
  removes an optional section.

  `config_class` is the stage's config dataclass; its defaults fill missing fields.

  Raises:
    ConfigError: the file, a name or a value is unusable. A misspelt field is left to
      `read_config`.
  """
  if not file:
    if overrides:
      raise ConfigError(
        f"{overrides[0]} needs a config to change: give --config=FILE, too"
      )
    raise ConfigError("--config must be given; see --help")
  config = read_file(file)
  name = file.partition(":")[0]
  try:
    with config.unlocked():
      fill_defaults(config, config_class)
      typed = [word for word in overrides if not _make_room(config, word)]
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict(
      "config",
      config,
      flag_values=values,
      # Entries of a free dict, and misspelt fields.
      accept_new_attributes=True,
      lock_config=False,
      sys_argv=typed,
    )
    values(["", *typed])
    return values.config
  except (AttributeError, KeyError, TypeError, ValueError, flags.Error) as e:
    text = str(e)
    if "malformed node" in text:  # ast's words
      flag = next((w.partition("=")[0] for w in overrides if "dict(" in w), "a flag")
      text = f"{flag}: the value must be a literal: {{'name': 1}}, not dict(name=1)"
    raise ConfigError(f"{name}: {text}") from e


def _make_room(config: ml_collections.ConfigDict, word: str) -> bool:
  """Prepares one override: ml_collections neither makes sections nor sets None.

  Returns:
    Whether the override was None, and is applied already.
  """
  flag, _, text = word.partition("=")
  path = re.sub(r"--?(no)?config\.", "", flag)
  *above, field = path.split(".")
  if not all((*above, field)):
    raise ValueError(f"{flag}: names no field; give --config.SECTION.FIELD")
  for name in above:
    if config.get(name) is None:
      config[name] = ml_collections.ConfigDict()
    config = config[name]
    if not isinstance(config, ml_collections.ConfigDict):
      raise ValueError(f"config.{path}: {name} is a value and has no fields")
  if text == "None":
    if field in config:
      del config[field]  # together with its type
    config[field] = None
    return True
  is_section = isinstance(config.get(field), ml_collections.ConfigDict)
  if is_section and not text.strip().startswith("{"):
    raise ValueError(
      f"{word}: {path} is a section; set its fields by --config.{path}.FIELD=VALUE "
      f"(--config.help={path} lists them)"
    )
  return False


def read_file(file: str) -> ml_collections.ConfigDict:
  """Runs `get_config` of FILE or FILE:ARGUMENT; user code may fail in any way.

  Raises:
    ConfigError: naming the file, and the line that failed.
  """
  file, *argument = file.split(":", 1)
  if not os.path.isfile(file):
    raise ConfigError(f"{file}: there is no such config file")
  get_config = config = None
  try:
    get_config = runpy.run_path(file).get("get_config")
    if callable(get_config):
      config = get_config(*argument)
  except ValueError as e:  # its message for an unknown argument
    raise ConfigError(f"{file}: {e}") from e
  except SyntaxError as e:
    raise ConfigError(f"{file}:{e.lineno or 1}: {e.msg}") from e
  except (Exception, SystemExit) as e:
    frames = traceback.extract_tb(e.__traceback__)
    lines = [str(frame.lineno) for frame in frames if frame.filename == file]
    where = ":".join([file, *lines[-1:]])
    raise ConfigError(f"{where}: {type(e).__name__}: {e}") from e
  if not callable(get_config):
    raise ConfigError(f"{file}: defines no function get_config")
  if not isinstance(config, ml_collections.ConfigDict):
    kind = type(config).__name__
    raise ConfigError(
      f"{file}: get_config returns a {kind}, not an ml_collections.ConfigDict"
    )
  try:
    _drop_placeholders(config)
  except RecursionError:
    raise ConfigError(f"{file}: the config contains itself") from None
  return config


def _drop_placeholders(config: ml_collections.ConfigDict) -> None:
  """Removes required placeholders without a value: `read_config` names the field."""
  for name in list(config):
    try:
      value = config[name]
    except RequiredValueError:
      with config.unlocked():
        del config[name]
      continue
    if isinstance(value, ml_collections.ConfigDict):
      _drop_placeholders(value)

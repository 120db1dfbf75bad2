"""Explains a stage's config: every section and field with type, default and meaning.

  coa rl --config.help
  coa rl --config=configs/rl_world.py --config.help=algo.loss
  coa rl --config.help=markdown > docs/config.md

Everything is read from the dataclasses: types and defaults from their fields, accepted
values from the fields' metadata, meanings from the docstrings.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import shutil
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import docstring_parser

from coa_jax.runtime.config import ConfigError, Values, kinds_of
from coa_jax.runtime.fields import accepted, nearest

# Stage -> module and class of its config.
CONFIGS = {
  "distill": "coa_jax.distill.DistillConfig",
  "sft": "coa_jax.plan.sft.SFTConfig",
  "rl": "coa_jax.plan.rl.RLConfig",
  "evaluate": "coa_jax.evaluate.EvaluateConfig",
  "synthesize": "coa_jax.cli.synthesize.SynthesizeConfig",
  "tasks": "coa_jax.cli.select_tasks.SelectTasksConfig",
}
# The type of a dict from user-chosen names to sections.
_SECTIONS_BY_NAME = "sections by name"
_WHOLE = "Sections of "


@dataclasses.dataclass(frozen=True)
class Field:
  """One config field, in words.

  `default` is "" for a required field; `meaning` is from the docstring; a section's
  fields follow the section.
  """

  path: str
  kind: str
  default: str
  meaning: str
  section: bool


def list_fields(cls: type, path: str = "") -> list[Field]:
  """Lists a config dataclass's fields, each section before its own sections.

  Paths begin with `path`.
  """
  hints = typing.get_type_hints(cls)
  meanings = _meanings(cls)
  out = []
  inside = []
  for field in dataclasses.fields(cls):
    hint = hints[field.name]
    sections = list(_sections(hint))
    out.append(
      Field(
        path + field.name,
        _kind(hint, field.metadata),
        _default(field, bool(sections)),
        meanings.get(field.name, ""),
        bool(sections),
      )
    )
    for suffix, section in sections:
      inside += list_fields(section, f"{path}{field.name}{suffix}.")
  return out + inside


def explain(cls: type, wanted: str, config: Values) -> str:
  """Explains a config, or the section or field `wanted`, at the terminal's width.

  `config` has the file's values.

  Raises:
    ConfigError: the path is unknown; the nearest is named.
  """
  width = min(shutil.get_terminal_size().columns, 100)
  fields = list_fields(cls)
  chosen = fields
  if wanted:
    chosen = [f for f in fields if f"{f.path}.".startswith(f"{wanted}.")]
  if not chosen:
    paths = [field.path for field in fields]
    raise ConfigError(f"--config.help={wanted}: no such field{nearest(wanted, paths)}")

  lines = []
  section = None
  for field in chosen:
    above = field.path.rpartition(".")[0]
    if above != section:
      section = above
      lines += ["", f"config.{above}" if above else "config"]
    lines.append(f"  {field.path}: {field.kind}{_value(field, config)}")
    meaning = textwrap.wrap(field.meaning, width - 6)
    lines += [f"      {line}" for line in meaning]
  return "\n".join(lines).strip()


def read_class(stage: str) -> type:
  """Imports a stage's config dataclass."""
  module, _, name = CONFIGS[stage].rpartition(".")
  return getattr(importlib.import_module(module), name)


def reference() -> str:
  """Returns the text of docs/config.md: all stages, equal sections only once."""
  lines = [
    "# Every field of every config",
    "",
    "Made by `coa rl --config.help=markdown > docs/config.md` from the configs'",
    "dataclasses. `coa rl --config=configs/rl_world.py --config.help=algo` prints one",
    "section in a terminal, with that file's values. Change any field by a flag,",
    "`--config.algo.steps=100`; `=None` empties it.",
    "",
  ]

  # --- Each section's fields, and the stages that read them.
  sections: dict[str, dict[Field, list[str]]] = {}
  for stage in CONFIGS:
    for field in dict.fromkeys(list_fields(read_class(stage))):
      above = field.path.rpartition(".")[0] or f"{_WHOLE}{stage}"
      sections.setdefault(above, {}).setdefault(field, []).append(stage)

  # --- A table for each section; a later section with the same rows refers to it.
  tables: dict[tuple[str, ...], str] = {}
  for above, fields in sections.items():
    all_readers = sorted({name for readers in fields.values() for name in readers})
    lines += [f"## {above}", ""]
    if not above.startswith(_WHOLE):
      lines += [f"Of {', '.join(all_readers)}.", ""]
    rows = tuple(
      _row(field, [] if sorted(readers) == all_readers else readers)
      for field, readers in fields.items()
    )
    same = tables.setdefault(rows, above)
    if same == above:
      lines += [
        "| field | values | default | meaning |",
        "|---|---|---|---|",
        *rows,
        "",
      ]
    else:
      lines += [f"The fields of [{same}](#{_anchor(same)}).", ""]
  return "\n".join(lines).rstrip()


def _anchor(chapter: str) -> str:
  return chapter.replace(".", "").lower()


def _row(field: Field, readers: list[str]) -> str:
  """Returns a field's row of a Markdown table, with the names in `readers`."""
  name = field.path.rpartition(".")[2]
  meaning = field.meaning
  if readers:
    meaning = f"({', '.join(readers)}) {meaning}"
  if field.section:
    chapter = f"{field.path}.NAME" if field.kind == _SECTIONS_BY_NAME else field.path
    name = f"[{name}](#{_anchor(chapter)})"
  default = f"`{field.default}`" if field.default else ""
  if not field.section and not field.default:
    default = "required"
  cells = (name, field.kind, default, meaning)
  return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(field: Field, config: Values) -> str:
  """Returns a field's value as text: the file's, otherwise the default."""
  default = f" = {field.default}" if field.default else ""
  if field.section:
    return default
  value: Any = config
  for name in field.path.split("."):
    if not isinstance(value, Values) or name not in value:
      return default or " (required)"
    value = value[name]
  words = f" = {shown(value)}"
  if field.default and words != default:
    words += f" (default {field.default})"
  return words


def _sections(hint: Any) -> Iterator[tuple[str, type]]:
  """Yields (path suffix, class) for each dataclass among a hint's types.

  The suffix is ".NAME" for a dict's values: the user names them.
  """
  for kind in kinds_of(hint):
    if dataclasses.is_dataclass(kind):
      yield "", kind
    elif typing.get_origin(kind) is dict:
      for _, section in _sections(typing.get_args(kind)[1]):
        yield ".NAME", section


def _kind(hint: Any, metadata: Mapping[str, Any]) -> str:
  """Returns a field's type and accepted values in words."""
  names = []
  for kind in kinds_of(hint):
    if dataclasses.is_dataclass(kind):
      names.append("section")
    elif typing.get_origin(kind) is dict and list(_sections(kind)):
      names.append(_SECTIONS_BY_NAME)
    elif kind is type(None):
      names.append("None")
    elif isinstance(kind, type) and not typing.get_args(kind):
      names.append(kind.__name__)
    else:
      names.append(str(kind).removeprefix("typing."))
  words = " or ".join(dict.fromkeys(names))
  if metadata.get("of"):
    return "one of " + ", ".join(name or "''" for name in metadata["of"])
  bounds = accepted(metadata)
  return f"{words}, {bounds}" if bounds else words


def _default(field: dataclasses.Field[Any], is_section: bool) -> str:
  """Returns a field's default as text; "" if it has none or is a section."""
  value = field.default
  # A section's default is its fields' defaults, which may still be inconsistent.
  has_factory = field.default_factory is not dataclasses.MISSING
  if value is dataclasses.MISSING and has_factory and not is_section:
    value = field.default_factory()
  if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
    return ""
  return shown(value)


def shown(value: Any) -> str:
  """Formats a value in a config file's notation."""
  if value == math.inf:
    return "unlimited"
  return repr(value)


def _meanings(cls: type) -> dict[str, str]:
  """Reads each field's meaning from the docstrings of a dataclass and its bases."""
  out: dict[str, str] = {}
  for each in reversed(cls.__mro__):
    text = inspect.cleandoc(each.__doc__ or "")
    for entry in docstring_parser.parse(text, docstring_parser.Style.GOOGLE).params:
      meaning = " ".join((entry.description or "").split())
      out.update({name.strip(): meaning for name in entry.arg_name.split(",")})
  return out

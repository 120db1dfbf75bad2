"""How a model was trained: `coa.json` in its folder, for later runs to compare.

A model trained on one dialect and prompt can fail on another: the quickstart's RL model
falls from 0.88 to 0.00 with `rollout.style=full` instead of brief.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object, to_dataclass

FILE = "coa.json"
_WORDS = {
  "variant": "variant",
  "style": "prompt style",
  "tools": "tools",
  "functions": "function tools",
  "tool_formats": "tool format",
  "parallel": "tools.parallel",
}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dialect:
  """A model's prompt and allowed spans.

  Attributes:
    variant: its name.
    style: the prompt's style.
    tools: the tools' tags.
    functions: names of the tools called by the tag `tool`.
    tool_formats: protocol, and varied if the data had copies in other formats.
    parallel: maximum calls in one `tool` span; 1 without this tag.
  """

  variant: str
  style: str
  tools: tuple[str, ...]
  functions: tuple[str, ...] = ()
  tool_formats: tuple[str, ...] = ("protocol",)
  parallel: int = 1

  @classmethod
  def of(cls, variant: Variant, style: str, varied: bool = False) -> Dialect:
    """Returns the dialect of a variant reduced to a run's tools."""
    formats = ("protocol", "varied") if varied else ("protocol",)
    return cls(
      variant.name,
      style,
      tuple(sorted(variant.tools)),
      tuple(sorted(variant.functions)),
      formats,
      variant.parallel if FUNCTION_TAG in variant.tools else 1,
    )

  def differences(self, other: Dialect) -> list[str]:
    """Lists the fields in which a run's dialect differs from this one."""
    out = []
    for field, words in _WORDS.items():
      mine = getattr(self, field)
      others = getattr(other, field)
      # A model trained on several formats knows each of them.
      if mine != others and not (field == "tool_formats" and {*others} <= {*mine}):
        out.append(f"{words} {_shown(mine)} and not {_shown(others)}")
    return out


@dataclasses.dataclass(frozen=True)
class Origin:
  """How a model was trained.

  Attributes:
    dialects: the training data's dialects; empty if not recorded.
    max_len: maximum tokens per trajectory.
    seed: the run's seed.
    step: the number of updates.
    commit: the code's commit at the run's start; None if unknown.
  """

  dialects: tuple[Dialect, ...]
  max_len: int
  seed: int
  step: int = 0
  commit: str | None = None

  @classmethod
  def of_run(cls, record: Mapping[str, Any] | None, step: int) -> Origin | None:
    """Builds a run's origin after `step` updates from `prepare_workdir`'s record.

    Returns None if there is no record.
    """
    if record is None:
      return None
    return to_dataclass({**record, "step": step}, cls, "config.json: field 'origin'")

  def write(self, folder: str | os.PathLike[str]) -> None:
    """Writes `coa.json` into a model's existing folder."""
    with atomic_write(os.path.join(folder, FILE)) as f:
      json.dump(dataclasses.asdict(self), f, indent=2)
      f.write("\n")


def read_origin(folder: str | os.PathLike[str]) -> Origin | None:
  """Reads `coa.json` in a model's folder; None if missing.

  Raises:
    ValueError: the file is damaged.
  """
  path = os.path.join(folder, FILE)
  if not os.path.isfile(path):
    return None
  try:
    return to_dataclass(read_object(path), Origin, path)
  except ValueError as e:
    raise ValueError(
      f"{e}; the file says how the model was trained. Delete it, and no run is "
      "compared with that"
    ) from e


def warn_if_other(folder: str, variant: Variant, style: str) -> None:
  """Warns in one line how a run's dialect differs from the model's training dialect.

  Args:
    folder: the model's folder; nothing is compared without `coa.json`.
    variant: the run's variant, reduced to its tools.
    style: the run's prompt style.

  Raises:
    ValueError: `coa.json` is damaged.
  """
  origin = read_origin(folder)
  if origin is None or not origin.dialects:
    return
  ours = Dialect.of(variant, style)
  # The nearest dialect has the fewest differences.
  found = min((d.differences(ours) for d in origin.dialects), key=len)
  if found:
    _log.warning("%s was trained with %s as in this run", folder, ", ".join(found))


def dialects_of_data(*files: str) -> tuple[Dialect, ...]:
  """Collects the dialects of trajectory files, each once, from their manifests.

  A file has no dialects if its manifest is missing or has an earlier version.

  Raises:
    ValueError: a manifest of ours has an unreadable dialect.
  """
  out: dict[Dialect, None] = {}
  for file in files:
    for row, where in _manifest_rows(file):
      out[to_dataclass(row, Dialect, where)] = None
  return tuple(out)


def _manifest_rows(file: str) -> Iterator[tuple[Any, str]]:
  """Yields the dialects in a file's manifest, with their places."""
  # Written by `import_traces`, then by `distill`.
  beside = os.path.join(os.path.dirname(file), "manifest.json")
  for path in (f"{file}.manifest.json", beside):
    try:
      manifest = read_object(path)
    except (OSError, ValueError):  # missing, or not our manifest
      continue
    hashes = manifest.get("sha256")
    rows = manifest.get("dialects")
    about = isinstance(hashes, Mapping) and os.path.basename(file) in hashes
    if about and isinstance(rows, list):
      for i, row in enumerate(rows):
        yield row, f"{path}: dialects[{i}]"
      return


def _shown(value: str | int | tuple[str, ...]) -> str:
  if isinstance(value, str | int):
    return repr(value)
  return repr(", ".join(value)) if value else "none"

"""How a model was trained: `coa.json` in its folder, for later runs to compare.

A model that learnt one dialect under one prompt can be of no use under another: the
quickstart's RL model falls from 0.88 to 0.00 with `rollout.style=full` in place of
brief.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from coa_jax.disk import atomic_write
from coa_jax.json_io import read_object, to_dataclass
from coa_jax.protocol.roles import Variant

FILE = "coa.json"
_WORDS = {
  "variant": "variant",
  "style": "prompt style",
  "tools": "tools",
  "functions": "function tools",
  "tool_formats": "tool format",
}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dialect:
  """What a prompt says, and what may be written after it.

  Attributes:
    variant: its name.
    style: of the prompt.
    tools: tags of the tools.
    functions: names of the tools that the tag `tool` calls.
    tool_formats: protocol, and varied where copies in other formats were learnt.
  """

  variant: str
  style: str
  tools: tuple[str, ...]
  functions: tuple[str, ...] = ()
  tool_formats: tuple[str, ...] = ("protocol",)

  @classmethod
  def of(cls, variant: Variant, style: str, varied: bool = False) -> Dialect:
    """The dialect of a variant that is left with the tools of a run."""
    formats = ("protocol", "varied") if varied else ("protocol",)
    functions = tuple(sorted(variant.functions))
    return cls(variant.name, style, tuple(sorted(variant.tools)), functions, formats)

  def differences(self, other: Dialect) -> list[str]:
    """Says in which fields a run's dialect is another than this one's."""
    out = []
    for field, words in _WORDS.items():
      mine = getattr(self, field)
      others = getattr(other, field)
      # Who has learnt several formats knows each of them.
      if mine != others and not (field == "tool_formats" and {*others} <= {*mine}):
        out.append(f"{words} {_shown(mine)} and not {_shown(others)}")
    return out


@dataclasses.dataclass(frozen=True)
class Origin:
  """How a model was trained.

  Attributes:
    dialects: of what it learnt from; none where that is not on record.
    max_len: tokens that a trajectory had at most.
    seed: of the run.
    step: updates made.
    commit: of the code that the run began with; None if unknown.
  """

  dialects: tuple[Dialect, ...]
  max_len: int
  seed: int
  step: int = 0
  commit: str | None = None

  @classmethod
  def of_run(cls, record: Mapping[str, Any] | None, step: int) -> Origin | None:
    """That of a run after so many updates, from what `prepare_workdir` recorded.

    None where nothing is on record.
    """
    if record is None:
      return None
    return to_dataclass({**record, "step": step}, cls, "config.json: field 'origin'")

  def write(self, folder: str | os.PathLike[str]) -> None:
    """Writes `coa.json` into a model's folder, which is there."""
    with atomic_write(os.path.join(folder, FILE)) as f:
      json.dump(dataclasses.asdict(self), f, indent=2)
      f.write("\n")


def read_origin(folder: str | os.PathLike[str]) -> Origin | None:
  """Reads `coa.json` of a model's folder; None where there is none.

  Raises:
    ValueError: it is damaged.
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
  """Says in one line how a run's dialect differs from that of the model's training.

  Args:
    folder: of the model; one without `coa.json` is compared with nothing.
    variant: of the run, left with its tools.
    style: of its prompts.

  Raises:
    ValueError: `coa.json` is damaged.
  """
  origin = read_origin(folder)
  if origin is None or not origin.dialects:
    return
  ours = Dialect.of(variant, style)
  # Of several the nearest: what differs from that is the least that has to change.
  found = min((d.differences(ours) for d in origin.dialects), key=len)
  if found:
    _log.warning("%s was trained with %s as in this run", folder, ", ".join(found))


def dialects_of_data(*files: str) -> tuple[Dialect, ...]:
  """The dialects of files of trajectories, each once, by the manifests beside them.

  None is found of a file whose manifest is missing, or of an earlier version.

  Raises:
    ValueError: a manifest of ours names a dialect that cannot be read.
  """
  out: dict[Dialect, None] = {}
  for file in files:
    for row, where in _manifest_rows(file):
      out[to_dataclass(row, Dialect, where)] = None
  return tuple(out)


def _manifest_rows(file: str) -> Iterator[tuple[Any, str]]:
  """Yields the dialects that a file's manifest names, and where they stand."""
  # Of `import_traces`, then of `distill`.
  beside = os.path.join(os.path.dirname(file), "manifest.json")
  for path in (f"{file}.manifest.json", beside):
    try:
      manifest = read_object(path)
    except (OSError, ValueError):  # none, or a manifest of somebody else's
      continue
    hashes = manifest.get("sha256")
    rows = manifest.get("dialects")
    about = isinstance(hashes, Mapping) and os.path.basename(file) in hashes
    if about and isinstance(rows, list):
      for i, row in enumerate(rows):
        yield row, f"{path}: dialects[{i}]"
      return


def _shown(value: str | tuple[str, ...]) -> str:
  if isinstance(value, str):
    return repr(value)
  return repr(", ".join(value)) if value else "none"

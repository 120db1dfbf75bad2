"""Reads SFT's trajectory files and their weights from `data.trajectories`.

trajectories.jsonl                     one file
a.jsonl,runs/*/t.jsonl,b.jsonl=2       several files, with a glob; an epoch sees
                                       b.jsonl's trajectories twice
c.jsonl=0.5                            every other trajectory of c.jsonl
"""

from __future__ import annotations

import dataclasses
import glob
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.protocol.trajectory import iter_trajectories

_FIELD = "data.trajectories"


@dataclasses.dataclass(frozen=True)
class Source:
  """A file of trajectories.

  Attributes:
    path: the file's path.
    weight: repetitions of each trajectory per epoch, above 0.
  """

  path: str
  weight: float = 1.0


def read_sources(text: str) -> tuple[Source, ...]:
  """Reads `data.trajectories`; a file's exact name always stands for that file.

  Raises:
    ValueError: a weight is not a number above 0, a name is empty, or a file comes
      twice.
    FileNotFoundError: a glob matches nothing.
  """
  if os.path.exists(text):
    return (Source(text),)
  out: dict[str, Source] = {}
  for entry in text.split(","):
    # --- A weight follows the last "=", unless that is part of a file's name.
    entry = entry.strip()
    pattern, equals, number = entry.rpartition("=")
    weight = 1.0
    if equals and not os.path.exists(entry):
      weight = _weight(number, entry)
    else:
      pattern = entry
    if not pattern:
      raise ValueError(
        f"{_FIELD} is {text!r}; accepted: FILE, or FILE=WEIGHT and globs, by commas"
      )

    # --- The files; a missing one is reported by its reader.
    paths = [pattern]
    if glob.has_magic(pattern) and not os.path.exists(pattern):
      paths = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
      if not paths:
        raise FileNotFoundError(f"{_FIELD}: no file matches {pattern!r}")
    for path in paths:
      if path in out:
        raise ValueError(f"{_FIELD}: {path} comes twice; {path}=2 sees it twice")
      out[path] = Source(path, weight)
  return tuple(out.values())


def _weight(number: str, entry: str) -> float:
  try:
    weight = float(number)
  except ValueError:
    weight = math.nan
  if not 0 < weight < math.inf:
    raise ValueError(f"{_FIELD}: {entry!r} has weight {number!r}; it must be above 0")
  return weight


def check_sources(sources: Sequence[Source]) -> None:
  """Checks each file's first row.

  Raises:
    FileNotFoundError, ValueError: a file is missing, or its first row is not a
      trajectory; then the message names the importer for other systems' records.
  """
  for source in sources:
    if os.path.isdir(source.path):
      raise ValueError(
        f"{_FIELD}: {source.path} is a folder; give {source.path}/*.jsonl"
      )
    try:
      next(iter_trajectories(source.path), None)
    except ValueError as e:
      raise ValueError(
        f"{e}; other systems' records become trajectories by: coa import "
        f"--file={source.path} --variant=VARIANT --out=trajectories.jsonl"
      ) from e


def validation_order(sizes: Sequence[int]) -> np.ndarray:
  """Returns the order [N] for holding out sequences, in proportion to file sizes.

  Args:
    sizes: sequences per file; a single file keeps its own order.
  """
  places = [(np.arange(size) + 0.5) / size for size in sizes if size]
  return np.argsort(np.concatenate([np.zeros(0), *places]), kind="stable")


def mix(
  sources: Sequence[Source], sizes: Sequence[int], train: np.ndarray
) -> tuple[np.ndarray, dict[str, dict[str, Any]]]:
  """Repeats or leaves out sequences by their files' weights.

  Args:
    sources: the files.
    sizes: sequences per file; indices run through the files in order.
    train: trainable sequences' indices, in order.

  Returns:
    An epoch's indices; and for each file its trajectories, trainable trajectories,
    weight, and trajectories per epoch.

  Raises:
    ValueError: the weights leave no trajectory.
  """
  ends = np.cumsum(sizes)
  parts = []
  table = {}
  for source, size, end in zip(sources, sizes, ends, strict=True):
    mine = train[(train >= end - size) & (train < end)]
    # Spread evenly: the first k give floor(k * weight).
    seen = np.floor(np.arange(len(mine) + 1) * source.weight)
    part = np.repeat(mine, np.diff(seen).astype(np.int64))
    parts.append(part)
    table[source.path] = {
      "trajectories": int(size),
      "to_train_on": len(mine),
      "weight": source.weight,
      "in_an_epoch": len(part),
    }
  mixed = np.concatenate(parts)
  if not len(mixed):
    raise ValueError(f"{_FIELD}: the weights leave no trajectory to train on")
  return mixed, table

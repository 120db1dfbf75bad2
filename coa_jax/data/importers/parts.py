"""Reassembles row values in order, after rows were dealt to shards in turn."""

from __future__ import annotations

import array
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from coa_jax.protocol.storage import write_lines
from coa_jax.runtime.json_io import shown
from coa_jax.runtime.shard import Shard

_PLACE = re.compile(rb'\{"place": (\d+), ')


def write_part(
  path: str | os.PathLike[str], values: Iterable[dict[str, Any]], shard: Shard
) -> int:
  """Writes one JSON line for each row in a shard; returns the number of lines.

  The values belong to every `shard.count`-th row, from number `shard.index` on. The
  file appears when it is complete.
  """

  def lines() -> Iterator[str]:
    for i, value in enumerate(values):
      line = {"place": shard.index + i * shard.count, **value}
      yield json.dumps(line, default=str)  # a table's row may hold a date

  return write_lines(path, lines())


def read_parts(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Yields all rows' values in row order, from all shards' joined files.

  Raises:
    ValueError: a row is missing, or there twice: the shards read different files.
  """
  # --- Each line's offset: 16 bytes per row in memory.
  places = array.array("q")
  begins = array.array("q")
  begin = 0
  with open(path, "rb") as f:
    for line in f:
      match = _PLACE.match(line)
      if not match:
        raise ValueError(f"{path}: no part of an import: {shown(line)}")
      places.append(int(match[1]))
      begins.append(begin)
      begin += len(line)
    order = np.argsort(np.array(places))
    if not np.array_equal(np.array(places)[order], np.arange(len(places))):
      raise ValueError(
        f"{path}: rows are missing, or there twice: the shards read different files"
      )

    # --- The lines, in row order.
    for i in order:
      f.seek(begins[i])
      yield json.loads(f.readline())

"""Loads a model with every array's reads counted; see test_weights.py.

  python tests/model/read_on_devices.py FOLDER

Prints, for unrolled and for scanned layers, the entries that each read of each array
gave. Fails where values or places of the parameters are not as they should be.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from coa_jax.model import transformer
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf import io as weights
from coa_jax.model.sharding import MeshConfig, make_partitioner


class Counted:
  """An array of a file that notes how many entries each read of it gives."""

  def __init__(self, stored: Any, read: list[int]):
    """Args: the array, where to note."""
    self._stored, self._read = stored, read
    self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

  def __getitem__(self, index: Any) -> np.ndarray:
    out = self._stored[index]
    self._read.append(out.size)
    return out


def main(folder: str) -> None:
  """Loads unrolled and scanned, on as many devices as there are."""
  several = len(jax.devices()) > 1
  partitioner = make_partitioner(MeshConfig(tensor=2, fsdp=4)) if several else None
  opened, seen = weights._open, {}
  for scan in (False, True):
    load, read = LoadConfig(scan=scan), {}
    weights._open = opened
    _, whole = weights.load_model(folder, load)
    weights._open = lambda *args, read=read: (
      (name, Counted(x, read.setdefault(name, []))) for name, x in opened(*args)
    )
    cfg, params = weights.load_model(folder, load, partitioner)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, whole))
    if partitioner:
      wanted = partitioner.tree(transformer.param_shapes(cfg))
      assert jax.tree.map(lambda x: x.sharding, params) == wanted
    seen[f"scan={scan}"] = read
  print(json.dumps(seen))


if __name__ == "__main__":
  main(sys.argv[1])

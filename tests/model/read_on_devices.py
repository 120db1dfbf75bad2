"""Loads a model and counts the reads of every array; see test_weights.py.

  python tests/model/read_on_devices.py FOLDER

Prints the number of entries in each read of each array, for unrolled and for scanned
layers, on one device and on a mesh of all devices. Fails if the parameters have wrong
values or shardings.
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
from coa_jax.model.hf.stored import StoredArray
from coa_jax.model.sharding import ONE_DEVICE, MeshConfig, make_partitioner

READ: dict[str, list[int]] = {}


class Counted(StoredArray):
  """A file's array; it records the number of entries in each read."""

  def __init__(self, file: str, name: str, array: Any):
    """As `StoredArray`."""
    super().__init__(file, name, array)
    self.read = READ.setdefault(name, [])

  def __getitem__(self, index: Any) -> np.ndarray:
    out = super().__getitem__(index)
    self.read.append(out.size)
    return out


def main(folder: str) -> None:
  """Loads unrolled and scanned layers, on one device and on all."""
  weights.StoredArray = Counted
  mesh = make_partitioner(MeshConfig(tensor=2, fsdp=4))
  cases = []
  for scan in (False, True):
    whole = None
    for partitioner in (ONE_DEVICE, mesh):
      READ.clear()
      cfg, params = weights.load_model(folder, LoadConfig(scan=scan), partitioner)
      devices = 1
      if partitioner is mesh:
        devices = 8
        shardings = jax.tree.map(lambda x: x.sharding, params)
        assert shardings == partitioner.tree(transformer.param_shapes(cfg))
        assert jax.tree.all(jax.tree.map(np.array_equal, params, whole))
      whole = params
      cases.append({"devices": devices, "read": dict(READ)})
  print(json.dumps(cases))


if __name__ == "__main__":
  main(sys.argv[1])

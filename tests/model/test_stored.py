"""Weights that are no numbers are refused by file and array, and no others are."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file, save_file

from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.io import load_model, save_model


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_weight_that_is_no_number_is_refused_by_file_and_array(
  tmp_path, dtype, number
):
  save_model(tmp_path, toy.MODEL, toy.params(), shard_bytes=60_000)
  name = "model.layers.1.mlp.up_proj.weight"
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  file = tmp_path / index["weight_map"][name]
  arrays = {k: x.astype(jnp.dtype(dtype)) for k, x in load_file(file).items()}
  save_file(arrays, file)
  load_model(tmp_path)
  arrays[name][-1, 3] = number
  save_file(arrays, file)
  for scan in (False, True):
    with pytest.raises(ValueError) as e:
      load_model(tmp_path, LoadConfig(scan=scan))
    assert str(e.value).startswith(f"{file}: array {name} holds NaN or infinity")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_weight_may_be_as_large_as_its_dtype(tmp_path, dtype):
  save_model(tmp_path, toy.MODEL, toy.params())
  file = tmp_path / "model.safetensors"
  least = jnp.finfo(dtype).min
  save_file(
    {k: np.full_like(x, least, dtype) for k, x in load_file(file).items()}, file
  )
  _, params = load_model(tmp_path)
  assert all(np.all(x == float(least)) for x in jax.tree.leaves(params))

"""NaN and infinite weights are refused by file and array; finite ones are not."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file, save_file

from coa_jax.model import lora
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.folder import save_adapter
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.lora import LoraConfig

LORA = LoraConfig(rank=2, matrices=("q",))


@pytest.mark.slow
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


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_weights_have_the_mode_of_the_files_beside_them(tmp_path, umask):
  before = os.umask(umask)
  try:
    for shard_bytes in (60_000, 10**9, 10**9):  # the last one replaces a file
      save_model(tmp_path / "model", toy.MODEL, toy.params(), shard_bytes=shard_bytes)
    adapters = lora.init_adapters(toy.MODEL, LORA, 0)
    save_adapter(tmp_path / "adapter", toy.MODEL, adapters, LORA, "base")
  finally:
    os.umask(before)
  files = [path for path in tmp_path.rglob("*") if path.is_file()]
  assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
  assert {path.suffix for path in files} == {".json", ".safetensors"}

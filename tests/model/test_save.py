"""The content of a saved model folder, and models that are not saved."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import toy
from models import QWEN2, QWEN3, params_of

from coa_jax.model.hf.io import load_model, save_model


def test_parameters_of_another_architecture_are_not_saved(tmp_path):
  """The error lists every difference, and nothing is written."""
  params = params_of(dataclasses.replace(QWEN3, ff=72))
  del params["layer_0"]["q"]
  params["extra"] = np.ones(3, np.float32)
  params["layer_1"]["o"] = params["layer_1"]["o"].astype(np.float16)
  with pytest.raises(ValueError) as e:
    save_model(tmp_path / "m", QWEN3, params)
  message = str(e.value)
  for fault in (
    "unknown extra (3,)",
    "missing layer_0/q",
    "layer_1/o has dtype float16, expected float32",
    "layer_0/up has shape (32, 72), expected (32, 64)",
  ):
    assert fault in message
  assert message.count(";") == 3 + 2 * 3 - 1
  assert not (tmp_path / "m").exists()


def test_stacked_layers_must_be_as_many_as_the_architecture_has(tmp_path):
  cfg = dataclasses.replace(QWEN3, scan=True)
  more = params_of(dataclasses.replace(cfg, layers=3))
  with pytest.raises(ValueError, match=r"layers/q has shape \(3, .*expected \(2, "):
    save_model(tmp_path / "m", cfg, more)


def test_other_fields_of_a_folders_config_are_kept(tmp_path):
  first, second = tmp_path / "first", tmp_path / "second"
  params = params_of(QWEN2)
  save_model(first, QWEN2, params)
  carried = {
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
    "initializer_range": 0.01,
    "max_position_embeddings": 131072,
    "pad_token_id": 151643,
  }
  file = first / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | carried))
  generation = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05}
  (first / "generation_config.json").write_text(json.dumps(generation))
  save_model(second, QWEN2, params, toy.tokenizer(), like=first)
  end = {"eos_token_id": [toy.tokenizer().end_id, 151645, 151643]}
  config = json.loads((second / "config.json").read_text())
  assert {k: config[k] for k in carried} == carried | end
  end = {"eos_token_id": toy.tokenizer().end_id}
  found = json.loads((second / "generation_config.json").read_text())
  assert found == generation | end
  assert load_model(second)[0] == QWEN2


def test_a_new_folder_says_what_ends_and_pads_a_text(tmp_path):
  tokenizer = toy.tokenizer()
  save_model(tmp_path, QWEN3, params_of(QWEN3), tokenizer)
  ids = {
    "eos_token_id": [tokenizer.end_id, tokenizer.hf.eos_token_id],
    "pad_token_id": tokenizer.hf.pad_token_id,
  }
  assert None not in ids.values()
  config = json.loads((tmp_path / "config.json").read_text())
  assert {k: config[k] for k in ids} == ids
  generation = json.loads((tmp_path / "generation_config.json").read_text())
  assert generation == {"do_sample": True, **ids}
  names = {p.name for p in tmp_path.iterdir()}
  assert names >= {"tokenizer.json", "tokenizer_config.json", "model.safetensors"}
  assert not any(name.endswith(".tmp") for name in names)

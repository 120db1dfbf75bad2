"""Model folders: exact round trips, errors that list everything that is wrong."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file, save_file

from coa_jax.model import qwen, weights
from coa_jax.model.qwen import QwenConfig
from coa_jax.model.weights import LoadConfig, load_model, save_model

QWEN3 = toy.MODEL
QWEN2 = dataclasses.replace(
  QWEN3, qk_norm=False, attention_bias=True, tie_embeddings=False, rope_theta=1e6
)


def params_of(cfg: QwenConfig):
  """Parameters of which no two arrays are alike."""
  shapes = jax.eval_shape(lambda: qwen.init_params(cfg, 0))
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes)


def assert_identical(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    assert x.dtype == y.dtype, path
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("cfg", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_saved_and_loaded_is_identical(tmp_path, cfg, saved: bool, loaded: bool):
  unrolled = params_of(cfg)
  scanned = qwen.stack(unrolled, cfg.layers)
  save_model(
    tmp_path, dataclasses.replace(cfg, scan=saved), scanned if saved else unrolled
  )
  back, params = load_model(tmp_path, LoadConfig(scan=loaded, remat="dots"))
  assert back == dataclasses.replace(cfg, scan=loaded, remat="dots")
  assert_identical(params, scanned if loaded else unrolled)


@pytest.mark.parametrize("cfg", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_config_json_reads_back(cfg: QwenConfig):
  assert weights.from_hf_config(weights.to_hf_config(cfg)) == cfg


def test_bfloat16_survives_and_is_cast_when_asked(tmp_path):
  cfg = dataclasses.replace(QWEN3, param_dtype="bfloat16", dtype="bfloat16")
  params = params_of(cfg)
  save_model(tmp_path, cfg, params)
  both = LoadConfig(dtype="bfloat16", param_dtype="bfloat16")
  back, same = load_model(tmp_path, both)
  assert back == cfg
  assert_identical(params, same)
  _, wide = load_model(tmp_path)
  assert_identical(wide, jax.tree.map(lambda x: x.astype(np.float32), params))


def test_shards_are_read_through_their_index(tmp_path):
  params = params_of(QWEN3)
  save_model(tmp_path, QWEN3, params)
  whole = load_file(tmp_path / "model.safetensors")
  (tmp_path / "model.safetensors").unlink()
  where = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(whole)}
  for part in sorted(set(where.values())):
    save_file({k: v for k, v in whole.items() if where[k] == part}, tmp_path / part)
  index = tmp_path / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": where}))
  _, back = load_model(tmp_path)
  assert_identical(back, params)
  (tmp_path / "part-1.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors: the weights are"):
    load_model(tmp_path)


def test_an_output_matrix_beside_tied_embeddings_is_left_alone(tmp_path):
  params = params_of(QWEN3)
  save_model(tmp_path, QWEN3, params)
  file = tmp_path / "model.safetensors"
  arrays = load_file(file)
  save_file({**arrays, "lm_head.weight": arrays["model.norm.weight"]}, file)
  assert_identical(load_model(tmp_path)[1], params)


def test_everything_that_does_not_fit_is_listed(tmp_path):
  save_model(tmp_path, QWEN3, params_of(QWEN3))
  file = tmp_path / "model.safetensors"
  arrays = load_file(file)
  layer = "model.layers.1."
  del arrays[layer + "mlp.up_proj.weight"], arrays["model.norm.weight"]
  arrays[layer + "self_attn.q_proj.bias"] = np.zeros(32, np.float32)
  arrays["visual.patch"] = np.zeros((2, 3), np.float32)
  key = layer + "self_attn.k_proj.weight"
  arrays[key] = arrays[key].T.copy()
  save_file(arrays, file)
  with pytest.raises(ValueError) as e:
    load_model(tmp_path)
  message = str(e.value)
  assert message.startswith(f"{tmp_path}: the weights do not fit config.json: ")
  for fault in (
    f"missing {layer}mlp.up_proj.weight",
    "missing model.norm.weight",
    f"unknown {layer}self_attn.q_proj.bias (32,)",
    "unknown visual.patch (2, 3)",
    f"{key} has shape (32, 16), expected (16, 32)",
  ):
    assert fault in message
  assert message.count(";") == 4


def test_a_damaged_file_and_a_missing_one_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"config\.json: not a model folder"):
    load_model(tmp_path)
  save_model(tmp_path, QWEN3, params_of(QWEN3))
  file = tmp_path / "model.safetensors"
  file.write_bytes(file.read_bytes()[:100])
  with pytest.raises(ValueError, match=r"model\.safetensors: damaged safetensors"):
    load_model(tmp_path)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"model_type": "llama"}, "'model_type' is 'llama'; accepted: 'qwen2', 'qwen3'"),
    ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported: 'silu'"),
    ({"rope_scaling": {"type": "yarn"}}, "'rope_scaling' is"),
    (
      {"rope_parameters": {"rope_type": "yarn"}},
      "'rope_parameters.rope_type' is 'yarn'",
    ),
    ({"use_sliding_window": True}, "'use_sliding_window' is True"),
    ({"attention_dropout": 0.1}, "'attention_dropout' is 0.1"),
    ({"attention_bias": True}, "'attention_bias' is True; supported: False"),
    ({"hidden_size": None}, "lacks field 'hidden_size'"),
  ],
)
def test_what_this_model_does_not_compute_is_refused(tmp_path, changes, named: str):
  save_model(tmp_path, QWEN3, params_of(QWEN3))
  file = tmp_path / "config.json"
  config = {**json.loads(file.read_text()), **changes}
  file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
  with pytest.raises(ValueError) as e:
    load_model(tmp_path)
  assert str(e.value).startswith(str(file)) and named in str(e.value)


def test_defaults_of_old_config_files():
  config = weights.to_hf_config(QWEN3)
  del config["head_dim"], config["num_key_value_heads"], config["rope_theta"]
  del config["tie_word_embeddings"]
  cfg = weights.from_hf_config(config)
  assert (cfg.head_dim, cfg.kv_heads) == (QWEN3.width // QWEN3.heads, QWEN3.heads)
  assert (cfg.rope_theta, cfg.tie_embeddings) == (10_000.0, False)
  new = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
  assert weights.from_hf_config(new).rope_theta == 5e5


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attention_bias": True}, "must differ"),
    ({"qk_norm": False}, "must differ"),
    ({"attention_bias": True, "qk_norm": False, "head_dim": 10}, r"model\.head_dim"),
  ],
)
def test_what_hugging_face_does_not_have_is_not_saved(tmp_path, changes, message: str):
  cfg = dataclasses.replace(QWEN3, **changes)
  with pytest.raises(ValueError, match=message):
    save_model(tmp_path / "m", cfg, params_of(cfg))
  assert not (tmp_path / "m").exists()

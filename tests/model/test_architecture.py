"""Published model sizes; reading and writing config.json."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import models
import pytest
import transformers
from published import PARAMETERS, PUBLISHED

from coa_jax.model import transformer
from coa_jax.model.config import Llama3Rope, ModelConfig, Yarn
from coa_jax.model.hf.config import from_hf_config, to_hf_config
from coa_jax.model.variants import VARIANTS, variant

QWEN2, QWEN3, LLAMA = (
  dataclasses.replace(cfg, layers=4)
  for cfg in (models.QWEN2, models.QWEN3, models.LLAMA)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_published_variants_have_the_published_number_of_parameters(name: str):
  assert (
    transformer.count_params(transformer.param_shapes(variant(name, scan=True)))
    == PARAMETERS[name]
  )


def test_a_variant_that_is_not_published_is_refused():
  with pytest.raises(
    ValueError, match=r"no variant 'qwen2\.5-8b'; there are qwen2\.5-"
  ):
    variant("qwen2.5-8b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_files_are_read_as_their_variants(name: str):
  assert from_hf_config(PUBLISHED[name]) == VARIANTS[name]


def test_base_models_say_more_and_are_read_too():
  base = {
    **PUBLISHED["qwen2.5-7b"],
    "eos_token_id": 151643,
    "max_position_embeddings": 131072,
    "transformers_version": "4.40.1",
    "use_mrope": False,
  }
  assert from_hf_config(base) == VARIANTS["qwen2.5-7b"]
  with pytest.raises(ValueError, match="'use_mrope' is True; accepted: False"):
    from_hf_config({**base, "use_mrope": True})


LONGER = {"factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA_ROPE = PUBLISHED["llama3.2-1b"]["rope_scaling"]


@pytest.mark.parametrize(
  ("name", "changes", "rope"),
  [
    # As in the READMEs of Qwen2.5 and Qwen3.
    (
      "qwen2.5-7b",
      {"rope_scaling": {"type": "yarn", **LONGER}},
      {"yarn": Yarn(4.0, 32_768)},
    ),
    (
      "qwen3-8b",
      {"rope_scaling": {"rope_type": "yarn", **LONGER}},
      {"yarn": Yarn(4.0, 32_768)},
    ),
    # transformers 5 writes all of it in one field.
    (
      "qwen3-8b",
      {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **LONGER}},
      {"yarn": Yarn(4.0, 32_768)},
    ),
    ("llama3.2-1b", {"rope_parameters": {**LLAMA_ROPE, "rope_theta": 5e5}}, {}),
    # Missing values come from the file's max_position_embeddings.
    (
      "qwen3-8b",
      {"rope_scaling": {"rope_type": "yarn", **LONGER, "factor": None}},
      {"yarn": Yarn(40_960 / 32_768, 32_768)},
    ),
    (
      "qwen3-8b",
      {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
      {"yarn": Yarn(2.0, 40_960)},
    ),
    (
      "llama3.2-1b",
      {"rope_scaling": {**LLAMA_ROPE, "original_max_position_embeddings": None}},
      {"llama3": Llama3Rope(32.0, 131_072, 1.0, 4.0)},
    ),
  ],
)
def test_stretched_frequencies_are_read_however_they_are_written(name, changes, rope):
  config = {**PUBLISHED[name], **changes}
  if "rope_parameters" in changes:
    del config["rope_theta"], config["rope_scaling"]
  assert from_hf_config(config) == dataclasses.replace(VARIANTS[name], **rope)


FULL = "full_attention"
YARNS = (
  None,
  Yarn(4.0, 32_768),
  Yarn(1.5, 1000, beta_fast=16.0, beta_slow=2.0),
  Yarn(2.0, 64, attention_factor=0.9, truncate=False),
)


@pytest.mark.parametrize("cfg", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_config_json_reads_back(cfg: ModelConfig):
  sizes = {"head_dim": 10, "heads": 6, "kv_heads": 3, "norm_eps": 1e-5}
  for yarn, tied in itertools.product(YARNS, (False, True)):
    one = {"yarn": yarn, "tie_embeddings": tied}
    changed = dataclasses.replace(cfg, **sizes, **one, rope_theta=5e5)
    assert from_hf_config(written(changed)) == changed


def test_config_json_of_a_llama_reads_back():
  for rope, tied in itertools.product(
    ({}, {"llama3": Llama3Rope(8.0, 64, 1.0, 4.0)}, {"yarn": Yarn(4.0, 64)}),
    (False, True),
  ):
    changed = dataclasses.replace(LLAMA, tie_embeddings=tied, head_dim=10, **rope)
    config = written(changed)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert from_hf_config(config) == changed
  # Defaults for fields missing in a Llama's config.json.
  del config["num_key_value_heads"], config["head_dim"]
  cfg = from_hf_config(config)
  assert (cfg.kv_heads, cfg.head_dim) == (LLAMA.heads, LLAMA.width // LLAMA.heads)


def written(cfg: ModelConfig) -> dict[str, Any]:
  """The content of an architecture's config.json."""
  return json.loads(json.dumps(to_hf_config(cfg)))


def test_the_positions_that_a_config_states_are_those_of_yarn():
  longer = dataclasses.replace(QWEN3, yarn=Yarn(4.0, 32_768))
  assert written(longer)["max_position_embeddings"] == 131_072
  assert written(QWEN3)["max_position_embeddings"] == 32_768
  assert "rope_scaling" not in written(QWEN3)


@pytest.mark.parametrize(
  "fields",
  [
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    {"sliding_window": 8, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
    {"use_sliding_window": True, "sliding_window": 8},  # transformers' default: 28
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL] * 4},
    {"layer_types": None},
  ],
)
def test_sliding_windows_that_are_off_change_nothing(fields: dict[str, Any]):
  assert from_hf_config({**written(QWEN3), **fields}) == QWEN3


def test_defaults_of_old_config_files():
  config = written(QWEN3)
  del config["head_dim"], config["rope_theta"], config["tie_word_embeddings"]
  config["num_key_value_heads"] = None
  cfg = from_hf_config(config)
  # transformers' defaults: 128 for Qwen3, D / N for Qwen2.
  assert (cfg.head_dim, cfg.kv_heads) == (128, QWEN3.heads)
  old = {**config, "model_type": "qwen2", "attention_bias": True}
  assert from_hf_config(old).head_dim == QWEN3.width // QWEN3.heads
  assert (cfg.rope_theta, cfg.tie_embeddings) == (10_000.0, False)
  new = {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
  assert from_hf_config(new).rope_theta == 5e5


def test_key_value_heads_that_are_left_out_are_as_many_as_transformers_takes():
  config = {**written(QWEN3), "num_attention_heads": 64}
  del config["num_key_value_heads"]
  assert from_hf_config(config).kv_heads == 32
  assert transformers.Qwen3Config(num_attention_heads=64).num_key_value_heads == 32
  assert transformers.Qwen2Config(num_attention_heads=64).num_key_value_heads == 32
  config["num_attention_heads"] = 4
  with pytest.raises(ValueError, match="lacks field 'num_key_value_heads'"):
    from_hf_config(config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "qwen3_moe"}, "'model_type' is 'qwen3_moe'; accepted: 'qwen2'"),
    ({"model_type": ["qwen3"]}, "'model_type' is ['qwen3']"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; accepted: 1.0"),
    ({"num_experts": 64}, "'num_experts' is 64; accepted: null, false or 0"),
    ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; accepted: 'silu'"),
    ({"attention_bias": True}, "'attention_bias' is True; supported for qwen3: False"),
    (
      {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
      "'rope_scaling.rope_type' is 'dynamic'; supported: 'default', 'yarn', 'llama3'",
    ),
    (
      {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
      "'rope_parameters.mrope_section' ([16, 24, 24]) is not supported",
    ),
    (
      {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"type": "yarn", "factor": 4.0},
      },
      "has 'rope_parameters' and 'rope_scaling'",
    ),
    (
      {"rope_scaling": {"type": "yarn", "factor": 0.5}},
      "'rope_scaling.factor' is 0.5; accepted: a number of at least 1, or null",
    ),
    ({"num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
    (
      {"layer_types": [FULL, "sliding_attention"] * 2},
      "field 'layer_types' has 'sliding_attention'; supported: 'full_attention'",
    ),
    *(
      (
        {"rope_scaling": {k: v for k, v in LLAMA_ROPE.items() if k != field}},
        f"field 'rope_scaling': lacks '{field}', which 'llama",
      )
      for field in ("factor", "low_freq_factor", "high_freq_factor")
    ),
    # Without `layer_types`; a missing `sliding_window` means 4096.
    *(
      (
        {"use_sliding_window": True, "max_window_layers": 3, **size},
        "field 'use_sliding_window' is True, which gives sliding-window attention to 1 "
        "of 4 layers; supported: False",
      )
      for size in ({"sliding_window": 8}, {})
    ),
    ({"layer_types": [FULL] * 3}, "'layer_types' has 3 entries, not 4"),
    ({"layer_types": ["linear"] * 4}, "'layer_types' has 'linear'; supported: 'full"),
  ],
)
def test_an_unsupported_field_is_refused_by_name(changes, message: str):
  with pytest.raises(ValueError) as e:
    from_hf_config({**written(QWEN3), **changes}, "folder/config.json")
  assert str(e.value).startswith("folder/config.json: ") and message in str(e.value)


def test_fields_that_no_table_knows_are_ignored_with_one_warning(caplog):
  known = {**written(QWEN3), "quantization_config": None, "output_attentions": False}
  assert from_hf_config(known, "known/config.json") == QWEN3
  assert not caplog.records
  more = {**known, "future_field": 7, "another": {"a": [1]}}
  for _ in range(2):  # a run reads the file more than once
    assert from_hf_config(more, "new/config.json") == QWEN3
  (record,) = caplog.records
  assert record.levelname == "WARNING"
  message = record.getMessage()
  assert message.startswith("new/config.json: ignored fields")
  assert message.endswith(": 'another', 'future_field'")


# Impossible values, at least one of each kind.
@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("tie_word_embeddings", "false"),
    ("hidden_size", "32"),
    ("vocab_size", True),
    ("num_hidden_layers", 2.0),
    ("num_hidden_layers", 1_000_000),
    ("head_dim", 0),
    ("hidden_size", 2**63),
    ("rms_norm_eps", float("nan")),
    ("max_window_layers", -1),
    ("layer_types", [5] * 4),
    ("rope_scaling", "yarn"),
    ("rope_scaling.beta_fast", 0),
    ("rope_scaling.truncate", None),
    ("rope_scaling.original_max_position_embeddings", "x"),
    ("eos_token_id", "x"),
    ("torch_dtype", 3),
    ("use_cache", "no"),
    ("rope_theta", 10**1000),
  ],
)
def test_values_that_can_not_be_are_refused_by_name_in_a_short_line(field: str, value):
  config = {**written(QWEN3), "use_sliding_window": True}
  if field.startswith("rope_scaling."):
    inner = field.removeprefix("rope_scaling.")
    config["rope_scaling"] = {"rope_type": "yarn", **LONGER, inner: value}
  else:
    config[field] = value
  with pytest.raises(ValueError) as e:
    from_hf_config(config, "folder/config.json")
  message = f"folder/config.json: field '{field}' is {repr(value)[:20]}"
  assert str(e.value).startswith(message) and "; accepted: " in str(e.value)
  assert len(str(e.value)) < 200


@pytest.mark.parametrize("field", ["vocab_size", "num_attention_heads"])
def test_a_size_that_is_missing_is_named(field: str):
  config = written(QWEN2)
  del config[field]
  with pytest.raises(ValueError, match=rf"config\.json: lacks field '{field}'"):
    from_hf_config(config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attention_bias": True}, "attention_bias is True and model.qk_norm True; Hugg"),
    (
      {"qk_norm": False, "width": 30},
      "heads 4 do not divide width 30, but of Llama",
    ),
  ],
)
def test_a_field_unknown_to_hugging_face_is_not_written(changes, message: str):
  with pytest.raises(ValueError, match=message):
    to_hf_config(dataclasses.replace(QWEN3, **changes))

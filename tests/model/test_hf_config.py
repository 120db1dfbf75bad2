"""Values of a config.json that no model can have are refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import toy

from coa_jax.model.hf.config import from_hf_config, to_hf_config

CONFIG = to_hf_config(dataclasses.replace(toy.MODEL, layers=4))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("tie_word_embeddings", "false"),
    ("hidden_size", "32"),
    ("vocab_size", True),
    ("num_hidden_layers", 2.0),
    ("head_dim", 0),
    ("rms_norm_eps", float("nan")),
    ("rope_theta", 0),
    ("max_window_layers", -1),
    ("layer_types", [5] * 4),
    ("rope_scaling", "yarn"),
    ("eos_token_id", "x"),
    ("max_position_embeddings", 1.5),
    ("num_hidden_layers", 1_000_000),
    ("hidden_size", 2**63),
    ("torch_dtype", 3),
    ("use_cache", "no"),
  ],
)
def test_values_of_a_wrong_type_or_range_are_refused_by_name(field: str, value):
  config = {**CONFIG, "use_sliding_window": True, field: value}
  with pytest.raises(ValueError) as e:
    from_hf_config(config, "folder/config.json")
  message = f"folder/config.json: field '{field}' is {value!r}; accepted: "
  assert str(e.value).startswith(message)


@pytest.mark.parametrize("field", ["hidden_size", "rope_theta", "rms_norm_eps"])
def test_a_number_of_a_thousand_digits_is_refused_in_a_short_line(field: str):
  with pytest.raises(ValueError, match=f"field '{field}' is 1000.*; accepted: ") as e:
    from_hf_config(CONFIG | {field: 10**1000}, "folder/config.json")
  assert len(str(e.value)) < 200


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("beta_fast", 0),
    ("truncate", None),
    ("original_max_position_embeddings", "x"),
  ],
)
def test_so_are_those_of_the_rotary_embedding(field: str, value):
  config = {**CONFIG, "rope_scaling": {**YARN, field: value}}
  message = rf"field 'rope_scaling\.{field}' is {value!r}; accepted: "
  with pytest.raises(ValueError, match=message):
    from_hf_config(config)

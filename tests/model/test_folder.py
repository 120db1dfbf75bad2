"""An unusable model folder is refused before its weights are read."""

from __future__ import annotations

import json

import pytest
import toy

from coa_jax.model.hf.config import to_hf_config
from coa_jax.model.hf.folder import load_tokenizer
from coa_jax.model.hf.io import load_config


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("num_hidden_layers", 10**9, "'num_hidden_layers' is 1000000000; .* from 1 to 1,0"),
    ("vocab_size", 8, "config.json: field 'vocab_size' is 8; the tokenizer.json there"),
  ],
)
def test_a_folder_that_can_not_be_used_is_refused_unread(
  tmp_path, field, value, message
):
  toy.tokenizer().save(tmp_path)
  config = to_hf_config(toy.MODEL)
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert load_tokenizer(tmp_path, load_config(tmp_path)).vocab_size
  (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
  with pytest.raises(ValueError, match=message):
    load_tokenizer(tmp_path, load_config(tmp_path))

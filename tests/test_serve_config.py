"""A server from an evaluation's config: sections it reads, ignores and refuses."""

from __future__ import annotations

import json
import pathlib

import ml_collections
import pytest
import toy

from coa_jax.protocol.origin import Dialect, Origin
from coa_jax.rollout.types import RolloutConfig, check_positions
from coa_jax.runtime.config import ConfigError, fill_defaults, read_config
from coa_jax.serve import ServeConfig, open_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("policy")
  toy.save_policy(str(folder / "model"), toy.params())
  return folder


def config(folder: pathlib.Path, **sections) -> ml_collections.ConfigDict:
  values = dict(
    init=str(folder / "model"),
    rollout=dict(style="brief", slots=1, window=4, max_len=64, prefill_rows=1),
    tools=dict(tools=("code",), sandbox="subprocess"),
    tasks=dict(uri="nothing reads this"),
    eval=dict(samples=2),
    reward=dict(graders=dict(qa="qa")),
    vllm=dict(),
  )
  return ml_collections.ConfigDict(values | sections)


def test_fields_unrelated_to_the_team_are_ignored(folder):
  with open_server(config(folder)) as server:
    server.warm_up()


@pytest.mark.parametrize(
  ("section", "message"),
  [("vllm", "the sampler in JAX serves"), ("evil", "did you mean 'eval'")],
)
def test_an_unservable_config_is_refused_by_name(folder, section, message: str):
  wrong = config(folder, **{section: {"folder": "x"}})
  with (
    pytest.raises(ConfigError, match=f"section '{section}'.* {message}"),
    open_server(wrong),
  ):
    pass


def test_rows_beyond_the_models_positions_are_refused(folder):
  file = folder / "model" / "config.json"
  written = file.read_text()
  file.write_text(json.dumps({**json.loads(written), "max_position_embeddings": 63}))
  message = r"rollout\.max_len=64 is above the 63 positions .*max_position_embeddings"
  try:
    with pytest.raises(ValueError, match=message), open_server(config(folder)):
      pass
    # RoPE scaling counts, in the form of published model folders.
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    stretched = {"max_position_embeddings": 32, "rope_scaling": yarn}
    file.write_text(json.dumps({**json.loads(written), **stretched}))
    with open_server(config(folder)):
      pass
    # A model with a vision tower has its positions further in.
    inner = {"model_type": "qwen3_5", "text_config": {"max_position_embeddings": 63}}
    file.write_text(json.dumps(inner))
    with pytest.raises(ValueError, match=message):
      check_positions(RolloutConfig(max_len=64), toy.MODEL, str(folder / "model"))
  finally:
    file.write_text(written)


@pytest.mark.parametrize(
  ("rollout", "expected"),
  [
    ({}, ("math", "brief", 48)),
    ({"style": "full", "variant": None}, ("math", "full", 48)),
    ({"variant": "unified", "max_len": 64}, ("unified", "brief", 64)),
  ],
)
def test_a_missing_field_is_as_the_model_was_trained(tmp_path, rollout, expected):
  trained = Dialect("math", "brief", ("code",))
  Origin((trained,), max_len=48, seed=0).write(tmp_path)
  values = ml_collections.ConfigDict(dict(init=str(tmp_path), rollout=rollout))
  values.tools = dict(tools=("code",))
  fill_defaults(values, ServeConfig)
  settings = read_config(values, ServeConfig).rollout
  assert (settings.variant, settings.style, settings.max_len) == expected
  # Omitted fields have a type too; flags are parsed by it.
  assert values.rollout.get_type("slots") is int
  assert values.rollout.get_type("constrain") is bool
  (tmp_path / "coa.json").write_text("{")
  with pytest.raises(ValueError, match=r"coa\.json: not JSON"):
    read_config(values, ServeConfig)
  (tmp_path / "coa.json").unlink()
  bare = read_config(values, ServeConfig).rollout
  assert bare.max_len == rollout.get("max_len", RolloutConfig().max_len)

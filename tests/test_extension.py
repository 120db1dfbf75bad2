"""A finished run extended by more steps equals a run started with all of them."""

from __future__ import annotations

import json
import pathlib

import guessing
import jax
import ml_collections
import numpy as np
import pytest
import toy

from coa_jax import rl, sft
from coa_jax.model.hf.io import load_model
from coa_jax.protocol.origin import Dialect, read_origin
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report.metrics import read_metrics
from coa_jax.runtime.config import ConfigError


@pytest.fixture(scope="module")
def sft_config(tmp_path_factory) -> ml_collections.ConfigDict:
  folder = tmp_path_factory.mktemp("sft")
  toy.save_policy(str(folder / "model"), toy.params())
  write_jsonl(folder / "data.jsonl", toy.trajectories() * 2)
  return ml_collections.ConfigDict(
    dict(
      init=str(folder / "model"),
      optim=dict(lr=1e-3, warmup=3, schedule="constant"),
      data=dict(
        trajectories=str(folder / "data.jsonl"),
        steps=2,
        rows=2,
        length=toy.MAX_LEN,
        validation=0,
      ),
      checkpoint=dict(every=100, keep=1),
    )
  )


@pytest.fixture(scope="module")
def rl_config(tmp_path_factory) -> ml_collections.ConfigDict:
  config = guessing.rl_config(tmp_path_factory.mktemp("rl"))
  config.algo.steps = 2
  config.dev.every = 100
  config.optim.schedule = "constant"
  return config


def with_steps(config, steps: int, **optim) -> ml_collections.ConfigDict:
  out = config.copy_and_resolve_references()
  out["algo" if "algo" in config else "data"].steps = steps
  out.optim.update(optim)
  return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", pytest.param("rl", marks=pytest.mark.soak)])
def test_an_extended_run_equals_one_begun_with_all_steps(
  name, sft_config, rl_config, tmp_path
):
  journey, config = (sft, sft_config) if name == "sft" else (rl, rl_config)
  grown, whole = str(tmp_path / "grown"), str(tmp_path / "whole")
  journey.run(config, grown)
  assert read_origin(f"{grown}/model").step == 2
  journey.run(with_steps(config, 4), grown)
  results = journey.run(with_steps(config, 4), whole)
  _, ours = load_model(f"{grown}/model")
  _, theirs = load_model(f"{whole}/model")
  assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))
  log = read_metrics(f"{grown}/metrics.jsonl", name)
  assert [row["step"] for row in log] == [1, 2, 3, 4]
  assert results["steps"] == 4 == read_origin(f"{grown}/model").step
  # The workdir now records 4 steps, and refuses a return to 2.
  record = json.loads(pathlib.Path(grown, "config.json").read_text())
  section = record["config"]["data" if name == "sft" else "algo"]
  assert section["steps"] == 4
  with pytest.raises(ConfigError, match="steps was 4 and not 2"):
    journey.run(config, grown)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "optim", "curriculum", "message"),
  [
    ("sft", "cosine", None, r"data\.steps was 2 and not 4 \(optim\.schedule='cosine'"),
    ("rl", "linear", None, r"algo\.steps was 2 and not 4 \(optim\.schedule='linear'"),
    ("rl", "constant", 0.5, r"not 4 \(algo\.sampling\.task_sampler='curriculum'"),
    ("rl", "constant", 0.0, ""),
  ],
)
def test_a_setting_that_depends_on_all_steps_is_not_extended(
  name, optim, curriculum, message, sft_config, rl_config, tmp_path, monkeypatch
):
  journey, config = (sft, sft_config) if name == "sft" else (rl, rl_config)
  config = with_steps(config, 2, schedule=optim)
  if curriculum is not None:
    config.tasks.uri = str(tmp_path / "tasks.jsonl")
    row = {"question": "sky", "answers": ["blue"], "meta": {"pass_rate": 0.5}}
    write_jsonl(config.tasks.uri, [row])
    config.algo.sampling.update(task_sampler="curriculum", curriculum=curriculum)

  class LoadedError(Exception):
    pass

  def load_params(*unused):
    raise LoadedError

  # A workdir with output binds its config; the test needs no weights.
  monkeypatch.setattr(journey, "load_params", load_params)
  with pytest.raises(LoadedError):
    journey.run(config, str(tmp_path / "w"))
  (tmp_path / "w" / "metrics.jsonl").write_text("{}\n")
  error = ConfigError if message else LoadedError
  with pytest.raises(error, match=message or None):
    journey.run(with_steps(config, 4), str(tmp_path / "w"))


@pytest.mark.slow
def test_a_model_folder_says_how_it_was_trained(
  sft_config, rl_config, tmp_path, caplog
):
  """SFT copies the dialect from the data's manifest; RL warns about another style."""
  data = tmp_path / "data.jsonl"
  data.write_text(pathlib.Path(sft_config.data.trajectories).read_text())
  dialect = {"variant": "unified", "style": "full", "tools": ["code"]}
  manifest = {"sha256": {"data.jsonl": ""}, "dialects": [dialect]}
  (tmp_path / "manifest.json").write_text(json.dumps(manifest))
  config = with_steps(sft_config, 1)
  config.data.trajectories = str(data)
  config.lora = dict(rank=2)
  sft.run(config, str(tmp_path / "sft"))
  origin = read_origin(tmp_path / "sft" / "model")
  assert origin.dialects == (Dialect("unified", "full", ("code",)),)
  assert (origin.max_len, origin.seed, origin.step) == (toy.MAX_LEN, 0, 1)
  record = json.loads((tmp_path / "sft" / "config.json").read_text())
  assert origin.commit == record["git_commit"]
  assert read_origin(tmp_path / "sft" / "adapter") == origin

  config = with_steps(rl_config, 1)
  config.init = str(tmp_path / "sft" / "model")
  caplog.clear()
  rl.run(config, str(tmp_path / "rl"))
  told = [line for line in caplog.messages if "was trained with" in line]
  words = "prompt style 'full' and not 'brief' as in this run"
  assert told == [f"{config.init} was trained with {words}"]
  origin = read_origin(tmp_path / "rl" / "model")
  assert origin.dialects == (Dialect("unified", "brief", ("code",)),)

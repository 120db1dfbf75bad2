"""GSM8K from worked solutions to a graded model, with the tiny configs in a row."""

from __future__ import annotations

import json
import pathlib
import runpy
import types

import numpy as np
import pytest

from coa_jax import distill, evaluate, sft
from coa_jax.model import decode_params
from coa_jax.model.hf.io import load_model
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, read_trajectories
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "fixtures" / "gsm8k.jsonl"


def get_config(journey: str, arg: str = "tiny"):
  """Returns a config from `configs/`."""
  path = ROOT / "configs" / f"{journey}.py"
  return runpy.run_path(str(path))["get_config"](arg)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> types.SimpleNamespace:
  """The tiny distillation's results and trajectory file."""
  folder = tmp_path_factory.mktemp("distill")
  config = get_config("distill_gsm8k")
  config.tasks.uri = str(ROWS)
  config.tools.sandbox = BACKEND
  results = distill.run(config, str(folder))
  return types.SimpleNamespace(results=results, file=folder / "trajectories.jsonl")


@pytest.mark.soak
def test_the_tiny_configs_in_a_row(distilled, tmp_path):
  assert distilled.results["tasks"] == 20
  assert distilled.results["convert"] == {
    "kept": 17,
    "dropped": {"answer_not_computed": 2, "no_program": 1},
  }
  assert distilled.results["kept"] == 17
  for t in read_trajectories(distilled.file):
    (prompt,) = [s.text for s in t.segments if s.author == Author.PROMPT]
    assert prompt == t.meta["question"] and "<<" not in json.dumps(t.to_json())
    assert t.reward == 1.0 and t.calls

  config = get_config("sft_gsm8k")
  config.data.trajectories = str(distilled.file)
  trained = sft.run(config, str(tmp_path / "sft"))
  assert trained["trajectories"] == 9 and trained["left_out_too_long"] == 0

  config = get_config("evaluate_gsm8k")
  config.init = str(tmp_path / "sft" / "model")
  config.tasks.uri = str(ROWS)
  config.tools.sandbox = BACKEND
  assert evaluate.run(config, str(tmp_path / "eval"))["tasks"] == 8


@pytest.mark.slow
def test_transformers_writes_the_tokens_of_a_hybrid_trained_here(distilled, tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  from tests.model import comparing

  config = get_config("sft_gsm8k")
  hybrid = get_config("sft_world", "hybrid").model
  shape = ("layer_kinds", "delta", "attention_gate", "norm_offset", "rotary_dim")
  config.model.update({name: hybrid[name] for name in shape})
  config.model.layer_kinds = ("delta", "attention")
  config.data.trajectories = str(distilled.file)
  sft.run(config, str(tmp_path))

  folder = tmp_path / "model"
  read = json.loads((folder / "config.json").read_text())
  assert read["architectures"] == ["Qwen3_5ForCausalLM"]
  cfg, params = load_model(folder)
  tok = Tokenizer.load(folder)
  prompts = []
  for t in list(read_trajectories(distilled.file))[:3]:
    tok.encode_trajectories([t])
    ids = [id for s in t.segments if s.author == Author.PROMPT for id in s.ids]
    prompts.append(np.array(ids, np.int32))
  new = 48
  found = comparing.greedy(decode_params.architecture(cfg), params, prompts, new)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  for ids, mine in zip(prompts, found, strict=True):
    tokens = torch.tensor(ids)[None].long()
    out = theirs.generate(
      tokens,
      attention_mask=torch.ones_like(tokens),
      do_sample=False,
      max_new_tokens=new,
      eos_token_id=None,
      pad_token_id=tok.hf.pad_token_id,
    )
    assert mine == out[0, len(ids) :].tolist()
  assert len({token for mine in found for token in mine}) > 5

"""An exported folder makes `generate` and `vllm serve` stop after the answer."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
import real_vllm
import toy

from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.io import save_model

# Heads of 32: vLLM has no kernel for smaller ones on a CPU.
CFG = ModelConfig(
  vocab_size=384,
  width=64,
  layers=1,
  heads=2,
  kv_heads=1,
  head_dim=32,
  ff=64,
  tie_embeddings=False,
)
QUESTION = "2 + 3"


def answering(written: list[int]):
  """Parameters for a model that repeats these ids in order, without end.

  After any other id it writes the first one.
  """
  params = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype), transformer.param_shapes(CFG)
  )  # zeros: layers add nothing to an embedding
  params["final_norm"][:] = 1
  params["embed"][:, 0] = 1
  for place, i in enumerate(written[:-1], 1):
    params["embed"][i] = np.eye(CFG.width)[place]
  for place, i in enumerate(written):
    params["head"][place, i] = 100
  return params


def exported(folder: pathlib.Path, tokenizer, like: str = "") -> list[int]:
  """Writes a model folder; returns the ids of the answer that the model repeats."""
  ids = list(dict.fromkeys(tokenizer.encode("<answer> 5")))
  ids.append(tokenizer.end_id)
  save_model(folder, CFG, answering(ids), tokenizer, like)
  return ids


def generated(folder: pathlib.Path, prompt: list[int]) -> list[int]:
  """The tokens added by transformers' `generate`, with no option but their maximum."""
  torch = pytest.importorskip("torch")
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(folder)
  found = model.generate(torch.tensor([prompt]), max_new_tokens=20)
  return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("made", [toy.tokenizer, toy.stock_tokenizer])
def test_generate_stops_after_the_answer(made, tmp_path):
  tokenizer = made()
  ids = exported(tmp_path, tokenizer)
  assert generated(tmp_path, tokenizer.encode(QUESTION)) == ids


def test_training_goes_on_from_a_folder_that_stops_elsewhere(tmp_path):
  first, second, third = (tmp_path / name for name in ("first", "second", "third"))
  exported(first, toy.tokenizer())
  end = toy.tokenizer().end_id
  for name in ("config.json", "generation_config.json"):
    file = first / name
    written = json.loads(file.read_text())
    assert written["eos_token_id"] == [end, toy.tokenizer().hf.eos_token_id]
    file.write_text(json.dumps(written | {"eos_token_id": [300, 301]}))
  ids = exported(second, toy.tokenizer(), first)
  assert generated(second, toy.tokenizer().encode(QUESTION)) == ids
  exported(third, toy.tokenizer(), second)
  for name in ("config.json", "generation_config.json"):
    assert json.loads((third / name).read_text())["eos_token_id"] == [end, 300, 301]


@real_vllm.NEEDED
@pytest.mark.parametrize("made", [toy.tokenizer, toy.stock_tokenizer])
def test_vllm_serve_stops_after_the_answer(made, tmp_path):
  tokenizer = made()
  ids = exported(tmp_path / "model", tokenizer)
  with real_vllm.served(str(tmp_path / "model"), str(tmp_path / "log")) as client:
    body = dict(model="m", prompt=QUESTION, max_tokens=20, return_token_ids=True)
    answer = client.post("/v1/completions", json=body)
  assert answer.status_code == 200, answer.text
  (choice,) = answer.json()["choices"]
  assert choice["token_ids"] == ids
  assert choice["finish_reason"] == "stop"

"""vLLM serves our exported folder unchanged, and its log-probs match the learner's.

Needs a real vLLM (`real_vllm`).
"""

from __future__ import annotations

import numpy as np
import pytest
import real_vllm
import toy

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.model import transformer
from coa_jax.model.config import Llama3Rope, ModelConfig
from coa_jax.model.hf.io import save_model

NEW = 64
# Heads of 32: vLLM has no kernel for smaller ones on a CPU.
MODELS = {
  "qwen3": dict(heads=4, kv_heads=2, qk_norm=True, attention_bias=False),
  "qwen2": dict(heads=2, kv_heads=1, qk_norm=False, attention_bias=True),
  "llama": dict(
    heads=2, kv_heads=1, qk_norm=False, llama3=Llama3Rope(8.0, 64, 1.0, 4.0)
  ),
}


@real_vllm.NEEDED
@pytest.mark.parametrize("kind", list(MODELS))
def test_vllm_serves_an_exported_folder(tmp_path, kind: str):
  tokenizer = toy.tokenizer()
  cfg = ModelConfig(
    vocab_size=384,
    width=64,
    layers=2,
    head_dim=32,
    ff=128,
    **MODELS[kind],
  )
  params = transformer.init_params(cfg, 0)
  folder = str(tmp_path / "model")
  save_model(folder, cfg, params, tokenizer=tokenizer)
  prompts = [[5, 9, 200], list(range(10, 40)), tokenizer.encode("<think> work")]
  with real_vllm.served(folder, str(tmp_path / "log")) as client:
    body = dict(model="m", prompt=prompts, max_tokens=NEW, temperature=0, logprobs=0)
    body |= dict(ignore_eos=True, return_token_ids=True, add_special_tokens=False)
    answer = client.post("/v1/completions", json=body)
  assert answer.status_code == 200, answer.text
  choices = sorted(answer.json()["choices"], key=lambda c: c["index"])
  for prompt, choice in zip(prompts, choices, strict=True):
    ids, theirs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert len(ids) == NEW
    batch = batching.empty(1, len(prompt) + NEW)
    batch.tokens_BT[0] = prompt + ids
    batch.segment_BT[:] = batch.loss_mask_BT[:] = 1
    batch.position_BT[0] = np.arange(len(prompt) + NEW)
    ours = np.asarray(log_probs.token_logps(cfg, params, batch)[0])[0, len(prompt) :]
    np.testing.assert_allclose(theirs, ours, atol=1e-4)

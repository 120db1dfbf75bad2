"""Hugging Face's Qwen2 and Qwen3 compute what ours computes, in both directions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from coa_jax.model import qwen
from coa_jax.model.qwen import Qwen
from coa_jax.model.weights import load_model, save_model

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

FAMILIES = pytest.mark.parametrize(
  ("family", "tied"), [("qwen2", False), ("qwen2", True), ("qwen3", False)]
)
# Of the largest logit; both sides compute in float32.
TOLERANCE = 2e-5
TOKENS = np.random.default_rng(0).integers(0, 384, (2, 40))


def ours(path) -> np.ndarray:
  """The logits of a model folder."""
  cfg, params = load_model(path)
  position = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)

  @jax.jit
  def logits(p):
    model = Qwen(cfg)
    hidden, _ = model.apply({"params": p}, TOKENS, position, jnp.ones_like(TOKENS))
    return model.apply({"params": p}, hidden, method="logits")

  return np.asarray(logits(params))


def theirs(model) -> np.ndarray:
  """The logits of a Hugging Face model."""
  with torch.no_grad():
    return model.eval()(torch.tensor(TOKENS)).logits.numpy()


def difference(a: np.ndarray, b: np.ndarray) -> float:
  out = float(np.abs(a - b).max() / np.abs(b).max())
  print(f"largest difference, relative to the largest logit: {out:.2e}")
  return out


@FAMILIES
def test_a_folder_of_hugging_face_computes_the_same_here(tmp_path, family, tied):
  qwen3 = family == "qwen3"
  kind = transformers.Qwen3Config if qwen3 else transformers.Qwen2Config
  config = kind(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    tie_word_embeddings=tied,
    rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    initializer_range=0.2,
    **({"head_dim": 10} if qwen3 else {}),
  )
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for p in model.parameters():  # biases and norms too
      p.add_(0.1 * torch.randn_like(p))
  model.save_pretrained(tmp_path)
  assert difference(ours(tmp_path), theirs(model)) <= TOLERANCE
  cfg, _ = load_model(tmp_path)
  assert (cfg.rope_theta, cfg.norm_eps) == (50_000.0, 1e-5)
  assert (cfg.tie_embeddings, cfg.qk_norm) == (tied, qwen3)


@FAMILIES
def test_a_folder_of_ours_computes_the_same_there(tmp_path, family, tied):
  cfg = dataclasses.replace(
    toy.MODEL,
    tie_embeddings=tied,
    attention_bias=family == "qwen2",
    qk_norm=family == "qwen3",
    head_dim=8 if family == "qwen2" else 10,
    rope_theta=50_000.0,
    norm_eps=1e-5,
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32),
    qwen.init_params(cfg, 0),
  )
  save_model(tmp_path, cfg, params)
  toy.tokenizer().save(tmp_path)
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
  assert type(model).__name__ == f"{family.title()}ForCausalLM"
  assert difference(ours(tmp_path), theirs(model)) <= TOLERANCE
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  text = "<think>caf\u00e9 12</think>"
  assert tokenizer.encode(text) == toy.tokenizer().encode(text)

"""Small Hugging Face hybrids with linear attention, drawn by seed."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 131


def draw(seed: int) -> dict[str, Any]:
  """Returns a Qwen3.5 decoder's config.json, a function of the seed alone."""
  rng = random.Random(seed)
  heads, kv_heads = rng.choice([(3, 1), (4, 2), (6, 3), (4, 4)])
  key_heads, groups = rng.choice([(2, 1), (2, 2), (1, 3), (3, 2)])
  config: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": rng.choice([40, 64]),
    "intermediate_size": rng.choice([56, 96]),
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": rng.choice([16, 32]),
    "linear_num_key_heads": key_heads,
    "linear_num_value_heads": key_heads * groups,
    "linear_key_head_dim": rng.choice([16, 32]),
    "linear_value_head_dim": rng.choice([8, 24, 32]),
    "linear_conv_kernel_dim": rng.choice([2, 4]),
    "rms_norm_eps": rng.choice([1e-6, 1e-5]),
    "tie_word_embeddings": rng.choice([True, False]),
    "torch_dtype": "float32",
    "rope_parameters": {
      "rope_type": "default",
      "rope_theta": rng.choice([1e4, 1e7]),
      "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
    },
  }
  # Full attention in every fourth layer, every second layer, or listed layers.
  layout = rng.choice(["fourth", "second", "listed"])
  config["num_hidden_layers"] = {"fourth": 4, "second": 4, "listed": 3}[layout]
  if layout == "second":
    config["full_attention_interval"] = 2
  if layout == "listed":
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    config["layer_types"] = rng.sample(kinds, 3)
  if rng.random() < 0.5:  # as in published folders
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1}
  return config


def folder(path: pathlib.Path, config: dict[str, Any], seed: int = 0) -> Any:
  """Writes a model folder with this config; returns Hugging Face's model."""
  path.mkdir(parents=True, exist_ok=True)
  (path / "config.json").write_text(json.dumps(config))
  model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
  fill(model, seed)
  model.save_pretrained(path)
  (path / "config.json").write_text(json.dumps(config))
  return model.eval()


def fill(model: Any, seed: int = 0) -> None:
  """Draws parameters that all matter.

  Decays are slow, as a memory needs: with a fresh model's fast decays an output is only
  a multiple of q k, and if that is near 0 the norm after it magnifies its rounding
  (docs/models-and-meshes.md has the figures).
  """
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      if name.endswith("A_log"):
        drawn = np.log(rng.uniform(0.01, 1.0, p.shape))
      elif p.ndim == 1:
        drawn = rng.normal(1.0 if "linear_attn.norm" in name else 0.0, 0.3, p.shape)
      else:
        std = 0.3 if "embed" in name or p.ndim == 3 else p.shape[-1] ** -0.5
        drawn = rng.normal(0.0, std, p.shape)
      p.copy_(torch.tensor(drawn))

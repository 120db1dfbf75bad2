"""A config.json for a seed: sizes, family, rotary scaling.

The layout is transformers 4's or transformers 5's.
"""

from __future__ import annotations

import random
from typing import Any

VOCABULARY = 131
_FIRST_LLAMA = 14  # earlier seeds give Qwen2 and Qwen3


def draw(seed: int) -> dict[str, Any]:
  """Returns a config.json, a function of the seed alone."""
  rng = random.Random(seed)
  family = "llama" if seed >= _FIRST_LLAMA else rng.choice(["qwen2", "qwen3"])
  heads, kv_heads = rng.choice([(3, 1), (5, 1), (6, 3), (7, 7), (4, 2), (3, 3)])
  head_dim = rng.choice([8, 10, 16])
  layers = rng.choice([2, 3])
  config = {
    "architectures": [f"{family.title()}ForCausalLM"],
    "model_type": family,
    "vocab_size": VOCABULARY,
    "hidden_size": rng.choice([24, 40, heads * head_dim]),
    "intermediate_size": rng.choice([33, 56]),
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": head_dim,
    "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
    "tie_word_embeddings": rng.choice([True, False]),
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
  }
  if family == "llama":
    config["hidden_size"] = heads * rng.choice([8, head_dim])  # a multiple of the heads
    config |= {"mlp_bias": False, "pretraining_tp": 1}
  if family != "qwen3" and config["hidden_size"] == heads * head_dim:
    del config["head_dim"]  # as Qwen2 folders do
  rotary = _draw_rotary(rng, llama3=family == "llama" and rng.random() < 0.7)
  layer_types = {} if family == "llama" else _draw_layer_types(rng, layers)
  return config | rotary | layer_types


def _draw_rotary(rng: random.Random, llama3: bool) -> dict[str, Any]:
  theta = rng.choice([1e4, 5e4, 1e6])
  rope: dict[str, Any] = {}
  if llama3:
    rope = {
      "factor": rng.choice([2.0, 8.0, 32.0]),
      "low_freq_factor": rng.choice([0.5, 1.0]),
      "high_freq_factor": rng.choice([2.0, 4.0]),
      "original_max_position_embeddings": rng.choice([16, 64]),
    }
  elif rng.random() < 0.6:
    rope = {
      "factor": rng.choice([1.0, 2.0, 4.0, 8.5]),
      "original_max_position_embeddings": rng.choice([4, 16, 32]),
    }
    if rng.random() < 0.5:
      rope["truncate"] = rng.random() < 0.3
    if rng.random() < 0.5:
      rope["attention_factor"] = rng.choice([0.7, 1.3])
    if rng.random() < 0.7:  # keeps the ramp inside these few dimensions
      rope |= {"beta_fast": 0.5, "beta_slow": 0.05}
  kind = "llama3" if llama3 else "yarn" if rope else "default"
  match rng.choice(["type", "rope_type", "rope_parameters"]):
    case "rope_parameters":
      rope = {"rope_type": kind, "rope_theta": theta, **rope}
      return {"rope_parameters": rope}
    case name:
      scaling = {name: kind, **rope} if rope else None
      return {"rope_theta": theta, "rope_scaling": scaling}


def _draw_layer_types(rng: random.Random, layers: int) -> dict[str, Any]:
  """Sliding-window fields; none of them turns it on."""
  off = {"use_sliding_window": False, "sliding_window": rng.choice([1, 7, 30])}
  match rng.choice(["none", "off", "max_window_layers", "layer_types"]):
    case "none":
      return {}
    case "off":
      return off
    case "max_window_layers":
      return {"max_window_layers": rng.choice([0, 1]), **off}
    case _:
      return {"layer_types": ["full_attention"] * layers, **off}


CONFIGS = {seed: draw(seed) for seed in range(2, _FIRST_LLAMA + 6)}


def with_yarn() -> int:
  """Returns a seed with both YaRN and layer types."""
  for seed, config in CONFIGS.items():
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("factor", 1) > 1 and "layer_types" in config:
      return seed
  raise AssertionError("no config has yarn and layer types")

"""Published models by name.

Source: the `config.json` files published with their weights (Qwen2.5: arXiv 2412.15115,
Qwen3: arXiv 2505.09388, Llama 3: arXiv 2407.21783). Qwen3.5's files were not at hand:
9B has transformers' defaults, and the others have the sizes listed by public ports.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from coa_jax.model.config import DeltaNet, Llama3Rope, ModelConfig


def _qwen25(V: int, D: int, L: int, N: int, K: int, F: int, tied: bool) -> ModelConfig:
  return ModelConfig(
    vocab_size=V,
    width=D,
    layers=L,
    heads=N,
    kv_heads=K,
    head_dim=D // N,
    ff=F,
    rope_theta=1e6,
    tie_embeddings=tied,
    attention_bias=True,
    qk_norm=False,
  )


def _qwen3(D: int, L: int, N: int, F: int, tied: bool) -> ModelConfig:
  return ModelConfig(
    vocab_size=151_936,
    width=D,
    layers=L,
    heads=N,
    kv_heads=8,
    head_dim=128,
    ff=F,
    rope_theta=1e6,
    tie_embeddings=tied,
  )


def _qwen35(D: int, L: int, N: int, K: int, F: int, Z: int, tied: bool) -> ModelConfig:
  """`Z` is linear attention's number of value heads."""
  return ModelConfig(
    vocab_size=248_320,
    width=D,
    layers=L,
    heads=N,
    kv_heads=K,
    head_dim=256,
    ff=F,
    rope_theta=1e7,
    tie_embeddings=tied,
    layer_kinds=("delta", "delta", "delta", "attention"),
    delta=DeltaNet(key_heads=16, value_heads=Z),
    attention_gate=True,
    norm_offset=True,
    rotary_dim=64,
  )


def _llama3(
  D: int, L: int, N: int, F: int, tied: bool, stretched: float = 0.0
) -> ModelConfig:
  """`stretched` is Llama 3.1's frequency factor; 0 for Llama 3's own frequencies."""
  llama3 = None
  if stretched:
    llama3 = Llama3Rope(stretched, 8_192, 1.0, 4.0)
  return ModelConfig(
    vocab_size=128_256,
    width=D,
    layers=L,
    heads=N,
    kv_heads=8,
    head_dim=D // N,
    ff=F,
    rope_theta=5e5,
    llama3=llama3,
    norm_eps=1e-5,
    tie_embeddings=tied,
    qk_norm=False,
  )


# Qwen2 has Qwen2.5's sizes. Base models from 14B up have norm_eps 1e-5, instruction
# models 1e-6: a folder's config.json decides.
VARIANTS = {
  "qwen2.5-0.5b": _qwen25(151_936, 896, 24, 14, 2, 4_864, True),
  "qwen2.5-1.5b": _qwen25(151_936, 1_536, 28, 12, 2, 8_960, True),
  "qwen2.5-3b": _qwen25(151_936, 2_048, 36, 16, 2, 11_008, True),
  "qwen2.5-7b": _qwen25(152_064, 3_584, 28, 28, 4, 18_944, False),
  "qwen2.5-14b": _qwen25(152_064, 5_120, 48, 40, 8, 13_824, False),
  "qwen2.5-32b": _qwen25(152_064, 5_120, 64, 40, 8, 27_648, False),
  "qwen2.5-72b": _qwen25(152_064, 8_192, 80, 64, 8, 29_568, False),
  "qwen3-0.6b": _qwen3(1_024, 28, 16, 3_072, True),
  "qwen3-1.7b": _qwen3(2_048, 28, 16, 6_144, True),
  "qwen3-4b": _qwen3(2_560, 36, 32, 9_728, True),
  "qwen3-8b": _qwen3(4_096, 36, 32, 12_288, False),
  "qwen3-14b": _qwen3(5_120, 40, 40, 17_408, False),
  "qwen3-32b": _qwen3(5_120, 64, 64, 25_600, False),
  "qwen3.5-0.8b": _qwen35(1_024, 24, 8, 2, 3_584, 16, True),
  "qwen3.5-2b": _qwen35(2_048, 24, 8, 2, 6_144, 16, True),
  "qwen3.5-4b": _qwen35(2_560, 32, 16, 4, 9_216, 32, True),
  "qwen3.5-9b": _qwen35(4_096, 32, 16, 4, 12_288, 32, False),
  "qwen3.5-27b": _qwen35(5_120, 64, 24, 4, 17_408, 48, False),
  "llama3-8b": _llama3(4_096, 32, 32, 14_336, False),
  "llama3.1-8b": _llama3(4_096, 32, 32, 14_336, False, 8.0),
  "llama3.1-70b": _llama3(8_192, 80, 64, 28_672, False, 8.0),
  "llama3.2-1b": _llama3(2_048, 16, 32, 8_192, True, 32.0),
  "llama3.2-3b": _llama3(3_072, 28, 24, 8_192, True, 32.0),
}


def variant(name: str, **changes: Any) -> ModelConfig:
  """Returns a published architecture by name, with fields replaced.

  Raises:
    ValueError: there is no such variant; the message lists them.
  """
  if name not in VARIANTS:
    raise ValueError(f"no variant {name!r}; there are {', '.join(VARIANTS)}")
  return dataclasses.replace(VARIANTS[name], **changes)

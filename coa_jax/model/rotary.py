"""Rotary position embedding: plain, or stretched as in YaRN or Llama 3.1.

Heads have Hugging Face's half-rotation layout, so weights carry over unchanged.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.config import Llama3Rope, ModelConfig, Yarn

# Cosines and sines of the rotary angles, each [B, T, 1, R / 2].
Rotation = tuple[jax.Array, jax.Array]


def frequencies(cfg: ModelConfig) -> tuple[np.ndarray, float]:
  """Computes rotary frequencies [R / 2] (float32), and the scale of cosines and sines.

  R is the number of rotated units per head: H, or `cfg.rotary_dim`. Frequencies are
  computed in float64 and rounded once: each is the float32 nearest to the exact value.
  """
  half = _rotated(cfg) // 2
  frequency = np.float64(cfg.rope_theta) ** (-np.arange(half) / half)
  scale = 1.0
  if cfg.yarn:
    frequency *= _yarn_slowing(cfg, cfg.yarn)
    scale = cfg.yarn.attention_factor or 0.1 * math.log(cfg.yarn.factor) + 1.0
  if cfg.llama3:
    frequency *= _llama3_slowing(frequency, cfg.llama3)
  return frequency.astype(np.float32), scale


def _rotated(cfg: ModelConfig) -> int:
  return cfg.rotary_dim or cfg.head_dim


def _yarn_slowing(cfg: ModelConfig, yarn: Yarn) -> np.ndarray:
  """Returns YaRN's factor per frequency (arXiv 2309.00071, section 3.2).

  Fast dimensions keep their frequency, slow ones divide it by `yarn.factor`; the ramp
  between them is linear in the dimension.
  """
  half = _rotated(cfg) // 2

  def dimension(turns: float) -> float:
    """Returns the dimension with `turns` turns over the trained positions."""
    wavelength = yarn.positions / (turns * 2 * math.pi)
    return half * math.log(wavelength) / math.log(cfg.rope_theta)

  low = dimension(yarn.beta_fast)
  high = dimension(yarn.beta_slow)
  if yarn.truncate:
    low = math.floor(low)
    high = math.ceil(high)
  low = max(low, 0)
  high = min(high, _rotated(cfg) - 1)
  if low == high:
    high += 1e-3
  ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
  return 1 - ramp + ramp / yarn.factor


def _llama3_slowing(frequency: np.ndarray, llama3: Llama3Rope) -> np.ndarray:
  """Returns Llama 3.1's factor per frequency.

  As in YaRN, but the ramp is linear in a dimension's number of turns. Source:
  `apply_scaling` in github.com/meta-llama/llama-models.
  """
  low = llama3.low_freq_factor
  high = llama3.high_freq_factor
  turns = llama3.positions * frequency / (2 * math.pi)
  keep = np.clip((turns - low) / (high - low), 0, 1)
  return keep + (1 - keep) / llama3.factor


def rotation(cfg: ModelConfig, position_BT: jax.Array) -> Rotation:
  """Computes rotary cosines and sines for positions (arXiv 2104.09864), float32.

  An angle is a float32 product, as in Hugging Face and vLLM. Its error, with the
  frequency's rounding, is up to 2.3e-3 rad before position 32,768, and 4 times as much
  before 131,072. More arithmetic is not worth it: bfloat16 rounds a query or key by as
  much.
  """
  frequency, scale = frequencies(cfg)
  angle_BT1F = position_BT[..., None, None].astype(jnp.float32) * frequency
  return jnp.cos(angle_BT1F) * scale, jnp.sin(angle_BT1F) * scale


def rotate(x_BTNH: jax.Array, rope: Rotation) -> jax.Array:
  """Rotates heads by their positions' angles, in float32; returns x's dtype.

  Units past the first R are unchanged.
  """
  cos, sin = rope
  rotated = 2 * cos.shape[-1]
  x_BTNR = x_BTNH[..., :rotated]
  a, b = jnp.split(x_BTNR.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  out = out.astype(x_BTNH.dtype)
  if rotated == x_BTNH.shape[-1]:
    return out
  return jnp.concatenate([out, x_BTNH[..., rotated:]], axis=-1)

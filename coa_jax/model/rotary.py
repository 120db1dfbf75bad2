"""Rotary position embedding, plain or stretched by YaRN.

In the half-rotation layout of Hugging Face's implementation, so weights carry over
unchanged.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.config import ModelConfig

# Cosines and sines of the rotary angles, each [B, T, 1, H / 2].
Rotation = tuple[jax.Array, jax.Array]


def frequencies(cfg: ModelConfig) -> tuple[np.ndarray, float]:
  """Rotary frequencies [H / 2] (float32), and the scale of cosines and sines.

  With YaRN (arXiv 2309.00071, section 3.2) dimensions that turn often keep their
  frequency, those that turn seldom are slowed down by the factor, with a linear ramp
  between; the scale is its section 3.4. Computed in float64 and rounded once, so that
  each frequency is the float32 nearest to the exact one.
  """
  half = cfg.head_dim // 2
  frequency = np.float64(cfg.rope_theta) ** (-np.arange(half) / half)
  y = cfg.yarn
  if y is None:
    return frequency.astype(np.float32), 1.0

  def dimension(turns: float) -> float:
    """The dimension that turns so many times over the trained positions."""
    return (
      half * math.log(y.positions / (turns * 2 * math.pi)) / math.log(cfg.rope_theta)
    )

  low, high = dimension(y.beta_fast), dimension(y.beta_slow)
  if y.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, cfg.head_dim - 1)
  if low == high:
    high += 1e-3
  ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
  frequency *= 1 - ramp + ramp / y.factor
  scale = y.attention_factor or 0.1 * math.log(y.factor) + 1.0
  return frequency.astype(np.float32), scale


def rotation(cfg: ModelConfig, position_BT: jax.Array) -> Rotation:
  """Rotary position embedding (arXiv 2104.09864): its cosines and sines, float32.

  An angle is a float32 product, as in Hugging Face and vLLM: with its frequency's
  rounding it is up to 2.3e-3 rad off before position 32,768, and 4 times that before
  131,072. Not worth more arithmetic: bfloat16 rounds a query or key by as much.
  """
  frequency, scale = frequencies(cfg)
  angle_BT1F = position_BT[..., None, None].astype(jnp.float32) * frequency
  return jnp.cos(angle_BT1F) * scale, jnp.sin(angle_BT1F) * scale


def rotate(x_BTNH: jax.Array, by: Rotation) -> jax.Array:
  """Rotates heads by their positions' angles, in float32; x's dtype."""
  cos, sin = by
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return out.astype(x_BTNH.dtype)

"""A layer's norms and matrix products, for training and for decoding."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from coa_jax.model.config import ModelConfig
from coa_jax.model.float32_sums import spread


def rms_norm(cfg: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
  """Normalises the last axis by RMS in float32 (arXiv 1910.07467); keeps x's dtype."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + cfg.norm_eps)
  if cfg.norm_offset:
    return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return y.astype(x.dtype) * spread(scale.astype(x.dtype), x.shape)


def project(x: jax.Array, w: jax.Array, inputs: int = 1) -> jax.Array:
  """Contracts the last `inputs` axes of x with the first of w.

  The operands are reshaped to two dimensions: XLA's CPU back-end computes the
  equivalent einsum's weight gradient three times slower. The result has x's dtype.
  """
  batch = x.shape[: x.ndim - inputs]
  outer = w.shape[inputs:]
  size = math.prod(w.shape[:inputs])
  y = x.reshape(-1, size) @ w.reshape(size, -1)
  return y.reshape(*batch, *outer).astype(x.dtype)


def linear_bf16(x: jax.Array, w: jax.Array, inputs: int = 1) -> jax.Array:
  """Projects with both factors in w's dtype and sums in x's; w's outputs are first.

  On a CPU both matter: a half-precision product is several times faster than float32 if
  its sums are float32, and twice as fast again with the outputs first.
  """
  split = w.ndim - inputs
  outer = w.shape[:split]
  size = math.prod(w.shape[split:])
  batch = x.shape[: x.ndim - inputs]
  x_RI = x.reshape(-1, size).astype(w.dtype)
  R = x_RI.shape[0]
  if R == 1:  # XLA has a kernel for several rows only
    x_RI = jnp.pad(x_RI, ((0, 1), (0, 0)))
  y = jax.lax.dot_general(
    x_RI, w.reshape(-1, size), (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
  )
  return y[:R].reshape(*batch, *outer)


def embed_bf16(embed_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  """Looks up rows [B, T, D] in a bfloat16 embedding, as integer bits.

  Otherwise XLA's CPU back-end would convert the whole embedding to float32 first.
  """
  bits_VD = jax.lax.bitcast_convert_type(embed_VD, jnp.uint16)
  bits_BTD = jnp.take(bits_VD, token_BT, axis=0)
  return jax.lax.bitcast_convert_type(bits_BTD, jnp.bfloat16)


def used(cfg: ModelConfig, w: jax.Array) -> jax.Array:
  """Rounds a parameter and casts it to the compute dtype, for training.

  The gradient ignores the rounding.
  """
  if cfg.weight_dtype:
    w = w + jax.lax.stop_gradient(rounded(w, cfg.weight_dtype) - w)
  return w.astype(cfg.dtype)


def rounded(x: jax.Array, dtype: str) -> jax.Array:
  """Rounds x to `dtype`'s precision; XLA would drop a conversion to it and back."""
  bits = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)


def norm_init(cfg: ModelConfig) -> Any:
  """Returns a norm scale's initializer; the norm multiplies by 1 at first."""
  return nn.initializers.zeros if cfg.norm_offset else nn.initializers.ones

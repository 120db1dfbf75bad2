"""A decoder's layer: a token mixer and a feed-forward network, each with a residual.

`Layer` has all that kinds of layers share; `AttentionLayer` mixes tokens by softmax
attention, `delta_layer.DeltaLayer` by the gated delta rule.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model import attention
from coa_jax.model.cache import CacheWrite, KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.rotary import Rotation, rotate
from coa_jax.model.sharding import ONE_DEVICE, Partitioner, inputs_of

# The layer inputs' name for checkpoint policies.
INPUT = "layer_input"


def rms_norm(cfg: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
  """Normalises the last axis by RMS in float32 (arXiv 1910.07467); in x's dtype."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + cfg.norm_eps)
  if cfg.norm_offset:
    return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return y.astype(x.dtype) * scale.astype(x.dtype)


def project(x: jax.Array, w: jax.Array, inputs: int = 1) -> jax.Array:
  """Contracts the last `inputs` axes of x with the first of w.

  As one product of two-dimensional operands: XLA's CPU back-end computes the equivalent
  einsum's weight gradient three times slower. In x's dtype.
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
  """Takes rows [B, T, D] of an embedding in bfloat16, by their bits.

  XLA's CPU back-end would convert the whole embedding to float32 before it takes one.
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
  """Rounds x to the precision of `dtype`; XLA would drop a conversion and back."""
  bits = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)


def norm_init(cfg: ModelConfig) -> Any:
  """Returns the initializer of a norm's scale: it multiplies by 1 at first."""
  return nn.initializers.zeros if cfg.norm_offset else nn.initializers.ones


class Layer(nn.Module):
  """One layer: a token mixer, then SwiGLU, each behind RMSNorm and a residual.

  Matrices have an adapter if the parameters hold one (see `lora.py`). A kind of layer
  defines `mix`.
  """

  cfg: ModelConfig
  partitioner: Partitioner = ONE_DEVICE
  decode: bool = False
  layer: int = 0

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    rope: Rotation,
    segment_BT: jax.Array | None,
    cache_write: CacheWrite | None,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Runs the layer.

    Args:
      x_BTD: its input.
      rope: rotary cosines and sines of the tokens' positions.
      segment_BT: packed rows: the segment of each token.
      cache_write: with a cache: the places of the call's tokens.
      cache: of all layers; this one's part is updated.

    Returns:
      The layer's output, and the cache.
    """
    x_BTD = checkpoint_name(x_BTD, INPUT)
    h_BTD = self._normed(x_BTD, "attn_norm")
    out_BTD, cache = self.mix(h_BTD, rope, segment_BT, cache_write, cache)
    x_BTD += self.partitioner.moved(out_BTD, "BT.", "BR.")
    out_BTD = self._feed_forward(self._normed(x_BTD, "ff_norm"))
    x_BTD += self.partitioner.moved(out_BTD, "BT.", "BR.")
    return x_BTD, cache

  def mix(
    self,
    h_BTD: jax.Array,
    rope: Rotation,
    segment_BT: jax.Array | None,
    cache_write: CacheWrite | None,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Mixes tokens: each output depends on its segment's tokens up to its own."""
    raise NotImplementedError

  def _normed(self, x_BTD: jax.Array, name: str) -> jax.Array:
    """Normalises a residual, for matrices that read all of a token."""
    h_BTD = self._norm(x_BTD, name, self.cfg.width)
    return self.partitioner.moved(h_BTD, "BR.", "BT.")

  def _feed_forward(self, h_BTD: jax.Array) -> jax.Array:
    """SwiGLU (arXiv 2002.05202)."""
    D, F = self.cfg.width, self.cfg.ff
    gate_BTF = self._dense(h_BTD, "gate", (D, F))
    up_BTF = self._dense(h_BTD, "up", (D, F))
    hidden_BTF = self.partitioner.shard(nn.silu(gate_BTF) * up_BTF, "BTF")
    return self._dense(hidden_BTF, "down", (F, D))

  def _dense(self, x: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Multiplies by the matrix `name` of `shape` (inputs, outputs), and its adapter."""
    c = self.cfg
    inputs = inputs_of(name)
    if self.decode and c.product_dtype:
      # Decoding parameters in half precision have their outputs first.
      return linear_bf16(x, self.get_variable("params", name), inputs)
    # Outputs of unit size from any number of unit-size inputs.
    init = nn.initializers.normal(math.prod(shape[:inputs]) ** -0.5)
    w = self.param(name, init, shape, c.param_dtype)
    if not self.decode:
      w = self.partitioner.gathered(used(c, w), name)
    y = project(x, w, inputs)
    if self.has_variable("params", f"{name}_a"):
      a = self._adapter(f"{name}_a")
      b = self._adapter(f"{name}_b")
      y += project(project(x, a, inputs), b)
    return y

  def _adapter(self, name: str) -> jax.Array:
    """Returns half of a matrix's adapter, ready for use."""
    w = self.get_variable("params", name).astype(self.cfg.dtype)
    return self.partitioner.gathered(w, name)

  def _vector(self, name: str, shape: tuple[int, ...], init: Any) -> jax.Array:
    """Returns a bias or a norm's scale, ready for use."""
    w = self.param(name, init, shape, self.cfg.param_dtype)
    if self.decode:
      return w.astype(self.cfg.dtype)
    return used(self.cfg, w)

  def _norm(self, x: jax.Array, name: str, size: int) -> jax.Array:
    scale = self._vector(name, (size,), norm_init(self.cfg))
    return rms_norm(self.cfg, x, scale)


class AttentionLayer(Layer):
  """Softmax attention with rotary positions and grouped queries."""

  def mix(
    self,
    h_BTD: jax.Array,
    rope: Rotation,
    segment_BT: jax.Array | None,
    cache_write: CacheWrite | None,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Attends over the row's segments in training, over the cache in decoding."""
    c = self.cfg
    D, N, K, H = c.width, c.heads, c.kv_heads, c.head_dim

    # --- Queries, keys and values of every head, and the gates of their outputs.
    if c.attention_gate:
      both_BTNI = self._dense(h_BTD, "q", (D, N, 2 * H))
      q_BTNH, gate_BTNH = jnp.split(both_BTNI, 2, axis=-1)
    else:
      q_BTNH = self._dense(h_BTD, "q", (D, N, H))
    k_BTKH = self._dense(h_BTD, "k", (D, K, H))
    v_BTKH = self._dense(h_BTD, "v", (D, K, H))
    if c.attention_bias:
      zeros = nn.initializers.zeros
      q_BTNH += self._vector("q_bias", (N, H), zeros)
      k_BTKH += self._vector("k_bias", (K, H), zeros)
      v_BTKH += self._vector("v_bias", (K, H), zeros)
    if c.qk_norm:
      q_BTNH = self._norm(q_BTNH, "q_norm", H)
      k_BTKH = self._norm(k_BTKH, "k_norm", H)
    q_BTNH = rotate(q_BTNH, rope)
    k_BTKH = rotate(k_BTKH, rope)
    q_BTNH = self.partitioner.shard(q_BTNH, "BTN.")
    k_BTKH = self.partitioner.shard(k_BTKH, "BTK.")
    v_BTKH = self.partitioner.shard(v_BTKH, "BTK.")

    # --- Attention.
    if cache is None:
      out_BTNH = attention.attend_packed(
        q_BTNH, k_BTKH, v_BTKH, segment_BT, c.attention, self.partitioner
      )
    else:
      cache = cache.append(self.layer, k_BTKH, v_BTKH, cache_write, self.partitioner)
      out_BTNH = cache.attend(self.layer, q_BTNH, cache_write, self.partitioner)
    if c.attention_gate:
      out_BTNH *= jax.nn.sigmoid(gate_BTNH)
    return self._dense(out_BTNH, "o", (N, H, D)), cache

"""The Qwen2 / Qwen3 dense transformer in Flax.

One forward function for training and decoding: `Qwen.__call__` takes packed segments,
or a key-value cache. Training may scan over stacked layers; decoding runs them unrolled
(`unstack` converts the parameters once per policy update).

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388); rotary embedding in the
half-rotation layout of Hugging Face's implementation, so weights carry over unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from coa_jax.model import attention

# One layer's keys and values, each [B, K, S, H].
LayerCache = tuple[jax.Array, jax.Array]
_REMAT = ("none", "full", "dots")


@dataclasses.dataclass(frozen=True)
class QwenConfig:
  """Config section `model`; the defaults are the quickstart's.

  Attributes:
    vocab_size: V, rows of the embedding.
    width: D.
    layers: L.
    heads: N query heads.
    kv_heads: K key-value heads; divides N.
    head_dim: H; independent of D / N, even.
    ff: F, the SwiGLU's hidden width.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: True if the output matrix is the embedding.
    attention_bias: True for biases on q, k, v (Qwen2).
    qk_norm: True for RMSNorm on each query and key head (Qwen3).
    dtype: of activations; norms, softmax and log-probs are float32 whatever it is.
    param_dtype: of the parameters.
    scan: True if layers are stacked and scanned (training many layers).
    remat: what the backward pass recomputes: none, full (each layer), dots (all of a
      layer but its matrix products).
  """

  vocab_size: int
  width: int = 128
  layers: int = 4
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 32
  ff: int = 384
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  dtype: str = "float32"
  param_dtype: str = "float32"
  scan: bool = False
  remat: str = "none"

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd; rotary halves need it even")
    if self.remat not in _REMAT:
      raise ValueError(f"remat {self.remat!r}; accepted: {', '.join(_REMAT)}")


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """RMSNorm over the last axis in float32 (arXiv 1910.07467), in x's dtype."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return y.astype(x.dtype) * scale.astype(x.dtype)


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding (arXiv 2104.09864), angles and rotation in float32."""
  half = x_BTNH.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_BT1F = position_BT[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle_BT1F), jnp.sin(angle_BT1F)
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return out.astype(x_BTNH.dtype)


def project(x: jax.Array, w: jax.Array, inputs: int = 1) -> jax.Array:
  """Contracts the last `inputs` axes of x with the first of w.

  As one matrix product of two-dimensional operands: XLA's CPU back-end computes the
  weight gradient of the equivalent einsum three times slower.
  """
  batch, inner, outer = x.shape[: x.ndim - inputs], w.shape[:inputs], w.shape[inputs:]
  size = math.prod(inner)
  y = x.reshape(-1, size) @ w.reshape(size, -1)
  return y.reshape(*batch, *outer)


class Block(nn.Module):
  """One layer: attention, then SwiGLU, each behind RMSNorm and a residual."""

  cfg: QwenConfig

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    position_BT: jax.Array,
    segment_BT: jax.Array | None,
    cache: LayerCache | None,
    written_BT: jax.Array | None,
  ) -> tuple[jax.Array, LayerCache | None]:
    """Args as `Qwen.__call__`; the cache is this layer's."""
    c = self.cfg
    D, N, K, H, F = c.width, c.heads, c.kv_heads, c.head_dim, c.ff

    def weight(name: str, shape: tuple[int, ...], fan_in: int) -> jax.Array:
      init = nn.initializers.normal(fan_in**-0.5)
      return self.param(name, init, shape, c.param_dtype).astype(c.dtype)

    def scale(name: str, size: int) -> jax.Array:
      return self.param(name, nn.initializers.ones, (size,), c.param_dtype)

    h_BTD = rms_norm(x_BTD, scale("attn_norm", D), c.norm_eps)
    q_BTNH = project(h_BTD, weight("q", (D, N, H), D))
    k_BTKH = project(h_BTD, weight("k", (D, K, H), D))
    v_BTKH = project(h_BTD, weight("v", (D, K, H), D))
    if c.attention_bias:
      zeros = nn.initializers.zeros
      q_BTNH += self.param("q_bias", zeros, (N, H), c.param_dtype).astype(c.dtype)
      k_BTKH += self.param("k_bias", zeros, (K, H), c.param_dtype).astype(c.dtype)
      v_BTKH += self.param("v_bias", zeros, (K, H), c.param_dtype).astype(c.dtype)
    if c.qk_norm:
      q_BTNH = rms_norm(q_BTNH, scale("q_norm", H), c.norm_eps)
      k_BTKH = rms_norm(k_BTKH, scale("k_norm", H), c.norm_eps)
    q_BTNH = rotate(q_BTNH, position_BT, c.rope_theta)
    k_BTKH = rotate(k_BTKH, position_BT, c.rope_theta)
    if cache is None:
      out_BTNH = attention.attend_packed(q_BTNH, k_BTKH, v_BTKH, segment_BT)
    else:
      row_B1 = jnp.arange(x_BTD.shape[0])[:, None]
      # Tokens that are not to be written point past the end, and are dropped.
      k_BKSH = cache[0].at[row_B1, :, written_BT].set(k_BTKH, mode="drop")
      v_BKSH = cache[1].at[row_B1, :, written_BT].set(v_BTKH, mode="drop")
      cache = (k_BKSH, v_BKSH)
      mask_BTS = attention.cache_mask(position_BT, k_BKSH.shape[2])
      out_BTNH = attention.attend(q_BTNH, k_BKSH, v_BKSH, mask_BTS)
    x_BTD += project(out_BTNH, weight("o", (N, H, D), N * H), inputs=2)

    h_BTD = rms_norm(x_BTD, scale("ff_norm", D), c.norm_eps)
    gate_BTF = project(h_BTD, weight("gate", (D, F), D))
    up_BTF = project(h_BTD, weight("up", (D, F), D))
    hidden_BTF = nn.silu(gate_BTF) * up_BTF
    x_BTD += project(hidden_BTF, weight("down", (F, D), F))
    return x_BTD, cache


class Qwen(nn.Module):
  """Token ids to final hidden states; `logits` maps those to the vocabulary."""

  cfg: QwenConfig

  def setup(self) -> None:
    """Declares the embedding, the layers and the final norm."""
    c = self.cfg
    init = nn.initializers.normal(0.02)
    self.embed = self.param("embed", init, (c.vocab_size, c.width), c.param_dtype)
    self.final_norm = self.param(
      "final_norm", nn.initializers.ones, (c.width,), c.param_dtype
    )
    if not c.tie_embeddings:
      self.head = self.param("head", init, (c.width, c.vocab_size), c.param_dtype)
    block = Block
    if c.remat != "none":
      policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
      block = nn.remat(
        Block, prevent_cse=not c.scan, policy=policy if c.remat == "dots" else None
      )
    if c.scan:
      self.stack = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
        length=c.layers,
      )(c, name="layers")
    else:
      self.blocks = [block(c, name=f"layer_{i}") for i in range(c.layers)]

  def __call__(
    self,
    tokens_BT: jax.Array,
    position_BT: jax.Array,
    segment_BT: jax.Array | None = None,
    cache: tuple[LayerCache, ...] | None = None,
    valid_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
    """Runs the transformer.

    Args:
      tokens_BT: int token ids.
      position_BT: int position of each token in its own sequence.
      segment_BT: packed rows: the segment of each token, 0 for padding. Without a
        cache only.
      cache: per layer keys and values [B, K, S, H]; keys and values of this call's
        tokens are written at their positions, and tokens read places up to their own.
      valid_BT: with a cache: True for tokens to be written; others compute garbage
        that nothing reads.

    Returns:
      hidden_BTD after the final norm, and the new cache (None without one).
    """
    c = self.cfg
    x_BTD = jnp.take(self.embed, tokens_BT, axis=0).astype(c.dtype)
    written_BT = None
    if cache is not None:
      written_BT = jnp.where(valid_BT, position_BT, cache[0][0].shape[2])
    if c.scan:
      if cache is not None:
        raise ValueError("decoding runs unrolled layers: see unstack()")
      x_BTD, _ = self.stack(x_BTD, position_BT, segment_BT, None, None)
    else:
      layers = cache if cache is not None else (None,) * c.layers
      out = []
      for block, layer in zip(self.blocks, layers, strict=True):
        x_BTD, layer = block(x_BTD, position_BT, segment_BT, layer, written_BT)
        out.append(layer)
      cache = tuple(out) if cache is not None else None
    return rms_norm(x_BTD, self.final_norm, c.norm_eps), cache

  def logits(self, hidden_BTD: jax.Array) -> jax.Array:
    """logits_BTV in float32 of final hidden states."""
    c = self.cfg
    head = self.embed.T if c.tie_embeddings else self.head
    logits_BTV = project(hidden_BTD, head.astype(c.dtype))
    return logits_BTV.astype(jnp.float32)


def init_params(cfg: QwenConfig, seed: int) -> dict[str, Any]:
  """Freshly drawn parameters of `cfg`, a nested dict of arrays; jitted."""
  tokens_BT = jnp.zeros((1, 2), jnp.int32)

  def init(key: jax.Array) -> dict[str, Any]:
    return Qwen(cfg).init(key, tokens_BT, tokens_BT, tokens_BT + 1)["params"]

  return jax.jit(init)(jax.random.key(seed))


def init_cache(cfg: QwenConfig, rows: int, size: int) -> tuple[LayerCache, ...]:
  """An empty cache of `size` places for `rows` sequences, in the compute dtype."""
  shape = (rows, cfg.kv_heads, size, cfg.head_dim)
  return tuple(
    (jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))
    for _ in range(cfg.layers)
  )


def unstack(params: dict[str, Any], layers: int) -> dict[str, Any]:
  """Stacked layers (`scan=True`) as one subtree per layer; others unchanged."""
  if "layers" not in params:
    return params
  out = {k: v for k, v in params.items() if k != "layers"}
  for i in range(layers):
    out[f"layer_{i}"] = jax.tree.map(lambda x, i=i: x[i], params["layers"])
  return out


def stack(params: dict[str, Any], layers: int) -> dict[str, Any]:
  """The inverse of `unstack`."""
  out = {k: v for k, v in params.items() if not k.startswith("layer_")}
  trees = [params[f"layer_{i}"] for i in range(layers)]
  out["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *trees)
  return out


def count_params(params: Any) -> int:
  """Number of scalars in a tree of arrays."""
  return sum(x.size for x in jax.tree.leaves(params))

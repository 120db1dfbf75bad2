"""The Qwen and Llama transformer in Flax: dense, or a hybrid with linear attention.

`Transformer.__call__` is the one forward function: for training with packed segments,
for decoding with a cache. Training may scan over stacked layers; decoding runs unrolled
layers (`decoding_views` converts the parameters once per policy update).

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388), Llama 3 (arXiv 2407.21783),
Qwen3.5 (transformers `models/qwen3_5`).

budget: one forward pass, of every family, for training and for decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model import attention, delta_layer
from coa_jax.model.cache import CacheWrite, KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.float32_sums import lookup, spread
from coa_jax.model.kernels.paged import RowPages
from coa_jax.model.ops import (
  embed_bf16,
  linear_bf16,
  norm_init,
  project,
  rms_norm,
  used,
)
from coa_jax.model.rotary import Rotation, rotate, rotation
from coa_jax.model.sharding import ONE_DEVICE, Partitioner, inputs_of

# The layer inputs' name for checkpoint policies.
_INPUT = "layer_input"


class Layer(nn.Module):
  """One layer: a token mixer, then SwiGLU, each behind RMSNorm and a residual.

  Matrices have an adapter if the parameters hold one (see `lora.py`).

  Attributes:
    kind: the token mixer's kind, one of `config.KINDS`.
    layer: the layer's number.
  """

  cfg: ModelConfig
  partitioner: Partitioner = ONE_DEVICE
  decode: bool = False
  layer: int = 0
  kind: str = "attention"

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
      segment_BT: for packed rows: each token's segment.
      cache_write: with a cache: the call's token places.
      cache: all layers' cache; this layer's part is updated.
    """
    x_BTD = checkpoint_name(x_BTD, _INPUT)
    mix = {"attention": self._attention, "delta": self._delta}[self.kind]
    h_BTD = self._normed(x_BTD, "attn_norm")
    out_BTD, cache = mix(h_BTD, rope, segment_BT, cache_write, cache)
    x_BTD += self.partitioner.moved(out_BTD, "BT.", "BR.")
    out_BTD = self._feed_forward(self._normed(x_BTD, "ff_norm"))
    x_BTD += self.partitioner.moved(out_BTD, "BT.", "BR.")
    return x_BTD, cache

  def _attention(
    self,
    h_BTD: jax.Array,
    rope: Rotation,
    segment_BT: jax.Array | None,
    cache_write: CacheWrite | None,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Applies softmax attention within segments, or over the cache."""
    c = self.cfg
    D, N, K, H = c.width, c.heads, c.kv_heads, c.head_dim

    # --- Each head's queries, keys and values, and its output gate.
    if c.attention_gate:
      both_BTNI = self.dense(h_BTD, "q", (D, N, 2 * H))
      q_BTNH, gate_BTNH = jnp.split(both_BTNI, 2, axis=-1)
    else:
      q_BTNH = self.dense(h_BTD, "q", (D, N, H))
    k_BTKH = self.dense(h_BTD, "k", (D, K, H))
    v_BTKH = self.dense(h_BTD, "v", (D, K, H))
    if c.attention_bias:
      zeros = nn.initializers.zeros
      q_BTNH += spread(self.vector("q_bias", (N, H), zeros), q_BTNH.shape)
      k_BTKH += spread(self.vector("k_bias", (K, H), zeros), k_BTKH.shape)
      v_BTKH += spread(self.vector("v_bias", (K, H), zeros), v_BTKH.shape)
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
    return self.dense(out_BTNH, "o", (N, H, D)), cache

  def _delta(
    self,
    h_BTD: jax.Array,
    rope: Rotation,
    segment_BT: jax.Array | None,
    cache_write: CacheWrite | None,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Applies the gated delta rule within segments, or from the cache's states on.

    Positions come from the convolution: `rope` is for attention.
    """
    if cache is None:
      return delta_layer.mix(self, h_BTD, segment_BT)
    state = cache.state(self.layer, cache_write)
    out_BTD, state = delta_layer.mix(self, h_BTD, None, state, cache_write.valid_BT)
    cache = cache.with_state(self.layer, *state, cache_write, self.partitioner)
    return out_BTD, cache

  def _normed(self, x_BTD: jax.Array, name: str) -> jax.Array:
    """Normalises a residual, and resplits its tokens from R to T for the matrices."""
    h_BTD = self._norm(x_BTD, name, self.cfg.width)
    return self.partitioner.moved(h_BTD, "BR.", "BT.")

  def _feed_forward(self, h_BTD: jax.Array) -> jax.Array:
    """SwiGLU (arXiv 2002.05202)."""
    D, F = self.cfg.width, self.cfg.ff
    gate_BTF = self.dense(h_BTD, "gate", (D, F))
    up_BTF = self.dense(h_BTD, "up", (D, F))
    hidden_BTF = self.partitioner.shard(nn.silu(gate_BTF) * up_BTF, "BTF")
    return self.dense(hidden_BTF, "down", (F, D))

  def dense(self, x: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Multiplies by matrix `name`, of `shape` (inputs, outputs), and its adapter."""
    c = self.cfg
    inputs = inputs_of(name)
    if self.decode and c.product_dtype:
      # Half-precision decode parameters have their outputs first.
      return linear_bf16(x, self.get_variable("params", name), inputs)
    # Unit-size outputs from any number of unit-size inputs.
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
    w = self.get_variable("params", name).astype(self.cfg.dtype)
    return self.partitioner.gathered(w, name)

  def vector(self, name: str, shape: tuple[int, ...], init: Any) -> jax.Array:
    """Returns a bias or a norm's scale, ready for use."""
    w = self.param(name, init, shape, self.cfg.param_dtype)
    if self.decode:
      return w.astype(self.cfg.dtype)
    return used(self.cfg, w)

  def _norm(self, x: jax.Array, name: str, size: int) -> jax.Array:
    scale = self.vector(name, (size,), norm_init(self.cfg))
    return rms_norm(self.cfg, x, scale)


class Period(nn.Module):
  """One period of layers, for models with several layer kinds."""

  cfg: ModelConfig
  partitioner: Partitioner = ONE_DEVICE
  decode: bool = False

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    rope: Rotation,
    segment_BT: jax.Array | None,
    cache_write: CacheWrite | None,
    cache: KVCache | None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Runs the period's layers; see `Layer`."""
    for i, kind in enumerate(self.cfg.layer_kinds):
      block = _layer(self.cfg)(
        self.cfg, self.partitioner, self.decode, i, kind, name=f"block_{i}"
      )
      x_BTD, cache = block(x_BTD, rope, segment_BT, cache_write, cache)
    return x_BTD, cache


@functools.lru_cache(maxsize=16)
def _layer(cfg: ModelConfig) -> type[nn.Module]:
  """Returns `Layer`; its backward pass recomputes the part in `cfg.remat`."""
  if cfg.remat == "none":
    return Layer
  policies = {
    "full": None,
    "attention": jax.checkpoint_policies.save_only_these_names(attention.OUT),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[_INPUT, attention.OUT],
      offload_src="device",
      offload_dst="pinned_host",
    ),
  }
  return nn.remat(Layer, prevent_cse=not cfg.scan, policy=policies[cfg.remat])


class Transformer(nn.Module):
  """Maps token ids to final hidden states; `logits` maps these to the vocabulary.

  Activations are constrained to the partitioner's mesh. With `decode` the parameters
  come from `decoding_views`, and matrices are used directly.
  """

  cfg: ModelConfig
  partitioner: Partitioner = ONE_DEVICE
  decode: bool = False

  def setup(self) -> None:
    """Declares the embedding, the layers and the final norm."""
    c = self.cfg

    # --- The embedding, the final norm and the head.
    init = nn.initializers.normal(0.02)
    self.embed = self.param("embed", init, (c.vocab_size, c.width), c.param_dtype)
    self.final_norm = self.param("final_norm", norm_init(c), (c.width,), c.param_dtype)
    if not c.tie_embeddings:
      shape = (c.width, c.vocab_size)
      if self.decode and c.product_dtype:
        shape = (c.vocab_size, c.width)  # outputs first, as `linear_bf16` wants them
      self.head = self.param("head", init, shape, c.param_dtype)

    # --- All layers: one scanned program over stacked parameters, or one each.
    if c.scan:
      one_kind = len(c.layer_kinds) == 1
      self.stack = nn.scan(
        _layer(c) if one_kind else Period,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=c.layers // len(c.layer_kinds),
      )(c, self.partitioner, self.decode, name="layers")
    else:
      blocks = []
      for i, kind in enumerate(c.kinds):
        block = _layer(c)(c, self.partitioner, self.decode, i, kind, name=f"layer_{i}")
        blocks.append(block)
      self.blocks = blocks

  def __call__(
    self,
    tokens_BT: jax.Array,
    position_BT: jax.Array,
    segment_BT: jax.Array | None = None,
    cache: KVCache | None = None,
    valid_BT: jax.Array | None = None,
    rows: RowPages | None = None,
  ) -> tuple[jax.Array, KVCache | None]:
    """Runs the transformer.

    Args:
      tokens_BT: int token ids.
      position_BT: each token's int position in its own sequence.
      segment_BT: for packed rows, without a cache: each token's segment, 0 for padding.
        Rows split by a mesh are in `moving.zigzag` order.
      cache: keys and values; this call's are appended at their positions, and tokens
        read places up to their own.
      valid_BT: with a cache: True for tokens to write; others compute garbage that
        nothing reads.
      rows: with a cache: each row's pages; no two rows write to one page.

    Returns:
      hidden_BTD after the final norm, and the new cache (None without one).
    """
    c = self.cfg

    # --- Token ids to vectors.
    embed_VD = self.partitioner.gathered(self._used(self.embed), "embed")
    if self.decode and c.product_dtype:
      x_BTD = embed_bf16(embed_VD, tokens_BT).astype(c.dtype)
    else:
      x_BTD = lookup(embed_VD, tokens_BT).astype(c.dtype)
    x_BTD = self.partitioner.moved(x_BTD, "BT.", "BR.")

    # --- The layers; shared values are computed once.
    rope = rotation(c, position_BT)
    if c.scan:
      if cache is not None:
        raise ValueError("decoding runs unrolled layers: see decoding_views()")
      x_BTD, _ = self.stack(x_BTD, rope, segment_BT, None, None)
    else:
      write = None
      if cache is not None:
        write = cache.write(rows, position_BT, valid_BT)
      for block in self.blocks:
        x_BTD, cache = block(x_BTD, rope, segment_BT, write, cache)

    hidden_BTD = rms_norm(c, x_BTD, self._used(self.final_norm))
    return self.partitioner.moved(hidden_BTD, "BR.", "BT."), cache

  def _used(self, w: jax.Array) -> jax.Array:
    """Returns a parameter ready for use; `decoding_views` has converted a decoder's."""
    return w if self.decode else used(self.cfg, w)

  def output(self) -> jax.Array:
    """Returns the output matrix [D, V] for use, whole in D on every device."""
    if self.cfg.tie_embeddings:
      return self.partitioner.gathered(self._used(self.embed), "embed").T
    return self.partitioner.gathered(self._used(self.head), "head")

  def logits(self, hidden_BTD: jax.Array, head: jax.Array | None = None) -> jax.Array:
    """Maps final hidden states to logits_BTV in float32; `head` may be `output()`."""
    if self.decode and self.cfg.product_dtype:
      # A separate head has its outputs first here too: see `setup`.
      head_VD = self.embed if self.cfg.tie_embeddings else self.head
      head_VD = self.partitioner.shard(head_VD, "V.")
      logits_BTV = linear_bf16(hidden_BTD, head_VD)
    else:
      logits_BTV = project(hidden_BTD, self.output() if head is None else head)
    return self.partitioner.shard(logits_BTV, "BTV").astype(jnp.float32)


def init_params(
  cfg: ModelConfig, seed: int, partitioner: Partitioner = ONE_DEVICE
) -> dict[str, Any]:
  """Draws fresh parameters for `cfg`, a nested dict of arrays; jitted.

  Every device draws its own part; values do not depend on the mesh.
  """
  shardings = partitioner.out_shardings(param_shapes(cfg))
  init = jax.jit(lambda key: _init(cfg, key), out_shardings=shardings)
  return init(jax.random.key(seed))


def param_shapes(cfg: ModelConfig) -> dict[str, Any]:
  """Builds the parameter tree with shapes and dtypes in place of arrays."""
  # Only one layer is traced, whatever their number.
  stacked = dataclasses.replace(cfg, scan=True)
  shapes = jax.eval_shape(lambda key: _init(stacked, key), jax.random.key(0))
  if cfg.scan:
    return shapes
  return jax.eval_shape(lambda params: unstack(params, cfg.layers), shapes)


def _init(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
  tokens_BT = jnp.zeros((1, 2), jnp.int32)
  cfg = dataclasses.replace(cfg, attention="xla")  # takes rows of any length
  return Transformer(cfg).init(key, tokens_BT, tokens_BT, tokens_BT + 1)["params"]


def unstack(params: dict[str, Any], layers: int, period: int = 0) -> dict[str, Any]:
  """Unstacks layers (`scan=True`) into one subtree each; others are unchanged.

  The subtree `layers` holds the stacked layers: one kind directly, a hybrid's in a
  subtree `block_I` for each layer in a period. Adapters may lack blocks: then `period`
  must count a period's layers.
  """
  if "layers" not in params:
    return params
  out = {k: v for k, v in params.items() if k != "layers"}
  stacked = params["layers"]
  is_hybrid = any(name.startswith("block_") for name in stacked)
  period = period or (len(stacked) if is_hybrid else 1)
  for i in range(layers):
    turn, block = divmod(i, period)
    part = stacked.get(f"block_{block}") if is_hybrid else stacked
    if part is not None:
      out[f"layer_{i}"] = jax.tree.map(lambda x, turn=turn: x[turn], part)
  return out


def stack(params: dict[str, Any], layers: int, period: int = 1) -> dict[str, Any]:
  """Stacks layers: the inverse of `unstack`; `period` counts a period's layers."""
  out = {k: v for k, v in params.items() if not k.startswith("layer_")}
  blocks = {}
  for block in range(period):
    trees = [params[f"layer_{i}"] for i in range(block, layers, period)]
    blocks[f"block_{block}"] = jax.tree.map(lambda *x: jnp.stack(x), *trees)
  out["layers"] = blocks if period > 1 else blocks["block_0"]
  return out


def count_params(params: Any) -> int:
  """Counts the scalars in a tree of arrays."""
  return sum(x.size for x in jax.tree.leaves(params))

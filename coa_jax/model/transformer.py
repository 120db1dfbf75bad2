"""The dense transformer of Qwen and Llama in Flax.

One forward function for training and decoding: `Transformer.__call__` takes packed
segments, or a cache of keys and values. Training may scan over stacked layers; decoding
runs them unrolled (`decoding_views` converts the parameters once per policy update).

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388), Llama 3 (arXiv 2407.21783).

budget: a whole decoder, read top to bottom.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model import attention
from coa_jax.model.cache import CacheWrite, KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.kernels.paged import RowPages
from coa_jax.model.rotary import Rotation, rotate, rotation
from coa_jax.model.sharding import ONE_DEVICE, Partitioner, inputs_of

# The layer inputs' name for checkpoint policies.
_INPUT = "layer_input"


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Normalises the last axis by RMS in float32 (arXiv 1910.07467); in x's dtype."""
  y = x.astype(jnp.float32)
  y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
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


class Block(nn.Module):
  """One layer: attention, then SwiGLU, each behind RMSNorm and a residual.

  Matrices have an adapter if the parameters hold one (see `lora.py`).
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

    budget: a whole layer, read top to bottom.

    Args:
      x_BTD: its input.
      rope: rotary cosines and sines of the tokens' positions.
      segment_BT: packed rows: the segment of each token.
      cache_write: with a cache: the places of the call's tokens.
      cache: of all layers; this one's keys and values are appended.

    Returns:
      The layer's output, and the cache.
    """
    c = self.cfg
    D, N, K, H, F = c.width, c.heads, c.kv_heads, c.head_dim, c.ff
    x_BTD = checkpoint_name(x_BTD, _INPUT)

    # --- Queries, keys and values of every head.
    h_BTD = self._norm(x_BTD, "attn_norm", D)
    h_BTD = self.partitioner.moved(h_BTD, "BR.", "BT.")
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

    # --- Attention: over the row's segments in training, over the cache in decoding.
    if cache is None:
      out_BTNH = attention.attend_packed(
        q_BTNH, k_BTKH, v_BTKH, segment_BT, c.attention, self.partitioner
      )
    else:
      cache = cache.append(self.layer, k_BTKH, v_BTKH, cache_write, self.partitioner)
      out_BTNH = cache.attend(self.layer, q_BTNH, cache_write, self.partitioner)
    out_BTD = self._dense(out_BTNH, "o", (N, H, D))
    x_BTD += self.partitioner.moved(out_BTD, "BT.", "BR.")

    # --- SwiGLU.
    h_BTD = self._norm(x_BTD, "ff_norm", D)
    h_BTD = self.partitioner.moved(h_BTD, "BR.", "BT.")
    gate_BTF = self._dense(h_BTD, "gate", (D, F))
    up_BTF = self._dense(h_BTD, "up", (D, F))
    hidden_BTF = self.partitioner.shard(nn.silu(gate_BTF) * up_BTF, "BTF")
    out_BTD = self._dense(hidden_BTF, "down", (F, D))
    x_BTD += self.partitioner.moved(out_BTD, "BT.", "BR.")
    return x_BTD, cache

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
    scale = self._vector(name, (size,), nn.initializers.ones)
    return rms_norm(x, scale, self.cfg.norm_eps)


class Transformer(nn.Module):
  """Token ids to final hidden states; `logits` maps those to the vocabulary.

  Activations are constrained to the partitioner's mesh. With `decode` the
  parameters come from `decoding_views`, and matrices are used directly.
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
    self.final_norm = self.param(
      "final_norm", nn.initializers.ones, (c.width,), c.param_dtype
    )
    if not c.tie_embeddings:
      shape = (c.width, c.vocab_size)
      if self.decode and c.product_dtype:
        shape = (c.vocab_size, c.width)  # outputs first, as `linear_bf16` wants them
      self.head = self.param("head", init, shape, c.param_dtype)

    # --- A layer, and the part recomputed by the backward pass.
    block = Block
    if c.remat != "none":
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
      block = nn.remat(Block, prevent_cse=not c.scan, policy=policies[c.remat])

    # --- All layers: one scanned program over stacked parameters, or one each.
    if c.scan:
      self.stack = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=c.layers,
      )(c, self.partitioner, self.decode, name="layers")
    else:
      blocks = []
      for i in range(c.layers):
        blocks.append(block(c, self.partitioner, self.decode, i, name=f"layer_{i}"))
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
      position_BT: int position of each token in its own sequence.
      segment_BT: packed rows: the segment of each token, 0 for padding. Without a cache
        only. Rows split by a mesh are in the order of `moving.zigzag`.
      cache: keys and values; this call's are appended at their positions, and tokens
        read places up to their own.
      valid_BT: with a cache: True for tokens to be written; others compute garbage
        that nothing reads.
      rows: with a cache: the pages of each row; no two rows write to one page.

    Returns:
      hidden_BTD after the final norm, and the new cache (None without one).
    """
    c = self.cfg

    # --- Token ids to vectors.
    embed_VD = self.partitioner.gathered(self._used(self.embed), "embed")
    if self.decode and c.product_dtype:
      x_BTD = embed_bf16(embed_VD, tokens_BT).astype(c.dtype)
    else:
      x_BTD = jnp.take(embed_VD, tokens_BT, axis=0).astype(c.dtype)
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

    hidden_BTD = rms_norm(x_BTD, self._used(self.final_norm), c.norm_eps)
    return self.partitioner.moved(hidden_BTD, "BR.", "BT."), cache

  def _used(self, w: jax.Array) -> jax.Array:
    """Returns a parameter ready for use; a decoder's is converted once, by its view."""
    return w if self.decode else used(self.cfg, w)

  def output(self) -> jax.Array:
    """Returns the output matrix [D, V] for use, whole in D on every device."""
    if self.cfg.tie_embeddings:
      return self.partitioner.gathered(self._used(self.embed), "embed").T
    return self.partitioner.gathered(self._used(self.head), "head")

  def logits(self, hidden_BTD: jax.Array, head: jax.Array | None = None) -> jax.Array:
    """Maps final hidden states to logits_BTV in float32; `head` is `output()`."""
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
  """Draws fresh parameters of `cfg`, a nested dict of arrays; jitted.

  Every device draws its own part; values do not depend on the mesh.
  """
  shardings = partitioner.out_shardings(param_shapes(cfg))
  init = jax.jit(lambda key: _init(cfg, key), out_shardings=shardings)
  return init(jax.random.key(seed))


def param_shapes(cfg: ModelConfig) -> dict[str, Any]:
  """Builds the parameters' tree with shapes and dtypes in place of arrays."""
  # One layer is traced, for any number.
  stacked = dataclasses.replace(cfg, scan=True)
  shapes = jax.eval_shape(lambda key: _init(stacked, key), jax.random.key(0))
  if cfg.scan:
    return shapes
  return jax.eval_shape(lambda params: unstack(params, cfg.layers), shapes)


def _init(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
  tokens_BT = jnp.zeros((1, 2), jnp.int32)
  cfg = dataclasses.replace(cfg, attention="xla")  # takes rows of any length
  return Transformer(cfg).init(key, tokens_BT, tokens_BT, tokens_BT + 1)["params"]


def unstack(params: dict[str, Any], layers: int) -> dict[str, Any]:
  """Makes one subtree per layer of stacked ones (`scan=True`); others are unchanged."""
  if "layers" not in params:
    return params
  out = {k: v for k, v in params.items() if k != "layers"}
  for i in range(layers):
    out[f"layer_{i}"] = jax.tree.map(lambda x, i=i: x[i], params["layers"])
  return out


def stack(params: dict[str, Any], layers: int) -> dict[str, Any]:
  """Stacks layers: the inverse of `unstack`."""
  out = {k: v for k, v in params.items() if not k.startswith("layer_")}
  trees = [params[f"layer_{i}"] for i in range(layers)]
  out["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *trees)
  return out


def count_params(params: Any) -> int:
  """Counts the scalars in a tree of arrays."""
  return sum(x.size for x in jax.tree.leaves(params))

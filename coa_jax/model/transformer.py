"""The transformer of Qwen and Llama in Flax: dense, or a hybrid with linear attention.

One forward function for training and decoding: `Transformer.__call__` takes packed
segments, or a cache. Training may scan over stacked layers; decoding runs them unrolled
(`decoding_views` converts the parameters once per policy update).

Sources: Qwen2 (arXiv 2407.10671), Qwen3 (arXiv 2505.09388), Llama 3 (arXiv 2407.21783),
Qwen3.5 (transformers `models/qwen3_5`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from coa_jax.model import attention
from coa_jax.model.cache import CacheWrite, KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.delta_layer import DeltaLayer
from coa_jax.model.kernels.paged import RowPages
from coa_jax.model.layer import (
  INPUT,
  AttentionLayer,
  embed_bf16,
  linear_bf16,
  norm_init,
  project,
  rms_norm,
  used,
)
from coa_jax.model.rotary import Rotation, rotation
from coa_jax.model.sharding import ONE_DEVICE, Partitioner

_KINDS = {"attention": AttentionLayer, "delta": DeltaLayer}


class Period(nn.Module):
  """One period of layers, for models with several kinds."""

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
    """Runs its layers; see `Layer`."""
    for i, kind in enumerate(self.cfg.layer_kinds):
      block = _block(self.cfg, kind)(
        self.cfg, self.partitioner, self.decode, i, name=f"block_{i}"
      )
      x_BTD, cache = block(x_BTD, rope, segment_BT, cache_write, cache)
    return x_BTD, cache


@functools.lru_cache(maxsize=16)
def _block(cfg: ModelConfig, kind: str) -> type[nn.Module]:
  """Returns a kind of layer, with the part recomputed by the backward pass."""
  block = _KINDS[kind]
  if cfg.remat == "none":
    return block
  policies = {
    "full": None,
    "attention": jax.checkpoint_policies.save_only_these_names(attention.OUT),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[INPUT, attention.OUT],
      offload_src="device",
      offload_dst="pinned_host",
    ),
  }
  return nn.remat(block, prevent_cse=not cfg.scan, policy=policies[cfg.remat])


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
        _block(c, c.layer_kinds[0]) if one_kind else Period,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=c.layers // len(c.layer_kinds),
      )(c, self.partitioner, self.decode, name="layers")
    else:
      blocks = []
      for i, kind in enumerate(c.kinds):
        block = _block(c, kind)
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

    hidden_BTD = rms_norm(c, x_BTD, self._used(self.final_norm))
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
  """Makes one subtree per layer of stacked ones (`scan=True`); others are unchanged.

  Stacked layers of one kind are one subtree `layers`. A hybrid's has a subtree
  `block_I` for each layer of a period.
  """
  if "layers" not in params:
    return params
  out = {k: v for k, v in params.items() if k != "layers"}
  period = _period(params["layers"])
  for i in range(layers):
    turn, block = divmod(i, len(period))
    out[f"layer_{i}"] = jax.tree.map(lambda x, turn=turn: x[turn], period[block])
  return out


def _period(stacked: dict[str, Any]) -> list[dict[str, Any]]:
  """Lists the stacked subtrees of a period's layers."""
  if "block_0" not in stacked:
    return [stacked]
  return [stacked[f"block_{i}"] for i in range(len(stacked))]


def stack(params: dict[str, Any], layers: int, period: int = 1) -> dict[str, Any]:
  """Stacks layers: the inverse of `unstack`; `period` is the number of layer kinds."""
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

"""Toy models of every family, and helpers for testing their folders."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import toy

from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.transformer import Transformer

QWEN3 = toy.MODEL
QWEN2 = dataclasses.replace(
  QWEN3, qk_norm=False, attention_bias=True, tie_embeddings=False, rope_theta=1e6
)
LLAMA = dataclasses.replace(QWEN3, qk_norm=False)


def params_of(cfg: ModelConfig):
  """Random parameters; no two arrays are equal."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda s: rng.normal(size=s.shape).astype(s.dtype), transformer.param_shapes(cfg)
  )


@functools.partial(jax.jit, static_argnums=0)
def logits(cfg: ModelConfig, params, tokens_BT, position_BT, segment_BT) -> jax.Array:
  """Logits of packed rows."""
  model = Transformer(cfg)
  hidden, _ = model.apply({"params": params}, tokens_BT, position_BT, segment_BT)
  return model.apply({"params": params}, hidden, method="logits")


def assert_identical(a, b) -> None:
  """Asserts that two trees have the same structure, dtypes and values."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    assert x.dtype == y.dtype, path
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def difference(a, b) -> float:
  """The largest difference between two arrays, relative to the largest entry of b."""
  assert a.shape == b.shape
  return float(np.abs(np.asarray(a) - b).max() / np.abs(b).max())

"""The model's FLOP count against XLA's count for the compiled program."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from coa_jax.model import flops, transformer
from coa_jax.model.config import ModelConfig

CFG = ModelConfig(
  vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ff=160
)


@pytest.mark.slow
def test_a_forward_pass_of_one_segment_is_what_xla_counts():
  B, T = 2, 64  # one block: XLA counts the body of a loop once
  params = transformer.init_params(CFG, 0)
  ids = jnp.ones((B, T), jnp.int32)

  def forward(params):
    hidden, _ = transformer.Transformer(CFG).apply({"params": params}, ids, ids, ids)
    return transformer.Transformer(CFG).apply(
      {"params": params}, hidden, method="logits"
    )

  counted = jax.jit(forward).lower(params).compile().cost_analysis()["flops"]
  # XLA also counts the masked half of the scores.
  masked = B * 4 * CFG.layers * CFG.heads * CFG.head_dim * T * (T - 1) // 2
  expected = flops.train_flops(CFG, [T] * B) / 3 + masked
  # XLA also counts norms, rotations and softmax.
  assert expected < counted < 1.1 * expected


def test_segments_do_not_read_each_other_and_frozen_matrices_have_no_gradient():
  whole, halves = flops.train_flops(CFG, [64]), flops.train_flops(CFG, [32, 32])
  reads = 12 * CFG.layers * CFG.heads * CFG.head_dim
  assert whole - halves == reads * (64 * 65 - 2 * 32 * 33) // 2
  saved = whole - flops.train_flops(CFG, [64], frozen=True)
  assert saved == 2 * 64 * sum(flops.products(CFG))
  assert flops.train_flops(CFG, []) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_products_are_the_matrices(tied: bool):
  cfg = dataclasses.replace(CFG, tie_embeddings=tied)
  leaves = jax.tree.leaves(transformer.param_shapes(cfg))
  scalars = sum(x.size for x in leaves if x.ndim > 1)
  layers, head = flops.products(cfg)
  assert layers + head * (1 if tied else 2) == scalars


@pytest.mark.parametrize(
  ("kind", "peak"),
  [
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("NVIDIA H1000", None),
    ("TPU v4", 275e12),
    ("TPU v4 lite", 138e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
  ],
)
def test_cards_of_one_name_have_peaks_of_their_own(kind: str, peak: float | None):
  assert flops.peak_flops(kind) == peak

"""A model's arithmetic operations, for utilisation and rooflines.

[m, k] times [k, n] takes 2 m k n operations. Recomputed (remat) and masked products do
not count, as in PaLM's MFU (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax

from coa_jax.model.config import DeltaNet, ModelConfig

# One device's dense bfloat16 operations per second, from the makers' data sheets. The
# first name that begins a device's kind counts; so longer names come first.
PEAKS = {
  "NVIDIA H200 NVL": 835e12,
  "NVIDIA H200": 989e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100 NVL": 835e12,
  "NVIDIA H100": 989e12,
  "NVIDIA A100": 312e12,
  "TPU v4 lite": 138e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 2307e12 / 2,  # a chip is two devices
}


def peak_flops(kind: str) -> float | None:
  """Returns a device kind's operations per second; None if unknown.

  A part of a card (MIG) has an unknown share of the peak.
  """
  words = re.split(r"[ -]", kind)
  if "MIG" in words:
    return None
  for name, peak in PEAKS.items():
    # Whole words: an H1000 is not an H100.
    if words[: len(name.split())] == name.split():
      return peak
  return None


def utilisation(
  cfg: ModelConfig,
  segments: Iterable[int],
  seconds: float,
  frozen: bool = False,
  devices: int = 1,
) -> dict[str, float]:
  """Computes `mfu`, the updates' share of the devices' peak, if known."""
  peak = peak_flops(jax.devices()[0].device_kind)
  if not peak or seconds <= 0:
    return {}
  flops = train_flops(cfg, segments, frozen)
  return {"mfu": flops / seconds / (peak * devices)}


def products(cfg: ModelConfig) -> tuple[int, int]:
  """Counts the scalars in all layers' matrices, and in the output matrix."""
  heads = 2 * cfg.kv_heads + (3 if cfg.attention_gate else 2) * cfg.heads
  mixers = cfg.kinds.count("attention") * heads * cfg.head_dim
  if cfg.delta:
    d = cfg.delta
    values = d.value_heads * d.value_dim
    channels = d.key_heads * d.channels
    mixers += cfg.kinds.count("delta") * (channels + 2 * values + 2 * d.value_heads)
  layers = cfg.width * (mixers + cfg.layers * 3 * cfg.ff)
  return layers, cfg.width * cfg.vocab_size


def delta_flops(delta: DeltaNet) -> int:
  """Counts the gated delta rule's operations per token, in one layer.

  The rule decays each head's state, reads the state twice and writes it once; further
  products for chunks do not count.
  """
  return 7 * delta.value_heads * delta.key_dim * delta.value_dim


def train_flops(cfg: ModelConfig, segments: Iterable[int], frozen: bool = False) -> int:
  """Counts one update's operations: a forward pass, and twice that backward.

  Args:
    segments: tokens in each segment. In softmax attention a token reads its segment up
      to itself; each key with its value takes 4 H operations per query head.
    frozen: True if the matrices get no gradient (LoRA), which saves a third of their
      operations.
  """
  tokens = 0
  pairs = 0
  for n in segments:
    tokens += n
    pairs += n * (n + 1) // 2
  matrices = 2 * sum(products(cfg)) * tokens
  attention = 4 * cfg.kinds.count("attention") * cfg.heads * cfg.head_dim * pairs
  if cfg.delta:
    attention += cfg.kinds.count("delta") * delta_flops(cfg.delta) * tokens
  # Backward: one product for the gradient of a matrix's input, one for its own.
  passes = 2 if frozen else 3
  return passes * matrices + 3 * attention

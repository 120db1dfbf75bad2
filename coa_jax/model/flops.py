"""A model's arithmetic, for utilisation and rooflines.

A product of [m, k] and [k, n] is 2 m k n operations. Recomputed (remat) and masked
products do not count, as in PaLM's MFU (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax

from coa_jax.model.config import DeltaNet, ModelConfig

# Dense bfloat16 operations per second of one device, by the makers' data sheets; the
# first whose words begin a device's kind. So the slower cards of a name come first.
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
  """Returns operations per second of a kind of device; None if unknown.

  A part of a card (MIG) has an unknown part of its peak.
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
  """Computes `mfu`, the updates' share of the devices' peak, if known.

  Args:
    cfg, segments, frozen: as for `train_flops`.
    seconds: duration of the updates.
    devices: their devices.
  """
  peak = peak_flops(jax.devices()[0].device_kind)
  if not peak or seconds <= 0:
    return {}
  flops = train_flops(cfg, segments, frozen)
  return {"mfu": flops / seconds / (peak * devices)}


def products(cfg: ModelConfig) -> tuple[int, int]:
  """Counts scalars in the matrices of all layers, and in the output matrix."""
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
  """Counts a token's operations by the gated delta rule, in one layer.

  It decays each head's state, reads it twice and writes it; the chunks' further
  products do not count.
  """
  return 7 * delta.value_heads * delta.key_dim * delta.value_dim


def train_flops(cfg: ModelConfig, segments: Iterable[int], frozen: bool = False) -> int:
  """Counts one update's operations: a forward pass, and twice that backward.

  Args:
    cfg: the architecture.
    segments: tokens of every segment of the update; in softmax attention a token reads
      its segment up to itself, one key and one value for 4 H operations and head.
    frozen: the matrices get no gradient of their own (LoRA): a third less for them.
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
  # Backward, a matrix takes a product for its input's gradient and one for its own.
  passes = 2 if frozen else 3
  return passes * matrices + 3 * attention

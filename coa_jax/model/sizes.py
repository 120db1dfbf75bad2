"""Minimum device memory of a model, a batch and the rollouts' slots.

Compared with the devices' memory before any allocation; see `capacity.check`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from coa_jax.model import cache
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner
from coa_jax.runtime import capacity

TOKEN = 7 * 4  # bytes of a token in a `Batch`
_TRAINED = 3  # a trained parameter, its gradient, and one number of the optimizer


def check_device(needs: Mapping[str, int], partitioner: Partitioner) -> None:
  """Refuses needs beyond the devices' memory.

  Args:
    needs: fields with their values -> bytes over all devices, at least.
    partitioner: the devices.

  Raises:
    ValueError: naming the fields that need most.
  """
  capacity.check(needs, _bytes_of(partitioner.devices), "the devices have")


def check_model(cfg: ModelConfig, file: str) -> None:
  """Refuses an architecture too large for all devices together.

  Raises:
    ValueError: naming its file.
  """
  try:
    capacity.check(parameter_needs(cfg), _bytes_of(jax.devices()), "the devices have")
  except ValueError as e:
    raise ValueError(f"{file}: {e}") from None


def _bytes_of(devices: list[jax.Device]) -> float:
  """Sums their memory; infinite if unknown."""
  # A machine's CPU devices share its memory; each process counts as a machine.
  if devices[0].platform == "cpu":
    return capacity.host_bytes() * len({d.process_index for d in devices})
  # Only local devices report it; the others are assumed alike.
  mine = next(d for d in devices if d.process_index == jax.process_index())
  limit = (mine.memory_stats() or {}).get("bytes_limit", math.inf)
  return limit * len(devices)


def parameter_needs(cfg: ModelConfig, trained: bool = False) -> dict[str, int]:
  """Counts the bytes of parameters and, if trained, of their training state."""
  # --- Scalars; norms and biases are too few to count.
  attention = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
  layer = attention + 3 * cfg.width * cfg.ff
  embeddings = cfg.vocab_size * cfg.width * (1 if cfg.tie_embeddings else 2)
  count = cfg.layers * layer + embeddings

  # --- Their bytes, by the sizes that determine them.
  sizes = ("layers", "width", "heads", "kv_heads", "head_dim", "ff", "vocab_size")
  shape = ", ".join(f"{name}={getattr(cfg, name)}" for name in sizes)
  each = jnp.dtype(cfg.param_dtype).itemsize
  if trained:
    each *= _TRAINED
  return {f"the model ({shape})": count * each}


def batch_needs(
  cfg: ModelConfig, section: str, rows: int, length: int
) -> dict[str, int]:
  """Counts a micro-batch's bytes: its columns, and every layer's input."""
  token = TOKEN + cfg.layers * cfg.width * jnp.dtype(cfg.dtype).itemsize
  return {f"{section}.rows={rows} of {section}.length={length}": rows * length * token}


def check_training(
  cfg: ModelConfig,
  section: str,
  rows: int,
  length: int,
  frozen: bool,
  partitioner: Partitioner,
) -> None:
  """Refuses a model and a micro-batch too large to train on the devices.

  Args:
    cfg: the architecture.
    section: config section with `rows` and `length`.
    rows: rows per micro-batch.
    length: tokens per row.
    frozen: whether only adapters are trained.
    partitioner: the devices.

  Raises:
    ValueError: naming the fields that need most.
  """
  needs = parameter_needs(cfg, trained=not frozen)
  check_device(needs | batch_needs(cfg, section, rows, length), partitioner)


def rollout_needs(
  cfg: ModelConfig, slots: int, max_len: int, window: int, replicas: int
) -> dict[str, int]:
  """Counts the slots' bytes: a page, logits and a window's tokens each."""
  # A slot's part of the cache, its logits in float32, an id and a log-prob a step.
  row = cache.row_bytes(cfg, cache.page_size(max_len))
  least = row + 4 * cfg.vocab_size + 8 * window
  return {
    f"rollout.slots={slots} with rollout.window={window}": slots * replicas * least,
    f"one trajectory of rollout.max_len={max_len}": cache.row_bytes(cfg, max_len),
  }

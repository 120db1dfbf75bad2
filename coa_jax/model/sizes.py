"""What a model, a batch and the slots of rollouts take on the devices, at the least.

Compared with what the devices have before anything is allocated; see `capacity.check`.
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


def check_device(needs: Mapping[str, int], partitioner: Partitioner | None) -> None:
  """Refuses what the devices can not hold.

  Args:
    needs: fields with their values -> bytes over all devices, at least.
    partitioner: the devices; None for one.

  Raises:
    ValueError: naming the fields that need most.
  """
  devices = jax.local_devices()[:1]
  if partitioner:
    devices = list(partitioner.mesh.devices.flat)
  capacity.check(needs, _bytes_of(devices), "the devices have")


def check_model(cfg: ModelConfig, file: str) -> None:
  """Refuses an architecture that all devices together can not hold.

  Raises:
    ValueError: naming the file that it is of.
  """
  try:
    capacity.check(parameter_needs(cfg), _bytes_of(jax.devices()), "the devices have")
  except ValueError as e:
    raise ValueError(f"{file}: {e}") from None


def _bytes_of(devices: list[jax.Device]) -> float:
  """Memory of all of them; infinite where they do not tell."""
  # A machine's CPU devices share its memory; each process is taken for a machine.
  if devices[0].platform == "cpu":
    return capacity.host_bytes() * len({d.process_index for d in devices})
  # Only one's own devices tell; the others are taken to be like them.
  mine = next(d for d in devices if d.process_index == jax.process_index())
  limit = (mine.memory_stats() or {}).get("bytes_limit", math.inf)
  return limit * len(devices)


def parameter_needs(cfg: ModelConfig, trained: bool = False) -> dict[str, int]:
  """Counts what parameters take, and where they are trained what that keeps."""
  # --- Scalars; norms and biases are too few to count.
  attention = cfg.width * cfg.head_dim * (2 * cfg.heads + 2 * cfg.kv_heads)
  layer = attention + 3 * cfg.width * cfg.ff
  embeddings = cfg.vocab_size * cfg.width * (1 if cfg.tie_embeddings else 2)
  count = cfg.layers * layer + embeddings

  # --- Their bytes, under the sizes that they follow from.
  sizes = ("layers", "width", "heads", "kv_heads", "head_dim", "ff", "vocab_size")
  shape = ", ".join(f"{name}={getattr(cfg, name)}" for name in sizes)
  each = jnp.dtype(cfg.param_dtype).itemsize
  if trained:
    each *= _TRAINED
  return {f"the model ({shape})": count * each}


def batch_needs(
  cfg: ModelConfig, section: str, rows: int, length: int
) -> dict[str, int]:
  """Counts what a micro-batch takes: its columns, and what enters every layer."""
  token = TOKEN + cfg.layers * cfg.width * jnp.dtype(cfg.dtype).itemsize
  return {f"{section}.rows={rows} of {section}.length={length}": rows * length * token}


def check_training(
  cfg: ModelConfig,
  section: str,
  rows: int,
  length: int,
  frozen: bool,
  partitioner: Partitioner | None,
) -> None:
  """Refuses a model and a micro-batch that the devices can not hold to train.

  Args:
    cfg: the architecture.
    section: of the config, where `rows` and `length` stand.
    rows: rows of a micro-batch.
    length: tokens of a row.
    frozen: whether the parameters stay as they are, and adapters are trained.
    partitioner: the devices; None for one.

  Raises:
    ValueError: naming the fields that need most.
  """
  needs = parameter_needs(cfg, trained=not frozen)
  check_device(needs | batch_needs(cfg, section, rows, length), partitioner)


def rollout_needs(
  cfg: ModelConfig, slots: int, max_len: int, window: int, replicas: int
) -> dict[str, int]:
  """Counts what slots take: a page, logits and a window's tokens each."""
  # A slot's part of the cache, its logits in float32, an id and a log-prob a step.
  row = cache.row_bytes(cfg, cache.page_size(max_len))
  least = row + 4 * cfg.vocab_size + 8 * window
  return {
    f"rollout.slots={slots} with rollout.window={window}": slots * replicas * least,
    f"one trajectory of rollout.max_len={max_len}": cache.row_bytes(cfg, max_len),
  }

"""Device memory: the needs of a model, a batch and the rollouts' caches, and the rest.

Minimum needs are compared with the devices' memory before any allocation; see
`capacity.check`. A cache budget counts the arrays kept during rollouts, also for
devices not at hand. Programs' temporaries are unknown before compilation, so a share of
the memory is reserved for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from coa_jax.model import cache, flops
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.runtime import capacity

# Share of device memory reserved for programs' temporaries and for gaps.
KEPT = 0.05
TOKEN = 7 * 4  # bytes per token in a `Batch`
_TRAINED = 3  # a trained parameter, its gradient, and one optimizer number


class CacheConfig(Protocol):
  """The fields of `RolloutConfig` that determine a replica's memory and programs."""

  slots: int
  prefill_rows: int
  window: int
  max_len: int
  memory: float


def check_device(needs: Mapping[str, int], partitioner: Partitioner) -> None:
  """Refuses needs beyond the devices' memory.

  Args:
    needs: fields with their values -> minimum bytes over all devices.

  Raises:
    ValueError: too little memory; the message names the largest needs.
  """
  if partitioner.platform == "cpu":
    # A machine's devices share its memory; each process counts as a machine.
    room = capacity.host_bytes() * partitioner.num_processes
  else:
    # Only local devices report their memory; the others are assumed alike.
    room = (device_bytes(partitioner) or math.inf) * len(partitioner.devices)
  capacity.check(needs, room, "the devices have")


def parameter_needs(cfg: ModelConfig, trained: bool = False) -> dict[str, int]:
  """Counts the bytes for parameters and, if trained, for their training state."""
  # --- Scalars; norms and biases are too few to count.
  of_layers, output = flops.products(cfg)
  count = of_layers + output * (1 if cfg.tie_embeddings else 2)

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
    section: config section with `rows` and `length`.
    frozen: whether only adapters are trained.

  Raises:
    ValueError: too little memory; the message names the largest needs.
  """
  needs = parameter_needs(cfg, trained=not frozen)
  needs |= batch_needs(cfg, section, rows, length)
  check_device(needs, partitioner)


def rollout_needs(
  cfg: ModelConfig, slots: int, max_len: int, window: int, replicas: int
) -> dict[str, int]:
  """Counts the bytes for slots, one whole trajectory, and linear attention's states."""
  # Per slot a page, float32 logits, and an id and a log-prob per step.
  row = cache.row_bytes(cfg, cache.page_size(max_len))
  least = row + 4 * cfg.vocab_size + 8 * window
  out = {
    f"rollout.slots={slots} with rollout.window={window}": slots * replicas * least,
    f"one trajectory of rollout.max_len={max_len}": cache.row_bytes(cfg, max_len),
  }
  if cfg.delta:
    states = cache.state_bytes(cfg, slots, ONE_DEVICE)
    out[f"rollout.slots={slots}: states of linear attention"] = replicas * states
  return out


def check_rollouts(
  model: ModelConfig, config: CacheConfig, mesh: Partitioner, is_served: bool
) -> None:
  """Refuses a model that does not fit beside its slots.

  Args:
    is_served: whether the slots are a server's; then only the model counts.

  Raises:
    ValueError: too little memory; the message names the largest needs.
  """
  needs = parameter_needs(model)
  if not is_served:
    replicas = mesh.mesh.size // mesh.mesh.shape["tensor"]
    needs |= rollout_needs(model, config.slots, config.max_len, config.window, replicas)
  check_device(needs, mesh)


@dataclasses.dataclass(frozen=True)
class CacheBudget:
  """A decoding device's bytes, by use.

  Attributes:
    config: section `rollout`.
    policies: decode-parameter copies at once: 2 if a newer policy comes while the older
      one decodes.
    total: the whole device.
    state: the learner's state.
    weights: all copies of the decode parameters.
    logits: one token's logits per slot, in float32.
    token: one token's keys and values in all layers.
    states: linear attention's states, for slots and snapshots.
  """

  config: CacheConfig
  policies: int
  total: int
  state: int
  weights: int
  logits: int
  token: int
  states: int = 0

  @property
  def caches(self) -> int:
    """Bytes left for keys and values."""
    taken = self.state + self.weights + self.logits + self.states
    return max(0, int(self.total * (1 - KEPT)) - taken)

  @property
  def tokens(self) -> int:
    """Capacity of a replica's cache, in tokens."""
    return self.caches // self.token

  @property
  def pages(self) -> int:
    """Counts a replica's cache pages, limited by memory and the slots' need."""
    config = self.config
    blocks = cache.num_blocks(config.max_len, config.max_len)
    room = int(config.memory * 1e9) or self.caches
    page = self.token * cache.page_size(config.max_len)
    return min(room // page, config.slots * blocks)

  def describe(self) -> str:
    """Formats the memory's uses and the slots' maximum need in one line."""
    config = self.config
    asked = config.slots * config.max_len
    states = f"states {_gb(self.states)}, " if self.states else ""
    return (
      f"memory of a device that decodes: {_gb(self.total)}; learner's state "
      f"{_gb(self.state)}, decode parameters {_gb(self.weights)}, {states}logits "
      f"{_gb(self.logits)}, kept for programs {_gb(KEPT * self.total)}; left for "
      f"caches {_gb(self.caches)}: {self.tokens:,} tokens a replica (rollout.slots="
      f"{config.slots} of rollout.max_len={config.max_len} may take {asked:,})"
    )

  def check(self) -> None:
    """Refuses a section `rollout` that leaves the learner, or itself, no room.

    Raises:
      ValueError: `rollout.memory` is more than the free memory, or takes all free
        memory although the learner's step needs room too.
    """
    asked = self.config.memory
    if asked * 1e9 > self.caches:
      raise ValueError(
        f"rollout.memory={asked:g} GB is more than the {_gb(self.caches)} of a device "
        "that are left; take that at most, or 0 for all"
      )
    if self.policies > 1 and self.state and not asked:
      raise ValueError(
        "rollout.memory=0 takes all that is left when rollouts begin, and with "
        "algo.sampling.staleness the learner's step runs beside them: of "
        f"{_gb(self.caches)} take what the step leaves (its temporaries: python -m "
        "experiments.bench.compile_check), or give rollouts devices of their own "
        "(mesh.rollout)"
      )


def cache_budget(
  decoder: ModelConfig,
  config: CacheConfig,
  mesh: Partitioner,
  weights: Any,
  state: Any,
  policies: int,
  total: int,
) -> CacheBudget:
  """Counts a decoding device's bytes besides caches; allocates nothing.

  Args:
    weights: decode parameters: arrays, or shapes with shardings.
    state: arrays, or shapes with shardings, kept during rollouts; those on other
      devices do not count.
  """
  page_size = cache.page_size(config.max_len)
  return CacheBudget(
    config=config,
    policies=policies,
    total=total,
    state=_bytes_on_device(state, mesh),
    weights=policies * _bytes_on_device(weights, mesh),
    logits=4 * config.slots * decoder.vocab_size // mesh.ways("V"),
    token=math.ceil(cache.page_bytes(decoder, page_size, mesh) / page_size),
    states=cache.state_bytes(decoder, config.slots, mesh),
  )


def cache_room(
  model: ModelConfig, config: CacheConfig, partitioner: Partitioner
) -> float:
  """Returns a device's bytes for a decoder's pages; infinite if unknown."""
  if config.memory:
    return config.memory * 1e9
  # A CPU's memory is shared: its devices report none.
  stats = partitioner.devices[0].memory_stats()
  if not stats:
    return math.inf
  room = stats["bytes_limit"] * (1 - KEPT) - stats["bytes_in_use"]
  room -= cache.state_bytes(model, config.slots, partitioner)
  return room - 4 * config.slots * model.vocab_size // partitioner.ways("V")  # logits


def device_bytes(partitioner: Partitioner) -> int:
  """Returns one local device's memory in bytes; 0 if unknown."""
  me = jax.process_index()
  device = next(d for d in partitioner.devices if d.process_index == me)
  # A CPU's devices share the machine's memory and report none.
  return (device.memory_stats() or {}).get("bytes_limit", 0)


def _bytes_on_device(tree: Any, partitioner: Partitioner) -> int:
  count = 0
  for x in jax.tree.leaves(tree):
    shape = x.shape
    sharding = getattr(x, "sharding", None)
    if sharding is not None:
      if sharding.memory_kind == "pinned_host":
        continue
      if sharding.device_set.isdisjoint(partitioner.devices):
        continue
      shape = sharding.shard_shape(shape)
    count += math.prod(shape) * x.dtype.itemsize
  return count


def _gb(size: float) -> str:
  return f"{size / 1e9:,.1f} GB"

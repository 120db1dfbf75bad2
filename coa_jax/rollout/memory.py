"""Device memory for the rollouts' caches, and their capacity.

It is counted ahead, also for an unavailable slice; `slot_cache.page_counts` then asks
the device. It counts arrays kept during rollouts. The programs' temporaries are unknown
before compilation; a share of the memory is reserved for them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from coa_jax.model import cache, decode_params
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner
from coa_jax.rollout.slot_cache import KEPT
from coa_jax.rollout.types import RolloutConfig


@dataclasses.dataclass(frozen=True)
class CacheBudget:
  """A decoding device's bytes, by use.

  Attributes:
    total: all of the device.
    state: the learner's.
    weights: decode parameters, two policies' if rollouts continue meanwhile.
    logits: one token's per slot, in float32.
    token: one token's keys and values in all layers.
  """

  total: int
  state: int
  weights: int
  logits: int
  token: int

  @property
  def caches(self) -> int:
    """Bytes left for keys and values."""
    taken = self.state + self.weights + self.logits
    return max(0, int(self.total * (1 - KEPT)) - taken)

  @property
  def tokens(self) -> int:
    """Capacity of a replica's cache, in tokens."""
    return self.caches // self.token

  def pages(self, config: RolloutConfig) -> int:
    """Counts a replica's cache pages: limited by memory or the slots' need."""
    blocks = cache.num_blocks(config.max_len, config.max_len)
    room = int(config.memory * 1e9) or self.caches
    page = self.token * cache.page_size(config.max_len)
    return min(room // page, config.slots * blocks)

  def describe(self, config: RolloutConfig) -> str:
    """Formats the memory's uses and the slots' maximum need in one line."""
    asked = config.slots * config.max_len
    return (
      f"memory of a device that decodes: {_gb(self.total)}; learner's state "
      f"{_gb(self.state)}, decode parameters {_gb(self.weights)}, logits "
      f"{_gb(self.logits)}, kept for programs {_gb(KEPT * self.total)}; left for "
      f"caches {_gb(self.caches)}: {self.tokens:,} tokens a replica (rollout.slots="
      f"{config.slots} of rollout.max_len={config.max_len} may take {asked:,})"
    )


def cache_budget(
  model: ModelConfig,
  config: RolloutConfig,
  partitioner: Partitioner,
  state: Any,
  policies: int,
  total: int,
) -> CacheBudget:
  """Counts a decoding device's bytes besides caches; allocates nothing.

  Args:
    model: the training architecture.
    config: section `rollout`.
    partitioner: the decoding devices'.
    state: arrays, or shapes with shardings, kept during rollouts; other devices' do not
      count.
    policies: copies of decode parameters at once: 2 if a newer policy comes while the
      older one decodes.
    total: bytes of the device.
  """
  partitioner = partitioner.decoding(config.tensor)
  decoder = decode_params.architecture(model, partitioner)
  weights = decode_params.decoding_shapes(decoder, partitioner)
  page_size = cache.page_size(config.max_len)
  return CacheBudget(
    total=total,
    state=_bytes_on_device(state, partitioner),
    weights=policies * _bytes_on_device(weights, partitioner),
    logits=4 * config.slots * model.vocab_size // partitioner.ways("V"),
    token=math.ceil(cache.page_bytes(decoder, page_size, partitioner) / page_size),
  )


def budget_line(
  model: ModelConfig,
  config: RolloutConfig,
  partitioner: Partitioner,
  state: Any,
  policies: int,
) -> str:
  """Formats `cache_budget`'s counts; "" if the devices' memory is unknown.

  Raises:
    ValueError: `rollout.memory` is more than that, or all of it although the learner's
      step needs room too.
  """
  total = device_bytes(partitioner)
  if not total:
    return ""
  budget = cache_budget(model, config, partitioner, state, policies, total)
  if config.memory * 1e9 > budget.caches:
    raise ValueError(
      f"rollout.memory={config.memory:g} GB is more than the {_gb(budget.caches)} of a "
      "device that are left; take that at most, or 0 for all"
    )
  if policies > 1 and budget.state and not config.memory:
    raise ValueError(
      "rollout.memory=0 takes all that is left when rollouts begin, and with "
      "algo.sampling.staleness the learner's step runs beside them: of "
      f"{_gb(budget.caches)} take what the step leaves (its temporaries: python -m "
      "experiments.bench.compile_check), or give rollouts devices of their own "
      "(mesh.rollout)"
    )
  return budget.describe(config)


def device_bytes(partitioner: Partitioner) -> int:
  """Returns the memory of one of this process's devices; 0 if unknown."""
  me = jax.process_index()
  device = next(d for d in partitioner.devices if d.process_index == me)
  # A CPU's devices share the machine's: they report none.
  return (device.memory_stats() or {}).get("bytes_limit", 0)


def _bytes_on_device(tree: Any, partitioner: Partitioner) -> int:
  """Sums the arrays' parts on one device of a mesh."""
  count = 0
  for x in jax.tree.leaves(tree):
    shape = x.shape
    sharding = getattr(x, "sharding", None)
    if sharding is not None:
      if sharding.memory_kind == "pinned_host":
        continue
      if not _shares_a_device(sharding, partitioner):
        continue
      shape = sharding.shard_shape(shape)
    count += math.prod(shape) * x.dtype.itemsize
  return count


def _shares_a_device(sharding: Any, partitioner: Partitioner) -> bool:
  return not sharding.device_set.isdisjoint(partitioner.devices)


def _gb(size: float) -> str:
  return f"{size / 1e9:,.1f} GB"

"""How much of a device's memory rollouts have for their caches, and what that holds.

It is counted ahead, also for a slice that is not at hand; `slot_cache.page_counts` then
asks the device. Counted are arrays that stay while rollouts go on. The programs' own
temporaries are not known before they are compiled; a share of the memory is kept for
them.
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
  """Bytes of one device that decodes, by what they go to.

  Attributes:
    total: of the device.
    state: what learning keeps there.
    weights: decode parameters, those of two policies where rollouts go on meanwhile.
    logits: of one token of every slot, in float32.
    token: keys and values of a token in all layers.
  """

  total: int
  state: int
  weights: int
  logits: int
  token: int

  @property
  def caches(self) -> int:
    """Bytes that are left for keys and values."""
    taken = self.state + self.weights + self.logits
    return max(0, int(self.total * (1 - KEPT)) - taken)

  @property
  def tokens(self) -> int:
    """Tokens that the cache of a replica can hold."""
    return self.caches // self.token

  def pages(self, config: RolloutConfig) -> int:
    """Counts the pages of a replica's cache: what fits, or what the slots can need."""
    blocks = cache.num_blocks(config.max_len, config.max_len)
    room = int(config.memory * 1e9) or self.caches
    page = self.token * cache.page_size(config.max_len)
    return min(room // page, config.slots * blocks)

  def describe(self, config: RolloutConfig) -> str:
    """Says in a line what goes where, and what the slots could ask for."""
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
  partitioner: Partitioner | None,
  state: Any,
  policies: int,
  total: int,
) -> CacheBudget:
  """Counts what a device that decodes holds besides caches; allocates nothing.

  Args:
    model: the architecture, as it is trained.
    config: section `rollout`.
    partitioner: of the devices that decode; None for the only one.
    state: arrays, or shapes with shardings, that stay while rollouts go on; those on
      other devices do not count.
    policies: decode parameters that are there at once: 2 where a newer policy comes
      while the older one decodes.
    total: bytes of the device.
  """
  if partitioner:
    partitioner = partitioner.decoding(config.tensor)
  decoder = decode_params.architecture(model, partitioner)
  weights = decode_params.decoding_shapes(decoder, partitioner)
  page_size = cache.page_size(config.max_len)
  split_V = partitioner.ways("V") if partitioner else 1
  return CacheBudget(
    total=total,
    state=_bytes_on_device(state, partitioner),
    weights=policies * _bytes_on_device(weights, partitioner),
    logits=4 * config.slots * model.vocab_size // split_V,
    token=math.ceil(cache.page_bytes(decoder, page_size, partitioner) / page_size),
  )


def budget_line(
  model: ModelConfig,
  config: RolloutConfig,
  partitioner: Partitioner | None,
  state: Any,
  policies: int,
) -> str:
  """Says what `cache_budget` counts; "" where devices do not tell their memory.

  Raises:
    ValueError: `rollout.memory` is more than that, or is to be all of it though the
      learner's step needs room beside it.
  """
  device = jax.local_devices()[0]
  if partitioner:
    device = partitioner.mesh.local_devices[0]
  total = (device.memory_stats() or {}).get("bytes_limit")
  if not total:  # a CPU's devices share the machine's
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


def _bytes_on_device(tree: Any, partitioner: Partitioner | None) -> int:
  """Sums the parts of arrays that one device of a mesh holds."""
  count = 0
  for x in jax.tree.leaves(tree):
    shape = x.shape
    sharding = getattr(x, "sharding", None)
    if sharding is not None:
      if sharding.memory_kind == "pinned_host":
        continue
      if partitioner and not _shares_a_device(sharding, partitioner):
        continue
      shape = sharding.shard_shape(shape)
    count += math.prod(shape) * x.dtype.itemsize
  return count


def _shares_a_device(sharding: Any, partitioner: Partitioner) -> bool:
  return not sharding.device_set.isdisjoint(partitioner.mesh.devices.flat)


def _gb(size: float) -> str:
  return f"{size / 1e9:,.1f} GB"

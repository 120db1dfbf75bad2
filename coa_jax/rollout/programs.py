"""Which programs a replica compiles, known from the config alone.

Every shape that the scheduler gives to a function of the device is a program of its
own, minutes to compile for a large model. They are few because lengths are rounded up:
the cache's places to a power of two of blocks, given tokens to a power of two, and the
rows that they are given to to one of four.
"""

from __future__ import annotations

import dataclasses

from coa_jax.model.cache import BLOCK_SIZE
from coa_jax.rollout import scheduler
from coa_jax.rollout.types import RolloutConfig


@dataclasses.dataclass(frozen=True, order=True)
class DeviceCall:
  """A function of the device and the shapes that it is compiled for.

  Attributes:
    function: window or extend.
    places: S of the cache.
    rows: slots that it works on.
    tokens: sampled at most (window), or given to a row at most (extend).
  """

  function: str
  places: int
  rows: int
  tokens: int

  def __str__(self) -> str:
    """E.g. `extend 16 x 512 of 2048`: rows, tokens, places."""
    return f"{self.function} {self.rows} x {self.tokens} of {self.places}"


def cache_sizes(max_len: int) -> list[int]:
  """Lists the places that a cache may have, as `KVCache.resize` chooses them."""
  if max_len <= BLOCK_SIZE:
    return [max_len]
  most = -(-max_len // BLOCK_SIZE)
  blocks = 1
  out = []
  while blocks < most:
    out.append(blocks * BLOCK_SIZE)
    blocks *= 2
  return [*out, most * BLOCK_SIZE]


def device_calls(config: RolloutConfig, on: str) -> list[DeviceCall]:
  """Lists every program that decoding may compile, the smallest cache's first.

  Left out are those that copy within the cache, or into one of another size: they are
  compiled in no time.

  Args:
    config: of the rollouts.
    on: the kind of device: cpu, gpu or tpu.
  """
  most_rows = min(config.inject_rows, config.slots)
  out: list[DeviceCall] = []
  for places in cache_sizes(config.max_len):
    # The last token of a text stays pending, and one more place is left to sample.
    most = min(places, config.max_len - 1) - 1
    lengths = range(min(most, scheduler.PIECE) + 1)
    for tokens in sorted(set(map(scheduler.token_bucket, lengths))):
      given = range(1, most_rows + 1)
      buckets = {scheduler.row_bucket(n, most_rows, on) for n in given}
      for rows in sorted(buckets):
        out.append(DeviceCall("extend", places, rows, tokens))
    out.append(DeviceCall("window", places, config.slots, config.window))
  return out

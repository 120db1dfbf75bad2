"""Which programs a replica compiles, known from the config alone.

Every shape that the scheduler gives to a function of the device is a program of its
own, minutes to compile for a large model. They are few because numbers are rounded up:
given tokens to a power of two, the rows that they are given to to one of four (on a CPU
to one number for each number of tokens), and the pages of a cache that grows to one in
every half of a doubling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from coa_jax.model.cache import num_blocks, page_size
from coa_jax.model.kernels.paged import SHORT
from coa_jax.rollout import pages as paging

# That a call gives to all rows together, where a row has no more. On a GPU what a call
# needs for a 7B model then stays under half a gigabyte.
_CPU_TOKENS = 256
_GPU_TOKENS = 4096


@dataclasses.dataclass(frozen=True, order=True)
class DeviceCall:
  """A function of the device and the shapes that it is compiled for.

  Attributes:
    function: window or extend.
    pages: of the cache.
    blocks: pages that a row may read.
    rows: slots that it works on.
    tokens: sampled at most (window), or given to a row at most (extend).
  """

  function: str
  pages: int
  blocks: int
  rows: int
  tokens: int

  def __str__(self) -> str:
    """E.g. `extend 16 x 512, 128 of 4096 pages`: rows, tokens, of a row, of all."""
    shape = f"{self.function} {self.rows} x {self.tokens}"
    return f"{shape}, {self.blocks} of {self.pages} pages"


class Sizes(Protocol):
  """The fields of `RolloutConfig` that make the shapes."""

  slots: int
  inject_rows: int
  window: int
  max_len: int


def device_calls(
  config: Sizes, on: str, page_counts: Sequence[int]
) -> list[DeviceCall]:
  """Lists every program that decoding may compile, the smallest cache's first.

  Left out are those that copy within the cache, or into a larger one: they are compiled
  in no time.

  Args:
    config: of the rollouts.
    on: the kind of device: cpu, gpu or tpu.
    page_counts: pages that the cache may have (`slot_cache.page_counts`).
  """
  # --- Rows, tokens and pages that a call with given tokens may have. The last token of
  # a text stays pending, and one more place is left to sample.
  most = config.max_len - 2
  fewest: dict[int, int] = {}  # of each length bucket the fewest tokens
  for given in range(1, min(most, paging.PIECE) + 1):
    fewest.setdefault(token_bucket(given), given)
  shapes: set[tuple[int, int, int]] = set()
  for needed in range(1, num_blocks(most, config.max_len) + 1):
    end = min(needed * page_size(config.max_len), most)
    blocks = block_bucket(end, config.max_len, on)
    shapes.update((t, blocks, needed) for t, given in fewest.items() if given <= end)

  # --- Of each size of the cache those that it can hold.
  out: set[DeviceCall] = set()
  whole = num_blocks(config.max_len, config.max_len)
  for pages in page_counts:
    for tokens, blocks, needed in shapes:
      if needed > pages:
        continue
      rows = most_rows(tokens, min(config.inject_rows, config.slots), on)
      for r in {row_bucket(n + 1, rows, on) for n in range(rows)}:
        out.add(DeviceCall("extend", pages, blocks, r, tokens))
    out.add(DeviceCall("window", pages, whole, config.slots, config.window))
  return sorted(out, key=lambda c: (c.pages, c.function, c.tokens, c.blocks, c.rows))


def token_bucket(length: int) -> int:
  """Rounds the length of given tokens up: a power of two, at least 16."""
  bucket = 16
  while bucket < length:
    bucket *= 2
  return bucket


def block_bucket(places: int, max_len: int, on: str) -> int:
  """Rounds the pages of a row up that a call reads: on a CPU to a power of two.

  Long rows, and those of other devices, are read page by page, as many as are there:
  they have one program.

  Args:
    places: that the call reads.
    max_len: of a row.
    on: the kind of device: cpu, gpu or tpu.
  """
  blocks = num_blocks(max_len, max_len)
  if on != "cpu" or max_len > SHORT:
    return blocks
  bucket = 1
  while bucket < num_blocks(places, max_len):
    bucket *= 2
  return min(bucket, blocks)


def most_rows(tokens: int, inject_rows: int, on: str) -> int:
  """Returns how many rows a call may have that gives so many tokens to each.

  Args:
    tokens: given to a row, as `token_bucket` rounds them.
    inject_rows: of the config, or slots where they are fewer.
    on: the kind of device: cpu, gpu or tpu.
  """
  if on == "tpu":
    return inject_rows
  # On a CPU all of them are computed, used or not (`row_bucket`), and with this many
  # tokens the products are as fast as with more.
  most = _CPU_TOKENS if on == "cpu" else _GPU_TOKENS
  return max(1, min(inject_rows, most // tokens))


def row_bucket(rows: int, most: int, on: str) -> int:
  """Rounds the rows of a call up: a power of four, or the most.

  On a CPU always to the most: products of other numbers of rows have other bits there,
  and a slot's may not depend on its neighbours.

  Args:
    rows: how many are given tokens.
    most: of `most_rows`.
    on: the kind of device: cpu, gpu or tpu.
  """
  if on == "cpu":
    return most
  bucket = 1
  while bucket < rows:
    bucket *= 4
  return min(bucket, most)

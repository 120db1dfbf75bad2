"""A replica's compiled programs, determined by the config alone.

Every shape of a device function's arguments needs a separate program, which takes
minutes to compile for a large model. Rounding up keeps the programs few: prefill tokens
to a power of two, prefill rows to a power of four (on a CPU to the maximum for that
many tokens), and a growing cache's pages to two sizes per doubling. `on` is a device
kind: cpu, gpu or tpu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from coa_jax.model.cache import num_blocks, page_size
from coa_jax.model.kernels.paged import SHORT
from coa_jax.model.memory import CacheConfig
from coa_jax.rollout import pages as paging

# Maximum prefill tokens per call over all rows, unless a single row has more. On a GPU,
# a call for a 7B model then stays under half a gigabyte.
_CPU_TOKENS = 256
_GPU_TOKENS = 4096


@dataclasses.dataclass(frozen=True, order=True)
class DeviceCall:
  """A device function and its compiled shapes.

  Attributes:
    function: window or prefill.
    pages: the cache's pages.
    blocks: maximum pages read per row.
    rows: slots in the call.
    tokens: maximum tokens per row, sampled (window) or prefilled (prefill).
  """

  function: str
  pages: int
  blocks: int
  rows: int
  tokens: int

  def __str__(self) -> str:
    """E.g. `prefill 16 x 512, 128 of 4096 pages`: rows x tokens, blocks of pages."""
    shape = f"{self.function} {self.rows} x {self.tokens}"
    return f"{shape}, {self.blocks} of {self.pages} pages"


def device_calls(
  config: CacheConfig, on: str, page_counts: Sequence[int]
) -> list[DeviceCall]:
  """Lists every decoding program, the smallest cache's first.

  Copies within the cache or into a larger one are left out: they compile quickly.
  """
  # --- A prefill's possible tokens and pages. A text's last token stays pending, and
  # one more place is left to sample.
  most = config.max_len - 2
  fewest: dict[int, int] = {}  # the fewest tokens in each length bucket
  for given in range(1, min(most, paging.PIECE) + 1):
    fewest.setdefault(token_bucket(given), given)
  shapes: set[tuple[int, int, int]] = set()
  for needed in range(1, num_blocks(most, config.max_len) + 1):
    end = min(needed * page_size(config.max_len), most)
    blocks = block_bucket(end, config.max_len, on)
    shapes.update((t, blocks, needed) for t, given in fewest.items() if given <= end)

  # --- For each cache size, the programs that fit.
  out: set[DeviceCall] = set()
  whole = num_blocks(config.max_len, config.max_len)
  for pages in page_counts:
    for tokens, blocks, needed in shapes:
      if needed > pages:
        continue
      rows = most_rows(tokens, min(config.prefill_rows, config.slots), on)
      for r in {row_bucket(n + 1, rows, on) for n in range(rows)}:
        out.add(DeviceCall("prefill", pages, blocks, r, tokens))
    out.add(DeviceCall("window", pages, whole, config.slots, config.window))
  return sorted(out, key=lambda c: (c.pages, c.function, c.tokens, c.blocks, c.rows))


def token_bucket(length: int) -> int:
  """Rounds a prefill's length up to a power of two, at least 16."""
  return max(16, 1 << (length - 1).bit_length())


def block_bucket(places: int, max_len: int, on: str) -> int:
  """Rounds up the pages per row read by a call: on a CPU to a power of two.

  On other devices, and in long rows, pages are read one by one: one program suffices.
  """
  blocks = num_blocks(max_len, max_len)
  if on != "cpu" or max_len > SHORT:
    return blocks
  return min(1 << (num_blocks(places, max_len) - 1).bit_length(), blocks)


def most_rows(tokens: int, prefill_rows: int, on: str) -> int:
  """Returns a prefill's maximum rows for N tokens per row."""
  if on == "tpu":
    return prefill_rows
  # A CPU computes all rows, used or not (`row_bucket`), and its matrix products are as
  # fast with this many tokens as with more.
  most = _CPU_TOKENS if on == "cpu" else _GPU_TOKENS
  return max(1, min(prefill_rows, most // tokens))


def row_bucket(rows: int, most: int, on: str) -> int:
  """Rounds a call's rows up to a power of four, or to the limit.

  On a CPU, always to the limit: matrix products with other row counts round differently
  there, and a slot's results must not depend on its neighbours.
  """
  if on == "cpu":
    return most
  bucket = 1
  while bucket < rows:
    bucket *= 4
  return min(bucket, most)

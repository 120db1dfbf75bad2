"""Refuses sizes beyond this machine's memory, before any allocation.

Checks count only the minimum memory: a refused size can not work, but an accepted size
may still be too large. Fixed bounds per field would refuse sizes possible on a larger
machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Minimum host memory in bytes, per trajectory and per thread or process.
TRAJECTORY = 1 << 10
THREAD = 1 << 16


def check_host(needs: Mapping[str, int]) -> None:
  """Refuses needs (field -> minimum bytes) beyond this machine's memory.

  Raises:
    ValueError: the needs are too large; the message names the two largest.
  """
  check(needs, host_bytes(), "this machine has")


def check(needs: Mapping[str, int], room: float, who: str) -> None:
  """Like `check_host`, for `room` bytes; `who` is e.g. "this machine has"."""
  if sum(needs.values()) <= room:
    return
  # The two largest fields tell the user what to reduce.
  most = sorted(needs.items(), key=lambda need: -need[1])
  largest = "; ".join(f"{name}: {size / 1e9:,.0f} GB" for name, size in most[:2])
  raise ValueError(f"too large, at the least: {largest}; {who} {room / 1e9:,.0f} GB")


def host_bytes() -> int:
  """Returns the machine's memory in bytes."""
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

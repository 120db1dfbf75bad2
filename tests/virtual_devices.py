"""Environment variables for a process with several virtual devices on one CPU.

They must be set before JAX is imported, so this module must not import it.
"""

from __future__ import annotations

# XLA flags for comparisons of sums and gradients up to rounding: these do not need
# optimised programs, and compilation takes most of their time. Not for bits: at levels
# 1 and 2 paged attention is not bit-identical to dense attention.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environment(count: int, flags: str = "") -> dict[str, str]:
  """Returns variables that make JAX see `count` CPU devices; `flags` are more of XLA's.

  Collectives of XLA's CPU backend hold a thread while they wait for the other devices,
  and independent collectives run in any order. With the default of one thread per
  device, devices that wait in different collectives leave no thread for the others, and
  the program deadlocks. The number of threads does not depend on `count`: how a product
  is split among threads decides its last bits.
  """
  forced = f"--xla_force_host_platform_device_count={count} {flags}".rstrip()
  return {"XLA_FLAGS": forced, "PJRT_NPROC": "32"}

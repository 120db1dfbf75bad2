"""Several virtual devices on one CPU: what the environment of such a process needs.

To be set before anything imports JAX, so nothing here may import it.
"""

from __future__ import annotations

# Flags of XLA for comparisons of sums and gradients up to rounding, which do not depend
# on how well a program is compiled: most of their time is the compiler's. Not for bits:
# at levels 1 and 2 attention over pages is not bit-identical to dense attention.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environment(count: int, flags: str = "") -> dict[str, str]:
  """Returns variables that make JAX see `count` CPU devices; `flags` are XLA's others.

  Collectives of XLA's CPU backend hold a thread while they wait for the other devices,
  and those that do not depend on each other run in any order. With its default of one
  thread for each device, two devices that wait in different collectives leave no thread
  that could bring the others there, and the program stands still. The threads are as
  many whatever `count` is: how a product is cut among them decides its last bits.
  """
  forced = f"--xla_force_host_platform_device_count={count} {flags}".rstrip()
  return {"XLA_FLAGS": forced, "PJRT_NPROC": "32"}

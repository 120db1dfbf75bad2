"""Compiles in one of two processes; see test_compiling.py.

python tests/compile_in_processes.py CACHE COORDINATOR I

Prints the JAX persistent cache's hits for a replica's program, then for a program on
both processes' devices.
"""

from __future__ import annotations

import functools
import os
import sys

import virtual_devices

cache, coordinator, process = sys.argv[1:]
os.environ.update(virtual_devices.environment(2))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from coa_jax.runtime.compiling import compile_all  # noqa: E402


def found(lowered: functools.partial, replica_on: str) -> int:
  """Compiles a program; returns the number of cache hits."""
  events: list[str] = []
  jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
  compile_all("a test", [lowered], replica_on)
  jax.monitoring.clear_event_listeners()
  return events.count("/jax/compilation_cache/cache_hits")


jax.distributed.initialize(coordinator, 2, int(process))
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

mesh = jax.make_mesh((4,), ("all",), (jax.sharding.AxisType.Auto,))
of_all = NamedSharding(mesh, PartitionSpec("all"))
of_replica = jax.sharding.SingleDeviceSharding(jax.local_devices()[1])
numbers = np.arange(8, dtype=np.float32)


def square(x: jax.Array) -> jax.Array:
  return jnp.vdot(x, x)


for sharding, replica_on in ((of_replica, "cpu"), (of_all, "")):
  shape = jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=sharding)
  lower = functools.partial(jax.jit(square).lower, shape)
  print(found(lower, replica_on))

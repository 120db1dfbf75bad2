"""One of several processes that save to a bucket and restore from it.

python tests/checkpoints_in_processes.py URI SCRATCH ADDRESS PROCESSES I DO ...

DO: save=STEP, kill=STEP (SIGKILL after all files are written, but not the proof), or
restore, which prints the restored step, or 0 for none. Each process logs its saved
steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coa_jax.learner import bucket_steps
from coa_jax.learner.checkpoint import CheckpointConfig, Checkpoints
from coa_jax.learner.state import TrainState
from coa_jax.runtime.bucket import lease, mirror


def state_at(step: int) -> TrainState:
  """A state with different values at each step, in sharded and replicated arrays."""
  mesh = Mesh(np.array(jax.devices()), ("data",))

  def place(x: np.ndarray, *axes: str) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  split = np.arange(64, dtype=np.float32).reshape(8, 8) / 3 + step
  params = {"split": place(split, "data"), "whole": place(split[0] * step)}
  return TrainState(place(np.int32(step)), params, {"m": place(split * 7, "data")})


def assert_equal(state: TrainState, expected: TrainState) -> None:
  """Compares this process's shards bit for bit."""
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
    for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True):
      np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))


def main(uri: str, scratch: str, address: str, count: str, i: str, *do: str) -> None:
  """Runs the operations in `do`."""
  lease.SILENT_S = 1.0
  process = int(i)
  processes = int(count)
  if processes > 1:
    jax.distributed.initialize(address, processes, process)
  with contextlib.ExitStack() as stack:
    epoch = 0
    if process == 0:
      first = stack.enter_context(mirror.Mirror(uri, scratch, 0, processes))
      folder = first.folder
      epoch = first.epoch
    epoch = int(multihost_utils.broadcast_one_to_all(np.int32(epoch)))
    if process:
      others = mirror.opened(uri, scratch, process, processes, epoch)
      folder = stack.enter_context(others)
    own = os.path.join(folder, f"process_{process}") if process else folder
    os.makedirs(own, exist_ok=True)
    path = os.path.join(folder, "checkpoints")
    with Checkpoints(path, CheckpointConfig(keep=2)) as checkpoints:
      for what in do:
        name, _, number = what.partition("=")
        if name == "restore":
          restored = checkpoints.restore(state_at(0))
          step = int(restored[0].step) if restored else 0
          if restored:
            assert_equal(restored[0], state_at(step))
            assert restored[1] == {"step": step}
          print(step)
          continue
        if name == "kill":
          bucket_steps.prove = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with open(os.path.join(own, "log"), "a", encoding="utf-8") as f:
          f.write(f"{number}\n")
        checkpoints.save(state_at(int(number)), {"step": int(number)})
        if name == "kill" and process:
          checkpoints.wait()
          os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.wait()


if __name__ == "__main__":
  main(*sys.argv[1:])

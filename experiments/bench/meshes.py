r"""Which meshes fit which TPU slices: what RL leaves to caches on every chip.

  pip install 'jax[tpu]'   (libtpu describes the slices; no TPU is needed)
  python -m experiments.bench.meshes [--cases=REGEX]

A case is a slice and a published model, trained whole: float32 master weights and the
two moments of AdamW, split over all chips (`mesh.fsdp=-1`); rollouts in bfloat16 with
64 slots.
For every number of chips that may decode together (`rollout.tensor`) the mesh is made
as RL makes it, and `rollout.memory.cache_budget` counts what a chip holds. Nothing is
compiled: temporaries of programs are the budget's 5 % and not more, so a mesh
that fits here is one to compile, and one that does not needs no compiler.

On-policy: caches and the step's temporaries are not there at once. Expect seconds.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import TrainState
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import MeshConfig, Partitioner, make_partitioner
from coa_jax.model.transformer import param_shapes
from coa_jax.model.variants import variant
from coa_jax.report.tables import markdown_table
from coa_jax.rollout.memory import CacheBudget, cache_budget
from coa_jax.rollout.types import RolloutConfig
from experiments.bench import program as bench
from experiments.bench.compile_check import CHIPS
from experiments.bench.run_programs import devices_of, prepare
from experiments.deploy.slices import read_slice
from experiments.launch import run_program, stop

# Slice, model, tokens of a trajectory.
CASES = (
  ("v5e:4x4", "qwen3-1.7b", 8_192),
  ("v6e:4x4", "qwen3-8b", 8_192),
  ("v6e:8x8", "qwen3-14b", 16_384),
  ("v5p:2x2x4", "qwen2.5-7b", 32_768),
  ("v5p:2x4x4", "qwen3-14b", 32_768),
  ("v5p:4x4x4", "qwen2.5-32b", 32_768),
  ("v5p:4x4x8", "qwen3-32b", 32_768),
  ("tpu7x:2x2x4", "qwen3-14b", 32_768),
  ("tpu7x:4x4x4", "qwen3-32b", 32_768),
)
SLOTS = 64
_COLUMNS = {
  "slice": "slice",
  "hosts": "hosts",
  "model": "model, tokens",
  "tensor": "rollout.tensor",
  "replicas": "replicas",
  "state": "state GB",
  "weights": "decode parameters GB",
  "caches": "left for caches GB",
  "longest": "longest trajectories a replica",
}


def placed_state(model: ModelConfig, partitioner: Partitioner) -> Any:
  """Shapes and shardings of what AdamW keeps of a model."""
  optimizer = make_optimizer(OptimConfig(), 10)

  def fresh(params: Any) -> TrainState:
    return TrainState(jnp.int32(0), params, optimizer.init(params))

  shapes = jax.eval_shape(fresh, param_shapes(model))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    partitioner.tree(shapes),
  )


def rows(slice_name: str, name: str, length: int) -> Iterator[dict[str, Any]]:
  """A line of the table for every number of chips that may decode together."""
  devices = devices_of(read_slice(slice_name))
  hosts = len({device.process_index for device in devices})
  model = variant(name, scan=True, dtype="bfloat16")
  for tensor in range(1, len(devices) // hosts + 1):
    if len(devices) % tensor or model.kv_heads % tensor:
      continue
    partitioner = make_partitioner(MeshConfig(), devices, rollout_tensor=tensor)
    decoder = partitioner.decoding(tensor)
    # Refuses what RL would: a replica on several hosts.
    replicas = len(decoder.replicas()) * hosts
    config = RolloutConfig(slots=SLOTS, max_len=length, tensor=tensor)
    budget: CacheBudget = cache_budget(
      model,
      config,
      partitioner,
      placed_state(model, partitioner),
      policies=1,
      total=int(CHIPS[slice_name.partition(":")[0]].hbm),
    )
    yield {
      "slice": slice_name,
      "hosts": hosts,
      "model": f"{name}, {length:,}",
      "tensor": tensor,
      "replicas": replicas,
      "state": f"{budget.state / 1e9:.1f}",
      "weights": f"{budget.weights / 1e9:.1f}",
      "caches": f"{budget.caches / 1e9:.1f}" if budget.caches else "does not fit",
      "longest": budget.tokens // length,
    }


def main() -> None:
  """Prints the table."""
  if importlib.util.find_spec("libtpu") is None:
    stop("this needs libtpu, which describes TPU slices: pip install 'jax[tpu]'")
  prepare()
  lines: list[dict[str, Any]] = []
  for case in CASES:
    if re.search(bench.CASES.value, f"{case[0]} {case[1]}"):
      lines += rows(*case)
  print(markdown_table(lines, _COLUMNS))


if __name__ == "__main__":
  run_program(main)

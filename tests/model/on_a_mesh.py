"""Runs the sharding tests' cases on 8 virtual devices, in one process or two.

  python tests/model/on_a_mesh.py OUT.json CASES [COORDINATOR PROCESSES PROCESS]

CASES is a key of `CASES`. Writes figures, not verdicts: test_sharding.py checks them.
In float64 (see `toy.use_float64`) a sum's order does not matter, and a mistake does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time

import virtual_devices

PROCESSES = int(sys.argv[4]) if len(sys.argv) > 4 else 1
QUICK = virtual_devices.QUICK
os.environ.update(virtual_devices.environment(8 // PROCESSES, QUICK))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import toy  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from coa_jax.learner import batch as batching  # noqa: E402
from coa_jax.learner import log_probs  # noqa: E402
from coa_jax.learner.optim import OptimConfig, make_optimizer  # noqa: E402
from coa_jax.learner.state import Learner, init_state  # noqa: E402
from coa_jax.model import lora, moving, transformer  # noqa: E402
from coa_jax.model.config import DeltaNet, ModelConfig  # noqa: E402
from coa_jax.model.sharding import ONE_DEVICE, MeshConfig, Partitioner, make_partitioner  # noqa: E402

FLOAT64 = toy.use_float64()
MODEL = ModelConfig(
  vocab_size=384,
  width=32,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  ff=64,
  attention_bias=True,
  tie_embeddings=False,
  **FLOAT64,
)
ROWS, LENGTH = 8, 64
MESHES = {
  "one": None,
  "fsdp8": MeshConfig(),
  "fsdp8_gathered_twice": MeshConfig(),
  "data8": MeshConfig(data=8, fsdp=1),
  "tensor2_fsdp4": MeshConfig(tensor=2, fsdp=4),
  "context2_fsdp2_tensor2": MeshConfig(context=2, fsdp=2, tensor=2),
  "context4_data2": MeshConfig(context=4, data=2, fsdp=1),
  "whole_kv_heads": MeshConfig(tensor=4, context=2, rules={"K": ()}),
}
SCAN = {"scan": True, "remat": "attention", "logit_chunk": 16}
HYBRID = {
  "layer_kinds": ("delta", "attention"),
  "delta": DeltaNet(2, 4, 8, 8),
  "attention_gate": True,
  "norm_offset": True,
  "rotary_dim": 4,
}
ADAPTERS = lora.LoraConfig(rank=4)
_MIXED = "context2_fsdp2_tensor2"
# case: (changed fields, adapters, meshes); every mesh must equal the first.
CASES = {
  "some": {
    "plain": ({}, None, ("one", "fsdp8", _MIXED)),
    "scan": (SCAN, None, ("one", _MIXED)),
  },
  "more": {
    "plain": ({}, None, ("one", "whole_kv_heads", "fsdp8_gathered_twice")),
    "lora": (SCAN, ADAPTERS, ("one", "tensor2_fsdp4")),
    "hybrid": (SCAN | HYBRID, None, ("one", "tensor2_fsdp4")),
  },
  "soak": {"plain": ({}, None, ("one", "data8", "context4_data2"))},
  "two processes": {"plain": ({}, None, ("one", _MIXED))},
}


def batches() -> list[batching.Batch]:
  """Two micro-batches of packed rows with loss masks."""
  rng = np.random.default_rng(0)
  out = []
  for _ in range(2):
    batch = batching.empty(ROWS, LENGTH)
    batch.tokens_BT[:] = rng.integers(0, MODEL.vocab_size, (ROWS, LENGTH))
    for row in range(ROWS):
      at = 0
      for number, n in enumerate((*rng.integers(5, 30, 2), 100), 1):
        end = min(at + int(n), LENGTH - row)  # padding at the end
        batch.segment_BT[row, at:end] = number
        batch.position_BT[row, at:end] = np.arange(end - at)
        at = end
    batch.loss_mask_BT[:] = (batch.segment_BT > 0) & (rng.random((ROWS, LENGTH)) < 0.7)
    out.append(batch)
  return out


class Together:
  """A jitted function that runs only after all processes have compiled it.

  Otherwise one process waits in its first collective while another compiles, and CPU
  collectives wait for at most 30 s.
  """

  def __init__(self, jitted):
    self.jitted = jitted
    self.compiled = False

  def __call__(self, *arguments):
    if not self.compiled:
      self.jitted.lower(*arguments).compile()
      wait_for_all()
      self.compiled = True
    return self.jitted(*arguments)


def gather_without_reduce_scatter() -> None:
  """Replaces the backward pass of `jax.lax.all_gather` with a `psum` and a slice.

  Between CPU processes JAX's own backward pass, `psum_scatter`, is sometimes wrong
  (github.com/jax-ml/jax/issues/40830): of 620 runs with the two updates below, two
  had a wrong second gradient.
  """
  gather = jax.lax.all_gather

  def all_gather(x: jax.Array, axes, axis: int, tiled: bool) -> jax.Array:
    @jax.custom_vjp
    def gathered(x: jax.Array) -> jax.Array:
      return gather(x, axes, axis=axis, tiled=tiled)

    def backward(_, d: jax.Array) -> tuple[jax.Array]:
      n = x.shape[axis]
      first = n * jax.lax.axis_index(axes)
      return (jax.lax.dynamic_slice_in_dim(jax.lax.psum(d, axes), first, n, axis),)

    gathered.defvjp(lambda x: (gathered(x), None), backward)
    return gathered(x)

  jax.lax.all_gather = all_gather


def wait_for_all() -> None:
  """Returns once every process has called this; each creates a file beside OUT."""
  for process in range(PROCESSES):
    here = pathlib.Path(f"{sys.argv[1]}.{process}")
    if process == jax.process_index():
      here.touch(exist_ok=False)
    while not here.exists():
      time.sleep(0.05)


def whole(tree):
  """Fetches every array to this host."""

  def fetch(x: jax.Array) -> np.ndarray:
    if not x.is_fully_addressable:
      x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)

  return jax.tree.map(fetch, tree)


def trained(
  partitioner: Partitioner, adapters: lora.LoraConfig | None, changes
) -> dict:
  """Runs two updates; returns losses, gradient norms, parameters and shard shapes."""
  cfg = dataclasses.replace(MODEL, **changes)
  params, frozen = lora.split(
    cfg, transformer.init_params(cfg, 0, partitioner), adapters, 1, partitioner
  )

  def loss(trained, frozen, batch):
    p = lora.assemble(trained, frozen, adapters)
    logp_BT, *_ = log_probs.token_logps(cfg, p, batch, partitioner=partitioner)
    return log_probs.nll(logp_BT, batch.loss_mask_BT), {}

  optimizer = make_optimizer(OptimConfig(lr=0.01), 4)
  # Keeping the moments on the host between steps must change nothing either.
  offload = partitioner is not ONE_DEVICE and cfg.scan
  learner = Learner(loss, optimizer, partitioner, offload)
  if PROCESSES > 1 and partitioner is not ONE_DEVICE:
    learner.jitted = Together(learner.jitted)
  state = init_state(params, optimizer, partitioner, offload)
  micro = batches()
  tokens = sum(float(b.loss_mask_BT.sum()) for b in micro)
  own_B = partitioner.rows(ROWS)  # each process steps with its own rows only
  micro = [jax.tree.map(lambda x: x[own_B], batch) for batch in micro]
  values = []
  for _ in range(2):
    state, metrics = learner.step(state, micro, tokens, frozen)
    values.append([float(metrics["loss"]), float(metrics["grad_norm"])])
  sharded = sum(x.sharding.num_devices > 1 for x in jax.tree.leaves(state.opt_state))
  return {
    "values": values,
    "params": transformer.unstack(whole(state.params), cfg.layers),
    "parts": {
      "/".join(k.key for k in path): list(x.addressable_shards[0].data.shape)
      for path, x in jax.tree_util.tree_leaves_with_path(state.params)
    },
    "opt_state_arrays_on_several_devices": sharded,
  }


def difference(a, b) -> float:
  """The largest difference between trees, relative to each array's largest entry."""
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def main() -> None:
  """Writes {case: figures}."""
  if PROCESSES > 1:
    jax.distributed.initialize(sys.argv[3], PROCESSES, int(sys.argv[5]))
    gather_without_reduce_scatter()
  assert jax.device_count() == 8
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  out = {}
  for case, (changes, adapters, meshes) in CASES[sys.argv[2]].items():
    expected = None
    for mesh in meshes:
      partitioner = make_partitioner(MESHES[mesh]) if MESHES[mesh] else ONE_DEVICE
      if mesh == "fsdp8_gathered_twice":  # as over 64 TPU chips
        moving._GATHERED_OVER["cpu"] = (4, 2)
        split = partitioner.sharding("D")
        assert len(moving._stages(split, partitioner.sharding("."))) == 2
      result = trained(partitioner, adapters, changes)
      expected = expected or result
      out[f"{case}/{mesh}"] = {
        "values": result["values"],
        "expected": expected["values"],
        "difference": difference(result["params"], expected["params"]),
        "parts": result["parts"],
        "opt_state": result["opt_state_arrays_on_several_devices"],
      }
      print(case, mesh, out[f"{case}/{mesh}"]["difference"], flush=True)
  if jax.process_index() == 0:
    with open(sys.argv[1], "w") as f:
      json.dump(out, f)


if __name__ == "__main__":
  main()

"""This project's device programs at full size, lowered for TPU slices not at hand.

A case names a slice, a model and a program; `lower` builds the program as the journeys
build it and gives every argument its shape and sharding, but no array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, TrainState
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import MeshConfig, Partitioner, make_partitioner
from coa_jax.model.transformer import param_shapes
from coa_jax.model.variants import variant
from coa_jax.rollout import sampler


@dataclasses.dataclass(frozen=True)
class Case:
  """A program, a model and a slice.

  Attributes:
    topology: generation:chips, e.g. v5p:4x4x8.
    model: a name in `variants.VARIANTS`.
    program: train, prefill or decode.
    mesh: fields of MeshConfig.
    rows: B: of a micro-batch, of a prefill, or slots of the cache that decodes.
    length: T of a training row, S of the cache.
    count: micro-batches of a step, tokens given to a row, or steps of a window.
    slots: of the cache, in a prefill.
  """

  topology: str
  model: str
  program: str
  mesh: Mapping[str, Any]
  rows: int
  length: int
  count: int
  slots: int = 0

  @property
  def name(self) -> str:
    """E.g. qwen3-8b/v6e:4x4/train; the mesh where a slice has several."""
    rules = {k: "+".join(v) for k, v in self.mesh.get("rules", {}).items()}
    fields = {**self.mesh, **rules}
    fields.pop("rules", None)
    mesh = ",".join(f"{k}={v}" for k, v in fields.items()) or "fsdp"
    return f"{self.model}/{self.topology}/{self.program}/{mesh}"

  @property
  def chips(self) -> int:
    """Number of chips."""
    return math.prod(map(int, self.topology.partition(":")[2].split("x")))

  def turns(self) -> int:
    """Trips of the one loop whose trips the program is told: a step's micro-batches.

    A window is counted as one token, so that figures are per decoding step.
    """
    return self.count if self.program == "train" else 1


def _cases() -> Iterator[Case]:
  # Over the whole of a cube of 64 or more, gathers are compiled to sums of twice the
  # bytes (libtpu 0.0.42): there parameters are split over a part of the mesh.
  part = {"rules": {"D": ("fsdp",)}}
  # Slice, model, tokens of a row, meshes to train on, tensor ways and slots to decode.
  sizes: tuple[tuple[str, str, int, list[dict[str, Any]], int, int], ...] = (
    ("v5e:2x2", "qwen2.5-0.5b", 4_096, [{}], 1, 64),
    ("v5e:2x4", "qwen2.5-1.5b", 8_192, [{}], 2, 64),
    ("v5e:4x4", "qwen3-1.7b", 8_192, [{}], 2, 64),
    ("v6e:4x4", "qwen3-8b", 8_192, [{}], 4, 64),
    ("v5p:2x2x4", "qwen2.5-7b", 32_768, [{}], 4, 64),
    ("v5p:2x4x4", "qwen3-14b", 32_768, [{}, {"context": 2}], 8, 64),
    (
      "v5p:4x4x4",
      "qwen2.5-32b",
      32_768,
      [{"context": 4}, {"context": 4, **part}],
      8,
      64,
    ),
    ("v5p:4x4x8", "qwen3-32b", 32_768, [{"context": 4, **part}, {"tensor": 4}], 8, 128),
  )
  for topology, model, length, meshes, tensor, slots in sizes:
    for mesh in meshes:
      case = Case(topology, model, "train", mesh, 0, length, 4)
      rows = case.chips // (mesh.get("context", 1) * mesh.get("tensor", 1))
      yield dataclasses.replace(case, rows=rows)
    case = Case(topology, model, "decode", {"tensor": tensor}, slots, length, 16)
    rows = case.chips // tensor
    tokens = length // 4
    yield dataclasses.replace(
      case, program="prefill", rows=rows, count=tokens, slots=slots
    )
    yield case


CASES = {case.name: case for case in _cases()}
SMALLEST = "qwen2.5-0.5b/v5e:2x2/decode/tensor=1"


def architecture(case: Case) -> ModelConfig:
  """The model as a run on TPUs configures it."""
  shared = {"dtype": "bfloat16", "attention": "splash"}
  if case.program == "train":
    return variant(case.model, scan=True, remat="full", logit_chunk=1024, **shared)
  return variant(case.model, param_dtype="bfloat16", **shared)


def partitioner_of(case: Case) -> Partitioner:
  """The mesh of a case over devices that are not there."""
  devices = topologies.get_topology_desc(case.topology, platform="tpu").devices
  partitioner = make_partitioner(MeshConfig(**case.mesh), devices)
  return partitioner if case.program == "train" else partitioner.decoding()


def _placed(tree: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
  )


def _arrays(
  partitioner: Partitioner, letters: str, shape: tuple[int, ...], dtype: Any
) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.sharding(letters))


def lower(case: Case) -> Any:
  """The case's program, lowered for its slice with every argument's sharding."""
  partitioner, cfg = partitioner_of(case), architecture(case)
  lowering = {"train": _lower_train, "prefill": _lower_prefill}
  return lowering.get(case.program, _lower_decode)(case, cfg, partitioner)


def _lower_train(case: Case, cfg: ModelConfig, partitioner: Partitioner) -> Any:
  partitioner.check({**cfg.axes, "B": case.rows, "T": case.length})

  def loss(params: Any, frozen: Any, batch: batching.Batch) -> Any:
    logp_BT, *_ = log_probs.token_logps(cfg, params, batch, partitioner=partitioner)
    return log_probs.nll(logp_BT, batch.loss_mask_BT), {}

  optimizer = make_optimizer(OptimConfig(lr=1e-5, warmup=10, weight_decay=0.1), 100)

  def fresh(params: Any) -> TrainState:
    return TrainState(jnp.int32(0), params, optimizer.init(params))

  state = jax.eval_shape(fresh, param_shapes(cfg))
  batch_MBT = jax.tree.map(
    lambda x: _arrays(
      partitioner, ".BT", (case.count, case.rows, case.length), x.dtype
    ),
    batching.empty(1, 1),
  )
  return Learner(loss, optimizer, partitioner).jitted.lower(
    _placed(state, partitioner.tree(state)),
    None,
    batch_MBT,
    _arrays(partitioner, "", (), jnp.int32),
    _arrays(partitioner, "", (), jnp.float32),
  )


def _served(
  case: Case, cfg: ModelConfig, partitioner: Partitioner, slots: int
) -> tuple[Any, Any]:
  """Weights and cache as the sampler holds them."""
  partitioner.check({**cfg.axes, "B": math.gcd(slots, case.rows)})
  params = param_shapes(cfg)
  empty = jax.eval_shape(lambda: KVCache.empty(cfg, slots, case.length, partitioner))
  cache = jax.tree.map(lambda x: _arrays(partitioner, "BK...", x.shape, x.dtype), empty)
  return _placed(params, partitioner.tree(params)), cache


def _lower_prefill(case: Case, cfg: ModelConfig, partitioner: Partitioner) -> Any:
  params, cache = _served(case, cfg, partitioner, case.slots)
  row_R = _arrays(partitioner, ".", (case.rows,), "int32")
  token_RT = _arrays(partitioner, "..", (case.rows, case.count), "int32")
  return sampler.extend.lower(
    cfg, params, cache, row_R, token_RT, row_R, row_R, partitioner=partitioner
  )


def _lower_decode(case: Case, cfg: ModelConfig, partitioner: Partitioner) -> Any:
  params, cache = _served(case, cfg, partitioner, case.rows)
  dtypes = {
    "seed_B": "uint32",
    "sequence_B": "uint32",
    "temperature_B": "float32",
    "active_B": "bool",
  }
  slots = {
    field.name: _arrays(partitioner, ".", (case.rows,), dtypes.get(field.name, "int32"))
    for field in dataclasses.fields(sampler.SamplerState)
  }
  # An automaton of 32 states and 16 classes of tokens, as the protocol's is about.
  states = _arrays(partitioner, "..", (32, 16), "int32")
  tables = sampler.Tables(
    _arrays(partitioner, ".", (cfg.vocab_size,), "int32"), states, states
  )
  return sampler.window.lower(
    cfg,
    params,
    cache,
    sampler.SamplerState(**slots),
    tables,
    _arrays(partitioner, "..", (case.rows, case.count), "int32"),
    partitioner=partitioner,
  )

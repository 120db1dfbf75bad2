"""Builds an RL run's device programs from its config, for absent devices.

`make_run` builds a plan's learner (`coa_jax.plan.rl`) over devices known only to the
compiler; the plan refuses the same runs as `rl.run`. `programs` lists the run's
programs. Lowering a program gives every argument a shape and sharding, but no array.

budget: one run, and each of its programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from coa_jax.cli.deploy.manifests import PLAIN_RINGS
from coa_jax.cli.deploy.slices import Slice
from coa_jax.learner import batch as batching
from coa_jax.learner.state import TrainState, state_shardings
from coa_jax.learner.update import PolicyUpdate
from coa_jax.model import cache, decode_params
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask
from coa_jax.model.flops import delta_flops, products
from coa_jax.model.hf.io import load_config
from coa_jax.model.kernels import ragged, triton
from coa_jax.model.moving import gatherer
from coa_jax.model.sharding import Partitioner
from coa_jax.model.transformer import param_shapes
from coa_jax.model.variants import variant
from coa_jax.plan.rl import RLConfig, plan_rl
from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.rollout import sampler
from coa_jax.rollout.programs import DeviceCall, device_calls

# (States, token classes) for an automaton and a grammar about as large as the
# protocol's: no tokenizer is read.
_STOPS = (32, 16)
_GRAMMAR = (256, 1024)


@dataclasses.dataclass(frozen=True)
class Run:
  """An RL run on a TPU slice, or on GPUs.

  Attributes:
    cfg, decoder: the architecture in learning and in decoding.
    learner, rollouts: the learner's mesh, and the mesh of all decoding replicas.
    replica: the mesh of the first host's first replica.
    pages: cache pages per replica, by the free memory.
    state, frozen: the train state and frozen parameters, as shapes with shardings.
  """

  settings: RLConfig
  cfg: ModelConfig
  decoder: ModelConfig
  learner: Partitioner
  rollouts: Partitioner
  replica: Partitioner
  pages: int
  update: PolicyUpdate
  state: TrainState
  frozen: Any


@dataclasses.dataclass(frozen=True)
class Program:
  """One program of a run; figures are per chip, and per token for a window.

  Attributes:
    name: learn, score, convert, gather, gather a layer, or a `DeviceCall` in words.
    devices: number of devices.
    turns: trip counts that only the run knows, outermost loop first.
    units: the figures' divisor: a window's tokens, else 1.
    flops: the model's arithmetic.
    needed: bytes that the program must read or write.
    beside: bytes of the run's other arrays meanwhile.
    large: minimum bytes for a large copy, half a pool array; 0 without a cache.
    pool_read: bytes that a kernel reads from a layer's pool array per call.
    decides: whether the program is the largest of its kind.
  """

  name: str
  lower: Callable[[], Any]
  devices: int
  turns: tuple[int, ...]
  units: int
  flops: float
  needed: float
  beside: float
  large: float = 0
  pool_read: float = 0
  decides: bool = True


def prepare() -> None:
  """Lets libtpu describe slices only: it asks no cloud and claims no TPU."""
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }
  jax.config.update("jax_platforms", "cpu")


def devices_of(tpus: Slice, slices: int = 1) -> list[jax.Device]:
  """Returns the compiler's devices for equal slices."""
  os.environ.setdefault("LIBTPU_INIT_ARGS", PLAIN_RINGS)  # read with the first devices
  options: dict[str, Any] = {}
  if tpus.hosts == 1:  # by default the compiler has hosts of 2 x 2 chips
    sides = [int(side) for side in tpus.topology.split("x")]
    options["chips_per_host_bounds"] = (*sides, 1, 1)[:3]
  if slices > 1:
    options["num_slices"] = slices
  name = f"{tpus.generation}:{tpus.topology}"
  return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


def make_run(
  settings: RLConfig,
  devices: list[jax.Device],
  hbm: float,
  model: str = "",
  layers: int = 0,
) -> Run:
  """Builds a run on absent devices, by its plan.

  `hbm` is a device's memory in bytes. `model`, a name in `variants.VARIANTS`, replaces
  the folder `init`; `layers` is the number of layers, 0 for all.
  """
  # --- The model, and the plan.
  cfg = None
  if model:
    cfg = variant(model, **dataclasses.asdict(settings.model))
  if layers:
    cfg = cfg or load_config(settings.init, settings.model)
    cfg = dataclasses.replace(cfg, layers=layers)
  plan = plan_rl(settings, cfg, devices)

  # --- The train state and frozen parameters, as shapes.
  grammar = _grammar(plan.cfg) if settings.rollout.constrain else None
  update = plan.make_update(grammar)
  params = _placed(param_shapes(plan.cfg), plan.learner)
  state, frozen = jax.eval_shape(functools.partial(update.init, seed=0), params)
  where = state_shardings(state, plan.learner, settings.optim.offload)
  state = _with_sharding(state, where)
  frozen = _placed(frozen, plan.learner)
  return Run(
    settings=settings,
    cfg=plan.cfg,
    decoder=plan.decoder,
    learner=plan.learner,
    rollouts=plan.rollouts,
    replica=plan.rollouts.replicas()[0],
    pages=plan.cache_budget((state, frozen), int(hbm)).pages,
    update=update,
    state=state,
    frozen=frozen,
  )


def programs(run: Run, live: int) -> list[Program]:
  """Lists a run's programs; a slot holds `live` tokens on average."""
  # --- Resident arrays beside a program. Caches and decode parameters are freed before
  # learning; with staleness both stay, and the previous decode parameters, too.
  view = device_bytes(decoding_params(run))
  calls = device_calls(run.settings.rollout, run.replica.platform, [run.pages])
  kept = device_bytes(run.state) + device_bytes(run.frozen)
  if run.settings.lora:
    kept += device_bytes(_policy(run))  # merged for decoding
  older = 0.0
  rolling = 0.0
  if run.settings.algo.sampling.staleness:
    older = view
    rolling = 2 * view + device_bytes(_cache(run))

  # --- Separate rollout devices hold no learner arrays, and the learner none of theirs.
  beside_learning = 0.0 if run.settings.mesh.rollout else rolling
  beside_decoding = older if run.settings.mesh.rollout else older + kept

  # --- Learning, and the decode parameters.
  out = [_learning(run, name, beside_learning) for name in run.update.jitted]
  out += _handing_over(run, kept + beside_learning)

  # --- Decoding, per replica.
  deciding = _deciding(calls)
  for call in calls:
    flops, needed = _decoding_needs(run, call, live)
    windows = call.tokens if call.function == "window" else 1
    one_layer = device_bytes(_pools(run)[0])
    pages, page_turns = _pages_read(run, call, live)
    out.append(
      Program(
        name=str(call),
        lower=functools.partial(_lower_call, run, call),
        devices=run.replica.mesh.size,
        turns=(windows * page_turns,),
        units=windows,
        flops=flops,
        needed=needed,
        beside=beside_decoding,
        large=one_layer / 2,
        pool_read=pages * one_layer / run.pages,
        decides=call in deciding,
      )
    )
  return out


def device_bytes(tree: Any) -> float:
  """Array bytes per device, by shapes and shardings, without offloaded arrays."""
  total = 0
  for x in jax.tree.leaves(tree):
    if x.sharding.memory_kind == "pinned_host":
      continue
    total += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
  return total


def _pages_read(run: Run, call: DeviceCall, live: int) -> tuple[float, int]:
  """Pages per layer that a call reads, and its loop's trips (1 with a kernel)."""
  page_size = cache.page_size(run.settings.rollout.max_len)
  if run.replica.platform == "tpu":
    page_bytes = device_bytes(_pools(run)[0]) // run.pages
    tokens = call.tokens if call.function == "prefill" else 1  # at once
    pages = ragged.pages_read(
      call.rows, tokens, live, page_size, call.blocks, int(page_bytes)
    )
    return pages, 1
  in_a_loop = not triton.takes_pages(*_pools(run))  # no kernel reads them
  return call.rows * live / page_size, math.ceil(live / page_size) if in_a_loop else 1


def _deciding(calls: list[DeviceCall]) -> list[DeviceCall]:
  """Picks the largest cache's window and longest prefill."""
  prefills = [call for call in calls if call.function == "prefill"]
  windows = [call for call in calls if call.function == "window"]
  return [prefills[-1], windows[-1]]


def _learning(run: Run, name: str, rolling: float) -> Program:
  """The learner's step, or the scoring before the step that some losses need."""
  batch = run.settings.algo.batch
  state = device_bytes(run.state)
  tokens = batch.rows * batch.length / run.learner.mesh.size
  # A row is one segment; on average a token reads half the row.
  forward = tokens * _token_flops(run.cfg, batch.length / 2)
  # 2 bytes per weight; only `tensor` splits them.
  weights = 2 * sum(products(run.cfg)) / run.learner.mesh.shape["tensor"]
  shared = dict(
    name=name,
    lower=functools.partial(_lower_learning, run, name),
    devices=run.learner.mesh.size,
    units=1,
  )
  if name == "score":
    moments = device_bytes(run.state.opt_state)
    return Program(
      **shared, turns=(1,), flops=forward, needed=weights, beside=moments + rolling
    )
  times = run.update.micro_batches
  return Program(
    **shared,
    turns=(times,),
    flops=3 * times * forward,
    needed=3 * times * weights + 2 * state,  # the state is read and written
    beside=rolling,
  )


def _handing_over(run: Run, beside: float) -> list[Program]:
  """Lists `decode_params.decoding_views`' programs: round, then gather by layers.

  `beside`: the learner's bytes meanwhile, policy parameters included. One device has
  nothing to gather.
  """
  params = _policy(run)
  gathered = decode_params.decoding_shapes(run.decoder, run.rollouts)
  narrow = bool(run.decoder.product_dtype)
  converted = _with_sharding(gathered, run.learner.tree(gathered, narrow))
  shared = dict(devices=run.learner.mesh.size, turns=(1,), units=1, flops=0)

  # --- Round parameters and unstack layers; all arrays stay on their devices.
  convert = decode_params.converter(run.decoder, run.learner.platform)
  out = [
    Program(
      name="convert",
      lower=functools.partial(convert.lower, params),
      needed=device_bytes(params) + device_bytes(converted),
      beside=beside - device_bytes(params),
      **shared,
    )
  ]
  if run.learner.mesh.size == 1:
    return out
  # --- Gather. For separate rollout devices: one layer at a time, until these devices
  # have the layer.
  if run.settings.mesh.rollout:
    layer = converted["layer_0"]
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
    gather = gatherer(run.learner.mesh)
    out.append(
      Program(
        name="gather a layer, whole",
        lower=functools.partial(gather.lower, layer),
        needed=device_bytes(layer) + whole,
        beside=beside + device_bytes(converted) - device_bytes(layer),
        **shared,
      )
    )
    return out

  # --- Otherwise: first parameters outside layers, whose shards stay, then each layer.
  def rest(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in tree.items() if not decode_params.is_layer(k)}

  parts = device_bytes(rest(converted))
  steps = [
    ("gather", "", rest(converted), rest(gathered), device_bytes(converted) - parts)
  ]
  for kind in dict.fromkeys(run.decoder.kinds):
    # As if last: all other layers are already whole.
    number = run.decoder.kinds.index(kind)
    before, after = converted[f"layer_{number}"], gathered[f"layer_{number}"]
    beside_layer = device_bytes(gathered) - device_bytes(after) + parts
    name = "gather a layer"
    if len(run.decoder.layer_kinds) > 1:
      name += f" ({kind})"
    steps.append((name, kind, before, after, beside_layer))
  for name, kind, given, made, more in steps:
    reshard = decode_params.resharder(run.decoder, run.rollouts, kind)
    out.append(
      Program(
        name=name,
        lower=functools.partial(reshard.lower, given),
        needed=device_bytes(given) + device_bytes(made),
        beside=beside + more,
        **shared,
      )
    )
  return out


def _decoding_needs(run: Run, call: DeviceCall, live: int) -> tuple[float, float]:
  """A call's `flops` and `needed` per chip; see `Program`."""
  cfg = run.decoder
  chips = run.replica.mesh.size
  # Cache bytes per token, all layers; every chip has heads that the mesh cannot split.
  position = cache.row_bytes(cfg, 1) / run.replica.ways("K")
  layers, head = products(cfg)
  if call.function == "window":
    flops = call.rows * _token_flops(cfg, live)
    weights = 2 * (layers + head) / chips
    return flops / chips, weights + call.rows * live * position
  tokens = call.rows * call.tokens
  flops = tokens * (_token_flops(cfg, live) - 2 * head)
  written = tokens * position
  return flops / chips, 2 * layers / chips + call.rows * live * position + written


def _token_flops(cfg: ModelConfig, read: float) -> float:
  """FLOPs for a token's forward pass that reads `read` keys."""
  layers = cfg.kinds.count("attention")
  out = 2 * sum(products(cfg)) + 4 * layers * cfg.heads * cfg.head_dim * read
  if cfg.delta:
    out += cfg.kinds.count("delta") * delta_flops(cfg.delta)
  return out


def _policy(run: Run) -> Any:
  """The learner's policy parameters, as shapes with shardings."""
  return _placed(param_shapes(run.cfg), run.learner)


def decoding_params(run: Run) -> Any:
  """One replica's decode parameters, as shapes with shardings."""
  shapes = decode_params.decoding_shapes(run.decoder, run.rollouts)
  narrow = bool(run.decoder.product_dtype)
  return _with_sharding(shapes, run.replica.tree(shapes, narrow))


def _cache(run: Run) -> KVCache:
  rollout = run.settings.rollout
  page_size = cache.page_size(rollout.max_len)
  shapes = jax.eval_shape(
    lambda: KVCache.empty(run.decoder, run.pages, page_size, run.replica, rollout.slots)
  )

  def placed(layers: cache.Layers, axes: Sequence[str]) -> cache.Layers:
    letters = tuple(tuple(axes[: len(layer)]) for layer in layers)
    return _with_sharding(layers, jax.tree.map(run.replica.sharding, letters))

  pools = [cache.letters(shapes.layout)] * 2
  return shapes.replace(
    layers=placed(shapes.layers, pools), states=placed(shapes.states, cache.STATES)
  )


def _pools(run: Run) -> tuple[jax.ShapeDtypeStruct, ...]:
  """One attention layer's cache arrays."""
  return next(layer for layer in _cache(run).layers if layer)


def _lower_learning(run: Run, name: str) -> Any:
  batch = run.settings.algo.batch
  jitted = run.update.jitted
  shape = (batch.rows, batch.length)
  one = batching.empty(1, 1)
  rows = jax.tree.map(lambda x: _array(run.learner, "BT", shape, x.dtype), one)
  scored: list[str] = []
  if "score" in jitted:
    scores = jitted["score"].lower(run.state.params, run.frozen, rows)
    if name == "score":
      return scores
    scored = list(scores.out_info)

  # --- In each micro-batch the step reads the scores and the columns made from them.
  if run.settings.algo.loss.has_critic:
    scored.append("return_BT")
  for column in ("loss_weight_BT", *scored):
    one = one.replace(**{column: one.logp_BT})
  shape = (run.update.micro_batches, *shape)
  return jitted[name].lower(
    run.state,
    run.frozen,
    jax.tree.map(lambda x: _array(run.learner, ".BT", shape, x.dtype), one),
    _array(run.learner, "", (), "int32"),
    _array(run.learner, "", (), "float32"),
  )


def _lower_call(run: Run, call: DeviceCall) -> Any:
  held = _cache(run)
  table_BC = _array(run.replica, "..", (call.rows, call.blocks), "int32")
  row_R = _array(run.replica, ".", (call.rows,), "int32")
  token_RT = _array(run.replica, "..", (call.rows, call.tokens), "int32")
  if call.function == "prefill":
    return sampler.prefill.lower(
      run.decoder,
      decoding_params(run),
      held,
      table_BC,
      token_RT,
      row_R,
      row_R,
      partitioner=run.replica,
    )
  return sampler.window.lower(
    run.decoder,
    decoding_params(run),
    held,
    table_BC,
    _slots(run, call.rows),
    _tables(run),
    token_RT,
    partitioner=run.replica,
    truncation=run.settings.rollout.truncation,
  )


def _slots(run: Run, rows: int) -> sampler.SamplerState:
  dtypes = {
    "seed_B": "uint32",
    "sequence_B": "uint32",
    "temperature_B": "float32",
    "active_B": "bool",
  }
  fields = {}
  for field in dataclasses.fields(sampler.SamplerState):
    dtype = dtypes.get(field.name, "int32")
    fields[field.name] = _array(run.replica, ".", (rows,), dtype)
  return sampler.SamplerState(**fields)


def _tables(run: Run) -> sampler.Tables:
  constraint = None
  if run.settings.rollout.constrain:
    grammar = TokenMask.of(_grammar(run.decoder))
    whole = jax.tree.map(lambda _: run.replica.sharding(""), grammar)
    constraint = _with_sharding(grammar, whole)
  class_V = _array(run.replica, ".", (run.decoder.vocab_size,), "int32")
  states = _array(run.replica, "..", _STOPS, "int32")
  return sampler.Tables(class_V, states, states, constraint)


def _grammar(cfg: ModelConfig) -> Constraint:
  """A grammar that allows everything."""
  class_V = np.zeros(cfg.vocab_size, np.int32)
  state_S = np.zeros(_GRAMMAR[0], np.int32)
  return Constraint(class_V, np.zeros(_GRAMMAR, np.int32), state_S, state_S > 0)


def _placed(tree: Any, partitioner: Partitioner) -> Any:
  return _with_sharding(tree, partitioner.tree(tree))


def _with_sharding(tree: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
  )


def _array(
  partitioner: Partitioner, letters: str, shape: tuple[int, ...], dtype: Any
) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.sharding(letters))

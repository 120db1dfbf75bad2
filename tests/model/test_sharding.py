"""Laws of the mesh: sharded = one device, two processes = one; errors name misfits."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toy
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from started import free_address, outputs

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import init_state
from coa_jax.model import lora, moving, sharding, transformer
from coa_jax.model.sharding import (
  AXES,
  MeshConfig,
  Partitioner,
  make_partitioner,
  make_partitioners,
)
from coa_jax.model.variants import variant

ADAPTERS = lora.LoraConfig(rank=3)
SCRIPT = pathlib.Path(__file__).with_name("on_a_mesh.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
  """The figures of `on_a_mesh.py` on 8 virtual devices, in one process and in two.

  The runs are sequential: two processes wait only seconds for each other's collectives,
  and a third busy process can delay one of them too long.
  """
  folder, address = tmp_path_factory.mktemp("mesh"), free_address()
  outs = folder / "one.json", folder / "two.json"
  outputs([SCRIPT, outs[0], "some"])
  outputs(*([SCRIPT, outs[1], "two processes", address, "2", str(i)] for i in range(2)))
  return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def figures(both) -> dict:
  """The figures of one process."""
  return both[0]


def measured(tmp_path_factory, cases: str) -> dict:
  """The figures of other cases, in one process."""
  out = tmp_path_factory.mktemp("mesh") / "out.json"
  outputs([SCRIPT, out, cases])
  return json.loads(out.read_text())


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> dict:
  return measured(tmp_path_factory, "more")


@pytest.fixture(scope="module")
def soaked(tmp_path_factory) -> dict:
  return measured(tmp_path_factory, "soak")


def assert_equal(case: dict) -> None:
  """Compares losses and gradient norms of two updates, and the final parameters."""
  np.testing.assert_allclose(case["values"], case["expected"], rtol=1e-12)
  # Adam divides a gradient by its own size, which magnifies rounding in small ones.
  assert case["difference"] < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp8", "context2_fsdp2_tensor2"])
def test_sharded_is_one_device(figures: dict, mesh: str):
  assert_equal(figures[f"plain/{mesh}"])


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["whole_kv_heads", "fsdp8_gathered_twice"])
def test_sharded_otherwise_is_one_device(more: dict, mesh: str):
  assert_equal(more[f"plain/{mesh}"])
  if mesh == "whole_kv_heads":
    assert more[f"plain/{mesh}"]["parts"]["layer_0/k"][1] == 2
    assert more[f"plain/{mesh}"]["parts"]["layer_0/q"][1] == 1


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["data8", "context4_data2"])
def test_a_soak_of_meshes_is_one_device(soaked: dict, mesh: str):
  assert_equal(soaked[f"plain/{mesh}"])


@pytest.mark.slow
def test_sharded_is_one_device_scanned_chunked_and_recomputed(figures: dict):
  assert_equal(figures["scan/context2_fsdp2_tensor2"])


@pytest.mark.slow
def test_a_sharded_hybrid_is_that_of_one_device(more: dict):
  assert_equal(more["hybrid/tensor2_fsdp4"])


@pytest.mark.slow
def test_sharded_adapters_are_those_of_one_device(more: dict):
  assert_equal(more["lora/tensor2_fsdp4"])


@pytest.mark.slow
def test_parameters_and_optimizer_state_are_split(figures: dict):
  """Shapes: layer_0/q [32, 4, 8], down [64, 32], the embedding [384, 32]."""
  fsdp = figures["plain/fsdp8"]
  assert fsdp["parts"]["layer_0/q"] == [4, 4, 8]
  assert fsdp["parts"]["layer_0/down"] == [64, 4]
  assert fsdp["parts"]["embed"] == [384, 4]
  mixed = figures["plain/context2_fsdp2_tensor2"]
  assert mixed["parts"]["layer_0/q"] == [8, 2, 8]
  assert mixed["parts"]["layer_0/o"] == [2, 8, 8]
  assert mixed["parts"]["embed"] == [192, 8]
  stacked = figures["scan/context2_fsdp2_tensor2"]
  assert stacked["parts"]["layers/q"] == [2, 8, 2, 8]
  # Both moments of every parameter, and the counters, are on all devices.
  assert fsdp["opt_state"] >= 2 * len(fsdp["parts"])
  assert figures["plain/one"]["opt_state"] == 0


@pytest.mark.slow
def test_two_processes_are_one(both):
  figures, two = both
  case = two["plain/context2_fsdp2_tensor2"]
  assert_equal(case)
  expected = figures["plain/context2_fsdp2_tensor2"]
  np.testing.assert_allclose(case["values"], expected["values"], rtol=1e-12)
  assert case["parts"] == expected["parts"]


def abstract(**sizes: int) -> Partitioner:
  """A partitioner over an abstract mesh: `check` needs no real devices."""
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  return Partitioner(AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES)))


def test_every_axis_that_does_not_divide_is_named():
  small = variant("qwen2.5-0.5b")  # 14 heads, 2 kv heads
  abstract(tensor=2, fsdp=4).check({**small.axes, "B": 8})
  with pytest.raises(ValueError) as e:
    abstract(tensor=4, fsdp=3).check({**small.axes, "B": 8, "T": 100})
  message = str(e.value)
  for fault in (
    "model.width=896 over fsdp=3 x context=1",
    "model.heads=14 over tensor=4",
    "model.kv_heads=2 over tensor=4",
    "B=8 over data=1 x fsdp=3",
  ):
    assert fault in message
  assert "T=100" not in message and "model.ff" not in message
  # A few key-value heads may stay whole, with these rules.
  abstract(tensor=4).replacing({"K": (), "N": ()}).check(variant("qwen2.5-1.5b").axes)


@pytest.mark.parametrize("row_devices", [1, 2, 3, 4])
def test_a_row_in_zigzag_is_equal_work_for_all_devices(row_devices: int):
  T = 24
  row_BT = np.stack([np.arange(T), np.arange(T)[::-1]])
  dealt_BT = moving.zigzag(row_BT, row_devices)
  # A causal query at place t reads t + 1 places.
  seen = (dealt_BT[0] + 1).reshape(row_devices, -1).sum(axis=1)
  assert set(seen) == {T * (T + 1) // 2 // row_devices}
  np.testing.assert_array_equal(moving.straight(dealt_BT, row_devices), row_BT)


def test_rows_over_several_devices_are_cut_into_two_pieces_for_each():
  mesh = abstract(context=4)
  mesh.check({"T": 16})
  with pytest.raises(ValueError, match="divide T=20 over context=4 in two pieces each"):
    mesh.check({"T": 20})


def test_rows_of_linear_attention_are_not_split():
  hybrid = variant("qwen3.5-0.8b")
  abstract(fsdp=2, tensor=2).check(hybrid.axes)
  with pytest.raises(ValueError, match=r"mesh\.context=2 splits the tokens of a row"):
    abstract(context=2).check(hybrid.axes)


def constraints_of(jaxpr) -> collections.Counter:
  """Counts a traced program's sharding constraints by (shape, dtype, partition)."""
  out = collections.Counter()
  for equation in jaxpr.eqns:
    if equation.primitive.name == "sharding_constraint":
      x = equation.outvars[0].aval
      out[x.shape, str(x.dtype), equation.params["sharding"].spec] += 1
    for inner in jaxprs_in_params(equation.params):
      out += constraints_of(inner)
  return out


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_gathered_in_half_precision_and_gradients_are_not(tied: bool):
  """Includes adapters and the embedding; a gradient is split like its parameter.

  The output matrix is never gathered: it is split by the vocabulary.
  """
  mesh = abstract(fsdp=2, tensor=2)
  cfg = dataclasses.replace(
    toy.MODEL, layers=1, dtype="bfloat16", attention="xla", tie_embeddings=tied
  )
  params = lora.join(
    transformer.param_shapes(cfg), lora.init_adapters(cfg, ADAPTERS, 0), ADAPTERS
  )
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

  def loss(params):
    batch = batching.empty(2, 8)
    return log_probs.token_logps(cfg, params, batch, partitioner=mesh)[0].sum()

  said = constraints_of(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
  split = 0
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    letters = sharding.letters_of(path)
    if sharding.name_of(path) == "head":
      by_vocabulary = PartitionSpec(None, ("fsdp", "context", "tensor"))
      # Before and after it moves, and its gradient.
      assert said[x.shape, "bfloat16", by_vocabulary] >= 3
    elif "D" in letters:
      split += 1
      whole = mesh.spec(letters.replace("D", "."))
      assert said[x.shape, "bfloat16", whole], path
      assert not said[x.shape, "float32", whole], path
      # The parameter before the gather, and its gradient.
      assert said[x.shape, "bfloat16", mesh.spec(letters)] >= 2, path
  assert split == 1 + 7 + 7  # the embedding or head, matrices, adapters


def test_tokens_between_matrices_are_split_over_tensor_and_so_are_their_gradients():
  mesh = abstract(fsdp=2, tensor=2)
  cfg = dataclasses.replace(toy.MODEL, layers=3, dtype="bfloat16", attention="xla")
  params = transformer.param_shapes(cfg)

  def loss(params):
    batch = batching.empty(2, 8)
    return log_probs.token_logps(cfg, params, batch, partitioner=mesh)[0].sum()

  said = constraints_of(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
  hidden = ((2, 8, cfg.width), "bfloat16")
  # Split after the embedding and two products per layer, whole before two others and
  # the head; gradients in the opposite direction.
  moves = 1 + 2 * cfg.layers + 2 * cfg.layers + 1
  assert said[*hidden, mesh.spec("BR.")] == moves
  # One more: the gradient from the logits, which are split by the vocabulary.
  assert said[*hidden, mesh.spec("BT.")] == moves + 1
  by_vocabulary = PartitionSpec("data", None, None)
  assert said[*hidden, by_vocabulary] == 1
  assert mesh.spec("BR.") == PartitionSpec(
    ("data", "fsdp"), ("context", "tensor"), None
  )


@pytest.mark.parametrize(
  ("rules", "fault"),
  [
    ({"D": ("fsdp", "tensor")}, r"D and N over tensor \(parameter 'q'\)"),
    ({"F": ("context", "tensor")}, r"T and F over context \(activations\)"),
    ({"K": ("data",)}, r"B and K over data \(activations\)"),
    ({"R": ("fsdp",)}, r"B and R over fsdp \(activations\)"),
  ],
)
def test_rules_that_split_an_array_twice_over_one_axis_are_refused(rules, fault: str):
  with pytest.raises(ValueError, match=fault):
    abstract(tensor=2).replacing(rules).check(toy.MODEL.axes)


def test_a_decoder_splits_matrices_over_tensor_alone():
  """Independent of training's rules, so each replica holds a whole model."""
  rules = {"T": (), "F": ("context", "tensor"), "V": ("context",)}
  trained = abstract(tensor=2, context=2, fsdp=2).replacing({**rules, "D": ("fsdp",)})
  trained.check(toy.MODEL.axes)
  decoder = trained.decoding()
  letters = set("".join(sharding.PARAMETERS.values())) & set(sharding.RULES)
  assert {x: decoder.axes(x) for x in letters} == {
    **{"D": (), "V": ()},
    **dict.fromkeys("FNKYZ", ("tensor",)),
  }
  assert decoder.axes("B") == ("data", "fsdp", "context")


def test_a_parameter_without_a_place_in_the_table_is_noticed():
  """Every parameter's letters fit its shape, stacked or not, in both families."""
  for scan in (False, True):
    for changes in ({}, {"attention_bias": True, "tie_embeddings": False}):
      cfg = dataclasses.replace(toy.MODEL, scan=scan, **changes)
      leaves = jax.tree_util.tree_leaves_with_path(transformer.param_shapes(cfg))
      for path, x in leaves:
        stacked = int(path[0].key == "layers")
        assert len(sharding.letters_of(path)) == x.ndim - stacked, path


def test_counters_of_an_optimizer_are_replicated_and_moments_split():
  mesh = abstract(fsdp=4, tensor=2)
  cfg = toy.MODEL
  optimizer = make_optimizer(OptimConfig(name="muon"), 10)
  shapes = jax.eval_shape(
    lambda: init_state(transformer.init_params(cfg, 0), optimizer).opt_state
  )
  specs = [
    (path, s.spec)
    for path, s in jax.tree_util.tree_leaves_with_path(
      mesh.tree(shapes), is_leaf=lambda x: hasattr(x, "spec")
    )
  ]
  moments = [spec for path, spec in specs if getattr(path[-1], "key", "") == "q"]
  assert moments and set(moments) == {
    PartitionSpec(("fsdp", "context"), "tensor", None)
  }
  counts = [s for path, s in specs if getattr(path[-1], "name", "") == "count"]
  assert counts and set(counts) == {PartitionSpec()}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tensor": -1}, "tensor is -1; it must be at least 1"),
    ({"devices": -1}, "devices is -1; it must be at least 0"),
    ({"rollout": -1}, "rollout is -1; it must be at least 0"),
    ({"rules": {"X": ()}}, "rules has axis 'X'; there are B, T, R, D"),
    ({"rules": {"D": ("model",)}}, "rules.D has 'model'; there are data, fsdp"),
    ({"rules": {"B": ("fsdp", "fsdp")}}, "rules.B has an axis twice: fsdp, fsdp"),
  ],
)
def test_meshes_that_can_not_be_are_refused(fields, message: str):
  with pytest.raises(ValueError, match=message):
    MeshConfig(**fields)


def test_a_mesh_of_more_devices_than_there_are_says_so():
  with pytest.raises(ValueError, match="tensor=2 needs 2 devices; there are 1"):
    make_partitioner(MeshConfig(tensor=2, fsdp=1), jax.devices()[:1])
  with pytest.raises(ValueError, match=r"mesh.devices=9; there are 8"):
    make_partitioner(MeshConfig(devices=9), jax.devices() * 8)
  assert make_partitioner(MeshConfig(), jax.devices()[:1]).devices == jax.devices()[:1]
  with pytest.raises(ValueError, match=r"rollout.tensor=2 does not divide the 1 dev"):
    make_partitioner(MeshConfig(), jax.devices()[:1], rollout_tensor=2)
  # With one of eight devices, the others are ignored.
  assert make_partitioner(MeshConfig(devices=1), jax.devices() * 8).mesh.size == 1


def test_devices_that_can_not_be_shared_out_are_refused():
  eight = jax.devices() * 8
  with pytest.raises(ValueError, match=r"mesh.rollout=1 gives devices to the rollouts"):
    make_partitioner(MeshConfig(rollout=1), eight)
  with pytest.raises(ValueError, match=r"rollout=8 leaves the learner none of the 8 d"):
    make_partitioners(MeshConfig(rollout=8), eight)
  with pytest.raises(
    ValueError, match=r"rollout=3 must be a multiple of the 2 devices"
  ):
    make_partitioners(MeshConfig(rollout=3), eight, rollout_tensor=2)
  two_hosts = [SimpleNamespace(process_index=i // 4) for i in range(8)]
  with pytest.raises(ValueError, match=r"rollout=2 must be .* on each of 2 processes"):
    make_partitioners(MeshConfig(rollout=2), two_hosts, rollout_tensor=2)
  with pytest.raises(ValueError, match=r"none of the 6 devices, or none of a process"):
    make_partitioners(MeshConfig(rollout=4), two_hosts[:6])
  with pytest.raises(ValueError, match=r"there are 4 beside mesh.rollout=4"):
    make_partitioners(MeshConfig(fsdp=8, rollout=4), eight)

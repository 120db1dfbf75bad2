"""Ahead-of-time compilation for TPUs: what is read from a program, and the kernel."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import attention, flops
from coa_jax.model.transformer import param_shapes
from experiments.bench import compile_check, hlo_text, tpu_programs

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What a compiler writes, in small: a loop of 24 turns with two gathers, an asynchronous
# one in a chain of fusions and an unrolled loop in it; a loop whose turns only the run
# knows; a gradient that is reduced and then sliced. A kernel's text spans lines.
PROGRAM = """HloModule jit_step, is_scheduled=true

%start (p: bf16[1,224]) -> (bf16[1,224], bf16[1,896], u32[]) {
  %p = bf16[1,224]{1,0} parameter(0)
  %ag.1 = bf16[1,896]{1,0:T(8,128)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={1}
  ROOT %c = (bf16[1,224], bf16[1,896], u32[]) custom-call(%ag.1), custom_call_target="S"
}

%done (p: bf16[1,224]) -> bf16[1,896] {
  %p = bf16[1,224]{1,0} parameter(0)
  ROOT %ag.2 = bf16[1,896]{1,0:T(8,128)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={1}
}

%all-reduce-scatter (p: f32[64,8]) -> f32[8,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %ar = f32[64,8]{1,0} all-reduce(%p), channel_id=3, replica_groups=[1,8]<=[8]
  ROOT %ds = f32[8,8]{1,0} dynamic-slice(%ar, %i, %z), dynamic_slice_sizes={8,8}
}

%ring_cond (p: (u32[], bf16[4,8])) -> pred[] {
  %p = (u32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %n = u32[]{:T(128)} constant(8)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%ring_body (p: (u32[], bf16[4,8])) -> (u32[], bf16[4,8]) {
  %p = (u32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %two = u32[]{:T(128)} constant(2)
  %cp = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), channel_id=9, source_target_pairs={{0,1},{1,0}}
  %y = bf16[4,8]{1,0} collective-permute-done(%cp)
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %t = (u32[]{:T(128)}, bf16[4,8]{1,0}) tuple(%next, %y)
}

%layer_cond (p: (s32[], bf16[4,8])) -> pred[] {
  %n = s32[]{:T(128)} constant(24)
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="cond"}
}

%layer (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %w = bf16[8,4,8]{2,1,0} all-gather(%q), channel_id=1, replica_groups={{0,1},{2,3}}
  %v = bf16[8,4,8]{2,1,0} all-gather(%r), channel_id=1, replica_groups={{0,1},{2,3}}
  %kernel = bf16[4,8]{1,0} custom-call(%w), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config": {"body": "AA==
}}, metadata={op_name="kernel"}
  %s = (bf16[1,224], bf16[1,896], u32[]) fusion(%w), kind=kCustom, calls=%start
  %d = bf16[1,896]{1,0} fusion(%s), kind=kCustom, calls=%done, \
backend_config={"estimated_cycles":"100"}
  %ring = (u32[], bf16[4,8]) while(%t0), condition=%ring_cond, body=%ring_body
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, bf16[4,8]{1,0}) tuple(%next, /*index=1*/%kernel)
}

%micro_cond (p: (s32[], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%micro (p: (s32[], s32[])) -> (s32[], s32[]) {
  %layers = (s32[], bf16[4,8]) while(%t1), condition=%layer_cond, body=%layer
  %g = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
  ROOT %t = (s32[], s32[]) tuple(%i, %n)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %m = (s32[], s32[]) while(%t2), condition=%micro_cond, body=%micro
  ROOT %norm = f32[8]{0} all-reduce(%a), channel_id=2, replica_groups={{0,1,2,3}}, \
to_apply=%add, metadata={op_name="jit(step)/norm"}
}
"""


def test_collectives_count_as_often_as_their_loops_run():
  found = hlo_text.collectives(PROGRAM, devices=8, turns=4)
  table = sorted((c.kind, c.count, c.size, c.ways) for c in found)
  assert table == [
    ("all-gather", 96, 512, 2),  # two of one channel are two
    ("all-gather", 96, 512, 2),
    ("all-gather", 96, 1792, 4),  # a chain of fusions is one
    ("all-reduce", 1, 32, 4),
    ("collective-permute", 4 * 24 * 4, 64, 8),  # 8 by twos
    ("reduce-scatter", 4, 2048, 8),
  ]
  assert next(c for c in found if c.kind == "all-reduce").origin == "jit(step)/norm"


def test_cycles_count_as_often_as_their_loops_run():
  assert hlo_text.cycles(PROGRAM, turns=4) == 4 * 24 * 100


@pytest.mark.parametrize(
  ("kind", "sent"),
  [
    ("all-gather", 3 * 75),
    ("reduce-scatter", 3 * 75),
    ("all-reduce", 3 * 150),
    ("collective-permute", 3 * 100),
  ],
)
def test_bytes_that_a_device_of_four_sends(kind: str, sent: int):
  assert hlo_text.Collective(kind, 3, 100, 4, "").sent == sent


@pytest.mark.parametrize(
  ("groups", "size"),
  [
    ("replica_groups=[16,4]<=[64]", 4),
    ("replica_groups={{0,1,2},{3,4,5}}", 3),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8),
    ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 4),
    ("source_target_pairs={{0,1}}", 64),
  ],
)
def test_groups_in_every_notation(groups: str, size: int):
  assert hlo_text.group_size(groups, 64) == size


def test_bytes_of_types():
  shape = "(bf16[2,3]{1,0:T(8,128)(2,1)}, pred[4], f8e4m3fn[5], s4[6], f32[])"
  assert hlo_text.array_bytes(shape) == [12, 4, 5, 3, 4]


def test_a_program_fits_or_not_by_so_much():
  chip = compile_check.CHIPS["v5e"]
  assert compile_check.fits(12e9, chip) == (True, 0.25)
  good, margin = compile_check.fits(20e9, chip)
  assert not good and margin == -0.25


def test_the_verdict_says_by_how_much_and_what_to_change():
  name = compile_check.SMALLEST
  over = {"used": 20e9, "hbm": 16e9, "fits": False, "margin": -0.25}
  line = compile_check.verdict(name, over)
  assert "DOES NOT FIT" in line and "4.0 over" in line and "rollout.slots" in line
  line = compile_check.verdict(name, {"error": "Ran out of memory: 20G of 15.75G"})
  assert "DOES NOT FIT" in line and "rollout.slots" in line
  assert "DOES NOT COMPILE" in compile_check.verdict(name, {"error": "no such op"})


def test_chips_are_in_the_documented_order():
  chips = compile_check.CHIPS
  assert chips["v5e"].flops < chips["v5p"].flops < chips["v6e"].flops
  assert chips["v5e"].hbm < chips["v6e"].hbm < chips["v5p"].hbm


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen3-32b"])
def test_counted_products_are_the_matrices_of_the_model(model: str):
  case = next(c for c in tpu_programs.CASES.values() if c.model == model)
  cfg = tpu_programs.architecture(case)
  leaves = jax.tree_util.tree_leaves_with_path(param_shapes(cfg))
  matrices = {"q", "k", "v", "o", "gate", "up", "down", "head"}
  matrices |= {"embed"} if cfg.tie_embeddings else set()
  sizes = [x.size for path, x in leaves if path[-1].key in matrices]
  assert sum(flops.products(cfg)) == sum(sizes)


@pytest.mark.parametrize("name", list(tpu_programs.CASES))
def test_a_step_costs_more_than_its_matrices_and_less_than_twice_that(name: str):
  case = tpu_programs.CASES[name]
  cfg = tpu_programs.architecture(case)
  model, everything = compile_check.flops(case, cfg)
  assert 0 < model <= everything < 3 * model
  assert compile_check.hbm_bytes(case, cfg) > 0
  if case.program == "train":
    tokens = case.count * case.rows * case.length
    assert model > 6 * sum(flops.products(cfg)) * tokens


def packed(T: int, H: int):
  """Queries of the last T of 256 places, keys, values, cotangents, segments."""
  keys = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(keys[0], (1, T, 2, H))
  k, v = (jax.random.normal(key, (1, 256, 1, H)) for key in keys[1:3])
  segment = jnp.asarray([[1] * 100 + [2] * 130 + [0] * 26])
  return q, k, v, jax.random.normal(keys[3], (1, T, 2, H)), segment


@pytest.mark.parametrize(("T", "H", "window"), [(128, 64, 0), (256, 128, 150)])
def test_splash_is_the_same_attention(T: int, H: int, window: int):
  """The TPU's kernel, interpreted."""
  q, k, v, _, segment = packed(T, H)
  ours = attention._splash(q, k, v, segment, window, interpret=True)
  np.testing.assert_allclose(
    ours, attention._xla(q, k, v, segment, window), atol=2e-5 * math.sqrt(H)
  )


@pytest.mark.slow
@pytest.mark.parametrize(("T", "H", "window"), [(128, 64, 0), (256, 128, 150)])
def test_splash_has_the_same_gradients(T: int, H: int, window: int):
  q, k, v, weight, segment = packed(T, H)

  def gradients(kernel, **options):
    def total(q, k, v):
      return jnp.sum(kernel(q, k, v, segment, window, **options) * weight)

    return jax.grad(total, (0, 1, 2))(q, k, v)

  theirs = gradients(attention._xla)
  for a, b in zip(gradients(attention._splash, interpret=True), theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * math.sqrt(H))


@pytest.mark.slow
def test_the_smallest_case_compiles_and_fits(tmp_path):
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the compiler for TPUs is not installed: pip install 'jax[tpu]'")
  out = tmp_path / "out.json"
  command = [sys.executable, "-m", "experiments.bench.compile_check", "--quick"]
  subprocess.run([*command, f"--out={out}"], cwd=ROOT, check=True)
  figures = json.loads(out.read_text())
  (name,) = figures["table"]
  row = figures["table"][name]
  assert row["fits"] and figures["ratios"] == {name: row["used"] / row["hbm"]}
  # XLA counts one pass of the window's body, which is what the formula counts.
  assert row["xla_flops"] == pytest.approx(row["flops"], rel=0.1)

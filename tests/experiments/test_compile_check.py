"""Ahead-of-time compilation for TPUs: what is read from a compiled program."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from coa_jax.model import flops
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


def test_the_verdict_says_by_how_much_and_what_to_change():
  name = compile_check.SMALLEST
  over = {"used": 20e9, "hbm": 16e9, "fits": False, "margin": -0.25}
  line = compile_check.verdict(name, over)
  assert "DOES NOT FIT" in line and "4.0 over" in line and "rollout.slots" in line
  line = compile_check.verdict(name, {"error": "Ran out of memory: 20G of 15.75G"})
  assert "DOES NOT FIT" in line and "rollout.slots" in line
  assert "DOES NOT COMPILE" in compile_check.verdict(name, {"error": "no such op"})


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

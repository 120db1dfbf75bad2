"""Ahead-of-time compilation for TPUs: what is read from a compiled program."""

from __future__ import annotations

import importlib.util
import json

import pytest
from programs import ROOT, finish

from coa_jax.model import flops
from experiments.bench import compile_check, hlo_text, tpu_programs

# What a compiler writes, in small: a loop of 24 turns with two gathers, an asynchronous
# one in a chain of fusions and an unrolled loop in it; a loop whose turns only the run
# knows; a gradient that is reduced and then sliced. A kernel's text spans lines.
PROGRAM = (ROOT / "tests" / "fixtures" / "hlo_program.txt").read_text()


def test_collectives_count_as_often_as_their_loops_run():
  traffic = hlo_text.collectives(PROGRAM, devices=8, turns=4)
  table = sorted((c.kind, c.count, c.size, c.ways) for c in traffic)
  assert table == [
    ("all-gather", 96, 512, 2),  # two of one channel are two
    ("all-gather", 96, 512, 2),
    ("all-gather", 96, 1792, 4),  # a chain of fusions is one
    ("all-reduce", 1, 32, 4),
    ("collective-permute", 4 * 24 * 4, 64, 8),  # 8 by twos
    ("reduce-scatter", 4, 2048, 8),
  ]
  assert next(c for c in traffic if c.kind == "all-reduce").origin == "jit(step)/norm"


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
  finish("bench.compile_check", "--quick", f"--out={out}")
  figures = json.loads(out.read_text())
  (name,) = figures["table"]
  row = figures["table"][name]
  assert row["fits"] and figures["ratios"] == {name: row["used"] / row["hbm"]}
  # XLA counts one pass of the window's body, which is what the formula counts.
  assert row["xla_flops"] == pytest.approx(row["flops"], rel=0.1)

"""Ahead-of-time compilation for TPUs: what is read from a compiled program."""

from __future__ import annotations

import importlib.util
import json

import pytest
from programs import ROOT, finish

from experiments.bench import compile_check, hlo_text, hlo_work

# What a compiler writes, in small: a loop of 24 turns with two gathers, an asynchronous
# one in a chain of fusions and an unrolled loop in it; a loop whose turns only the run
# knows; a gradient that is reduced and then sliced. A kernel's text spans lines.
PROGRAM = (ROOT / "tests" / "fixtures" / "hlo_program.txt").read_text()
# A window: a cache that is transposed in and out of a loop, cut and written in place in
# it; a product with a matrix that is on the chip already; a kernel, a sort, and a loop
# inside. How often the two loops run only the run knows.
WINDOW = (ROOT / "tests" / "fixtures" / "hlo_work.txt").read_text()

needs_compiler = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the compiler for TPUs is not installed: pip install 'jax[tpu]'",
)


def test_collectives_count_as_often_as_their_loops_run():
  traffic = hlo_text.collectives(PROGRAM, devices=8, turns=(4,))
  table = sorted((c.kind, c.count, c.size, c.ways, c.overlapped) for c in traffic)
  assert table == [
    ("all-gather", 96, 512, 2, False),  # two of one channel are two
    ("all-gather", 96, 512, 2, False),
    ("all-gather", 96, 1792, 4, True),  # a chain of fusions is one
    ("all-reduce", 1, 32, 4, False),
    # 8 by twos; it ends as soon as it has started.
    ("collective-permute", 4 * 24 * 4, 64, 8, False),
    ("reduce-scatter", 4, 2048, 8, False),
  ]
  assert next(c for c in traffic if c.kind == "all-reduce").origin == "jit(step)/norm"


def test_a_collective_overlaps_what_stands_before_its_end():
  done = "  %y = bf16[4,8]{1,0} collective-permute-done(%cp)\n"
  work = "  %z = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%nothing\n"
  assert done in PROGRAM
  for text, overlapped in (
    (PROGRAM.replace(done, work + done), True),
    (PROGRAM.replace(done, done + work), False),
  ):
    text = text.replace(
      "ENTRY", "%nothing () -> s32[] {\n  ROOT %n = s32[] x()\n}\n\nENTRY"
    )
    traffic = hlo_text.collectives(text, devices=8, turns=(4,))
    (permute,) = [c for c in traffic if c.kind == "collective-permute"]
    assert permute.overlapped == overlapped


def test_cycles_count_as_often_as_their_loops_run():
  done = hlo_work.work(PROGRAM, (4,))
  assert (done.product_cycles, done.other_cycles) == (0, 4 * 24 * 100)


def test_what_a_window_moves_copies_and_sorts():
  """By hand; a cache is 1024 bytes, a row of it 128."""
  done = hlo_work.work(WINDOW, turns=(10, 3), large=512)
  assert (done.copies, done.copied) == (2, 2 * 1024)  # in and out; a row is not large
  assert (done.sorts, done.sorted) == (10, 10 * 512)
  assert done.kernels == 10
  assert (done.product_cycles, done.other_cycles) == (10 * 50, 10 * 3 * 1)
  around = 2 * 1024 + 128 + 2 * 1024  # a copy of what has no type is written alone
  cut = 128 + 128 + 4  # the row, read and written, and where it stands
  product = 128 + 128  # the matrix comes from no HBM
  put = 128 + 128 + 4
  sort = 2 * 512
  assert done.moved == around + 10 * (cut + product + put + sort) + 10 * 3 * 64
  # Of a token, where a window has 10.
  token = hlo_work.work(WINDOW, turns=(10, 3), large=512, units=10)
  assert token.moved == pytest.approx(done.moved / 10)
  assert (token.copies, token.kernels) == (0.2, 1)


def test_the_verdict_says_by_how_much_and_what_to_change():
  over = {"own": 12e9, "beside": 8e9, "hbm": 16e9, "fits": False}
  line = compile_check.verdict("window 64 x 8 of 256", over)
  assert "DOES NOT FIT" in line and "4.0 over" in line and "rollout.slots" in line
  assert "algo.batch.rows" in compile_check.verdict("learn", over)
  error = {"error": "Ran out of memory: 20G of 15.75G"}
  line = compile_check.verdict("extend 4 x 16 of 256", error)
  assert "DOES NOT FIT" in line and "rollout.slots" in line
  assert "DOES NOT COMPILE" in compile_check.verdict("convert", {"error": "no such op"})


@needs_compiler
@pytest.mark.parametrize(
  "words, says",
  [
    # A host of this slice has four chips in a square: a team of 8 spans two.
    (
      ("--slice=v6e:4x4", "--config.rollout.tensor=8", "--config.algo.batch.rows=16"),
      "several processes",
    ),
    (("--slice=v6e:4x4", "--config.algo.batch.rows=24"), "B=24 over"),
    (("--slice=v9:4x4",), "v5e, v5p, v6e, tpu7x"),
    (("--slice=v6e:4x5",), "--slice=v6e:4x5: there is no such slice"),
    (("--slice=v6e:4x4", "--slices=2"), "mesh.data=1 must be a multiple of the 2 slic"),
    (
      (
        "--slice=tpu7x:2x2x2",
        "--config.rollout.tensor=16",
        "--config.algo.batch.rows=16",
      ),
      "can be 1, 2, 4, 8",
    ),
    (("--slice=v6e:4x4", "--model=qwen9"), "no variant 'qwen9'"),
  ],
)
def test_a_run_that_the_journey_refuses_is_refused(words, says):
  base = ("--config=configs/rl_qwen.py", "--model=qwen3-8b", "--list")
  finish("bench.compile_check", *base, *words, reason=says)


@pytest.mark.slow
@needs_compiler
def test_the_smallest_case_compiles_and_fits(tmp_path):
  out = tmp_path / "out.json"
  finish("bench.compile_check", "--quick", f"--out={out}")
  table = json.loads(out.read_text())["table"]
  assert len(table) == 6 and all(row["fits"] for row in table.values())
  (learn,) = [row for name, row in table.items() if name.endswith("learn")]
  assert learn["floor"] < learn["estimate"]
  (window,) = [row for name, row in table.items() if "window" in name]
  # The whole cache is read, and a quarter of it is needed.
  assert window["needed"] < window["moved"]

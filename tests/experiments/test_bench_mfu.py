"""The MFU benchmark, on the tiny model that a machine without a GPU trains."""

from __future__ import annotations

import pytest

from coa_jax.model.config import ModelConfig
from coa_jax.model.flops import train_flops
from experiments.bench import mfu
from experiments.bench.train_work import segments


@pytest.mark.parametrize("name", list(mfu.TINY))
@pytest.mark.slow
def test_a_case_is_trained_and_its_arithmetic_counted(name: str):
  size = mfu.TINY[name]
  (row,) = mfu.measure(name, size, {}, peak=1e12, rounds=1)
  assert row["case"] == name and row["contestant"] == "ours"
  # Weights are random: at first every token is about as likely.
  assert row["first_loss"] == pytest.approx(6.24, abs=0.3)
  cfg = ModelConfig(**size.model)
  per_row = segments(size.length)
  assert sum(per_row) == size.length
  flops = train_flops(cfg, per_row * size.rows, "LoRA" in name)
  assert row["mfu"] == pytest.approx(flops / row["seconds_per_step"] / 1e12)
  assert row["tokens_per_second"] == pytest.approx(2048 / row["seconds_per_step"])
  assert row["peak_gb"] > 0.1


def test_cases_are_the_published_sizes_at_both_lengths():
  assert list(mfu.CASES) == [
    f"{size} {length}k" for size in ("0.5b", "1.5b", "7b") for length in (4, 16)
  ]
  for size in mfu.CASES.values():
    assert size.rows * size.length == 32_768
    assert size.param_dtype == ("bfloat16" if size.lora else "float32")


def test_the_rate_of_a_product_is_measured():
  assert 1e7 < mfu.matmul_rate(64, 2) < 1e13

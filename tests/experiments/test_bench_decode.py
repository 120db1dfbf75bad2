"""The decoding benchmark, on the tiny model that a machine without a GPU decodes."""

from __future__ import annotations

import pytest

from coa_jax.model.variants import variant
from experiments.bench import decode


def test_a_case_is_decoded_and_its_bytes_counted():
  cfg, batch = decode.TINY["tiny 2"]
  (row,) = decode.measure("tiny 2", cfg, batch, {}, 1e9, rounds=1, new=8)
  assert row["case"] == "tiny 2" and row["contestant"] == "ours"
  floor = 8 * decode.step_bytes(cfg, batch, 128 + 4) / 1e9
  assert row["floor"] == pytest.approx(floor / (row["ms_a_step"] * 8e-3))
  assert row["tokens_per_second"] == pytest.approx(2e3 / row["ms_a_step"])


def test_a_step_reads_the_weights_once_and_every_sequences_cache():
  # Published: 0.49B parameters, tied; 7.6B of which 0.54B are the input embedding.
  assert decode.step_bytes(variant("qwen2.5-0.5b"), 1, 0) == pytest.approx(
    2 * 0.494e9, rel=0.01
  )
  seven = variant("qwen2.5-7b")
  empty = decode.step_bytes(seven, 1, 0)
  assert empty == pytest.approx(2 * (7.616e9 - 0.545e9), rel=0.01)
  # 28 layers of 4 kv heads of 128: 56 kB a token.
  added = decode.step_bytes(seven, 32, 100) - decode.step_bytes(seven, 32, 0)
  assert added == 32 * 100 * 57_344

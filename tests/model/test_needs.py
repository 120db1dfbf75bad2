"""Sizes too large for the devices are refused before anything is allocated."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import toy

from coa_jax.model import lora, memory
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.model.transformer import count_params, init_params

DEEP = dataclasses.replace(toy.MODEL, layers=1000, ff=10**8)
WIDE = dataclasses.replace(toy.MODEL, vocab_size=10**10)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_are_counted_to_within_norms_and_biases(tied: bool):
  cfg = dataclasses.replace(toy.MODEL, tie_embeddings=tied)
  (least,) = memory.parameter_needs(cfg).values()
  real = 4 * count_params(init_params(cfg, 0))
  assert 0.95 * real < least <= real
  (trained,) = memory.parameter_needs(cfg, trained=True).values()
  assert trained == 3 * least


def test_a_model_that_fits_is_accepted():
  needs = memory.parameter_needs(toy.MODEL, trained=True)
  needs |= memory.batch_needs(toy.MODEL, "data", 16, 256)
  needs |= memory.rollout_needs(toy.MODEL, 64, 320, 8, replicas=1)
  memory.check_device(needs, ONE_DEVICE)


@pytest.mark.parametrize(
  ("field", "needs"),
  [
    ("layers=1000", memory.parameter_needs(DEEP)),
    ("vocab_size=10000000000", memory.parameter_needs(WIDE)),
    ("data.rows=100000000", memory.batch_needs(toy.MODEL, "data", 10**8, 256)),
    (
      "algo.batch.length=2000000000",
      memory.batch_needs(toy.MODEL, "algo.batch", 16, 2 * 10**9),
    ),
    ("rollout.slots=100000000", memory.rollout_needs(toy.MODEL, 10**8, 256, 8, 1)),
    ("rollout.window=1000000000", memory.rollout_needs(toy.MODEL, 64, 256, 10**9, 1)),
    ("rollout.max_len=2000000000", memory.rollout_needs(toy.MODEL, 1, 2 * 10**9, 8, 1)),
  ],
)  # fmt: skip
def test_a_model_that_can_not_fit_is_refused_by_name(monkeypatch, field: str, needs):
  monkeypatch.setattr(memory.capacity, "host_bytes", lambda: 1 << 36)
  if jax.default_backend() != "cpu":
    pytest.skip("of the machine's memory")
  with pytest.raises(ValueError, match=rf"too large.*\b{field}\b.*the devices have"):
    memory.check_device(needs, ONE_DEVICE)


def test_an_adapter_of_more_rank_than_the_model_has_is_refused():
  lora.check(toy.MODEL, lora.LoraConfig(rank=toy.MODEL.width))
  with pytest.raises(ValueError, match=r"lora\.rank is 100000; .* more than 32"):
    lora.check(toy.MODEL, lora.LoraConfig(rank=100_000))

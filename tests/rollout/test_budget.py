"""A device's memory budget: it counts the held arrays and prints as one line."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import toy
from playing import CONFIG

from coa_jax.model import decode_params, memory
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.rollout.types import RolloutConfig


def test_the_budget_counts_what_is_held():
  params = toy.params()
  config = dataclasses.replace(CONFIG, slots=3)
  half = dataclasses.replace(toy.MODEL, weight_dtype="bfloat16")
  decoder = decode_params.architecture(half)
  (view,) = decode_params.decoding_views(decoder, params)
  budget = memory.cache_budget(decoder, config, ONE_DEVICE, view, params, 2, 10**7)
  assert budget.state == sum(x.nbytes for x in jax.tree.leaves(params))
  assert budget.weights == 2 * sum(x.nbytes for x in jax.tree.leaves(view))
  assert budget.logits == 3 * 4 * toy.MODEL.vocab_size
  # The counted arrays fit; with one more token they would not.
  taken = budget.state + budget.weights + budget.logits
  room = 10**7 * (1 - memory.KEPT) - taken
  assert budget.tokens * budget.token <= room < (budget.tokens + 1) * budget.token


def test_a_budget_without_room_is_refused():
  budget = toy_budget(1000)
  assert budget.caches == 0 == budget.tokens
  assert ": 0 tokens a replica" in budget.describe()


def toy_budget(
  total: int, policies: int = 1, config: RolloutConfig = CONFIG
) -> memory.CacheBudget:
  params = toy.params()
  return memory.cache_budget(
    toy.MODEL, config, ONE_DEVICE, params, params, policies, total
  )


def test_a_budget_is_described_in_one_line():
  line = toy_budget(16 * 10**9).describe()
  assert line.startswith("memory of a device that decodes: 16.0 GB; learner's state")
  asked = CONFIG.slots * CONFIG.max_len
  assert f"rollout.slots=5 of rollout.max_len={CONFIG.max_len} may take {asked}" in line
  assert memory.device_bytes(ONE_DEVICE) == 0  # a CPU reports none


def test_memory_that_is_not_there_or_that_the_step_needs_is_refused():
  def check(gigabytes: float, policies: int) -> None:
    config = dataclasses.replace(CONFIG, memory=gigabytes)
    toy_budget(10**9, policies, config).check()

  check(0.5, 1)
  check(0.5, 2)
  check(0, 1)
  with pytest.raises(
    ValueError, match=r"rollout\.memory=2 GB is more than the 0\.\d GB"
  ):
    check(2, 1)
  with pytest.raises(ValueError, match=r"rollout\.memory=0 takes all .*staleness"):
    check(0, 2)

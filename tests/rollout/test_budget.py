"""The budget of a device's memory: counted as it is held, said in one line."""

from __future__ import annotations

import dataclasses

import jax
import pytest
import toy
from playing import CONFIG

from coa_jax.model import decode_params, memory
from coa_jax.model.sharding import ONE_DEVICE


def test_the_budget_counts_what_is_held():
  params = toy.params()
  config = dataclasses.replace(CONFIG, slots=3)
  half = dataclasses.replace(toy.MODEL, weight_dtype="bfloat16")
  decoder = decode_params.architecture(half)
  (view,) = decode_params.decoding_views(decoder, params)
  budget = memory.cache_budget(
    half, config, ONE_DEVICE, params, policies=2, total=10**7
  )
  assert budget.state == sum(x.nbytes for x in jax.tree.leaves(params))
  assert budget.weights == 2 * sum(x.nbytes for x in jax.tree.leaves(view))
  assert budget.logits == 3 * 4 * toy.MODEL.vocab_size
  # All that is counted fits, and one token more would not.
  taken = budget.state + budget.weights + budget.logits
  room = 10**7 * (1 - memory.KEPT) - taken
  assert budget.tokens * budget.token <= room < (budget.tokens + 1) * budget.token


def test_what_leaves_no_room_says_so():
  budget = memory.cache_budget(
    toy.MODEL, CONFIG, ONE_DEVICE, toy.params(), 1, total=1000
  )
  assert budget.caches == 0 == budget.tokens
  assert ": 0 tokens a replica" in budget.describe(CONFIG)


def test_a_device_that_tells_its_memory_is_asked(monkeypatch):
  """A CPU does not tell, and nothing is said of it."""
  arguments = (toy.MODEL, CONFIG, ONE_DEVICE, toy.params(), 1)
  assert memory.budget_line(*arguments) == ""
  monkeypatch.setattr(memory, "device_bytes", lambda _: 16 * 10**9)
  line = memory.budget_line(*arguments)
  assert line.startswith("memory of a device that decodes: 16.0 GB; learner's state")
  asked = CONFIG.slots * CONFIG.max_len
  assert f"rollout.slots=5 of rollout.max_len={CONFIG.max_len} may take {asked}" in line


def test_memory_that_is_not_there_or_that_the_step_needs_is_refused(monkeypatch):
  monkeypatch.setattr(memory, "device_bytes", lambda _: 10**9)

  def line(gigabytes: float, policies: int) -> str:
    config = dataclasses.replace(CONFIG, memory=gigabytes)
    return memory.budget_line(toy.MODEL, config, ONE_DEVICE, toy.params(), policies)

  assert line(0.5, 1) and line(0.5, 2) and line(0, 1)
  with pytest.raises(
    ValueError, match=r"rollout\.memory=2 GB is more than the 0\.\d GB"
  ):
    line(2, 1)
  with pytest.raises(ValueError, match=r"rollout\.memory=0 takes all .*staleness"):
    line(0, 2)

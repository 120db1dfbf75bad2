"""A restored run is the run that was saved, bit for bit."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from coa_jax.learner import batch as batching
from coa_jax.learner.checkpoint import CheckpointConfig, Checkpoints
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, init_state


def assert_identical(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def training():
  """A state maker, and a function that makes one update."""
  optimizer = make_optimizer(OptimConfig(name="muon", lr=0.02), 10)
  learner = Learner(toy.sft_loss(toy.MODEL), optimizer)
  (batch,) = batching.batches(toy.trajectories(), 4, toy.MAX_LEN)

  def fresh():
    return init_state(jax.tree.map(jnp.array, toy.params()), optimizer)

  return fresh, lambda state: learner.step(state, [batch], 100.0)[0]


def test_restored_and_continued_is_uninterrupted(training, tmp_path):
  fresh, step = training
  state = step(step(fresh()))
  kept = jax.device_get(state)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(state, {"epoch": 3, "rows": [1, 2]})
    state = step(state)  # donates what is still being written
  expected = jax.device_get(step(state))
  with Checkpoints(tmp_path) as checkpoints:
    restored, cursor = checkpoints.restore(fresh())
  assert cursor == {"epoch": 3, "rows": [1, 2]}
  assert_identical(jax.device_get(restored), kept)
  assert_identical(jax.device_get(step(step(restored))), expected)


def test_the_newest_is_restored_and_only_so_many_stay(training, tmp_path):
  fresh, step = training
  state = fresh()
  with Checkpoints(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
    assert checkpoints.restore(fresh()) is None
    for _ in range(4):
      state = step(state)
      checkpoints.save(state, {})
  assert sorted(n for n in os.listdir(tmp_path) if n.isdigit()) == ["3", "4"]
  with Checkpoints(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
    restored, _ = checkpoints.restore(fresh())
  assert int(restored.step) == 4
  assert_identical(jax.device_get(restored), jax.device_get(state))


def test_half_a_checkpoint_is_none(training, tmp_path):
  fresh, step = training
  state = step(fresh())
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(state, {})
  # What a kill leaves behind: orbax writes aside and renames at the end.
  (tmp_path / "2.orbax-checkpoint-tmp-77" / "state").mkdir(parents=True)
  with Checkpoints(tmp_path) as checkpoints:
    restored, _ = checkpoints.restore(fresh())
    assert int(restored.step) == 1
    checkpoints.save(step(restored), {"again": True})
  with Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.restore(fresh())[1] == {"again": True}

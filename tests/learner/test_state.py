"""A step of any size is one update, compiled once."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.learner.checkpoint import Checkpoints
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, TrainState, init_state

CFG = toy.ONE_LAYER


def loss(params, frozen, batch):
  logp_BT, *_ = log_probs.token_logps(CFG, params, batch)
  return log_probs.nll(logp_BT, batch.loss_mask_BT), {
    "tokens": jnp.sum(batch.loss_mask_BT)
  }


def state_of(optimizer) -> TrainState:
  """A fresh state; its parameters may be donated."""
  return init_state(jax.tree.map(jnp.array, toy.params(layers=1)), optimizer)


@pytest.mark.slow
def test_moments_in_the_hosts_memory_change_no_bit(tmp_path):
  """Nor does a checkpoint between steps; restored moments are in host memory again."""
  optimizer = make_optimizer(OptimConfig(), 4)
  micro = list(batching.batches(toy.trajectories(), 2, 128))
  learner = Learner(loss, optimizer)
  expected = state_of(optimizer)
  for _ in range(3):
    expected, _ = learner.step(expected, micro, 100)

  learner = Learner(loss, optimizer, offload=True)
  params = jax.tree.map(jnp.array, toy.params(layers=1))
  state = init_state(params, optimizer, offload=True)
  moments = 2 * len(jax.tree.leaves(params))
  for _ in range(3):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
      checkpoints.save(state, {})
      checkpoints.wait()
      state, _ = checkpoints.restore(state)
    state, _ = learner.step(state, micro, 100)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)]
    assert kinds.count("pinned_host") == moments
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
  jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.slow
def test_the_step_is_compiled_with_a_word_and_once(capsys, caplog):
  """As on accelerators; recompiled only for more micro-batches than ever before."""
  learner = Learner(loss, optax.sgd(1.0))
  assert not learner.compiles_ahead  # on this CPU
  learner.compiles_ahead = True
  state = state_of(optax.sgd(1.0))
  micro = next(iter(batching.batches(toy.trajectories(), 2, 128)))
  compiled = []
  jax.config.update("jax_log_compiles", True)  # in all threads
  try:
    for count in (1, 1, 2, 1):
      state, _ = learner.step(state, [micro] * count, 100)
      said = [r.getMessage() for r in caplog.records]
      compiled.append(sum("Finished XLA compilation of jit(_step)" in x for x in said))
      caplog.clear()
      print("step", file=sys.stderr)
  finally:
    jax.config.update("jax_log_compiles", False)
  said = capsys.readouterr().err.split("step\n")
  announced = ["compiling programs of the learner: 1" in x for x in said[:4]]
  assert announced == [True, False, True, False]
  assert compiled == [1, 0, 1, 0]


@pytest.mark.slow
def test_one_step_is_one_update_whatever_the_micro_batches():
  optimizer = optax.sgd(1.0)
  learner = Learner(loss, optimizer)
  learner.reserve(3)
  whole = list(batching.batches(toy.trajectories(), 1, 128))
  assert len(whole) == 2
  tokens = sum(float(b.loss_mask_BT.sum()) for b in whole)
  outcomes = []
  # The same rows, also after an empty batch, and in reverse order.
  for micro in (whole, [batching.empty(1, 128), *whole], whole[::-1]):
    outcomes.append(learner.step(state_of(optimizer), micro, tokens))
  (first, values), *others = outcomes
  assert int(first.step) == 1
  for state, metrics in others:
    assert int(state.step) == 1
    for name in ("loss", "grad_norm", "tokens"):
      assert float(metrics[name]) == pytest.approx(float(values[name]), rel=1e-6)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
      state.params,
      first.params,
    )
  # By definition: the mean over tokens, and one step of plain gradient descent.
  total = sum(float(loss(toy.params(layers=1), None, b)[0]) for b in whole)
  assert float(values["loss"]) == pytest.approx(total / tokens, rel=1e-6)
  assert float(values["tokens"]) == 1.0
  moved = jax.tree.map(lambda a, b: a - b, toy.params(layers=1), first.params)
  assert float(values["grad_norm"]) == pytest.approx(
    float(optax.tree.norm(moved)), rel=1e-5
  )
  assert float(values["grad_norm"]) > 0.1
  # One program for any number of micro-batches.
  assert learner.jitted._cache_size() == 1


def test_a_step_that_has_nothing_to_learn_from_is_refused():
  """Division by 0 would make every parameter NaN."""
  optimizer = optax.sgd(1.0)
  learner, nothing = Learner(loss, optimizer), batching.empty(1, 128)
  with pytest.raises(ValueError, match=r"divided by 0\.0: no token"):
    learner.step(state_of(optimizer), [nothing], float(nothing.loss_mask_BT.sum()))
  with pytest.raises(ValueError, match="at least one micro-batch"):
    learner.step(state_of(optimizer), [], 1.0)


def test_a_policy_learns_its_scripts_by_heart(actor: toy.Actor):
  curve = actor.losses
  assert curve[0] > 5  # about log(vocabulary)
  assert np.mean(curve[50:60]) < 0.5 * np.mean(curve[:10])
  assert curve[-1] < 0.01

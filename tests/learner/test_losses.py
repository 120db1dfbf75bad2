"""Losses by hand, and what may not change them: packing, padding, observations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from coa_jax.learner import batch as batching
from coa_jax.learner import losses
from coa_jax.learner.batch import Batch
from coa_jax.model import distribution
from coa_jax.model.qwen import Qwen
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

CFG = toy.MODEL


def played() -> list[Trajectory]:
  """The toy scripts, with log-probs as a slightly different policy would leave them."""
  rng = np.random.default_rng(0)
  out = toy.trajectories()
  for t, logps in zip(out, toy.logps_of(CFG, toy.params(), out), strict=True):
    noisy = iter((logps + rng.normal(scale=0.3, size=logps.shape)).tolist())
    for s in t.segments:
      if s.author == Author.POLICY:
        s.logps = [next(noisy) for _ in s.ids]
  return out


ADVANTAGES = [0.7, -1.1, 0.4, -0.2]


def sft(logp_BT, batch: Batch):
  return losses.nll(logp_BT, batch.weight_BT)


def rl(logp_BT, batch: Batch):
  return losses.policy_gradient(logp_BT, batch, 0.2, 0.28)[0]


LOSSES = pytest.mark.parametrize("loss", [sft, rl])


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(loss, params, batch: Batch):
  def total(p):
    return loss(losses.token_logps(CFG, p, batch)[0], batch)

  return jax.value_and_grad(total)(params)


def summed(loss, params, batches):
  """Loss and gradient added up over batches."""
  parts = [value_and_grad(loss, params, b) for b in batches]
  return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)


def assert_close(a, b):
  """Per policy token within 1e-6; and within 1e-5 of each array's own largest entry."""
  tokens = sum(len(toy.sampled_ids(t)) for t in toy.trajectories())
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    off = np.abs(np.asarray(x) - np.asarray(y)).max()
    assert off / tokens <= 1e-6 and off <= 1e-5 * np.abs(y).max(), path


def alone(rows: int, length: int) -> Batch:
  """Every trajectory in a row of its own."""
  batch = batching.empty(rows, length)
  for row, t in enumerate(played()):
    batching.fill(batch, row, [t], [ADVANTAGES[row]])
  return batch


@LOSSES
def test_packing_padding_and_micro_batches_do_not_change_loss_or_gradient(loss):
  params = toy.params()
  expected = summed(loss, params, [alone(4, 72)])
  assert float(expected[0]) != 0
  # Longer rows and empty ones: nothing but padding.
  assert_close(summed(loss, params, [alone(6, 128)]), expected)
  # All in two rows; and the same rows one by one.
  for rows in (2, 1):
    packed = list(batching.batches(played(), rows, 112, ADVANTAGES))
    assert len(packed) == 2 // rows
    assert packed[0].segment_BT.max() > 1
    assert_close(summed(loss, params, packed), expected)


def test_a_trajectory_that_begins_with_the_policy_is_packed_like_any_other():
  bare = Trajectory("t", [Segment(Author.POLICY, "", "", [9, 8, 7], [-1.0] * 3)])
  params = toy.params()
  single, double = batching.empty(1, 8), batching.empty(1, 8)
  batching.fill(single, 0, [bare], [1.0])
  batching.fill(double, 0, [bare, bare], [1.0, 1.0])
  for loss in (sft, rl):
    one = value_and_grad(loss, params, single)
    two = value_and_grad(loss, params, double)
    assert_close(jax.tree.map(lambda x: 2 * x, one), two)


def test_token_logps_are_the_models_at_the_temperature():
  batch = alone(4, 72)
  params = toy.params()
  logp_BT, entropy_BT = losses.token_logps(CFG, params, batch, temperature=0.7)
  assert logp_BT.dtype == entropy_BT.dtype == jnp.float32
  model = Qwen(CFG)
  args = (batch.tokens_BT, batch.position_BT, batch.segment_BT)
  hidden, _ = model.apply({"params": params}, *args)
  logits = model.apply({"params": params}, hidden, method="logits")
  logits = np.asarray(logits, np.float64) / 0.7
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  target = np.take_along_axis(logp[:, :-1], batch.tokens_BT[:, 1:, None], -1)[..., 0]
  entropy = -(np.exp(logp) * logp).sum(-1)[:, :-1]
  real = batch.segment_BT[:, 1:] > 0
  np.testing.assert_allclose(logp_BT[:, 1:][real], target[real], atol=5e-6)
  np.testing.assert_allclose(entropy_BT[:, 1:][real], entropy[real], atol=5e-6)
  assert not logp_BT[:, 0].any() and not entropy_BT[:, 0].any()


@LOSSES
def test_the_gradient_is_exactly_zero_but_at_logits_of_policy_tokens(loss, monkeypatch):
  (batch,) = batching.batches(played(), 2, 112, ADVANTAGES)
  shape = (*batch.tokens_BT.shape, CFG.vocab_size)
  real = distribution.taken_log_probs

  def total(delta_BTV):
    with monkeypatch.context() as patch:
      patch.setattr(
        distribution, "taken_log_probs", lambda x, *a: real(x + delta_BTV, *a)
      )
      return loss(losses.token_logps(CFG, toy.params(), batch)[0], batch)

  grad_BTV = np.asarray(jax.jit(jax.grad(total))(jnp.zeros(shape)))
  touched_BT = np.abs(grad_BTV).max(-1) > 0
  assert not touched_BT[:, -1].any()  # nothing stands after a row's last token
  touched_BU = touched_BT[:, :-1]
  policy_BU = batch.weight_BT[:, 1:] > 0
  assert not touched_BU[~policy_BU].any()
  if loss is sft:
    assert touched_BU[policy_BU].all()
  else:  # there, a bound that is active stops the gradient of a token
    assert 0.2 < touched_BU[policy_BU].mean() < 1


def test_the_last_token_is_trained_and_so_is_every_one_that_calls_a_tool():
  tok = toy.tokenizer()
  (stop,) = tok.encode("</answer>")
  (call,) = tok.encode("</code>")
  batch = alone(4, 72)
  for row, t in enumerate(toy.trajectories()):
    last = t.num_tokens - 1
    assert batch.tokens_BT[row, last] == stop and batch.weight_BT[row, last] == 1
  calls = batch.tokens_BT == call
  assert calls.sum() == 4 and batch.weight_BT[calls].all()


def test_nll_is_the_weighted_sum():
  assert float(losses.nll(jnp.array([[-1.0, -2.0, -4.0]]), jnp.array([[1, 0, 1]]))) == 5


def one_row(**fields) -> Batch:
  """A batch of one row with these values."""
  values = {k: np.array([v], np.float32) for k, v in fields.items()}
  return batching.empty(1, len(fields["weight_BT"])).replace(**values)


# ratio, advantage -> surrogate, whether the bound is active; clip_low 0.2, high 0.28.
BRANCHES = [
  (1.0, 2.0, 2.0, False),
  (1.0, -2.0, -2.0, False),
  (1.1, 2.0, 2.2, False),
  (0.9, -2.0, -1.8, False),
  (1.5, 2.0, 2.56, True),  # above, to be raised: bounded by 1.28
  (1.5, -2.0, -3.0, False),  # above, to be lowered: free
  (0.5, 2.0, 1.0, False),  # below, to be raised: free
  (0.5, -2.0, -1.6, True),  # below, to be lowered: bounded by 0.8
  (1.27, 1.0, 1.27, False),
  (1.29, 1.0, 1.28, True),
  (0.81, -1.0, -0.81, False),
  (0.79, -1.0, -0.8, True),
  (3.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "surrogate", "bounded"), BRANCHES)
def test_the_surrogate_by_hand(ratio, advantage, surrogate, bounded):
  batch = one_row(weight_BT=[1.0], advantage_BT=[advantage], logp_BT=[-1.5])
  logp = jnp.array([[-1.5 + np.log(ratio)]], jnp.float32)

  def loss(x):
    return losses.policy_gradient(x, batch, 0.2, 0.28)

  (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(logp)
  assert float(value) == pytest.approx(-surrogate, abs=1e-6)
  assert float(sums["clipped"]) == bounded
  assert float(sums["ratio"]) == pytest.approx(ratio, rel=1e-6)
  k3 = ratio - 1 - np.log(ratio)
  assert float(sums["kl"]) == pytest.approx(k3, abs=1e-6)
  # d(-r A)/d log p = -r A where free, and nothing where bounded.
  expected = 0.0 if bounded else -ratio * advantage
  assert float(grad[0, 0]) == pytest.approx(expected, abs=1e-6)


def test_sums_are_over_weighted_tokens():
  weight = [1.0, 0.0, 1.0, 1.0]
  ratio, advantage = np.array([1.5, 9.0, 0.5, 1.0]), [2.0, 5.0, -2.0, 3.0]
  batch = one_row(weight_BT=weight, advantage_BT=advantage, logp_BT=[-1.0] * 4)
  logp = jnp.asarray([np.log(ratio) - 1.0], jnp.float32)
  value, sums = losses.policy_gradient(logp, batch, 0.2, 0.28)
  assert float(value) == pytest.approx(-(2.56 - 1.6 + 3.0), abs=1e-6)
  assert float(sums["clipped"]) == 2
  assert float(sums["ratio"]) == pytest.approx(3.0)


def test_on_policy_the_ratio_is_one_and_the_loss_minus_the_advantages():
  batch = next(batching.batches(played(), 4, 112, ADVANTAGES))
  logp_BT, _ = losses.token_logps(CFG, toy.params(), batch)
  on_policy = batch.replace(logp_BT=logp_BT)
  value, sums = losses.policy_gradient(logp_BT, on_policy, 0.2, 0.28)
  tokens = float(batch.weight_BT.sum())
  assert float(sums["ratio"]) == tokens
  assert float(sums["kl"]) == float(sums["clipped"]) == 0
  total = float(np.sum(batch.advantage_BT, dtype=np.float64))
  assert float(value) == pytest.approx(-total, rel=1e-6)


def test_one_impossible_token_can_not_overflow():
  batch = one_row(weight_BT=[1.0, 1.0], advantage_BT=[-1.0, 1.0], logp_BT=[-90.0, 0.0])
  logp = jnp.array([[0.0, -90.0]])
  value, sums = losses.policy_gradient(logp, batch, 0.2, 0.28)
  assert float(value) == pytest.approx(np.exp(20), rel=1e-6)
  assert np.isfinite(float(sums["kl"]))


# Weights of tokens whose sampler is another program: learner / sampler, cap 2.
@pytest.mark.parametrize(
  ("mismatch", "advantage", "weight"),
  [(1.0, 2.0, 1.0), (1.7, -3.0, 1.7), (0.4, 2.0, 0.4), (5.0, 2.0, 2.0), (5.0, -1, 2.0)],
)
def test_a_token_weighs_as_its_capped_importance(mismatch, advantage, weight):
  batch = one_row(weight_BT=[1.0], advantage_BT=[advantage], logp_BT=[-1.5])
  logp = jnp.array([[-1.5 + np.log(mismatch)]], jnp.float32)

  def loss(x):
    return losses.policy_gradient(x, batch, 0.2, 0.28, importance_cap=2.0)

  (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(logp)
  # The ratio to the learner itself is 1: no bound is ever active.
  assert float(sums["ratio"]) == 1 and float(sums["clipped"]) == 0
  assert float(value) == pytest.approx(-weight * advantage, rel=1e-6)
  assert float(grad[0, 0]) == pytest.approx(-weight * advantage, rel=1e-6)
  assert float(sums["importance"]) == pytest.approx(weight, rel=1e-6)
  assert float(sums["importance_capped"]) == (mismatch > 2)
  k3 = mismatch - 1 - np.log(mismatch)
  assert float(sums["kl"]) == pytest.approx(k3, abs=1e-6)


def test_a_cap_that_is_never_active_changes_no_gradient():
  """Weighted or by its ratio, a token's gradient is p / p_sampled times A."""
  batch = next(batching.batches(played(), 4, 112, ADVANTAGES))
  # Bounds so wide that the unweighted surrogate is free too.
  wide = (1.0, 1e6)

  def grad(*bounds):
    def loss(p):
      logp_BT = losses.token_logps(CFG, p, batch)[0]
      return losses.policy_gradient(logp_BT, batch, *bounds)[0]

    return jax.jit(jax.grad(loss))(toy.params())

  expected = grad(*wide)
  assert_close(grad(*wide, 1e6), expected)
  capped, policy = grad(*wide, 0.9), jax.tree.leaves(expected)
  assert any(
    np.abs(x - y).max() > 1e-3 * np.abs(y).max()
    for x, y in zip(jax.tree.leaves(capped), policy, strict=True)
  )

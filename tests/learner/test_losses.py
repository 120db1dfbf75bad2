"""Losses by hand; chunks and observations do not change them.

test_invariance.py covers packing, padding, micro-batches and meshes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs, policy_loss
from coa_jax.learner.algorithms import LossConfig
from coa_jax.learner.batch import Batch
from coa_jax.learner.cross_entropy import cross_entropy
from coa_jax.model import distribution
from coa_jax.model.transformer import Transformer, init_params
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

CFG = toy.ONE_LAYER


def played() -> list[Trajectory]:
  """The toy scripts, with log-probs from a slightly different policy."""
  rng = np.random.default_rng(0)
  out = toy.trajectories()
  for t, logps in zip(out, toy.logps_of(CFG, toy.params(layers=1), out), strict=True):
    noisy = iter((logps + rng.normal(scale=0.3, size=logps.shape)).tolist())
    for s in t.segments:
      if s.author == Author.POLICY:
        s.logps = [next(noisy) for _ in s.ids]
  return out


CONFIG = LossConfig(clip_low=0.2, clip_high=0.28)
ADVANTAGES = [0.7, -1.1, 0.4, -0.2]


def sft(logp_BT, batch: Batch):
  return log_probs.nll(logp_BT, batch.loss_mask_BT)


def rl(logp_BT, batch: Batch):
  return policy_loss.policy_loss(CONFIG, logp_BT, batch)[0]


def gspo(logp_BT, batch: Batch):
  algo = dataclasses.replace(CONFIG, ratio="sequence")
  return policy_loss.policy_loss(algo, logp_BT, batch)[0]


def cispo(logp_BT, batch: Batch):
  algo = dataclasses.replace(CONFIG, surrogate="cispo")
  return policy_loss.policy_loss(algo, logp_BT, batch)[0]


LOSSES = pytest.mark.parametrize("loss", [sft, rl, gspo, cispo])


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(loss, params, batch: Batch):
  def total(p):
    return loss(log_probs.token_logps(CFG, p, batch)[0], batch)

  return jax.value_and_grad(total)(params)


def assert_close(a, b):
  """Within 1e-6 per policy token, and 1e-5 relative to each array's largest entry."""
  tokens = sum(len(toy.sampled_ids(t)) for t in toy.trajectories())
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    off = np.abs(np.asarray(x) - np.asarray(y)).max()
    assert off / tokens <= 1e-6 and off <= 1e-5 * np.abs(y).max(), path


def alone(rows: int, length: int) -> Batch:
  """Each trajectory in its own row."""
  batch = batching.empty(rows, length)
  for row, t in enumerate(played()):
    batching.fill(batch, row, [t], [ADVANTAGES[row]])
  return batch


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [{}, {"logit_chunk": 7}, {"logit_chunk": 64, "tie_embeddings": False}],
  ids=str,
)
def test_cross_entropy_is_that_of_all_tokens_log_probs(changes):
  """For any share of counted tokens, and any chunk size."""
  cfg = dataclasses.replace(CFG, **changes)
  params = toy.params(layers=1, **changes)
  batch = next(batching.batches(played(), 2, 112))
  rng = np.random.default_rng(0)

  def whole(p, batch):
    return 0.5 * log_probs.nll(
      log_probs.token_logps(cfg, p, batch)[0], batch.loss_mask_BT
    )

  def ours(p, batch):
    return 0.5 * cross_entropy(cfg, p, batch)

  whole_grads, our_grads = (jax.jit(jax.value_and_grad(f)) for f in (whole, ours))
  without_gradient = jax.jit(ours)
  for share in (1.0, 0.3, 0.0):
    # A random mask, also over first tokens of segments, which no loss may count.
    loss_mask_BT = rng.uniform(0.5, 2.0, batch.loss_mask_BT.shape)
    loss_mask_BT *= rng.random(loss_mask_BT.shape) < share
    weighted = dataclasses.replace(batch, loss_mask_BT=loss_mask_BT.astype(np.float32))
    value, grads = our_grads(params, weighted)
    assert_close((value, grads), whole_grads(params, weighted))
    assert (float(value) == 0) == (share == 0)
    alone = without_gradient(params, weighted)
    np.testing.assert_allclose(alone, value, rtol=1e-6)


@pytest.mark.slow
def test_chunks_of_rows_of_a_prime_length_are_the_whole():
  """The last chunk is padded; a prime length does not mean many one-token chunks."""
  batch = alone(4, 109)

  def total(cfg):
    def loss(p):
      logp_BT, entropy_BT, _ = log_probs.token_logps(cfg, p, batch)
      return log_probs.nll(logp_BT, batch.loss_mask_BT) + entropy_BT.sum()

    return jax.jit(jax.value_and_grad(loss))(toy.params(layers=1))

  expected = total(CFG)
  for chunk in (1, 30, 109):
    assert_close(total(dataclasses.replace(CFG, logit_chunk=chunk)), expected)


@pytest.mark.slow
def test_only_chunks_with_policy_tokens_are_computed(monkeypatch):
  """The row with the most policy tokens decides, wherever they stand in it."""
  batch = alone(4, 109)
  most = int(batch.loss_mask_BT.sum(1).max())
  assert most < 80
  computed = []
  real = distribution.taken_log_probs

  def counted(*args):
    jax.debug.callback(lambda: computed.append(1))
    return real(*args)

  monkeypatch.setattr(distribution, "taken_log_probs", counted)
  cfg = dataclasses.replace(CFG, logit_chunk=10)
  jax.block_until_ready(log_probs.token_logps(cfg, toy.params(layers=1), batch))
  jax.effects_barrier()
  assert len(computed) == -(-most // 10)


@pytest.mark.parametrize("most", [1, 100, 128, 200, 882, 4096])
def test_chunks_hold_a_row_and_are_of_whole_tiles_from_one_on(most):
  for length in (1, 109, 128, 300, 1000, 8191, 8192, 32768):
    chunks, tokens = log_probs._chunks(length, most)
    assert tokens <= most
    assert (chunks - 1) * tokens < length <= chunks * tokens
    if chunks > 1 and most >= 128:
      assert tokens % 128 == 0


def largest(jaxpr) -> int:
  """Elements of a program's largest array, inner loops included."""
  sizes = [int(np.prod(v.aval.shape)) for e in jaxpr.eqns for v in e.outvars]
  within = [
    x
    for e in jaxpr.eqns
    for x in jax.tree.leaves(
      list(e.params.values()),
      is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    )
  ]
  inner = [getattr(x, "jaxpr", x) for x in within]
  return max([*sizes, *(largest(x) for x in inner if hasattr(x, "eqns"))], default=0)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_logits_of_all_tokens_never_exist_at_a_vocabulary_of_152k(kind, rows):
  """Nor do their gradients, with default settings."""
  cfg = dataclasses.replace(CFG, vocab_size=151_936, width=32, layers=1)
  batch, T = batching.empty(rows, 4096), 4096
  params = jax.eval_shape(lambda: init_params(cfg, 0))

  def loss(p):
    if kind == "sft":
      return cross_entropy(cfg, p, batch)
    logp_BT, entropy_BT, _ = log_probs.token_logps(cfg, p, batch)
    return logp_BT.sum() + entropy_BT.sum()

  program = jax.make_jaxpr(jax.value_and_grad(loss))(params)
  found = largest(program.jaxpr)
  assert cfg.vocab_size * 32 <= found <= 2**27 < rows * T * cfg.vocab_size


def test_half_precision_sums_gradients_in_float32():
  """Of a token, bias or norm that occurs thousands of times, too."""
  fields = dict(layers=1, vocab_size=64, attention_bias=True, tie_embeddings=True)
  params = init_params(dataclasses.replace(toy.MODEL, **fields), 0)
  batch = batching.empty(16, 512)
  rng = np.random.default_rng(0)
  batch.tokens_BT[:] = np.minimum(63, rng.zipf(1.3, (16, 512)))
  batch.segment_BT[:] = batch.loss_mask_BT[:] = 1
  batch.position_BT[:] = np.arange(512)

  def gradient(dtype: str):
    cfg = dataclasses.replace(toy.MODEL, **fields, dtype=dtype)
    return jax.jit(jax.grad(lambda p: cross_entropy(cfg, p, batch)))(params)

  exact, half = map(gradient, ("float32", "bfloat16"))
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(half), strict=True
  ):
    assert np.linalg.norm(y - x) <= 0.03 * np.linalg.norm(x), path


def test_a_trajectory_that_begins_with_the_policy_is_packed_like_any_other():
  bare = Trajectory("t", [Segment(Author.POLICY, "", "", [9, 8, 7], [-1.0] * 3)])
  params = toy.params(layers=1)
  single, double = batching.empty(1, 8), batching.empty(1, 8)
  batching.fill(single, 0, [bare], [1.0])
  batching.fill(double, 0, [bare, bare], [1.0, 1.0])
  for loss in (sft, rl):
    one = value_and_grad(loss, params, single)
    two = value_and_grad(loss, params, double)
    assert_close(jax.tree.map(lambda x: 2 * x, one), two)


def test_token_logps_are_the_models_at_the_temperature():
  batch = alone(4, 72)
  params = toy.params(layers=1)
  logp_BT, entropy_BT, removed_BT = log_probs.token_logps(CFG, params, batch, 0.7)
  assert logp_BT.dtype == entropy_BT.dtype == jnp.float32
  assert not removed_BT.any()  # there is no grammar
  model = Transformer(CFG)
  args = (batch.tokens_BT, batch.position_BT, batch.segment_BT)
  hidden, _ = model.apply({"params": params}, *args)
  logits = model.apply({"params": params}, hidden, method="logits")
  logits = np.asarray(logits, np.float64) / 0.7
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  target = np.take_along_axis(logp[:, :-1], batch.tokens_BT[:, 1:, None], -1)[..., 0]
  entropy = -(np.exp(logp) * logp).sum(-1)[:, :-1]
  wrote = batch.loss_mask_BT[:, 1:] > 0
  np.testing.assert_allclose(logp_BT[:, 1:][wrote], target[wrote], atol=5e-6)
  np.testing.assert_allclose(entropy_BT[:, 1:][wrote], entropy[wrote], atol=5e-6)
  others = batch.loss_mask_BT == 0
  assert not logp_BT[others].any() and not entropy_BT[others].any()


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
      return loss(log_probs.token_logps(CFG, toy.params(layers=1), batch)[0], batch)

  grad_BTV = np.asarray(jax.jit(jax.grad(total))(jnp.zeros(shape)))
  touched_BT = np.abs(grad_BTV).max(-1) > 0
  assert not touched_BT[:, -1].any()  # no token follows a row's last one
  touched_BU = touched_BT[:, :-1]
  policy_BU = batch.loss_mask_BT[:, 1:] > 0
  assert not touched_BU[~policy_BU].any()
  if loss in (sft, cispo):
    assert touched_BU[policy_BU].all()
  elif loss is rl:  # an active bound stops a token's gradient
    assert 0.2 < touched_BU[policy_BU].mean() < 1


@pytest.mark.slow
def test_values_see_what_stands_before_a_token_and_are_unchanged_by_packing():
  head_D1 = jax.random.normal(jax.random.key(0), (CFG.width, 1))

  def values(batch: Batch):
    return np.asarray(log_probs.token_values(CFG, toy.params(layers=1), head_D1, batch))

  rows = alone(4, 72)
  value_BT = values(rows)
  assert not value_BT[:, 0].any() and value_BT[:, 1:].any()
  # A token does not change its own value, only later ones.
  other = rows.replace(tokens_BT=rows.tokens_BT.copy())
  other.tokens_BT[:, 20] += 1
  changed_BT = values(other) != value_BT
  assert not changed_BT[:, :21].any() and changed_BT[:, 21].all()
  packed = batching.Packed(played(), 2, 112)
  packed.replace("value_BT", [values(b) for b in packed.batches])
  for row, mine in enumerate(packed.read("value_BT")):
    expected = value_BT[row][rows.loss_mask_BT[row] > 0]
    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=2e-5)

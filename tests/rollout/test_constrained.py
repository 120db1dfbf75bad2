"""Grammar-constrained sampling, and a learner with the same log-probs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
import toy

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask, Truncation
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol import roles
from coa_jax.protocol.parser import ParseVerdict, parse
from coa_jax.protocol.trajectory import Author, Status, Trajectory
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.worker import RolloutWorker

# A random policy closes a span after about 350 tokens, and needs four spans.
LENGTH = 3_072
VARIANT = roles.get_variant("mhqa")


def model(tokenizer) -> ModelConfig:
  return dataclasses.replace(toy.ONE_LAYER, vocab_size=tokenizer.vocab_size + 5)


@functools.cache
def play(
  tokenizer, length: int = LENGTH, **changes
) -> tuple[RolloutWorker, dict, list[Trajectory]]:
  """Plays the toy tasks with an untrained model under the grammar."""
  cfg = model(tokenizer)
  params = transformer.init_params(cfg, 1)
  config = RolloutConfig(
    variant="mhqa",
    style="brief",
    slots=8,
    window=64,
    max_len=length,
    max_calls=99,
    constrain=True,
    **changes,
  )
  worker = make_worker(cfg, tokenizer, config, VARIANT.tools)
  groups = worker.generate_groups(params, toy.TASKS, toy.TableToolbox(), 2, 1.0, seed=3)
  return worker, params, [t for group in groups for t in group]


@pytest.mark.slow
@pytest.mark.parametrize(
  "tokenizer",
  [toy.stock_tokenizer, pytest.param(toy.tokenizer, marks=pytest.mark.soak)],
)
def test_an_untrained_model_breaks_no_rule(tokenizer):
  worker, _, played = play(tokenizer(), LENGTH)
  ended = [t for t in played if t.status == Status.ENDED]
  assert all(t.reward_parts["format"] == 1.0 for t in ended)
  for t in played:
    read = parse(t.text, VARIANT)
    assert read.ok == (t.status == Status.ENDED)
    if not read.ok:  # out of tokens, maybe within a tag
      assert t.status == Status.TRUNCATED
      assert read.verdict in (ParseVerdict.UNCLOSED, ParseVerdict.MALFORMED)
      assert "<" in t.text[read.offset :] or read.verdict == ParseVerdict.UNCLOSED
    state = 0
    for s in t.segments:
      if s.author == Author.TOOL:
        state = worker.constraint.resume_S[state]
      elif s.author == Author.POLICY:
        *_, state = worker.constraint.states(s.ids, state)
      assert state >= 0
  if tokenizer is toy.tokenizer:  # spelt-out tags are too rare in random text
    assert len(ended) >= 2 and sum(t.usage.tool_calls for t in played) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{}, {"top_k": 40, "top_p": 0.7}])
def test_the_learner_has_the_samplers_log_probs(truncation: dict):
  length = LENGTH // 4 if truncation else LENGTH  # no trajectory needs to end
  worker, params, played = play(toy.tokenizer(), length, **truncation)
  cfg = model(toy.tokenizer())
  (batch,) = batching.batches(
    played[:6], 6, length, [1.0] * 6, constraint=worker.constraint
  )
  scores = {
    name: log_probs.token_logps(cfg, params, batch, 1.0, ONE_DEVICE, cut, constraint)
    for name, cut, constraint in (
      ("same", Truncation(**truncation), TokenMask.of(worker.constraint)),
      ("free", Truncation(), None),
    )
  }
  logps = {name: np.asarray(s[0]) for name, s in scores.items()}
  wrote = batch.loss_mask_BT > 0
  assert wrote.sum() > 1_000
  logp_diff = np.abs(logps["same"][wrote] - batch.logp_BT[wrote])
  # At the truncation's border, rounding can add or remove a token.
  assert (logp_diff <= 2e-5).mean() >= (0.999 if truncation else 1.0)
  # Without the mask every token is less likely.
  assert (logps["free"][wrote] <= logps["same"][wrote] + 1e-6).all()
  assert logps["free"][wrote].mean() < logps["same"][wrote].mean() - 0.01
  removed = np.asarray(scores["same"][2])
  assert 0.01 < removed[wrote].mean() < 0.9 and not removed[~wrote].any()
  if not truncation:  # the mask renormalises over the allowed tokens
    left = np.exp(logps["free"][wrote] - logps["same"][wrote])
    np.testing.assert_allclose(left, 1 - removed[wrote], atol=1e-5)


@pytest.mark.slow
def test_a_chunked_loss_is_the_whole_one_under_a_grammar():
  worker, params, played = play(toy.tokenizer(), LENGTH)
  whole = model(toy.tokenizer())
  chunked = dataclasses.replace(whole, logit_chunk=256)
  (batch,) = batching.batches(
    played[:2], 2, LENGTH, [1.0, -1.0], constraint=worker.constraint
  )
  batch = jax.tree.map(lambda x: x[:, :512], batch)
  constraint = TokenMask.of(worker.constraint)

  def loss(cfg):
    def sums(params):
      args = (batch, 1.0, ONE_DEVICE, Truncation(top_k=20), constraint)
      scores_BT = log_probs.token_logps(cfg, params, *args)
      return sum((batch.loss_mask_BT * x_BT).sum() for x_BT in scores_BT)

    return jax.value_and_grad(sums)(params)

  a, b = loss(whole), loss(chunked)
  assert np.isfinite(a[0]) and float(a[0]) == pytest.approx(float(b[0]), rel=1e-5)
  for x, y in zip(jax.tree.leaves(a[1]), jax.tree.leaves(b[1]), strict=True):
    assert np.isfinite(x).all()
    np.testing.assert_allclose(x, y, atol=1e-3 * np.abs(x).max())

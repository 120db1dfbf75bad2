"""What half precision costs: how far the sampler's log-probs are from the learner's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_scheduler import CFG, play, scheduler

from coa_jax.model import decoding, qwen


@pytest.fixture(scope="module")
def novice() -> dict:
  return toy.actor(60).params


def gaps(cfg, params) -> np.ndarray:
  """|log-prob of the sampler - of the learner|, token by token."""
  played = play(params, toy.TableToolbox(), range(12), on=scheduler(cfg))
  played = [played[n] for n in sorted(played)]
  theirs = np.concatenate(toy.logps_of(cfg, params, played, 1.0))
  return np.abs(np.concatenate([toy.sampled_logps(t) for t in played]) - theirs)


def test_half_precision_weights_under_float32_activations_keep_the_agreement(novice):
  """The sampler may hold bfloat16 weights; the learner rounds its masters alike."""
  cfg = dataclasses.replace(CFG, weight_dtype="bfloat16")
  assert gaps(cfg, novice).max() <= 2e-5
  # The rounding is there, and its gradient is that of the master weights.
  lists = [t for t in play(novice, toy.TableToolbox(), range(2)).values()]
  rounded, exact = (toy.logps_of(c, novice, lists, 1.0) for c in (cfg, CFG))
  assert np.abs(rounded[0] - exact[0]).max() > 1e-4
  grads = [
    jax.grad(lambda w, c=c: jnp.sum(qwen.used(c, w) * 3.0))(novice["embed"])
    for c in (cfg, CFG)
  ]
  np.testing.assert_array_equal(*grads)


def test_half_precision_activations_cost_agreement(novice):
  gap = gaps(dataclasses.replace(CFG, dtype="bfloat16"), novice)
  assert 1e-3 < gap.max() < 0.3 and gap.mean() < 0.02


def test_a_cpu_decodes_in_float32_with_the_same_weights_and_agrees_no_worse(
  novice, monkeypatch
):
  cfg = dataclasses.replace(CFG, dtype="bfloat16")
  decoder = scheduler(cfg).model
  assert (decoder.dtype, decoder.weight_dtype) == ("float32", "bfloat16")
  (held,), (before,) = (decoding.decoding_views(c, novice) for c in (decoder, cfg))
  jax.tree.map(np.testing.assert_array_equal, held, before)
  for x, y in zip(jax.tree.leaves(held), jax.tree.leaves(novice), strict=True):
    np.testing.assert_array_equal(x, y.astype("bfloat16").astype("float32"))
  gap = gaps(cfg, novice)
  monkeypatch.setattr(decoding, "architecture", lambda cfg, layout: cfg)
  half = gaps(cfg, novice)
  assert gap.mean() <= 1.02 * half.mean()  # 0.97 times here

"""The sampling distribution that sampler and learner share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import distribution


def test_log_probs_are_a_float32_softmax_at_a_temperature():
  logits = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
  for t in (0.5, 1.0, 2.0):
    scaled = logits.astype(np.float64) / t
    expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    out = distribution.log_probs(jnp.asarray(logits), t)
    np.testing.assert_allclose(out, expected, atol=2e-6)
  assert distribution.log_probs(jnp.ones((2, 3), jnp.bfloat16), 1.0).dtype == "float32"


def test_each_row_has_its_own_temperature_and_greedy_reports_temperature_one():
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)))
  rows = distribution.log_probs(logits, jnp.array([0.0, 1.0, 3.0]))
  for row, t in enumerate((1.0, 1.0, 3.0)):
    one = distribution.log_probs(logits[row], t)
    np.testing.assert_allclose(rows[row], one, atol=1e-7)


@pytest.mark.parametrize("t", [1e-6, 1e-10, 1e-31, 1e-37])
def test_next_to_no_temperature_is_greedy_to_sampler_and_learner(t: float):
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 9)) * 5, jnp.float32)
  allowed = jnp.ones((4, 9), bool).at[:, jnp.argmax(logits, -1)].set(False)
  keys = jax.random.split(jax.random.key(3), 4)
  for t_B in (jnp.zeros(4), jnp.full(4, t)):
    logp = distribution.log_probs(logits, t_B, allowed=allowed)
    token_B = distribution.sample(logp, keys, t_B)
    taken, entropy = distribution.taken_log_probs(logits, token_B, t, allowed=allowed)
    np.testing.assert_array_equal(token_B, jnp.where(allowed, logits, -1e9).argmax(-1))
    at_one = distribution.log_probs(logits, 1.0, allowed=allowed)
    np.testing.assert_array_equal(logp, at_one)
    np.testing.assert_allclose(taken, logp.max(-1), atol=1e-6)
    assert (entropy > 0).all()


def test_samples_follow_the_distribution():
  n, p = 40_000, np.array([0.5, 0.0, 0.25, 0.15, 0.1])
  logp_BV = jnp.broadcast_to(jnp.log(p), (n, 5))
  keys = jax.random.split(jax.random.key(0), n)
  token_B = distribution.sample(logp_BV, keys, jnp.ones(n))
  share = np.bincount(token_B, minlength=5) / n
  # Five standard deviations; an impossible token is never drawn.
  np.testing.assert_allclose(share, p, atol=5 * np.sqrt(0.25 / n))
  assert share[1] == 0


@pytest.mark.parametrize("V", [63, 64, 200])
def test_a_draw_inverts_the_cumulative_distribution(V: int, monkeypatch):
  """Each u gives the first token with a cumulative probability above u."""
  rng = np.random.default_rng(V)
  p = rng.dirichlet(np.full(V, 0.05)) * (rng.random(V) < 0.7)
  p[-3:] = 0  # impossible tokens that rounding could reach
  p /= p.sum()
  u = np.array([0.0, 0.25, 0.5, 0.999, np.nextafter(np.float32(1), np.float32(0))])
  u = np.concatenate([u, rng.random(200)]).astype(np.float32)
  monkeypatch.setattr(jax.random, "uniform", lambda key: key)
  logp_BV = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (len(u), V))
  token_B = np.asarray(distribution.sample(logp_BV, jnp.asarray(u), jnp.ones(len(u))))
  assert (p[token_B] > 0).all()
  upto = np.cumsum(p)
  near = np.abs(upto[None] - u[:, None]).min(1) < 1e-5  # rounding may decide these
  expected = np.minimum((upto[None] <= u[:, None]).sum(1), np.flatnonzero(p)[-1])
  np.testing.assert_array_equal(token_B[~near], expected[~near])
  assert (~near).sum() > 100


@pytest.mark.slow
@pytest.mark.parametrize("V", [5, 64, 65, 200])
def test_the_most_likely_token_is_the_first_of_equals(V: int):
  logp_BV = np.random.default_rng(V).integers(-4, 0, (50, V)).astype(np.float32)
  logp_BV[0] = -1e30
  keys = jax.random.split(jax.random.key(0), 50)
  token_B = distribution.sample(jnp.asarray(logp_BV), keys, jnp.zeros(50))
  np.testing.assert_array_equal(token_B, logp_BV.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 7])
def test_a_draw_depends_on_its_own_key_alone(rows: int):
  logp_V = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (11,)))
  key = jax.random.key(42)
  alone = distribution.sample(logp_V[None], key[None], jnp.ones(1))
  keys = jnp.concatenate([jax.random.split(jax.random.key(9), rows - 1), key[None]])
  others = jax.random.normal(jax.random.key(2), (rows - 1, 11))
  logp_BV = jnp.concatenate([jax.nn.log_softmax(others), logp_V[None]])
  token_B = distribution.sample(logp_BV, keys, jnp.ones(rows))
  assert token_B[-1] == alone[0]


@pytest.mark.parametrize("changes", [{}, {"top_k": 6}])
def test_a_row_may_have_a_top_p_of_its_own(changes: dict):
  logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, 9)) * 2)
  others = distribution.Truncation(**changes)
  each = [0.3, 1.0, 0.9, 1e-6]
  out = distribution.log_probs(logits, 0.7, others, top_p=jnp.asarray(each))
  for i, top_p in enumerate(each):
    alone = distribution.Truncation(**changes, top_p=top_p)
    expected = distribution.log_probs(logits[i : i + 1], 0.7, alone)[0]
    np.testing.assert_allclose(np.exp(out[i]), np.exp(expected), atol=1e-6)
  # A row without top_p is bit-identical to a batch in which no row has one.
  free = distribution.log_probs(logits, 0.7, others, top_p=jnp.ones(4))
  np.testing.assert_array_equal(out[1], free[1])


@pytest.mark.slow
@pytest.mark.parametrize("t", [0.7, 1.0])
@pytest.mark.parametrize("changes", [{}, {"top_k": 4}, {"top_p": 0.8}])
@pytest.mark.parametrize("limited", [False, True])
def test_taken_tokens_have_the_log_probs_of_the_whole_distribution(t, changes, limited):
  """Compares values, gradients and entropies."""
  rng = np.random.default_rng(5)
  logits = jnp.asarray(rng.normal(size=(3, 4, 11)) * 3, jnp.float32)
  cut = distribution.Truncation(**changes)
  allowed = jnp.asarray(rng.random((3, 4, 11)) < 0.6).at[..., 0].set(True)
  given = (t, cut, allowed if limited else None)
  logp = distribution.log_probs(logits, *given)
  taken = jnp.argmax(logp, -1)
  weight = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)

  def whole(logits):
    logp = distribution.log_probs(logits, *given)
    return jnp.take_along_axis(logp, taken[..., None], -1)[..., 0]

  def direct(logits):
    return distribution.taken_log_probs(logits, taken, *given)[0]

  np.testing.assert_array_equal(jax.jit(direct)(logits), jax.jit(whole)(logits))
  grads = [
    jax.grad(lambda x, f=f: jnp.sum(weight * f(x)))(logits) for f in (whole, direct)
  ]
  np.testing.assert_allclose(*grads, atol=1e-6)
  assert np.abs(grads[0]).max() > 0.1
  entropy = distribution.taken_log_probs(logits, taken, *given)[1]
  p = np.exp(np.asarray(logp, np.float64))
  expected = -np.where(p > 0, p * np.asarray(logp), 0).sum(-1)
  np.testing.assert_allclose(entropy, expected, atol=1e-5)


def adversarial(V: int) -> dict[str, np.ndarray]:
  """Unnormalized log-probs: ties, impossible tokens, one dominant token, all equal."""
  rng = np.random.default_rng(V)
  rows = {
    "random": rng.normal(size=V) * 3,
    "ties": rng.integers(-4, 0, V),
    "a tie at every rank": np.zeros(V),
    "impossible": np.where(rng.random(V) < 0.7, -np.inf, rng.normal(size=V)),
    "not allowed": np.where(rng.random(V) < 0.7, -1e30, rng.normal(size=V)),
    "one token": np.where(np.arange(V) == V // 2, 0.0, -1e30),
    "peaked": np.where(np.arange(V) == V // 2, 0.0, -200 - np.arange(V)),
    "neighbours": np.nextafter(np.float32(-3), -4) * (np.arange(V) % 2) - 3,
  }
  for row in rows.values():
    row[0] = max(row[0], -1)
  return rows


def truncated(logp_V: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
  """Truncated probabilities by definition; equally likely tokens stay or go together.

  Also returns the distance from `top_p` to the nearest limit with another result.
  """
  p_V = np.exp(logp_V.astype(np.float64))
  if top_k:
    p_V[logp_V < np.sort(logp_V)[-top_k]] = 0
  p_V /= p_V.sum()
  before_V = np.array([p_V[logp_V > own].sum() for own in logp_V])
  if top_p < 1:
    p_V[before_V >= top_p] = 0
  return p_V / p_V.sum(), np.abs(before_V - top_p).min()


@pytest.mark.slow
@pytest.mark.parametrize("V", [2, 64, 1000])
def test_truncation_leaves_what_its_definition_says(V: int):
  """The definition sorts, and sums in float64."""
  rows = adversarial(V)
  logits = np.stack(list(rows.values())).astype(np.float32) / 2
  logp = np.asarray(distribution.log_probs(jnp.asarray(logits), 0.5))
  ks = [(k, 1.0) for k in {1, 2, 7, V // 2, V - 1, 2 * V} if k]
  ps = [(0, p) for p in (0.01, 0.3, 0.6, 0.9, 0.99)]
  compared = 0
  for top_k, top_p in (*ks, *ps, (V // 2, 0.8), (7, 0.6)):
    cut = distribution.Truncation(top_k=top_k, top_p=top_p)
    out = np.exp(distribution.log_probs(jnp.asarray(logits), 0.5, cut))
    for name, found, own in zip(rows, out, logp, strict=True):
      expected, border = truncated(own, min(top_k, V), top_p)
      if top_p == 1 or border > 1e-5:  # otherwise rounding may decide
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=name)
        compared += 1
  assert compared > 60


def test_a_mass_that_is_reached_exactly_is_enough():
  """Sums of powers of two are exact, so the mass before a token can equal top_p."""
  logp = jnp.log(jnp.array([0.125, 0.5, 0.25, 0.125]))
  weight = jnp.array([0.125, 0.5, 0.25, 0.125])
  for limit, kept in ((0.5, 1), (0.5000001, 2), (0.75, 2), (0.7500001, 4), (1.0, 4)):
    assert distribution._most_likely(logp, weight, limit).sum() == kept


def test_truncation_of_a_row_depends_on_no_other_row():
  logits = jax.random.normal(jax.random.key(0), (33, 500)) * 3
  cut = distribution.Truncation(top_k=60, top_p=0.9)
  logp = jax.nn.log_softmax(logits)
  kept = jax.jit(lambda x: distribution._truncation_mask(x, cut))
  np.testing.assert_array_equal(kept(logp)[7:8], kept(logp[7:8]))


def test_neither_sampler_nor_learner_sorts():
  logits = jnp.zeros((2, 100))
  cut = distribution.Truncation(top_k=5, top_p=0.9)

  def learner(logits):
    taken = distribution.taken_log_probs(logits, jnp.zeros(2, int), 1.0, cut)
    return taken[0].sum()

  for f in (lambda x: distribution.log_probs(x, 1.0, cut), jax.grad(learner)):
    text = jax.jit(f).lower(logits).as_text()
    assert "while" in text  # the search that replaces a sort
    assert "sort" not in text
    assert "top_k" not in text


def test_a_drawn_token_is_never_truncated():
  logits = jnp.array([[3.0, 2.0, 1.0]])
  cut = distribution.Truncation(top_k=1)
  logp, _ = distribution.taken_log_probs(logits, jnp.array([2]), 1.0, cut)
  np.testing.assert_allclose(
    np.exp(logp), jax.nn.softmax(jnp.array([3.0, 1.0]))[1:], rtol=1e-6
  )


@pytest.mark.parametrize("field", ["top_k", "top_p"])
def test_a_truncation_that_leaves_nothing_is_refused(field: str):
  for value in (-1, 2.5) if field != "top_k" else (-1,):
    with pytest.raises(ValueError, match=field):
      distribution.Truncation(**{field: value})


@pytest.mark.slow
def test_a_grammar_takes_tokens_away_and_says_how_much():
  constraint = distribution.TokenMask(
    jnp.array([0, 1, 1, 0]), jnp.array([[-1, 1], [0, -1]])
  )
  state_B = jnp.array([0, 1, -1])
  allowed_BV = constraint.allowed(state_B)
  assert allowed_BV.astype(int).tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]]
  logits_BV = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]] * 3))
  logp_BV = distribution.log_probs(logits_BV, 1.0, allowed=allowed_BV)
  np.testing.assert_allclose(np.exp(logp_BV[0]), [0, 0.4, 0.6, 0], atol=1e-6)
  gone_B = distribution.removed_mass(logits_BV, jnp.ones(3), allowed_BV)
  np.testing.assert_allclose(gone_B, [0.5, 0.5, 0.0], atol=1e-6)
  keys = jax.random.split(jax.random.key(0), 3)
  for _ in range(20):
    keys = jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys)
    token_B = distribution.sample(logp_BV, keys, jnp.ones(3))
    assert allowed_BV[jnp.arange(3), token_B].all()
  after = constraint.after(state_B[:2], jnp.array([1, 3]))
  assert after.tolist() == [1, 0]

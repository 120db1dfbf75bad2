"""The sampling distribution: one function for the sampler and the learner.

With two implementations, policy ratios would be wrong before training began; so both
call these functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.runtime.fields import bounded, check_fields

# Replaces minus infinity as log 0, so that 0 log 0 is 0.
_NEVER = -1e30
# Sampler and learner treat a lower temperature as greedy, like 0: logits divided by it
# would be so large that float32 rounds log-probs by tenths, or overflows.
GREEDY_BELOW = 1e-5
# Bits of float32 infinity.
_INFINITY = 0x7F800000
# Tokens per group in a draw.
_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Truncation:
  """Truncation by a token's rank or probability, after the temperature.

  `top_p` applies to the tokens that `top_k` keeps, as in transformers.

  Attributes:
    top_k: keeps this many most likely tokens; 0 for all.
    top_p: keeps the smallest set of most likely tokens reaching this probability; 1 for
      all (Holtzman et al. 2019, arXiv 1904.09751).
  """

  top_k: int = bounded(0, least=0)
  top_p: float = bounded(1.0, above=0, most=1)

  def __post_init__(self):
    check_fields(self)


NO_TRUNCATION = Truncation()


@flax.struct.dataclass
class TokenMask:
  """A grammar's allowed tokens: `tables.Constraint` on a device."""

  class_V: jax.Array
  next_SC: jax.Array

  @classmethod
  def of(cls, constraint: Constraint | None) -> TokenMask | None:
    """Puts a grammar on the default device; None for none."""
    if constraint is None:
      return None
    return cls(*jax.device_put((constraint.class_V, constraint.next_SC)))

  def allowed(self, state: jax.Array) -> jax.Array:
    """Marks the tokens [..., V] allowed by states [...]; state -1 allows all."""
    row = self.next_SC[jnp.maximum(state, 0)] >= 0
    return jnp.take(row, self.class_V, axis=-1) | (state < 0)[..., None]

  def after(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """Returns the state after a token, int32; state -1 stays."""
    after = self.next_SC[jnp.maximum(state, 0), self.class_V[token]]
    return jnp.where(state < 0, -1, after.astype(jnp.int32))


def log_probs(
  logits: jax.Array,
  temperature: jax.Array | float,
  truncation: Truncation = NO_TRUNCATION,
  allowed: jax.Array | None = None,
  top_p: jax.Array | None = None,
) -> jax.Array:
  """Computes log-probabilities over the last axis, in float32; -1e30 for log 0.

  Args:
    logits: [..., V].
    temperature: scalar or [...]; if greedy (0, or below `GREEDY_BELOW`), the result is
      for temperature 1.
    truncation: leaves out unlikely tokens.
    allowed: bool [..., V], the grammar's allowed tokens; all if None.
    top_p: [...], replaces the truncation's; 1 for all.
  """
  return jax.nn.log_softmax(
    _scores(logits, temperature, truncation, allowed, top_p=top_p)
  )


def taken_log_probs(
  logits: jax.Array,
  token: jax.Array,
  temperature: jax.Array | float,
  truncation: Truncation = NO_TRUNCATION,
  allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Computes `log_probs` for the drawn tokens alone.

  Args:
    token: [...], the drawn tokens. Truncation never excludes them, though rounding in
      another program could.

  Returns:
    Their log-probabilities and the distribution's entropy (nats), both [...] in
    float32; no gradient passes through the entropy.
  """
  scores = _scores(logits, temperature, truncation, allowed, token)
  shifted = jax.lax.stop_gradient(scores - scores.max(-1, keepdims=True))
  e = jnp.exp(shifted)
  total = e.sum(-1)
  # If the probability is 0, so is its product with a very negative score.
  entropy = jnp.log(total) - jnp.sum(e * shifted, -1) / total
  return _log_prob(scores, token), entropy


@jax.custom_vjp
def _log_prob(scores: jax.Array, token: jax.Array) -> jax.Array:
  """Computes log softmax(scores) at `token`, [...], from two sums over the scores.

  The backward pass computes the gradient, one-hot - softmax, from the scores again:
  neither pass writes another array as large as the scores.
  """
  return _log_prob_forward(scores, token)[0]


def _log_prob_forward(scores: jax.Array, token: jax.Array) -> tuple[jax.Array, tuple]:
  top = scores.max(-1, keepdims=True)
  shifted = scores - top
  # XLA fuses a masked sum with the other sums; it would not fuse a gather.
  at_token = jnp.where(_one_hot(scores, token), shifted, 0.0).sum(-1)
  total = jnp.exp(shifted).sum(-1)
  return at_token - jnp.log(total), (scores, token, top, total)


def _log_prob_backward(residuals: tuple, g: jax.Array) -> tuple[jax.Array, None]:
  scores, token, top, total = residuals
  p = jnp.exp(scores - top) / total[..., None]
  return g[..., None] * (_one_hot(scores, token) - p), None


_log_prob.defvjp(_log_prob_forward, _log_prob_backward)


def _one_hot(scores: jax.Array, token: jax.Array) -> jax.Array:
  return jnp.arange(scores.shape[-1]) == token[..., None]


def _scores(
  logits: jax.Array,
  temperature: jax.Array | float,
  truncation: Truncation,
  allowed: jax.Array | None,
  token: jax.Array | None = None,
  top_p: jax.Array | None = None,
) -> jax.Array:
  """Returns the scores under the sampling softmax, float32 [..., V]."""
  # --- The temperature, then the grammar; greedy rows keep temperature 1.
  t = jnp.asarray(temperature, jnp.float32)[..., None]
  logits = logits.astype(jnp.float32) / jnp.where(t >= GREEDY_BELOW, t, 1.0)
  if allowed is not None:
    logits = jnp.where(allowed, logits, _NEVER)
  if truncation == NO_TRUNCATION and top_p is not None:
    # Rows without truncation keep their scores, whatever other rows ask for.
    asks = top_p < 1
    return jax.lax.cond(
      jnp.any(asks),
      lambda: jnp.where(
        asks[..., None], _truncated(logits, truncation, token, top_p), logits
      ),
      lambda: logits,
    )
  if truncation == NO_TRUNCATION:
    return logits
  return _truncated(logits, truncation, token, top_p)


def _truncated(
  logits: jax.Array,
  truncation: Truncation,
  token: jax.Array | None,
  top_p: jax.Array | None,
) -> jax.Array:
  """Returns the scores' log-probs, -1e30 for truncated tokens."""
  logp = jax.nn.log_softmax(logits)
  mask = _truncation_mask(jax.lax.stop_gradient(logp), truncation, top_p)
  if token is not None:
    mask |= _one_hot(logp, token)
  return jnp.where(mask, logp, _NEVER)


def _truncation_mask(
  logp: jax.Array, truncation: Truncation, top_p: jax.Array | None = None
) -> jax.Array:
  """Marks the tokens kept by truncation; equally likely tokens stay or go together."""
  tr = truncation
  mask = jnp.ones(logp.shape, bool)
  # --- By rank; ties with the k-th token stay.
  if 0 < tr.top_k < logp.shape[-1]:
    mask = _most_likely(logp, jnp.ones_like(logp), tr.top_k)
  # --- By cumulative probability, among the rest.
  if tr.top_p < 1 or top_p is not None:
    limit: Any = tr.top_p
    if top_p is not None:  # rounding must not reach 1 and leave out the last tokens
      limit = jnp.where(top_p < 1, top_p, jnp.inf)[..., None]
    rest = jax.nn.log_softmax(jnp.where(mask, logp, _NEVER))
    mask &= _most_likely(rest, jnp.exp(rest), limit)
  return mask


def _most_likely(
  logp: jax.Array, weight: jax.Array, limit: float | jax.Array
) -> jax.Array:
  """Marks tokens if all more likely tokens together weigh less than a limit.

  The weight above a bound falls as the bound rises, in float32 too, since every partial
  sum falls. So bisection finds the lowest valid bound with 31 sums over the row; a sort
  would take far longer.

  Args:
    logp: [..., V], at most 0.
    weight: [..., V], at least 0; whole numbers are summed exactly up to 2^24.
    limit: above 0, to keep the most likely token; may be [..., 1].
  """
  # Floats with one sign are ordered like their bits: -logp's bits rise as tokens get
  # less likely.
  unlikely = jax.lax.bitcast_convert_type(jnp.abs(logp), jnp.int32)

  def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    low, high = bounds
    middle = low + (high - low + 1) // 2
    before = jnp.sum(jnp.where(unlikely < middle, weight, 0.0), -1, keepdims=True)
    stays = before < limit
    return jnp.where(stays, middle, low), jnp.where(stays, high, middle - 1)

  # --- The least likely kept value, between probabilities 1 and 0.
  low = jnp.zeros((*logp.shape[:-1], 1), jnp.int32)
  high = jnp.full_like(low, _INFINITY)
  last, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
  return unlikely <= last


def removed_mass(
  logits: jax.Array, temperature: jax.Array | float, allowed: jax.Array | None
) -> jax.Array:
  """Sums the probability outside the grammar, in float32 and without a gradient."""
  if allowed is None:
    return jnp.zeros(logits.shape[:-1], jnp.float32)
  logp = log_probs(jax.lax.stop_gradient(logits), temperature)
  return jnp.sum(jnp.where(allowed, 0.0, jnp.exp(logp)), axis=-1)


def sample(logp_BV: jax.Array, key_B: jax.Array, temperature_B: jax.Array) -> jax.Array:
  """Draws one token per row by inverting the cumulative distribution.

  On a CPU, V Gumbel draws or a cumulative sum over V would each cost as much as a small
  model; so a row takes one uniform number, and sums over groups of tokens.

  Args:
    temperature_B: 0, or below `GREEDY_BELOW`, takes the most likely token.

  Returns:
    token_B, int32.
  """
  # --- Sums over C groups per row, with W tokens each.
  u_B = jax.vmap(lambda k: jax.random.uniform(k))(key_B)
  B, V = logp_BV.shape
  p_BCW = jnp.pad(jnp.exp(logp_BV), ((0, 0), (0, -V % _WIDTH))).reshape(B, -1, _WIDTH)
  sum_BC = p_BCW.sum(-1)
  upto_BC = jnp.cumsum(sum_BC, axis=-1)

  # --- The group in which the cumulative sum passes the target, and its token.
  # The target is a share of the row's own sum, which is 1 but for rounding.
  target_B1 = u_B[:, None] * upto_BC[:, -1:]
  c_B1 = _reached(upto_BC, target_B1, sum_BC)
  before_B1 = jnp.where(c_B1, jnp.take_along_axis(upto_BC, c_B1 - 1, axis=1), 0.0)
  p_BW = jnp.take_along_axis(p_BCW, c_B1[..., None], axis=1)[:, 0]
  w_B1 = _reached(before_B1 + jnp.cumsum(p_BW, axis=-1), target_B1, p_BW)
  drawn_B = (c_B1 * _WIDTH + w_B1)[:, 0]
  # Greedy rows are sampled as well: one program for every temperature.
  draws_B = temperature_B >= GREEDY_BELOW
  return jnp.where(draws_B, drawn_B, _likeliest(logp_BV)).astype(jnp.int32)


def _likeliest(logp_BV: jax.Array) -> jax.Array:
  """Computes argmax over V in groups: XLA's own costs a CPU four times all the rest."""
  pad = ((0, 0), (0, -logp_BV.shape[1] % _WIDTH))
  padded_BV = jnp.pad(logp_BV, pad, constant_values=-jnp.inf)
  logp_BCW = padded_BV.reshape(len(padded_BV), -1, _WIDTH)
  c_B = jnp.argmax(logp_BCW.max(-1), axis=-1)
  logp_BW = jnp.take_along_axis(logp_BCW, c_B[:, None, None], axis=1)[:, 0]
  return c_B * _WIDTH + jnp.argmax(logp_BW, axis=-1)


def _reached(upto_BC: jax.Array, target_B1: jax.Array, p_BC: jax.Array) -> jax.Array:
  """Returns [B, 1]: the first place with a cumulative sum above the target.

  If rounding pushes the target past the last place with any probability, returns this
  last place.
  """
  place_B1 = jnp.sum(upto_BC <= target_B1, axis=-1, keepdims=True)
  last_B = p_BC.shape[-1] - 1 - jnp.argmax(p_BC[:, ::-1] > 0, axis=-1)
  return jnp.minimum(place_B1, last_B[:, None])

"""The gated delta rule: linear attention with a matrix as each head's state.

In each head, a token decays the state, then replaces the value stored under its key:

  S_t = exp(g_t) S_{t-1} + k_t (w_t (v_t - exp(g_t) S_{t-1}^T k_t))^T;  o_t = S_t^T q_t

with a log decay g <= 0 and a write strength w in (0, 1). Many tokens are computed in
chunks, each with matrix products and one triangular system; one token by the formula.
All arithmetic is in float32.

Sources: Gated DeltaNet (arXiv 2412.06464), its chunks (arXiv 2406.06484); equal to
`torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule` in transformers'
`models/qwen3_next`.

This file's axis letters: Y key heads, Z = Y G value heads, M units per key, U per
value; n chunks of C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Tokens per chunk, as in the sources.
CHUNK = 64
# Chunks whose products are in memory at once; the backward pass recomputes them.
_AT_ONCE = 32
# Rows per diagonal block that is inverted as a whole.
_WHOLE = 16
# By default a TPU rounds float32 factors to bfloat16, and a GPU to TF32.
_PRECISION = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
  """The rule's inputs for each token.

  Attributes:
    q_BTYM: queries, of unit length.
    k_BTYM: keys, of unit length.
    v_BTZU: values.
    write_BTZ: write strengths; 0 for a token that leaves the state alone.
    decay_BTZ: log decays, at most 0.
    segment_BT: int segment per token; states do not cross segments.
  """

  q_BTYM: jax.Array
  k_BTYM: jax.Array
  v_BTZU: jax.Array
  write_BTZ: jax.Array
  decay_BTZ: jax.Array
  segment_BT: jax.Array


def one_token(tokens: Tokens, state_BZMU: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Applies the rule to one token per row.

  Args:
    state_BZMU: each row's states before the token, float32.

  Returns:
    out_B1ZU and the states after the token, float32.
  """
  t = jax.tree.map(lambda x: x[:, 0], tokens)
  groups = t.v_BTZU.shape[1] // t.q_BTYM.shape[1]
  M = t.q_BTYM.shape[-1]
  q_BZM = jnp.repeat(t.q_BTYM.astype(jnp.float32) * M**-0.5, groups, axis=1)
  k_BZM = jnp.repeat(t.k_BTYM.astype(jnp.float32), groups, axis=1)
  decay_BZ1 = jnp.exp(t.decay_BTZ)[..., None]

  # k and q both read the old state, so it is loaded once; q's share of the new value is
  # added separately.
  def read(x_BZM: jax.Array) -> jax.Array:
    return decay_BZ1 * jnp.sum(x_BZM[..., None] * state_BZMU, axis=2)

  change_BZU = t.v_BTZU.astype(jnp.float32) - read(k_BZM)
  change_BZU *= t.write_BTZ[..., None]
  out_BZU = read(q_BZM) + jnp.sum(q_BZM * k_BZM, -1, keepdims=True) * change_BZU
  state_BZMU = decay_BZ1[..., None] * state_BZMU
  state_BZMU += k_BZM[..., None] * change_BZU[:, :, None]
  return out_BZU[:, None], state_BZMU


def many_tokens(
  tokens: Tokens, state_BZMU: jax.Array, segment_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Applies the rule to all of each row's tokens, in chunks.

  Args:
    state_BZMU: each row's states before the tokens, float32.
    segment_B: the states' segments.

  Returns:
    out_BTZU and the states after the last token, float32. A token's output is
    bit-identical for any content in other segments.
  """
  # --- Tokens padded to whole groups of chunks; padding writes nothing.
  B, T, Z, U = tokens.v_BTZU.shape
  chunks = -(-T // CHUNK)
  at_once = min(chunks, _AT_ONCE)
  turns = -(-chunks // at_once)
  added = turns * at_once * CHUNK - T

  def grouped(x: jax.Array) -> jax.Array:
    """Pads [B, T, ...] with the last segment, as [turns, B, n, C, ...]."""
    mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
    x = jnp.pad(x, [(0, 0), (0, added)] + [(0, 0)] * (x.ndim - 2), mode=mode)
    x = x.reshape(B, turns, at_once, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  # --- One group after another.
  def group(carry, tokens):
    out, *carry = _group(tokens, *carry)
    return tuple(carry), out

  carry = (state_BZMU, segment_B)
  (state_BZMU, _), out = jax.lax.scan(
    jax.checkpoint(group), carry, jax.tree.map(grouped, tokens)
  )
  out_BTZU = jnp.moveaxis(out, 0, 1).reshape(B, T + added, Z, U)[:, :T]
  return out_BTZU, state_BZMU


def _product(formula: str, *args: jax.Array) -> jax.Array:
  return jnp.einsum(formula, *args, precision=_PRECISION)


def _group(
  t: Tokens, state_BZMU: jax.Array, segment_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Applies the rule to one group of chunks; tokens have axes [B, n, C, ...].

  budget: the terms of one formula, which share their arrays.

  Returns:
    out [B, n, C, Z, U], the states after the chunks, and these states' segments.
  """
  B, n, C, Y, M = t.q_BTYM.shape
  Z, U = t.v_BTZU.shape[3:]
  G = Z // Y

  # --- Axes [B, Y, (G,) n, C, ...], so that products run over the last two.
  def heads_first(x: jax.Array, *heads: int) -> jax.Array:
    x = x.astype(jnp.float32).reshape(B, n, C, *heads, *x.shape[4:])
    return jnp.moveaxis(x, (1, 2), (1 + len(heads), 2 + len(heads)))

  q_BYnCM = heads_first(t.q_BTYM, Y) * M**-0.5
  k_BYnCM = heads_first(t.k_BTYM, Y)
  v_BYGnCU = heads_first(t.v_BTZU, Y, G)
  write_BYGnC = heads_first(t.write_BTZ, Y, G)
  decay_BYGnC = heads_first(t.decay_BTZ, Y, G)

  # --- Token pairs within a segment, and their decays. Each decay sum has only its own
  # segment's terms: differences of sums over all segments would depend on the other
  # segments' rounding.
  last_Bn = t.segment_BT[:, :, -1]
  before_Bn = jnp.concatenate([segment_B[:, None], last_Bn[:, :-1]], axis=1)
  same_BnCC = t.segment_BT[..., :, None] == t.segment_BT[..., None, :]
  same_BnCC &= jnp.tril(jnp.ones((C, C), bool))
  sum_BYGnC = _product("bnij,bygnj->bygni", same_BnCC.astype(jnp.float32), decay_BYGnC)
  pair_BYGnCC = sum_BYGnC[..., :, None] - sum_BYGnC[..., None, :]
  pair_BYGnCC = jnp.exp(jnp.where(same_BnCC[:, None, None], pair_BYGnCC, -jnp.inf))
  # Tokens that read the state before the chunk, and tokens that write the next state.
  reads_BnC = t.segment_BT == before_Bn[..., None]
  reads_BYGnC = jnp.where(reads_BnC[:, None, None], jnp.exp(sum_BYGnC), 0)
  writes_BnC = t.segment_BT == last_Bn[..., None]
  after_BYGnC = jnp.where(
    writes_BnC[:, None, None], sum_BYGnC[..., -1:] - sum_BYGnC, -jnp.inf
  )
  after_BYGnC = jnp.exp(after_BYGnC)
  stays_BYGn = jnp.where(
    (last_Bn == before_Bn)[:, None, None], jnp.exp(sum_BYGnC[..., -1]), 0
  )

  # --- Each token's change to its key's value, for any state before the chunk. It reads
  # the earlier tokens' changes, so the system is triangular.
  kk_BYnCC = _product("byncm,byndm->byncd", k_BYnCM, k_BYnCM)
  system = write_BYGnC[..., None] * kk_BYnCC[:, :, None] * pair_BYGnCC
  right = jnp.concatenate(
    [v_BYGnCU, reads_BYGnC[..., None] * k_BYnCM[:, :, None]], axis=-1
  )
  solved = _product(
    "bygncd,bygndx->bygncx", _inverse(system), write_BYGnC[..., None] * right
  )
  new_BYGnCU, known_BYGnCM = jnp.split(solved, [U], axis=-1)

  # --- The state, chunk after chunk.
  inner_BYGnCC = _product("byncm,byndm->byncd", q_BYnCM, k_BYnCM)[:, :, None]
  inner_BYGnCC = inner_BYGnCC * pair_BYGnCC
  reading_BYGnCM = reads_BYGnC[..., None] * q_BYnCM[:, :, None]
  writing_BYGnCM = after_BYGnC[..., None] * k_BYnCM[:, :, None]

  def chunk(state_BYGMU, x):
    new, known, inner, reading, writing, stays = x
    change = new - _product("bygcm,bygmu->bygcu", known, state_BYGMU)
    out = _product("bygcm,bygmu->bygcu", reading, state_BYGMU)
    out += _product("bygcd,bygdu->bygcu", inner, change)
    state_BYGMU = stays[..., None, None] * state_BYGMU
    state_BYGMU += _product("bygcm,bygcu->bygmu", writing, change)
    return state_BYGMU, out

  xs = (
    new_BYGnCU,
    known_BYGnCM,
    inner_BYGnCC,
    reading_BYGnCM,
    writing_BYGnCM,
    stays_BYGn,
  )
  state_BYGMU, out = jax.lax.scan(
    chunk,
    state_BZMU.reshape(B, Y, G, M, U),
    jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), xs),
  )
  out_BnCZU = out.transpose(1, 0, 4, 2, 3, 5).reshape(B, n, C, Z, U)
  return out_BnCZU, state_BYGMU.reshape(B, Z, M, U), last_Bn[:, -1]


@jax.custom_vjp
def _inverse(x: jax.Array) -> jax.Array:
  """Inverts I + the strictly lower triangle of matrices [..., C, C]; C is 2^n, >= 16.

  Blocks grow: two inverted diagonal blocks give the block below them by two products.
  A sum of powers would cancel large terms if keys are similar; XLA's own triangular
  solver hangs on a CPU beside other programs (jax 0.10.2).
  """
  C = x.shape[-1]
  # XLA's CPU back-end crashes on arrays with ten axes.
  x_RCC = x.reshape(-1, C, C)

  # --- Diagonal blocks, each as a whole: a TPU pads smaller blocks to its tiles.
  x_RnDD = jnp.stack(
    [x_RCC[:, i : i + _WHOLE, i : i + _WHOLE] for i in range(0, C, _WHOLE)], axis=1
  )
  place = jnp.arange(_WHOLE)
  out = jnp.broadcast_to(jnp.eye(_WHOLE, dtype=x.dtype), x_RnDD.shape)
  size = 1
  while size < _WHOLE:
    block = place // size
    # Entries below the diagonal blocks, within each pair of blocks.
    is_below = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
    below = jnp.where(is_below, x_RnDD, 0)
    out -= _product("rnij,rnjk,rnkl->rnil", out, below, out)
    size *= 2

  # --- Larger blocks from pairs.
  while size < C:
    below = jnp.stack(
      [x_RCC[:, i + size : i + 2 * size, i : i + size] for i in range(0, C, 2 * size)],
      axis=1,
    )
    upper, lower = out[:, 0::2], out[:, 1::2]
    corner = -_product("rnij,rnjk,rnkl->rnil", lower, below, upper)
    top = jnp.concatenate([upper, jnp.zeros_like(corner)], axis=-1)
    out = jnp.concatenate([top, jnp.concatenate([corner, lower], -1)], axis=-2)
    size *= 2
  return out.reshape(x.shape)


def _inverse_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  out = _inverse(x)
  return out, out


def _inverse_backward(out: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
  """d(A^-1) = -A^-1 dA A^-1, below the diagonal."""
  change = -_product("...ji,...jk,...lk->...il", out, gradient, out)
  return (jnp.tril(change, -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)

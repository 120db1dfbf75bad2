"""Decoding on the device: prefill, and a window that samples.

`prefill` runs given tokens, prompts or observations, from each slot's own position.
`window` samples until every slot needs Python (a closing tag stopped the slot, or its
token limit is reached) or the window is over. Neither knows text or tools.

Invariant: a slot's pages hold its first `length` tokens; `pending` is the next token,
sampled or given but not yet run. Randomness is keyed by (seed, sequence id, position),
so slots, neighbours and tool latency cannot change a trajectory.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from coa_jax.model import distribution
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import NO_TRUNCATION, TokenMask, Truncation
from coa_jax.model.kernels.paged import RowPages
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.model.transformer import Transformer


@flax.struct.dataclass
class Tables:
  """The automaton's tables on the device: see `protocol.grammar.automaton.Automaton`.

  With a `constraint`, only tokens allowed by its grammar are sampled.
  """

  class_V: jax.Array
  next_SC: jax.Array
  stop_SC: jax.Array
  constraint: TokenMask | None = None


@flax.struct.dataclass
class SamplerState:
  """The state of B slots, one live trajectory each.

  Attributes:
    length_B: tokens with keys and values in the cache.
    pending_B: the token after the cached ones.
    limit_B: maximum tokens per sequence, `pending` included.
    seed_B: uint32; keys the slot's randomness, with `sequence`.
    sequence_B: uint32.
    temperature_B: 0 is greedy.
    automaton_B: the automaton's state.
    active_B: True while the slot samples; False when free, waiting or done.
    grammar_B: the constraint's state, if there is one.
    top_p_B: in place of the truncation's top_p; None if no episode has its own.
  """

  length_B: jax.Array
  pending_B: jax.Array
  limit_B: jax.Array
  seed_B: jax.Array
  sequence_B: jax.Array
  temperature_B: jax.Array
  automaton_B: jax.Array
  active_B: jax.Array
  grammar_B: jax.Array
  top_p_B: jax.Array | None = None


@flax.struct.dataclass
class Sampled:
  """A window's samples: row b is valid in the first count_B[b] of W places.

  Attributes:
    token_BW: ids.
    logp_BW: each token's log p under its sampling distribution.
    count_B: tokens sampled.
    stop_B: 0, or 1 + the index of the closing tag that stopped the slot.
  """

  token_BW: jax.Array
  logp_BW: jax.Array
  count_B: jax.Array
  stop_B: jax.Array


@functools.partial(
  jax.jit, static_argnames=("cfg", "partitioner"), donate_argnames="cache"
)
def prefill(
  cfg: ModelConfig,
  params: Any,
  cache: KVCache,
  table_RC: jax.Array,
  token_RT: jax.Array,
  start_R: jax.Array,
  count_R: jax.Array,
  partitioner: Partitioner = ONE_DEVICE,
  slot_R: jax.Array | None = None,
) -> KVCache:
  """Prefills tokens: runs the model and writes their keys and values.

  Args:
    cache: all slots' cache; donated.
    table_RC: each row's pages; -1 for none.
    start_R: position of each row's first token.
    count_R: valid tokens per row.
    slot_R: each row's slot, past the last slot for unused rows; None if the rows are
      the slots in order.

  Returns:
    The cache. No logits: the first sampled token comes from running `pending`.
  """
  # Places past a row's count are wasted: `valid` keeps them out of the cache.
  step_T = jnp.arange(token_RT.shape[1])
  position_RT = start_R[:, None] + step_T
  valid_RT = step_T < count_R[:, None]
  _, cache = Transformer(cfg, partitioner, decode=True).apply(
    {"params": params},
    token_RT,
    position_RT,
    cache=cache,
    valid_BT=valid_RT,
    rows=RowPages(table_RC, slot_B=slot_R),
  )
  return cache


@functools.partial(
  jax.jit,
  static_argnames=("cfg", "partitioner", "truncation"),
  donate_argnames="cache",
)
def window(
  cfg: ModelConfig,
  params: Any,
  cache: KVCache,
  table_BC: jax.Array,
  state: SamplerState,
  tables: Tables,
  forced_BW: jax.Array,
  partitioner: Partitioner = ONE_DEVICE,
  truncation: Truncation = NO_TRUNCATION,
) -> tuple[KVCache, SamplerState, Sampled]:
  """Samples up to W tokens in every active slot.

  The window ends sooner once no slot is active.

  Args:
    params: the policy, one of `decoding_views`.
    cache: all slots' cache; donated.
    table_BC: each slot's pages, for all its possible samples; -1 for none.
    forced_BW: ids taken instead of draws; -1 draws.
  """
  model = Transformer(cfg, partitioner, decode=True)
  B, steps = forced_BW.shape
  rows = cache.decoding_rows(table_BC, state.active_B)
  out = Sampled(
    token_BW=jnp.zeros((B, steps), jnp.int32),
    logp_BW=jnp.zeros((B, steps), jnp.float32),
    count_B=jnp.zeros(B, jnp.int32),
    stop_B=jnp.zeros(B, jnp.int32),
  )

  def sample_one(carry):
    i, cache, s, out = carry
    # --- Run the pending token, for the next token's distribution.
    hidden_B1D, cache = model.apply(
      {"params": params},
      s.pending_B[:, None],
      s.length_B[:, None],
      cache=cache,
      valid_BT=s.active_B[:, None],
      rows=rows,
    )
    logits_B1V = model.apply({"params": params}, hidden_B1D, method="logits")
    logp_BV = _distribution(logits_B1V[:, 0], s, tables, truncation)
    # --- Draw the next token, or take the forced one. Idle slots draw too, without
    # effect. The key belongs to the token's position.
    keys_B = _keys(s.seed_B, s.sequence_B, s.length_B + 1)
    drawn_B = distribution.sample(logp_BV, keys_B, s.temperature_B)
    token_B = jnp.where(forced_BW[:, i] < 0, drawn_B, forced_BW[:, i])
    logp_B = jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]
    # --- Record the token, and stop slots.
    after, stop_B = _advance(s, tables, token_B)
    out = Sampled(
      token_BW=out.token_BW.at[:, i].set(token_B),
      logp_BW=out.logp_BW.at[:, i].set(logp_B),
      count_B=out.count_B + s.active_B,
      stop_B=jnp.maximum(out.stop_B, stop_B),
    )
    return i + 1, cache, after, out

  # Not a scan of W steps: once all slots have stopped, the rest would be wasted.
  def goes_on(carry):
    i, _, s, _ = carry
    return (i < steps) & jnp.any(s.active_B)

  start = (0, cache, state, out)
  _, cache, state, out = jax.lax.while_loop(goes_on, sample_one, start)
  return cache, state, out


def join(last: SamplerState, host: SamplerState, goes_on_B: jax.Array) -> SamplerState:
  """Returns continuing slots' state after the last window, the others' from the host.

  Limits are always the host's.
  """
  after = jax.tree.map(functools.partial(jnp.where, goes_on_B), last, host)
  return after.replace(limit_B=host.limit_B)


def _advance(
  s: SamplerState, tables: Tables, token_B: jax.Array
) -> tuple[SamplerState, jax.Array]:
  """Advances active slots by a token; returns their state and the stopping tags."""
  # Idle slots are computed too; the masks by `active` leave them unchanged.
  class_B = tables.class_V[token_B]
  stop_B = jnp.where(s.active_B, tables.stop_SC[s.automaton_B, class_B], 0)
  next_B = tables.next_SC[s.automaton_B, class_B]
  length_B = s.length_B + s.active_B
  # `pending` counts, though its keys and values are not in the cache yet.
  full_B = length_B + 1 >= s.limit_B
  after = s.replace(
    length_B=length_B,
    pending_B=jnp.where(s.active_B, token_B, s.pending_B),
    automaton_B=jnp.where(s.active_B, next_B, s.automaton_B),
    active_B=s.active_B & (stop_B == 0) & ~full_B,
    grammar_B=_grammar_after(s, tables, token_B),
  )
  return after, stop_B


def _distribution(
  logits_BV: jax.Array,
  state: SamplerState,
  tables: Tables,
  truncation: Truncation,
) -> jax.Array:
  """Returns the log-probs for every slot's next token."""
  constraint = tables.constraint
  allowed_BV = constraint.allowed(state.grammar_B) if constraint else None
  return distribution.log_probs(
    logits_BV, state.temperature_B, truncation, allowed_BV, state.top_p_B
  )


def _grammar_after(state: SamplerState, tables: Tables, token_B: jax.Array) -> Any:
  """Returns `grammar_B` after the active slots' sampled tokens."""
  if tables.constraint is None:
    return state.grammar_B
  after_B = tables.constraint.after(state.grammar_B, token_B)
  return jnp.where(state.active_B, after_B, state.grammar_B)


def _keys(seed_B: jax.Array, sequence_B: jax.Array, position_B: jax.Array) -> jax.Array:
  """Returns the next tokens' PRNG keys: functions of (seed, sequence, position)."""

  # Folded in one by one: from a sum, two slots could get the same key.
  def key(seed, sequence, position):
    sequence_key = jax.random.fold_in(jax.random.key(seed), sequence)
    return jax.random.fold_in(sequence_key, position)

  return jax.vmap(key)(seed_B, sequence_B, position_B)

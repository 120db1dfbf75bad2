"""Decoding on the device: slots, windows and keys."""

from __future__ import annotations

import functools

import jax
import numpy as np
import toy

from coa_jax.model.cache import KVCache
from coa_jax.protocol.grammar.automaton import compile_stops
from coa_jax.rollout import sampler

CFG = toy.MODEL
SLOTS, SIZE = 4, 40
PROMPT = toy.tokenizer().encode("<|im_start|>2 + 3<|im_end|>")
AUTOMATON = compile_stops(toy.VARIANT, toy.tokenizer(), CFG.vocab_size)
TABLES = sampler.Tables(AUTOMATON.class_V, AUTOMATON.next_SC, AUTOMATON.stop_SC)


def slots(**fields) -> sampler.SamplerState:
  """Idle slots, some of their fields set."""
  state = sampler.SamplerState(
    length_B=np.zeros(SLOTS, np.int32),
    pending_B=np.zeros(SLOTS, np.int32),
    limit_B=np.full(SLOTS, SIZE, np.int32),
    seed_B=np.zeros(SLOTS, np.uint32),
    sequence_B=np.arange(SLOTS).astype(np.uint32),
    temperature_B=np.ones(SLOTS, np.float32),
    automaton_B=np.zeros(SLOTS, np.int32),
    active_B=np.zeros(SLOTS, bool),
    grammar_B=np.zeros(SLOTS, np.int32),
  )
  return state.replace(**{k: np.asarray(v) for k, v in fields.items()})


def cache_of_slots() -> KVCache:
  """A page for each slot."""
  return KVCache.empty(CFG, SLOTS, SIZE)


TABLE_BC = np.arange(SLOTS, dtype=np.int32)[:, None]


def prefill(params, rows: dict[int, list[int]], width: int = 16):
  """A cache with these ids in these slots, the last of each left pending."""
  table_RC = np.full((3, 1), -1, np.int32)
  token_RT, count_R = np.zeros((3, width), np.int32), np.zeros(3, np.int32)
  state = slots()
  for r, (slot, ids) in enumerate(rows.items()):
    table_RC[r], count_R[r] = slot, len(ids) - 1
    token_RT[r, : len(ids) - 1] = ids[:-1]
    state.length_B[slot], state.pending_B[slot] = len(ids) - 1, ids[-1]
    state.active_B[slot] = True
  start_R = np.zeros(3, np.int32)
  cache = cache_of_slots()
  extended = sampler.extend(CFG, params, cache, table_RC, token_RT, start_R, count_R)
  return extended, state


def decode(params, cache, state, steps: int = 8, seed: int = 0):
  state = state.replace(seed_B=np.full(SLOTS, seed, np.uint32))
  free_BW = np.full((SLOTS, steps), -1, np.int32)
  return sampler.window(CFG, params, cache, TABLE_BC, state, TABLES, free_BW)


def test_extend_in_pieces_is_at_once_and_touches_only_its_slots():
  params = toy.params()
  rng = np.random.default_rng(0)
  noise = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32),
    cache_of_slots(),
  )
  ids = np.array([PROMPT * 3])[:, :16].repeat(3, 0)
  extend = functools.partial(sampler.extend, CFG, params)
  copy = functools.partial(jax.tree.map, np.array)
  table_RC = np.array([[2], [-1], [0]])  # the second row is not used
  whole = extend(copy(noise), table_RC, ids, np.zeros(3, int), np.array([16, 16, 9]))
  parts = extend(copy(noise), table_RC, ids, np.zeros(3, int), np.array([5, 3, 0]))
  rest = np.stack([np.roll(ids[0], -5), ids[1], ids[2]])
  counts = np.array([11, 0, 9])
  parts = extend(parts, table_RC, rest, np.array([5, 0, 0]), counts)
  for a, b, old in zip(
    jax.tree.leaves(whole), jax.tree.leaves(parts), jax.tree.leaves(noise), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-5)
    rest = (1, 2) if a.shape[3] == SIZE else (1, 3)  # keys, values
    changed_BS = (np.asarray(a) != old).any(axis=rest)
    expected_BS = np.zeros((SLOTS, SIZE), bool)
    expected_BS[2, :16] = expected_BS[0, :9] = True
    np.testing.assert_array_equal(changed_BS, expected_BS)


def test_a_slots_tokens_do_not_depend_on_the_slot_its_neighbours_or_the_window():
  params = toy.params()
  cache, state = prefill(params, {1: PROMPT})
  state.sequence_B[1] = 7
  _, _, alone = decode(params, cache, state, 8)
  tokens, logps = np.asarray(alone.token_BW)[1], np.asarray(alone.logp_BW)[1]
  assert alone.count_B.tolist() == [0, 8, 0, 0]
  # Another slot, among others.
  cache, state = prefill(params, {3: PROMPT, 0: PROMPT[:-3], 2: PROMPT * 2})
  state.sequence_B[3] = 7
  _, _, among = decode(params, cache, state, 8)
  np.testing.assert_array_equal(np.asarray(among.token_BW)[3], tokens)
  np.testing.assert_array_equal(np.asarray(among.logp_BW)[3], logps)
  assert np.asarray(among.token_BW)[0].tolist() != tokens.tolist()
  # Two windows for one.
  cache, state = prefill(params, {1: PROMPT})
  state.sequence_B[1] = 7
  cache, state, first = decode(params, cache, state, 4)
  _, state, second = decode(params, cache, state, 4)
  pair = np.concatenate([first.token_BW[1], second.token_BW[1]])
  np.testing.assert_array_equal(pair, tokens)
  pair = np.concatenate([first.logp_BW[1], second.logp_BW[1]])
  np.testing.assert_array_equal(pair, logps)
  assert int(state.length_B[1]) == len(PROMPT) - 1 + 8
  assert int(state.pending_B[1]) == tokens[-1]


def test_randomness_is_keyed_by_seed_sequence_and_position():
  params = toy.params()

  def tokens(sequence: int, seed: int, prompt: list[int]) -> list[int]:
    cache, state = prefill(params, {0: prompt})
    state.sequence_B[0] = sequence
    return decode(params, cache, state, 8, seed)[2].token_BW[0].tolist()

  base = tokens(1, 0, PROMPT)
  assert tokens(1, 0, PROMPT) == base
  assert tokens(2, 0, PROMPT) != base
  assert tokens(1, 1, PROMPT) != base
  assert len(set(base)) > 1  # positions have keys of their own


def test_a_window_ends_slots_at_tags_and_limits_and_leaves_idle_ones_alone(actor):
  params, tok = actor.params, toy.tokenizer()
  cache, state = prefill(params, {0: PROMPT, 1: PROMPT, 2: PROMPT})
  state.temperature_B[:] = 0
  state.limit_B[1] = len(PROMPT) + 5
  state.active_B[2] = False
  cache = jax.tree.map(np.array, cache)
  after, state, out = decode(params, cache, state, 25)
  call = toy.SCRIPTS["2 + 3"][0]
  assert tok.decode(out.token_BW[0, : out.count_B[0]].tolist()) == call
  stopped_by = AUTOMATON.tags[int(out.stop_B[0]) - 1]
  assert stopped_by == "</code>"
  assert out.count_B.tolist() == [len(tok.encode(call)), 5, 0, 0]
  assert out.stop_B.tolist()[1:] == [0, 0, 0]
  assert not state.active_B.any()
  assert state.length_B.tolist()[2] == len(PROMPT) - 1
  for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(a[2:], np.asarray(b)[2:])

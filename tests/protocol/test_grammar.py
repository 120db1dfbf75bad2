"""The grammar allows the texts that the parser accepts, by byte and by token."""

from __future__ import annotations

import functools
import itertools
import random
from unittest import mock

import numpy as np
import pytest
import toy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coa_jax.protocol import parser, roles, tool_bodies
from coa_jax.protocol.grammar import automaton
from coa_jax.protocol.grammar.language import MAX_WHITE, ByteGrammar, compile_grammar
from coa_jax.protocol.tools import FUNCTION_TAG

OBSERVED = roles.wrap(roles.OBSERVATION, "what a tool said")


@functools.cache
def grammar(name: str) -> ByteGrammar:
  """A variant's grammar, without tools whose calls it allows in one form only."""
  variant = roles.get_variant(name)
  tools = [t for t in variant.tools if t not in ("visual_inspector", FUNCTION_TAG)]
  return compile_grammar(variant.with_tools(tools))


def read(g: ByteGrammar, turns: list[bytes]) -> tuple[int, int]:
  """The last state (-1 if a byte is not allowed), and the number of bytes read."""
  state, done = 0, 0
  for nth, turn in enumerate(turns):
    if nth:
      state = g.resume_S[state]
      if state < 0:
        return -1, done
    for b in turn:
      state = g.next_SX[state, b]
      if state < 0:
        return -1, done
      done += 1
  return int(state), done


class Writer:
  """Writes texts byte by byte, drawing each one from the allowed bytes."""

  def __init__(self, g: ByteGrammar):
    self.g, self.distance_S = g, distances(g)
    self.draws: dict[int, tuple[list[int], list[int]]] = {}

  def draw(self, state: int, rng: random.Random) -> int:
    """Draws a byte, usually one on a shortest path to an end: texts must end."""
    if state not in self.draws:
      able = np.flatnonzero(self.g.next_SX[state] >= 0)
      assert len(able), "a state that is no end and goes nowhere"
      distance = self.distance_S[self.g.next_SX[state, able]]
      self.draws[state] = able.tolist(), able[distance == distance.min()].tolist()
    able, nearest = self.draws[state]
    return rng.choice(nearest if rng.random() < 0.8 else able)

  def write(self, rng: random.Random, limit: int = 4_000) -> list[str] | None:
    """Returns a text's turns; None if it grew longer than `limit` bytes."""
    g, turns, state = self.g, [bytearray()], 0
    for _ in range(limit):
      if g.ends_S[state]:
        return [t.decode("utf-8", "replace") for t in turns]
      if g.resume_S[state] >= 0:
        state = int(g.resume_S[state])
        turns.append(bytearray())
        continue
      b = self.draw(state, rng)
      turns[-1].append(b)
      state = int(g.next_SX[state, b])
    return None


def distances(g: ByteGrammar) -> np.ndarray:
  """Minimum bytes to an end, for every state."""
  out = np.where(g.ends_S, 0, np.inf)
  after = np.concatenate([g.next_SX, g.resume_S[:, None]], axis=1)
  while True:
    new = np.minimum(out, 1 + np.append(out, np.inf)[after].min(axis=1))
    if np.array_equal(new, out):
      return out
    out = new


@functools.cache
def writer(name: str) -> Writer:
  return Writer(grammar(name))


@pytest.mark.parametrize("name", list(roles.VARIANTS))
def test_whatever_is_written_under_the_grammar_is_well_formed(name: str):
  g = compile_grammar(roles.get_variant(name))
  rng, written, texts = random.Random(0), 0, Writer(g)
  for _ in range(150):
    turns = texts.write(rng)
    if turns is not None:
      read_back = parser.parse(OBSERVED.join(turns), roles.get_variant(name))
      assert read_back.ok, (read_back.detail, turns)
      written += 1
  assert written > 100


_SPANS = [
  *(roles.wrap(r, "x") for r in (*roles.ROLES, "wiki_search", "web_search")),
  *(
    roles.wrap(roles.DOUBLE_CHECK, s) for s in ("1", " score 3", "-3", "3.5", "3 of 4")
  ),
  *(
    roles.wrap(roles.REFLECTION, s)
    for s in (
      "information_conflict: poor",
      "Tool_Effectiveness : POOR.",
      "trajectory_monitoring: poorly",
      "information_conflict: information_conflict: poor",
      "information_conflict: good tool_effectiveness:fair "
      "trajectory_monitoring: average",
    )
  ),
  *(
    roles.wrap("code", s)
    for s in (
      tool_bodies.render_code("print(1)"),
      tool_bodies.render_code("print(1)", "in"),
      "```python  \n x``\n```\n\n```sh\n```",
      "```py\n\n```",
      "```py\n``````",
      "```py\nx````",
      "print(1)",
      "```py\na\n``` b",
    )
  ),
]
_PIECE = st.sampled_from(_SPANS) | st.sampled_from(
  [" ", "\n", "<", "</", ">", "x", "<think>", "</answer>", "<plan> </plan>", "\u00a0"]
)


@pytest.mark.parametrize("name", ["unified", "web", "code", "mhqa"])
@settings(max_examples=300)
@given(pieces=st.lists(_PIECE, max_size=9))
@example([roles.wrap("think", "x"), roles.wrap("plan", "y"), roles.wrap("answer", "z")])
def test_the_grammar_and_the_parser_agree(name: str, pieces: list[str]):
  """On texts that are often nearly well-formed; every call has an observation."""
  g, variant = grammar(name), roles.get_variant(name)
  variant = variant.with_tools(
    [t for t in variant.tools if t not in ("visual_inspector", FUNCTION_TAG)]
  )
  turns = [""]
  for piece in pieces:
    turns[-1] += piece
    if piece.startswith("<") and piece.endswith(
      tuple(roles.close_tag(t) for t in variant.tools)
    ):
      turns.append("")
  state, _ = read(g, [t.encode() for t in turns])
  verdict = parser.parse(OBSERVED.join(turns), variant)
  # The parser accepts white space after the answer; decoding stops before it.
  if verdict.ok and not turns[-1].endswith(">"):
    return
  assert (state >= 0 and bool(g.ends_S[state])) == verdict.ok, verdict.detail


@settings(max_examples=50)
@given(
  gaps=st.lists(st.text(" \n\t\r\f\v", max_size=MAX_WHITE + 1), min_size=7, max_size=7)
)
def test_white_space_between_spans_has_a_bound(gaps: list[str]):
  tags = ("think", "plan", "think", "wiki_search", "think", "reflection")
  spans = [roles.wrap(tag, "x" + "\n" * 40) for tag in tags]
  spans += [roles.wrap("think", "x"), roles.wrap("answer", "x")]
  turns = ["", ""]
  for n, span in enumerate(spans):
    turns[n >= 4] += (gaps[n] if n < len(gaps) else "") + span
  assert parser.parse(OBSERVED.join(turns), roles.get_variant("mhqa")).ok
  g = grammar("mhqa")
  state, _ = read(g, [turn.encode() for turn in turns])
  accepted = state >= 0 and bool(g.ends_S[state])
  assert accepted == (max(map(len, gaps)) <= MAX_WHITE)


def test_a_run_of_newlines_ends_and_a_tag_follows():
  """After the last allowed newline only a tag may follow, for any policy."""
  for name in ("mhqa", "code"):
    g = grammar(name)
    state, done = read(g, [b"\n" * 1_000])
    assert (state, done) == (-1, MAX_WHITE)
    state, _ = read(g, [b"\n" * MAX_WHITE])
    assert [chr(b) for b in np.flatnonzero(g.next_SX[state] >= 0)] == ["<"]


class Split:
  """A tokenizer with all bytes and a few pieces; tags are ordinary text."""

  def __init__(self, pieces: list[bytes]):
    self.bytes_of = [bytes([b]) for b in range(256)] + pieces + [b"<|im_end|>", b""]
    self.vocab_size = len(self.bytes_of)
    self.added = {len(self.bytes_of) - 2: "<|im_end|>"}


@pytest.mark.slow
@settings(max_examples=50)
@given(st.sets(st.integers(1, 400), max_size=200), st.integers(0, 1_000))
def test_tokens_are_allowed_where_their_bytes_are(cuts: set[int], seed: int):
  g = grammar("mhqa")
  turns = writer("mhqa").write(random.Random(seed)) or ["<think>"]
  raw = turns[0].encode()
  ends = sorted({0, *(c for c in cuts if c < len(raw)), len(raw)})
  pieces = [raw[a:b] for a, b in itertools.pairwise(ends)]
  tokenizer = Split(sorted(set(pieces)))
  with mock.patch.object(automaton, "compile_grammar", lambda _: g):  # compiled once
    table = automaton.compile_constraint(
      roles.get_variant("mhqa"), tokenizer, tokenizer.vocab_size + 3
    )
  ids = [tokenizer.bytes_of.index(p) for p in pieces]
  states = table.states(ids)
  assert len(states) == len(ids) + 1
  for n in range(len(ids) + 1):
    state, _ = read(g, [b"".join(pieces[:n])])
    assert states[n] == state
  # A token is allowed exactly if its bytes are.
  states = np.unique(states)
  for token, spelt in enumerate(tokenizer.bytes_of):
    expected = states
    for b in spelt:
      expected = np.where(expected >= 0, g.next_SX[expected, b], -1)
    if not spelt or token in tokenizer.added:
      expected = np.full_like(states, -1)
    assert np.array_equal(table.next_SC[states, table.class_V[token]], expected)
  assert (table.class_V[-3:] == table.class_V[-4]).all()


def test_a_tag_counts_as_one_token_and_spelt_out():
  tokenizer = toy.tokenizer()
  table = automaton.compile_constraint(toy.VARIANT, tokenizer, toy.MODEL.vocab_size)
  whole = tokenizer.encode("<think>")
  spelt = [tokenizer.bytes_of.index(bytes([b])) for b in b"<think>"]
  assert len(whole) == 1
  assert table.states(whole)[-1] == table.states(spelt)[-1] >= 0
  assert table.states(tokenizer.encode("<answer>"))[-1] == -1


def test_a_tokenizer_that_lacks_bytes_is_refused():
  tokenizer = Split([])
  tokenizer.bytes_of = tokenizer.bytes_of[128:]
  tokenizer.vocab_size, tokenizer.added = len(tokenizer.bytes_of), {}
  with pytest.raises(ValueError, match="no tokens for some bytes"):
    automaton.compile_constraint(roles.get_variant("mhqa"), tokenizer, 1_000)

"""Decoding stops after the token that completes a tag, however the tag is split."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import toy
from hypothesis import example, given
from hypothesis import strategies as st

from coa_jax.protocol import roles
from coa_jax.protocol.grammar.automaton import Automaton, compile_stops

UNIFIED = roles.get_variant("unified")
TAGS = [t.encode() for t in UNIFIED.yield_tags]


def run(table: Automaton, ids: list[int]) -> tuple[int, str] | None:
  """The first stopping token's index, and the tag that it completes."""
  state = 0
  for place, i in enumerate(ids):
    stop = table.stop_SC[state, table.class_V[i]]
    if stop:
      return place, table.tags[stop - 1]
    state = table.next_SC[state, table.class_V[i]]
  return None


def first_stop(pieces: list[bytes], tags: list[bytes]) -> tuple[int, set[str]] | None:
  """Like `run`, but searches the text after every token; returns all completed tags."""
  text = b""
  for place, piece in enumerate(pieces):
    before, text = len(text), text + piece
    done = {
      t.decode()
      for t in tags
      if any(text.endswith(t, 0, end) for end in range(before + 1, len(text) + 1))
    }
    if done:
      return place, done
  return None


# Tags, their parts, and noise: many texts nearly stop.
_FRAGMENT = (
  st.sampled_from(TAGS)
  | st.builds(lambda t, n: t[:n], st.sampled_from(TAGS), st.integers(1, 9))
  | st.builds(lambda t, n: t[n:], st.sampled_from(TAGS), st.integers(1, 9))
  | st.sampled_from([b"<", b"</", b">", b"</think>", b"<code>", b"</co</code>"])
  | st.binary(max_size=5)
)


def assert_stops_where_a_search_would(variant, text: bytes, cuts: set[int]):
  ends = sorted({0, *(c for c in cuts if c < len(text)), len(text)})
  pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
  vocabulary = sorted({*pieces, b""})
  fake = types.SimpleNamespace(bytes_of=vocabulary, vocab_size=len(vocabulary))
  table = compile_stops(variant.yield_tags, fake, len(vocabulary) + 3)
  found = run(table, [vocabulary.index(p) for p in pieces])
  expected = first_stop(pieces, [t.encode() for t in variant.yield_tags])
  if expected is None:
    assert found is None
  else:
    assert found is not None
    assert found[0] == expected[0] and found[1] in expected[1]


_CUTS = st.sets(st.integers(1, 60))


@given(st.lists(_FRAGMENT, max_size=6).map(b"".join), _CUTS)
def test_every_split_of_a_text_stops_at_the_same_byte(text: bytes, cuts: set[int]):
  assert_stops_where_a_search_would(UNIFIED, text, cuts)


_WORD = st.text("ab", min_size=1, max_size=5)


@given(st.lists(_WORD, min_size=1, max_size=4, unique=True), st.text("ab"), _CUTS)
@example(["aba", "b"], "ab", set())
def test_any_tags_will_do_even_one_inside_another(tags, text: str, cuts: set[int]):
  variant = types.SimpleNamespace(yield_tags=tuple(tags))
  assert_stops_where_a_search_would(variant, text.encode(), cuts)


@pytest.mark.parametrize("tok", [toy.tokenizer(), toy.stock_tokenizer()])
@pytest.mark.parametrize("tag", UNIFIED.yield_tags)
@pytest.mark.parametrize("after", ["", "<think>a</think>", "></", "\n"])
def test_real_tokenizers_stop_at_every_tag(tok, tag: str, after: str):
  name = tag[2:-1]
  before = roles.wrap("think", "w</wiki_search <code>x") + f"<{name}>x"
  ids = tok.encode(before + tag + after)
  table = compile_stops(UNIFIED.yield_tags, tok, tok.vocab_size)
  place, found = run(table, ids)
  assert found == tag
  assert tok.decode(ids[: place + 1]).startswith(before + tag)
  assert not tok.decode(ids[:place]).startswith(before + tag)


def test_ids_without_bytes_change_nothing():
  tok = toy.tokenizer()
  size = tok.vocab_size + 20
  table = compile_stops(UNIFIED.yield_tags, tok, size)
  assert table.class_V.shape == (size,)
  states = np.arange(len(table.next_SC))
  for i in range(tok.vocab_size, size):
    np.testing.assert_array_equal(table.next_SC[:, table.class_V[i]], states)
    assert not table.stop_SC[:, table.class_V[i]].any()


def test_tokens_that_act_alike_share_a_class():
  tok = toy.tokenizer()
  table = compile_stops(UNIFIED.yield_tags, tok, tok.vocab_size)
  classes = table.next_SC.shape[1]
  assert classes == table.class_V.max() + 1 < 64
  columns = np.concatenate([table.next_SC, table.stop_SC]).T
  assert len(np.unique(columns, axis=0)) == classes


def test_a_model_smaller_than_the_tokenizer_is_refused():
  tok = toy.tokenizer()
  with pytest.raises(ValueError, match=rf"{tok.vocab_size} ids.*set model\.vocab_size"):
    compile_stops(UNIFIED.yield_tags, tok, tok.vocab_size - 1)

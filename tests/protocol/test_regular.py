"""The regular-language combinators, compared with Python's `re`."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol.grammar import regular
from coa_jax.protocol.grammar.regular import (
  ByteTable,
  byte,
  choice,
  many,
  maybe,
  row,
  text,
)

PAIRS = {
  "ab": text("ab"),
  "(?i:ab)": text("ab", cased=False),
  "": row(),
  "(ab|a)*": many(choice(text("ab"), text("a"))),
  "a?b?": row(maybe(text("a")), maybe(text("b"))),
  "(?:a|b)*c(?:a*b)*": row(
    many(byte(b"ab")), text("c"), many(row(many(text("a")), text("b")))
  ),
  "(?:(?:a*)*b|c)*": many(choice(row(many(many(text("a"))), text("b")), text("c"))),
}


def accepts(table: ByteTable, word: bytes) -> bool:
  """Whether the table accepts the whole word."""
  state = 0
  for b in word:
    state = table.next_SX[state, b]
    if state < 0:
      return False
  return bool(table.accepts_S[state])


@pytest.mark.parametrize("pattern", list(PAIRS))
@given(word=st.text("abcA", max_size=8))
def test_a_language_is_the_regular_expression(pattern: str, word: str):
  table = regular.compile_language(PAIRS[pattern])
  assert accepts(table, word.encode()) == bool(re.fullmatch(pattern, word))


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=4), st.text("abc"))
def test_words_are_found_where_they_end(words: list[str], read: str):
  next_SX, stop_S = regular.find_words([w.encode() for w in words])
  state = 0
  for end, b in enumerate(read.encode(), 1):
    state = next_SX[state, b]
    ending = [w for w in words if read[:end].endswith(w)]
    if not ending:
      assert stop_S[state] == 0
    else:
      assert words[stop_S[state] - 1] == max(ending, key=len)


@pytest.mark.parametrize("pattern", list(PAIRS))
@given(word=st.text("abcA", max_size=8))
def test_a_smaller_table_reads_the_same(pattern: str, word: str):
  table = regular.compile_language(PAIRS[pattern])
  # The same table twice in one: every state has an equivalent.
  S = len(table.accepts_S)
  shifted = np.where(table.next_SX >= 0, table.next_SX + S, -1)
  accepts_S = np.concatenate([table.accepts_S] * 2)
  small, new_S = regular.minimise(np.concatenate([table.next_SX, shifted]), accepts_S)
  kept = np.zeros(len(small), bool)
  kept[new_S[accepts_S]] = True
  assert len(small) <= S
  assert accepts(ByteTable(small, kept), word.encode()) == accepts(table, word.encode())

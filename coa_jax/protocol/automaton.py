"""A variant's yield points, compiled to a token automaton.

Decoding must stop after the token that completes a tool's closing tag, however the
tokenizer splits that tag. An Aho-Corasick automaton over bytes is lifted to tokens: one
table look-up per sampled token says the next state and whether a tag was completed.
Tokens with the same column share a class, so a 150k vocabulary costs kilobytes.

Source: Aho and Corasick 1975, "Efficient string matching".
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import Tokenizer


@dataclasses.dataclass(frozen=True)
class Automaton:
  """Tables over states S and token classes C; state 0 is the start.

  Attributes:
    class_V: the class of each token.
    next_SC: the state after a token.
    stop_SC: 0, or 1 + the index in `tags` of the closing tag that the token completes.
    tags: the closing tags that stop decoding (`Variant.yield_tags`).
  """

  class_V: np.ndarray
  next_SC: np.ndarray
  stop_SC: np.ndarray
  tags: tuple[str, ...]


def compile_stops(variant: Variant, tokenizer: Tokenizer, vocab_size: int) -> Automaton:
  """Compiles `variant.yield_tags` for a tokenizer.

  Args:
    variant: whose tools' and answer's closing tags stop decoding.
    tokenizer: gives each id's bytes.
    vocab_size: V of the model; ids past the tokenizer's own have no bytes.

  Raises:
    ValueError: the tokenizer has more ids than the model.
  """
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
      f"{vocab_size} rows; set model.vocab_size to at least the former"
    )
  next_SX, stop_S = _byte_automaton([t.encode() for t in variant.yield_tags])
  start_S = np.arange(len(stop_S))
  classes: dict[bytes, int] = {}
  columns, class_V = [], np.zeros(vocab_size, np.int32)
  pad = [b""] * (vocab_size - tokenizer.vocab_size)
  for token, text in enumerate(tokenizer.bytes_of + pad):
    state_S, hit_S = start_S, np.zeros_like(stop_S)
    for byte in text:
      state_S = next_SX[state_S, byte]
      hit_S = np.maximum(hit_S, stop_S[state_S])
    column = np.stack([state_S, hit_S])
    index = classes.setdefault(column.tobytes(), len(classes))
    if index == len(columns):
      columns.append(column)
    class_V[token] = index
  next_SC, stop_SC = np.stack(columns, axis=-1).astype(np.int32)
  return Automaton(class_V, next_SC, stop_SC, variant.yield_tags)


def _byte_automaton(patterns: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """next_SX over 256 bytes, and stop_S: 1 + the pattern that ends in a state."""
  trie: list[dict[int, int]] = [{}]
  stop = [0]
  for index, pattern in enumerate(patterns, 1):
    state = 0
    for byte in pattern:
      if byte not in trie[state]:
        trie[state][byte] = len(trie)
        trie.append({})
        stop.append(0)
      state = trie[state][byte]
    stop[state] = index
  next_SX = np.zeros((len(trie), 256), np.int64)
  fail = [0] * len(trie)
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    # The longest proper suffix comes earlier in breadth-first order, so it is done.
    if state:
      next_SX[state] = next_SX[fail[state]]
      stop[state] = stop[state] or stop[fail[state]]
    for byte, child in trie[state].items():
      fail[child] = int(next_SX[state, byte]) if state else 0
      next_SX[state, byte] = child
      queue.append(child)
  return next_SX, np.array(stop)

"""A variant's yield points and its grammar, compiled to token automata.

Decoding must stop after the token that completes a tool's closing tag, however the
tokenizer splits this tag; and a constrained policy may write a token only if a
well-formed trajectory can still follow. Both are automata over bytes, lifted to tokens:
one table look-up per sampled token. Tokens with the same column share a class, so a
150k vocabulary costs one number per token and a small table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from coa_jax.protocol.grammar.language import compile_grammar
from coa_jax.protocol.grammar.regular import find_words
from coa_jax.protocol.grammar.tables import Automaton, Constraint
from coa_jax.protocol.roles import Variant, tags_of
from coa_jax.protocol.tokens import Tokenizer


def compile_stops(
  texts: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> Automaton:
  """Compiles stop conditions for a tokenizer.

  Args:
    texts: stop decoding, e.g. `variant.yield_tags`.
    tokenizer: maps ids to bytes.
    vocab_size: the model's V; ids beyond the tokenizer's have no bytes.

  Raises:
    ValueError: the tokenizer has more ids than the model.
  """
  _check_fit(tokenizer, vocab_size)
  next_SX, stop_S = find_words([t.encode() for t in texts])

  # --- A token's effect: the next state, and the tag it completes.
  S = len(stop_S)
  start = np.stack([np.arange(S), np.zeros(S, np.int64)])

  def read(before_2S: np.ndarray, byte: int) -> np.ndarray:
    state_S = next_SX[before_2S[0], byte]
    return np.stack([state_S, np.maximum(before_2S[1], stop_S[state_S])])

  # Bytes with the same transitions in every state are read only once.
  _, byte_X = np.unique(next_SX, axis=1, return_inverse=True)
  class_V, columns = _lift(tokenizer.bytes_of, vocab_size, start, read, byte_X)
  next_SC, stop_SC = np.stack(columns, axis=-1).astype(np.int32)
  return Automaton(class_V, next_SC, stop_SC, tuple(texts))


def compile_constraint(
  variant: Variant, tokenizer: Tokenizer, vocab_size: int
) -> Constraint:
  """Compiles the variant's grammar for a tokenizer.

  Control tokens (<|im_end|> and the like) are never allowed, nor are ids without bytes;
  a tag is allowed as one added token or spelt out.

  Raises:
    ValueError: the tokenizer has more ids than the model, or cannot spell the tags.
  """
  _check_fit(tokenizer, vocab_size)
  grammar = compile_grammar(variant)

  # --- Each token's bytes; control tokens count as ids without bytes.
  tags = tags_of(variant.tags)
  texts = list(tokenizer.bytes_of)
  for i, name in tokenizer.added.items():
    if name not in tags:
      texts[i] = b""

  # --- The state after each token class. The added last row belongs to state -1: a
  # refused text stays refused.
  next_SX = np.append(grammar.next_SX, np.full((1, 256), -1), axis=0)
  _, byte_X = np.unique(next_SX, axis=1, return_inverse=True)
  start = np.arange(len(grammar.ends_S))
  class_V, columns = _lift(
    texts, vocab_size, start, lambda before_S, byte: next_SX[before_S, byte], byte_X
  )
  # Class 0 has the ids without bytes: they are never allowed.
  columns[0] = np.full_like(columns[0], -1)
  next_SC = np.stack(columns, axis=-1)

  # --- Every state must lead on, by a token or an observation, or be an end.
  stuck = (next_SC < 0).all(axis=1) & (grammar.resume_S < 0) & ~grammar.ends_S
  if stuck.any():
    raise ValueError(
      "the tokenizer has no tokens for some bytes, so the grammar could not continue "
      f"in {int(stuck.sum())} of {len(stuck)} states; a byte-level one has all 256"
    )
  # The table is stored on a device next to the model: 16 bits if they suffice.
  small = np.int16 if len(stuck) < 2**15 else np.int32
  return Constraint(class_V, next_SC.astype(small), grammar.resume_S, grammar.ends_S)


def _check_fit(tokenizer: Tokenizer, vocab_size: int) -> None:
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
      f"{vocab_size} rows; set model.vocab_size to at least the former"
    )


def _lift(
  texts: Sequence[bytes],
  vocab_size: int,
  start: np.ndarray,
  read: Callable[[np.ndarray, int], np.ndarray],
  byte_X: np.ndarray,
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Computes class_V and each class's transitions; class 0 is the empty string.

  Args:
    texts: each token's bytes; ids beyond the list have none.
    vocab_size: V.
    start: the empty string's transitions.
    read: transitions, and the next byte -> the transitions after this byte.
    byte_X: each byte's class; bytes in a class have the same transitions.
  """
  # --- Tokens by their bytes; each class is represented by its first byte.
  first: dict[int, int] = {}
  for b, n in enumerate(byte_X.reshape(-1).tolist()):
    first.setdefault(n, b)
  same = bytes(first[n] for n in byte_X.reshape(-1).tolist())
  spelt: dict[bytes, list[int]] = {}
  for token, t in enumerate(texts):
    spelt.setdefault(t.translate(same), []).append(token)

  # --- Every spelling's effect; equal effects are one class.
  classes = {start.tobytes(): 0}
  columns = [start]
  class_V = np.zeros(vocab_size, np.int32)
  # Sorted, so that the effects of a word's prefixes are on the stack.
  stack: list[np.ndarray] = [start]
  last = b""
  for word in sorted(spelt):
    shared = _count_shared(last, word)
    del stack[shared + 1 :]
    for b in word[shared:]:
      stack.append(read(stack[-1], b))
    last = word
    index = classes.setdefault(stack[-1].tobytes(), len(classes))
    if index == len(columns):
      columns.append(stack[-1])
    class_V[spelt[word]] = index
  return class_V, columns


def _count_shared(a: bytes, b: bytes) -> int:
  """Counts the bytes in two words' common prefix."""
  for i, (x, y) in enumerate(zip(a, b, strict=False)):
    if x != y:
      return i
  return min(len(a), len(b))

"""Regular languages over bytes: a few combinators, compiled to a table.

`language.py` builds a protocol variant's grammar from these combinators.

Source: Thompson's construction and the subset construction, as in Aho, Lam, Sethi and
Ullman, "Compilers", section 3.7.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

ANY = frozenset(range(256))
WHITE = frozenset(b" \t\n\r\f\v")  # `tool_bodies.WHITE`
DIGITS = frozenset(b"0123456789")
WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")


@dataclasses.dataclass(frozen=True)
class Language:
  """An expression: one byte from a set, or a row, choice or repetition of parts.

  Attributes:
    kind: bytes, row, choice or many.
    parts: the parts of a row or choice; the only part of `many`.
    among: the allowed set, for bytes.
  """

  kind: str
  parts: tuple[Language, ...] = ()
  among: frozenset[int] = frozenset()


def byte(among: Iterable[int]) -> Language:
  """One byte among these."""
  return Language("bytes", among=frozenset(among))


def row(*parts: Language) -> Language:
  """The parts one after another; the empty string if there are none."""
  return Language("row", parts)


def choice(*parts: Language) -> Language:
  """One of the parts."""
  return Language("choice", parts)


def many(part: Language) -> Language:
  """The part, zero or more times."""
  return Language("many", (part,))


def maybe(part: Language) -> Language:
  """The part or nothing."""
  return choice(part, row())


def text(literal: str, cased: bool = True) -> Language:
  """A literal; if not `cased`, ASCII letters match in either case."""
  if cased:
    return row(*(byte([b]) for b in literal.encode()))
  return row(*(byte({ord(c.lower()), ord(c.upper())}) for c in literal))


def filled(first: frozenset[int], rest: Language) -> Language:
  """White space, then a text with its first other byte in `first`."""
  return row(many(byte(WHITE)), byte(first - WHITE), rest)


@dataclasses.dataclass(frozen=True)
class ByteTable:
  """A deterministic automaton; state 0 is the start.

  Attributes:
    next_SX: the state after a byte, or -1 if no word continues with this byte.
    accepts_S: True if a word may end.
  """

  next_SX: np.ndarray
  accepts_S: np.ndarray


class _Nfa:
  """A nondeterministic automaton, built part by part (Thompson's construction)."""

  def __init__(self) -> None:
    self.edges: list[list[tuple[frozenset[int], int]]] = []  # state -> (bytes, target)
    self.free: list[list[int]] = []  # state -> targets reached without a byte

  def add_state(self) -> int:
    self.edges.append([])
    self.free.append([])
    return len(self.edges) - 1

  def add(self, part: Language, start: int) -> int:
    """Adds `part` from `start` on; returns its end state."""
    if part.kind == "bytes":
      end = self.add_state()
      self.edges[start].append((part.among, end))
      return end
    if part.kind == "row":
      for inner in part.parts:
        start = self.add(inner, start)
      return start
    end = self.add_state()
    if part.kind == "many":
      # A separate state, so that paths to `start` cannot enter the loop late.
      loop = self.add_state()
      self.free[start].append(loop)
      self.free[self.add(part.parts[0], loop)].append(loop)
      self.free[loop].append(end)
      return end
    for inner in part.parts:
      begin = self.add_state()
      self.free[start].append(begin)
      self.free[self.add(inner, begin)].append(end)
    return end

  def closure(self, states: Iterable[int]) -> frozenset[int]:
    """Returns these states and all states reachable from them without a byte."""
    reached = set(states)
    stack = list(reached)
    while stack:
      for target in self.free[stack.pop()]:
        if target not in reached:
          reached.add(target)
          stack.append(target)
    return frozenset(reached)


def compile_language(language: Language) -> ByteTable:
  """Compiles a language into a table of its reachable states."""
  nfa = _Nfa()
  final = nfa.add(language, nfa.add_state())

  # --- Subset construction: a table state is a set of NFA states.
  sets = [nfa.closure([0])]
  number = {sets[0]: 0}
  rows = []
  for current in sets:  # grows during the loop
    targets: list[set[int]] = [set() for _ in range(256)]
    for state in current:
      for among, target in nfa.edges[state]:
        for b in among:
          targets[b].add(target)
    # Many bytes lead to the same targets: each closure is computed once.
    numbers: dict[frozenset[int], int] = {}
    out = np.full(256, -1, np.int64)
    for b, reached in enumerate(targets):
      if not reached:
        continue
      key = frozenset(reached)
      if key not in numbers:
        after = nfa.closure(reached)
        if after not in number:
          number[after] = len(sets)
          sets.append(after)
        numbers[key] = number[after]
      out[b] = numbers[key]
    rows.append(out)

  # --- The same language with the fewest states.
  accepts_S = np.array([final in states for states in sets])
  next_SX, new_S = minimise(np.stack(rows), accepts_S)
  accepts = np.zeros(len(next_SX), bool)
  accepts[new_S[accepts_S]] = True
  return ByteTable(next_SX, accepts)


def find_words(words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """Builds an automaton that reads any text and finds the words' ends.

  Source: Aho and Corasick 1975, "Efficient string matching".

  Returns:
    next_SX over 256 bytes, and stop_S: 1 + the index of the longest word ending in a
      state, or 0.
  """
  # --- A trie: a state is a prefix of some word.
  trie: list[dict[int, int]] = [{}]
  stop = [0]
  for index, word in enumerate(words, 1):
    state = 0
    for b in word:
      if b not in trie[state]:
        trie[state][b] = len(trie)
        trie.append({})
        stop.append(0)
      state = trie[state][b]
    stop[state] = index

  # --- If no word continues with a byte: continue from the prefix's longest suffix.
  next_SX = np.zeros((len(trie), 256), np.int64)
  fail = [0] * len(trie)
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    # The longest proper suffix comes earlier in breadth-first order, so it is done.
    if state:
      next_SX[state] = next_SX[fail[state]]
      stop[state] = stop[state] or stop[fail[state]]
    for b, child in trie[state].items():
      if state:
        fail[child] = int(next_SX[state, b])
      next_SX[state, b] = child
      queue.append(child)
  return next_SX, np.array(stop)


def minimise(next_SX: np.ndarray, kind_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Merges equivalent states (Moore's partition refinement).

  Args:
    next_SX: a table; -1 is the dead state.
    kind_S: each state's kind; different kinds stay separate.

  Returns:
    The smaller table (state 0 holds the old state 0), and each old state's new state.
  """
  # Bytes with the same transitions share one column.
  _, columns = np.unique(next_SX, axis=1, return_index=True)
  ways_SX = next_SX[:, columns]
  # Split blocks by the blocks of their successors, until nothing changes.
  block_S = _numbered(np.asarray(kind_S)[:, None])
  while True:
    # The dead state is block -1, appended so that index -1 reads it.
    after_SX = np.append(block_S, -1)[ways_SX]
    new_S = _numbered(np.concatenate([block_S[:, None], after_SX], axis=1))
    if new_S.max() == block_S.max():
      break
    block_S = new_S
  # Any state represents its block.
  first = np.unique(block_S, return_index=True)[1]
  return np.append(block_S, -1)[next_SX[first]], block_S


def _numbered(rows: np.ndarray) -> np.ndarray:
  """Numbers rows by first appearance; equal rows get the same number."""
  seen: dict[bytes, int] = {}
  # Hashing is many times faster than numpy's row sort.
  rows = np.ascontiguousarray(rows, np.int32)
  return np.array([seen.setdefault(r.tobytes(), len(seen)) for r in rows])

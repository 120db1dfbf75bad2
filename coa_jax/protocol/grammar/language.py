"""A variant's rules as a byte automaton: which texts a policy may write.

`parser` judges a finished text; this table tells after every byte whether a well-formed
trajectory can still follow. It has no observations: a tool's closing tag ends a turn,
and the policy's next byte comes after the observation.

A tool's `tools.SPECS` row defines its allowed content. Four rules are stricter than the
parser's: a `visual_inspector` call has only one JSON form; so has a `tool` call (flat
arguments; the variant's functions); white space is ASCII; and at most `MAX_WHITE` bytes
of white space separate two spans.

budget: one language, from the rules of a span to the table.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import numpy as np

from coa_jax.protocol import roles, tools
from coa_jax.protocol.grammar.regular import (
  ANY,
  DIGITS,
  WHITE,
  WORD,
  ByteTable,
  Language,
  byte,
  choice,
  compile_language,
  filled,
  find_words,
  many,
  maybe,
  minimise,
  row,
  text,
)
from coa_jax.protocol.roles import ANSWER, CONTEXT_SUMMARY, START, THINK, Variant

# White space bytes before a tag; without a limit an untrained model writes newlines
# until it is cut off.
MAX_WHITE = 8

_WHITE = many(byte(WHITE))
_ANY = many(byte(ANY))


@dataclasses.dataclass(frozen=True)
class ByteGrammar:
  """A variant's byte automaton; state 0 is a trajectory's start.

  Attributes:
    next_SX: the state after a byte, or -1 if the byte is not allowed.
    resume_S: the state after the observation, for states after a tool's closing tag (no
      byte is allowed in these); for state 0 the state after a summary that begins the
      context; -1 in others.
    ends_S: True after the answer's closing tag.
  """

  next_SX: np.ndarray
  resume_S: np.ndarray
  ends_S: np.ndarray


def _score(scores: str) -> Language:
  """As in `roles.check_score`: exactly one number, from `scores`."""
  other = many(byte(ANY - DIGITS))
  before = maybe(row(other, byte(ANY - DIGITS - {ord("-")})))
  return row(before, byte(scores.encode()), other)


def _graded(criteria: tuple[str, ...], grades: tuple[str, ...]) -> Language:
  """As in `roles.reflection_grades`: some criterion has some grade."""
  # A grade ends with its word: "poorly" is not a grade.
  end = maybe(row(byte(ANY - WORD), _ANY))
  return row(
    _ANY, _any_case(criteria), _WHITE, text(":"), _WHITE, _any_case(grades), end
  )


def _any_case(words: tuple[str, ...]) -> Language:
  """One of the words, ignoring case."""
  return choice(*(text(w, cased=False) for w in words))


# Names that a span's content can earn; they decide the next span.
_PASS = "pass"
_POOR = "poor"


def _rules(
  role: str, graded: bool, functions: tuple[str, ...], parallel: int
) -> tuple[list[Language], dict[str, Language]]:
  """Returns a role's required languages, and name -> the language that earns it."""
  if role == tools.FUNCTION_TAG and parallel > 1:
    return [tools.parallel_language(functions, parallel)], {}
  any_text = filled(ANY, _ANY)
  spec = tools.SPECS.get(role)
  if spec is not None and spec.grammar is not None:
    return [spec.grammar(functions)], {}
  if role == roles.DOUBLE_CHECK:
    return [_score("1234")], {_PASS: _score("34")}
  if role == roles.REFLECTION:
    must = [any_text]
    if graded:
      must += [_graded((c,), roles.GRADES) for c in roles.CRITERIA]
    return must, {_POOR: _graded(roles.CRITERIA, ("poor",))}
  return [any_text], {}


@dataclasses.dataclass(frozen=True)
class _Content:
  """A role's content and closing tag: `next_SX`, and the names earned at its end.

  `earns_S` has the earned names of `_rules` after a complete closing tag with valid
  content; None in all other states.
  """

  next_SX: np.ndarray
  earns_S: list[frozenset[str] | None]


@functools.cache
def _content(
  role: str, graded: bool, functions: tuple[str, ...], parallel: int
) -> _Content:
  # --- One table for each language, and one that finds the end of the first tag.
  must, earned = _rules(role, graded, functions, parallel)
  close = text(roles.close_tag(role))
  # A language's table runs over content and closing tag alike.
  tables = [compile_language(row(part, close)) for part in (*must, *earned.values())]
  tags, own = _tags(role)
  # Bytes with equal columns in all tables behave alike: one byte per group is tried.
  columns = np.concatenate([t.next_SX for t in (tags, *tables)])
  _, firsts, kind_X = np.unique(columns, axis=1, return_index=True, return_inverse=True)

  # --- The product of all tables: a state is a tuple with one state per table.
  start = (0,) * (len(tables) + 1)
  number = {start: 0}
  states = [start]
  rows = []
  earns: list[frozenset[str] | None] = []
  for current in states:  # grows during the loop
    of_tags, *of_tables = current
    if tags.accepts_S[of_tags]:
      # A tag ends here. It is this role's, or nothing may follow.
      accepted = []
      for table, s in zip(tables, of_tables, strict=True):
        accepted.append(s >= 0 and bool(table.accepts_S[s]))
      names = None
      if of_tags == own and all(accepted[: len(must)]):
        names = frozenset(itertools.compress(earned, accepted[len(must) :]))
      earns.append(names)
      rows.append(np.full(256, -1))
      continue
    earns.append(None)
    # Each table's next state; a table that has refused the text stays refused.
    ways = [tags.next_SX[of_tags, firsts]]
    for table, s in zip(tables, of_tables, strict=True):
      way = np.full(len(firsts), -1)
      if s >= 0:
        way = table.next_SX[s, firsts]
      ways.append(way)
    out = np.full(len(firsts), -1)
    for kind, targets in enumerate(np.stack(ways, axis=1).tolist()):
      after = tuple(targets)
      if min(after[1 : 1 + len(must)]) < 0:
        continue  # a required language cannot be reached
      if after not in number:
        number[after] = len(states)
        states.append(after)
      out[kind] = number[after]
    rows.append(out[kind_X.reshape(-1)])

  # --- The same automaton with the fewest states; states with different results stay
  # separate.
  kinds: dict[frozenset[str] | None, int] = {}
  kind_S = np.array([kinds.setdefault(e, len(kinds)) for e in earns])
  next_SX, new_S = minimise(np.stack(rows), kind_S)
  small: list[frozenset[str] | None] = [None] * len(next_SX)
  for old, new in enumerate(new_S):
    small[new] = earns[old]
  return _Content(next_SX, small)


def _tags(role: str) -> tuple[ByteTable, int]:
  """Returns a table that accepts at any protocol tag, and `role`'s closing state."""
  patterns = [tag.encode() for tag in roles.tags_of(roles.SPANS)]
  next_SX, stop_S = find_words(patterns)
  own = 1 + patterns.index(roles.close_tag(role).encode())
  return ByteTable(next_SX, stop_S > 0), int(np.flatnonzero(stop_S == own)[0])


@dataclasses.dataclass(frozen=True)
class _Place:
  """The state of `parser`'s rules between two spans."""

  last: str = START
  thinking: bool = False
  required: str | None = None
  plans: int = 0
  calls: int = 0
  summarised: bool = False  # a summary has followed the last observation

  def allowed(self, variant: Variant) -> list[str]:
    """Returns the roles allowed here."""
    follows = variant.follows[self.last]
    out = []
    if not self.thinking and follows & variant.think_allowed:
      out.append(THINK)
    for role in (*variant.roles, *variant.tools):
      if role not in follows:
        continue
      if self.thinking and role not in variant.think_allowed:
        continue
      if not self.thinking and role in variant.think_required:
        continue
      if role == roles.PLAN and self.plans == variant.max_plans:
        continue
      # A gate's requirement: a plan after a poor grade, the answer or more work after a
      # score.
      if self.required in (roles.PLAN, ANSWER) and role != self.required:
        continue
      if role == ANSWER and (self.required == "redo" or self.calls < variant.min_calls):
        continue
      out.append(role)
    # Directly after an observation, and once.
    read = self.last in variant.tools and not self.thinking and not self.summarised
    if variant.summaries and read:
      out.append(CONTEXT_SUMMARY)
    return out

  def entered(self, role: str, variant: Variant) -> _Place:
    """Returns the place inside a span of `role`."""
    if role == THINK:
      return dataclasses.replace(self, thinking=True)
    if role == CONTEXT_SUMMARY:
      return dataclasses.replace(self, summarised=True)
    # Count only as far as the rules ask: the number of states must stay finite.
    plans = 0
    if variant.max_plans is not None:
      plans = self.plans + (role == roles.PLAN)
    calls = self.calls + (role in variant.tools)
    return _Place(role, plans=plans, calls=min(calls, variant.min_calls))

  def closed(self, earned: frozenset[str]) -> _Place:
    """Returns the place after a span, from the names its content earned."""
    if self.thinking:
      return self
    required = None
    if self.last == roles.REFLECTION and _POOR in earned:
      required = roles.PLAN
    if self.last == roles.DOUBLE_CHECK:
      required = ANSWER if _PASS in earned else "redo"
    return dataclasses.replace(self, required=required)


def compile_grammar(variant: Variant) -> ByteGrammar:
  """Compiles a variant's policy texts into a byte automaton.

  budget: one language, rule by rule.
  """
  # States are ("open", place, begun, white), ("in", place, role, content state), and
  # ("stop", place) after a closing tag that stops decoding.
  start = ("open", _Place(), "", 0)
  number: dict[tuple, int] = {start: 0}
  states = [start]
  rows = []

  def index(state: tuple) -> int:
    if state not in number:
      number[state] = len(states)
      states.append(state)
    return number[state]

  # A summary replaces earlier plans and calls; what follows a call follows it.
  after_summary = None
  if variant.summaries:
    called = _Place(variant.tools[0], plans=variant.max_plans or 0)
    called = dataclasses.replace(called, calls=variant.min_calls, summarised=True)
    after_summary = index(("open", called, "", 0))

  # --- Each state's successors, byte by byte.
  for current in states:  # grows during the loop
    out = np.full(256, -1)
    rows.append(out)
    if current[0] == "stop":
      # No byte: the observation follows. The state after it needs a number.
      if current[1].last != ANSWER:
        index(("open", current[1], "", 0))
    elif current[0] == "open":
      # White space before a tag, or an allowed tag's next byte.
      _, place, begun, white = current
      if not begun and white < MAX_WHITE:
        for b in WHITE:
          out[b] = index(("open", place, "", white + 1))
      for role in place.allowed(variant):
        tag = roles.open_tag(role)
        if not tag.startswith(begun):
          continue
        so_far = tag[: len(begun) + 1]
        if so_far == tag:
          entered = place.entered(role, variant)
          out[ord(tag[-1])] = index(("in", entered, role, 0))
        else:
          out[ord(so_far[-1])] = index(("open", place, so_far, 0))
    else:
      # Inside a span: its content continues, or its closing tag is complete.
      _, place, role, inner = current
      functions: tuple[str, ...] = ()
      if role == tools.FUNCTION_TAG:
        functions = variant.callable_names
      content = _content(role, variant.graded, functions, variant.parallel)
      row = content.next_SX[inner]
      # Most bytes lead to one state: visit each state once, ordered by its first byte.
      _, firsts = np.unique(row, return_index=True)
      for after in row[np.sort(firsts)].tolist():
        if after < 0:
          continue
        to_after_X = row == after
        earned = content.earns_S[after]
        if earned is None:
          out[to_after_X] = index(("in", place, role, after))
          continue
        then = place.closed(earned)
        if role in (ANSWER, CONTEXT_SUMMARY, *variant.tools):
          out[to_after_X] = index(("stop", then))
        else:
          out[to_after_X] = index(("open", then, "", 0))

  # --- The states after a tool's closing tag, and the trajectory's ends.
  resume = np.full(len(states), -1)
  ends = np.zeros(len(states), bool)
  for i, s in enumerate(states):
    if s[0] == "stop":
      ends[i] = s[1].last == ANSWER
      if not ends[i]:
        resume[i] = number["open", s[1], "", 0]
  if after_summary is not None:
    resume[0] = after_summary
  return _trimmed(np.stack(rows), resume, ends)


def _trimmed(
  next_SX: np.ndarray, resume_S: np.ndarray, ends_S: np.ndarray
) -> ByteGrammar:
  """Removes dead ends, and merges equivalent states."""
  # --- Backwards from the ends: the states that lead to an end.
  before: list[set[int]] = [set() for _ in ends_S]
  for state, after in enumerate(next_SX):
    for target in {*after.tolist(), int(resume_S[state])} - {-1}:
      before[target].add(state)
  alive = set(np.flatnonzero(ends_S).tolist())
  queue = collections.deque(alive)
  while queue:
    for state in before[queue.popleft()] - alive:
      alive.add(state)
      queue.append(state)

  # --- Only the live states, in their order, then minimised.
  live = sorted(alive)
  number_S = np.full(len(ends_S) + 1, -1)  # the last row is the dead state
  number_S[live] = np.arange(len(live))
  # An observation is one more way out of a state, as a 257th byte.
  table = number_S[np.concatenate([next_SX, resume_S[:, None]], axis=1)[live]]
  small, new_S = minimise(table, ends_S[live].astype(int))
  ends = np.zeros(len(small), bool)
  ends[new_S[ends_S[live]]] = True
  return ByteGrammar(small[:, :256], small[:, 256], ends)

"""Parses a trajectory's text view into spans, with a typed verdict.

The parser never guesses: for text that is not a well-formed trajectory of the variant,
it returns the first fault's kind, place and reason, and all earlier spans. Round trip:
`"".join(span.text for span in parse(text, variant).spans) == text` whenever the verdict
is ok.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from coa_jax.protocol import roles
from coa_jax.protocol.roles import (
  ANSWER,
  CONTEXT_SUMMARY,
  OBSERVATION,
  START,
  THINK,
  Variant,
)
from coa_jax.protocol.tool_bodies import WHITE, parse_function_calls
from coa_jax.protocol.tools import FUNCTION_TAG, SPECS


class ParseVerdict(enum.StrEnum):
  """A parse's verdict: ok, or the kind of its first fault."""

  OK = "ok"
  MALFORMED = "malformed"  # content against the span's rules, or stray text
  UNKNOWN_TOOL = "unknown_tool"  # a span with a tag outside the variant
  UNCLOSED = "unclosed"  # an unclosed span, or a trajectory without an answer
  NESTED = "nested"  # a tag inside a span, or a closing tag without an opening one
  ILLEGAL_TRANSITION = "illegal_transition"  # a span not allowed after the previous one


@dataclasses.dataclass(frozen=True)
class Span:
  """One tagged span.

  Attributes:
    role: its tag.
    content: the text between the tags, without the leading space of `roles.wrap`
      (unescaped for an observation).
    start: offset of the opening tag in the text.
    end: offset after the closing tag and its trailing white space.
    text: text[start:end]; the first span also owns leading white space.
  """

  role: str
  content: str
  start: int
  end: int
  text: str


@dataclasses.dataclass(frozen=True)
class Parse:
  """A text's spans up to its first fault, and this fault."""

  spans: tuple[Span, ...]
  verdict: ParseVerdict
  detail: str = ""
  offset: int = 0  # the fault's offset

  @property
  def ok(self) -> bool:
    """True if the whole text is a well-formed trajectory."""
    return self.verdict == ParseVerdict.OK

  @property
  def answer(self) -> str | None:
    """The last `answer` span's content, stripped; None if there is none."""
    for span in reversed(self.spans):
      if span.role == ANSWER:
        return span.content.strip()
    return None


# Anything like a tag at the top level; inside text only protocol tags count.
_TOP = re.compile(r"\s*<([A-Za-z_][A-Za-z0-9_]*)>", re.ASCII)


class _Fault(Exception):
  def __init__(self, verdict: ParseVerdict, detail: str, offset: int):
    super().__init__(detail)
    self.parse = (verdict, detail, offset)


def parse(text: str, variant: Variant, complete: bool = True) -> Parse:
  """Parses a trajectory's text (everything after the prompt).

  Args:
    text: the text view, observations escaped (`roles.escape`).
    variant: the dialect to check against.
    complete: True if the text must end with an `answer`; False to judge a prefix that
      ends at a span boundary.

  Returns:
    The spans before the first fault and the fault; see `ParseVerdict`.
  """
  spans: list[Span] = []
  try:
    rules = _Rules(variant)
    position = 0
    # White space alone is not a span.
    while position < len(text) and text[position:].strip(WHITE):
      span = _read_span(text, position, variant)
      rules.accept(span)
      spans.append(span)
      position = span.end
    if complete:
      rules.finish(len(text))
  except _Fault as fault:
    return Parse(tuple(spans), *fault.parse)
  return Parse(tuple(spans), ParseVerdict.OK)


def _read_span(text: str, position: int, variant: Variant) -> Span:
  """Reads the span after `position`'s white space."""
  # --- The opening tag.
  match = _TOP.match(text, position)
  if match is None:
    stripped = text[position:].lstrip(WHITE)
    offset = len(text) - len(stripped)
    if stripped.startswith("</"):
      raise _Fault(ParseVerdict.NESTED, "a closing tag that closes nothing", offset)
    raise _Fault(ParseVerdict.MALFORMED, "text outside every span", offset)
  role = match[1]
  offset = match.start(1) - 1
  if role not in variant.tags:
    detail = f"<{role}> is no span of variant {variant.name!r}"
    raise _Fault(ParseVerdict.UNKNOWN_TOOL, detail, offset)

  # --- The text before the closing tag, or all the rest if there is none.
  close = roles.close_tag(role)
  end = text.find(close, match.end())
  is_closed = end >= 0
  if not is_closed:
    end = len(text)
  content = text[match.end() : end].removeprefix(" ")
  # A tag inside counts first: `<plan> <code>` is nested, though also unclosed.
  inner = roles.find_tag(content)
  if inner is not None:
    raise _Fault(ParseVerdict.NESTED, f"{inner} inside <{role}>", offset)
  if not is_closed:
    raise _Fault(ParseVerdict.UNCLOSED, f"<{role}> is never closed", offset)
  if role == OBSERVATION:
    content = roles.unescape(content)

  # --- Trailing white space belongs to the span, so that spans join to the text.
  end += len(close)
  while end < len(text) and text[end] in WHITE:
    end += 1
  return Span(role, content, offset, end, text[position:end])


class _Rules:
  """The variant's transition rules, fed one span at a time."""

  def __init__(self, variant: Variant):
    self.variant = variant
    self.last = START  # the last span other than think and observation
    self.thinking = False  # the last span is a think
    self.waiting = False  # the last span is a call, and its observation must follow
    self.observed = False  # the last span is an observation
    self.required: str | None = None  # a gate's requirement: "plan", "answer", "redo"
    self.plans = 0
    self.calls = 0

  def accept(self, span: Span) -> None:
    """Checks one span's place and content; raises _Fault."""
    if self.waiting != (span.role == OBSERVATION):
      detail = "no observation after a call" if self.waiting else "stray observation"
      raise _Fault(ParseVerdict.ILLEGAL_TRANSITION, detail, span.start)
    observed, self.observed = self.observed, self.waiting
    if self.waiting:
      self.waiting = False
    elif span.role == CONTEXT_SUMMARY:
      self._summary(span, observed)
    elif span.role == THINK:
      self._think(span)
    else:
      self._check_place(span)
      fault = content_fault(
        span.role, span.content, self.variant.graded, self.variant.parallel
      )
      if fault is not None:
        raise _Fault(ParseVerdict.MALFORMED, fault, span.start)
      self._advance(span)

  def _think(self, span: Span) -> None:
    """Accepts a think if a span allowed next may follow a think."""
    able = self.variant.follows[self.last] & self.variant.think_allowed
    if self.thinking:
      raise _Fault(ParseVerdict.ILLEGAL_TRANSITION, "<think> after <think>", span.start)
    if not able:
      detail = f"<think> after {self.last}"
      raise _Fault(ParseVerdict.ILLEGAL_TRANSITION, detail, span.start)
    self.thinking = True

  def _summary(self, span: Span, observed: bool) -> None:
    """Accepts a summary directly after an observation."""
    if not observed:
      detail = f"<{span.role}> without an observation directly before it"
      raise _Fault(ParseVerdict.ILLEGAL_TRANSITION, detail, span.start)
    fault = content_fault(span.role, span.content)
    if fault is not None:
      raise _Fault(ParseVerdict.MALFORMED, fault, span.start)

  def _check_place(self, span: Span) -> None:
    """Refuses a misplaced span; the table first, then the gates."""
    role = span.role
    variant = self.variant
    detail = None
    if role not in variant.follows[self.last]:
      detail = f"<{role}> after {self.last}"
    elif self.thinking and role not in variant.think_allowed:
      detail = f"<{role}> may not follow a <think>"
    elif not self.thinking and role in variant.think_required:
      detail = f"<{role}> needs a <think> before it"
    elif role == roles.PLAN and self.plans == variant.max_plans:
      detail = f"more than {variant.max_plans} plan"
    elif self.required == "plan" and role != roles.PLAN:
      detail = f"<{role}> after a poor grade; a new plan must come"
    elif self.required == "answer" and role != ANSWER:
      detail = f"<{role}> after a passing score; the answer must come"
    elif self.required == "redo" and role == ANSWER:
      detail = "an answer after a failing score"
    elif role == ANSWER and self.calls < variant.min_calls:
      detail = f"an answer before {variant.min_calls} tool call"
    if detail is not None:
      raise _Fault(ParseVerdict.ILLEGAL_TRANSITION, detail, span.start)

  def _advance(self, span: Span) -> None:
    """Updates the rules' state with an accepted span."""
    self.last = span.role
    self.thinking = False
    self.required = None
    if span.role in self.variant.tools:
      self.waiting = True
      self.calls += 1
    elif span.role == roles.PLAN:
      self.plans += 1
    elif span.role == roles.REFLECTION:
      if roles.has_poor_grade(span.content):
        self.required = "plan"
    elif span.role == roles.DOUBLE_CHECK:
      score = roles.check_score(span.content)
      passed = score is not None and score >= roles.PASS_SCORE
      self.required = "answer" if passed else "redo"

  def finish(self, offset: int) -> None:
    """Checks that the text may end here; raises _Fault."""
    if self.last != ANSWER:
      raise _Fault(ParseVerdict.UNCLOSED, "no answer", offset)


def content_fault(
  role: str, content: str, graded: bool = False, parallel: int = 1
) -> str | None:
  """Describes a fault in a span's content so that a model can correct it; None if ok.

  Args:
    role: the span's tag.
    content: the text between its tags.
    graded: True if a reflection must grade every criterion.
    parallel: maximum calls in a `tool` span.
  """
  if not content.strip(WHITE):
    return f"<{role}> is empty"
  if role == FUNCTION_TAG and parallel > 1:
    calls = parse_function_calls(content)
    if calls is not None:
      return None if len(calls) <= parallel else f"more than {parallel} calls at once"
  if role in SPECS:
    return SPECS[role].find_fault(content)
  if role == roles.DOUBLE_CHECK and roles.check_score(content) is None:
    return "double_check holds exactly one score, 1 to 4"
  if role == roles.REFLECTION and graded:
    missing = set(roles.CRITERIA) - set(roles.reflection_grades(content))
    if missing:
      return "reflection without a grade for " + ", ".join(sorted(missing))
  return None

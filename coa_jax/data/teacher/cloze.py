"""A task-synthesis backend without a model: gaps in page sentences.

The questions come from any text with titles, offline and at no cost:

  Which words fill the gap in "was born in 1961 in ___." on the page Mira Quill?

and one level deeper, if another page names this one:

  ... on the page that fills the gap in "Its mayor is ___, a former" on the page Tarn?

They need the tools, because a page has to be found before its gap can be filled. Unlike
`ChatBackend`'s questions, they are not natural language.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from coa_jax.data.teacher import synthesis
from coa_jax.data.teacher.backend import Message, Reply

_QUESTION = "Which words fill the gap in "
_PAGE = "on the page "
_GAP = "___"
_WORDS_BEFORE = 8  # at most, before a gap
_MIN_WORDS_BEFORE = 4
_WORDS_AFTER = 5
# Possible answers: whole names within a sentence, or numbers.
_SPAN = re.compile(r"(?<=[a-z,] )[A-Z][\w-]+(?: [A-Z][\w-]+)*|\b\d[\d,.]*\d\b")
_NAME_BEFORE = re.compile(r"\b[A-Z][\w.'-]* $")


def answer(agent: str, messages: Sequence[Message]) -> Reply:
  """Replies as an agent of `synthesis`; see `backend.ModelBackend`.

  The guesser always answers "unknown". A reply is empty if a document has no suitable
  gap, or if a gap does not have exactly one filling.
  """
  request = messages[1].content
  if agent == synthesis.READER:
    return Reply(_read(request))
  if agent == synthesis.GUESSER:
    return Reply("ANSWER: unknown")
  title, _, rest = request.removeprefix("Title: ").partition("\nDocument:\n")
  if agent == synthesis.DESCRIBER:
    return Reply(_describe(title, rest))
  return Reply(_ask(title, rest))


def _read(request: str) -> str:
  request = request.removeprefix("Documents:\n")
  documents, _, question = request.rpartition("\nQuestion: ")
  answers = []
  for part in question.split(_QUESTION)[1:]:  # one question, or two combined
    answer = _filled(part, documents)
    if answer is None:
      return ""
    answers.append(answer)
  return f"ANSWER: {' and '.join(answers)}"


def _describe(title: str, rest: str) -> str:
  text, _, subject = rest.rpartition("\nDescribe: ")
  # The first mention with enough text on both sides.
  for mention in re.finditer(re.escape(subject), text):
    gap = _gap(text, mention.span(), title)
    if gap:
      return f"PHRASE: that fills the gap in {gap} {_PAGE}{title}"
  return ""


def _ask(title: str, text: str) -> str:
  gaps = []
  for match in _SPAN.finditer(text):
    if _NAME_BEFORE.search(text[: match.start()]):
      continue  # the end of a longer name
    gap = _gap(text, match.span(), title)
    if gap:
      gaps.append((gap, match[0]))
  if not gaps:
    return ""
  # A random gap, so that questions are not all about a document's first words.
  gap, filling = random.Random(title).choice(gaps)
  return f"QUESTION: {_QUESTION}{gap} {_PAGE}{title}?\nANSWER: {filling}"


def _gap(text: str, span: tuple[int, int], title: str) -> str | None:
  """Quotes a span's context with a gap for the span; None if the context is short."""
  # Leave out the title: the question may have it only once, for `deepen` to replace.
  left = text[: span[0]].rpartition(title)[2]
  right = text[span[1] :].partition(title)[0]
  before = re.search(rf"(?:[^\s\"]+ ){{0,{_WORDS_BEFORE}}}$", left)[0]
  after = re.match(rf"[^\s\"]*(?: [^\s\"]+){{0,{_WORDS_AFTER}}}", right)
  after = after[0].rstrip()
  if len(before.split()) < _MIN_WORDS_BEFORE or not after or _GAP in before + after:
    return None
  return f'"{before}{_GAP}{after}"'


def _filled(part: str, documents: str) -> str | None:
  """Fills a question's first gap; None unless each of its gaps has one filling."""
  # A deeper question has one gap per page: it asks for the first gap, and the others
  # locate that page. Each needs exactly one filling, or the question is ambiguous.
  filled = []
  for gap in re.findall(rf'"([^"]*{_GAP}[^"]*)"', part):
    before, after = map(re.escape, gap.split(_GAP))
    fillings = set(re.findall(rf'{before}([^"\n]{{1,80}}?){after}', documents))
    if len(fillings) != 1:
      return None
    filled.append(fillings.pop())
  return filled[0] if filled else None

"""A backend for task synthesis without a model: gaps in what pages say.

Questions come from any text that has titles, offline and for nothing:

  Which words fill the gap in "was born in 1961 in ___." on the page Mira Quill?

and one deeper, where another page names that one:

  ... on the page that fills the gap in "Its mayor is ___, a former" on the page Tarn?

They need the tools, for a page has to be found before its gap can be filled; they are
no natural language, which `ChatBackend` writes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from coa_jax.teacher import synthesis
from coa_jax.teacher.backend import Message, Reply

_QUESTION = "Which words fill the gap in "
_PAGE = "on the page "
_GAP = "___"
_WORDS_BEFORE = 8  # at most, of a gap
_MIN_WORDS_BEFORE = 4
_WORDS_AFTER = 5
# What is asked for: names within a sentence, whole ones, or a number.
_SPAN = re.compile(r"(?<=[a-z,] )[A-Z][\w-]+(?: [A-Z][\w-]+)*|\b\d[\d,.]*\d\b")
_NAME_BEFORE = re.compile(r"\b[A-Z][\w.'-]* $")


def answer(agent: str, messages: Sequence[Message]) -> Reply:
  """Replies as an agent of `synthesis`; see `backend.ModelBackend`. It never guesses.

  Empty where a document has no gap to ask for, or a gap can be filled in two ways.
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
  for part in question.split(_QUESTION)[1:]:  # one, or two asked together
    answer = _filled(part, documents)
    if answer is None:
      return ""
    answers.append(answer)
  return f"ANSWER: {' and '.join(answers)}"


def _describe(title: str, rest: str) -> str:
  text, _, subject = rest.rpartition("\nDescribe: ")
  # The first mention that has enough around it.
  for mention in re.finditer(re.escape(subject), text):
    gap = _gap(text, mention.span(), title)
    if gap:
      return f"PHRASE: that fills the gap in {gap} {_PAGE}{title}"
  return ""


def _ask(title: str, text: str) -> str:
  gaps = []
  for match in _SPAN.finditer(text):
    if _NAME_BEFORE.search(text[: match.start()]):
      continue  # the end of a name that began before it
    gap = _gap(text, match.span(), title)
    if gap:
      gaps.append((gap, match[0]))
  if not gaps:
    return ""
  # Drawn, so that not every question is of a document's first words.
  gap, filling = random.Random(title).choice(gaps)
  return f"QUESTION: {_QUESTION}{gap} {_PAGE}{title}?\nANSWER: {filling}"


def _gap(text: str, span: tuple[int, int], title: str) -> str | None:
  """What stands around a span, in quotes; None where that is too little to find it."""
  # The title stands in the question once: there a deeper one describes it.
  left = text[: span[0]].rpartition(title)[2]
  right = text[span[1] :].partition(title)[0]
  before = re.search(rf"(?:[^\s\"]+ ){{0,{_WORDS_BEFORE}}}$", left)[0]
  after = re.match(rf"[^\s\"]*(?: [^\s\"]+){{0,{_WORDS_AFTER}}}", right)
  after = after[0].rstrip()
  if len(before.split()) < _MIN_WORDS_BEFORE or not after or _GAP in before + after:
    return None
  return f'"{before}{_GAP}{after}"'


def _filled(part: str, documents: str) -> str | None:
  """What fills the first gap of a question, if all its gaps can be filled one way."""
  # A deeper question has a gap for every page on the way: the first one is asked for,
  # the others say where it stands. All must be filled, or the way is not clear.
  filled = []
  for gap in re.findall(rf'"([^"]*{_GAP}[^"]*)"', part):
    before, after = map(re.escape, gap.split(_GAP))
    fillings = set(re.findall(rf'{before}([^"\n]{{1,80}}?){after}', documents))
    if len(fillings) != 1:
      return None
    filled.append(fillings.pop())
  return filled[0] if filled else None

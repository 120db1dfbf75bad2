"""A brain for task synthesis without a model: gaps in what pages say.

Questions come from any text that has titles, offline and for nothing:

  Which words fill the gap in "was born in 1961 in ___." on the page Mira Quill?

and one deeper, where another page names that one:

  ... on the page that fills the gap in "Its mayor is ___, a former" on the page Tarn?

They need the tools, for a page has to be found before its gap can be filled; they are
no natural language, which `ChatBrain` writes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from coa_jax.teacher import synthesis
from coa_jax.teacher.llm import Message, Reply

_ASK, _PAGE, _GAP = "Which words fill the gap in ", "on the page ", "___"
_BEFORE, _AFTER, _FEWEST = 8, 5, 4  # words around a gap
# What is asked for: names within a sentence, whole ones, or a number.
_SPAN = re.compile(r"(?<=[a-z,] )[A-Z][\w-]+(?: [A-Z][\w-]+)*|\b\d[\d,.]*\d\b")
_NAME_BEFORE = re.compile(r"\b[A-Z][\w.'-]* $")


def answer(agent: str, messages: Sequence[Message]) -> Reply:
  """The reply of an agent of `synthesis`; see `llm.Brain`. It never guesses.

  Empty where a document has no gap to ask for, or a gap can be filled in two ways.
  """
  told = messages[1].content
  if agent == synthesis.READER:
    documents, _, question = told.removeprefix("Documents:\n").rpartition(
      "\nQuestion: "
    )
    found = [_filled(part, documents) for part in question.split(_ASK)[1:]]
    whole = all(f is not None for f in found)
    return Reply(f"ANSWER: {' and '.join(map(str, found))}" if whole else "")
  if agent == synthesis.GUESSER:
    return Reply("ANSWER: unknown")
  title, _, rest = told.removeprefix("Title: ").partition("\nDocument:\n")
  if agent == synthesis.DESCRIBER:
    text, _, named = rest.rpartition("\nDescribe: ")
    gaps = [_gap(text, m.span(), title) for m in re.finditer(re.escape(named), text)]
    gap = next(filter(None, gaps), None)
    return Reply(f"PHRASE: that fills the gap in {gap} {_PAGE}{title}" if gap else "")
  spans = [
    m for m in _SPAN.finditer(rest) if not _NAME_BEFORE.search(rest[: m.start()])
  ]
  gaps = [(_gap(rest, m.span(), title), m[0]) for m in spans]
  gaps = [(gap, span) for gap, span in gaps if gap]
  if not gaps:
    return Reply("")
  gap, span = random.Random(title).choice(gaps)
  return Reply(f"QUESTION: {_ASK}{gap} {_PAGE}{title}?\nANSWER: {span}")


def _gap(text: str, span: tuple[int, int], title: str) -> str | None:
  """What stands around a span, in quotes; None where that is too little to find it."""
  # The title stands in the question once: there a deeper one describes it.
  left, right = text[: span[0]].rpartition(title)[2], text[span[1] :]
  before = re.search(rf"(?:[^\s\"]+ ){{0,{_BEFORE}}}$", left)[0]
  after = re.match(rf"[^\s\"]*(?: [^\s\"]+){{0,{_AFTER}}}", right.partition(title)[0])
  after = after[0].rstrip()
  if len(before.split()) < _FEWEST or not after or _GAP in before + after:
    return None
  return f'"{before}{_GAP}{after}"'


def _filled(part: str, documents: str) -> str | None:
  """What fills the first gap of a question, if all its gaps can be filled one way."""
  filled = []
  for gap in re.findall(rf'"([^"]*{_GAP}[^"]*)"', part):
    before, after = map(re.escape, gap.split(_GAP))
    found = set(re.findall(rf'{before}([^"\n]{{1,80}}?){after}', documents))
    if len(found) != 1:
      return None
    filled.append(found.pop())
  return filled[0] if filled else None

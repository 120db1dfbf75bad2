"""Reads a possibly hostile page's text and picks the parts relevant to a goal.

No page script runs: scripts are dropped with the markup. Control characters are
removed, and lines are split, so that no page is a one-megabyte line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from tools_sandbox.faults import ToolFault
from tools_sandbox.search.index import Document, SearchIndex
from tools_sandbox.text import clean
from tools_sandbox.web.encoding import decode
from tools_sandbox.web.extract import main_text
from tools_sandbox.web.fetch import PageBody

TYPES = (
  "text/",
  "application/xhtml+xml",
  "application/xml",
  "application/json",
  "application/ld+json",
)
_HTML = ("text/html", "application/xhtml+xml")
_NAME = re.compile(r"/?[A-Za-z0-9]{0,20}")
_UNSEEN = ("script", "style", "noscript", "template", "svg", "head")
_INLINE = ("a", "b", "i", "em", "strong", "span", "code", "sup", "sub", "u", "")
_TEXT = 500_000  # page characters for the search
_PARAGRAPH = 600  # characters per paragraph, at most
_OMITTED = "..."


def read_text(body: PageBody, seconds: float = 5.0) -> str:
  """Reads a page's visible text, as lines.

  Args:
    body: the fetched page.
    seconds: the time limit for finding the main text, after which all text is returned.

  Raises:
    ToolFault: the page is not text, or has none.
  """
  # --- Reduce markup to the main text; if none is found in time, use all text.
  text = decode(body.data, body.charset)
  head = text[:1024].lower()
  if body.content_type in _HTML or (not body.content_type and "<html" in head):
    text = main_text(text, seconds) or strip_tags(text)

  # --- Non-empty lines, words one space apart.
  lines = []
  for line in clean(text).splitlines():
    words = line.split()
    if words:
      lines.append(" ".join(words))
  text = "\n".join(lines)
  if not text:
    raise ToolFault("the page holds no text")
  return text


def excerpt(text: str, goal: str, max_chars: int) -> str:
  """Picks the parts of a text that match a goal best, in the text's order.

  The first paragraph is always kept, because it introduces the page; without a goal or
  a match, returns the text's beginning.

  Args:
    text: lines from `read_text`.
    goal: words to look for (BM25 over the paragraphs).
    max_chars: the result's maximum length, gap markers included.
  """
  if len(text) <= max_chars:
    return text

  # --- Order the paragraphs: the first, then by their match with the goal.
  paragraphs = list(_paragraphs(text[:_TEXT]))
  order = [0]
  try:
    index = SearchIndex.build(Document(str(i), "", p) for i, p in enumerate(paragraphs))
    hits = index.search(goal, len(paragraphs))
    order += [int(hit.document.id) for hit in hits if hit.document.id != "0"]
  except ValueError:  # not a single word
    pass
  if len(order) == 1:
    order = list(range(len(paragraphs)))

  # --- Take as many as fit.
  chosen: list[int] = []
  left = max_chars
  for i in order:
    cost = len(paragraphs[i]) + len(_OMITTED) + 2
    if cost > left:
      break
    chosen.append(i)
    left -= cost

  # --- Restore the text's order, with marks at gaps.
  lines = []
  last = -1
  for i in sorted(chosen):
    if i != last + 1:
      lines.append(_OMITTED)
    lines.append(paragraphs[i])
    last = i
  if last != len(paragraphs) - 1:
    lines.append(_OMITTED)
  return "\n".join(lines) if chosen else text[:max_chars]


def _paragraphs(text: str) -> Iterator[str]:
  """Splits text into paragraphs; cuts long ones at white space, if any."""
  for line in text.splitlines():
    while len(line) > _PARAGRAPH:
      cut = line.rfind(" ", _PARAGRAPH // 2, _PARAGRAPH)
      if cut < 0:
        cut = _PARAGRAPH
      yield line[:cut].strip()
      line = line[cut:].strip()
    if line:
      yield line


def strip_tags(page: str) -> str:
  """Returns an HTML page's text without scripts and styles, in linear time."""
  # Each chunk begins with a tag's name; no regular expression runs over the whole page.
  first, *chunks = page.split("<")
  out = [first]
  skipping = ""
  for chunk in chunks:
    name = _NAME.match(chunk)[0].lower()
    if skipping:
      if name != f"/{skipping}":
        continue
      skipping = ""
    elif name in _UNSEEN:
      skipping = name
      continue
    _, end, text = chunk.partition(">")
    if not end and not name:  # a lonely "<"
      text = "<" + chunk
    if name.strip("/") not in _INLINE:  # a tag that starts a new line
      text = "\n" + text
    out.append(text)
  return html.unescape("".join(out))

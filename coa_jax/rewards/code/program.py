"""Finds the Python program in a model's answer: Markdown's fences, `<code>`, or all."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

# A line that opens a block: text, the fence, the block's label. The text may be a list
# marker or prose, as in "The code: ```py"; but not a program's string.
_OPENING = re.compile(
  r"(?P<before>\s*(?:[-*+]|\d+[.)])?\s*"
  r"|(?:[^`~]|`{1,2}(?!`)|~{1,2}(?!~))*[\s:](?=[`~]+[ \t]*[\w.+#{}-]*\s*$))"
  r"(?P<fence>`{3,}|~{3,})[ \t]*(?P<label>[^`]*)"
)
# A line that closes one: a fence alone, or after code, as in "f(1)```".
_CLOSING = re.compile(r"(?P<before>\s*|.*[^\s:'\"`~])(?P<fence>`{3,}|~{3,})\s*")
_PYTHON = re.compile(r"\{?\.?py(thon|py)?[\d.]*(?![\w+#-])", re.IGNORECASE)
_MARKER = re.compile(r"\s*([-*+]|\d+[.)])?\s*")


def program_of(answer: str) -> str:
  """Returns the program in an answer.

  This is the last block labelled as Python; otherwise the last unlabelled block;
  otherwise the last `<code>` span; otherwise the whole answer. Empty blocks count only
  if all are empty.
  """
  answer = answer.replace("\r\n", "\n")
  labelled = []
  unlabelled = []
  for label, block in _blocks(answer):
    if _PYTHON.match(label):
      labelled.append(block)
    elif not label:
      unlabelled.append(block)
  for blocks in (labelled, unlabelled):
    filled = [block for block in blocks if block.strip()]
    if blocks:
      return (filled or blocks)[-1]
  return _code_span(answer) or answer


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
  """Yields each fenced block's label and content; a block may be unclosed."""
  lines = answer.split("\n")
  at = 0
  while at < len(lines):
    opening = _OPENING.fullmatch(lines[at])
    at += 1
    if opening is None:
      continue
    column = 0
    if _MARKER.fullmatch(opening["before"]):
      column = len(opening["before"])
    end = _end(lines, at, opening["fence"], column)
    content = lines[at:end]
    at = end
    # If the block is closed, not just followed by the next, skip the closing fence.
    if end < len(lines) and not _opens(lines[end], opening["fence"]):
      at += 1
      code = lines[end].rstrip().rstrip(opening["fence"][0])
      content += [code] * bool(code.strip())
    block = "\n".join(_unindented(line, column) for line in content) + "\n"
    yield opening["label"].strip(), _dedented(block)


def _end(lines: list[str], begin: int, fence: str, column: int) -> int:
  """Returns the line number at the block's end, or at the next block's start.

  A fence indented more than the opening one may be a docstring's: it closes the block
  only if no other fence does.
  """
  indented = 0
  for at in range(begin, len(lines)):
    if _opens(lines[at], fence):
      return indented or at
    closing = _CLOSING.fullmatch(lines[at])
    if closing and closing["fence"].startswith(fence):
      if closing["before"].strip() or len(closing["before"]) <= column:
        return at
      indented = indented or at
  return indented or len(lines)


def _opens(line: str, fence: str) -> bool:
  """Whether a line can only open another block: it has a label, or text before."""
  opening = _OPENING.fullmatch(line)
  if opening is None or not opening["fence"].startswith(fence):
    return False
  return bool(opening["before"].strip() or opening["label"].strip())


def _unindented(line: str, column: int) -> str:
  indentation = len(line) - len(line.lstrip())
  return line[min(column, indentation) :]


def _dedented(block: str) -> str:
  """Removes the block's common indentation if the first line has one."""
  if block.lstrip("\n")[:1] in (" ", "\t"):
    return textwrap.dedent(block)
  return block


def _code_span(answer: str) -> str:
  """Returns the last `<code>` span; "" for none, or after a quote (in a string)."""
  before, _, _ = answer.rpartition("</code>")
  line, _, span = before.rpartition("<code")
  _, bracket, program = span.partition(">")
  line = line[line.rfind("\n") + 1 :]
  if not bracket or "'" in line or '"' in line:
    return ""
  return _dedented(program)

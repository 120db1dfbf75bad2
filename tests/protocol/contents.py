"""Sample span contents for every role and tool, including newly added ones."""

from __future__ import annotations

import collections

from coa_jax.protocol import roles
from coa_jax.protocol.grammar.regular import Language, compile_language
from coa_jax.protocol.tools import SPECS

GRADES = " ".join(f"{c} : Good" for c in roles.CRITERIA)


def shortest_word(language: Language) -> str:
  """The shortest word of a language; the first in byte order if there are several."""
  table = compile_language(language)
  words = collections.deque([(0, b"")])
  seen = {0}
  while words:
    state, word = words.popleft()
    if table.accepts_S[state]:
      return word.decode()
    for b, after in enumerate(table.next_SX[state].tolist()):
      if after >= 0 and after not in seen:
        seen.add(after)
        words.append((after, word + bytes([b])))
  raise ValueError("the language has no word")


def _content(tag: str) -> str:
  grammar = SPECS[tag].grammar
  return shortest_word(grammar(())) if grammar else "x"


CONTENT = {
  "think": "t",
  "plan": "1. look",
  "reflection": GRADES,
  "suggested_answer": "Uruk",
  "double_check": "The score this time is:4",
  "answer": "Uruk",
  "wiki_search": "Ur",
  "web_search": "Ur",
  "crawl_page": "http://a|http://b",
  "code": "```py\nprint(1)\n```",
  "visual_inspector": '```json\n{"file_path": "a.png", "question": "?"}\n```',
  "tool": '{"name": "add", "arguments": {"a": 1}}',
}
CONTENT |= {tag: _content(tag) for tag in SPECS if tag not in CONTENT}

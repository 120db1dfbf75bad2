"""Augmented copies: the same work with other tool names, described in the prompt."""

from __future__ import annotations

import json
import re

import foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from imported import UNIFIED, read, row_of

from coa_jax.data.teacher.tool_augmentation import augment
from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.parser import parse
from coa_jax.protocol.trajectory import Author


def undone(tag: str, words: str, text: str) -> str:
  """Converts a body back to the protocol's layout, using the prompt's description."""
  if words.startswith("query:"):
    return text.removeprefix("query: ")
  if "a JSON object with" in words and tag != "visual_inspector":
    row = json.loads(text)
    if tag == "code":
      return tool_bodies.render_code(row["program"], row["stdin"])
    return next(iter(row.values()))
  if tag == "code" and words.startswith("the program"):
    return tool_bodies.render_code(text)
  if tag == "code":
    return re.sub(r"^```(py|python)\n", "```py\n", text)
  return text


@settings(max_examples=200, deadline=None)
@given(foreign.oagents(), st.integers(1, 500))
def test_a_copy_says_the_same_under_the_names_its_prompt_tells(drawn, number):
  _, t = read("oagents", drawn.row, stem="row")
  before = json.dumps(t.to_json())
  copy, variant = augment(t, UNIFIED, number)
  assert json.dumps(t.to_json()) == before
  assert parse(copy.text, variant).ok

  names = {name: (tag, words) for tag, (name, words) in copy.meta["format"].items()}
  prompt = "".join(s.text for s in copy.segments if s.author == Author.PROMPT)
  ours = [s for s in t.segments if s.author != Author.PROMPT]
  theirs = [s for s in copy.segments if s.author != Author.PROMPT]
  for mine, other in zip(ours, theirs, strict=True):
    assert mine.author == other.author and not other.ids
    if mine.role not in UNIFIED.tools:
      assert other.text == mine.text
      continue
    tag, words = names[other.role]
    assert tag == mine.role
    assert roles.open_tag(other.role) in prompt and words in prompt
  for mine, other in zip(t.calls, copy.calls, strict=True):
    tag, words = names[other.name]
    assert (tag, other.result) == (mine.name, mine.result)
    assert undone(tag, words, other.arguments) == mine.arguments
  # No old name is left in the prompt, unless it was drawn again.
  for tag in set(UNIFIED.tools) - set(names):
    assert roles.open_tag(tag) not in prompt
  again, _ = augment(t, UNIFIED, number)
  assert again == copy


def test_a_layout_that_cannot_hold_a_call_is_not_drawn():
  called = {"name": "python", "arguments": {"code": "input()", "stdin": "a b"}}
  step = {"model_output": "go", "tool_calls": [called], "observations": "o"}
  _, t = read("oagents", row_of(step), stem="row")
  drawn = {augment(t, UNIFIED, n)[0].meta["format"]["code"][1] for n in range(40)}
  # Three formats under other names, and the protocol's own under its own tag.
  assert len(drawn) == 4 and "the program and nothing else" not in drawn
  t.calls[0].arguments = "no program"
  assert augment(t, UNIFIED, 1) is None

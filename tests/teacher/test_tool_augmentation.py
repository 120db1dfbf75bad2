"""Augmented copies: the same work under other names, described in the prompt."""

from __future__ import annotations

import json
import re

import foreign
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.importers.importers import Importer
from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.parser import parse
from coa_jax.protocol.tools import SPECS
from coa_jax.protocol.trajectory import Author
from coa_jax.teacher.convert import ConvertConfig
from coa_jax.teacher.tool_augmentation import augment

UNIFIED = roles.get_variant("unified")
WHOLE = ConvertConfig(missing_think="Go on.", score_right=True)


def undone(tag: str, told: str, text: str) -> str:
  """The protocol's body, read back from a layout by what the prompt says of it."""
  if told.startswith("query:"):
    return text.removeprefix("query: ")
  if "a JSON object with" in told and tag != "visual_inspector":
    row = json.loads(text)
    if tag == "code":
      return tool_bodies.render_code(row["program"], row["stdin"])
    return next(iter(row.values()))
  if tag == "code" and told.startswith("the program"):
    return tool_bodies.render_code(text)
  if tag == "code":
    return re.sub(r"^```(py|python)\n", "```py\n", text)
  return text


@settings(max_examples=200, deadline=None)
@given(foreign.oagents(), st.integers(1, 5))
def test_a_copy_says_the_same_under_the_names_its_prompt_tells(drawn, number):
  importer = Importer("oagents", UNIFIED, convert=WHOLE)
  _, t = importer.read(0, "row", drawn.row)
  before = json.dumps(t.to_json())
  copy, variant = augment(t, UNIFIED, number, seed=0)
  assert json.dumps(t.to_json()) == before
  assert parse(copy.text, variant).ok

  names = {name: (tag, told) for tag, (name, told) in copy.meta["format"].items()}
  prompt = "".join(s.text for s in copy.segments if s.author == Author.PROMPT)
  ours = [s for s in t.segments if s.author != Author.PROMPT]
  theirs = [s for s in copy.segments if s.author != Author.PROMPT]
  for mine, other in zip(ours, theirs, strict=True):
    assert mine.author == other.author and not other.ids
    if mine.role not in UNIFIED.tools:
      assert other.text == mine.text
      continue
    tag, told = names[other.role]
    assert tag == mine.role
    assert roles.open_tag(other.role) in prompt and told in prompt
  for mine, other in zip(t.calls, copy.calls, strict=True):
    tag, told = names[other.name]
    assert (tag, other.result) == (mine.name, mine.result)
    assert undone(tag, told, other.arguments) == mine.arguments
  # No name of the old format is left in the prompt, unless it was drawn again.
  for tag in set(UNIFIED.tools) - set(names):
    assert roles.open_tag(tag) not in prompt
  again, _ = augment(t, UNIFIED, number, seed=0)
  assert again == copy


def test_a_layout_that_cannot_hold_a_call_is_not_drawn():
  called = {"name": "python", "arguments": {"code": "input()", "stdin": "a b"}}
  row = {
    "question": "Who?",
    "prediction": "x",
    "true_answer": "x",
    "intermediate_steps": [
      {"facts": "f", "plan": "p"},
      {"model_output": "go", "tool_calls": [called], "observations": "o"},
    ],
  }
  _, t = Importer("oagents", UNIFIED, convert=WHOLE).read(0, "row", row)
  drawn = {augment(t, UNIFIED, n, 0)[0].meta["format"]["code"][1] for n in range(40)}
  assert len(drawn) == 3 and "the program and nothing else" not in drawn
  t.calls[0].arguments = "no program"
  assert augment(t, UNIFIED, 1, 0) is None


def test_no_two_tools_can_be_called_the_same():
  called = [name for spec in SPECS.values() for name in spec.choices(False).names]
  assert len(called) == len(set(called))
  assert not set(called) & {*roles.ROLES, roles.OBSERVATION}

"""Tool naming: every format reads back its own calls."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.prompts import instructions
from coa_jax.protocol.tool_naming import draw_naming
from coa_jax.protocol.tools import SPECS
from tests.protocol.contents import CONTENT

UNIFIED = roles.get_variant("unified")
TEXT = st.text(max_size=40)
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
PROGRAM = st.builds(
  lambda program, stdin: tool_bodies.render_code(program, stdin),
  TEXT.filter(lambda t: t.strip(tool_bodies.WHITE) and "```" not in t),
  st.sampled_from(["", "1 2", "a\nb"]),
).filter(lambda body: tool_bodies.parse_code(body) is not None)
IMAGE = st.builds(
  lambda path, question: (
    f"```json\n{json.dumps({'file_path': path, 'question': question})}\n```"
  ),
  LINE.filter(str.strip),
  LINE.filter(str.strip),
)
BODIES = {
  **dict.fromkeys(("wiki_search", "web_search", "crawl_page"), LINE.filter(str.strip)),
  "code": PROGRAM,
  "visual_inspector": IMAGE,
  "tool": st.builds(
    tool_bodies.render_function_call,
    st.from_regex(tool_bodies.FUNCTION_NAME, fullmatch=True),
    st.dictionaries(LINE, st.one_of(LINE, st.integers(), st.none(), st.lists(LINE))),
  ),
}
BODIES |= {tag: st.just(CONTENT[tag]) for tag in SPECS if tag not in BODIES}
FORMATS = [(tag, each) for tag, spec in SPECS.items() for each in spec.choices.formats]


def meaning(tag: str, body: str):
  """A tool body's request, independent of its layout."""
  if tag == "code":
    return tool_bodies.parse_code(body)
  if tag == "visual_inspector":
    return json.loads(body.removeprefix("```json\n").removesuffix("\n```"))
  if tag == "tool":
    return tool_bodies.parse_function_call(body)
  return body


@pytest.mark.parametrize(
  ("tag", "form"), FORMATS, ids=lambda x: getattr(x, "description", x)
)
@given(data=st.data())
def test_a_written_call_is_read_back(tag, form, data):
  body = data.draw(BODIES[tag])
  written = form.write(body)
  if written is None:  # a bare program has no place for standard input
    assert tag == "code" and tool_bodies.parse_code(body).stdin
    return
  read = form.read(written)
  assert read is not None and meaning(tag, read) == meaning(tag, body)


@pytest.mark.parametrize(
  ("tag", "form"), FORMATS, ids=lambda x: getattr(x, "description", x)
)
@given(st.text(st.sampled_from('[]{}":`json py\n\\| x'), max_size=30))
def test_nonsense_is_refused_and_never_raised(tag, form, text):
  read = form.read(text)
  if tag == "code" and read is not None:
    assert tool_bodies.parse_code(read) is not None


def test_no_name_is_in_two_places():
  names = [name for spec in SPECS.values() for name in spec.choices.names]
  assert len(names) == len(set(names))
  assert not {*names, *SPECS} & {*roles.ROLES, roles.OBSERVATION, roles.START}
  assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in (*names, *SPECS))


@pytest.mark.parametrize("name", list(roles.VARIANTS))
def test_the_prompt_describes_the_format_and_nothing_of_the_old_one(name):
  variant = roles.get_variant(name)
  for number in range(8):
    drawn = draw_naming(variant, random.Random(number))
    other = drawn.apply(variant)
    prompt = instructions(other, "full")
    assert set(drawn.names) == set(variant.tools)
    for tag, (called, description) in drawn.record.items():
      assert roles.open_tag(called) in prompt and description in prompt
      if called != tag:
        assert roles.open_tag(tag) not in prompt
  first = [draw_naming(variant, random.Random(0)).record for _ in range(2)]
  assert first[0] == first[1]

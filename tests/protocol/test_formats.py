"""Tool formats: what is written is read back, and what no training sees stays so."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol import function_calls, roles
from coa_jax.protocol.prompts import instructions
from coa_jax.protocol.tool_formats import HELD_OUT, STYLES, draw_format

UNIFIED = roles.get_variant("unified")
TEXT = st.text(max_size=40)
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
PROGRAM = st.builds(
  lambda program, stdin: roles.render_code(program, stdin),
  TEXT.filter(lambda t: t.strip(roles.WHITE) and "```" not in t),
  st.sampled_from(["", "1 2", "a\nb"]),
).filter(lambda body: roles.parse_code(body) is not None)
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
    function_calls.render,
    st.from_regex(function_calls.NAME, fullmatch=True),
    st.dictionaries(LINE, st.one_of(LINE, st.integers(), st.none(), st.lists(LINE))),
  ),
}
LAYOUTS = [
  (tag, layout)
  for styles in (STYLES, HELD_OUT)
  for tag, (_, _, layouts) in styles.items()
  for layout in layouts
]


def meaning(tag: str, body: str):
  """What a body asks for, however it is laid out."""
  if tag == "code":
    return roles.parse_code(body)
  if tag == "visual_inspector":
    return json.loads(body.removeprefix("```json\n").removesuffix("\n```"))
  if tag == "tool":
    return function_calls.parse(body)
  return body


@pytest.mark.parametrize(
  ("tag", "layout"), LAYOUTS, ids=lambda x: getattr(x, "told", x)
)
@given(data=st.data())
def test_what_is_written_is_read_back(tag, layout, data):
  body = data.draw(BODIES[tag])
  written = layout.write(body)
  if written is None:  # a bare program has no place for standard input
    assert tag == "code" and roles.parse_code(body).stdin
    return
  read = layout.read(written)
  assert read is not None and meaning(tag, read) == meaning(tag, body)


@pytest.mark.parametrize(
  ("tag", "layout"), LAYOUTS, ids=lambda x: getattr(x, "told", x)
)
@given(st.text(st.sampled_from('[]{}":`json py\n\\| x'), max_size=30))
def test_nonsense_is_refused_and_never_raised(tag, layout, text):
  read = layout.read(text)
  if tag == "code" and read is not None:
    assert roles.parse_code(read) is not None


@pytest.mark.parametrize("tag", roles.TOOLS)
def test_a_held_out_layout_is_no_other_one(tag):
  """Nothing that is right in a format of training is right in one held out."""
  for ours, theirs in itertools.product(STYLES[tag][2], HELD_OUT[tag][2]):
    body = {
      "code": roles.render_code("print(1)"),
      "visual_inspector": '```json\n{"file_path": "a.png", "question": "q"}\n```',
      "tool": '{"name": "add", "arguments": {"a": 1}}',
    }.get(tag, "Tarn Hollow")
    read = theirs.read(ours.write(body))
    if tag == "visual_inspector":
      assert read is None or "a.png" not in json.loads(read[8:-4])["file_path"][:5]
    else:
      assert read is None


def test_no_name_or_layout_is_in_two_places():
  names = [n for styles in (STYLES, HELD_OUT) for s in styles.values() for n in s[0]]
  assert len(names) == len(set(names))
  assert not set(names) & {*roles.ROLES, roles.OBSERVATION, roles.START}
  assert set(STYLES) == set(HELD_OUT) == set(roles.TOOLS)
  for tag in roles.TOOLS:
    told = [{x.told for x in styles[tag][2]} for styles in (STYLES, HELD_OUT)]
    assert not told[0] & told[1]
    assert not set(STYLES[tag][1]) & set(HELD_OUT[tag][1])


@pytest.mark.parametrize("styles", [STYLES, HELD_OUT])
@pytest.mark.parametrize("name", list(roles.VARIANTS))
def test_the_prompt_tells_the_format_and_nothing_of_the_old_one(name, styles):
  variant = roles.get_variant(name)
  for number in range(8):
    drawn = draw_format(variant, random.Random(number), styles)
    other = drawn.variant(variant)
    prompt = instructions(other, "full")
    assert set(drawn.names) == set(variant.tools)
    for tag, (called, told) in drawn.told.items():
      assert roles.open_tag(called) in prompt and told in prompt
      if called != tag:
        assert roles.open_tag(tag) not in prompt
    with pytest.raises(KeyError, match="nobody"):
      drawn.read("nobody", "x")
  first = [draw_format(variant, random.Random(0), styles).told for _ in range(2)]
  assert first[0] == first[1]

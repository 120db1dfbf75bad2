"""Variants, scores, grades, code calls and escaping."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol import roles, tool_bodies

TAGS = (*roles.ROLES, *roles.TOOLS, roles.OBSERVATION)
# Tags, escapes and their parts, mixed with any other text.
_PIECES = [
  *("<answer>", "</answer>", "</observation>", "<observation>", "<think>", "<b>"),
  *("&lt;answer>", "&amp;lt;answer>", "&amp;amp;lt;/code>", "&lt;/observation>"),
  *("&", "amp;", "lt;", "<", ">", "/", "&amp;", "&lt;", "answer>", "&amp;amp;"),
]
HOSTILE = st.lists(st.sampled_from(_PIECES) | st.text(max_size=4), max_size=14).map(
  "".join
)


@given(HOSTILE)
def test_unescape_is_the_exact_inverse_of_escape(text: str):
  assert roles.unescape(roles.escape(text)) == text
  assert roles.unescape(roles.escape(roles.escape(text))) == roles.escape(text)


@given(HOSTILE)
def test_escaped_text_holds_no_tag(text: str):
  assert roles.find_tag(roles.escape(text)) is None


@given(HOSTILE)
def test_an_escaped_observation_ends_where_it_was_closed(text: str):
  whole = roles.wrap(roles.OBSERVATION, roles.escape(text))
  close = roles.close_tag(roles.OBSERVATION)
  assert whole.find(close) == len(whole) - len(close)


def test_text_without_tags_is_not_changed_by_escape():
  text = "a < b && c > d; &lt; &amp; <b>bold</b> <Think> < think> <think >"
  assert roles.escape(text) == text


@pytest.mark.parametrize("tag", TAGS)
def test_every_tag_is_found_and_escaped(tag: str):
  for form in (roles.open_tag(tag), roles.close_tag(tag)):
    assert roles.find_tag("x" + form) == form
    assert roles.escape(form) == "&lt;" + form[1:]


_BODY = st.text().filter(lambda s: "```" not in s)


@given(_BODY.filter(lambda s: s.strip()), _BODY)
def test_a_rendered_code_call_reads_back(program: str, stdin: str):
  call = tool_bodies.parse_code(tool_bodies.render_code(program, stdin))
  assert call == tool_bodies.CodeCall(program, stdin)


@pytest.mark.parametrize(
  ("content", "program", "stdin"),
  [
    ("```py\nprint(1)\n```", "print(1)", ""),
    ("\n ```python\nprint(1)\n```\n", "print(1)", ""),
    ("```py\nprint(1)```", "print(1)", ""),
    ("```py  \na\n\nb\n```\n```sh\n1 2\n3\n```", "a\n\nb", "1 2\n3"),
    ("```py\na\n```\n\n  ```sh\n\n```", "a", ""),
    ("```py\r\nprint(1)\r\n```", "print(1)", ""),
    ("\r\n```python \r\na\r\nb\r\n```\r\n```sh\r\n1\r\n2\r\n```\r\n", "a\nb", "1\n2"),
    ("```py\rprint(1)\r```", "print(1)", ""),
    ("```py\n'\r'\n```", "'\r'", ""),
  ],
)
def test_code_calls_that_are_read(content: str, program: str, stdin: str):
  assert tool_bodies.parse_code(content) == tool_bodies.CodeCall(program, stdin)


@pytest.mark.parametrize(
  "content",
  [
    "",
    "```js\nprint(1)\n```",
    "```py print(1)\n```",
    "```py\n \n```",
    "```py\nprint(1)",
    "so: ```py\nprint(1)\n```",
    "```py\nprint(1)\n``` done",
    "```py\na\n```\n```py\nb\n```",
    "```sh\n1\n```\n```py\na\n```",
    "```py\na\n```\n```sh\n1\n```\n```sh\n2\n```",
    "```py\na\n```\n```sh\n1",
  ],
)
def test_code_calls_that_are_refused(content: str):
  assert tool_bodies.parse_code(content) is None


@pytest.mark.parametrize(
  ("content", "score"),
  [
    ("4", 4),
    ("The score this time is:4", 4),
    ("score 3.", 3),
    ("1", 1),
    *((text, None) for text in ("0", "5", "-3", "3.5", "4/4", "good", "")),
  ],
)
def test_check_scores(content: str, score: int | None):
  assert roles.check_score(content) == score


def test_reflection_grades_as_in_the_case_studies():
  text = (
    "information_conflict : Good tool_effectiveness : Fair trajectory_monitoring : Good"
  )
  assert roles.reflection_grades(text) == {
    "information_conflict": "good",
    "tool_effectiveness": "fair",
    "trajectory_monitoring": "good",
  }
  assert roles.reflection_grades("fine so far") == {}
  assert roles.reflection_grades("tool_effectiveness: goodish") == {}


@pytest.mark.parametrize("order", [("Poor", "Good"), ("GOOD", "poor")])
def test_a_criterion_graded_twice_keeps_its_worst_grade(order):
  text = " ".join(f"tool_effectiveness: {grade}" for grade in order)
  assert roles.reflection_grades(text) == {"tool_effectiveness": "poor"}


def test_unknown_variants_and_tools_are_refused_by_name():
  with pytest.raises(ValueError, match=r"'wub'; there are web, mhqa, code, math, uni"):
    roles.get_variant("wub")
  with pytest.raises(ValueError, match=r"'mhqa' has no tool 'code'; it has wiki_se"):
    roles.get_variant("mhqa").with_tools(["code"])


@pytest.mark.parametrize("variant", roles.VARIANTS.values(), ids=lambda v: v.name)
def test_a_table_names_only_its_own_spans(variant: roles.Variant):
  spans = set(variant.roles) | set(variant.tools)
  assert set(variant.follows) == spans - {roles.THINK} | {roles.START}
  for following in variant.follows.values():
    assert following <= spans - {roles.THINK}
  assert variant.think_required <= variant.think_allowed <= spans - {roles.THINK}
  assert variant.follows[roles.ANSWER] == frozenset()
  assert variant.yield_tags[-1] == "</answer>"
  assert len(variant.yield_tags) == len(variant.tools) + 1


def test_a_variant_left_with_some_tools_forgets_the_others():
  left = roles.get_variant("unified").with_tools(["code"])
  assert left.tools == ("code",) and left.yield_tags == ("</code>", "</answer>")
  assert "wiki_search" not in left.tags
  named = set(left.follows).union(*left.follows.values())
  assert named & set(roles.TOOLS) == {"code"}


AGENTS = (roles.PLAN, roles.REFLECTION, roles.SUGGESTED_ANSWER, roles.DOUBLE_CHECK)


@given(st.data())
def test_a_trajectory_without_an_agent_obeys_the_variant_without_it(data):
  """A random walk through the transitions, without some agents' spans."""
  variant = roles.VARIANTS[data.draw(st.sampled_from(["web", "mhqa", "unified"]))]
  gone = data.draw(st.sets(st.sampled_from([r for r in AGENTS if r in variant.roles])))
  if roles.SUGGESTED_ANSWER in gone and roles.DOUBLE_CHECK in variant.roles:
    gone.add(roles.DOUBLE_CHECK)
  walk, state = [], roles.START
  while state != roles.ANSWER and len(walk) < 12:
    state = data.draw(st.sampled_from(sorted(variant.follows[state])))
    walk.append(state)
  lesser = variant.without(gone)
  state = roles.START
  for span in (span for span in walk if span not in gone):
    assert span in lesser.follows[state]
    state = span
  reached = {*lesser.follows, *(s for row in lesser.follows.values() for s in row)}
  assert (
    not reached & gone and not (lesser.think_required | lesser.think_allowed) & gone
  )
  assert set(lesser.roles) == set(variant.roles) - gone


def test_react_is_unified_without_its_team():
  react = roles.get_variant(
    "unified-plan-reflection-suggested_answer-double_check"
  ).with_tools(("wiki_search", "code"))
  after = frozenset({"wiki_search", "code", "answer"})
  assert react.follows == {
    roles.START: after,
    "wiki_search": after,
    "code": after,
    roles.ANSWER: frozenset(),
  }
  assert react.roles == (roles.THINK, roles.ANSWER)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("code-double_check", "'code' has no agent 'double_check'.*it has plan, reflect"),
    ("unified-answer", "has no agent 'answer'"),
    ("unified-", "has no agent ''"),
    ("unified-suggested_answer", "a double_check checks nothing"),
    ("react-plan", "unknown protocol variant 'react-plan'"),
  ],
)
def test_a_variant_can_not_do_without_what_it_lacks(name: str, message: str):
  with pytest.raises(ValueError, match=message):
    roles.get_variant(name)


def test_a_code_span_of_many_fences_is_refused_at_once():
  began = time.process_time()
  assert tool_bodies.parse_code("```py\nx\n```\n" + "```sh\ny\n```\n" * 100_000) is None
  assert time.process_time() - began < 1

"""The parser enforces the paper's transition rules (arXiv 2508.13167)."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.parser import ParseVerdict, content_fault, parse
from coa_jax.protocol.roles import TOOLS, escape, wrap
from tests.protocol.contents import CONTENT, GRADES

POOR = GRADES.replace("tool_effectiveness : Good", "tool_effectiveness : Poor")
_WEB = ("web_search", "crawl_page")


def web_like(tools: tuple[str, ...]) -> dict[str, set[str]]:
  """The web agent's transitions, with these tools."""
  calls = set(tools)
  return {
    "start": {"plan", *calls},
    "plan": {"suggested_answer", *calls},
    **{t: {"reflection", "suggested_answer", *calls} for t in tools},
    "reflection": {"plan", "suggested_answer", *calls},
    "suggested_answer": {"double_check"},
    "double_check": {"plan", "answer", *calls},
    "answer": set(),
  }


PROGRAM = {
  "start": {"plan"},
  "plan": {"code"},  # an answer too, but only after a call
  "code": {"reflection"},
  "reflection": {"code", "answer"},
  "answer": set(),
}
TABLES = {
  "web": web_like(_WEB),
  "mhqa": {
    "start": {"plan", "wiki_search"},
    "plan": {"wiki_search", "answer"},
    "wiki_search": {"wiki_search", "reflection", "plan", "answer"},
    "reflection": {"plan", "wiki_search", "answer"},
    "answer": set(),
  },
  "code": PROGRAM,
  "math": PROGRAM,
  "unified": web_like(TOOLS),
}
# NEEDS: spans that require a think before them; FREE: spans that allow one.
NEEDS = {
  "web": {"plan", "reflection", "suggested_answer", "double_check", *_WEB},
  "mhqa": {"plan", "wiki_search", "reflection", "answer"},
  "code": {"code", "answer"},
  "math": {"code", "answer"},
  "unified": {"plan", *TOOLS},
}
FREE = {
  "web": {"answer"},
  "unified": {"reflection", "suggested_answer", "double_check", "answer"},
}
# A shortest path to each state.
WAYS = {
  "start": "",
  "plan": "plan",
  "reflection": "{first} reflection",
  "suggested_answer": "plan suggested_answer",
  "double_check": "plan suggested_answer double_check",
  "answer": "{first} {before}answer",
}


def way(name: str, last: str) -> list[str]:
  """Spans from a variant's start to `last`, inclusive."""
  tools = roles.get_variant(name).tools
  if last in tools:
    return ["plan", last]
  before = {"web": "suggested_answer double_check ", "mhqa": ""}
  before |= {"unified": before["web"], "code": "reflection ", "math": "reflection "}
  text = WAYS[last].format(first=f"plan {tools[0]}", before=before[name])
  return text.split()


def render(name: str, spans: list[str], **content: str) -> str:
  """Renders spans with the thinks and observations required by the variant."""
  out = ""
  for span in spans:
    out += wrap("think", "t") if span in NEEDS[name] else ""
    out += wrap(span, {**CONTENT, **content}[span])
    out += wrap("observation", "o") if span in TOOLS else ""
  return out


PAIRS = [
  (name, last, after)
  for name, table in TABLES.items()
  for last in table
  for after in table
  if after != "start"
]


@pytest.mark.parametrize(("name", "last", "after"), PAIRS)
def test_the_segments_that_may_follow_each_segment(name: str, last: str, after: str):
  variant = roles.get_variant(name)
  before = render(name, way(name, last))
  assert parse(before, variant, complete=False).ok
  # A failing score if more work follows.
  score = "4" if after == "answer" else "2"
  text = render(name, [*way(name, last), after], double_check=score)
  result = parse(text, variant, complete=False)
  expected = after in TABLES[name][last]
  assert result.ok == expected, result
  if not expected:
    assert result.verdict == ParseVerdict.ILLEGAL_TRANSITION


@pytest.mark.parametrize("name", TABLES)
def test_thinks_stand_where_they_must_and_nowhere_else(name: str):
  variant = roles.get_variant(name)
  allowed = NEEDS[name] | FREE.get(name, set())
  think = wrap("think", "t")
  seen = set()
  for last, following in TABLES[name].items():
    for after in following:
      score = "4" if after == "answer" else "2"
      before = render(name, way(name, last), double_check=score)
      span = wrap(after, CONTENT[after])
      span += wrap("observation", "o") if after in TOOLS else ""
      with_think = parse(before + think + span, variant, complete=False)
      without = parse(before + span, variant, complete=False)
      twice = parse(before + think + think + span, variant, complete=False)
      assert with_think.ok == (after in allowed), (last, after)
      assert without.ok == (after not in NEEDS[name]), (last, after)
      assert twice.verdict == ParseVerdict.ILLEGAL_TRANSITION
      seen.add(after)
  assert seen == set(TABLES[name]) - {"start"}


def test_a_poor_grade_forces_a_new_plan():
  web = roles.get_variant("web")
  before = render("web", ["plan", "web_search", "reflection"], reflection=POOR)
  assert parse(before + render("web", ["plan"]), web, complete=False).ok
  for after in ("web_search", "suggested_answer"):
    result = parse(before + render("web", [after]), web, complete=False)
    assert result.verdict == ParseVerdict.ILLEGAL_TRANSITION
    assert "poor grade" in result.detail
  # In dialects with optional grades, a written grade counts too.
  unified = roles.get_variant("unified")
  text = render("unified", ["plan", "code", "reflection", "code"], reflection=POOR)
  assert parse(text, unified, complete=False).verdict == ParseVerdict.ILLEGAL_TRANSITION


@pytest.mark.parametrize("score", roles.SCORES)
@pytest.mark.parametrize("after", ["plan", "web_search", "answer"])
def test_the_score_decides_between_answer_and_more_work(score: int, after: str):
  spans = ["plan", "suggested_answer", "double_check", after]
  text = render("web", spans, double_check=f"{score}")
  result = parse(text, roles.get_variant("web"), complete=False)
  assert result.ok == ((score >= 3) == (after == "answer"))


def test_only_the_web_agent_must_grade_every_criterion():
  for name in ("web", "unified"):
    variant = roles.get_variant(name)
    spans = ["plan", variant.tools[0], "reflection"]
    text = render(name, spans, reflection="information_conflict : Good")
    result = parse(text, variant, complete=False)
    if name == "web":
      assert result.verdict == ParseVerdict.MALFORMED
      assert "tool_effectiveness, trajectory_monitoring" in result.detail
    else:
      assert result.ok


# plan, (think, code, observation, reflection)*N, think, answer; N at least 1.
_LETTERS = {"p": "plan", "t": "think", "c": "code", "r": "reflection", "a": "answer"}
_edits = st.lists(
  st.tuples(st.integers(0, 12), st.sampled_from(["", *_LETTERS])), max_size=2
)


@given(st.integers(0, 3), _edits, st.sampled_from(["code", "math"]))
def test_the_code_agents_regular_expression(n: int, edits, name: str):
  word = "p" + "tcr" * n + "ta"
  for place, letter in edits:
    word = word[:place] + letter + word[place + (letter == "") :]
  text = "".join(
    wrap(_LETTERS[x], CONTENT[_LETTERS[x]])
    + (wrap("observation", "o") if x == "c" else "")
    for x in word
  )
  expected = re.fullmatch("p(tcr)+ta", word) is not None
  assert parse(text, roles.get_variant(name)).ok == expected


MHQA = roles.get_variant("mhqa")
GOOD = render("mhqa", ["wiki_search", "answer"])


@pytest.mark.parametrize(
  ("text", "verdict", "at"),
  [
    (GOOD, ParseVerdict.OK, None),
    (" \n" + GOOD.replace("><think", ">\n\n<think") + "\n", ParseVerdict.OK, None),
    ("", ParseVerdict.UNCLOSED, ""),
    ("  \n", ParseVerdict.UNCLOSED, ""),
    (render("mhqa", ["wiki_search"]), ParseVerdict.UNCLOSED, ""),
    ("<think>t</think><plan>1. l", ParseVerdict.UNCLOSED, "<plan>1."),
    ("well <think>t</think>", ParseVerdict.MALFORMED, "well"),
    ("<think>t</think> so <plan>p</plan>", ParseVerdict.MALFORMED, "so <plan>"),
    ("<think>t</think><plan> \n</plan>", ParseVerdict.MALFORMED, "<plan>"),
    ("<THINK>t</THINK>", ParseVerdict.UNKNOWN_TOOL, "<THINK>"),
    ("<think>t</think><code>1</code>", ParseVerdict.UNKNOWN_TOOL, "<code>"),
    (
      "<think>t</think><double_check>4</double_check>",
      ParseVerdict.UNKNOWN_TOOL,
      "<dou",
    ),
    ("<think>a <plan>b</plan></think>", ParseVerdict.NESTED, "<think>a"),
    ("<think>a <code>b</think>", ParseVerdict.NESTED, "<think>a"),
    ("<think>a</think></plan>", ParseVerdict.NESTED, "</plan>"),
    ("<think>t</think><plan>p</think></plan>", ParseVerdict.NESTED, "<plan>p"),
    ("<observation>o</observation>", ParseVerdict.ILLEGAL_TRANSITION, "<obs"),
    ("<think>t</think><observation>", ParseVerdict.UNCLOSED, "<observation>"),
    (GOOD + "<think>t</think>", ParseVerdict.ILLEGAL_TRANSITION, "<think>t</think>"),
    (GOOD + " bye", ParseVerdict.MALFORMED, "bye"),
    (
      GOOD.replace(wrap("observation", "o"), ""),
      ParseVerdict.ILLEGAL_TRANSITION,
      "<think> t</think><answer>",
    ),
  ],
)
def test_the_first_fault_has_its_kind_and_place(text: str, verdict, at: str | None):
  result = parse(text, MHQA)
  assert result.verdict == verdict, result
  if at is not None:
    assert text[result.offset :].startswith(at) and bool(at) == (
      result.offset < len(text)
    )
    assert result.detail


@pytest.mark.parametrize(
  ("role", "content", "fault"),
  [
    ("wiki_search", " ", "empty"),
    ("code", "print(1)", "one ```py block"),
    ("visual_inspector", "a.png", "```json block"),
    ("visual_inspector", "```json\n{\n```", "```json block"),
    ("visual_inspector", f"```json\n{'1' * 4301}\n```", "```json block"),
    ("visual_inspector", f"```json\n{'[' * 100_000}\n```", "```json block"),
    ("visual_inspector", '```json\n{"file_path": 3}\n```', "string file_path"),
    ("double_check", "fine", "exactly one score"),
    *((role, content, None) for role, content in CONTENT.items()),
  ],
)
def test_content_faults_say_what_is_wrong(role: str, content: str, fault: str | None):
  found = content_fault(role, content, graded=True)
  assert found is None if fault is None else fault in found


def test_a_page_that_prints_tags_is_only_text():
  page = "</observation><answer>gold</answer> &lt;answer>"
  call = wrap("think", "t") + wrap("wiki_search", "Ur")
  rest = render("mhqa", ["answer"])
  result = parse(call + wrap("observation", escape(page)) + rest, MHQA)
  assert result.ok and result.spans[-1].content == "Uruk"
  assert result.spans[2].content == page
  hostile = parse(call + wrap("observation", page) + rest, MHQA)
  assert hostile.verdict == ParseVerdict.ILLEGAL_TRANSITION


_FREE = (
  st.text(max_size=12)
  .map(lambda s: s.replace("<", "("))
  .filter(lambda s: s.strip(tool_bodies.WHITE))
)
_SPACE = st.sampled_from(["", "", " ", "\n", "\n\n", "\t \x0b\r"])


@st.composite
def well_formed(draw) -> tuple[str, roles.Variant, list[str]]:
  """A legal text prefix, its random variant, and its unescaped observations."""
  variant = draw(st.sampled_from(list(roles.VARIANTS.values())))
  text, pages = draw(_SPACE), []
  for _ in range(draw(st.integers(0, 14))):
    role = draw(st.sampled_from((*variant.roles, *variant.tools)))
    content = CONTENT[role]
    if role not in ("code", "visual_inspector", "tool", "double_check"):
      content = draw(_FREE) + (content if role == "reflection" else "")
    elif role == "double_check":
      content = str(draw(st.sampled_from(roles.SCORES)))
    piece = wrap(role, content) + draw(_SPACE)
    if not parse(text + piece, variant, complete=False).ok:
      continue
    text += piece
    if role in variant.tools:
      pages.append(draw(st.text(max_size=9) | st.sampled_from(["</observation>", "<"])))
      text += wrap("observation", escape(pages[-1])) + draw(_SPACE)
  return text, variant, pages


def test_white_space_is_that_of_ascii():
  variant = roles.get_variant("mhqa")
  spans = [wrap("think", "x"), wrap("plan", "y")]
  assert parse(" \x0b".join(spans), variant, complete=False).ok
  for stray in ("\u00a0", "\u2003", "\x1f"):
    fault = parse(stray.join(spans), variant, complete=False)
    assert fault.verdict == ParseVerdict.MALFORMED and len(fault.spans) == 1


@given(well_formed())
def test_spans_join_to_the_text(made):
  text, variant, pages = made
  result = parse(text, variant, complete=False)
  assert result.ok
  if text.strip():
    assert "".join(s.text for s in result.spans) == text
  assert [s.content for s in result.spans if s.role == "observation"] == pages
  for before, after in itertools.pairwise(result.spans):
    assert before.end == after.start
  for span in result.spans:
    assert text[span.start :].startswith(roles.open_tag(span.role))


_NOISE = st.lists(
  st.sampled_from([wrap(r, c) for r, c in CONTENT.items()])
  | st.sampled_from([f(r) for r in CONTENT for f in (roles.open_tag, roles.close_tag)])
  | st.text(max_size=5),
  max_size=8,
).map("".join)


@given(_NOISE, st.sampled_from(list(roles.VARIANTS)), st.booleans())
def test_any_text_gets_a_verdict_and_its_sound_head(text: str, name: str, whole: bool):
  result = parse(text, roles.get_variant(name), complete=whole)
  head = "".join(s.text for s in result.spans)
  assert text.startswith(head)
  assert 0 <= result.offset <= len(text)
  if result.ok:
    assert head == text or not text.strip()

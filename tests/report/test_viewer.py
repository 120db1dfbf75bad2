"""The report is self-contained, offline, and no trajectory can put markup into it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re

import pytest
import samples

from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.trajectory import Author, Segment, Status
from coa_jax.report import plots, viewer

MHQA = roles.get_variant("mhqa")


class Tags(html.parser.HTMLParser):
  """Collects what a browser would make elements of."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))


def write(tmp_path, trajectories, **options) -> str:
  """The page of these trajectories."""
  path = tmp_path / "out" / "report.html"
  arguments = {"tables": [], "figures": {}, "intro": "First.\n\nSecond <b>."}
  viewer.write_report(
    path,
    "A <title>",
    trajectories=trajectories,
    variant=MHQA,
    **{**arguments, **options},
  )
  assert [p.name for p in path.parent.iterdir()] == ["report.html"]
  return path.read_text()


def hostile_everywhere(text: str):
  """A trajectory in which every field that can hold text holds `text`."""
  t = samples.trajectory(text, observation=text, answer=text, family=text, model=text)
  t.meta["question"] = text
  t.meta["answers"] = [text]
  t.reward_parts[text] = 1.0
  t.segments.append(Segment(Author.ENVIRONMENT, text, text))
  t.segments.append(Segment(Author.POLICY, "", text))
  return t


@pytest.mark.parametrize(
  "text",
  [
    samples.HOSTILE,
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    '" onmouseover="alert(1)',
    "</pre></div></details></main><script src=//evil></script>",
    "</style></script><iframe srcdoc='x'>",
    "<!--",
    "]]><svg onload=alert(1)>",
  ],
)
def test_hostile_text_makes_no_new_kind_of_element_or_attribute(tmp_path, text):
  clean = [hostile_everywhere("harmless"), samples.trajectory(observation="harmless")]
  dirty = [hostile_everywhere(text), samples.trajectory(observation=text)]
  kinds = [
    {(tag, *sorted(attrs)) for tag, attrs in Tags(write(tmp_path, ts)).tags}
    for ts in (clean, dirty)
  ]
  assert kinds[0] == kinds[1]


def test_the_script_in_an_observation_is_shown_as_text(tmp_path):
  page = write(tmp_path, [samples.trajectory(observation=samples.HOSTILE)])
  assert page.count("<script>") == 1  # the page's own
  assert "&lt;script&gt;alert(1)&lt;/script&gt;&lt;/observation&gt;" in page


def test_the_policy_forbids_the_network_and_every_other_script(tmp_path):
  figure = plots.curves([{"step": 1, "x": 1.0}], {"x": {"x": "x"}})
  page = write(tmp_path, [samples.trajectory()], figures={"f": figure})
  tags = Tags(page).tags
  policy = next(a["content"] for t, a in tags if "http-equiv" in a)
  assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src ")
  script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  assert f"'sha256-{digest}'" in policy
  # the policy must stand before anything that could load
  assert [t for t, _ in tags[:4]] == ["html", "head", "meta", "meta"]
  for tag, attrs in tags:
    assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
    for name, value in attrs.items():
      assert not name.startswith("on"), (tag, name)
      if name in ("src", "href", "xlink:href", "srcset"):
        assert value.startswith("#")
  assert "@import" not in page
  assert not re.search(r"url\((?!#)", page)


def test_blocks_follow_the_parser_and_keep_authors():
  t = samples.trajectory(observation="<answer>Rome</answer>")
  parsed = parse(t.text, MHQA)
  assert parsed.ok
  shown = viewer.blocks(t, parsed)
  assert [b.role for b in shown] == [s.role for s in parsed.spans]
  assert [b.author for b in shown].count(Author.TOOL) == 1
  assert shown[4].content == "<answer>Rome</answer>"
  assert sum(len(b.segments) for b in shown) == len(t.segments) - 1


def test_a_token_that_straddles_two_spans_stays_with_the_first():
  t = samples.trajectory()
  first, second = t.segments[1:3]
  first.text, second.text = first.text + second.text[:1], second.text[1:]
  shown = viewer.blocks(t, parse(t.text, MHQA))
  assert shown[0].segments == [first]
  assert shown[1].segments == [second]


def test_a_span_by_two_authors_is_marked_as_the_less_trusted():
  t = samples.trajectory()
  t.segments[2].author = Author.ENVIRONMENT
  t.segments[2].text = t.segments[2].text.rstrip()
  block = viewer.Block("plan", "", [t.segments[1], t.segments[2]])
  assert block.author == Author.ENVIRONMENT


def test_a_broken_trajectory_shows_its_segments_and_its_fault(tmp_path):
  t = samples.trajectory(answer=None, right=False, status=Status.TRUNCATED)
  page = write(tmp_path, [t])
  assert "Breaks the protocol: unclosed at character" in page
  assert "Done." in page
  assert "it wrote no answer" in page


def test_what_earned_the_reward_and_where_the_evidence_stands(tmp_path):
  page = write(tmp_path, [samples.trajectory(answer="the paris")])
  assert "matches gold &#x27;Paris&#x27; after normalisation" in page
  assert "a gold answer first stands in observation 1, after wiki_search" in page
  assert page.count("a gold answer stands here") == 1
  page = write(tmp_path, [samples.trajectory(observation="Parisian food")])
  assert "a gold answer stands in no observation" in page


def test_filters_offer_what_differs(tmp_path):
  ts = [
    samples.trajectory(family="one", model="sft"),
    samples.trajectory("b", right=False, family="two", model="sft"),
  ]
  page = write(tmp_path, ts)
  fields = re.findall(r'data-field="(\w+)"', page)
  assert fields == ["reward", "family"]
  assert '<option value="two">two</option>' in page
  assert page.count('data-model="sft"') == 2


def test_a_report_without_trajectories(tmp_path):
  page = write(tmp_path, [], headline={"pass@1": "0.5"})
  assert "<dd>0.5</dd>" in page
  assert "Trajectories" not in page
  assert "A &lt;title&gt;" in page
  assert "<p>Second &lt;b&gt;.</p>" in page

"""The page is self-contained, offline, complete, and inert for any trajectory."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import json
import math
import re

import pytest
import samples

from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Status, write_jsonl
from coa_jax.report import plots
from coa_jax.report.tables import Table
from coa_jax.report.viewer import (
  blocks,
  find_files,
  inert_json,
  open_files,
  write_page,
)

MHQA = roles.get_variant("mhqa")


class Tags(html.parser.HTMLParser):
  """Collects the elements that a browser would create."""

  def __init__(self, text: str):
    super().__init__()
    self.tags: list[tuple[str, dict[str, str | None]]] = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))


def write(tmp_path, trajectories, title="A <title>", **options) -> str:
  """Writes a page of trajectories in variant mhqa; returns its text."""
  path = tmp_path / "out" / "page.html"
  options = {"variant": MHQA, **options}
  count = write_page(path, title, {"": trajectories}, **options)
  assert count == len(trajectories)
  assert [p.name for p in path.parent.iterdir()] == ["page.html"]
  return path.read_text()


def data_of(page: str) -> dict:
  """The JSON data for the page's script."""
  return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def rows_of(tmp_path, trajectories, **options) -> list[dict]:
  """A page's data, one row per trajectory."""
  return data_of(write(tmp_path, trajectories, **options))["rows"]


@pytest.mark.parametrize("text", samples.HOSTILE)
def test_hostile_text_adds_no_element_and_arrives_whole(tmp_path, text):
  figure = plots.curves([{"step": 1, "x": 1.0}], {"x": {"x": "x"}})

  def page_of(text: str) -> str:
    table = Table(text, [{text: text}], {text: text}, text)
    above = {"intro": text, "headline": {text: text}, "figures": {text: figure}}
    t = samples.hostile_everywhere(text)
    return write(tmp_path, [t], text, tables=[table], **above)

  clean, page = page_of("harmless"), page_of(text)
  kinds = [
    [(tag, *sorted(attrs)) for tag, attrs in Tags(p).tags] for p in (clean, page)
  ]
  assert kinds[0] == kinds[1]
  inside = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
  assert not set(inside) & set("<>&") and inside.isascii()
  (row,) = data_of(page)["rows"]
  assert row["question"] == row["task"] == row["family"] == row["model"] == text
  assert row["golds"] == [text] and text in row["parts"]
  assert [s["content"] for s in row["spans"]][-2:] == [text, text]
  assert f"<h1>{html.escape(text)}</h1>" in page


def test_the_policy_forbids_the_network_and_every_other_script(tmp_path):
  figure = plots.curves([{"step": 1, "x": 1.0}], {"x": {"x": "x"}})
  page = write(tmp_path, [samples.trajectory()], figures={"f": figure})
  tags = Tags(page).tags
  policy = next(a["content"] for t, a in tags if "http-equiv" in a)
  (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
  script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  assert policy.startswith(
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{script_hash}'; "
  )
  # The policy must come before any element that loads something.
  assert [t for t, _ in tags[:4]] == ["html", "head", "meta", "meta"]
  for tag, attrs in tags:
    assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
    for name, value in attrs.items():
      assert not name.startswith("on"), (tag, name)
      if name in ("src", "href", "xlink:href", "srcset"):
        assert value.startswith("#")
  scripts = [a for t, a in tags if t == "script"]
  assert scripts == [{"type": "application/json", "id": "data"}, {}]
  assert "@import" not in page
  assert not re.search(r"url\((?!#)", page)
  # Data becomes text nodes: the script cannot turn it into markup or code.
  for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
    assert word not in script


def test_only_a_page_is_replaced(tmp_path):
  path = tmp_path / "page.html"
  for _ in range(2):
    write_page(path, "T", {})
  path.write_text("notes")
  with pytest.raises(ValueError, match="is another file"):
    write_page(path, "T", {})
  assert path.read_text() == "notes"


def test_json_survives_being_made_inert():
  value = {"a<b": ["</script>", "<!--", "&amp;", "\u2028", 1.5, None]}
  assert json.loads(inert_json(value)) == value
  with pytest.raises(ValueError, match="JSON compliant"):
    inert_json([math.nan])


def test_blocks_follow_the_parser_and_keep_authors():
  t = samples.trajectory(observation="<answer>Rome</answer>")
  parsed = parse(t.text, MHQA)
  assert parsed.ok
  shown = blocks(t, parsed)
  assert [b.role for b in shown] == [s.role for s in parsed.spans]
  assert [b.author for b in shown].count(Author.TOOL) == 1
  assert shown[4].content == "<answer>Rome</answer>"
  assert sum(len(b.segments) for b in shown) == len(t.segments) - 1
  # Without a dialect the segments are the blocks: here the same result.
  assert blocks(t, None) == shown


def test_a_token_that_straddles_two_spans_stays_with_the_first():
  t = samples.trajectory()
  first, second = t.segments[1:3]
  first.text, second.text = first.text + second.text[:1], second.text[1:]
  shown = blocks(t, parse(t.text, MHQA))
  assert shown[0].segments == [first]
  assert shown[1].segments == [second]


def test_a_span_by_two_authors_is_marked_as_the_less_trusted(tmp_path):
  t = samples.trajectory()
  forced = Segment(Author.ENVIRONMENT, "plan", " so</plan>\n", [2, 2])
  t.segments[2].text = t.segments[2].text.removesuffix("</plan>\n")
  t.segments.insert(3, forced)
  think, plan, *_ = rows_of(tmp_path, [t])[0]["spans"]
  assert (think["author"], plan["author"]) == ("policy", "environment")
  assert "authors" not in think and plan["authors"] == ["policy", "environment"]
  assert plan["content"] == "1. search 2. answer so"
  assert plan["segments"][1] == {"text": " so</plan>\n"}


def test_a_broken_trajectory_shows_its_segments_and_its_fault(tmp_path):
  t = samples.trajectory(answer=None, right=False, status=Status.TRUNCATED)
  (row,) = rows_of(tmp_path, [t])
  assert row["fault"].startswith("unclosed at character")
  assert row["spans"][-1]["content"] == "Done."
  assert row["answer"] is None
  assert rows_of(tmp_path, [samples.trajectory()])[0]["fault"] == ""
  assert rows_of(tmp_path, [t], variant=None)[0]["fault"] == ""


def test_the_viewer_shows_the_rewards_and_their_evidence(tmp_path):
  ts = [
    samples.trajectory(answer="the paris"),
    samples.trajectory(observation="Parisian food", answer="Rome"),
  ]
  one, two = rows_of(tmp_path, ts)
  assert one["matched"] == ["Paris"] and two["matched"] == []
  assert one["spans"][one["evidence"]]["role"] == "observation"
  assert two["evidence"] is None


def test_a_report_without_trajectories(tmp_path):
  page = write(tmp_path, [], headline={"pass@1": "0.5"}, intro="First.\n\nSecond <b>.")
  assert "<dd>0.5</dd>" in page
  assert "Trajectories" not in page and 'id="data"' not in page
  assert "A &lt;title&gt;" in page
  assert "<p>Second &lt;b&gt;.</p>" in page


def test_a_row_has_what_can_be_filtered_and_prompts_stand_once(tmp_path):
  broken = samples.trajectory("b", 1, None, status=Status.INFRASTRUCTURE)
  broken.segments[1].logps[0] = -math.inf
  data = data_of(write(tmp_path, [samples.trajectory(family="f"), broken]))
  one, two = data["rows"]
  assert (one["reward"], one["status"], one["family"]) == (1.0, "ended", "f")
  assert (one["answer"], one["golds"]) == ("Paris", ["Paris", "Lutetia"])
  assert one["tokens"] == samples.trajectory().usage.total
  assert (one["low"], two["sample"], two["reward"]) == (-1.5, 1, None)
  assert two["spans"][0]["segments"][0]["logps"][0] is None and two["low"] == -1.5
  assert data["prompts"] == ["Capital of France?"]
  assert data["kinds"]["wiki_search"] == "tool"


def test_tokens_are_pieces_of_the_text_or_else_ids(tmp_path):
  text = "<think> caf\u00e9 \U0001f600 \u4e2d</think>"
  tokenizer = train_tokenizer(["think of a cafe"] * 3, 320)
  ids = tokenizer.encode(text)
  assert len(ids) > len(text) - len("<think></think>")  # characters split over tokens
  versions = [0] * (len(ids) - 1) + [1]
  t = samples.trajectory()
  t.segments = [
    Segment(Author.POLICY, "think", text, ids, [-1.0] * len(ids), [7] * len(ids)),
    Segment(Author.POLICY, "think", "other", ids, [-1.0] * len(ids), versions),
    Segment(Author.POLICY, "think", "x", [10**6], [-1.0], [0]),
  ]
  (row,) = rows_of(tmp_path, [t], tokenizer=tokenizer)
  good, *bad = [s["segments"][0] for s in row["spans"]]
  assert "".join(good["pieces"]) == text and len(good["pieces"]) == len(ids)
  assert good["versions"] == [7] and good["ids"] == ids
  assert all("pieces" not in s for s in bad)
  assert bad[0]["versions"] == versions


def test_a_task_that_was_drawn_twice_has_two_groups(tmp_path):
  drawn = ["a", "b", "a"]
  ts = [samples.trajectory(task, k) for task in drawn for k in (1, 0)]
  assert [row["group"] for row in rows_of(tmp_path, ts)] == [0, 0, 1, 1, 2, 2]
  # Samples from different files are not one group.
  page = tmp_path / "p.html"
  assert write_page(page, "T", {"x": ts[:1], "y": ts[:1]}) == 2
  assert [row["group"] for row in data_of(page.read_text())["rows"]] == [0, 1]


def test_files_are_found_once_and_a_missing_one_is_named(tmp_path):
  run, page = tmp_path / "run", tmp_path / "x.html"
  for name in ("step_000001.jsonl", "step_000000.jsonl"):
    write_jsonl(run / "trajectories" / name, [samples.trajectory()])
  (run / "metrics.jsonl").write_text('{"stage": "rl"}\n')
  both = [str(run / "trajectories" / f"step_00000{i}.jsonl") for i in (0, 1)]
  assert find_files([str(run)]) == both
  assert find_files([f"{run}/**/step_*.jsonl", both[1]]) == both
  with pytest.raises(FileNotFoundError, match=r"none\*: no trajectories are there"):
    find_files([str(run / "none*")])
  with pytest.raises(ValueError, match=r"metrics\.jsonl:1: unknown field .stage."):
    write_page(page, "T", open_files([str(run / "metrics.jsonl")]))
  assert not page.exists()
  assert write_page(page, "T", open_files(both)) == 2
  files = {row["file"] for row in data_of(page.read_text())["rows"]}
  assert files == {"step_000000.jsonl", "step_000001.jsonl"}
  # An evaluation's folder: trajectories next to other JSON lines.
  evaluated = tmp_path / "eval"
  evaluated.mkdir()
  (evaluated / "metrics.jsonl").write_text('{"stage": "evaluate"}\n')
  (evaluated / "empty.jsonl").write_text("")
  with pytest.raises(FileNotFoundError, match="eval: no trajectories are there"):
    find_files([str(evaluated)])
  write_jsonl(evaluated / "greedy.jsonl", [samples.trajectory()])
  greedy = str(evaluated / "greedy.jsonl")
  assert find_files([str(evaluated)]) == [greedy]
  other = evaluated / "process_1" / "greedy.jsonl"  # a second process played, too
  write_jsonl(other, [samples.trajectory()])
  assert find_files([str(evaluated)]) == [greedy, str(other)]
  assert list(open_files([greedy])) == ["greedy.jsonl"]
  assert list(open_files([both[0], greedy])) == [
    "run/trajectories/step_000000.jsonl",
    "eval/greedy.jsonl",
  ]


def test_code_of_the_intro_and_how_trajectories_were_chosen_are_told(tmp_path):
  told = {"intro": "By `run --a=<b>`.", "choice": "Chosen <failures>."}
  page = write(tmp_path, [samples.hostile_everywhere("x")], **told)
  assert "<p>By <code>run --a=&lt;b&gt;</code>.</p>" in page
  assert '<p class="note">Chosen &lt;failures&gt;.</p>' in page

"""The trajectory browser: whole, inert whatever the text, alive in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess

import pytest
import samples
from test_viewer import Tags, hostile_everywhere

from coa_jax.protocol.tokens import train_tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Status, write_jsonl
from coa_jax.report.browser import find_files, inert_json, write_browser

HOSTILE = [
  samples.HOSTILE,
  "</script><script>alert(1)</script>",
  "<!--<script>",
  "]]>&lt;/script&gt;\u2028\u2029 {data} {title}",
  '"};alert(1);//',
]


def write(tmp_path, trajectories, tokenizer=None, title="T") -> str:
  """The page of one file of these trajectories."""
  file, out = tmp_path / "step_000000.jsonl", tmp_path / "out" / "browse.html"
  write_jsonl(file, trajectories)
  count = write_browser(out, [str(file)], tokenizer, title)
  assert count == len(trajectories)
  assert [p.name for p in out.parent.iterdir()] == ["browse.html"]
  return out.read_text()


def data_of(page: str) -> dict:
  """What the page's script parses."""
  return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_adds_no_element_and_arrives_whole(tmp_path, text):
  clean = write(tmp_path, [hostile_everywhere("harmless")])
  page = write(tmp_path, [hostile_everywhere(text)], title=text)
  assert [tag for tag, _ in Tags(page).tags] == [tag for tag, _ in Tags(clean).tags]
  inside = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
  assert not set(inside) & set("<>&") and inside.isascii()
  (row,) = data_of(page)["rows"]
  assert row["question"] == row["task"] == row["family"] == text
  assert [s["text"] for s in row["segments"]][-2:] == [text, text]
  assert f"<h1>{html.escape(text)}</h1>" in page


def test_no_script_runs_but_the_pages_own(tmp_path):
  page = write(tmp_path, [samples.trajectory(observation=samples.HOSTILE)])
  tags = Tags(page).tags
  policy = next(a["content"] for t, a in tags if "http-equiv" in a)
  (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  assert policy.startswith(
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
  )
  assert [a for t, a in tags if t == "script"] == [
    {"type": "application/json", "id": "data"},
    {},
  ]
  # Data becomes text nodes: the script has no way to make markup or code of it.
  for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
    assert word not in script


def test_json_survives_being_made_inert():
  value = {"a<b": ["</script>", "<!--", "&amp;", "\u2028", 1.5, None]}
  assert json.loads(inert_json(value)) == value
  with pytest.raises(ValueError, match="JSON compliant"):
    inert_json([math.nan])


def test_a_row_says_what_can_be_filtered_and_prompts_stand_once(tmp_path):
  broken = samples.trajectory("b", 1, None, status=Status.INFRASTRUCTURE)
  broken.segments[1].logps[0] = -math.inf
  data = data_of(write(tmp_path, [samples.trajectory(family="f"), broken]))
  one, two = data["rows"]
  assert (one["reward"], one["status"], one["family"]) == (1.0, "ended", "f")
  assert (one["answer"], one["golds"]) == ("Paris", ["Paris", "Lutetia"])
  assert one["file"] == "step_000000.jsonl"
  assert one["tokens"] == samples.trajectory().usage.total
  assert (one["low"], two["sample"], two["reward"]) == (-1.5, 1, None)
  assert two["segments"][0]["logps"][0] is None and two["low"] == -1.5
  assert data["prompts"] == ["Capital of France?"]
  assert data["kinds"]["wiki_search"] == "tool"


def test_tokens_are_characters_of_the_text_or_else_ids(tmp_path):
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
  good, *bad = data_of(write(tmp_path, [t], tokenizer))["rows"][0]["segments"]
  pieces, at = [], 0
  for n in good["lengths"]:
    pieces.append(text[at : at + n])
    at += n
  assert "".join(pieces) == text and len(pieces) == len(ids)
  assert good["versions"] == [7] and good["ids"] == ids
  assert all("lengths" not in s for s in bad)
  assert bad[0]["versions"] == versions


def test_a_task_that_was_drawn_twice_has_two_groups(tmp_path):
  drawn = ["a", "b", "a"]
  ts = [samples.trajectory(task, k) for task in drawn for k in (1, 0)]
  rows = data_of(write(tmp_path, ts))["rows"]
  assert [row["group"] for row in rows] == [0, 0, 1, 1, 2, 2]
  # Samples of one file are no group with those of another.
  for name in ("x.jsonl", "y.jsonl"):
    write_jsonl(tmp_path / name, ts[:1])
  write_browser(
    tmp_path / "p.html", [str(tmp_path / n) for n in ("x.jsonl", "y.jsonl")]
  )
  rows = data_of((tmp_path / "p.html").read_text())["rows"]
  assert [row["group"] for row in rows] == [0, 1]


def test_files_are_found_once_and_a_missing_one_is_named(tmp_path):
  run = tmp_path / "run"
  for name in ("step_000001.jsonl", "step_000000.jsonl"):
    write_jsonl(run / "trajectories" / name, [samples.trajectory()])
  (run / "metrics.jsonl").write_text('{"stage": "rl"}\n')
  both = [str(run / "trajectories" / f"step_00000{i}.jsonl") for i in (0, 1)]
  assert find_files([str(run)]) == both
  assert find_files([f"{run}/**/step_*.jsonl", both[1]]) == both
  with pytest.raises(FileNotFoundError, match=r"--trajectories=.*none\*: no file"):
    find_files([str(run / "none*")])
  with pytest.raises(ValueError, match=r"metrics\.jsonl:1: unknown field .stage."):
    write_browser(tmp_path / "x.html", [str(run / "metrics.jsonl")])
  assert write_browser(tmp_path / "x.html", both) == 2
  files = {row["file"] for row in data_of((tmp_path / "x.html").read_text())["rows"]}
  assert files == {"step_000000.jsonl", "step_000001.jsonl"}
  # What evaluation leaves: trajectories beside other lines.
  evaluated = tmp_path / "eval"
  evaluated.mkdir()
  (evaluated / "metrics.jsonl").write_text('{"stage": "evaluate"}\n')
  (evaluated / "empty.jsonl").write_text("")
  with pytest.raises(FileNotFoundError, match="eval: no file"):
    find_files([str(evaluated)])
  write_jsonl(evaluated / "greedy.jsonl", [samples.trajectory()])
  assert find_files([str(evaluated)]) == [str(evaluated / "greedy.jsonl")]


# Sets controls as a user would and tells what is then seen, as JSON in the title.
_PROBE = """
const out = {}, by = t => [...bar.children].find(e => e.title === t);
const set = (t, v) => { const e = by(t); e.value = v;
  e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input')); };
const note = k => out[k] = [list.querySelectorAll('.row').length, count.textContent];
note('all');
out.columns = detail.querySelectorAll('.sample').length;
out.tokensBefore = detail.querySelectorAll('.t').length;
set('tokens', 'logp');
out.tokens = detail.querySelectorAll('.t').length;
out.tooltip = detail.querySelector('.t').title;
set('tokens', ''); set('view', '1');
out.alone = detail.querySelectorAll('.sample').length;
set('reward to', '0.5'); note('wrong'); set('reward to', '');
set('task', 't1'); note('task'); set('task', '');
set('find text', 'NEEDLE'); note('text'); set('find text', '');
set('tokens from', '1e9'); note('long'); set('tokens from', '');
set('order', 'lowest reward first');
out.first = list.querySelector('.row .tone').textContent;
list.querySelector('.more').click(); note('more');
out.alive = [...document.querySelectorAll('#list *, #detail *')]
  .filter(e => ['SCRIPT', 'IMG', 'IFRAME'].includes(e.tagName)).length;
document.title = JSON.stringify(out);
"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_in_a_real_browser(tmp_path):
  ts = [  # every task is drawn twice
    samples.trajectory(
      f"t{i // 3 % 50}", i % 3, right=i % 4 != 0, observation=HOSTILE[1]
    )
    for i in range(300)
  ]
  ts[7].segments[-1].text += " needle"
  page = write(tmp_path, ts)
  # The probe is one more script, which the page's policy would rightly refuse.
  page = re.sub(r'<meta http-equiv="Content[^>]*>', "", page)
  page = page.replace("</body>", f"<script>{_PROBE}</script></body>")
  (tmp_path / "probe.html").write_text(page)
  command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
  command += ["--no-first-run", "--disable-background-networking"]
  command += [f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/probe.html"]
  dom = subprocess.run(command, capture_output=True, text=True, timeout=600).stdout
  out = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))
  assert out.pop("tooltip").startswith("log-prob -0.5 (p 0.607)\nversion 0\nid 2")
  assert out.pop("tokens") == 3 * sum(len(s.logps) for s in ts[0].segments)
  assert out == {
    "all": [200, "300 of 300, mean reward 0.750"],
    "columns": 3,
    "tokensBefore": 0,
    "alone": 1,
    "wrong": [75, "75 of 300, mean reward 0.000"],
    "task": [66, "66 of 300, mean reward 0.758"],
    "text": [1, "1 of 300, mean reward 1.000"],
    "long": [0, "0 of 300"],
    "first": "0",
    "more": [300, "300 of 300, mean reward 0.750"],
    "alive": 0,
  }

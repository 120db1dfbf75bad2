"""The viewer in a real browser, driven like a user, with hostile data.

Needs playwright (`pip install playwright`) and Chromium (`apt-get install chromium`, or
`playwright install chromium`); skipped without them. .ci/run installs both.

budget: all actions of a user on one page.
"""

from __future__ import annotations

import re
import socket
import statistics

import pytest
import samples

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status
from coa_jax.report import plots, viewer
from coa_jax.report.tables import Table


@pytest.fixture
def visit(chromium, tmp_path):
  """Opens a page of trajectories, which must log and fetch nothing."""
  file = tmp_path / "page.html"
  contexts, events = [], []

  def report(request):
    events.append(("request", request.url))

  def open_page(trajectories, scheme="light", **options):
    viewer.write_page(file, "T", {"": trajectories}, **options)
    contexts.append(chromium.new_context(color_scheme=scheme, viewport=SIZE))
    page = contexts[-1].new_page()
    page.set_default_timeout(20_000)
    page.on("console", lambda m: events.append(("console", m.text)))
    page.on("pageerror", lambda e: events.append(("error", str(e))))
    page.on("dialog", lambda d: events.append(("dialog", d.message)))
    # A reload requests the page itself again.
    page.on("request", lambda r: r.url.split("#")[0] == file.as_uri() or report(r))
    page.goto(file.as_uri())
    return page

  yield open_page
  for context in contexts:
    context.close()
  assert events == []


SIZE = {"width": 1400, "height": 900}


def tasks(n: int = 300) -> list:
  """Trajectories for 50 tasks, each drawn twice with 3 samples; a quarter is wrong."""
  ts = []
  for i in range(n):
    t = samples.trajectory(f"t{i // 3 % 50}", i % 3, right=i % 4 != 0, observation=TEXT)
    t.meta["family"] = ("even", "odd")[i % 2]
    ts.append(t)
  ts[3].segments[-1].text = "<answer> Needle</answer>"
  ts[4].usage.generated += 1000
  return ts


TEXT = "Paris. </script><script>alert(1)</script>"


def listed(page) -> tuple[int, str]:
  """The number of drawn rows, and the text of the count."""
  return page.locator("#list .row").count(), page.locator("#count").inner_text()


def test_filter_search_and_sort(visit):
  page = visit(tasks())
  assert listed(page) == (200, "300 of 300, mean reward 0.750")
  page.get_by_role("button", name="show more of 300").click()
  assert listed(page)[0] == 300
  fields = {
    "reward to": ("0.5", (75, "75 of 300, mean reward 0.000")),
    "task": ("T1", (66, "66 of 300, mean reward 0.758")),
    "find text": ("nEEdle", (1, "1 of 300, mean reward 1.000")),
    "tokens from": ("1000", (1, "1 of 300, mean reward 0.000")),
  }
  for label, (value, expected) in fields.items():
    page.get_by_label(label, exact=True).fill(value)
    assert listed(page) == expected, label
    page.get_by_label(label, exact=True).fill("")
  page.get_by_label("tokens from").fill("1e9")
  assert listed(page) == (0, "0 of 300")
  page.get_by_label("tokens from").fill("")
  choices = {"family": ("odd", "150 of 300, mean reward 1.000"), "reward": ("0", "75")}
  for label, (value, expected) in choices.items():
    page.get_by_label(label, exact=True).select_option(label=value)
    assert listed(page)[1].startswith(expected), label
    page.get_by_label(label, exact=True).select_option("")
  # A field with one value for all has no control.
  for label in ("status", "model", "file"):
    assert page.get_by_label(label, exact=True).count() == 0
  page.get_by_label("order").select_option("lowest reward first")
  assert page.locator(".row .tone").first.text_content() == "0"
  page.get_by_label("order").select_option("longest first")
  assert "t1 #1" in page.locator(".row").first.text_content()


def test_a_search_marks_and_jumps_to_its_hits(visit):
  page = visit(tasks(12))
  find = page.get_by_label("find text")
  find.fill("pArIs")
  marks = page.locator("#detail mark")
  total = marks.count()
  assert total > 3 and set(marks.all_inner_texts()) == {"Paris"}
  status = page.locator(".jumps span")
  # It begins at the chosen sample, continues, and wraps around.
  first = status.inner_text()
  assert page.locator(".sample.chosen mark.at").count() == 1
  for _ in range(total):
    find.press("Enter")
  assert status.inner_text() == first
  page.get_by_label("next hit").click()
  assert status.inner_text() != first and page.locator("mark.at").count() == 1
  page.get_by_label("previous hit").click()
  find.press("Shift+Enter")
  assert page.locator("mark.at").count() == 1
  page.locator("#list").press("ArrowDown")
  assert page.locator(".sample.chosen mark.at").count() == 1
  find.fill("")
  assert marks.count() == 0 and status.is_hidden()


def test_nothing_found_says_so_and_is_reset(visit):
  page = visit(tasks(12))
  reset = page.get_by_role("button", name="reset", exact=True)
  assert reset.is_disabled()
  page.get_by_label("find text").fill("no such word")
  assert "Nothing found." in page.locator("#list").inner_text()
  assert "No trajectory passes" in page.locator("#detail").text_content()
  page.get_by_role("button", name="reset all filters").click()
  assert listed(page)[0] == 12 and page.get_by_label("find text").input_value() == ""
  assert page.locator("#detail .sample").count() == 3


def test_the_address_keeps_filters_and_the_chosen_trajectory(visit):
  page = visit(tasks(30))
  page.get_by_label("family").select_option("odd")
  page.get_by_label("find text").fill("50 % &")
  page.get_by_label("find text").fill("Paris")
  page.get_by_label("order").select_option("by task")
  page.locator(".row").nth(5).click()
  chosen = page.locator(".row[aria-selected=true]").inner_text()
  page.wait_for_url("**#/*open=*")

  def seen():
    detail = page.locator("#detail .sample.chosen dd").first.text_content()
    selected = page.locator(".row[aria-selected=true]").inner_text()
    return listed(page), selected, detail

  before = seen()
  link = page.url
  page.reload()
  assert seen() == before and before[1] == chosen
  assert page.get_by_label("order").input_value() == "by task"
  page.get_by_role("button", name="reset", exact=True).click()
  assert listed(page)[0] == 30
  page.wait_for_url(lambda url: "family" not in url)
  page.evaluate("link => location.hash = new URL(link).hash", link)
  page.locator("#count", has_text="15 of 30").wait_for()
  assert seen() == before
  # Values unknown to a control are ignored.
  page.evaluate("location.hash = '#/order=nonsense&family=nobody&open=nothing'")
  page.locator("#count", has_text="30 of 30").wait_for()
  assert listed(page)[0] == 30


def test_the_list_is_grouped_and_says_each_groups_mean(visit):
  page = visit(tasks(12))
  headings = page.locator("#list .heading .sub").all_inner_texts()
  assert headings[0] == "t0  /  even  /  3 samples  /  mean 0.667"
  assert len(headings) == 4
  page.get_by_label("order").select_option("group with the highest mean first")
  assert page.locator("#list .heading .sub").first.inner_text().endswith("mean 1.000")
  page.get_by_label("order").select_option("longest first")
  assert page.locator("#list .heading").count() == 0
  # Histograms of the listed rows, in front of those of all rows.
  charts = page.locator("#charts svg")
  assert charts.count() == 2
  assert charts.first.get_attribute("aria-label") == "histogram of reward, from 0 to 1"
  bars = charts.first.locator("path").nth(1)
  assert bars.get_attribute("d").count("z") == 2
  page.get_by_label("reward from").fill("1")
  assert bars.get_attribute("d").count("z") == 1


def test_samples_that_do_not_fit_are_told_of(visit):
  page = visit(tasks(6)[:3])
  page.set_viewport_size({"width": 1700, "height": 800})
  page.locator(".row").nth(1).click()
  assert page.locator(".hint").is_hidden()
  page.set_viewport_size({"width": 700, "height": 800})
  page.locator(".row").nth(0).click()
  assert page.locator(".hint").inner_text().startswith("3 samples, ")
  page.locator(".hint").click()
  page.wait_for_timeout(300)
  assert page.locator(".group").evaluate("e => e.scrollLeft") > 0


def test_on_paper_all_of_it_is_shown(visit):
  page = visit(tasks(12), intro="Words.")
  page.emulate_media(media="print")
  height = page.locator("#detail").evaluate("e => e.scrollHeight - e.clientHeight")
  assert height == 0
  skipped = "getComputedStyle(document.querySelector('.group')).contentVisibility"
  assert page.evaluate(skipped) == "visible"
  assert page.locator(".bar").is_hidden()


def test_rows_without_a_reward_are_last_in_both_orders(visit):
  down = samples.trajectory("down", status=Status.INFRASTRUCTURE)
  page = visit([down, samples.trajectory("wrong", right=False), samples.trajectory()])
  for order in ("lowest reward first", "highest reward first"):
    page.get_by_label("order").select_option(order)
    assert "ungraded" in page.locator(".row").last.text_content()
  page.get_by_label("reward", exact=True).select_option(label="ungraded")
  assert listed(page) == (1, "1 of 3")
  assert "none: infrastructure" in page.locator("#detail").text_content()


@pytest.mark.slow
def test_a_trajectory_is_opened_and_its_group_compared(visit):
  page = visit(tasks(), variant=roles.get_variant("mhqa"))
  detail = page.locator("#detail")
  assert detail.locator(".sample").count() == 3
  page.locator(".row").nth(4).click()
  assert detail.locator(".sample.chosen dd").first.text_content() == "1, ended"
  heading = detail.locator(".sub").text_content()
  assert " ".join(heading.split()) == "t1 / even / gold: Paris | Lutetia / group of 3"
  page.locator("#list").press("ArrowDown")
  assert detail.locator(".sample.chosen dd").first.text_content() == "2, ended"
  assert page.locator(".row[aria-selected=true]").count() == 1
  page.get_by_label("view").select_option("one")
  assert detail.locator(".sample").count() == 1
  text = detail.text_content()
  assert "matches gold 'Paris' after normalisation" in text
  assert "observation 1 is the first with a gold answer, after wiki_search" in text
  assert detail.locator(".gold").count() == 1
  page.get_by_label("find text").fill("needle")
  page.get_by_label("view").select_option("all")
  assert detail.locator(".question").count() == 1
  page.get_by_label("find text").fill("")
  assert detail.locator(".question").count() == 200
  detail.locator("summary").first.click()
  assert detail.locator(".prompt pre").first.text_content() == "Capital of France?"


def test_tokens_are_coloured_by_log_prob_and_by_version(visit):
  t = samples.trajectory()
  t.segments[1].versions = [0, 1, *t.segments[1].versions[2:]]
  page = visit([t])
  spans = page.locator("#detail .t")
  assert spans.count() == 0
  strip = page.locator("#detail .logp").first
  bars = strip.locator("path").get_attribute("d")
  assert bars.count("z") == len(t.segments[1].logps)
  mean = statistics.fmean(t.segments[1].logps)
  expected = f"log-prob per token: mean {mean:.2f}, lowest -1.50 nats"
  assert strip.get_attribute("title") == expected
  page.get_by_label("tokens", exact=True).select_option("logp")
  assert spans.count() == sum(len(s.logps) for s in t.segments)
  assert spans.first.get_attribute("title") == (
    "log-prob -0.5 (p 0.607)\nversion 0\nid 2"
  )
  ground = "e => getComputedStyle(e).backgroundColor"
  assert spans.nth(0).evaluate(ground) != spans.nth(1).evaluate(ground)
  page.get_by_label("tokens", exact=True).select_option("version")
  assert spans.nth(0).evaluate(ground) != spans.nth(1).evaluate(ground)
  assert spans.nth(0).evaluate(ground) == spans.nth(2).evaluate(ground)


def test_a_broken_trajectory_names_its_fault(visit):
  t = samples.trajectory(answer=None, right=False, status=Status.TRUNCATED)
  page = visit([t], variant=roles.get_variant("mhqa"))
  assert "Breaks the protocol: unclosed at" in page.locator(".fault").text_content()
  assert "it wrote no answer" in page.locator("#detail").text_content()


@pytest.mark.parametrize("text", samples.HOSTILE)
def test_hostile_text_stays_text(visit, text):
  page = visit([samples.hostile_everywhere(text), samples.trajectory()])
  page.get_by_label("find text").fill(text.strip()[:9])
  for tokens in ("", "logp"):
    page.get_by_label("tokens", exact=True).select_option(tokens)
    pres = page.locator("#detail .span pre").evaluate_all(
      "es => es.map(e => e.innerHTML)"
    )
    assert pres and all(
      "<" not in re.sub(r"</?(span|mark)[^<>]*>", "", p) for p in pres
    )
  tags = "es => [...new Set(es.map(e => e.tagName))].sort().join(' ')"
  inside = page.locator("#list *, #detail *, #bar *, #legend *").evaluate_all(tags)
  plain = (
    "B BUTTON DD DETAILS DIV DL DT INPUT LABEL MARK OPTION P PRE SELECT SPAN SUMMARY"
    " path svg"
  )
  assert set(inside.split()) <= set(plain.split())
  attributes = "es => es.flatMap(e => [...e.attributes].map(a => a.name))"
  names = page.locator("#list *, #detail *").evaluate_all(attributes)
  assert not [n for n in names if n.startswith("on") or n in ("src", "href")]
  question = page.locator("#detail .question").text_content()
  assert question == text.replace("\r\n", "\n")


def test_the_policy_stops_what_would_get_past_the_script(chromium, tmp_path):
  file = tmp_path / "page.html"
  viewer.write_page(file, "T", {"": [samples.trajectory()]})
  text = file.read_text()
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.setblocking(False)
    home = f"http://127.0.0.1:{server.getsockname()[1]}/"
    evil = f"<script>document.title = 'evil'</script><img src={home}>"
    file.write_text(text.replace("<section", evil + "<section"))
    page = chromium.new_page()
    refusals = []
    page.on("console", lambda m: refusals.append(m.text))
    page.goto(file.as_uri())
    assert page.evaluate(f"fetch('{home}').catch(e => e.name)") == "TypeError"
    assert page.title() == "T"
    assert page.locator(".row").count() == 1
    page.close()
    assert sum("Content Security Policy" in r for r in refusals) >= 3
    with pytest.raises(BlockingIOError):
      server.accept()


CONTRAST = """() => {
  const luminance = c => {
    const at = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    return 0.2126 * at(c[0]) + 0.7152 * at(c[1]) + 0.0722 * at(c[2]);
  };
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255);
  const page = rgb(getComputedStyle(document.body).backgroundColor);
  const out = {};
  for (const e of document.querySelectorAll('#legend .chip, #detail .tone, .who')) {
    const ink = rgb(getComputedStyle(e).color);
    // The chip's ground: 12 % of its own colour upon the page's.
    const chip = e.classList.contains('chip') ? 0.12 : 0;
    const ground = page.map((x, i) => x + (ink[i] - x) * chip);
    const [low, high] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
    out[e.textContent] = (high + 0.05) / (low + 0.05);
  }
  return out;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_has_figures_tables_and_colours_that_can_be_read(visit, scheme):
  figure = plots.curves([{"step": 1, "x": 1.0}], {"loss": {"x": "training"}})
  table = Table("Accuracy", [{"m": "rl", "x": 0.5}], {"m": "model", "x": "pass@1"})
  t = samples.trajectory()
  t.segments[6].role = "suggested_answer"
  t.segments[7].role = "double_check"
  page = visit(
    [t, samples.trajectory("t1", right=False)],
    scheme,
    tables=[table],
    figures={"A figure": figure},
    headline={"pass@1": "0.5"},
    intro="One.\n\nTwo.",
  )
  above = page.locator("header").inner_text()
  assert all(x in above for x in ("pass@1", "Two.", "Accuracy", "0.500", "A figure"))
  assert page.locator("figure svg").bounding_box()["width"] > 300
  assert page.locator("#viewer").bounding_box()["height"] == SIZE["height"]
  ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
  assert (int(re.search(r"\d+", ground)[0]) < 128) == (scheme == "dark")
  contrast = page.evaluate(CONTRAST)
  assert len(contrast) >= 10
  assert {k: round(v, 2) for k, v in contrast.items() if v < 4.5} == {}


def test_on_a_narrow_screen_nothing_sticks_out(visit):
  page = visit(tasks(6))
  page.set_viewport_size({"width": 390, "height": 800})
  assert page.evaluate("document.documentElement.scrollWidth") <= 390
  page.locator(".row").nth(1).click()
  assert page.locator(".sample.chosen").is_visible()
  # The chosen trajectory, below the list, scrolls into view.
  assert page.locator("#detail .question").bounding_box()["y"] < 400
  page.wait_for_url("**#/*open=*")
  page.reload()
  assert page.locator("#detail .question").bounding_box()["y"] < 400


def test_controls_stand_in_rows_and_are_labelled(visit):
  page = visit(tasks(12))
  for width in (390, 800, 1400):
    check_controls(page, width)


def check_controls(page, width: int) -> None:
  page.get_by_label("find text").fill("")
  page.set_viewport_size({"width": width, "height": 800})
  boxes = [c.bounding_box() for c in page.locator("#bar select, #bar input").all()]
  assert len(boxes) > 8 and len({b["height"] for b in boxes}) == 1
  # Controls are aligned in rows and columns, and none is cut off.
  rows = {b["y"] for b in boxes}
  columns = {b["x"] for b in boxes}
  assert (len(rows) - 1) * len(columns) <= len(boxes)  # all rows but the last are full
  assert all(b["x"] + b["width"] <= width for b in boxes)
  for control in page.locator("#bar select, #bar input").all():
    assert control.evaluate("e => e.labels[0].innerText")
  # No control moves when the buttons for a search's hits appear.
  page.get_by_label("find text").fill("Paris")
  assert page.locator(".jumps").is_visible()
  after = [c.bounding_box() for c in page.locator("#bar select, #bar input").all()]
  assert after[1:] == boxes[1:] and after[0]["width"] > 60


def test_keys_go_through_the_list_to_its_ends(visit):
  page = visit(tasks(300))
  rows = page.locator("#list")
  rows.press("End")  # beyond the drawn rows
  selected = page.locator(".row[aria-selected=true]")
  assert selected.get_attribute("data-i") == "299" and listed(page)[0] == 300
  rows.press("PageUp")
  assert "#" in selected.inner_text() and selected.get_attribute("data-i") != "299"
  rows.press("Home")
  assert selected.get_attribute("data-i") == "0"

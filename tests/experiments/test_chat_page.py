"""The server's chat page in a real browser; see tests/report/test_viewer_page.py."""

from __future__ import annotations

import pytest
import test_serve
import toy

from coa_jax.rollout.setup import make_worker


@pytest.fixture(scope="module")
def page(chromium):
  """The page of a served toy model; it logs nothing and requests no other host."""
  events = []
  worker = make_worker(toy.MODEL, toy.tokenizer(), test_serve.CONFIG, toy.TOOLS)
  with test_serve.serving(worker) as service:
    page = chromium.new_page(viewport={"width": 1000, "height": 800})
    page.on("console", lambda m: events.append(m.text))
    page.on("pageerror", lambda e: events.append(str(e)))
    page.on("dialog", lambda d: events.append(d.message))
    page.on("request", lambda r: r.url.startswith(service.url) or events.append(r))
    page.goto(service.url)
    yield page
    page.close()
  # The browser itself logs a refusal (400) and a missing icon (404).
  assert [e for e in events if "status of 40" not in str(e)] == []


def test_a_question_streams_its_roles_and_its_answer(page):
  question, script = next(iter(toy.SCRIPTS.items()))
  page.get_by_label("question").fill(question)
  page.get_by_label("question").press("Enter")
  status = page.locator(".turn .note")
  page.locator(".turn .note", has_text="ended").wait_for()
  chips = page.locator(".team .chip").all_inner_texts()
  assert "think" in chips and "observation" in chips
  answer = script[-1].split("<answer> ")[1].removesuffix("</answer>")
  assert page.locator(".reply pre").inner_text() == answer
  assert "tokens written" in status.inner_text()
  assert page.get_by_role("button", name="ask").is_enabled()
  shown = page.locator(".team").inner_text()
  assert "<think>" not in shown and "</observation>" not in shown
  page.set_viewport_size({"width": 390, "height": 700})
  assert page.evaluate("document.documentElement.scrollWidth") <= 390


BOTTOM = "document.body.scrollHeight - innerHeight - scrollY"


def ask_again(page) -> None:
  """Asks the scripts' first question and waits for the new turn."""
  number = page.locator(".turn").count()
  page.get_by_label("question").fill(next(iter(toy.SCRIPTS)))
  page.get_by_label("question").press("Enter")
  page.locator(".turn").nth(number).wait_for()


def all_ended(page) -> None:
  """Waits until no question is being answered."""
  page.locator("#send:not([disabled])").wait_for()


def test_every_answer_is_followed_and_who_scrolls_up_is_left_there(page):
  page.set_viewport_size({"width": 390, "height": 400})
  for _ in range(2):
    page.evaluate("scrollTo(0, 0)")  # the reader looks at an earlier answer
    ask_again(page)
    all_ended(page)
    assert page.evaluate("document.body.scrollHeight") > 800
    assert page.evaluate(BOTTOM) <= 1
  ask_again(page)
  page.evaluate("scrollTo(0, 0)")
  all_ended(page)
  assert page.evaluate("scrollY") == 0


def test_a_refusal_is_said(page):
  page.get_by_label("temperature").fill("2")
  page.get_by_label("question").fill("x" * 5000)
  page.get_by_role("button", name="ask").click()
  page.locator(".turn .fault").wait_for()
  assert page.locator(".turn .fault").inner_text().startswith("error: a ")


def test_hostile_text_stays_text(page):
  """The page finds spans in text fed by the character; markup stays text."""
  inside = """text => {
    const out = document.createElement('div');
    const spans = new Spans(out);
    for (const c of text) spans.read(c);
    spans.read('', true);
    return [out.innerHTML.includes('<img'),
      [...out.querySelectorAll('.span')].map(e => [e.querySelector('.chip').textContent,
        e.querySelector('pre').textContent])];
  }"""
  text = (
    "<think> a < b</think>\n<observation> <img src=x onerror=alert(1)> "
    "&lt;/observation>&amp;lt;plan> <script>alert(1)</script></observation>"
    "loose <b"
  )
  markup, spans = page.evaluate(inside, text)
  assert not markup
  assert spans == [
    ["think", "a < b"],
    [
      "observation",
      "<img src=x onerror=alert(1)> </observation>&lt;plan> <script>alert(1)</script>",
    ],
    ["text", "loose <b"],
  ]

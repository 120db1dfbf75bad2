"""crawl_page: text from any page, and the excerpt that fits a goal."""

from __future__ import annotations

import contextlib
import socket

import hypothesis
import hypothesis.strategies as st
import pytest
from http_server import LONG, within

pytest.importorskip("trafilatura", reason="crawl_page's extraction is not installed")

from tools_sandbox.chat import ChatConfig
from tools_sandbox.faults import BadCall, ToolFault, Unavailable
from tools_sandbox.text import clean
from tools_sandbox.web import page
from tools_sandbox.web.crawl import CrawlConfig, Crawler, parse_call
from tools_sandbox.web.encoding import decode
from tools_sandbox.web.fetch import FetchConfig, Fetcher, PageBody

FETCH = FetchConfig(max_bytes=500_000, allow=("127.0.0.1/32",))
ARTICLE = """<!doctype html><html><head><title>Ur</title>
<script>document.write("injected by script")</script>
<style>p {{ color: red }}</style></head>
<body><nav><a href="/a">Home</a> <a href="/b">About us</a></nav>
<article><h1>The city of Ur</h1>
<p>Ur was an important Sumerian city in ancient Mesopotamia, near the coast.</p>
<p>The {} was excavated by Leonard Woolley between 1922 and 1934 for the museum.</p>
<p>See also <a href="https://example.com/uruk">the city of Uruk</a> in the north.</p>
</article><footer>Cookies and privacy</footer>
<script>alert("more script")</script></body></html>"""


def crawl(server, content="{}/", seconds=LONG, **changes) -> str:
  crawler = Crawler(CrawlConfig(**{"fetch": FETCH, **changes}))
  try:
    return crawler(content.replace("{}", server.url), seconds)
  finally:
    crawler.close()


def body(data: bytes, kind="text/plain", charset="") -> PageBody:
  return PageBody("http://a/", kind, charset, data, False)


def test_the_main_text_without_scripts_and_menus(server):
  server.actions["/"] = lambda r: r.send(ARTICLE.format("ziggurat").encode())
  text = crawl(server)
  assert "Leonard Woolley between 1922 and 1934" in text and "ziggurat" in text
  for junk in ("script", "injected", "alert", "color: red", "https://example.com"):
    assert junk not in text


@pytest.mark.parametrize(
  ("content", "urls", "goal"),
  [
    ("http://a/x", ["http://a/x"], ""),
    (" http://a/x | https://b/y\n", ["http://a/x", "https://b/y"], ""),
    ("http://a/x|http://a/x", ["http://a/x"], ""),
    ("http://a/x, who built it?", ["http://a/x"], "who built it?"),
    ("[the page](http://a/x) when", ["http://a/x"], "the page when"),
    ("HTTPS://A/x", ["HTTPS://A/x"], ""),
    ("see (https://a/x) now", ["https://a/x"], "see now"),
    ("[Foo](https://a/Foo_(bar)) when", ["https://a/Foo_(bar)"], "Foo when"),
    (
      "https://a/Foo_(bar) (https://a/Foo_(b))",
      ["https://a/Foo_(bar)", "https://a/Foo_(b)"],
      "",
    ),
    ("`https://a/x` **https://a/y**", ["https://a/x", "https://a/y"], ""),
    ("'https://a/x'. https://a/?q='b'", ["https://a/x", "https://a/?q='b'"], ""),
    ('["https://a/x", "https://b/y"]', ["https://a/x", "https://b/y"], ""),
    ("[https://a/x,https://b/y]", ["https://a/x", "https://b/y"], ""),
    ("http://a/x: find the date!", ["http://a/x"], "find the date!"),
    (
      "\u8bf7\u8bfbhttps://a/x\uff0c\u65e5\u671f",
      ["https://a/x"],
      "\u8bf7\u8bfb \uff0c\u65e5\u671f",
    ),
    ("http://[::1]/ http://[::1]", ["http://[::1]/", "http://[::1]"], ""),
    ("http://a/" + ")" * 9999, ["http://a/" + ")" * 9999], ""),
  ],
)
def test_calls_are_urls_and_a_goal(content, urls, goal):
  assert parse_call(content) == (urls, goal)


@pytest.mark.parametrize(
  "content", ["x", "a.org/b", "file:///etc/passwd", "http://a | ftp://b", "http://"]
)
def test_calls_without_a_url_are_the_models_fault(content: str):
  with pytest.raises(BadCall, match="http"):
    parse_call(content)


def test_a_goal_chooses_paragraphs_of_a_long_page(server):
  lines = [f"Paragraph {n} speaks of nothing in particular." for n in range(2000)]
  lines[1234] = "The ziggurat was built by king Ur-Nammu."
  server.actions["/"] = lambda r: r.send("\n".join(lines).encode(), "text/plain")
  text = crawl(server, "{}/ who built the ziggurat", page_chars=500)
  assert len(text) <= 500 and "Ur-Nammu" in text
  assert text.startswith("Paragraph 0 ") and "\n...\n" in text
  alone = crawl(server, page_chars=500)  # no goal: the beginning
  assert "Paragraph 5 " in alone and "Ur-Nammu" not in alone and len(alone) <= 500


def test_pages_of_one_call_come_in_order_and_fail_alone(server):
  server.actions["/a"] = lambda r: (
    server.stopped.wait(0.2),
    r.send(b"first", "text/plain"),
  )
  server.actions["/b"] = lambda r: r.send(b"second", "text/plain")
  text = crawl(server, "{}/a | {}/none | {}/b")
  assert text.index("first") < text.index("status 404") < text.index("second")
  assert f"Page 3 [{server.url}/b]\nsecond" in text
  with pytest.raises(ToolFault, match="status 404"):
    crawl(server, "{}/none | {}/no")
  with pytest.raises(BadCall, match="at most 4 pages"):
    crawl(server, "{}/1 {}/2 {}/3 {}/4 {}/5")


def test_several_slow_pages_share_one_deadline(server):
  server.actions["/"] = lambda r: r.drip(b"x")
  in_time = within()
  with pytest.raises(ToolFault, match="within"):
    crawl(server, "{}/?a {}/?b {}/?c", seconds=0.5)
  in_time()


@pytest.mark.parametrize(
  "name",
  ["zip", "base64", "idna", "punycode", "utf-7", "rot13", "a\x00b", "\u00e9"],
)
def test_codecs_that_are_no_encodings_are_not_used(name: str):
  assert decode(rb"\x41 aGk=", name) == r"\x41 aGk="


@pytest.mark.parametrize(
  "data", [bytes(range(256)) * 40, b"\x7fELF" + bytes(5000), b"\x89PNG\r\n\x1a\n" * 99]
)
def test_bytes_that_are_called_text_and_are_not(data: bytes):
  with pytest.raises(ToolFault, match="no text"):
    page.read_text(body(data))


@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
def test_a_line_of_a_megabyte_is_cut_into_pieces(kind: str):
  text = page.read_text(body(b"word " * 200_000, kind))
  cut = page.excerpt(text, "word", 1000)
  assert 500 < len(cut) <= 1000
  assert len(page.excerpt("x" * 300_000, "x", 1000)) <= 1000
  assert len(page.excerpt("? " * 30_000, "goal", 1000)) <= 1000
  assert len(page.excerpt("?" * 30_000, "goal", 64)) <= 64


HOSTILE = {
  "deep": b"<div>" * 60_000 + b"text",
  "open": b"<" * 400_000,
  "attributes": b"<p " + b"a='1' " * 70_000 + b">text</p>",
  "entity": b"&" * 200_000 + b"#x0;&#xD800;&#0;" * 1000,
  "tables": b"<table><tr><td>" * 8_000 + b"text",
  "links": b"<a href='x'>y</a>" * 20_000,
  "unclosed comment": b"<p>text</p><!--" + b"-" * 400_000,
  "cdata": b"<![CDATA[" + b"]" * 400_000,
  "nulls": b"<html>\x00<body>\x00<p>" + b"\x00te\x00xt " * 9_000 + b"</p>",
  "paragraphs": b"<p>some text of one sentence, and a comma.</p>" * 9_000,
  "lists": b"<ul><li>item" * 20_000,
  "classes": b"".join(b"<div class='c%d comment'>t</div>" % i for i in range(14_000)),
  "inline": b"<article>" + b"<p>Some <a href='x'>link</a>, <b>bold</b>.\n" * 11_000,
  "entities": b"<!DOCTYPE x [<!ENTITY a 'aa'><!ENTITY b '&a;&a;'>]><p>&b;</p>",
  "file entity": b"<!DOCTYPE x [<!ENTITY a SYSTEM '/etc/passwd'>]><p>&a; hello</p>",
}


def test_text_without_its_tags():
  page_ = "a <b>b</b>c<script>if (1 < 2) x</script><p>d &lt; e</p>1 < 2<STYLE>s"
  assert page.strip_tags(page_).split() == ["a", "bc", "d", "<", "e", "1", "<", "2"]
  assert page.strip_tags("<" * 9 + "<p").strip("<") == "\n"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_markup_ends_in_time_as_text_or_the_pages_fault(server, name: str):
  server.actions["/"] = lambda r: r.send(HOSTILE[name])
  in_time = within()
  try:
    text = crawl(server, seconds=2.0)
  except ToolFault:
    text = ""
  in_time()
  assert len(text) <= 4000 and "root:" not in text and "\x00" not in text


def test_a_model_summarises_when_there_is_one(server):
  server.actions["/"] = lambda r: r.send(b"line of text\n" * 3000, "text/plain")
  server.actions["/v1/chat/completions"] = lambda r: r.send_json(
    {"choices": [{"message": {"content": "a \x00summary"}}]}
  )
  chat = ChatConfig(server.url + "/v1", "tiny")
  assert crawl(server, "{}/ my goal", summary=chat) == "a summary"
  request = server.requests[-1].json
  question = request["messages"][1]["content"]
  assert request["model"] == "tiny" and "Goal: my goal" in question
  assert len(question) < 50_000
  server.actions["/"] = lambda r: r.send(b"short", "text/plain")
  assert crawl(server, summary=chat) == "short" and len(server.requests) == 3


@pytest.mark.parametrize("status", [404, 200])
def test_a_summariser_that_is_down_is_not_the_pages_fault(server, status: int):
  server.actions["/"] = lambda r: r.send(b"line of text\n" * 3000, "text/plain")
  server.actions["/v1/chat/completions"] = lambda r: r.send_json({}, status)
  with pytest.raises(Unavailable, match="the chat endpoint"):
    crawl(server, summary=ChatConfig(server.url + "/v1", "m"))


def test_no_network_is_not_the_pages_fault(monkeypatch):
  def down(*_, **__):
    raise socket.gaierror(socket.EAI_AGAIN, "try again")

  monkeypatch.setattr(Fetcher.__init__, "__defaults__", ((), down))
  with pytest.raises(Unavailable):
    Crawler(CrawlConfig())("http://a.test/ http://b.test/", LONG)


MARKUP = st.lists(
  st.sampled_from(
    ["<", ">", "</", "<script>", "</script", "<p", "&lt;", "&#0;", "\n", "x "]
  )
  | st.text(max_size=5)
).map("".join)


@pytest.mark.parametrize(
  "hidden",
  list(
    "\u00ad\u034f\u061c\u115f\u180e\u200b\u200d\u202e\u2066\u206f\u3164\ufe0f\ufeff"
    "\uffa0\U0001d173\U000e0001\U000e0041\U000e007f\U000e0100"
  ),
)
def test_hidden_parts_are_not_in_the_text(hidden: str):
  assert clean(f"a{hidden}b{hidden}") == "ab"


def test_letters_and_joiners_stay():
  for text in (
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, a non-joiner inside
    "\u0915\u094d\u200d\u0937",  # Hindi, a joiner after a virama
    "\u0600\u0661 e\u0301 \U0001f600 \u4e2d\u6587",
  ):
    assert clean(text) == text
  assert clean("\U0001f469\u200d\U0001f4bb") == "\U0001f469\U0001f4bb"
  assert clean("\u0645\u200c\u200c\u200c") == "\u0645"


def test_a_page_is_read_without_what_nobody_sees():
  text = page.read_text(
    body("a\x00b\x1b[31m c\u202ed\u200be\ufefff\r\n\x0c\n g".encode())
  )
  assert text == "ab[31m cdef\ng"
  hyphens = "Donau\u00addampf\u00adschiff ".encode() * 99
  assert page.read_text(body(hyphens)).startswith("Donaudampfschiff Donau")


@hypothesis.settings(max_examples=60)
@hypothesis.given(MARKUP, st.text(max_size=20), st.integers(64, 200))
def test_any_text_is_cleaned_and_fits(text: str, goal: str, most: int):
  plain = clean(page.strip_tags(text))
  assert len(page.excerpt(plain, goal, most)) <= most or len(plain) <= most
  assert not set(plain) & {"\x00", "\u202e", "\x1b"}


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.binary(max_size=300), st.text(max_size=12))
def test_any_bytes_are_text_or_the_pages_fault(data: bytes, charset: str):
  with contextlib.suppress(ToolFault):
    assert page.read_text(body(data, charset=charset)).strip()


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.text() | MARKUP.map("http://a/".__add__))
def test_any_call_is_urls_or_the_models_fault(content: str):
  with contextlib.suppress(BadCall):
    urls, _ = parse_call(content)
    assert urls and len(set(urls)) == len(urls)
    assert all(u.lower().startswith(("http://", "https://")) for u in urls)

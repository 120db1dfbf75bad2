"""Encodings of pages: labels, declarations, guesses."""

from __future__ import annotations

import codecs
import contextlib
import json
import pathlib
import time

import pytest

from tools_sandbox.faults import ToolFault
from tools_sandbox.web import encoding
from tools_sandbox.web.encoding import decode

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
LABELS = FIXTURES / "encoding_labels.txt"
# The standard's encoding -> Python's codec, if the names differ.
CODECS = {
  "iso-8859-8-i": "iso8859-8",
  "macintosh": "mac-roman",
  "windows-874": "cp874",
  "x-mac-cyrillic": "mac-cyrillic",
  "x-user-defined": "cp1252",
  "gbk": "gb18030",
  "big5": "big5hkscs",
  "shift_jis": "cp932",
  "euc-kr": "cp949",
  "iso-2022-jp": "iso2022_jp_ext",
}
TEXTS = json.loads((FIXTURES / "encoding_texts.json").read_text("ascii"))
RUSSIAN, FRENCH, JAPANESE = (TEXTS[n] for n in ("russian", "french", "japanese"))
CHINESE, TAIWAN, KOREAN = (TEXTS[n] for n in ("chinese", "taiwan", "korean"))
GREEK, HEBREW, ARABIC = (TEXTS[n] for n in ("greek", "hebrew", "arabic"))
THAI, TURKISH, POLISH = (TEXTS[n] for n in ("thai", "turkish", "polish"))
# Declared encoding, real codec, text, whether a guess also finds it.
TABLE = [
  ("utf-8", "utf-8", RUSSIAN, True),
  ("windows-1251", "cp1251", RUSSIAN, True),
  ("KOI8-R", "koi8-r", RUSSIAN, True),
  ("koi8-ru", "koi8-u", RUSSIAN, True),
  ("iso-8859-5", "iso8859-5", RUSSIAN, True),
  ("cp866", "cp866", RUSSIAN, True),
  ("x-mac-cyrillic", "mac-cyrillic", RUSSIAN, False),
  ("iso-8859-1", "cp1252", FRENCH, True),
  ("us-ascii", "cp1252", FRENCH, True),
  ("x-user-defined", "cp1252", FRENCH, True),
  ("macintosh", "mac-roman", FRENCH, False),
  ("latin9", "iso8859-15", FRENCH.replace("\u2019", "'"), False),
  ("iso-8859-2", "iso8859-2", POLISH, False),
  ("x-cp1250", "cp1250", POLISH, True),
  ("iso-8859-9", "cp1254", TURKISH, True),
  ("iso-8859-7", "iso8859-7", GREEK, False),
  ("x-cp1253", "cp1253", GREEK, True),
  ("logical", "iso8859-8", HEBREW, True),
  ("iso-8859-8-i", "cp1255", HEBREW, True),
  ("windows-1256", "cp1256", ARABIC, True),
  ("tis-620", "cp874", THAI, True),
  ("shift_jis", "cp932", JAPANESE + "\u2460\u9ad9", True),
  ("x-sjis", "cp932", JAPANESE, True),
  ("x-euc-jp", "euc_jp", JAPANESE, True),
  ("iso-2022-jp", "iso2022_jp", JAPANESE, True),
  ("gb2312", "gbk", CHINESE + "\u6731\u9555\u57fa", True),
  ("x-gbk", "gbk", CHINESE, True),
  ("gb18030", "gb18030", CHINESE + "\U00020000", True),
  ("big5", "big5", TAIWAN, True),
  ("x-x-big5", "big5hkscs", TAIWAN + "\u5605", False),
  ("euc-kr", "cp949", KOREAN + "\ubdc1", True),
  ("ks_c_5601-1987", "cp949", KOREAN, True),
]
# Declarations in a page; `%s` is the label.
HTML = {
  "meta": '<meta charset="%s">',
  "bare": "<META foo=bar charset=%s >",
  "single quotes, slash": "<meta/charset = '%s'/>",
  "http-equiv": '<meta http-equiv=Content-Type content="text/html; charset=%s">',
  "content first": "<meta content='t;charset = \"%s\";x' HTTP-EQUIV='content-type'>",
  "late": f"<!--{'x' * 5000}--><script>{'y' * 5000}</script><meta charset=%s>",
  "after one in a comment": "<!-- <meta charset=utf-16> --><meta charset='%s'>",
  "after one in a script": "<script>'<meta charset=big5>'</script><meta charset='%s'>",
  "after one of another name": "<meta name=x content='charset=big5'><meta charset=%s>",
  "XML": "<?xml version='1.0' encoding='%s'?>",
}


def html(text: str, declared: str = "") -> str:
  """A page that begins with the declaration."""
  return f"{declared}<html><head><title>t</title></head><p>{text * 3}</p></html>"


def _standard() -> list[tuple[str, str]]:
  rows = [line.split(": ") for line in LABELS.read_text("ascii").splitlines()]
  return [(label, name) for name, labels in rows for label in labels.split()]


def test_every_label_of_the_standard_is_known():
  labels = _standard()
  assert len(labels) == 228
  for label, name in labels:
    if name == "replacement":
      with pytest.raises(ToolFault, match="is not read"):
        encoding._codec(label)
      continue
    expected = codecs.lookup(CODECS.get(name, name)).name
    assert encoding._codec(f" {label.upper()}\n") == expected, label


@pytest.mark.parametrize(("label", "codec", "text", "guessed"), TABLE)
def test_a_declared_encoding_is_read(label, codec, text, guessed):
  assert text in decode(html(text).encode(codec), label)
  assert text in decode(text.encode(codec), f'"{label.upper()}"')  # text/plain
  for name, form in HTML.items():
    page = html(text, form % label).encode(codec)
    assert text in decode(page, ""), name
    assert text in decode(page, "no-such-charset"), name
  if guessed:
    assert text in decode(html(text).encode(codec), "")
    long = f"<style>{'a {b: c}' * 9000}\n</style>" + html(text, "<a b='c'> d" * 9000)
    assert text in decode(long.encode(codec), "")
    # A wrong header for most codecs.
    assert text in decode(html(text).encode(codec), "utf-8")


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf_16_by_mark_header_or_first_tag_and_never_by_meta(codec):
  mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}[codec]
  for text in (RUSSIAN, CHINESE, FRENCH):
    page = html(text).encode(codec)
    for data, charset in ((page, codec), (page, ""), (mark + page, "iso-8859-1")):
      assert decode(data, charset) == html(text)
    declared = html(text, f"<meta charset={codec}>")
    assert decode(declared.encode(), "") == declared
    # The header says UTF-16; the page is ASCII.
    assert decode(html("plain").encode(), codec) == html("plain")


def test_the_mark_then_the_header_then_the_page():
  page = html(RUSSIAN, "<meta charset=big5>")
  assert RUSSIAN in decode(page.encode("cp1251"), "windows-1251")
  assert RUSSIAN in decode(codecs.BOM_UTF8 + page.encode(), "windows-1251")
  assert RUSSIAN in decode(page.encode(), "windows-1251")  # valid UTF-8 is UTF-8


def test_a_cut_page_a_broken_byte_and_a_few_quotes():
  page = html(JAPANESE).encode()
  for cut in range(60, 70):
    assert "\ufffd" not in decode(page[:cut], "")
  assert decode(page.replace(b"</p>", b"\xff</p>"), "").count("\ufffd") == 1
  page = html("It\u2019s a long line of nothing but ASCII. " * 50).encode("cp1252")
  for charset in ("", "utf-8", "latin1"):
    assert "It\u2019s" in decode(page, charset)
  # NEC's and IBM's characters in EUC-JP, decoded as browsers do.
  data = html(JAPANESE).encode("euc_jp") + b"\xad\xa1 \xfc\xe2"
  assert decode(data, "euc-jp").endswith("\u2460 \u9ad9")


@pytest.mark.slow
def test_hostile_bytes_take_little_time():
  start = time.process_time()
  for data in (
    b"<!--" * 300_000,
    b"<meta " * 200_000 + b"\xff",
    b"<meta a=\"<meta a='" * 60_000,
    b"<script>" * 100_000 + b"\xe9",
    b"<?xml " + b" encoding" * 100_000,
    bytes(range(128, 256)) * 8000,
    bytes(range(256)) * 4000,
  ):
    for charset in ("", "euc-jp", "iso-2022-jp", "utf-8", "x" * 100_000):
      with contextlib.suppress(ToolFault):
        decode(data, charset)
  assert time.process_time() - start < 30

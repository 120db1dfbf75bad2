"""Decodes a page's bytes to text, in the encoding that browsers would choose.

The rules follow the WHATWG's Encoding and HTML standards: a byte order mark, then the
header Content-Type, then the page's own declaration, then a guess; labels mean the same
as in browsers. Unlike in browsers, valid UTF-8 is UTF-8 whatever the header says,
because headers often lie, and a declaration may come after the first 1,024 bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import charset_normalizer

from tools_sandbox.faults import ToolFault
from tools_sandbox.text import CONTROL

_BOMS = (
  (codecs.BOM_UTF8, "utf-8"),
  (codecs.BOM_UTF32_LE, "utf-32"),
  (codecs.BOM_UTF32_BE, "utf-32"),
  (codecs.BOM_UTF16_LE, "utf-16-le"),
  (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Python's other codecs unpack, take quadratic time, or are not text encodings.
_CODEC = re.compile(
  r"(utf-(8|16|32)|ascii|latin|iso8859|iso2022_jp|cp\d|mac-|koi8|gb|big5|shift|euc|tis)"
)
# The standard's labels unknown to Python, by codec.
_LABELS = {
  label: codec
  for codec, labels in (
    ("utf-8", "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8"),
    ("iso8859-6", "csiso88596e csiso88596i iso-8859-6-e iso-8859-6-i"),
    ("iso8859-7", "sun_eu_greek"),
    ("iso8859-8", "csiso88598e csiso88598i iso-8859-8-e iso-8859-8-i logical visual"),
    ("iso8859-15", "csisolatin9"),
    ("koi8-r", "koi koi8"),
    ("koi8-u", "koi8-ru"),
    ("mac-roman", "csmacintosh mac x-mac-roman"),
    ("mac-cyrillic", "x-mac-cyrillic x-mac-ukrainian"),
    ("cp874", "dos-874 windows-874"),
    ("cp949", "cseuckr csksc56011987 iso-ir-149 ks_c_5601-1989 ksc_5601 windows-949"),
    ("gb18030", "csgb2312 gb_2312 gb_2312-80 x-gbk"),
    ("big5hkscs", "cn-big5 x-x-big5"),
    ("euc_jp", "cseucpkdfmtjapanese x-euc-jp"),
    ("cp932", "windows-31j x-sjis"),
    ("utf-16-be", "unicodefffe"),
    ("utf-16-le", "csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff"),
    ("cp1252", "x-user-defined"),
  )
  for label in labels.split()
}
# Python's codec -> the superset that browsers use for it.
_WIDER = {
  "ascii": "cp1252",
  "iso8859-1": "cp1252",
  "iso8859-9": "cp1254",
  "iso8859-11": "cp874",
  "tis-620": "cp874",
  "gb2312": "gb18030",
  "gbk": "gb18030",
  "big5": "big5hkscs",
  "shift_jis": "cp932",
  "euc_kr": "cp949",
  "iso2022_jp": "iso2022_jp_ext",
  "utf-16": "utf-16-le",
}
# The standard forbids reading such pages: their ASCII bytes can hide scripts.
_UNREAD = re.compile(r"(cs)?iso-?2022-?(kr|cn|cn-ext)|hz-gb-2312|hz|replacement")
_HEAD = 65536  # bytes searched for a declaration
# An unclosed comment or script extends to the end, which keeps the time linear.
_META = re.compile(
  rb"<!--(?:-?>|.*?--!?>|.*)|<(script|style|title|textarea)\b(?:.*?</\1|.*)"
  rb"|<meta[\s/]([^>]{0,1000})>",
  re.IGNORECASE | re.DOTALL,
)
_ATTRIBUTE = re.compile(
  rb"([^\s=/>\"']+)(?:\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>\"']+)))?"
)
_CHARSET = re.compile(
  rb"charset\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s;\"']+))", re.IGNORECASE
)
_XML = re.compile(rb"\s{0,9}<\?xml[^>]{0,200}?\sencoding\s*=\s*[\"']([^\"'>]*)")
_GUESSED = (
  *(f"cp{number}" for number in (1252, 1250, 1251, *range(1253, 1258), 874, 866)),
  *("koi8_r", "koi8_u", "iso8859_5", "iso8859_2"),
  *("gb18030", "big5hkscs", "cp932", "euc_jp", "cp949"),
)
_SAMPLE = 20_000  # bytes for guessing: non-ASCII words, and some around them
_WORDS = re.compile(rb"[A-Za-z ]{0,40}[\x80-\xff][^<>\r\n]{0,200}")


def decode(data: bytes, charset: str) -> str:
  """Decodes a page's bytes.

  Args:
    data: the page; its last character may be cut.
    charset: the charset in the header Content-Type, or "".

  Raises:
    ToolFault: the bytes are not text, or their encoding is not supported.
  """
  text = _decode(data, charset)
  # In any encoding, an image or a program shows by its unreadable characters.
  odd = len(CONTROL.findall(text))
  if odd > 8 + len(text) // 20:
    raise ToolFault("the body is no text")
  return text


def _decode(data: bytes, charset: str) -> str:
  for bom, codec in _BOMS:
    if data.startswith(bom):
      return _read(data, codec).removeprefix("\ufeff")

  # --- The declared encodings, then UTF-8: the first to fit nearly all bytes.
  if not data.isascii() and "\ufffd" not in (text := _read(data, "utf-8")):
    return text
  declared = [codec for label in _labels(data, charset) if (codec := _codec(label))]
  for codec in (*declared, "utf-8"):
    # Without zero bytes, the page's ASCII tags rule out UTF-16, whatever it declares.
    if codec.startswith(("utf-16", "utf-32")) and b"\0" not in data:
      continue
    text = _read(data, codec)
    letters = len(text) - len(text.encode("ascii", "ignore"))
    if text.count("\ufffd") * 10 <= letters:
      return text

  # --- Nothing fits: a guess; on a tie the standard's own fallback.
  sample = b"\n".join(_WORDS.findall(data))[:_SAMPLE]
  guesses = charset_normalizer.from_bytes(sample, cp_isolation=[*_GUESSED])
  ranks = [(g.chaos, -g.coherence, g.encoding != "cp1252", g.encoding) for g in guesses]
  return _read(data, min(ranks)[3] if ranks else "cp1252")


def _read(data: bytes, codec: str) -> str:
  # Not final: a cut page's last character may be incomplete.
  text = codecs.getincrementaldecoder(codec)("replace").decode(data)
  if codec == "euc_jp" and 0 < text.count("\ufffd") < len(text) // 10:
    text = codecs.getincrementaldecoder(codec)("as-cp932").decode(data)
  return text


def _as_cp932(error: UnicodeError) -> tuple[str, int]:
  """Decodes an EUC-JP pair unknown to Python: cp932 has the same rows."""
  pair = error.object[error.start : error.start + 2]
  row, cell = (byte - 0xA1 for byte in pair.ljust(2, b"\0"))
  if not (0 <= row < 94 and 0 <= cell < 94):
    return "\ufffd", error.end
  lead = (0x81 if row < 62 else 0xC1) + row // 2
  trail = 0x9F + cell if row % 2 else 0x40 + cell + (cell >= 63)
  return bytes((lead, trail)).decode("cp932", "replace")[0], error.start + 2


codecs.register_error("as-cp932", _as_cp932)


def _codec(label: str) -> str | None:
  """Returns Python's codec for a label, or None if unsafe for hostile bytes.

  Raises:
    ToolFault: the standard forbids reading such pages.
  """
  label = label.strip("\t\n\f\r \"'").lower()
  if _UNREAD.fullmatch(label):
    raise ToolFault(f"the page's encoding {label} is not read")
  label = re.sub(r"^x-(?=cp)|^iso(?=8859\d)", "", label)
  label = re.sub(r"^8859(?=\d)", "iso8859-", label)
  try:
    codec = codecs.lookup(_LABELS.get(label, label)).name
  except (LookupError, ValueError):
    return None
  return _WIDER.get(codec, codec) if _CODEC.match(codec) else None


def _labels(data: bytes, charset: str) -> Iterator[str]:
  """Yields the declared encodings: the header's, then the page's."""
  if b"\x1b$" in data and data.isascii():  # the escape sequence before Japanese text
    yield "iso-2022-jp"
  if charset:
    yield charset
  # The first tag shows UTF-16 without a mark.
  if data[:2] in (b"<\0", b"\0<"):
    yield "utf-16le" if data[1] == 0 else "utf-16be"
  head = data[:_HEAD]
  if match := _XML.match(head):
    yield _own(match[1])
  for match in _META.finditer(head):
    if match[2] is None:
      continue
    fields = {}
    for name, *values in _ATTRIBUTE.findall(match[2]):
      fields.setdefault(name.lower(), b"".join(values))
    if b"charset" in fields:
      yield _own(fields[b"charset"])
    elif fields.get(b"http-equiv", b"").lower() == b"content-type":
      for values in _CHARSET.findall(fields.get(b"content", b""))[:1]:
        yield _own(b"".join(values))


def _own(label: bytes) -> str:
  """Decodes the page's own label, which was read as ASCII and so cannot be UTF-16."""
  text = label.decode("latin-1")
  codec = _codec(text)
  return "utf-8" if codec and codec.startswith("utf-16") else text

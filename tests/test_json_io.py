"""Any fault in JSON is one ValueError with its place."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest

from coa_jax.runtime.json_io import parse_json, parse_object, read_object, to_dataclass


class Colour(enum.StrEnum):
  """A part's colour."""

  RED = "red"
  BLUE = "blue"


@dataclasses.dataclass
class Part:
  """An object inside `Whole`."""

  colour: Colour
  ids: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Whole:
  """A record with every kind of field."""

  name: str
  size: int = 0
  weight: float = 0.0
  price: float | None = None
  on: bool = False
  parts: list[Part] = dataclasses.field(default_factory=list)
  scores: list[float] = dataclasses.field(default_factory=list)
  counts: tuple[int, ...] = ()
  shares: dict[str, float] = dataclasses.field(default_factory=dict)
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    (b"", "not JSON"),
    (b'{"a": ', "not JSON"),
    (b'{"a": "\xff"}', "not UTF-8"),
    (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    (b'{"a":' * 101 + b"1" + b"}" * 101, "nested too deeply; at most 100 levels"),
    (b'[1, {"b": ' + b"[" * 99 + b"]" * 99 + b"}]", "nested too deeply"),
    (b'{"a": ' + b"9" * 6000 + b"}", "a whole number has more than 4300 digits"),
    (b'{"a": 1, "b": {"a": 2, "a": 3}}', "an object has field 'a' twice"),
    (b'{"a": ["\\ud800"]}', r"'\\ud800' is half of a surrogate pair"),
    (b'{"a\\uDFFF": 1}', r"'\\udfff' is half of a surrogate pair"),
  ],
)
def test_malformed_json_is_one_line_with_its_place(tmp_path, text: bytes, reason: str):
  for read in (parse_json, parse_object):
    with pytest.raises(ValueError, match=f"^rows:7: .*{reason}"):
      read(text, "rows:7")
  (tmp_path / "a.json").write_bytes(text)
  with pytest.raises(ValueError, match=f"a.json: .*{reason}"):
    read_object(tmp_path / "a.json")


@pytest.mark.parametrize("text", [b"3", b"null", b"[]", b'"x"', b"true"])
def test_a_value_that_is_no_object_is_refused(text: bytes):
  with pytest.raises(ValueError, match="here: expected a JSON object"):
    parse_object(text, "here")


def test_a_mark_of_byte_order_is_read_over():
  assert parse_object(b'\xef\xbb\xbf{"a": 1}', "here") == {"a": 1}


def test_a_row_becomes_its_dataclass():
  row = {
    "name": "x",
    "weight": 1,
    "price": None,
    "parts": [{"colour": "red", "ids": [1, 2]}],
    "scores": [1, -0.5, float("-inf")],
    "counts": [1],
    "shares": {"a": 1},
    "meta": {"any": [None]},
  }
  read = to_dataclass(row, Whole, "here")
  assert read.parts == [Part(Colour.RED, [1, 2])]
  assert (read.size, read.weight, read.price, read.counts) == (0, 1.0, None, (1,))
  assert read.meta == {"any": [None]}


# Values to try in every field; RIGHT lists the valid ones.
ODD = (None, True, 1, 1.5, "x", [], {}, [None], {"a": None}, 10**400, float("nan"))
RIGHT = {
  "name": ("x",),
  "size": (1,),
  "weight": (1, 1.5),
  "price": (1, 1.5, None),
  "on": (True,),
  "parts": ([],),
  "scores": ([],),
  "counts": ([],),
  "shares": ({},),
  "meta": ({}, {"a": None}),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Whole)])
def test_a_field_of_another_type_is_named_with_its_value(field: str):
  for value in ODD:
    right = any(type(value) is type(r) and value == r for r in RIGHT[field])
    row = {"name": "x", field: value}
    if right:
      to_dataclass(row, Whole, "rows:7")
      continue
    with pytest.raises(ValueError, match=f"^rows:7: field '{field}") as e:
      to_dataclass(row, Whole, "rows:7")
    assert "\n" not in str(e.value) and len(str(e.value)) < 200


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ([], "here: the row is .*; it must be an object"),
    ({}, "here: field 'name' is missing"),
    ({"name": "x", "zzz": 1}, "here: unknown field 'zzz'; there are name, size"),
    ({"name": "x", "parts": [{}]}, r"field 'parts\[0\].colour' is missing"),
    (
      {"name": "x", "parts": [{"colour": "green"}]},
      r"field 'parts\[0\].colour' is 'green'; it must be one of red, blue",
    ),
    (
      {"name": "x", "parts": [{"colour": "red", "ids": [1, True]}]},
      r"field 'parts\[0\].ids\[1\]' is True; it must be a whole number",
    ),
    (
      {"name": "x", "parts": [{"colour": "red", "ids": [1, 10**30]}]},
      r"field 'parts\[0\].ids\[1\]' is 1000",
    ),
    ({"name": "x", "shares": {"a": "b"}}, "field 'shares.a' is 'b'"),
    ({"zzz": 1}, "unknown field 'zzz'"),
    ({"name": "x", "\ud800": 1}, r"unknown field '\\ud800'"),
    ({"name": "x", "shares": {"\ud800": "b"}}, r"field 'shares\..* is 'b'"),
  ],
)
def test_the_field_inside_is_named(row: Any, message: str):
  with pytest.raises(ValueError, match=message):
    to_dataclass(row, Whole, "here")


def test_json_at_the_limits_is_read():
  assert parse_json(b'{"a":' * 100 + b"1" + b"}" * 100, "rows:7")
  texts = [r"\ud83d\ude00", r"\\ud800", r"\u00e9"]
  value = parse_json('["' + '", "'.join(texts) + '"]', "rows:7")
  assert value == ["\U0001f600", "\\ud800", "\u00e9"]

r"""Answers that math-verify reads as a formula, but a person reads differently.

math-verify multiplies the letters of a word, in any order; adds adjacent numbers;
divides a clock's hours by its minutes; drops a number's base and possible units. Each
rule here refuses wrong answers that it would accept, and a few accept right ones that
it would refuse.
"""

from __future__ import annotations

import fractions
import re

from coa_jax.rewards import notation

_WORDS = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*")
# Three letters may be a product: abc = cab.
_LONG_WORD = re.compile(r"[A-Za-z]{4}")
# Each line has one unit's names. There are endless units; only two known units can
# differ.
_UNIT_NAMES = r"""
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
mg milligram milligrams
g gram grams
kg kilogram kilograms
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
yr yrs year years
cent cents
\$ dollar dollars
\circ degree degrees
radian radians
"""


def _units_by_name() -> dict[str, str]:
  """Returns each unit name -> the unit's first name."""
  units: dict[str, str] = {}
  for line in _UNIT_NAMES.strip().splitlines():
    names = line.split()
    units.update(dict.fromkeys(names, names[0]))
  return units


_UNITS = {
  **_units_by_name(),
  # Chinese and Japanese.
  "\u6beb\u7c73": "mm",
  **dict.fromkeys(("\u5398\u7c73", "\u516c\u5206"), "cm"),
  **dict.fromkeys(("\u7c73", "\u516c\u5c3a", "\u30e1\u30fc\u30c8\u30eb"), "m"),
  **dict.fromkeys(("\u5343\u7c73", "\u516c\u91cc"), "km"),
  "\u514b": "g",
  **dict.fromkeys(("\u5343\u514b", "\u516c\u65a4"), "kg"),
  "\u79d2": "s",
  **dict.fromkeys(("\u5206\u949f", "\u5206\u9418"), "min"),
  **dict.fromkeys(("\u5c0f\u65f6", "\u5c0f\u6642", "\u6642\u9593"), "h"),
  **dict.fromkeys(("\u5929", "\u65e5"), "day"),
}
_UNIT = re.compile(
  r"(\\\$)?[^$]*?\d\}?(?:\s*(?:\^\s*\{?(\\circ)\}?"
  rf"|([A-Za-z]+|{notation.CJK}+)(?:\^\{{?\d\}}?)?))?",
  re.DOTALL,
)
_IN_BASE = re.compile(r"(\d[\dA-Fa-f]*)\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d))")
_DIGITS = re.compile(r"\d[\dA-Fa-f]*")
_DATE = re.compile(r"(\d{4})([/-])(\d\d?)\2(\d\d?)|(\d\d?)([/-])(\d\d?)\6(\d{4})")
_CLOCK = re.compile(
  r"(\d\d?)(?:\{?:\}?([0-5]\d))?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE
)
_LAST_LETTERS = re.compile(r"(.*[\d}\s])([A-Za-z]{1,2})", re.DOTALL)
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
# Short words that math-verify reads as units. Nobody measures in the first group: `2ab`
# is not 2; the second group may be variables.
_NO_UNITS = frozenset(("ab", "bc", "st", "rd", "th", "by", "t", "c", "d", "o"))
_MAYBE_UNITS = frozenset("ghlms")


def units_differ(prediction: str, gold: str) -> bool:
  """5 m is not 5 cm (math-verify says it is); either unit may be missing."""
  ours = _unit(prediction)
  theirs = _unit(gold)
  return bool(ours and theirs) and ours != theirs


def _unit(text: str) -> str | None:
  match = _UNIT.fullmatch(notation.unwrapped(text))
  if match is None:
    return None
  return _UNITS.get(match[3] or match[2] or match[1])


def verdict(prediction: str, gold: str) -> bool | None:
  """Compares words, clocks, dates, ratios and bases; None if math-verify decides."""
  prediction = notation.unwrapped(prediction)
  gold = notation.unwrapped(gold)
  # The first rule that applies to both sides decides.
  for rule in (_words, _clock, _date, _ratio, _base):
    same = rule(prediction, gold)
    if same is not None:
      return same
  # `1 2` is neither 12 nor, as in math-verify, 3. Prose may contain such fields, a
  # formula may not.
  loose = notation.has_loose_fields
  if loose(gold) or (loose(prediction) and not notation.is_prose(prediction)):
    return False
  return None


def _words(prediction: str, gold: str) -> bool | None:
  """`listen` is not `silent`."""
  if not (_WORDS.fullmatch(prediction) and _WORDS.fullmatch(gold)):
    return None
  if not (_LONG_WORD.search(prediction) or _LONG_WORD.search(gold)):
    return None
  return _letters(prediction) == _letters(gold)


def _letters(text: str) -> str:
  return re.sub(r"[ -]", "", text).lower()


def _clock(prediction: str, gold: str) -> bool | None:
  """`3:30 p.m.` is 3:30 PM, 15:30 and, the question being known, 3:30; not 1:10."""
  ours = _CLOCK.fullmatch(prediction)
  theirs = _CLOCK.fullmatch(gold)
  if not (ours and theirs and (ours[3] or theirs[3])):
    return None
  one = _minutes(ours)
  other = _minutes(theirs)
  # If one side omits the half of the day, the other side's applies.
  if ours[3] and theirs[3]:
    return one == other
  return one % 720 == other % 720


def _minutes(clock: re.Match) -> int:
  hours = int(clock[1])
  if clock[3]:
    hours %= 12
    if clock[3] in "pP":
      hours += 12
  return hours * 60 + int(clock[2] or 0)


def _ratio(prediction: str, gold: str) -> bool | None:
  """1:2:3 is 2:4:6 but not 1:3:2, though the quotients are equal."""
  ours = _terms(prediction)
  theirs = _terms(gold)
  # Two terms are a quotient, which math-verify compares rightly.
  if ours is None or theirs is None or max(len(ours), len(theirs)) < 3:
    return None
  if len(ours) != len(theirs):
    return False
  pairs = zip(ours, theirs, strict=True)
  return all(a * theirs[0] == b * ours[0] for a, b in pairs)


def _terms(text: str) -> list[fractions.Fraction] | None:
  """Returns a ratio's numbers; None if a term is not a number."""
  numbers = [notation.number(term) for term in text.split(":")]
  known = [number for number in numbers if number is not None]
  return known if len(known) == len(numbers) else None


def _date(prediction: str, gold: str) -> bool | None:
  """1/2/2020 is not 2/4/2020, though the quotients are equal."""
  ours = _date_fields(prediction)
  theirs = _date_fields(gold)
  if ours is None or theirs is None:
    return None
  return ours == theirs


def _date_fields(text: str) -> list[int] | None:
  """Returns a date's three numbers in order, for either form in `_DATE`."""
  match = _DATE.fullmatch(text)
  if match is None:
    return None
  return [int(field) for field in match.group(1, 3, 4, 5, 7, 8) if field]


def _base(prediction: str, gold: str) -> bool | None:
  """`101_2` is not `101_3`; a base on one side only is ignored.

  No base is converted: 5 is not an answer to "5 in base two".
  """
  ours = _in_base(prediction)
  theirs = _in_base(gold)
  if ours is None or theirs is None or not (ours[1] or theirs[1]):
    return None
  # If one side has no base, only the digits count: the question names the base.
  same_base = ours[1] == theirs[1] or not (ours[1] and theirs[1])
  return same_base and ours[0] == theirs[0]


def _in_base(text: str) -> tuple[str, int | None] | None:
  if _DIGITS.fullmatch(text):
    return text.upper(), None
  match = _IN_BASE.fullmatch(text)
  if match is None:
    return None
  digits = match[1].upper()
  base = int(match[2] or match[3])
  if any(int(digit, 16) >= base for digit in digits):  # `2a_1` is a product
    return None
  return digits, base


def without_false_units(text: str) -> str:
  r"""Braces a formula's last letters if math-verify would drop a variable as a unit.

  `\pi r^2 h` is not `\pi r^2` measured in hours: after a formula with a variable, a
  letter is another variable; after a number, so are the least likely units.
  """
  match = _LAST_LETTERS.fullmatch(text)
  if match is None:
    return text
  before, letters = match.groups()
  variable = letters in _NO_UNITS or (
    letters in _MAYBE_UNITS and _VARIABLE.search(before.rpartition("=")[2])
  )
  if variable:
    return f"{before}{{{letters}}}"
  return text

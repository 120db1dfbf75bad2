r"""Turns the many ways to write a number or formula into one.

math-verify reads LaTeX. Notations that it misreads are rewritten here first: `2 1/2`,
`1 234`, `1e3`, `0.\overline{3}`, characters beyond ASCII. No computation here is long:
an answer is hostile text, so every pattern is bounded, and an exponent has at most
three digits.

budget: mostly notation tables.
"""

from __future__ import annotations

import fractions
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

# An honest final answer is short; a longer text is refused, not searched.
MAX_CHARS = 1000

# ---- characters ----------------------------------------------------------------------

_CHARACTERS = str.maketrans(
  {
    **dict.fromkeys("\u2212\u2012\u2013", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u2061\u2062\ufeff", None),
    "\u00d7": "\\times ",
    "\u00b7": "\\cdot ",
    "\u22c5": "\\cdot ",
    "\u00f7": "/",
    "\u2044": "/",
    "\u00b1": "\\pm ",
    "\u2213": "\\mp ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u2260": "\\ne ",
    "\u2248": "\\approx ",
    "\u221e": "\\infty ",
    "\u222a": "\\cup ",
    "\u2229": "\\cap ",
    "\u2208": "\\in ",
    "\u2205": "\\emptyset ",
    "\u211d": "\\mathbb{R}",
    "\u2124": "\\mathbb{Z}",
    "\u03c0": "\\pi ",
    "\u00b0": "^\\circ ",
    "\u2103": "^\\circ ",
    "\u2026": "...",
    "\u3001": ",",
    "\u3002": ".",
    "\u2223": "|",
    "\u2236": ":",
  }
)
_VULGAR = re.compile("[\u00bc-\u00be\u2153-\u215e]")  # one half to seven eighths
_RAISED = str.maketrans(
  "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f",
  "0123456789+-n",
)
_RAISED_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_LOWERED = str.maketrans("".join(map(chr, range(0x2080, 0x208A))), "0123456789")
_LOWERED_RUN = re.compile("[\u2080-\u2089]+")
_ROOT = re.compile("\u221a\\s*(\\d+|[A-Za-z])")
_CURRENCY = re.compile("[\u20ac\u00a3\u00a5\u20b9]")


def _ascii(text: str) -> str:
  """Replaces signs by LaTeX, and other characters (full-width digits) by NFKC."""
  if text.isascii():
    return text
  text = _RAISED_RUN.sub(lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
  text = _LOWERED_RUN.sub(lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
  text = _VULGAR.sub(_fraction, text)
  text = _ROOT.sub(r"\\sqrt{\1}", text).replace("\u221a", "sqrt")
  text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
  return _CURRENCY.sub("", text.translate(_CHARACTERS)).strip()


def _fraction(match: re.Match) -> str:
  over, under = unicodedata.normalize("NFKC", match[0]).split("\u2044")
  return f"\\frac{{{over}}}{{{under}}}"


# "answer", and "is", in Chinese, Japanese and Korean.
_CJK_LABEL = re.compile(
  "^(?:\u6700\u7ec8|\u6700\u7d42|\u6240\u4ee5|\u56e0\u6b64|\u6545)?"
  "(?:\u7b54\u6848|\u7b54\u3048|\u89e3\u7b54|\u7b54|\uc815\ub2f5|\ub2f5)"
  r"\s*(?:[\u662f\u4e3a\u70ba\u306f\uc740]|:)?\s*(?::\s*)?"
)

# ---- numbers inside a formula --------------------------------------------------------

# Digit fields are one number only in groups of three: `7 8` is not 78.
_GROUPS = r"[1-9]\d{0,2}(?:\s\d{3})+"
_GROUPED = re.compile(
  rf"(?<![\w.,^])(?<!\d\s)(?:{_GROUPS}|\d+\.\d{{3}}(?:\s\d{{3}})+)(?!\d|\s\d)"
)
# A LaTeX blank between digits.
_BLANK = re.compile(r"(?<=\d)\\[,;: ]\s*(?=\d)")
_MIXED = re.compile(
  rf"(?<![\w.,^/{{])(?<!\d\s)({_GROUPS}|\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.^/])"
)
# 33\frac{1}{3}\%; without the sign math-verify reads it itself.
_MIXED_PERCENT = re.compile(
  r"(?<![\w.,^/{}])(\d+)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}(?=\s*\\?%)"
)
# 0.1\overline{6}, 0.1(6), 0.1666...
_BAR = re.compile(
  r"(?<![\w.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))"
  r"(?![\d(\\])"
)
_DOTS = re.compile(
  r"(?<![\w.])(\d{0,12})\.(\d{0,12}?)(\d{1,12}?)\3{2,}\s*(?:\.\.\.|\\[lc]?dots)(?!\w)"
)
_E_NOTATION = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)")
_SIGNED_POWER = re.compile(r"\^\s*([+-]\d+)")
_BARE_FRACTION = re.compile(
  r"\\[dtc]?frac\s*(?:(\d)\s*(\d)|(\d)\s*\{(\d+)\}|\{(\d+)\}\s*(\d))"
)
_TWO_FIELDS = re.compile(r"(?<![\w^_.])\d[\d.]*\s+\.?\d")

# ---- functions, words and brackets ---------------------------------------------------

# Function names in LaTeX, and their aliases.
_COMMANDS = (
  *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth"),
  *("arcsin", "arccos", "arctan", "arccot", "ln", "log", "exp"),
)
_ALIASES = {
  **{"asin": "arcsin", "acos": "arccos", "atan": "arctan", "arctg": "arctan"},
  **{"tg": "tan", "ctg": "cot", "cotg": "cot", "arcctg": "arccot", "cosec": "csc"},
  **{"sh": "sinh", "ch": "cosh", "th": "tanh", "cth": "coth", "lg": "log_{10}"},
}


def _any_of(names: Iterable[str]) -> str:
  return "|".join(sorted(names, key=len, reverse=True))  # `sinh` before `sin`


_UPRIGHT = r"\\(?:operatorname\*?|mathrm|text|textrm|rm)\s*\{\s*"
_UPRIGHT_NAME = re.compile(rf"{_UPRIGHT}({_any_of([*_COMMANDS, *_ALIASES])})\s*\}}")
_UPRIGHT_LETTER = re.compile(rf"(?:{_UPRIGHT}|\{{\s*\\rm\s+)([ei])\s*\}}")
_OTHER_COMMAND = re.compile(rf"\\({_any_of(_ALIASES)})(?![A-Za-z])")
# Without a backslash a name must have an argument. `sh`, `ch` and `th` may be products,
# `sec` a unit.
_PLAIN_NAME = re.compile(
  rf"(?<![A-Za-z\\])(?:({_any_of({*_COMMANDS, *_ALIASES} - {'sec', 'sh', 'ch', 'th'})})"
  r"(?=\s*[\^_\d\\{(|]|\s+[a-z](?![A-Za-z]))|(sec)(?=\())"
)


def _function(match: re.Match) -> str:
  name = next(filter(None, match.groups()))
  return f"\\{_ALIASES.get(name, name)} "


# An interval as some countries write it: [1;2], ]1;2[.
_BETWEEN = r"\s*([^\[\]();,]+);([^\[\]();,]+)"
_SEMICOLON = re.compile(rf"([\[(]){_BETWEEN}([\])])")
_OUTWARD = re.compile(r"([\[\]])\s*([^\[\]();,]+)[;,]([^\[\]();,]+)([\[\]])")


def _interval(match: re.Match) -> str:
  left = {"[": "[", "]": "("}[match[1]]
  right = {"]": "]", "[": ")"}[match[4]]
  return f"{left}{match[2]},{match[3]}{right}"


# {x | x > 3} -> x > 3
_SET_BUILDER = re.compile(
  r"(?:\\left\s*)?\\?\{\s*([A-Za-z])\s*(?:\\in\s*(?:\\mathbb\s*\{R\}|\\R|R)\s*)?"
  r"(?:\\middle\s*)?(?:\||:|\\mid(?![A-Za-z])|\\colon(?![A-Za-z])|\\vert(?![A-Za-z]))"
  r"((?:[^{}|:\\]|\\(?!right)[A-Za-z,;: ]|\{[^{}]*\})*?)(?:\\right\s*)?\\?\}"
)
RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|neq?|leqslant|geqslant|lt|gt)(?![a-z])")


def _condition(match: re.Match) -> str:
  variable, condition = match.groups()
  names = set(_SINGLE_LETTER.findall(condition))
  if variable in names and RELATION.search(condition) and "," not in condition:
    return f" {condition.strip()} "
  return match[0]


_SINGLE_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")

_SPELLINGS: list[tuple[re.Pattern[str], Any]] = [
  (re.compile(r"^\*\*(.*)\*\*$", re.DOTALL), r"\1"),
  (re.compile(r"^(?:the )?(?:final )?answer\s*:\s*", re.IGNORECASE), ""),
  (_CJK_LABEL, ""),
  (re.compile(r"^(?:option|choice)\s+(\(?[A-J]\)?)$", re.IGNORECASE), r"\1"),
  (re.compile(r"^([A-J])[).:]$"), r"\1"),
  (re.compile(r"\\!"), ""),
  (re.compile(r"(?<!\\)~"), " "),
  (re.compile(r"\{,\}"), ","),
  (re.compile(r"\*\*"), "^"),
  (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
  (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
  (re.compile(r"(?<![A-Za-z\\])infinity(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
  (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
  # math-verify reads \langle 1,2\rangle as 1.2
  (re.compile(r"(?:\\left\s*)?\\langle(?![A-Za-z])"), "("),
  (re.compile(r"(?:\\right\s*)?\\rangle(?![A-Za-z])"), ")"),
  (re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[\\])"), r" \\cup "),
  (re.compile(r"\^?\s*\\degree(?![A-Za-z])|\^\s*\{\s*\\degree\s*\}"), r"^\\circ "),
  (re.compile(r"(?<![A-Za-z\\])sqrt(?=\s*\{)"), r"\\sqrt"),
  (_UPRIGHT_LETTER, r" \1 "),
  (_UPRIGHT_NAME, _function),
  (_OTHER_COMMAND, _function),
  (_PLAIN_NAME, _function),
  (_SEMICOLON, r"\1\2,\3\4"),
  (_SET_BUILDER, _condition),
]
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\\circ\})")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def spelled_out(text: str) -> str:
  """Rewrites a formula in a notation that math-verify reads correctly."""
  text = _ascii(text)
  for pattern, spelling in _SPELLINGS:
    text = pattern.sub(spelling, text)
  interval = _OUTWARD.fullmatch(text)
  if interval is not None:
    text = _interval(interval)
  # The order matters: a LaTeX blank (`1\,000`) is a blank for the patterns below.
  text = _BARE_FRACTION.sub(_braced_fraction, text)
  text = _BLANK.sub(" ", text)
  text = _MIXED.sub(_mixed, text)
  text = _MIXED_PERCENT.sub(_mixed, text)
  text = _GROUPED.sub(lambda m: "".join(m[0].split()), text)
  text = _BAR.sub(_repeating, _DOTS.sub(_repeating, text))
  text = _E_NOTATION.sub(r"\1\\times10^{\2}", text)
  text = _TIMES_TEN.sub(r"\\times ", text)
  text = _SIGNED_POWER.sub(r"^{\1}", text)
  if _TRIGONOMETRY.search(text):
    # math-verify drops the degree sign: right for an angle, wrong for its sine.
    text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
  return text.strip()


def _braced_fraction(match: re.Match) -> str:
  over, under = filter(None, match.groups())
  return f"\\frac{{{over}}}{{{under}}}"


def _mixed(match: re.Match) -> str:
  whole = int("".join(match[1].split()))
  over = int(match[2])
  under = int(match[3])
  if over >= under:  # `1 234/5` is 1234/5, `5 4/3` nothing
    return match[0]
  return f"\\frac{{{whole * under + over}}}{{{under}}}"


def _repeating(match: re.Match) -> str:
  # 0.1666...: before 0, once 1, block 6. Only one block group matched.
  before, once, *blocks = match.groups(default="")
  block = "".join(blocks)
  digits = before + once
  over = int(digits + block) - int(digits or "0")
  return f"\\frac{{{over}}}{{{(10 ** len(block) - 1) * 10 ** len(once)}}}"


def has_loose_fields(text: str) -> bool:
  """Whether some adjacent digit fields are not one number."""
  return bool(_TWO_FIELDS.search(text))


# ---- plain numbers -------------------------------------------------------------------

_INTEGER = re.compile(r"-?\d+")
_DECIMAL = r"\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+"
_NUMBER = re.compile(
  rf"""(?P<sign>[+-]?)\s*(?:\\?\$)?\s*(?:
    (?P<decimal>{_DECIMAL})
  | (?:(?P<factor>{_DECIMAL})\s*(?:\\times|\\cdot|\*)\s*)?
    10\s*\^\s*(?:\{{(?P<power>[+-]?\d{{1,3}})\}}|(?P<digit>\d{{1,3}}))
  | (?P<over>\d+)\s*/\s*(?P<under>\d+)
  | (?P<whole>\d+)?\s*\\frac\s*
    \{{\s*(?P<minus>-?)(?P<numerator>\d+)\s*\}}\s*\{{\s*(?P<denominator>\d+)\s*\}}
  )""",
  re.VERBOSE,
)


def number(text: str) -> fractions.Fraction | None:
  """Returns a plain number's exact value; None for other text.

  Plain numbers are integers, decimals, fractions, mixed numbers, repeating decimals and
  scientific notation.
  """
  if len(text) > MAX_CHARS:
    return None
  text = text.strip().removeprefix("$")
  if _INTEGER.fullmatch(text):  # most answers
    return fractions.Fraction(int(text))
  # Only text without a direct match is rewritten: this takes many patterns.
  match = _NUMBER.fullmatch(text) or _NUMBER.fullmatch(spelled_out(text))
  if match is None:
    return None
  size = _size(match)
  if size is not None and match["sign"] == "-":
    return -size
  return size


def _size(match: re.Match) -> fractions.Fraction | None:
  """Returns the value matched by `_NUMBER`, without its sign; None if invalid."""
  if match["decimal"]:
    return fractions.Fraction(match["decimal"].replace(",", ""))
  power = match["power"] or match["digit"]
  if power:
    factor = fractions.Fraction((match["factor"] or "1").replace(",", ""))
    return factor * fractions.Fraction(10) ** int(power)
  over = int(match["over"] or match["numerator"])
  under = int(match["under"] or match["denominator"])
  if not under:
    return None
  value = fractions.Fraction(over, under)
  if match["minus"]:
    value = -value
  if match["whole"] is None:
    return value
  if not 0 < value < 1:  # `2\frac{3}{2}` may as well be a product
    return None
  return int(match["whole"]) + value


def same_decimal(one: fractions.Fraction, other: fractions.Fraction) -> bool:
  """Whether two numbers are equal, allowing for a person's rounding.

  They must agree to six decimal places, as in math-verify; below 0.01, where six places
  have few digits, to a millionth of the larger number. Integers are exact.
  """
  if one == other:
    return True
  if one.denominator == 1 or other.denominator == 1:
    return False
  largest = max(abs(one), abs(other))
  if largest < fractions.Fraction(1, 100):
    return abs(one - other) * 10**6 <= largest
  return round(one, 6) == round(other, 6)


# ---- words after a number ------------------------------------------------------------

# "18 dollars": a number and words. Two letters may be `pi`, so words have three.
_WITH_UNIT = re.compile(r"(\S*[\d}])\s+([A-Za-z]{3,}(?:\s+[A-Za-z]+)?)")
_SYMBOL = "(?:[mcdk]?m|in|ft|yd|mi|[mk]?g|m?[lL]|J|N|V|W|Hz|s|min|hr?)"
_WITH_SYMBOL = re.compile(
  rf"(\S*[\d}}])\s+{_SYMBOL}\s*(?:\^\s*\{{?[23]\}}?)?(?:\s*/\s*{_SYMBOL}(?:\^\{{?2\}}?)?)?"
)
_SCALES = {
  "dozen": 12,
  "hundred": 10**2,
  "thousand": 10**3,
  "lakh": 10**5,
  "million": 10**6,
  "crore": 10**7,
  "billion": 10**9,
  "trillion": 10**12,
  "quadrillion": 10**15,
}
_SCALE = rf"(?:{'|'.join(_SCALES)})"
_SCALED = re.compile(
  rf"(\S*[\d}}])((?:\s+{_SCALE})+)s?\b((?:\s+[A-Za-z]+)*)", re.IGNORECASE
)
# Words after a number that change its value. There are endless nouns, so these words
# are listed and units are not; an answer with a word missing here counts as the
# bare number.
_NO_UNIT = re.compile(
  rf"""zero | one | two | three | four | five | six | seven | eight | nine | ten
  | eleven | twelve | (thir|four|fif|six|seven|eigh|nine)teen
  | (twen|thir|for|fif|six|seven|eigh|nine)ty | tens | {_SCALE}s?
  | half | halves | thirds? | (eigh|nin|twelf)ths?
  | (four|fif|six|seven|ten|sixteen|twentie|{_SCALE})ths?
  | and | or | not | plus | minus | over | divided | multiplied | raised | choose | mod
  | modulo | squared | cubed | factorial | twice | thrice | sqrt | sin | cos | tan | cot
  | csc | log | exp | lim | det | gcd | lcm | inf | infinity | pi | e | i | x | y | z
  | alpha | beta | gamma | delta | epsilon | theta | lambda | sigma | tau | phi | chi
  | psi | omega | percent | percentage | pct | january | february | march | april | may
  | june | july | august | september | october | november | december""",
  re.VERBOSE | re.IGNORECASE,
)
# A number and a unit in Chinese, Japanese or Korean, unless the word has a numeral,
# `half`, `and`, `of` or tenths in it.
CJK = r"[\u3005\u30a1-\u30fc\u3400-\u9fff\uac00-\ud7a3]"
_WITH_CJK_UNIT = re.compile(rf"(\S*[\d}}])\s*({CJK}{{1,8}})")
_CJK_NO_UNIT = re.compile(
  "[\u3007\u4e00\u4e8c\u4e24\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u767e\u5343\u4e07"
  "\u842c\u4ebf\u5104\u5146\u534a\u4e4b\u7684\u548c\u4e0e\u6216\u53c8\u70b9\u6210\u6298\u6253"
  "\u4f59\u591a\ub9cc\uc5b5\ucc9c\ubc31\uc2ed\ubc18]"
)
# Wrappers around the words after a number: `$5$ \text{ million}`.
_WRAPPING = re.compile(
  r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}|~|\\[ ,;:]|(?<!\\)\$"
)


def without_words(text: str) -> str:
  """Reads `18 dollars` as `18`, `5 million` as `5000000`, and other text as it is."""
  text = _written_out(text)
  plain = unwrapped(text)
  unit = _WITH_CJK_UNIT.fullmatch(plain)
  if unit is not None:
    return plain if _CJK_NO_UNIT.search(unit[2]) else unit[1]
  unit = _WITH_UNIT.fullmatch(plain)
  if unit is None:
    return text
  if any(map(_NO_UNIT.fullmatch, unit[2].split())):
    return plain  # math-verify would skip wrapped words
  if number(unit[1]) is None:
    return text
  return unit[1]


def without_symbol(text: str) -> str:
  """Reads `5 cm^2` and `60 km/h` as their numbers; returns other text unchanged."""
  unit = _WITH_SYMBOL.fullmatch(unwrapped(text))
  return text if unit is None else unit[1]


def _written_out(text: str) -> str:
  scaled = _SCALED.fullmatch(unwrapped(text))
  if scaled is None:
    return text
  value = number(scaled[1])
  if value is None:
    return text
  for word in scaled[2].lower().split():
    value *= _SCALES[word]
  return f"{value}{scaled[3]}"


def unwrapped(text: str) -> str:
  r"""Removes `$`, and replaces each `\text{}` by its content."""
  return " ".join(_WRAPPING.sub(r" \1 ", text).split())


# Signs of mathematics inside prose.
_INSIDE_PROSE = re.compile(r"\$|\\\(|\\\[|answer is", re.IGNORECASE)


def is_prose(text: str) -> bool:
  """True if a formula must be searched for; False if the whole `text` is a formula."""
  return bool(_INSIDE_PROSE.search(text))

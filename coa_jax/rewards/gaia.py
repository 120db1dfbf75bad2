"""GAIA's quasi-exact match.

Rules of the benchmark's scorer (arXiv 2311.12983, section 3.2; the leaderboard's
scorer.py): a number is compared as a number, a list item by item, any other text
without white space, punctuation and case.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_UNITS = str.maketrans("", "", "$%,")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEPARATORS = re.compile("[,;]")


def quasi_exact_match(prediction: str, answers: Sequence[str]) -> bool:
  """Whether a prediction equals one of the answers by GAIA's rules.

  The answer decides the rule: a number if it reads as one (without `$`, `%` and commas
  in the prediction alone), a list if it has a comma or semicolon.
  """
  return any(_equal(prediction, answer) for answer in answers)


def _equal(prediction: str, answer: str) -> bool:
  if _number(answer) is not None:
    return _number(prediction.translate(_UNITS)) == _number(answer)
  if _SEPARATORS.search(answer) is None:
    return _plain(prediction).translate(_PUNCTUATION) == _plain(answer).translate(
      _PUNCTUATION
    )
  ours = _SEPARATORS.split(prediction)
  theirs = _SEPARATORS.split(answer)
  return len(ours) == len(theirs) and all(map(_equal_items, ours, theirs))


def _equal_items(prediction: str, answer: str) -> bool:
  # Punctuation inside an item counts.
  if _number(answer) is not None:
    return _number(prediction.translate(_UNITS)) == _number(answer)
  return _plain(prediction) == _plain(answer)


def _plain(text: str) -> str:
  return "".join(text.split()).lower()


def _number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None

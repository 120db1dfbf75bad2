"""Rewards for questions with short text answers.

Normalisation, exact match and token F1 are those of the SQuAD evaluation (Rajpurkar et
al. 2016, arXiv 1606.05250). Several answers are joined by `|` inside one `answer` span;
the two readings of that convention are the released Chain-of-Agents ones (arXiv
2508.13167): training asks for every part to be right, evaluation looks at the first.
Either accepts a gold answer that itself holds a `|` as a whole.

MuSiQue counts as SQuAD does. HotpotQA has one more rule, which holds for all here, as
the others ask no yes/no questions: token F1 is 0 where one side alone is yes, no or
noanswer.
"""

from __future__ import annotations

import collections
import re
import statistics
import string
from collections.abc import Sequence

from coa_jax.protocol.roles import ANSWER_SEPARATOR

# Answers that are right or wrong as a whole: "no" earns no part of "no one".
_WHOLE = frozenset(("yes", "no", "noanswer"))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
  """Lower case, without ASCII punctuation and articles, single spaces; `|` is one."""
  return " ".join(_ARTICLES.sub(" ", _plain(text)).split())


def _plain(text: str) -> str:
  text = text.lower().replace(ANSWER_SEPARATOR, " ").translate(_PUNCTUATION)
  return " ".join(text.split())


def match_key(text: str) -> str:
  """What answers that match have in common: their normalised text.

  Where that is empty it is the articles themselves ("A" may be a choice), or else the
  characters ("%", "+"): SQuAD calls all of those equal.
  """
  return normalize(text) or _plain(text) or text.strip().lower()


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
  """True where the whole prediction is one of the answers after normalisation."""
  key = match_key(prediction)
  return bool(key) and key in map(match_key, answers)


def parts(prediction: str) -> list[str]:
  """The non-empty parts of a `|`-joined prediction, stripped."""
  stripped = map(str.strip, prediction.split(ANSWER_SEPARATOR))
  return [part for part in stripped if part]


def every_part(prediction: str, answers: Sequence[str]) -> bool:
  """The training form: there is a part, and each one is among the answers."""
  if exact_match(prediction, _joined(answers)):
    return True
  # No part at all is no answer, though `all` of none would be true.
  each = parts(prediction)
  return bool(each) and all(exact_match(part, answers) for part in each)


def first_part(prediction: str, answers: Sequence[str]) -> bool:
  """The evaluation form: the first part is among the answers."""
  if exact_match(prediction, _joined(answers)):
    return True
  each = parts(prediction)
  return bool(each) and exact_match(each[0], answers)


def every_part_f1(prediction: str, answers: Sequence[str]) -> float:
  """The training form of token F1: the mean over the parts."""
  whole = token_f1(prediction, _joined(answers))
  each = [token_f1(part, answers) for part in parts(prediction)]
  if not each:
    return whole
  return max(statistics.fmean(each), whole)


def first_part_f1(prediction: str, answers: Sequence[str]) -> float:
  """The evaluation form of token F1: that of the first part."""
  whole = token_f1(prediction, _joined(answers))
  each = parts(prediction)
  if not each:
    return whole
  return max(token_f1(each[0], answers), whole)


def _joined(answers: Sequence[str]) -> list[str]:
  """The answers that hold a separator themselves."""
  return [a for a in answers if ANSWER_SEPARATOR in a]


def token_f1(prediction: str, answers: Sequence[str]) -> float:
  """The best token F1 of the whole prediction against any answer, 0 to 1."""
  key = match_key(prediction)
  best = 0.0
  for answer in answers:
    best = max(best, _f1(key, match_key(answer)))
  return best


def _f1(prediction: str, answer: str) -> float:
  # HotpotQA's rule: a whole answer earns all or nothing.
  if prediction != answer and _WHOLE & {prediction, answer}:
    return 0.0
  ours = prediction.split()
  theirs = answer.split()
  # A multiset: a word counts as often as both sides have it.
  common = (collections.Counter(ours) & collections.Counter(theirs)).total()
  if not common:
    return 0.0
  precision = common / len(ours)
  recall = common / len(theirs)
  return 2 * precision * recall / (precision + recall)

"""Rewards for questions with short text answers.

Normalisation, exact match and token F1 are those of the SQuAD evaluation (Rajpurkar et
al. 2016, arXiv 1606.05250). Several answers are joined by `|` inside one `answer` span;
the two readings of that convention are the released Chain-of-Agents ones (arXiv
2508.13167): training asks for every part to be right, evaluation looks at the first.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence

from coa_jax.protocol.roles import ANSWER_SEPARATOR

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
  """Lower case, without ASCII punctuation and articles, single spaces."""
  text = text.lower().translate(_PUNCTUATION)
  return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
  """True where the whole prediction is one of the answers after normalisation.

  A prediction of which nothing is left (punctuation, articles) matches nothing.
  """
  prediction = normalize(prediction)
  return bool(prediction) and prediction in {normalize(a) for a in answers}


def parts(prediction: str) -> list[str]:
  """The non-empty parts of a `|`-joined prediction, stripped."""
  pieces = (p.strip() for p in prediction.split(ANSWER_SEPARATOR))
  return [p for p in pieces if p]


def every_part(prediction: str, answers: Sequence[str]) -> bool:
  """The training form: there is a part, and each one is among the answers.

  An answer that itself holds a `|` can be matched as a whole.
  """
  whole = [a for a in answers if ANSWER_SEPARATOR in a]
  if whole and exact_match(prediction, whole):
    return True
  pieces = parts(prediction)
  return bool(pieces) and all(exact_match(p, answers) for p in pieces)


def first_part(prediction: str, answers: Sequence[str]) -> bool:
  """The evaluation form: the first part is among the answers."""
  pieces = parts(prediction)
  return bool(pieces) and exact_match(pieces[0], answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
  """The best token F1 of the prediction against any answer, 0 to 1."""
  return max((_f1(normalize(prediction), normalize(a)) for a in answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
  ours, theirs = prediction.split(), answer.split()
  common = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
  if not common:
    return 0.0
  precision, recall = common / len(ours), common / len(theirs)
  return 2 * precision * recall / (precision + recall)

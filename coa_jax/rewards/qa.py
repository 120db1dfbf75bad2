"""Rewards for questions with short text answers.

Normalisation, exact match and token F1 follow the SQuAD evaluation (Rajpurkar et al.
2016, arXiv 1606.05250), after Unicode normalisation: NFC and NFKC, full-width and ASCII
characters are the same; punctuation in any script and invisible characters are removed.
Several answers are joined by `|` inside one `answer` span; the two rules are those
released with Chain-of-Agents (arXiv 2508.13167): training requires every part to be
right, evaluation only the first. Either rule accepts a gold answer with its own `|` as
a whole.

MuSiQue scores like SQuAD. HotpotQA has one more rule, applied here to all data sets,
because the others have no yes/no questions: token F1 is 0 if only one side is yes, no
or noanswer.
"""

from __future__ import annotations

import collections
import re
import statistics
import string
import unicodedata
from collections.abc import Sequence

from coa_jax.protocol.roles import ANSWER_SEPARATOR

# Answers that are right or wrong as a whole: "no" gets no credit for "no one".
_WHOLE = frozenset(("yes", "no", "noanswer"))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Synonyms for questions with the gold answer true or false.
_TRUTHS = {"yes": "true", "no": "false"}


def normalize(text: str) -> str:
  """Lower case, without punctuation and articles, single spaces; `|` is a space."""
  return " ".join(_ARTICLES.sub(" ", _plain(text)).split())


def _plain(text: str) -> str:
  text = _unicode(text).lower().replace(ANSWER_SEPARATOR, " ").translate(_PUNCTUATION)
  return " ".join(text.split())


def _unicode(text: str) -> str:
  """NFKC without punctuation beyond ASCII and without invisible characters."""
  if text.isascii():
    return text
  return unicodedata.normalize("NFC", "".join(map(_character, text)))


def _character(character: str) -> str:
  # 10\u00b2 is not 102, and 1\u00bd is not 11/2.
  if unicodedata.decomposition(character).startswith(("<super>", "<sub>", "<frac")):
    return character
  plain = unicodedata.normalize("NFKC", character)
  category = unicodedata.category(plain[0])
  is_invisible = category == "Cf" or "\ufe00" <= character <= "\ufe0f"
  is_punctuation = category[0] == "P" or plain == "\u2212"  # the minus sign
  if not plain.isascii() and (is_invisible or is_punctuation):
    return ""
  return plain


def match_key(text: str) -> str:
  """Returns the normalised text as a key; matching answers have the same key.

  If the normalised text is empty, the key is the articles ("A" may be a choice), or
  else the characters ("%", "+"): SQuAD would call all such answers equal.
  """
  characters = unicodedata.normalize("NFKC", text).strip().lower()
  return normalize(text) or _plain(text) or characters


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
  """Whether the whole prediction equals an answer after normalisation.

  Yes and no equal true and false if all answers are true or false.
  """
  key = match_key(prediction)
  keys = set(map(match_key, answers))
  if keys <= {"true", "false"}:
    key = _TRUTHS.get(key, key)
  return bool(key) and key in keys


def parts(prediction: str) -> list[str]:
  """Returns a `|`-joined prediction's non-empty parts, stripped."""
  stripped = map(str.strip, prediction.split(ANSWER_SEPARATOR))
  return [part for part in stripped if part]


def every_part(prediction: str, answers: Sequence[str]) -> bool:
  """The training rule: there is a part, and each part is among the answers."""
  if exact_match(prediction, _joined(answers)):
    return True
  # A text without parts is no answer, though `all` would be true.
  each = parts(prediction)
  return bool(each) and all(exact_match(part, answers) for part in each)


def first_part(prediction: str, answers: Sequence[str]) -> bool:
  """The evaluation rule: the first part is among the answers."""
  if exact_match(prediction, _joined(answers)):
    return True
  each = parts(prediction)
  return bool(each) and exact_match(each[0], answers)


def every_part_f1(prediction: str, answers: Sequence[str]) -> float:
  """Token F1 for training: the mean over the parts."""
  whole = token_f1(prediction, _joined(answers))
  each = [token_f1(part, answers) for part in parts(prediction)]
  if not each:
    return whole
  return max(statistics.fmean(each), whole)


def first_part_f1(prediction: str, answers: Sequence[str]) -> float:
  """Token F1 for evaluation: the first part's."""
  whole = token_f1(prediction, _joined(answers))
  each = parts(prediction)
  if not each:
    return whole
  return max(token_f1(each[0], answers), whole)


def _joined(answers: Sequence[str]) -> list[str]:
  """Returns the answers that contain a separator."""
  return [a for a in answers if ANSWER_SEPARATOR in a]


def token_f1(prediction: str, answers: Sequence[str]) -> float:
  """Returns the whole prediction's best token F1 against any answer, 0 to 1."""
  if exact_match(prediction, answers):
    return 1.0
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

"""Novelty checks: near duplicates, evaluation questions, blocked domains.

Texts are compared by n-gram hashes: a duplicate shares most of its word 5-grams with an
earlier trajectory (MinHash with banding: Broder 1997; Leskovec et al., Mining of
Massive Datasets, chapter 3), a contaminated trajectory shares a whole n-gram with an
evaluation question (Brown et al. 2020, arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from coa_jax.data.tasks import choices, code_schemas
from coa_jax.protocol.trajectory import Author, Trajectory

_ASCII_WORD = re.compile(rb"\w+")
# Scripts without spaces between words: Thai to Khmer, kana, Chinese characters.
_UNSPACED = (
  "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
  "\U00020000-\U0003ffff"
)
_LETTER = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
# Soft hyphens, zero-width characters, direction marks.
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
# What our readers add to every question of a kind: common to unrelated questions.
_ADDED = re.compile("|".join(map(re.escape, (choices.ASK_LETTER, *code_schemas.ADDED))))
_LETTERS = 2  # letters per word in such a script
_SHINGLE = 5  # n, in words, for finding duplicates
# Hashes per signature; bands of 4 catch a Jaccard similarity of 0.7 with 98.7 %.
_HASHES = 64
_BANDS = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)
_RNG = np.random.default_rng(0)  # the same permutations everywhere, always
_SCALE = _RNG.integers(0, 2**63, (_HASHES, 1), dtype=np.uint64) | np.uint64(1)
_SHIFT = _RNG.integers(0, 2**63, (_HASHES, 1), dtype=np.uint64)


def word_hashes(text: str) -> np.ndarray:
  """Hashes each word in a text, ignoring case and punctuation; uint64 [words].

  In a script without spaces (Chinese, Japanese, Thai, ...) each letter is a word.
  Equivalent Unicode spellings are equal, and invisible characters do not count.
  """
  text = text.lower()
  if text.isascii():  # the same words, in two thirds of the time
    words = _ASCII_WORD.findall(text.encode())
  else:
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    words = [w.encode("utf-8", "replace") for w in _WORD.findall(text)]
  return np.fromiter(map(zlib.crc32, words), np.uint64, len(words))


def gram_hashes(words: np.ndarray, n: int) -> np.ndarray:
  """Hashes each n-gram of hashed words; uint64 [max(words - n + 1, 0)]."""
  count = len(words) - n + 1
  if count < 1:
    return np.zeros(0, np.uint64)
  out = np.zeros(count, np.uint64)
  for i in range(n):  # each round mixes in the i-th word of every n-gram at once
    out = (out ^ words[i : i + count]) * _ODD
    out ^= out >> np.uint64(29)
  return out


def signature(text: str) -> np.ndarray:
  """Computes the MinHash signature of a text's word 5-grams; uint32 [64].

  The share of equal positions in two signatures estimates the Jaccard similarity
  between the two 5-gram sets, with a standard error of at most 1 / 16. A text with
  fewer than 5 words is one n-gram.
  """
  words = word_hashes(text)
  grams = np.unique(gram_hashes(words, min(_SHINGLE, max(len(words), 1))))
  if not len(grams):
    return np.zeros(_HASHES, np.uint32)
  # Overflow gives the value modulo 2**64: each row orders the n-grams in its own way.
  mixed = grams[None, :] * _SCALE + _SHIFT
  return (mixed.min(axis=1) >> np.uint64(32)).astype(np.uint32)


def policy_text(trajectory: Trajectory) -> str:
  """Joins the texts for finding duplicates: the question and the policy's spans."""
  # Neither equal instructions nor reading the same page make two runs duplicates. An
  # imported prompt is one segment with both, so that only `meta` has the question.
  question = trajectory.meta.get("question")
  if not question:
    prompt = [s for s in trajectory.segments if s.author == Author.PROMPT]
    question = "\n".join(s.text for s in prompt if s.role != "instructions")
  own = [s.text for s in trajectory.segments if s.author == Author.POLICY]
  return "\n".join([question, *own])


class Duplicates:
  """Finds near duplicates of earlier texts; about 2.5 kB per text, for any length."""

  def __init__(self, max_similarity: float):
    """Takes the Jaccard similarity above which a text is a near duplicate."""
    self._limit = max_similarity
    self._seen: list[np.ndarray] = []
    self._by_band: dict[bytes, int] = {}

  def is_new(self, text_signature: np.ndarray) -> bool:
    """Whether no earlier text is too similar; if so, remembers this text."""
    # Locality-sensitive hashing: only texts with a common band are compared.
    bands = []
    for number, band in enumerate(text_signature.reshape(_BANDS, -1)):
      bands.append(bytes([number]) + band.tobytes())
    for band in bands:
      at = self._by_band.get(band)
      if at is None:
        continue
      similarity = (self._seen[at] == text_signature).mean()
      if similarity > self._limit:
        return False
    # A later text replaces an earlier one in a shared band.
    for band in bands:
      self._by_band[band] = len(self._seen)
    self._seen.append(text_signature)
    return True


class Benchmarks:
  """Evaluation questions as hashed n-grams: plain data for worker processes."""

  def __init__(self, questions: Iterable[str], n: int):
    """Takes the questions and n, a forbidden common n-gram's length in words.

    For a question in a script without spaces, the length is 2 n letters. A shorter
    question counts only if a trajectory's question equals it.
    """
    # --- N-gram hashes by length; for a short question, one hash over the whole text.
    whole = []
    grams = {n: [], n * _LETTERS: []}
    for question in questions:
      question = _ADDED.sub("", question)
      words = word_hashes(question)
      length = n * _LETTERS if _unspaced(question, len(words)) else n
      if len(words) < length:
        whole.append(gram_hashes(words, len(words))[:1])
      else:
        grams[length].append(gram_hashes(words, length))

    # --- Sorted, so that a trajectory's n-grams are found by bisection.
    empty = np.zeros(0, np.uint64)
    self._whole = np.unique(np.concatenate([empty, *whole]))
    self._grams: dict[int, np.ndarray] = {}
    for length, some in grams.items():
      if some:
        self._grams[length] = np.unique(np.concatenate([empty, *some]))

  def hold(self, question: str, trajectory: Trajectory) -> bool:
    """Whether the question or a trajectory's text matches an evaluation question."""
    question = _ADDED.sub("", question)
    words = word_hashes(question)
    if len(words) and np.isin(gram_hashes(words, len(words)), self._whole).any():
      return True
    # Skip instructions: they are the same for every task.
    texts = [
      _ADDED.sub("", s.text)
      for s in trajectory.segments
      if s.author != Author.PROMPT or s.role == "question"
    ]
    return any(self._shares(word_hashes(text)) for text in (question, *texts))

  def _shares(self, words: np.ndarray) -> bool:
    for length, known in self._grams.items():
      grams = gram_hashes(words, length)
      # `known` is sorted: an n-gram is at the bisection's index, or missing.
      at = np.searchsorted(known, grams).clip(max=len(known) - 1)
      if (known[at] == grams).any():
        return True
    return False


def _unspaced(text: str, words: int) -> bool:
  """Whether most words in a text are letters of a script without spaces."""
  return 2 * len(_LETTER.findall(text)) > words


# A host at a word's start, and its path. The path is only a look-ahead, so that a URL
# inside another URL (an archive's) is found too.
_URL = re.compile(
  r"(?<![\w.-])(?:https?://)?((?:[a-z0-9-]+\.)+[a-z]{2,})(?::\d+)?"
  r"(?=(/[^\s\"'<>|)\]]{0,200})?)",
  re.IGNORECASE,
)


def visits(trajectory: Trajectory, domains: Sequence[str]) -> bool:
  """Whether a tool call's arguments name a URL in one of the domains.

  A domain is `host` or `host/path`, a URL's beginning; subdomains are included.
  """
  if not domains:
    return False
  for call in trajectory.calls:
    for host, path in _URL.findall(call.arguments):
      for domain in domains:
        blocked, slash, below = domain.lower().partition("/")
        inside = host.lower() == blocked or host.lower().endswith("." + blocked)
        if inside and path.lower().startswith(slash + below):
          return True
  return False

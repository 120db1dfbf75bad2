"""A trajectory's novelty: near duplicates, evaluation sets, blocked domains.

Words are compared by hashes of n-grams: a duplicate shares most of its 5-grams with an
earlier trajectory (MinHash with banding: Broder 1997; Leskovec et al., Mining of
Massive Datasets, chapter 3), a contaminated one shares a whole n-gram with an
evaluation question (Brown et al. 2020, arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from coa_jax.protocol.trajectory import Author, Trajectory

_ASCII_WORD = re.compile(rb"\w+")
# Scripts without spaces between words: Thai to Khmer, kana, Chinese characters.
_UNSPACED = (
  "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
  "\U00020000-\U0003ffff"
)
_LETTER = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_LETTERS = 2  # letters of such a script that count as a word
_SHINGLE = 5  # n, in words, of the n-grams that identify duplicates
# Hashes of a signature; bands of 4 catch a Jaccard of 0.7 with 98.7 %.
_HASHES = 64
_BANDS = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)
_RNG = np.random.default_rng(0)  # the same permutations everywhere, always
_SCALE = _RNG.integers(0, 2**63, (_HASHES, 1), dtype=np.uint64) | np.uint64(1)
_SHIFT = _RNG.integers(0, 2**63, (_HASHES, 1), dtype=np.uint64)


def word_hashes(text: str) -> np.ndarray:
  """Hashes each word of a text, case and punctuation aside; uint64 [words].

  In a script without spaces (Chinese, Japanese, Thai, ...) each letter is a word.
  """
  text = text.lower()
  if text.isascii():  # the same words; encoded at once they take two thirds of the time
    words = _ASCII_WORD.findall(text.encode())
  else:
    words = [w.encode("utf-8", "replace") for w in _WORD.findall(text)]
  return np.fromiter(map(zlib.crc32, words), np.uint64, len(words))


def gram_hashes(words: np.ndarray, n: int) -> np.ndarray:
  """Hashes each n-gram of hashed words; uint64 [words - n + 1], or none."""
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

  The share of equal positions in two signatures estimates the Jaccard similarity of the
  two sets of 5-grams, with a standard error of at most 1 / 16. A shorter text is one
  n-gram.
  """
  words = word_hashes(text)
  grams = np.unique(gram_hashes(words, min(_SHINGLE, max(len(words), 1))))
  if not len(grams):
    return np.zeros(_HASHES, np.uint32)
  # Modulo 2**64, which overflow does: each row orders the n-grams in a way of its own.
  mixed = grams[None, :] * _SCALE + _SHIFT
  return (mixed.min(axis=1) >> np.uint64(32)).astype(np.uint32)


def policy_text(trajectory: Trajectory) -> str:
  """Joins the text for finding duplicates: the question and the policy's spans."""
  # Without tool results: two runs that read one page are not duplicates because of it.
  ours = (Author.PROMPT, Author.POLICY)
  texts = (s.text for s in trajectory.segments if s.author in ours)
  return "\n".join(texts)


class Duplicates:
  """Remembers seen texts; some 2.5 kB a trajectory, for any length."""

  def __init__(self, max_similarity: float):
    """Takes the Jaccard similarity above which a text is a near duplicate."""
    self._limit = max_similarity
    self._seen: list[np.ndarray] = []
    self._by_band: dict[bytes, int] = {}

  def is_new(self, text_signature: np.ndarray) -> bool:
    """Whether no earlier text is too similar; remembers the text if so."""
    # Only texts with a whole band in common are compared: locality-sensitive hashing.
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
  """The questions of evaluation sets, as hashed n-grams; a value workers can have."""

  def __init__(self, questions: Iterable[str], n: int):
    """Takes the questions, and the n of forbidden common n-grams, in words.

    For a question in a script without spaces, n is twice as many letters. A question
    with fewer words counts only if a trajectory's question equals it.
    """
    # --- Hashes of the n-grams, by length; for a short question, its whole text.
    whole = []
    grams = {n: [], n * _LETTERS: []}
    for question in questions:
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
    """Whether a question, or a text of its trajectory, is from an evaluation set."""
    words = word_hashes(question)
    if len(words) and np.isin(gram_hashes(words, len(words)), self._whole).any():
      return True
    texts = [question]
    for segment in trajectory.segments:
      # Instructions are the same for every task: they tell nothing of this one.
      if segment.author != Author.PROMPT or segment.role == "question":
        texts.append(segment.text)
    return any(self._shares(word_hashes(text)) for text in texts)

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


# A host at the beginning of a word, and its path; the path is only a look-ahead, so
# that a URL inside another (an archive's) is found too.
_URL = re.compile(
  r"(?<![\w.-])(?:https?://)?((?:[a-z0-9-]+\.)+[a-z]{2,})(?::\d+)?"
  r"(?=(/[^\s\"'<>|)\]]{0,200})?)",
  re.IGNORECASE,
)


def visits(trajectory: Trajectory, domains: Sequence[str]) -> bool:
  """Whether a tool call's arguments name a URL of one of the domains.

  A domain is `host`, with its subdomains, or `host/path`, for URLs that begin with it.
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

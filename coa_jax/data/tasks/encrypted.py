"""Reads encrypted rows from BrowseComp, BrowseComp-Plus and xbench.

Encryption keeps these rows out of training data. A ciphertext is base64 text; its bytes
are XORed with a repeated key. The key is the SHA-256 digest of the row's canary
(openai/simple-evals, browsecomp_eval.py), or the canary itself (xbench).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from typing import Any

from coa_jax.data.tasks.task import Row, first_of

# The shortest ciphertext; names, formulas and other spaceless texts are shorter.
_LEAST = 32


def browsecomp(row: Row, where: str, default_id: str) -> Row:
  """Reads a row with `problem`, `answer` and `canary`, encrypted or in clear."""
  names = ("problem", "answer")
  problem, answer = opened(row["problem"], row["answer"], row["canary"], where, names)
  return {
    "id": first_of(row, "id", default=default_id),
    "question": problem,
    "answers": answer,
    "source": "browsecomp",
    "family": first_of(row, "problem_topic", "topic"),
    "meta": {"canary": row["canary"]},
  }


def browsecomp_plus(row: Row, where: str, default_id: str) -> Row:
  """Reads a row with `query`, `answer` and `evidence_docs`, encrypted or in clear.

  Only the documents' ids are kept: a row's texts have megabytes.
  """
  canary = row.get("canary")
  names = ("query", "answer")
  query, answer = opened(row["query"], row["answer"], canary, where, names)
  meta: dict[str, Any] = {"canary": canary} if canary else {}
  for kind in ("gold_docs", "evidence_docs"):
    ids = [doc["docid"] for doc in first_of(row, kind, default=[])]
    if query != row["query"]:
      # Ids may be in clear in an encrypted row.
      key = hashlib.sha256(canary.encode()).digest()
      clear = [_decrypted(one, key) for one in ids]
      ids = ids if None in clear else clear
    meta[kind] = ids
  return {
    "id": first_of(row, "query_id", default=default_id),
    "question": query,
    "answers": answer,
    "source": "browsecomp_plus",
    "meta": meta,
  }


def opened(
  question: Any, answers: Any, canary: Any, where: str, names: tuple[str, str]
) -> tuple[Any, Any]:
  """Decrypts a question and its answers (one or a list) with the row's canary.

  Without a canary, or if the question is not base64, returns both unchanged. `where`
  and `names` (the two field names) are for error messages.

  Raises:
    ValueError: the question is encrypted, but the canary does not decrypt both.
  """
  # Prose has spaces, base64 has none; an answer alone may look like either.
  if canary is None or _from_base64(question) is None:
    return question, answers
  field = names[0]
  if isinstance(canary, str) and canary:
    digest = hashlib.sha256(canary.encode()).digest()
    for key in (digest, canary.encode()):
      text = _decrypted(question, key)
      # ASCII XOR ASCII is ASCII: only unreadable text shows that a canary is wrong.
      if text is None or (key is not digest and not _is_plain(text)):
        continue
      several = answers if isinstance(answers, list) else [answers]
      texts = [_decrypted(answer, key) for answer in several]
      if None not in texts:
        return text, texts
      field = names[1]
  raise ValueError(
    f"{where}: field {field!r} is encrypted and not opened by its 'canary'; accepted: "
    "BrowseComp or xbench as published, or rows in clear without a canary"
  )


def check_in_clear(question: str, where: str) -> None:
  """Refuses an encrypted question.

  Raises:
    ValueError: the question is one long base64 word.
  """
  if len(question) >= _LEAST and _from_base64(question.strip()) is not None:
    raise ValueError(
      f"{where}: the question is encrypted ({question[:20]}...); accepted: a text in "
      "clear, or a column 'canary' that opens it"
    )


def _from_base64(text: Any) -> bytes | None:
  if not isinstance(text, str):
    return None
  try:
    return base64.b64decode(text, validate=True)
  except (binascii.Error, ValueError):
    return None


def _is_plain(text: str) -> bool:
  """Whether a text is mostly letters, digits and spaces."""
  return 4 * sum(c.isalnum() or c.isspace() for c in text) >= 3 * len(text)


def _decrypted(text: Any, key: bytes) -> str | None:
  """Decrypts a text; None if the key is wrong."""
  secret = _from_base64(text)
  if secret is None:
    return None
  pairs = zip(secret, itertools.cycle(key), strict=False)
  try:
    clear = bytes(a ^ b for a, b in pairs).decode()
  except UnicodeDecodeError:
    return None
  # A wrong key gives control characters.
  return clear if all(" " <= c != "\x7f" or c in "\t\r\n" for c in clear) else None

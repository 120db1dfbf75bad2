"""Reads BrowseComp as OpenAI publishes it: encrypted, against leaks into training data.

Problem and answer are base64 of bytes that are XORed with the SHA-256 of the row's
canary, repeated as long as they are (openai/simple-evals, browsecomp_eval.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from typing import Any

from coa_jax.tasks.task import Row, Task


def browsecomp(row: Row, where: str, default_id: str) -> Task:
  """A row of `problem`, `answer` and `canary`, decrypted; one in clear as it stands.

  Raises:
    ValueError: the problem is encrypted, and this canary does not open both.
  """
  problem = row["problem"]
  answer = row["answer"]
  # Prose has spaces, which base64 has not; an answer alone may look like either.
  if _from_base64(problem) is not None:
    problem = _decrypted(problem, row, f"{where}: field 'problem'")
    answer = _decrypted(answer, row, f"{where}: field 'answer'")
  plain = {
    "id": row.get("id") or default_id,
    "question": problem,
    "answers": answer,
    "source": "browsecomp",
    "family": row.get("problem_topic") or row.get("topic") or "",
    "meta": {"canary": row["canary"]},
  }
  return Task.from_json(plain, where)


def _from_base64(text: Any) -> bytes | None:
  if not isinstance(text, str):
    return None
  try:
    return base64.b64decode(text, validate=True)
  except (binascii.Error, ValueError):
    return None


def _decrypted(text: Any, row: Row, field: str) -> str:
  secret = _from_base64(text)
  if secret is not None and isinstance(row["canary"], str):
    key = hashlib.sha256(row["canary"].encode()).digest()
    try:
      return bytes(
        a ^ b for a, b in zip(secret, itertools.cycle(key), strict=False)
      ).decode()
    except UnicodeDecodeError:
      pass
  raise ValueError(
    f"{field} is encrypted and not opened by its 'canary'; accepted: BrowseComp as "
    "published, or rows in clear without a canary"
  )

"""Counts the tokens in a team's calls, and those available from a prefix cache."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Sequence

from coa_jax.data.teacher.backend import Message
from coa_jax.protocol import roles

Encode = Callable[[str], Sequence[int]]

_TAGS = "|".join((*roles.ROLES, *roles.TOOLS, roles.OBSERVATION))
_WORD = re.compile(rf"</?(?:{_TAGS})>|[^\W\d]+|\d|[^\w\s]")


def word_ids(text: str) -> list[int]:
  """Replaces a tokenizer: words, single digits, punctuation marks and tags get ids."""
  return [zlib.crc32(word.encode()) for word in _WORD.findall(text)]


def encoder(folder: str | None) -> Encode:
  """Returns the encoder for costs: the folder's tokenizer, or `word_ids` for None."""
  if folder is None:
    return word_ids
  from coa_jax.protocol.tokens import Tokenizer  # takes seconds to import

  return Tokenizer.load(folder).encode


class TokenMeter:
  """Counts each call's tokens, and prompt tokens available from a prefix cache."""

  def __init__(self, encode: Encode):
    """Takes the encoder for all counts."""
    self._encode = encode
    self._ids: dict[Message, tuple[int, ...]] = {}
    self._sent: list[list[tuple[int, ...]]] = []

  def charge(self, messages: Sequence[Message], reply: str) -> tuple[int, int, int]:
    """Counts a call's (prompt, cached, generated) tokens.

    Cached tokens are the longest token prefix shared with an earlier call and its
    reply, as in a prefix cache without eviction.
    """
    chunks = [self._chunk(message) for message in messages]
    cached = 0
    for sent in self._sent:
      cached = max(cached, _common_prefix(chunks, sent))
    prompt = sum(map(len, chunks))
    answer = self._chunk(Message("assistant", reply))
    self._sent.append([*chunks, answer])  # a cache also has the generated tokens
    return prompt, cached, len(answer)

  def _chunk(self, message: Message) -> tuple[int, ...]:
    # A conversation is sent again at every call: each message is tokenized once.
    ids = self._ids.get(message)
    if ids is None:
      ids = tuple(self._encode(f"{message.role}\n{message.content}\n"))
      self._ids[message] = ids
    return ids


def _common_prefix(ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> int:
  """Counts the tokens in the longest common prefix of two conversations."""
  count = 0
  for a, b in zip(ours, theirs, strict=False):
    if a is not b and a != b:
      # The first different message: only its own beginning can still be shared.
      pairs = zip(a, b, strict=False)
      return count + sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))
    count += len(a)
  return count

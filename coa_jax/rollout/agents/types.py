"""Records of agents' requests: a message, how a reply is sampled, the reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol.tool_bodies import FunctionCall

# {"role", "content", ...}; an assistant's may have `calls`, FunctionCalls.
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How one reply is sampled.

  Attributes:
    temperature: 0 is greedy; None for 1.
    top_p: None for the config's.
    most: maximum tokens; None for all that fit.
    stop: texts that end the reply, besides the format's.
    seed: an integer for the random numbers, besides the session's.
  """

  temperature: float | None = None
  top_p: float | None = None
  most: int | None = None
  stop: tuple[str, ...] = ()
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Reply:
  """A reply's parts.

  Attributes:
    content: text for the user.
    reasoning: text before it.
    calls: tool calls.
  """

  content: str = ""
  reasoning: str = ""
  calls: tuple[FunctionCall, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sampled:
  """A sampled reply.

  Attributes:
    reply: its parts.
    text: its text, without a stop text.
    ids, logps: its tokens and their log-probs, a stop text's tokens included.
    is_whole: False if it was cut off at the token limit.
    prompt: the number of tokens before it.
  """

  reply: Reply
  text: str
  ids: list[int]
  logps: list[float]
  is_whole: bool
  prompt: int

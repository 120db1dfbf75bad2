"""What answers a team's agents: messages in, one reply out, and how that can fail.

`llm.ChatBackend` (an OpenAI-compatible endpoint), `scripted.ScriptedBackend`,
`gsm8k_replay.Gsm8kReplay`, `gsm8k_programs.Gsm8kPrograms` and `cloze.answer` are such
backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from coa_jax.protocol.trajectory import ToolCall

# Runs a tool: (tag, content of its span) -> what it gave.
CallTool = Callable[[str, str], ToolCall]


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a conversation; `role` is system, user or assistant."""

  role: str
  content: str


@dataclasses.dataclass(frozen=True)
class Reply:
  """A model's answer and what it cost.

  Attributes:
    text: the answer, without the reasoning that a model may put before it.
    prompt_tokens: tokens sent, as the endpoint counts them; 0 if it does not say. This
      and the next two include the tokens of unusable replies before this one.
    cached_tokens: how many of those came from its prefix cache.
    completion_tokens: tokens of the answer.
    seconds: wall time, retries included.
    retries: attempts beyond the first.
    faults: what was wrong with each of those attempts but the last.
    model: the model that the endpoint says it is; "" if it does not say.
    cut: whether it hit the limit of tokens, so that its end is missing.
  """

  text: str
  prompt_tokens: int = 0
  cached_tokens: int = 0
  completion_tokens: int = 0
  seconds: float = 0.0
  retries: int = 0
  faults: tuple[str, ...] = ()
  model: str = ""
  cut: bool = False

  @property
  def reported(self) -> tuple[int, ...]:
    """(prompt, cached, completion) tokens; () where the endpoint does not count."""
    counts = (self.prompt_tokens, self.cached_tokens, self.completion_tokens)
    if any(counts):
      return counts
    return ()


class ModelBackend(Protocol):
  """Answers the agents. Threads may share one."""

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """Replies to a conversation of `agent`.

    Raises:
      InfrastructureError: nothing could answer.
      Unsolvable: this task cannot be gone on with; others can.
      RefusedError: no request will be answered.
    """
    ...


class BackendError(Exception):
  """No usable reply came.

  Attributes:
    charged: (prompt, cached, completion) tokens of replies that could not be used.
  """

  charged: tuple[int, ...] = (0, 0, 0)


class InfrastructureError(BackendError, RuntimeError):
  """A service is down or refuses to serve: says nothing about the run that met it."""


class RefusedError(BackendError, RuntimeError):
  """The endpoint refuses every request of this kind; trying again cannot help."""


class Unsolvable(BackendError):
  """A backend cannot go on with a task; the run ends and its record says why.

  Attributes:
    reason: a short name that counts can be kept by.
    detail: what exactly was wrong.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(f"{reason}: {detail}" if detail else reason)
    self.reason = reason
    self.detail = detail

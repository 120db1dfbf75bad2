"""A team's backend interface (messages in, one reply out) and its errors.

Implementations: `llm.ChatBackend` (an OpenAI-compatible endpoint),
`scripted.ScriptedBackend`, `gsm8k_replay.Gsm8kReplay`, `gsm8k_programs.Gsm8kPrograms`
and `cloze.answer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from coa_jax.protocol.trajectory import ToolCall

# Runs a tool: (tag, span content) -> result.
CallTool = Callable[[str, str], ToolCall]


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a conversation; `role` is system, user or assistant."""

  role: str
  content: str


@dataclasses.dataclass(frozen=True)
class Reply:
  """A model's answer and its cost.

  Attributes:
    text: the answer, without any reasoning before it.
    prompt_tokens: prompt tokens, as the endpoint counts them; 0 if unknown. This count
      and the next two include unusable replies before this one.
    cached_tokens: prompt tokens from the endpoint's prefix cache.
    completion_tokens: generated tokens.
    seconds: wall time, retries included.
    retries: attempts beyond the first.
    faults: the failures of all attempts before the last.
    model: the endpoint's model name; "" if unknown.
    cut: whether the token limit cut the reply short.
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
    """(prompt, cached, completion) tokens; () if the endpoint does not count."""
    counts = (self.prompt_tokens, self.cached_tokens, self.completion_tokens)
    if any(counts):
      return counts
    return ()


class ModelBackend(Protocol):
  """Answers the agents. Threads may share a backend."""

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """Replies as `agent` to its conversation.

    Raises:
      InfrastructureError: nothing could answer.
      Unsolvable: the backend cannot continue with this task, but can with others.
      RefusedError: no request will be answered.
    """
    ...


class BackendError(Exception):
  """No usable reply; `charged` has the tokens paid for unusable replies."""

  charged: tuple[int, ...] = (0, 0, 0)  # prompt, cached, completion


class InfrastructureError(BackendError, RuntimeError):
  """A service is down or refuses to serve; the affected run gets no verdict."""


class RefusedError(BackendError, RuntimeError):
  """The endpoint refuses every request of this kind; trying again cannot help."""


class Unsolvable(BackendError):
  """A backend cannot continue with a task; the run ends and records the reason.

  `reason` is short enough to count; `detail` is the exact problem.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(f"{reason}: {detail}" if detail else reason)
    self.reason = reason
    self.detail = detail

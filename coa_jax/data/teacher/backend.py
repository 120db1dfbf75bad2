"""The interface of a team's backend: messages in, one reply out, and its errors.

Implementations: `llm.ChatBackend` (an OpenAI-compatible endpoint),
`scripted.ScriptedBackend`, `gsm8k_replay.Gsm8kReplay`, `gsm8k_programs.Gsm8kPrograms`
and `cloze.answer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from coa_jax.protocol.trajectory import ToolCall

# Runs a tool: (tag, content of its span) -> its result.
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
    prompt_tokens: tokens sent, counted by the endpoint; 0 if unknown. This and the next
      two include the tokens of unusable replies before this one.
    cached_tokens: the part of them from its prefix cache.
    completion_tokens: tokens of the answer.
    seconds: wall time, retries included.
    retries: attempts beyond the first.
    faults: the failures of all attempts before the last.
    model: the model's name from the endpoint; "" if unknown.
    cut: whether it hit the token limit and lacks its end.
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
  """No usable reply came; `charged` has the tokens of unusable ones."""

  charged: tuple[int, ...] = (0, 0, 0)  # prompt, cached, completion


class InfrastructureError(BackendError, RuntimeError):
  """A service is down or refuses to serve: no verdict on the affected run."""


class RefusedError(BackendError, RuntimeError):
  """The endpoint refuses every request of this kind; trying again cannot help."""


class Unsolvable(BackendError):
  """A backend cannot continue with a task; the run ends and records the reason.

  The reason is short enough to count; the detail is the exact problem.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(f"{reason}: {detail}" if detail else reason)
    self.reason = reason
    self.detail = detail

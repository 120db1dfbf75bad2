"""The backend for an OpenAI-compatible endpoint: requests, replies, failures.

Reasoning before a reply's text is dropped. Tokens charged for unusable replies are
added to the usable reply's tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from typing import ClassVar

from coa_jax.data.teacher.backend import (
  InfrastructureError,
  Message,
  RefusedError,
  Reply,
  Unsolvable,
)
from tools_sandbox.chat import ChatConfig, ChatModel
from tools_sandbox.http_client import BadReply, NoReply


@dataclasses.dataclass(frozen=True)
class TeacherChatConfig(ChatConfig):
  """Config section `chat` of a teacher: a `ChatConfig` with sampling and more retries.

  Attributes:
    max_tokens: the longest reply. Fields not listed here are as in `ChatConfig`.
    temperature: the sampling temperature; a task's samples differ only above 0.
    retries: attempts beyond the first: a half-minute outage ends no run.
  """

  max_tokens: int = 1024
  temperature: float = 0.7
  retries: int = 5
  backoff_s: ClassVar[float] = 1.0


class ChatBackend:
  """Answers agents through an endpoint. Threads may share it; close it after use."""

  def __init__(self, config: ChatConfig, api_key: str | None = None):
    """Opens a connection pool; sends nothing yet.

    `api_key` is the bearer token if the config names no key file; it is never logged.

    Raises:
      ValueError: the key file cannot be used.
    """
    self.config = config
    self._chat = ChatModel(config, api_key, use_proxies=True)

  def __enter__(self) -> ChatBackend:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Closes the connections."""
    self._chat.close()

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """Returns the model's reply to a conversation; every agent is asked alike.

    Raises:
      InfrastructureError: no usable reply after all retries, or a request refused for
        its content.
      Unsolvable: the conversation is longer than the model's context.
      RefusedError: the key, the URL or the model's name is wrong.
    """
    wasted = (0, 0, 0)  # tokens of unusable replies

    # `ChatModel` retries if this raises, as it does when no reply comes.
    def read(data: bytes) -> Reply:
      nonlocal wasted
      text = data.decode("utf-8", "replace")
      try:
        return read_completion(text)
      except ValueError as e:
        wasted = _sum(wasted, _charged(text))
        raise BadReply("not a chat completion", str(e)) from None

    # --- Ask. `ChatModel` handles the attempts and the pauses between them.
    start = time.monotonic()
    try:
      reply, faults = self._chat.send([dataclasses.asdict(m) for m in messages], read)
    except NoReply as e:
      error = self._error(agent, e)
      error.charged = wasted
      raise error from None

    # --- The reply, with all attempts' cost.
    counts = (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)
    prompt, cached, completion = _sum(counts, wasted)
    return dataclasses.replace(
      reply,
      prompt_tokens=prompt,
      cached_tokens=cached,
      completion_tokens=completion,
      seconds=time.monotonic() - start,
      retries=len(faults),
      faults=tuple(map(str, faults)),
    )

  def _error(
    self, agent: str, e: NoReply
  ) -> InfrastructureError | Unsolvable | RefusedError:
    """Chooses an error by its scope: this run, this task or all requests."""
    url = self.config.url
    status = e.refusal
    start = repr(e.text[:300])
    if not status:
      return InfrastructureError(
        f"{url} gave no usable reply in {len(e.faults)} attempts (agent {agent!r}); "
        f"the last: {e}. Check that the server runs and that chat.base_url is right"
      )
    if status in (401, 403):
      return RefusedError(f"{url} refuses the API key (status {status}): {start}")
    if status == 404:
      return RefusedError(
        f"{url} is not there or has no model {self.config.model!r}; base_url "
        f"usually ends with /v1: {start}"
      )
    if status < 400:
      return RefusedError(
        f"{url} answers with status {status}; set chat.base_url to where it leads"
      )
    if status in (400, 413, 422) and _TOO_LONG.search(e.text):
      return Unsolvable("context_too_long", e.text[:300])
    return InfrastructureError(f"{url} refuses the request (status {status}): {start}")


def read_completion(text: str) -> Reply:
  """Reads a chat completion's body, with its `usage` if present.

  Raises:
    ValueError: the text is not a chat completion; the message shows its start.
  """
  try:
    body = json.loads(text)
    choice = body["choices"][0]
    content = choice["message"].get("content")
  except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
    raise ValueError(f"the body starts with {text[:80]!r}") from None
  if not isinstance(content, str | None):
    raise ValueError(f"message.content is a {type(content).__name__}")
  model = body.get("model")
  if not isinstance(model, str):
    model = ""
  prompt, cached, completion = _charged(text)
  return Reply(
    text=_visible(content or ""),
    prompt_tokens=prompt,
    cached_tokens=cached,
    completion_tokens=completion,
    model=model,
    cut=choice.get("finish_reason") == "length",
  )


_MOST_TOKENS = 1 << 40  # the largest meaningful count; costs are floats
# Endpoint messages (OpenAI, vLLM, SGLang, TGI) about an over-long conversation.
_TOO_LONG = re.compile(
  r"context.?(length|window)|maximum (model|input|prompt) length|max_model_len|"
  r"(prompt|input|request) (is|was)? ?(too long|longer than)",
  re.IGNORECASE,
)
# Reasoning: complete; cut short; or begun in the prompt, by the model's template.
_THINKING = re.compile(
  r"^\s*<think>.*?</think>\s*|^\s*<think>.*\Z|^((?!<think>).)*</think>\s*", re.DOTALL
)


def _visible(content: str) -> str:
  """Removes the reasoning before the content, and replaces broken characters."""
  content = content.encode("utf-8", "replace").decode()
  return _THINKING.sub("", content, count=1)


def _charged(text: str) -> tuple[int, int, int]:
  """Returns a response's (prompt, cached, completion) tokens; 0 if missing."""
  try:
    usage = json.loads(text)["usage"]
    details = usage.get("prompt_tokens_details")
  except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
    return 0, 0, 0
  if not isinstance(details, dict):  # few endpoints report cached tokens
    details = {}
  return (
    _count(usage.get("prompt_tokens")),
    _count(details.get("cached_tokens")),
    _count(usage.get("completion_tokens")),
  )


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(x + y for x, y in zip(a, b, strict=True))


def _count(value: object) -> int:
  if type(value) is int and 0 <= value <= _MOST_TOKENS:
    return value
  return 0  # not a token count

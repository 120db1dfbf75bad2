"""Messages to a language model and its replies: the one place that talks to LLMs."""

from __future__ import annotations

import dataclasses
import email.utils
import json
import random
import time
from collections.abc import Sequence
from typing import Protocol

import httpx


class InfrastructureError(RuntimeError):
  """A service is down or refuses to serve: says nothing about the run that met it."""


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a conversation; `role` is system, user or assistant."""

  role: str
  content: str


@dataclasses.dataclass(frozen=True)
class Reply:
  """A model's answer and what it cost.

  Attributes:
    text: the answer.
    prompt_tokens: tokens sent, as the endpoint counts them; 0 if it does not say.
    cached_tokens: how many of those came from its prefix cache.
    completion_tokens: tokens of the answer.
    seconds: wall time, retries included.
    retries: attempts beyond the first.
  """

  text: str
  prompt_tokens: int = 0
  cached_tokens: int = 0
  completion_tokens: int = 0
  seconds: float = 0.0
  retries: int = 0

  @property
  def reported(self) -> tuple[int, ...]:
    """(prompt, cached, completion) tokens; () where the endpoint does not count."""
    counts = (self.prompt_tokens, self.cached_tokens, self.completion_tokens)
    return counts if any(counts) else ()


class Brain(Protocol):
  """What answers the agents: an endpoint, or a script."""

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """The reply to a conversation of `agent`.

    Raises:
      InfrastructureError: nothing could answer.
      GaveUp: this task cannot be gone on with; others can.
    """
    ...


class GaveUp(Exception):
  """A brain cannot go on with a task; the run ends and its record says why.

  Attributes:
    reason: a short name that counts can be kept by.
    detail: what exactly was wrong.
  """

  def __init__(self, reason: str, detail: str = ""):
    """Takes the reason and the detail."""
    super().__init__(f"{reason}: {detail}" if detail else reason)
    self.reason, self.detail = reason, detail


class RefusedError(RuntimeError):
  """The endpoint refuses every request of this kind; trying again cannot help."""


@dataclasses.dataclass(frozen=True)
class ChatConfig:
  """Config section `chat`: an OpenAI-compatible endpoint.

  Attributes:
    base_url: up to and without /chat/completions, e.g. "http://localhost:8000/v1".
    model: the name that the endpoint knows it by.
    temperature: of sampling; several samples of a task differ only if it is above 0.
    max_tokens: the longest reply.
    timeout_s: seconds to wait for one reply.
    retries: attempts beyond the first, on 408, 429, 5xx, timeouts, cut connections and
      replies that are not chat completions.
    backoff_s: seconds before the first retry; doubled for each one after it.
    max_pause_s: the longest pause; an endpoint that asks for more is given up.
  """

  base_url: str
  model: str
  temperature: float = 0.7
  max_tokens: int = 1024
  timeout_s: float = 120.0
  retries: int = 5
  backoff_s: float = 1.0
  max_pause_s: float = 120.0

  def __post_init__(self):
    if not self.base_url.startswith(("http://", "https://")):
      raise ValueError(
        f"base_url {self.base_url!r} must start with http:// or https://"
      )
    if not self.model:
      raise ValueError("model: name the model that the endpoint serves")
    if self.max_tokens < 1 or self.retries < 0 or self.timeout_s <= 0:
      raise ValueError("max_tokens and timeout_s must be positive, retries at least 0")


class ChatBrain:
  """Answers agents through an endpoint. Threads may share it; close it after use."""

  def __init__(self, config: ChatConfig, api_key: str | None = None):
    """Opens a connection pool; sends nothing yet.

    Args:
      config: where and how to ask.
      api_key: sent as a bearer token, if there is one; never logged.
    """
    self._config = config
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    self._client = httpx.Client(headers=headers, timeout=config.timeout_s)
    self._url = config.base_url.rstrip("/") + "/chat/completions"

  def __enter__(self) -> ChatBrain:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self) -> None:
    """Closes the connections."""
    self._client.close()

  def __call__(self, agent: str, messages: Sequence[Message]) -> Reply:
    """The model's reply to a conversation; every agent is asked alike.

    Raises:
      InfrastructureError: no usable reply after all retries, or a request that the
        endpoint refuses for its content (e.g. a context too long for the model).
      RefusedError: the key, the URL or the model's name is wrong.
    """
    c = self._config
    body = {
      "model": c.model,
      "messages": [dataclasses.asdict(m) for m in messages],
      "temperature": c.temperature,
      "max_tokens": c.max_tokens,
    }
    start = time.monotonic()
    for attempt in range(c.retries + 1):
      asked_pause = 0.0
      try:
        response = self._client.post(self._url, json=body)
        if response.status_code == 200:
          reply = read_completion(response.text)
          seconds = time.monotonic() - start
          return dataclasses.replace(reply, seconds=seconds, retries=attempt)
        self._check_refusal(response)
        fault = f"status {response.status_code}: {response.text[:200]!r}"
        asked_pause = _retry_after(response.headers.get("retry-after", ""))
      except httpx.TimeoutException:
        fault = f"no reply within {c.timeout_s:g} s"
      except httpx.RequestError as e:
        fault = f"{type(e).__name__}: {e}"
      except ValueError as e:
        fault = f"not a chat completion: {e}"
      if asked_pause > c.max_pause_s:
        fault += f"; it asks to wait {asked_pause:.0f} s, chat.max_pause_s is less"
        break
      if attempt < c.retries:
        pause = min(c.backoff_s * 2**attempt, c.max_pause_s)
        # Full pauses at once would bring all workers back at the same moment.
        time.sleep(max(asked_pause, pause * random.uniform(0.5, 1.0)))
    raise InfrastructureError(
      f"{self._url} gave no usable reply in {attempt + 1} attempts (agent {agent!r}); "
      f"the last: {fault}. Check that the server runs and that chat.base_url is right"
    )

  def _check_refusal(self, response: httpx.Response) -> None:
    code, text = response.status_code, response.text[:300]
    if code in (401, 403):
      raise RefusedError(f"{self._url} refuses the API key (status {code}): {text!r}")
    if code == 404:
      raise RefusedError(
        f"{self._url} is not there or has no model {self._config.model!r}; base_url "
        f"usually ends with /v1: {text!r}"
      )
    if 400 <= code < 500 and code not in (408, 409, 429):
      raise InfrastructureError(
        f"{self._url} refuses the request (status {code}): {text!r}"
      )
    if code < 400:
      raise RefusedError(
        f"{self._url} answers with status {code}; set chat.base_url to where it leads"
      )


def read_completion(text: str) -> Reply:
  """The body of a chat completion as a reply; `usage` is read where there is one.

  Raises:
    ValueError: it is no chat completion; the message says what it starts with.
  """
  try:
    body = json.loads(text)
    content = body["choices"][0]["message"]["content"]
  except (ValueError, KeyError, IndexError, TypeError):
    raise ValueError(f"the body starts with {text[:80]!r}") from None
  if not isinstance(content, str | None):
    raise ValueError(f"message.content is a {type(content).__name__}")
  usage = body.get("usage")
  usage = usage if isinstance(usage, dict) else {}
  details = usage.get("prompt_tokens_details")
  details = details if isinstance(details, dict) else {}
  return Reply(
    text=content or "",
    prompt_tokens=_count(usage.get("prompt_tokens")),
    cached_tokens=_count(details.get("cached_tokens")),
    completion_tokens=_count(usage.get("completion_tokens")),
  )


def _count(value: object) -> int:
  return value if isinstance(value, int) and value >= 0 else 0


def _retry_after(header: str) -> float:
  """Seconds that a Retry-After header asks for: a number or an HTTP date; 0 if none."""
  try:
    return max(float(header), 0.0)
  except ValueError:
    pass
  try:
    when = email.utils.parsedate_to_datetime(header)
  except ValueError:
    return 0.0
  return max(when.timestamp() - time.time(), 0.0)

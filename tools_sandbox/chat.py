"""An OpenAI-compatible chat endpoint: the only module that calls language models.

The model plays a teacher's agents, grades answers, shortens pages and reads images.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

from tools_sandbox.http_client import (
  BadReply,
  Fault,
  Service,
  check_url,
  read_json,
  read_key,
)
from tools_sandbox.text import clean

# The longest pause; if an endpoint asks for a longer one, the request fails.
MAX_PAUSE_S = 120.0


@dataclasses.dataclass(frozen=True)
class ChatConfig:
  """Address and parameters of a language model's endpoint.

  Attributes:
    base_url: the URL without /chat/completions, e.g. "http://localhost:8000/v1".
    model: the model's name at the endpoint.
    key_file: a file with the API key, sent as a bearer token; None for none.
    max_tokens: the longest reply.
    temperature: the sampling temperature.
    timeout_s: seconds to wait for one reply.
    retries: attempts beyond the first, on 408, 409, 429, 5xx, timeouts, cut connections
      and replies that are not chat completions.
    prices: US dollars per million tokens: prompt, cached prompt, completion; () if
      calls are free.
  """

  base_url: str
  model: str
  key_file: str | None = None
  max_tokens: int = 512
  temperature: float = 0.0
  timeout_s: float = 120.0
  retries: int = 3
  prices: tuple[float, ...] = ()
  # Seconds before the first retry; doubled for each later retry.
  backoff_s: ClassVar[float] = 0.25

  def __post_init__(self):
    # --- The endpoint and its model.
    check_url("base_url", self.base_url)
    if not self.model:
      raise ValueError("model: name the model that the endpoint serves")

    # --- The parameters of a request.
    if self.max_tokens < 1 or self.retries < 0 or not 0 < self.timeout_s < math.inf:
      raise ValueError("max_tokens and timeout_s must be positive, retries at least 0")
    if not self.temperature >= 0:
      raise ValueError("temperature must be at least 0")
    if self.prices and (len(self.prices) != 3 or min(self.prices) < 0):
      raise ValueError(
        f"prices is {self.prices!r}; give three, in US dollars: of a million prompt, "
        "cached prompt and completion tokens"
      )

  @property
  def url(self) -> str:
    """The URL for requests."""
    return self.base_url.rstrip("/") + "/chat/completions"

  def usd(self, prompt: int, cached: int, completion: int) -> float | None:
    """Returns the tokens' price (`prompt` includes `cached`); None without `prices`."""
    if not self.prices:
      return None
    # Endpoints count cached tokens as prompt tokens too, and bill them less.
    counts = (prompt - cached, cached, completion)
    return sum(n * p for n, p in zip(counts, self.prices, strict=True)) / 1e6


class ChatModel:
  """Sends requests to a chat endpoint. Thread-safe; close it after use."""

  def __init__(
    self, config: ChatConfig, api_key: str | None = None, use_proxies: bool = False
  ):
    """Sends nothing yet.

    Args:
      config: the endpoint.
      api_key: the API key if the config names no key file; never logged.
      use_proxies: see `Service`.

    Raises:
      ValueError: the key file cannot be used.
    """
    # The config's key file takes precedence over the argument.
    key = read_key(config.key_file) or api_key
    self.config = config
    self._service = Service(
      "the chat endpoint",
      config.url,
      {"Authorization": f"Bearer {key}"} if key else {},
      retries=config.retries,
      backoff_s=config.backoff_s,
      max_pause_s=MAX_PAUSE_S,
      timeout_s=config.timeout_s,
      use_proxies=use_proxies,
    )

  def close(self) -> None:
    """Closes the connections."""
    self._service.close()

  def ask(
    self, system: str, content: str | list[dict[str, Any]], seconds: float
  ) -> str:
    """Returns the model's answer to one message, without control characters.

    Args:
      system: the system message; "" for none.
      content: the user's message: text, or text and image parts.
      seconds: the time limit, retries included.

    Raises:
      ToolFault: the endpoint refuses this request.
      Unavailable: no usable reply.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if system:
      messages.insert(0, {"role": "system", "content": system})
    return self._service.ask(self._body(messages), seconds, _read_text)

  def send(
    self, messages: list[dict[str, Any]], read: Callable[[bytes], Any]
  ) -> tuple[Any, tuple[Fault, ...]]:
    """Returns the first reply that `read` accepts; see `Service.send`."""
    return self._service.send(self._body(messages), read=read)

  def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
      "model": self.config.model,
      "messages": messages,
      "temperature": self.config.temperature,
      "max_tokens": self.config.max_tokens,
    }


def _read_text(data: bytes) -> str:
  # BadReply makes the service retry, also for JSON without a chat completion.
  reply = read_json(data)
  try:
    text = reply["choices"][0]["message"]["content"]
  except (KeyError, IndexError, TypeError):
    text = None
  if not isinstance(text, str) or not text.strip():
    raise BadReply("not a chat completion")
  # A model may copy a web page's text, control characters included.
  return clean(text).strip()

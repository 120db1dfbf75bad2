"""An OpenAI-compatible chat endpoint: what summarises pages and looks at images."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools_sandbox.http_client import Service, read_key
from tools_sandbox.web.page import clean


@dataclasses.dataclass(frozen=True)
class ChatConfig:
  """Where a language model is asked.

  Attributes:
    base_url: up to and without /chat/completions, e.g. "http://localhost:8000/v1".
    model: the name that the endpoint knows it by.
    key_file: a file that holds the API key, sent as a bearer token; None for none.
    max_tokens: the longest reply.
  """

  base_url: str
  model: str
  key_file: str | None = None
  max_tokens: int = 512

  def __post_init__(self):
    if not self.base_url.startswith(("http://", "https://")):
      raise ValueError(
        f"base_url {self.base_url!r} must start with http:// or https://"
      )
    if not self.model or self.max_tokens < 1:
      raise ValueError("model must have a name, max_tokens must be at least 1")


class ChatModel:
  """Asks the endpoint. Thread-safe; close it after use."""

  def __init__(self, config: ChatConfig):
    """Sends nothing yet.

    Raises:
      ValueError: the key file cannot be used.
    """
    key = read_key(config.key_file)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = config.base_url.rstrip("/") + "/chat/completions"
    self._config, self._service = config, Service("the chat endpoint", url, headers)

  def close(self) -> None:
    """Closes the connections."""
    self._service.close()

  def ask(
    self, system: str, content: str | list[dict[str, Any]], seconds: float
  ) -> str:
    """The model's answer to one message, at temperature 0, without control characters.

    Args:
      system: what it is to do.
      content: the user's message: text, or parts of text and images.
      seconds: for the answer, retries included.

    Raises:
      ToolFault: the endpoint refuses this request.
      Unavailable: no usable reply.
    """
    body = {
      "model": self._config.model,
      "messages": [
        {"role": "system", "content": system},
        {"role": "user", "content": content},
      ],
      "temperature": 0.0,
      "max_tokens": self._config.max_tokens,
    }
    reply = self._service.ask(body, seconds)
    try:
      text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
      text = None
    if not isinstance(text, str) or not text.strip():
      raise self._service.broken("not a chat completion")
    return clean(text).strip()

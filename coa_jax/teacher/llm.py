"""Messages to a language model and its replies: the one place that talks to LLMs.

A reply is whatever an OpenAI-compatible endpoint makes of one: text, reasoning before
it (left out), or tool calls (put into the words that the team's agents use). What an
endpoint charged for and was no use is counted with the reply that was.

budget: one request with all that can come back for it, read where it is asked.
"""

from __future__ import annotations

import dataclasses
import email.utils
import json
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx


class InfrastructureError(RuntimeError):
  """A service is down or refuses to serve: says nothing about the run that met it."""

  charged: tuple[int, ...] = (0, 0, 0)  # as `GaveUp` has it


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
    prompt_tokens: tokens sent, as the endpoint counts them; 0 if it does not say. With
      those of unusable replies that were counted, and likewise the next two.
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
    charged: (prompt, cached, completion) tokens of replies that could not be used.
  """

  charged: tuple[int, ...] = (0, 0, 0)

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
    timeout_s: seconds to wait for one reply, and between two parts of one that comes
      in parts.
    retries: attempts beyond the first, on 408, 429, 5xx, timeouts, cut connections and
      replies that are not chat completions.
    backoff_s: seconds before the first retry; doubled for each one after it.
    max_pause_s: the longest pause; an endpoint that asks for more is given up.
    prices: US dollars for a million tokens: prompt, cached prompt, completion; () where
      nobody is billed.
  """

  base_url: str
  model: str
  temperature: float = 0.7
  max_tokens: int = 1024
  timeout_s: float = 120.0
  retries: int = 5
  backoff_s: float = 1.0
  max_pause_s: float = 120.0
  prices: tuple[float, ...] = ()

  def __post_init__(self):
    if not self.base_url.startswith(("http://", "https://")):
      raise ValueError(
        f"base_url {self.base_url!r} must start with http:// or https://"
      )
    if not self.model:
      raise ValueError("model: name the model that the endpoint serves")
    if self.max_tokens < 1 or self.retries < 0 or not 0 < self.timeout_s < math.inf:
      raise ValueError("max_tokens and timeout_s must be positive, retries at least 0")
    if self.prices and (len(self.prices) != 3 or min(self.prices) < 0):
      raise ValueError(
        f"prices is {self.prices!r}; give three, in US dollars: of a million prompt, "
        "cached prompt and completion tokens"
      )

  def usd(self, prompt: int, cached: int, completion: int) -> float | None:
    """What so many tokens cost; `cached` of `prompt`. None without `prices`."""
    if not self.prices:
      return None
    counts = (prompt - cached, cached, completion)
    return sum(n * p for n, p in zip(counts, self.prices, strict=True)) / 1e6


class ChatBrain:
  """Answers agents through an endpoint. Threads may share it; close it after use."""

  def __init__(self, config: ChatConfig, api_key: str | None = None):
    """Opens a connection pool; sends nothing yet.

    Args:
      config: where and how to ask.
      api_key: sent as a bearer token, if there is one; never logged.
    """
    self.config = config
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
        endpoint refuses for its content.
      GaveUp: the conversation is longer than the model's context.
      RefusedError: the key, the URL or the model's name is wrong.
    """
    c = self.config
    body = {
      "model": c.model,
      "messages": [dataclasses.asdict(m) for m in messages],
      "temperature": c.temperature,
      "max_tokens": c.max_tokens,
    }
    wasted = [0, 0, 0]
    try:
      return self._ask(agent, body, wasted)
    except (InfrastructureError, GaveUp) as e:
      e.charged = tuple(wasted)
      raise

  def _ask(self, agent: str, body: dict[str, Any], wasted: list[int]) -> Reply:
    """Asks until a reply can be used; adds to `wasted` what the others charged."""
    c, start, faults = self.config, time.monotonic(), []
    for attempt in range(c.retries + 1):
      asked_pause = 0.0
      try:
        status, headers, text = self._post(body)
        if status == 200:
          return _with_waste(
            read_completion(text),
            wasted,
            seconds=time.monotonic() - start,
            retries=attempt,
            faults=tuple(faults),
          )
        self._check_refusal(status, text)
        fault = f"status {status}: {text[:200]!r}"
        asked_pause = _retry_after(headers.get("retry-after", ""))
      except httpx.TimeoutException:
        fault = f"no reply within {c.timeout_s:g} s"
      except httpx.RequestError as e:
        fault = f"{type(e).__name__}: {e}"
      except ValueError as e:
        fault = f"not a chat completion: {e}"
        wasted[:] = map(sum, zip(wasted, _charged(text), strict=True))
      faults.append(fault)
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

  def _post(self, body: dict[str, Any]) -> tuple[int, Mapping[str, str], str]:
    """Status, headers and text of the endpoint's response.

    Raises:
      httpx.RequestError: no whole response; a timeout, too, where it drips on and on.
    """
    deadline = time.monotonic() + self.config.timeout_s
    parts: list[bytes] = []
    size = 0
    with self._client.stream("POST", self._url, json=body) as response:
      for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
          raise httpx.ReadTimeout("the response drips", request=response.request)
        if size > _MAX_BYTES:
          raise httpx.ReadError(
            f"the response is longer than {_MAX_BYTES} bytes", request=response.request
          )
    return (
      response.status_code,
      response.headers,
      b"".join(parts).decode("utf-8", "replace"),
    )

  def _check_refusal(self, code: int, text: str) -> None:
    whole, text = text, text[:300]
    if code in (401, 403):
      raise RefusedError(f"{self._url} refuses the API key (status {code}): {text!r}")
    if code == 404:
      raise RefusedError(
        f"{self._url} is not there or has no model {self.config.model!r}; base_url "
        f"usually ends with /v1: {text!r}"
      )
    if code in (400, 413, 422) and _TOO_LONG.search(whole):
      raise GaveUp("context_too_long", text)
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

  A call of a function, which some endpoints make of a reply that looks like one, is
  put into the team's own words; one whose arguments are no JSON is kept as it is, so
  that the agent is told that it can not be used.

  Raises:
    ValueError: it is no chat completion; the message says what it starts with.
  """
  try:
    body = json.loads(text)
    choice = body["choices"][0]
    message = choice["message"]
    content, calls = message.get("content"), message.get("tool_calls")
  except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
    raise ValueError(f"the body starts with {text[:80]!r}") from None
  if not isinstance(content, str | None):
    raise ValueError(f"message.content is a {type(content).__name__}")
  visible = _visible(content or "")
  if not visible.strip() and isinstance(calls, list) and calls:
    visible = _called(calls[0])
  model = body.get("model")
  prompt, cached, completion = _charged(text)
  return Reply(
    text=visible,
    prompt_tokens=prompt,
    cached_tokens=cached,
    completion_tokens=completion,
    model=model if isinstance(model, str) else "",
    cut=choice.get("finish_reason") == "length",
  )


_MAX_BYTES = 16 << 20  # of a response; far more than any reply
_MOST_TOKENS = 1 << 40  # that a count can mean; costs are reckoned in floats
# How endpoints (OpenAI, vLLM, SGLang, TGI) say that a conversation is too long.
_TOO_LONG = re.compile(
  r"context.?(length|window)|maximum (model|input|prompt) length|max_model_len|"
  r"(prompt|input|request) (is|was)? ?(too long|longer than)",
  re.IGNORECASE,
)
# The second: cut short. The third: it began in the prompt, by the model's template.
_THINKING = re.compile(
  r"^\s*<think>.*?</think>\s*|^\s*<think>.*\Z|^((?!<think>).)*</think>\s*", re.DOTALL
)


def _visible(content: str) -> str:
  """The content without the reasoning before it."""
  return _THINKING.sub("", content, count=1)


def _called(call: Any) -> str:
  """A function call in the words of the agents that call tools (`prompts`)."""
  function = call.get("function") if isinstance(call, dict) else None
  if not isinstance(function, dict):
    return str(call)
  name, given = function.get("name"), function.get("arguments")
  try:
    arguments = json.loads(given) if isinstance(given, str) else given
  except (ValueError, RecursionError):
    return f"{name} {given}"
  values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
  if len(values) != 1 or not isinstance(values[0], str):
    return f"{name} {given}"
  if name in ("code", "python"):
    return f"```py\n{values[0].strip()}\n```"
  return f"TOOL: {name}\nQUERY: {values[0]}"


def _charged(text: str) -> tuple[int, int, int]:
  """(prompt, cached, completion) tokens that a response says it took; 0 for unsaid."""
  try:
    usage = json.loads(text)["usage"]
    details = usage.get("prompt_tokens_details")
  except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
    return 0, 0, 0
  details = details if isinstance(details, dict) else {}
  return (
    _count(usage.get("prompt_tokens")),
    _count(details.get("cached_tokens")),
    _count(usage.get("completion_tokens")),
  )


def _with_waste(reply: Reply, wasted: Sequence[int], **changes: Any) -> Reply:
  prompt, cached, completion = wasted
  return dataclasses.replace(
    reply,
    prompt_tokens=reply.prompt_tokens + prompt,
    cached_tokens=reply.cached_tokens + cached,
    completion_tokens=reply.completion_tokens + completion,
    **changes,
  )


def _count(value: object) -> int:
  return value if type(value) is int and 0 <= value <= _MOST_TOKENS else 0


def _retry_after(header: str) -> float:
  """Seconds that a Retry-After header asks for: a number or an HTTP date; 0 if none."""
  try:
    seconds = float(header)
    return seconds if seconds > 0 else 0.0  # NaN is no pause
  except ValueError:
    pass
  try:
    when = email.utils.parsedate_to_datetime(header)
  except (ValueError, TypeError):
    return 0.0
  return max(when.timestamp() - time.time(), 0.0)

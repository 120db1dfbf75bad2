"""OpenAI completion requests, as far as a Chain-of-Agents model supports them.

One request to /v1/chat/completions asks one question: the last message, which must be
the user's. A trajectory begins with one question, so earlier turns are not read
(`coa.ignored_messages` in the response counts them), and a system message is refused.
For models trained to use them, `conversation` writes both before the question, as plain
text. /v1/completions reads each `prompt` as a question.

`stop` cuts the answer and ends sampling; reasoning may contain stop strings. The
sampler keeps only the sampled token's log-prob: `top_logprobs` (`logprobs` in
/v1/completions) is at most 1, and only at temperature 0, where the sampled token is the
most likely one. Other fields are accepted only with a neutral value.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import secrets
from typing import Any, Literal, TypeVar

import pydantic

from coa_jax.model.distribution import GREEDY_BELOW
from coa_jax.protocol.prompts import conversation_text
from coa_jax.rollout.streaming import InferenceRequest
from tools_sandbox import http_server

_SYSTEM = ("system", "developer")
# Other fields are accepted only with this neutral value, or null.
_NEUTRAL: dict[str, Any] = {
  "frequency_penalty": 0,
  "function_call": "none",
  "functions": [],
  "logit_bias": {},
  "modalities": ["text"],
  "parallel_tool_calls": True,
  "presence_penalty": 0,
  "response_format": {"type": "text"},
  "store": False,
  "tool_choice": "none",
  "tools": [],
}
# Likewise for /v1/completions. `echo` would score the prompt's unsampled tokens.
_TEXT_NEUTRAL: dict[str, Any] = {
  "best_of": 1,
  "echo": False,
  "frequency_penalty": 0,
  "logit_bias": {},
  "presence_penalty": 0,
  "suffix": "",
}
# OpenAI's limit; test harnesses send more to /v1/completions.
_MOST_STOPS = {"chat": 4, "text": 16}


class _Message(pydantic.BaseModel):
  """One message; other fields, e.g. of a returned answer, are not read."""

  role: Literal["user", "assistant", "system", "developer"]
  content: Any = None


class _StreamOptions(http_server.Body):
  include_usage: bool = False


class _Body(http_server.Body):
  """The common fields: supported ones, and ones without effect on an answer."""

  model: str
  temperature: float = pydantic.Field(1.0, ge=0, le=2)
  top_p: float | None = pydantic.Field(None, gt=0, le=1)
  max_tokens: int | None = pydantic.Field(None, ge=1)
  stop: Any = []
  n: int = pydantic.Field(1, ge=1)
  seed: int = pydantic.Field(default_factory=lambda: secrets.randbits(31))
  stream: bool = False
  stream_options: _StreamOptions = _StreamOptions()
  user: Any = None
  metadata: Any = None
  service_tier: Any = None
  safety_identifier: Any = None
  prompt_cache_key: Any = None


_B = TypeVar("_B", bound=_Body)


class _ChatBody(_Body):
  messages: list[_Message] = pydantic.Field(min_length=1)
  max_completion_tokens: int | None = pydantic.Field(None, ge=1)
  logprobs: bool = False
  top_logprobs: int = pydantic.Field(0, ge=0)


class _TextBody(_Body):
  prompt: Any
  logprobs: int | None = pydantic.Field(None, ge=0)


class RequestRefused(Exception):
  """A refused request; it gets an error response in OpenAI's format."""

  def __init__(
    self,
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
    kind: str = "invalid_request_error",
  ):
    """Takes the error's message, field and code, the HTTP status, the error type."""
    super().__init__(message)
    self.status = status
    error = {"message": message, "type": kind, "param": param, "code": code}
    self.body = {"error": error}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A request's attempts at one question, and their output format.

  Attributes:
    attempts: each question's `n` attempts in a row; /v1/completions may have several
      questions.
    stream: whether the answers are sent as server-sent events.
    include_usage: whether the stream ends with the token counts.
    ignored_messages: number of messages not read.
    n: attempts at one question.
    stop: strings ending an answer.
    top: length of a token's `top_logprobs`; None for no log-probs.
    is_text: whether the request came to /v1/completions.
  """

  attempts: tuple[InferenceRequest, ...]
  stream: bool
  include_usage: bool
  ignored_messages: int
  n: int = 1
  stop: tuple[str, ...] = ()
  top: int | None = None
  is_text: bool = False

  @property
  def note(self) -> dict[str, Any]:
    """Returns the response's field `coa`."""
    return {"seed": self.attempts[0].seed, "ignored_messages": self.ignored_messages}


def read_request(
  data: bytes, model: str, top_p: float, most: int, conversation: bool = False
) -> ChatRequest:
  """Reads a body of /v1/chat/completions.

  Args:
    data: JSON.
    model: the served model's name.
    top_p: from the config.
    most: the largest n.
    conversation: whether system messages and earlier turns belong to the question.

  Raises:
    RequestRefused: naming the field.
  """
  body = _read_body(data, model, _ChatBody, _NEUTRAL)
  question, ignored = _question(body.messages, conversation)
  limit = body.max_tokens
  if limit is None:
    limit = body.max_completion_tokens
  elif body.max_completion_tokens not in (None, limit):
    raise RequestRefused("max_tokens and max_completion_tokens differ", "max_tokens")
  if body.top_logprobs and not body.logprobs:
    raise RequestRefused("top_logprobs needs logprobs", "top_logprobs")
  _check_top(body.top_logprobs, "top_logprobs", body.temperature)
  request = _request(body, [question], limit, top_p, most, _MOST_STOPS["chat"])
  top = body.top_logprobs if body.logprobs else None
  return dataclasses.replace(request, ignored_messages=ignored, top=top)


def read_text_request(data: bytes, model: str, top_p: float, most: int) -> ChatRequest:
  """Reads a body of /v1/completions; args as in `read_request`.

  Raises:
    RequestRefused: naming the field.
  """
  body = _read_body(data, model, _TextBody, _TEXT_NEUTRAL)
  prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
  if not prompts or not all(isinstance(p, str) and p.strip() for p in prompts):
    raise RequestRefused(
      "prompt must be a non-empty string or a list of them, not token ids "
      "(lm-eval: tokenized_requests=False)",
      "prompt",
    )
  _check_top(body.logprobs or 0, "logprobs", body.temperature)
  limit = body.max_tokens
  request = _request(body, prompts, limit, top_p, most, _MOST_STOPS["text"])
  return dataclasses.replace(request, top=body.logprobs, is_text=True)


def _check_top(top: int, field: str, temperature: float) -> None:
  """Refuses log-probs of tokens other than the sampled one."""
  if top > 1 or (top and temperature >= GREEDY_BELOW):
    raise RequestRefused(
      f"{field}={top}: the sampler keeps only the sampled token's log-prob; send 0, "
      "or 1 with temperature 0",
      field,
      "unsupported_value",
    )


def _request(
  body: _Body,
  questions: list[str],
  limit: int | None,
  top_p: float,
  most: int,
  most_stops: int,
) -> ChatRequest:
  """Reads the fields common to both request kinds."""
  if body.n * len(questions) > most:
    name = "n" if len(questions) == 1 else "n times the number of prompts"
    raise RequestRefused(f"{name} must be between 1 and {most}", "n")
  if body.stream_options.model_fields_set and not body.stream:
    raise RequestRefused("stream_options needs stream", "stream_options")
  stop = body.stop if isinstance(body.stop, list) else [body.stop]
  is_text = all(isinstance(each, str) and each for each in stop)
  if len(stop) > most_stops or not is_text:
    raise RequestRefused(f"stop must be at most {most_stops} non-empty strings", "stop")
  # --- A question's attempts differ only in their numbers.
  own_top_p = None if body.top_p == top_p else body.top_p
  attempts = []
  for question in questions:
    for sample in range(body.n):
      attempts.append(
        InferenceRequest(
          question, body.temperature, body.seed, sample, limit, own_top_p
        )
      )
  return ChatRequest(
    attempts=tuple(attempts),
    stream=body.stream,
    include_usage=body.stream_options.include_usage,
    ignored_messages=0,
    n=body.n,
    stop=tuple(stop),
  )


def _read_body(data: bytes, model: str, kind: type[_B], neutral: dict[str, Any]) -> _B:
  """Reads the supported fields; null counts as missing."""
  try:
    body = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise RequestRefused(f"the body is not JSON: {e}") from None
  if not isinstance(body, dict):
    raise RequestRefused("the body must be a JSON object")
  # --- Fields with only a neutral value; the others belong to the body.
  fields = {}
  for name, value in body.items():
    if value is None:
      continue
    if name not in neutral:
      fields[name] = value
      continue
    only = neutral[name]
    # True equals 1 in Python; a client confusing them is mistaken.
    if value != only or isinstance(value, bool) != isinstance(only, bool):
      message = f"{name} is not supported; leave it out, or send {json.dumps(only)}"
      raise RequestRefused(message, name, "unsupported_parameter")
  # --- An unknown field may be misspelt.
  try:
    out = http_server.read_fields(kind, fields)
  except http_server.BadField as e:
    if not e.is_unknown:
      raise RequestRefused(str(e), e.field) from None
    known = [*kind.model_fields, *neutral]
    near = difflib.get_close_matches(e.field, known, n=1, cutoff=0.85)
    hint = f"; did you mean {near[0]!r}?" if near else "; leave it out"
    message = f"unknown field {e.field!r:.80}{hint}"
    raise RequestRefused(message, e.field, "unknown_parameter") from None
  if out.model != model:
    raise unknown_model(out.model, model)
  return out


def unknown_model(name: str, model: str) -> RequestRefused:
  """Returns the refusal of an unknown model."""
  message = f"there is no model {name!r}; this server has {model!r}"
  return RequestRefused(message, "model", "model_not_found", status=404)


def _question(messages: list[_Message], conversation: bool) -> tuple[str, int]:
  """Returns the question, and the count of ignored messages."""
  # --- The question is the last message.
  for i, message in enumerate(messages):
    if message.role in _SYSTEM and not conversation:
      text = (
        f"only a server started with --conversation reads a {message.role} message; "
        "put it into the question"
      )
      raise RequestRefused(text, f"messages[{i}].role", "unsupported_value")
  last = len(messages) - 1
  if messages[-1].role != "user":
    raise RequestRefused(
      "the last message must be the user's", f"messages[{last}].role"
    )
  question = _text(messages, last)
  if not question.strip():
    where = f"messages[{last}].content"
    raise RequestRefused("the question must be a non-empty string", where)
  if not conversation:
    return question, last
  # --- In a conversation all messages are read; several turns begin with their roles.
  turns = [m for m in messages if m.role not in _SYSTEM]
  blocks = []
  for i, message in enumerate(messages):
    text = _text(messages, i)
    if message.role not in _SYSTEM and len(turns) > 1:
      text = conversation_text([(message.role, text)])
    blocks.append(text)
  return "\n\n".join(blocks), 0


def _text(messages: list[_Message], i: int) -> str:
  """Returns a message's content; its parts must be text."""
  where = f"messages[{i}].content"
  content = messages[i].content
  if isinstance(content, list):
    text = ""
    for part in content:
      is_text = isinstance(part, dict) and part.get("type") == "text"
      if not is_text or type(part.get("text")) is not str:
        raise RequestRefused("every part must be text", where, "unsupported_value")
      text += part["text"]
    return text
  if not isinstance(content, str):
    raise RequestRefused("content must be a string, or a list of text parts", where)
  return content

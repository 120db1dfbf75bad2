"""OpenAI's chat completions, as far as a Chain-of-Agents model can mean them.

One request asks one question: the last message, which must be the user's. A trajectory
begins with one question, so earlier turns are not read (`coa.ignored_messages` in the
response counts them), and a system message is refused. With `conversation`, for models
that can make something of them, they are written before the question, as plain text.

`message.content` is the answer, the one that would be graded: the last, where there are
several; `message.reasoning_content` is the trajectory before it, tags and observations
included, up to the answer's opening tag. A stream can take nothing back: what stands in
any answer span is content there, and all the rest reasoning. What is not OpenAI's:
`usage.observation_tokens` (given by tools, so neither prompt nor completion),
`coa.seed` (a request with this seed and temperature gets this answer again) and, for
each choice, `coa` with the trajectory's status, tool calls and seconds.

budget: what a request may hold, and what a response does: one protocol.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Iterable
from typing import Any, Literal

import pydantic

from coa_jax.config import nearest
from coa_jax.protocol.prompts import conversation_text
from coa_jax.protocol.roles import ANSWER, open_tag
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.rewards import written_answer
from coa_jax.rollout.streaming import InferenceRequest, TextDelta
from tools_sandbox import http_server

_SYSTEM = ("system", "developer")
# Other fields are accepted where they ask for nothing: with this value, or null.
_NEUTRAL: dict[str, Any] = {
  "frequency_penalty": 0,
  "function_call": "none",
  "functions": [],
  "logit_bias": {},
  "logprobs": False,
  "modalities": ["text"],
  "parallel_tool_calls": True,
  "presence_penalty": 0,
  "response_format": {"type": "text"},
  "stop": [],
  "store": False,
  "tool_choice": "none",
  "tools": [],
  "top_logprobs": 0,
}


class _Message(pydantic.BaseModel):
  """Other fields, as those of an answer that is sent back, are not read."""

  role: Literal["user", "assistant", "system", "developer"]
  content: Any = None


class _StreamOptions(http_server.Body):
  include_usage: bool = False


class _Body(http_server.Body):
  """The fields that this server acts on, and those that change no answer."""

  model: str
  messages: list[_Message] = pydantic.Field(min_length=1)
  temperature: float = pydantic.Field(1.0, ge=0, le=2)
  max_tokens: int | None = pydantic.Field(None, ge=1)
  max_completion_tokens: int | None = pydantic.Field(None, ge=1)
  n: int = pydantic.Field(1, ge=1)
  seed: int = pydantic.Field(default_factory=lambda: secrets.randbits(31))
  stream: bool = False
  stream_options: _StreamOptions = _StreamOptions()
  user: Any = None
  metadata: Any = None
  service_tier: Any = None
  safety_identifier: Any = None
  prompt_cache_key: Any = None


class RequestRefused(Exception):
  """A request that gets an error response, in OpenAI's words."""

  def __init__(
    self,
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
    kind: str = "invalid_request_error",
  ):
    """Args: what is wrong, the field, a short name for it, HTTP status, its class."""
    super().__init__(message)
    self.status = status
    error = {"message": message, "type": kind, "param": param, "code": code}
    self.body = {"error": error}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """What a body asks for: attempts at one question, and how to send them."""

  attempts: tuple[InferenceRequest, ...]
  stream: bool
  include_usage: bool
  ignored_messages: int

  @property
  def note(self) -> dict[str, Any]:
    """The response's field `coa`."""
    return {"seed": self.attempts[0].seed, "ignored_messages": self.ignored_messages}


def read_request(
  data: bytes, model: str, top_p: float, most: int, conversation: bool = False
) -> ChatRequest:
  """Reads a body.

  Args:
    data: JSON.
    model: the name of what is served.
    top_p: what is sampled with, whoever asks.
    most: the largest n.
    conversation: system messages and earlier turns are part of the question.

  Raises:
    RequestRefused: naming the field.
  """
  # --- Its fields, each for itself.
  try:
    body = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise RequestRefused(f"the body is not JSON: {e}") from None
  if not isinstance(body, dict):
    raise RequestRefused("the body must be a JSON object")
  body = _read_body(body, {**_NEUTRAL, "top_p": top_p})
  if body.model != model:
    message = f"there is no model {body.model!r}; this server has {model!r}"
    raise RequestRefused(message, "model", "model_not_found", status=404)
  question, ignored = _question(body.messages, conversation)
  # --- What fields say together.
  if body.n > most:
    raise RequestRefused(f"n must be between 1 and {most}", "n")
  if body.stream_options.model_fields_set and not body.stream:
    raise RequestRefused("stream_options needs stream", "stream_options")
  limit = body.max_tokens
  if limit is None:
    limit = body.max_completion_tokens
  elif body.max_completion_tokens not in (None, limit):
    raise RequestRefused("max_tokens and max_completion_tokens differ", "max_tokens")
  # --- The attempts differ in their numbers only.
  attempts = []
  for sample in range(body.n):
    attempts.append(
      InferenceRequest(question, body.temperature, body.seed, sample, limit)
    )
  include_usage = body.stream_options.include_usage
  return ChatRequest(tuple(attempts), body.stream, include_usage, ignored)


def _read_body(body: dict[str, Any], neutral: dict[str, Any]) -> _Body:
  """The fields that are read; null is as if left out.

  Raises:
    RequestRefused: naming a field that is wrong, or asks for what is not served.
  """
  # --- Fields that may ask for nothing only; the rest is the body's.
  fields = {}
  for name, value in body.items():
    if value is None:
      continue
    if name not in neutral:
      fields[name] = value
      continue
    only = neutral[name]
    # True equals 1 in Python; a client that says one for the other means neither.
    if value != only or isinstance(value, bool) != isinstance(only, bool):
      message = f"{name} is not supported; leave it out, or send {json.dumps(only)}"
      raise RequestRefused(message, name, "unsupported_parameter")
  # --- A field that nobody knows may be a misspelt one.
  try:
    return http_server.read_fields(_Body, fields)
  except http_server.BadField as e:
    if not e.is_unknown:
      raise RequestRefused(str(e), e.field) from None
    hint = nearest(e.field, (*_Body.model_fields, *neutral))
    message = f"unknown field {e.field!r:.80}{hint}"
    raise RequestRefused(message, e.field, "unknown_parameter") from None


def _question(messages: list[_Message], conversation: bool) -> tuple[str, int]:
  """What the model is asked, and how many messages it is not told of."""
  # --- The question is the last message.
  for i, message in enumerate(messages):
    if message.role in _SYSTEM and not conversation:
      text = (
        f"a {message.role} message is read by a server started with --conversation "
        "only; put all into the question"
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
    raise RequestRefused("the question must be a string that is not empty", where)
  if not conversation:
    return question, last
  # --- In a conversation all is read; who speaks stands before a turn of several.
  turns = [m for m in messages if m.role not in _SYSTEM]
  blocks = []
  for i, message in enumerate(messages):
    text = _text(messages, i)
    if message.role not in _SYSTEM and len(turns) > 1:
      text = conversation_text([(message.role, text)])
    blocks.append(text)
  return "\n\n".join(blocks), 0


def _text(messages: list[_Message], i: int) -> str:
  """The content of a message, whose parts must be text."""
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


class Choice:
  """One attempt on its way: what its pieces mean to an OpenAI client.

  Attributes:
    index: its place among the choices.
    reasoning: all that `delta` has put under `reasoning_content`.
    content: likewise `content`.
    trajectory: what it became; None until it is over.
  """

  def __init__(self, index: int):
    """Args: its place."""
    self.index = index
    self.reasoning = ""
    self.content = ""
    self._white = ""  # white space that may yet stand within the answer
    self.trajectory: Trajectory | None = None

  def delta(self, piece: TextDelta) -> dict[str, str]:
    """The piece as the delta of a stream; {} where there is nothing to send.

    White space around the answer is left out, so what is held back here either turns
    out to stand within the answer or is never sent.
    """
    # Tags and white space around the answer are the protocol's, not its content.
    if piece.role != ANSWER:
      self.reasoning += piece.text
      return {"reasoning_content": piece.text}
    if piece.is_tag:
      return {}
    text = piece.text.lstrip()
    if self.content:
      text = self._white + piece.text
    new = text.rstrip()
    self._white = text[len(new) :]
    self.content += new
    if not new:
      return {}
    return {"content": new}

  def end(self, trajectory: Trajectory | None) -> None:
    """Takes what came at the end.

    Raises:
      RequestRefused: the attempt was called off, or its sandbox is down.
    """
    if trajectory is None:
      raise RequestRefused("the server stops", None, "stopped", 503, "server_error")
    if trajectory.status == Status.INFRASTRUCTURE:
      text = "the sandbox is unavailable"
      raise RequestRefused(text, None, "infrastructure", 503, "server_error")
    self.trajectory = trajectory

  @property
  def ending(self) -> dict[str, Any]:
    """The fields of a choice that is over."""
    t = self.trajectory
    calls = []
    for call in t.calls:
      seconds = round(call.seconds, 3)
      calls.append({"name": call.name, "status": call.status, "seconds": seconds})
    seconds = round(t.usage.seconds, 3)
    return {
      "index": self.index,
      "finish_reason": "stop" if t.status == Status.ENDED else "length",
      "coa": {"status": t.status, "tool_calls": calls, "seconds": seconds},
    }

  @property
  def whole(self) -> dict[str, Any]:
    """The choice of a response that is not a stream."""
    reasoning = self.reasoning
    content = self.content
    t = self.trajectory
    # Unlike a stream it can take back: of several answers only the last is one.
    if t.status == Status.ENDED:
      content = written_answer(t.text) or ""
      before, opening, _ = t.text.rpartition(open_tag(ANSWER))
      if opening:
        reasoning = before
    message = {"role": "assistant", "content": content}
    return {**self.ending, "message": {**message, "reasoning_content": reasoning}}


def usage(choices: Iterable[Choice]) -> dict[str, Any]:
  """What a request cost; its prompt is counted once."""
  # All choices are attempts at one prompt.
  costs = [c.trajectory.usage for c in choices]
  prompt = costs[0].prompt
  completion = sum(u.generated for u in costs)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
    "observation_tokens": sum(u.observation for u in costs),
    "prompt_tokens_details": {"cached_tokens": 0},  # none is kept between requests
  }


def envelope(kind: str, model: str) -> dict[str, Any]:
  """The fields that all chunks of a response share; `kind` is its field `object`."""
  name = "chatcmpl-" + secrets.token_hex(12)
  return {"id": name, "object": kind, "created": int(time.time()), "model": model}

"""Completion requests in OpenAI's format."""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import pydantic

from coa_jax.protocol.tool_bodies import FunctionCall
from coa_jax.rollout.agents.types import Sampling
from tools_sandbox import http_server

MAX_BODY = 1 << 24  # bytes; a conversation may be long
# Accepted only with these values: the sampler has nothing like them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "logit_bias": ({},),
  "presence_penalty": (0,),
  "response_format": ({"type": "text"},),
  "tool_choice": ("auto", "none"),
}


class Refused(Exception):
  """A refused request; `status` is the HTTP status, `code` OpenAI's error code."""

  def __init__(self, message: str, status: int = 400, code: str | None = None):
    """Takes a one-line message."""
    super().__init__(message)
    self.status = status
    self.code = code


class _Function(pydantic.BaseModel):
  name: str
  arguments: str


class _ToolCall(pydantic.BaseModel):
  function: _Function
  id: str | None = None


class _Message(pydantic.BaseModel):
  """One message; other fields have no effect."""

  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: Any = None
  tool_calls: list[_ToolCall] | None = None
  tool_call_id: str | None = None


class _ToolSpec(pydantic.BaseModel):
  name: str
  description: str | None = None
  parameters: dict[str, Any] | None = None


class _Tool(pydantic.BaseModel):
  type: Literal["function"]
  function: _ToolSpec


class _StreamOptions(pydantic.BaseModel):
  include_usage: bool = False


class _Body(http_server.Body):
  """The common fields; the last ones have no effect on a reply."""

  model: str
  temperature: float | None = pydantic.Field(None, ge=0, le=2)
  top_p: float | None = pydantic.Field(None, gt=0, le=1)
  max_tokens: int | None = pydantic.Field(None, ge=1)
  stop: str | list[str] | None = None
  n: int | None = pydantic.Field(None, ge=1, le=64)
  seed: int | None = None
  stream: bool | None = None
  stream_options: _StreamOptions | None = None
  metadata: Any = None
  prompt_cache_key: Any = None
  reasoning_effort: Any = None
  safety_identifier: Any = None
  service_tier: Any = None
  store: Any = None
  user: Any = None


class _ChatBody(_Body):
  messages: list[_Message] = pydantic.Field(min_length=1)
  tools: list[_Tool] | None = None
  max_completion_tokens: int | None = pydantic.Field(None, ge=1)
  logprobs: bool | None = None
  top_logprobs: Literal[0] | None = None
  parallel_tool_calls: bool | None = None


class _TextBody(_Body):
  prompt: str | list[int]
  logprobs: Literal[0] | None = None
  echo: Literal[False] | None = None


_B = TypeVar("_B", bound=_Body)


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """A request for replies.

  Attributes:
    samplings: one per choice.
    stream, usage, logprobs: the form of the response; `usage` ends a stream.
    messages, tools: the conversation; none for a text completion.
    prompt: a text completion's text or ids.
  """

  samplings: list[Sampling]
  stream: bool
  usage: bool
  logprobs: bool
  messages: Sequence[dict[str, Any]] = ()
  tools: Sequence[dict[str, Any]] = ()
  prompt: str | list[int] = ""


def read_chat(data: bytes) -> CompletionRequest:
  """Reads a body of /v1/chat/completions.

  Raises:
    Refused: naming the field.
  """
  body = _read(data, _ChatBody)
  return CompletionRequest(
    samplings=_samplings(body, body.max_completion_tokens or body.max_tokens),
    stream=bool(body.stream),
    usage=bool(body.stream_options and body.stream_options.include_usage),
    logprobs=bool(body.logprobs),
    messages=[_message(m, n) for n, m in enumerate(_in_call_order(body.messages))],
    tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
  )


def read_text(data: bytes) -> CompletionRequest:
  """Reads a body of /v1/completions; its prompt is one text, or one list of ids.

  Raises:
    Refused: naming the field.
  """
  body = _read(data, _TextBody)
  return CompletionRequest(
    samplings=_samplings(body, body.max_tokens),
    stream=bool(body.stream),
    usage=bool(body.stream_options and body.stream_options.include_usage),
    logprobs=body.logprobs is not None,
    prompt=body.prompt,
  )


def _read(data: bytes, kind: type[_B]) -> _B:
  """Reads a body; the fields in `_NEUTRAL` must have their values."""
  try:
    value = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise Refused(f"the body is not JSON: {e}") from None
  if not isinstance(value, dict):
    raise Refused("the body must be a JSON object")
  for name, accepted in _NEUTRAL.items():
    given = value.pop(name, None)
    if given is not None and given not in accepted:
      texts = " or ".join(map(json.dumps, accepted))
      raise Refused(f"{name} is not supported; leave it out, or send {texts}")
  try:
    return http_server.read_fields(kind, value)
  except http_server.BadField as e:
    raise Refused(str(e)) from None


def _samplings(body: _Body, most: int | None) -> list[Sampling]:
  """Returns how each choice is sampled."""
  seed = secrets.randbits(31) if body.seed is None else body.seed
  stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
  samplings = []
  for n in range(body.n or 1):
    samplings.append(
      Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        most=most,
        stop=tuple(filter(None, stop)),
        seed=seed + n,
      )
    )
  return samplings


def _in_call_order(messages: Sequence[_Message]) -> list[_Message]:
  """Sorts tool messages by the calls they answer; unknown ids come last."""
  out: list[_Message] = []
  order: dict[str | None, int] = {}
  for is_result, part in itertools.groupby(messages, lambda m: m.role == "tool"):
    several = list(part)
    if is_result:
      several.sort(key=lambda m: order.get(m.tool_call_id, len(order)))
    order = {call.id: n for n, call in enumerate(several[-1].tool_calls or ())}
    out += several
  return out


def _message(message: _Message, n: int) -> dict[str, Any]:
  """Converts a message to text, and its calls' arguments to values."""
  content = message.content
  if isinstance(content, list):
    texts = [p.get("text") for p in content if isinstance(p, dict)]
    if len(texts) < len(content) or not all(isinstance(t, str) for t in texts):
      raise Refused(f"messages[{n}].content: every part must be text")
    content = "".join(texts)
  if content is not None and not isinstance(content, str):
    raise Refused(f"messages[{n}].content must be a string, or a list of text parts")
  out: dict[str, Any] = {"role": message.role, "content": content or ""}
  calls = []
  for k, call in enumerate(message.tool_calls or ()):
    try:
      arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
      arguments = None
    if not isinstance(arguments, dict):
      raise Refused(
        f"messages[{n}].tool_calls[{k}].function.arguments must be a JSON object"
      )
    calls.append(FunctionCall(call.function.name, arguments))
  if calls:
    out["calls"] = calls
    # Templates read OpenAI's form, with arguments as objects.
    out["tool_calls"] = [
      {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
      for c in calls
    ]
  return out

"""OpenAI's API for agents: chat completions of a session, by its key.

POST /v1/chat/completions and GET /v1/models[/NAME], on loopback. The header
`Authorization: Bearer KEY` names the trajectory: every OpenAI client sends its
`api_key` there. With `"stream": true` the reply is sent in one piece when it is
complete.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coa_jax.protocol.tool_bodies import FunctionCall
from coa_jax.rollout.agents.sessions import (
  Closed,
  NoRoom,
  Sampled,
  Sampling,
  Session,
)
from tools_sandbox import http_server

MAX_BODY = 1 << 24  # bytes; a conversation may be long
MODEL = "policy"
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


class _Message(pydantic.BaseModel):
  """One message; fields that are not read here, like ids, have no effect."""

  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: Any = None
  tool_calls: list[_ToolCall] | None = None


class _ToolSpec(pydantic.BaseModel):
  name: str
  description: str | None = None
  parameters: dict[str, Any] | None = None


class _Tool(pydantic.BaseModel):
  type: Literal["function"]
  function: _ToolSpec


class _Body(http_server.Body):
  """A request; the last fields have no effect on a reply."""

  messages: list[_Message] = pydantic.Field(min_length=1)
  model: str
  tools: list[_Tool] | None = None
  temperature: float | None = pydantic.Field(None, ge=0, le=2)
  top_p: float | None = pydantic.Field(None, gt=0, le=1)
  max_tokens: int | None = pydantic.Field(None, ge=1)
  max_completion_tokens: int | None = pydantic.Field(None, ge=1)
  stop: str | list[str] | None = None
  n: int | None = pydantic.Field(None, ge=1, le=64)
  seed: int | None = None
  stream: bool | None = None
  stream_options: Any = None
  logprobs: bool | None = None
  top_logprobs: Literal[0] | None = None
  parallel_tool_calls: bool | None = None
  metadata: Any = None
  prompt_cache_key: Any = None
  reasoning_effort: Any = None
  safety_identifier: Any = None
  service_tier: Any = None
  store: Any = None
  user: Any = None


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A request, as `Session.complete` reads it.

  Attributes:
    messages, tools: the conversation.
    samplings: one per choice.
    temperature, top_p: the request's own, or None.
    stream, logprobs: the form of the response.
  """

  messages: list[dict[str, Any]]
  tools: list[dict[str, Any]]
  samplings: list[Sampling]
  temperature: float | None
  top_p: float | None
  stream: bool
  logprobs: bool


def read_request(data: bytes) -> ChatRequest:
  """Reads a body of /v1/chat/completions.

  Raises:
    Refused: naming the field.
  """
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
    body = http_server.read_fields(_Body, value)
  except http_server.BadField as e:
    raise Refused(str(e)) from None
  stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
  samplings = []
  for n in range(body.n or 1):
    samplings.append(
      Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p,
        most=body.max_completion_tokens or body.max_tokens,
        stop=tuple(filter(None, stop)),
        seed=(body.seed or 0) + n,
      )
    )
  return ChatRequest(
    messages=[_message(m, n) for n, m in enumerate(body.messages)],
    tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
    samplings=samplings,
    temperature=body.temperature,
    top_p=body.top_p,
    stream=bool(body.stream),
    logprobs=bool(body.logprobs),
  )


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


class AgentServer:
  """Serves sessions over HTTP on loopback, in its own thread."""

  def __init__(
    self, find: Callable[[str], Session | None], raw: Callable[[list[int]], bytes]
  ):
    """Listens at once, at a free port.

    Args:
      find: a request's key -> its session; None refuses the request.
      raw: decodes tokens to bytes.
    """
    sock = http_server.bind("127.0.0.1", 0)
    self.url = http_server.listen(sock, "127.0.0.1") + "/v1"
    app = make_app(find, raw, list(http_server.LOOPBACK))
    self._server = http_server.Server(app, grace_s=0)
    self._thread = threading.Thread(
      target=self._server.run, args=([sock],), name="agents", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Ends the server and its open requests."""
    self._server.should_exit = True
    self._thread.join()


def make_app(
  find: Callable[[str], Session | None],
  raw: Callable[[list[int]], bytes],
  hosts: list[str],
  name: str = MODEL,
) -> Starlette:
  """Makes the application.

  Args:
    find: a request's key -> its session; None refuses the request.
    raw: decodes tokens to bytes.
    hosts: accepted values of the header Host.
    name: the model's name.
  """
  model = {"id": name, "object": "model", "created": 0, "owned_by": "coa-jax"}

  async def chat(request: Request) -> Response:
    key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    session = find(key)
    if session is None:
      raise Refused("the API key names no running trajectory", 401, "invalid_api_key")
    parsed = read_request(await http_server.read_body(request, MAX_BODY))
    sampled = await _complete(session, parsed)
    made = [_choice(n, s, parsed.logprobs, raw) for n, s in enumerate(sampled)]
    completion = sum(len(s.ids) for s in sampled)
    usage = {
      "prompt_tokens": sampled[0].prompt,
      "completion_tokens": completion,
      "total_tokens": sampled[0].prompt + completion,
    }
    head = {
      "id": f"chatcmpl-{secrets.token_hex(12)}",
      "created": int(time.time()),
      "model": name,
    }
    if parsed.stream:
      return StreamingResponse(
        _events(head, made, usage), media_type="text/event-stream"
      )
    return JSONResponse(
      {"object": "chat.completion", **head, "choices": made, "usage": usage}
    )

  async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [model]})

  async def one_model(request: Request) -> Response:
    asked = request.path_params["model"]
    if asked != name:
      raise Refused(f"there is no model {asked!r}; this server has {name!r}", 404)
    return JSONResponse(model)

  async def refused(request: Request, e: Refused) -> Response:
    kind = "server_error" if e.status >= 500 else "invalid_request_error"
    error = {"message": str(e), "type": kind, "param": None, "code": e.code}
    return JSONResponse({"error": error}, e.status)

  async def http_error(request: Request, e: HTTPException) -> Response:
    return await refused(request, Refused(e.detail, e.status_code))

  return Starlette(
    routes=[
      Route("/v1/chat/completions", chat, methods=["POST"]),
      Route("/v1/models", models),
      Route("/v1/models/{model:path}", one_model),
    ],
    middleware=[http_server.check_host(hosts)],
    exception_handlers={Refused: refused, HTTPException: http_error},
  )


async def _complete(session: Session, parsed: ChatRequest) -> list[Sampled]:
  """Samples a request's replies."""

  def submit() -> list[concurrent.futures.Future[Sampled]]:
    return [
      session.complete(parsed.messages, parsed.tools, each) for each in parsed.samplings
    ]

  try:
    # Rendering a template may take long: not in the event loop.
    futures = await asyncio.to_thread(submit)
    return await asyncio.gather(*map(asyncio.wrap_future, futures))
  except NoRoom as e:
    raise Refused(str(e), 400, "context_length_exceeded") from None
  except Closed as e:
    raise Refused(str(e), 503) from None
  except ValueError as e:
    raise Refused(str(e)) from None
  except Exception as e:  # the engine failed
    raise Refused(f"{type(e).__name__}: {e}", 503) from None


def _choice(
  index: int, sampled: Sampled, logprobs: bool, raw: Callable[[list[int]], bytes]
) -> dict[str, Any]:
  """Returns a choice of a response."""
  reply = sampled.reply
  message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
  if reply.reasoning:
    message["reasoning_content"] = reply.reasoning
  reason = "stop" if sampled.is_whole else "length"
  if reply.calls:
    reason = "tool_calls"
    message["tool_calls"] = [
      {
        "id": f"call_{secrets.token_hex(8)}",
        "type": "function",
        "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))},
      }
      for c in reply.calls
    ]
  out = {"index": index, "message": message, "finish_reason": reason, "logprobs": None}
  if logprobs:
    out["logprobs"] = {"content": _log_probs(sampled, raw), "refusal": None}
  return out


def _log_probs(
  sampled: Sampled, raw: Callable[[list[int]], bytes]
) -> list[dict[str, Any]]:
  """Returns every sampled token's log-prob, thoughts and tags included."""
  out = []
  for i, logp in zip(sampled.ids, sampled.logps, strict=True):
    text = raw([i])
    out.append(
      {
        "token": text.decode("utf-8", "replace"),
        "bytes": list(text),
        "logprob": logp,
        "top_logprobs": [],
      }
    )
  return out


async def _events(
  head: dict[str, Any], choices: Sequence[dict[str, Any]], usage: dict[str, int]
) -> AsyncIterator[str]:
  """Yields a response as server-sent events, each choice in one piece."""
  shared = {"object": "chat.completion.chunk", **head}
  for choice in choices:
    delta = dict(choice["message"])
    if "tool_calls" in delta:
      calls = enumerate(delta["tool_calls"])
      delta["tool_calls"] = [{"index": n, **call} for n, call in calls]
    one = {**choice, "delta": delta}
    del one["message"]
    yield f"data: {json.dumps({**shared, 'choices': [one]})}\n\n"
  yield f"data: {json.dumps({**shared, 'choices': [], 'usage': usage})}\n\n"
  yield "data: [DONE]\n\n"

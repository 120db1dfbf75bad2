"""An OpenAI-compatible endpoint as an agent's model, for evaluation.

A relay on loopback sends an agent's requests on, at the attempt's temperature, and
records them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coa_jax.protocol.trajectory import (
  Author,
  Segment,
  Status,
  ToolCall,
  Trajectory,
)
from coa_jax.rollout.agents import responses
from coa_jax.rollout.agents.config import EndpointConfig
from coa_jax.rollout.agents.requests import MAX_BODY, Refused
from coa_jax.rollout.types import Attempt
from tools_sandbox import http_server
from tools_sandbox.http_client import (
  BadReply,
  NoReply,
  Service,
  check_url,
  read_json,
  read_key,
)

_Message = Mapping[str, Any]


# No other request would be answered: the key is refused, or there is no such model.
_FINAL = (401, 404)
_log = logging.getLogger(__name__)


class EndpointRun:
  """One attempt by an agent on an endpoint; its trajectory has texts and no ids.

  Attributes:
    refusal: why the endpoint answers no request; "" while it does.
  """

  def __init__(self, attempt: Attempt):
    """Prepares the attempt."""
    self.task = attempt.task
    self.sequence = attempt.sequence
    self.key = secrets.token_hex(16)
    self.settings = {
      "temperature": attempt.temperature,
      "seed": (attempt.seed + attempt.sequence) % 2**31,
    }
    self.trajectory = Trajectory(attempt.task.id, sample=attempt.sample)
    self.trajectory.meta |= attempt.task.trajectory_meta
    self.trajectory.status = Status.ENDED
    self.refusal = ""
    self._seen: list[str] = []  # the last request's messages, and its reply
    self._tokens = 0  # of these
    self._open: list[ToolCall] = []  # the last reply's calls
    self._lock = threading.Lock()
    self._closed = False
    self._began = time.monotonic()

  def record(self, messages: Sequence[_Message], reply: Mapping[str, Any]) -> None:
    """Appends a request's new messages, and its reply.

    Args:
      messages: the request's.
      reply: the response; `usage` counts its tokens.
    """
    t = self.trajectory
    message = reply["choices"][0]["message"]
    usage = reply.get("usage") or {}
    if not usage:
      _warn_unmetered()
    prompt = usage.get("prompt_tokens") or 0
    completion = usage.get("completion_tokens") or 0
    texts = [_text(m) for m in messages]
    with self._lock:
      if self._closed:
        return
      # --- The new messages: results of calls, or another context.
      known = len(self._seen)
      if known and texts[:known] == self._seen:
        results = [m for m in messages[known:] if m.get("role") == "tool"]
        for call, result in zip(self._open, results, strict=False):
          call.result = _content(result)
        t.segments.append(Segment(Author.TOOL, "", "\n\n".join(texts[known:])))
        t.usage.observation += max(0, prompt - self._tokens)
      else:
        t.segments.append(Segment(Author.PROMPT, "question", "\n\n".join(texts)))
        t.usage.prompt += prompt
        t.usage.model_calls += 1  # counts contexts, as for our own model
      # --- The reply.
      t.segments.append(Segment(Author.POLICY, "", _text(message)))
      t.usage.generated += completion
      self._open = [ToolCall(*call) for call in _calls(message)]
      t.calls += self._open
      t.usage.tool_calls = len(t.calls)
      t.usage.tool_turns += bool(self._open)
      self._seen = [*texts, _text(message)]
      self._tokens = prompt + completion

  def close(self) -> Trajectory:
    """Ends the record, and returns the trajectory."""
    with self._lock:
      self._closed = True
    self.trajectory.usage.seconds = time.monotonic() - self._began
    return self.trajectory


@functools.cache
def _warn_unmetered() -> None:
  _log.warning("the endpoint reports no usage: its tokens are counted as 0")


def _content(message: _Message) -> str:
  content = message.get("content")
  if content is None or isinstance(content, str):
    return content or ""
  return json.dumps(content)


def _calls(message: _Message) -> list[tuple[str, str]]:
  calls = (call["function"] for call in message.get("tool_calls") or ())
  return [(function["name"], function["arguments"]) for function in calls]


def _text(message: _Message) -> str:
  """Returns a message's text; a call is its name and its arguments."""
  calls = [f"<tool_call>{name} {args}</tool_call>" for name, args in _calls(message)]
  return "\n".join(filter(None, [_content(message).strip(), *calls]))


def _read_completion(data: bytes) -> dict[str, Any]:
  """Reads a chat completion with one choice."""
  # JSON can hold a lone surrogate, which is no character.
  text = json.dumps(read_json(data), ensure_ascii=False)
  reply = json.loads(text.encode("utf-8", "replace"))
  try:
    _text(reply["choices"][0]["message"])
  except (KeyError, IndexError, TypeError, AttributeError):
    raise BadReply("not a chat completion") from None
  return reply


def make_relay(
  find: Callable[[Request], EndpointRun], config: EndpointConfig, seconds: float
) -> Starlette:
  """Makes the application that sends requests on.

  Args:
    find: returns a request's attempt, or raises `Refused`.
    config: the endpoint.
    seconds: maximum time of one request, retries included.

  Raises:
    ValueError: the URL or the key file can not be used.
  """
  check_url("agent.endpoint.base_url", config.base_url)
  key = read_key(config.key_file, "agent.endpoint.key_file")
  service = Service(
    "the endpoint",
    config.base_url.rstrip("/") + "/chat/completions",
    {"Authorization": f"Bearer {key}"} if key else {},
    use_proxies=True,
  )

  def send(body: Any) -> concurrent.futures.Future[dict[str, Any]]:
    out: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()

    def work() -> None:
      try:
        out.set_result(service.send(body, seconds, _read_completion)[0])
      except BaseException as e:
        out.set_exception(e)

    # A daemon, so that an interrupted program does not wait for a reply.
    threading.Thread(target=work, name="endpoint", daemon=True).start()
    return out

  async def chat(request: Request) -> Response:
    run = find(request)
    body = await http_server.read_object(request, MAX_BODY)
    stream = body.pop("stream", False)
    options = body.pop("stream_options", None)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
      raise Refused("messages must be a list of objects")
    if body.get("n") not in (None, 1):
      raise Refused("n: an attempt takes one reply at a time")
    body |= {"model": config.model, **run.settings}
    try:
      reply = await asyncio.wrap_future(send(body))
    except asyncio.CancelledError:  # the server ends
      raise Refused("the run ends", 503) from None
    except NoReply as e:
      message = f"the endpoint: {e} {e.text[:500]}"
      if e.refusal in _FINAL:
        run.refusal = message
      raise Refused(message, e.refusal or 502) from None
    run.record(messages, reply)
    if stream:
      reply = {"usage": None, **reply, "object": responses.CHAT}
      usage = isinstance(options, dict) and bool(options.get("include_usage"))
      events = responses.events(reply, usage)
      return StreamingResponse(events, media_type="text/event-stream")
    return JSONResponse(reply)

  return Starlette(
    routes=[Route("/v1/chat/completions", chat, methods=["POST"])],
    middleware=[http_server.check_host(list(http_server.LOOPBACK))],
    exception_handlers=responses.ERRORS,
  )

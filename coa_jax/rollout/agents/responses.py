"""Responses to completion requests, in OpenAI's format."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coa_jax.rollout.agents.requests import Refused
from coa_jax.rollout.agents.types import Sampled

# Field `object` of a response.
CHAT = "chat.completion"
TEXT = "text_completion"


def body(
  kind: str,
  model: str,
  sampled: Sequence[Sampled],
  logprobs: bool,
  raw: Callable[[list[int]], bytes],
) -> dict[str, Any]:
  """Returns a response.

  Args:
    kind: CHAT or TEXT.
    model: the model's name.
    sampled: one reply per choice.
    logprobs: whether the choices have log-probs.
    raw: decodes tokens to bytes.
  """
  choice = _choice if kind == CHAT else _text_choice
  completion = sum(len(s.ids) for s in sampled)
  return {
    "id": f"cmpl-{secrets.token_hex(12)}",
    "object": kind,
    "created": int(time.time()),
    "model": model,
    "choices": [choice(n, s, logprobs, raw) for n, s in enumerate(sampled)],
    "usage": {
      "prompt_tokens": sampled[0].prompt,
      "completion_tokens": completion,
      "total_tokens": sampled[0].prompt + completion,
    },
  }


def events(whole: dict[str, Any], usage: bool) -> Iterator[str]:
  """Yields a response as server-sent events, each choice in one piece.

  `usage` is the request's `stream_options.include_usage`.
  """
  shared = {k: v for k, v in whole.items() if k not in ("choices", "usage")}
  choices = whole["choices"]
  if whole["object"] == CHAT:
    shared["object"] = f"{CHAT}.chunk"
    choices = map(_as_delta, choices)
  for choice in choices:
    yield f"data: {json.dumps({**shared, 'choices': [choice]})}\n\n"
  if usage:
    last = {**shared, "choices": [], "usage": whole["usage"]}
    yield f"data: {json.dumps(last)}\n\n"
  yield "data: [DONE]\n\n"


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
  """Returns a chat choice with its message as a delta."""
  delta = dict(choice["message"])
  if "tool_calls" in delta:
    calls = enumerate(delta["tool_calls"])
    delta["tool_calls"] = [{"index": n, **call} for n, call in calls]
  return {**{k: v for k, v in choice.items() if k != "message"}, "delta": delta}


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


def _text_choice(
  index: int, sampled: Sampled, logprobs: bool, raw: Callable[[list[int]], bytes]
) -> dict[str, Any]:
  """Returns a choice of a text completion, with its ids."""
  out: dict[str, Any] = {
    "index": index,
    "text": sampled.text,
    "token_ids": sampled.ids,
    "finish_reason": "stop" if sampled.is_whole else "length",
    "logprobs": None,
  }
  if logprobs:
    tokens = [entry["token"] for entry in _log_probs(sampled, raw)]
    logps = sampled.logps
    out["logprobs"] = {"tokens": tokens, "token_logprobs": logps, "top_logprobs": None}
  return out


async def _refused(request: Request, e: Any) -> Response:
  kind = "server_error" if e.status >= 500 else "invalid_request_error"
  kind = "rate_limit_error" if e.status == 429 else kind
  error = {"message": str(e), "type": kind, "param": None, "code": e.code}
  return JSONResponse({"error": error}, e.status)


async def _http_error(request: Request, e: Any) -> Response:
  return await _refused(request, Refused(e.detail, e.status_code))


ERRORS: Any = {Refused: _refused, HTTPException: _http_error}  # Starlette's handlers

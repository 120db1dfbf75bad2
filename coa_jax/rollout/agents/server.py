"""OpenAI's API for agents: completions, recorded in sessions.

POST /v1/chat/completions and /v1/completions, GET /v1/models[/NAME], and POST
/v1/trajectories/NAME to end a recorded trajectory. With `"stream": true` a reply is
sent in one piece when it is complete.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Sequence

import pydantic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.agents import responses
from coa_jax.rollout.agents.requests import (
  MAX_BODY,
  CompletionRequest,
  Refused,
  read_chat,
  read_text,
)
from coa_jax.rollout.agents.sessions import Closed, NoRoom, Session
from coa_jax.rollout.agents.types import Sampled
from tools_sandbox import http_server

MODEL = "policy"


class _End(http_server.Body):
  reward: float | None = pydantic.Field(None, allow_inf_nan=False)


class AgentServer:
  """Serves an application over HTTP on loopback, in its own thread."""

  def __init__(self, app: Starlette):
    """Listens at once, at a free port."""
    sock = http_server.bind("127.0.0.1", 0)
    self.url = http_server.listen(sock, "127.0.0.1") + "/v1"
    self._server = http_server.Server(app, grace_s=3)
    self._thread = threading.Thread(
      target=self._server.run, args=([sock],), name="agents", daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    """Ends the server and its open requests."""
    self._server.should_exit = True
    self._thread.join()


def make_app(
  find: Callable[[Request], Session],
  tokenizer: Tokenizer,
  hosts: Sequence[str] = http_server.LOOPBACK,
  name: str = MODEL,
  end: Callable[[str, float | None], Trajectory | None] = lambda name, reward: None,
  most: int | None = None,
) -> Starlette:
  """Makes the application. budget: its handlers.

  Args:
    find: returns a request's session, or raises `Refused`.
    tokenizer: the model's.
    hosts: accepted values of the header Host.
    name: the model's name.
    end: ends the trajectory of this name with a reward; None if there is no such
      trajectory.
    most: maximum replies sampled or waiting at once; None for no limit.
  """
  running = 0
  model = {"id": name, "object": "model", "created": 0, "owned_by": "coa-jax"}

  async def chat(request: Request) -> Response:
    parsed = read_chat(await http_server.read_body(request, MAX_BODY))
    return await answer(request, parsed, responses.CHAT)

  async def complete(request: Request) -> Response:
    parsed = read_text(await http_server.read_body(request, MAX_BODY))
    return await answer(request, parsed, responses.TEXT)

  async def answer(request: Request, parsed: CompletionRequest, kind: str) -> Response:
    nonlocal running
    session = find(request)
    replies = len(parsed.samplings)
    if most is not None and running + replies > most:
      message = f"{running} of {most} replies are sampled or wait; ask again later"
      raise Refused(message, 429, "queue_full")
    running += replies
    try:
      sampled = await _complete(session, parsed, tokenizer)
    finally:
      running -= replies
    body = responses.body(kind, name, sampled, parsed.logprobs, tokenizer.raw)
    if parsed.stream:
      events = responses.events(body, parsed.usage)
      return StreamingResponse(events, media_type="text/event-stream")
    return JSONResponse(body)

  async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [model]})

  async def one_model(request: Request) -> Response:
    asked = request.path_params["model"]
    if asked != name:
      raise Refused(f"there is no model {asked!r}; this server has {name!r}", 404)
    return JSONResponse(model)

  async def end_trajectory(request: Request) -> Response:
    asked = request.path_params["trajectory"]
    value = await http_server.read_object(request, MAX_BODY)
    try:
      reward = http_server.read_fields(_End, value).reward
    except http_server.BadField as e:
      raise Refused(str(e)) from None
    ended = end(asked, reward)
    if ended is None:
      raise Refused(f"there is no running trajectory {asked!r:.80}", 404)
    counts = {"contexts": len(ended.split()), "tokens": ended.num_tokens}
    return JSONResponse({"name": asked, "reward": reward, **counts})

  return Starlette(
    routes=[
      Route("/v1/chat/completions", chat, methods=["POST"]),
      Route("/v1/completions", complete, methods=["POST"]),
      Route("/v1/trajectories/{trajectory:path}", end_trajectory, methods=["POST"]),
      Route("/v1/models", models),
      Route("/v1/models/{model:path}", one_model),
    ],
    middleware=[http_server.check_host(list(hosts))],
    exception_handlers=responses.ERRORS,
  )


async def _complete(
  session: Session, parsed: CompletionRequest, tokenizer: Tokenizer
) -> list[Sampled]:
  """Samples a request's replies."""

  def submit() -> list[concurrent.futures.Future[Sampled]]:
    if parsed.messages:
      messages, tools = parsed.messages, parsed.tools
      return [session.complete(messages, tools, each) for each in parsed.samplings]
    # A text is a whole prompt, not a message: its control tokens count, as in vLLM.
    ids = parsed.prompt
    if isinstance(ids, str):
      ids = tokenizer.encode(ids)
    return [session.complete_ids(ids, each) for each in parsed.samplings]

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

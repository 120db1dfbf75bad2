r"""Serves a trained team behind OpenAI's API, for any OpenAI client.

  coa serve --config=configs/evaluate_world.py \
    [--config.init=MODEL_FOLDER] [--host=127.0.0.1] [--port=8000] [--conversation]

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
    -d '{"model": "coa", "messages": [{"role": "user", "content": "..."}]}'

Takes an evaluation's config, so that the evaluated system is served; the config's
tasks, rewards and attempts are not read, and vLLM (section vllm) is refused. Serves
POST /v1/chat/completions and /v1/completions (with "stream": true as server-sent
events), GET /v1/models, GET /v1/models/NAME and GET /health; GET / is a chat page, GET
/metrics is for Prometheus (`coa_jax/cli/serve_metrics.py`). See
`coa_jax/cli/completions.py` for requests' fields and `coa_jax/cli/choices.py` for
responses' fields.

With --agents, agents ask the model itself and run their own tools (docs/agents.md).

All requests share the `rollout.slots`; further requests wait, and beyond --max_waiting
get status 429. A request with a seed has the same answer regardless of other requests.
A disconnected client frees its slot after the rest of the running window and one more
token, or after its question's running tool. Ctrl-C or SIGTERM stop the server: requests
have GRACE_S seconds left. There is no key and no encryption: others who can reach
--host can run programs in the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import ml_collections
from absl import flags
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coa_jax.cli import choices, completions, launch, serve_agents
from coa_jax.cli.choices import Choice
from coa_jax.cli.completions import ChatRequest, RequestRefused
from coa_jax.cli.serve_metrics import CONTENT_TYPE, ServeMetrics
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.report.chat_page import chat_page
from coa_jax.rollout.streaming import (
  Busy,
  InferenceServer,
  Stopped,
  StreamingEpisode,
  TextDelta,
  TooLong,
)
from coa_jax.serve import ServeConfig, open_server
from tools_sandbox import http_server

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0 for any free one.")
_NAME = flags.DEFINE_string("name", "coa", "The model's name in requests.")
_CONVERSATION = flags.DEFINE_bool(
  "conversation",
  False,
  "Write system messages and earlier turns before the question, as plain text.",
)
_ALLOWED_HOSTS = flags.DEFINE_list(
  "allowed_hosts",
  [],
  "Accepted names of the server in the header Host, e.g. a proxy's, in addition to "
  "loopback's; '*' for any. By default any on a --host other than loopback.",
)
flags.register_validator(
  "allowed_hosts",
  lambda names: all(n == "*" or "*" not in n.removeprefix("*.") for n in names),
  "a name has a * as its first label or alone",
)
_MAX_WAITING = flags.DEFINE_integer(
  "max_waiting", 64, "Largest number of questions waiting for a slot.", lower_bound=1
)

GRACE_S = 3
MAX_BODY = 1 << 20


class Exchange:
  """One HTTP request's attempts; their events arrive in the event loop."""

  def __init__(
    self,
    server: InferenceServer,
    parsed: ChatRequest,
    metrics: ServeMetrics,
  ):
    """Submits all attempts; if one is refused, cancels all.

    Raises:
      RequestRefused: the question is too long, the queue full, or the server stopped.
    """
    self._server = server
    self._metrics = metrics
    self._began = time.monotonic()
    self._loop = asyncio.get_running_loop()
    # The engine's thread writes, the event loop reads; see `_on_event`.
    self._events: asyncio.Queue[tuple[int, TextDelta | Trajectory | None]]
    self._events = asyncio.Queue()
    self._episodes: list[StreamingEpisode] = []
    self._counted: set[int] = set()  # attempts counted as ended
    try:
      for index, request in enumerate(parsed.attempts):
        on_event = functools.partial(self._on_event, index)
        self._episodes.append(server.submit(request, on_event))
    except (ValueError, Busy, Stopped) as e:
      self.cancel()
      raise _refusal(e) from e
    raw = server.worker.tokenizer.raw if parsed.top is not None else bytes
    self.choices = [
      Choice(index, parsed.stop, parsed.top, raw)
      for index in range(len(parsed.attempts))
    ]

  def _on_event(self, index: int, event: TextDelta | Trajectory | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: no client is left
      self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

  def cancel(self) -> None:
    """Frees the slots as soon as possible; no effect after the end."""
    for index, episode in enumerate(self._episodes):
      self._server.cancel(episode)
      self._count_end(index, None)

  def _count_end(self, index: int, trajectory: Trajectory | None) -> None:
    if index not in self._counted:
      self._counted.add(index)
      self._metrics.ended(trajectory, time.monotonic() - self._began)

  async def deltas(self) -> AsyncIterator[tuple[Choice, dict[str, str]]]:
    """Yields `Choice.delta` of arriving text until all choices end.

    A choice's last delta comes from `Choice.end`.

    Raises:
      RequestRefused: an attempt failed without the model's fault.
    """
    silent = set(range(len(self.choices)))
    while any(c.trajectory is None for c in self.choices):
      index, event = await self._events.get()
      choice = self.choices[index]
      if isinstance(event, TextDelta):
        if index in silent:
          silent.remove(index)
          self._metrics.first_text(time.monotonic() - self._began)
        yield choice, choice.delta(event)
        if choice.is_cut:
          self._server.finish(self._episodes[index])
      else:
        self._count_end(index, event)
        yield choice, choice.end(event)


def _refusal(error: Exception) -> RequestRefused:
  if isinstance(error, Busy):
    return RequestRefused(str(error), None, "queue_full", 429, "rate_limit_error")
  if isinstance(error, Stopped):
    return RequestRefused(str(error), None, "stopped", 503, "server_error")
  if isinstance(error, TooLong):
    return RequestRefused(str(error), "messages", "context_length_exceeded")
  return RequestRefused(str(error), None, "unavailable", 503, "server_error")


class Json(JSONResponse):
  """A JSON response in ASCII, because UTF-8 cannot encode a lone surrogate."""

  def render(self, content: Any) -> bytes:
    """Returns the body. See `starlette.responses.Response`."""
    return json.dumps(content, allow_nan=False).encode("ascii")


class EventStream(StreamingResponse):
  """An exchange's server-sent events; the exchange ends with the response."""

  def __init__(self, exchange: Exchange, events: AsyncIterator[str]):
    """`events` are the exchange's, as text."""
    headers = {"cache-control": "no-cache"}
    super().__init__(events, media_type="text/event-stream", headers=headers)
    self._exchange = exchange

  async def __call__(self, *connection: Any) -> None:
    """Sends the response. See `starlette.responses.Response`."""
    try:
      await super().__call__(*connection)
    finally:
      self._exchange.cancel()


def make_app(
  server: InferenceServer,
  name: str,
  hosts: tuple[str, ...] = ("*",),
  conversation: bool = False,
) -> Starlette:
  """Makes the application. budget: its handlers.

  Args:
    server: the inference server.
    name: the model's name in requests.
    hosts: accepted values of the header Host, so that no web page can reach a server on
      loopback under its own domain.
    conversation: see `completions.read_request`.
  """
  metrics = ServeMetrics(server)
  page = chat_page(name, conversation)
  top_p = server.worker.engine.config.top_p

  # --- The routes.
  async def chat(request: Request) -> Response:
    data = await http_server.read_body(request, MAX_BODY)
    parsed = completions.read_request(
      data, name, top_p, server.max_waiting, conversation
    )
    return await answer(request, parsed)

  async def complete(request: Request) -> Response:
    data = await http_server.read_body(request, MAX_BODY)
    parsed = completions.read_text_request(data, name, top_p, server.max_waiting)
    return await answer(request, parsed)

  async def answer(request: Request, parsed: ChatRequest) -> Response:
    exchange = Exchange(server, parsed, metrics)
    if parsed.stream:
      return EventStream(exchange, _events(exchange, parsed, name))
    await _unless_gone(request, exchange)
    kind = "text_completion" if parsed.is_text else "chat.completion"
    made = exchange.choices
    return Json(
      {
        **choices.envelope(kind, name),
        "choices": [c.whole_text if parsed.is_text else c.whole for c in made],
        "usage": choices.usage(made, parsed.n),
        "coa": parsed.note,
      }
    )

  model = {"id": name, "object": "model", "created": 0, "owned_by": "coa-jax"}

  async def models(request: Request) -> Response:
    return Json({"object": "list", "data": [model]})

  async def one_model(request: Request) -> Response:
    asked = request.path_params["model"]
    if asked != name:
      raise completions.unknown_model(asked, name)
    return Json(model)

  async def health(request: Request) -> Response:
    running, waiting = server.counts
    status = "ok" if server.alive else "stopped"
    counts = {"status": status, "running": running, "waiting": waiting}
    return Json(counts, 200 if server.alive else 503)

  async def chat_home(request: Request) -> Response:
    return HTMLResponse(page, headers={"cache-control": "no-cache"})

  async def numbers(request: Request) -> Response:
    return Response(metrics.text(), media_type=CONTENT_TYPE)

  # --- Errors; all have OpenAI's body, also for a wrong path or method.
  async def refused(request: Request, e: RequestRefused) -> Response:
    metrics.refused(e.status)
    headers = None
    if e.status == 429:
      headers = {"retry-after": "1"}
    return Json(e.body, e.status, headers)

  async def http_error(request: Request, e: HTTPException) -> Response:
    reply = await refused(request, RequestRefused(e.detail, status=e.status_code))
    reply.headers.update(e.headers or {})
    return reply

  return Starlette(
    routes=[
      Route("/v1/chat/completions", chat, methods=["POST"]),
      Route("/v1/completions", complete, methods=["POST"]),
      Route("/v1/models", models),
      Route("/v1/models/{model:path}", one_model),
      Route("/health", health),
      Route("/metrics", numbers),
      Route("/", chat_home),
    ],
    middleware=[http_server.check_host(list(hosts))],
    exception_handlers={RequestRefused: refused, HTTPException: http_error},
  )


async def _unless_gone(request: Request, exchange: Exchange) -> None:
  """Plays an exchange to its end; cancels it when the client disconnects."""

  async def play() -> None:
    async for _ in exchange.deltas():
      pass

  async def gone() -> None:
    while (await request.receive())["type"] != "http.disconnect":
      pass

  playing = asyncio.create_task(play())
  leaving = asyncio.create_task(gone())
  try:
    await asyncio.wait((playing, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not playing.done():
      raise RequestRefused("the client is gone", status=499)
    playing.result()  # raises its exception
  finally:
    playing.cancel()
    leaving.cancel()
    exchange.cancel()


async def _events(
  exchange: Exchange, parsed: ChatRequest, name: str
) -> AsyncIterator[str]:
  kind = "text_completion" if parsed.is_text else "chat.completion.chunk"
  shared = choices.envelope(kind, name)
  if parsed.include_usage:
    shared["usage"] = None

  def chunk(*parts: dict[str, Any], **more: Any) -> str:
    return _event({**shared, "choices": parts, **more})

  # --- Every chat choice begins with its role; then text as it arrives.
  note = {"coa": parsed.note}
  for choice in exchange.choices:
    if not parsed.is_text:
      first = {"role": "assistant", "content": ""}
      one = {"index": choice.index, "delta": first, "finish_reason": None}
      yield chunk(one, **note)
  try:
    async for choice, delta in exchange.deltas():
      fields = {"index": choice.index, "finish_reason": None}
      if choice.trajectory:
        fields |= choice.ending
        fields |= choice.text_log_probs if parsed.is_text else choice.log_probs
      if parsed.is_text:
        # Reasoning is not part of the text.
        if choice.trajectory or "content" in delta:
          yield chunk({"logprobs": None, **fields, "text": delta.get("content", "")})
      elif choice.trajectory or delta:
        yield chunk({**fields, "delta": delta})
  except RequestRefused as e:  # too late for an error status
    yield _event(e.body)
    return
  # --- The end.
  if parsed.include_usage:
    yield chunk(usage=choices.usage(exchange.choices, parsed.n))
  yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
  return f"data: {json.dumps(value)}\n\n"


def main(config: ml_collections.ConfigDict) -> None:
  """Serves until stopped."""
  # At any point, the exit ends threads and processes.
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(0))
  host, name, waiting = _HOST.value, _NAME.value, _MAX_WAITING.value
  if serve_agents.FORMAT.value:
    allowed = _ALLOWED_HOSTS.value
    serve_agents.serve(config, host, _PORT.value, name, allowed, waiting)
    return
  # Bind the port first: a used port is reported before loading a model.
  with (
    contextlib.suppress(KeyboardInterrupt),
    http_server.bind(host, _PORT.value) as sock,
    open_server(config, waiting) as server,
  ):
    risk = "ask the team and have it run programs in its sandbox"
    hosts = http_server.open_hosts(host, _ALLOWED_HOSTS.value, risk)
    app = make_app(server, name, tuple(hosts), _CONVERSATION.value)
    http = http_server.Server(app, GRACE_S)
    # Nobody can connect before the sampler is compiled.
    print("compiling the sampler ...", file=sys.stderr, flush=True)
    server.warm_up()
    url = http_server.listen(sock, host)
    print(
      f"serving {config.init} as {name!r} at {url}/v1, a chat page at {url}/ "
      "(Ctrl-C ends it)",
      flush=True,
    )
    http.run(sockets=[sock])


def command() -> None:
  """Runs the command line."""
  launch.start(main, ServeConfig)

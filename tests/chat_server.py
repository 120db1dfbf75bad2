"""A mock OpenAI-compatible server on loopback: a backend's replies, or faults."""

from __future__ import annotations

from http_server import NEVER, Request, Server

from coa_jax.data.teacher import synthesis, violations
from coa_jax.data.teacher.backend import Message, ModelBackend
from coa_jax.data.teacher.llm import TeacherChatConfig
from coa_jax.data.teacher.prompts import PROMPTS

# Tests cause many faults; a second's wait after each would be slow.
TeacherChatConfig.backoff_s = 0.001


class ChatServer(Server):
  """A server with faults; see `Server`.

  Attributes:
    faults: consumed in order, one per request: a status code; "garbage", "not a
      completion", "cut", "slow" (silence), "drip" (endless single bytes); a dict, sent
      as the body; "ok", a normal answer; any other text is the model's reply.
    headers: sent with an error status; `error` is its body.
  """

  keep_alive = True

  def __init__(self, backend: ModelBackend | None = None):
    super().__init__()
    self.backend = backend
    self.faults: list[int | str | dict] = []
    self.headers: dict[str, str] = {}
    self.error = "told to fail"
    self.url += "/v1"

  def config(self, **changes) -> TeacherChatConfig:
    """A chat config for this server."""
    fields = dict(base_url=self.url, model="scripted", timeout_s=120.0)
    return TeacherChatConfig(**{**fields, **changes})

  def answer(self, body: dict) -> str:
    """The backend's reply."""
    messages = [Message(**m) for m in body["messages"]]
    prompts = PROMPTS | synthesis.PROMPTS | violations.PROMPTS
    agent = next(a for a, p in prompts.items() if messages[0].content.startswith(p))
    return self.backend(agent, messages).text if self.backend else "hello"

  def respond(self, request: Request) -> None:
    with self.lock:
      fault = self.faults.pop(0) if self.faults else "ok"
    if fault == "slow":
      self.stopped.wait(NEVER)
      fault = "ok"
    if fault == "cut":
      request.cut()
    elif fault == "drip":
      request.close_connection = True
      request.raw(Content_Length="99999")
      request.drip(b" ", every=0.02)
    elif isinstance(fault, dict):
      request.send_json(fault)
    elif isinstance(fault, int):
      request.send(self.error.encode(), status=fault, **self.headers)
    elif fault == "garbage":
      request.send(b"<html>it works!</html>")
    elif fault == "not a completion":
      request.send_json({"choices": []})
    elif request.path != "/v1/chat/completions":
      request.send(b"no such path", status=404)
    else:
      content = self.answer(request.json) if fault == "ok" else fault
      details = {"cached_tokens": 64}
      usage = {"prompt_tokens": 100, "completion_tokens": 7}
      request.send_json(
        {
          "choices": [{"message": {"role": "assistant", "content": content}}],
          "usage": {**usage, "prompt_tokens_details": details},
        }
      )

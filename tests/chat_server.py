"""An OpenAI-compatible server on loopback, backed by a brain, that can misbehave."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

from coa_jax.teacher import synthesis, violations
from coa_jax.teacher.llm import Brain, Message, TeacherChatConfig
from coa_jax.teacher.prompts import PROMPTS


class ChatServer:
  """What came in, and what to do next.

  Attributes:
    faults: taken one by one for each request before it is answered: a status code;
      "garbage", "not a completion", "cut", "slow" (nothing at all), "drip" (a byte at
      a time, without end); a dict, which is sent as the body; "ok" answers at once.
    requests: (headers, body) of every request.
    clients: connections that are open, or of which a request is still to be read.
  """

  def __init__(self, brain: Brain | None):
    self.brain = brain
    self.faults: list[int | str | dict] = []
    self.headers: dict[str, str] = {}  # sent with an error status
    self.told = "told to fail"  # likewise, as the body
    self.requests: list[tuple[dict[str, str], dict]] = []
    self.url = ""
    self.clients = 0

  def config(self, **changes) -> TeacherChatConfig:
    """A config that asks this server and does not wait long."""
    fields = dict(base_url=self.url, model="scripted", backoff_s=0.001, timeout_s=120.0)
    return TeacherChatConfig(**{**fields, **changes})

  def answer(self, body: dict) -> dict:
    """A completion by the brain."""
    messages = [Message(**m) for m in body["messages"]]
    prompts = PROMPTS | synthesis.PROMPTS | violations.PROMPTS
    agent = next(a for a, p in prompts.items() if messages[0].content.startswith(p))
    reply = self.brain(agent, messages).text if self.brain else "hello"
    return {
      "choices": [{"message": {"role": "assistant", "content": reply}}],
      "usage": {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 64},
      },
    }


@contextlib.contextmanager
def serve(brain: Brain | None = None) -> Iterator[ChatServer]:
  """Runs a server for the length of a `with` block."""
  state = ChatServer(brain)

  class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every reply waits for a delayed ACK

    def handle(self):
      with lock:
        state.clients += 1
      try:
        with contextlib.suppress(ConnectionError):
          super().handle()
      finally:
        with lock:
          state.clients -= 1

    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      state.requests.append((dict(self.headers), body))
      fault = state.faults.pop(0) if state.faults else "ok"
      if fault == "cut":
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
        self.close_connection = True
        return
      if fault == "slow":
        stop.wait(600)
      if fault == "drip":
        self.drip()
      elif isinstance(fault, dict):
        self.send(200, json.dumps(fault))
      elif isinstance(fault, int):
        self.send(fault, state.told, state.headers)
      elif fault == "garbage":
        self.send(200, "<html>it works!</html>")
      elif fault == "not a completion":
        self.send(200, json.dumps({"choices": []}))
      elif self.path != "/v1/chat/completions":
        self.send(404, "no such path")
      else:
        self.send(200, json.dumps(state.answer(body)))

    def send(self, status: int, text: str, headers: dict[str, str] | None = None):
      data = text.encode()
      self.send_response(status)
      for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        self.send_header(name, value)
      self.end_headers()
      with contextlib.suppress(OSError):
        self.wfile.write(data)

    def drip(self):
      self.close_connection = True
      with contextlib.suppress(OSError):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        while not stop.wait(0.02):
          self.wfile.write(b" ")

    def log_message(self, *unused):
      pass

  stop, lock = threading.Event(), threading.Lock()
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.daemon_threads = True
  state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
  thread = threading.Thread(target=server.serve_forever, args=(0.02,))
  thread.start()
  try:
    yield state
  finally:
    stop.set()
    server.shutdown()
    server.server_close()
    thread.join()

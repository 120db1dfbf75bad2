"""The LLM client, against a real server that misbehaves."""

from __future__ import annotations

import email.utils
import json
import time

import pytest
from chat_server import ChatServer

from coa_jax.data.teacher.backend import (
  InfrastructureError,
  Message,
  RefusedError,
  Unsolvable,
)
from coa_jax.data.teacher.llm import ChatBackend, TeacherChatConfig, read_completion
from coa_jax.data.teacher.prompts import PROMPTS

DEEP = "[" * 100_000
ASK = [Message("system", PROMPTS["planner"]), Message("user", "Question: who?")]


def encode(text: str) -> list[int]:
  return list(text.encode())


def test_the_request_and_the_reply():
  with (
    ChatServer() as server,
    ChatBackend(server.config(max_tokens=9), "secret") as backend,
  ):
    reply = backend("planner", ASK)
  (request,) = server.requests
  assert request.headers["Authorization"] == "Bearer secret"
  assert request.json == {
    "model": "scripted",
    "messages": [{"role": m.role, "content": m.content} for m in ASK],
    "temperature": 0.7,
    "max_tokens": 9,
  }
  assert (reply.text, reply.retries, reply.reported) == ("hello", 0, (100, 64, 7))
  assert reply.seconds > 0


def test_the_key_may_lie_in_a_file_and_none_is_needed(tmp_path):
  (tmp_path / "key").write_text("sesame\n")
  with ChatServer() as server:
    config = server.config(key_file=str(tmp_path / "key"))
    with ChatBackend(config, "of another endpoint") as backend:
      backend("planner", ASK)
    with ChatBackend(server.config()) as backend:  # without a key
      backend("planner", ASK)
  first, second = server.requests
  assert first.headers["Authorization"] == "Bearer sesame"
  assert "Authorization" not in second.headers


def test_loopback_is_no_proxys_business(monkeypatch):
  for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
    monkeypatch.setenv(name, "http://127.0.0.1:1")
  with ChatServer() as server, ChatBackend(server.config(retries=0)) as backend:
    assert backend("planner", ASK).text == "hello"


@pytest.mark.parametrize(
  "fault", [408, 429, 500, 503, "garbage", "not a completion", "cut"]
)
def test_passing_faults_are_retried(fault):
  with ChatServer() as server, ChatBackend(server.config()) as backend:
    server.faults = [fault, fault]
    reply = backend("planner", ASK)
  assert (reply.text, reply.retries) == ("hello", 2)


def test_a_reply_that_drips_is_retried():
  with ChatServer() as server, ChatBackend(server.config(timeout_s=1.0)) as backend:
    server.faults = ["drip"]
    reply = backend("planner", ASK)
  assert reply.text == "hello" and reply.retries >= 1
  assert set(reply.faults) == {"no reply within 1 s"}


def test_tokens_of_unusable_replies_are_counted():
  empty = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 3}}
  with ChatServer() as server, ChatBackend(server.config()) as backend:
    server.faults = [empty, {"error": "overloaded"}, empty]
    reply = backend("planner", ASK)
  assert (reply.text, reply.retries, len(reply.faults)) == ("hello", 3, 3)
  assert reply.reported == (180, 64, 13)


def completion(message: dict, **changes) -> str:
  choice = {"message": {"role": "assistant", **message}, "finish_reason": "stop"}
  return json.dumps({"model": "m-2026", "choices": [{**choice, **changes}]})


def counted(tokens: str) -> str:
  """A completion that reports this number of prompt tokens."""
  return (
    completion({"content": "said"})[:-1] + f', "usage": {{"prompt_tokens": {tokens}}}}}'
  )


@pytest.mark.parametrize(
  ("body", "text"),
  [
    # The reasoning is removed from a reply.
    (completion({"content": "<think>\nhm, NEXT\n</think>\n\nNEXT: x"}), "NEXT: x"),
    (completion({"content": "<think>never came to an end"}), ""),
    (completion({"content": "it began before\n</think>\n\nNEXT: x"}), "NEXT: x"),
    (
      completion({"content": "plain <think> in it</think>"}),
      "plain <think> in it</think>",
    ),
    # Invalid token counts.
    (counted("1e999"), "said"),
    (counted("1" + "0" * 400), "said"),
    (counted('null, "completion_tokens": -1, "prompt_tokens_details": null'), "said"),
  ],
  ids=lambda value: value[:40],
)
def test_the_text_of_a_completion(body: str, text: str):
  reply = read_completion(body)
  assert reply.text == text and reply.reported == ()


def test_the_model_and_a_cut_reply_are_known():
  whole = read_completion(completion({"content": "x"}))
  assert (whole.model, whole.cut) == ("m-2026", False)
  assert read_completion(completion({"content": "x"}, finish_reason="length")).cut


def test_prices():
  config = TeacherChatConfig(base_url="http://x", model="m", prices=(2.0, 0.5, 8.0))
  assert config.usd(3_000_000, 1_000_000, 500_000) == 4.0 + 0.5 + 4.0
  assert TeacherChatConfig(base_url="http://x", model="m").usd(1, 0, 1) is None
  with pytest.raises(ValueError, match="prices"):
    TeacherChatConfig(base_url="http://x", model="m", prices=(1.0,))


LONG = "This model's maximum context length is 256 tokens. However, you requested"


@pytest.mark.parametrize(
  ("fault", "text", "error", "words", "asked"),
  [
    (500, "", InfrastructureError, "in 3 attempts .*status 500.*chat.base_url", 3),
    ("garbage", "", InfrastructureError, "in 3 attempts .*body starts with '<html>", 3),
    ("cut", "", InfrastructureError, "in 3 attempts .*RemoteProtocolError", 3),
    (400, "no", InfrastructureError, "refuses the request .status 400.: 'no'", 1),
    (401, "no", RefusedError, "refuses the API key", 1),
    (404, "no", RefusedError, "has no model 'scripted'", 1),
    # Too long a conversation ends its run; it is not an outage.
    (400, LONG, Unsolvable, "context_too_long: This", 1),
    (400, '{"code": "context_length_exceeded"}', Unsolvable, "context_too_long", 1),
    (413, "the prompt is too long: 9000 tokens", Unsolvable, "context_too_long", 1),
    (422, "`inputs`: input is longer than the model's", Unsolvable, "too_long", 1),
  ],
)
def test_lasting_faults_say_what_came_and_refusals_are_not_retried(
  fault, text, error, words, asked
):
  with (
    ChatServer() as server,
    ChatBackend(server.config(retries=2), "sesame") as backend,
  ):
    server.faults, server.error = [fault] * 3, text
    with pytest.raises(error, match=words) as raised:
      backend("planner", ASK)
  assert len(server.requests) == asked and "sesame" not in str(raised.value)


def test_retry_after_is_honoured_up_to_the_longest_pause():
  with ChatServer() as server, ChatBackend(server.config()) as backend:
    server.faults, server.headers = [429], {"Retry-After": "nan"}
    assert backend("planner", ASK).retries == 1
    server.faults, server.headers = [429], {"Retry-After": "0.3"}
    start = time.monotonic()
    backend("planner", ASK)
    assert time.monotonic() - start >= 0.3
    later = email.utils.formatdate(time.time() + 3600, usegmt=True)
    server.faults, server.headers = [503], {"Retry-After": later}
    with pytest.raises(
      InfrastructureError, match=r"wait 3\d\d\d s.*longest pause is 120 s"
    ):
      backend("planner", ASK)


@pytest.mark.parametrize(
  "body",
  ["", "null", "[]", "{}", '{"choices": [{"message": {"content": 3}}]}', '"x"', DEEP],
)
def test_a_malformed_completion_is_refused(body):
  with pytest.raises(ValueError):
    read_completion(body)

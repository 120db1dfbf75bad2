"""The endpoint: real HTTP on loopback, with a model that knows its scripts by heart.

budget: all tests of one endpoint, which share one served model.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import queue
import re
import threading
import time

import httpx
import pytest
import toy
from toy import eventually

from coa_jax.cli import serve
from coa_jax.data.teacher.backend import InfrastructureError, Message
from coa_jax.data.teacher.llm import ChatBackend, TeacherChatConfig
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall
from coa_jax.rollout import sampler
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.streaming import InferenceRequest, InferenceServer, TextDelta
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.worker import RolloutWorker
from tools_sandbox import http_server

CONFIG = RolloutConfig(
  style="brief", slots=3, window=4, max_len=toy.MAX_LEN, prefill_rows=3
)
ONE_SLOT = RolloutConfig(
  style="brief", slots=1, window=1, max_len=toy.MAX_LEN, prefill_rows=1
)


class Service:
  """A served model and a client for it."""

  def __init__(self, url: str, server: InferenceServer):
    self.url, self.server = url, server
    self.client = httpx.Client(base_url=url, timeout=300)

  def post(self, question: str = "2 + 3", **fields) -> httpx.Response:
    return self.client.post("/v1/chat/completions", json=body(question, **fields))

  def ask(self, question: str, **fields) -> dict:
    response = self.post(question, **fields)
    assert response.status_code == 200, response.text
    return response.json()

  def stream(self, question: str, **fields) -> list[dict]:
    """A stream's events without [DONE]."""
    response = self.post(question, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(e.removeprefix("data: ")) for e in events]


def body(question: str, **fields) -> dict:
  messages = [{"role": "user", "content": question}]
  return {"model": "coa", "temperature": 0, "messages": messages, **fields}


@contextlib.contextmanager
def serving(worker: RolloutWorker, toolbox=None, grace_s=3.0, **options):
  """Serves the trained actor on a free port."""
  with (
    http_server.bind("127.0.0.1", 0) as sock,
    InferenceServer(
      worker, toy.actor().params, toolbox or toy.TableToolbox(), **options
    ) as server,
  ):
    app = serve.make_app(server, "coa", ("127.0.0.1",))
    http_side = http_server.Server(app, grace_s)
    thread = threading.Thread(target=http_side.run, kwargs={"sockets": [sock]})
    thread.start()
    service = Service(f"http://127.0.0.1:{sock.getsockname()[1]}", server)
    try:
      eventually(lambda: http_side.started)
      yield service
    finally:
      service.client.close()
      http_side.should_exit = True
      thread.join()


@pytest.fixture(scope="module")
def worker() -> RolloutWorker:
  return make_worker(toy.MODEL, toy.tokenizer(), CONFIG, toy.TOOLS, own_top_p=True)


@pytest.fixture(scope="module")
def one_slot() -> RolloutWorker:
  return make_worker(toy.MODEL, toy.tokenizer(), ONE_SLOT, toy.TOOLS)


@pytest.fixture(scope="module")
def service(worker):
  latency = toy.shuffled_latency(5)
  with serving(worker, toy.TableToolbox(latency=latency)) as service:
    yield service


def joined(events: list[dict], name: str, index: int = 0) -> str:
  choices = [c for e in events for c in e["choices"] if c["index"] == index]
  return "".join(c["delta"].get(name, "") for c in choices)


@pytest.mark.parametrize("question", toy.SCRIPTS)
def test_a_stream_and_a_whole_response_are_the_script(service, question: str):
  script = list(toy.SCRIPTS[question])
  script[1::2] = [roles.wrap(roles.OBSERVATION, text) for text in script[1::2]]
  reasoning, answer = "".join(script).removesuffix("</answer>").split("<answer> ")
  whole = service.ask(question)
  (choice,) = whole["choices"]
  message = choice["message"]
  assert (message["content"], message["role"]) == (answer, "assistant")
  assert message["reasoning_content"] == reasoning
  assert (choice["finish_reason"], choice["coa"]["status"]) == ("stop", "ended")
  names = [c["name"] for c in choice["coa"]["tool_calls"]]
  assert names == re.findall(r"</(code|wiki_search)>", reasoning)
  written = sum(len(toy.tokenizer().encode(t)) for t in toy.SCRIPTS[question][::2])
  assert whole["usage"]["completion_tokens"] == written
  assert whole["usage"]["observation_tokens"] > 0

  events = service.stream(question, stream_options={"include_usage": True})
  assert joined(events, "content") == answer
  assert joined(events, "reasoning_content") == reasoning
  assert len(events) > 10 and len({e["id"] for e in events}) == 1
  assert events[0]["choices"][0]["delta"]["role"] == "assistant"
  *rest, last, costs = events
  assert last["choices"][0]["finish_reason"] == "stop"
  assert last["choices"][0]["coa"]["status"] == "ended"
  assert all(e["choices"][0]["finish_reason"] is None for e in rest)
  assert costs["choices"] == [] and costs["usage"] == whole["usage"]
  assert all(e["usage"] is None for e in [*rest, last])


def test_a_seed_that_was_not_given_is_told(service):
  first = service.ask("mixed", temperature=2, n=3)
  assert [c["index"] for c in first["choices"]] == [0, 1, 2]
  texts = [c["message"]["reasoning_content"] for c in first["choices"]]
  assert len(set(texts)) > 1
  seed = first["coa"]["seed"]
  again = service.ask("mixed", temperature=2, n=3, seed=seed)["choices"]
  assert [c["message"]["reasoning_content"] for c in again] == texts
  assert service.ask("mixed", temperature=2)["coa"]["seed"] != seed


def test_max_tokens_is_a_length_and_no_answer(service):
  for name in ("max_tokens", "max_completion_tokens"):
    short = service.ask("2 + 3", **{name: 3})
    assert short["usage"]["completion_tokens"] == 3
    (choice,) = short["choices"]
    assert (choice["finish_reason"], choice["coa"]["status"]) == ("length", "truncated")
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"].startswith("<think>")


def test_the_question_is_the_last_message(service):
  def of(*turns: tuple[str, object]) -> dict:
    return service.ask("", messages=[{"role": r, "content": c} for r, c in turns])

  reply = of(("user", "capital of Ur"), ("assistant", "Uruk"), ("user", "2 + 3"))
  assert reply["choices"][0]["message"]["content"] == "5"
  assert reply["coa"]["ignored_messages"] == 2
  parts = [{"type": "text", "text": "4 * 4"}, {"type": "text", "text": " + 1"}]
  reply = of(("user", parts))
  assert reply["choices"][0]["message"]["content"] == "17"
  assert reply["coa"]["ignored_messages"] == 0


def test_fields_that_ask_for_nothing_are_accepted(service):
  nothing = {"top_p": 1, "presence_penalty": 0.0, "tools": [], "tool_choice": "none"}
  nothing |= {"stop": None, "logprobs": False, "top_logprobs": 0, "user": "me", "n": 1}
  nothing |= {"stream": False, "seed": None, "response_format": {"type": "text"}}
  assert service.ask("2 + 3", **nothing)["choices"][0]["message"]["content"] == "5"


@pytest.mark.parametrize("question", ["2 + 3", "capital of Ur"])
def test_log_probs_are_those_of_the_policys_tokens(service, question):
  whole = service.ask(question, logprobs=True, top_logprobs=1)
  (choice,) = whole["choices"]
  logs = choice["logprobs"]
  content, reasoning = logs["content"], logs["reasoning_content"]
  assert "".join(e["token"] for e in content).strip() == choice["message"]["content"]
  script = "".join(toy.SCRIPTS[question][::2])
  assert "".join(e["token"] for e in reasoning) == script[: script.rindex("<answer>")]
  for entry in content + reasoning:
    assert -20 < entry["logprob"] <= 0
    assert bytes(entry["bytes"]).decode() == entry["token"]
    (top,) = entry["top_logprobs"]
    assert (top["token"], top["logprob"]) == (entry["token"], entry["logprob"])
  # A stream has them in the choice's last chunk.
  *rest, last = service.stream(question, logprobs=True, top_logprobs=1)
  assert last["choices"][0]["logprobs"] == logs
  assert not any("logprobs" in c for e in rest for c in e["choices"])
  assert "logprobs" not in service.ask(question)["choices"][0]


def test_a_reply_that_has_all_ends_after_its_window(one_slot, slow_windows):
  ends = queue.SimpleQueue()
  with serving(one_slot) as service:
    request = InferenceRequest("4 * 4 + 1", 0.0)
    episode = service.server.submit(request, ends.put)
    ends.get()  # the first text
    service.server.finish(episode)
    while isinstance(end := ends.get(), TextDelta):
      pass
  assert end.status == Status.TRUNCATED and end.usage.generated < 10


def test_a_stop_string_cuts_the_answer_and_its_log_probs(one_slot):
  with serving(one_slot) as service:
    whole = service.ask("capital of Ur")
    answer = whole["choices"][0]["message"]["content"]
    assert answer == "Uruk"
    for stop, left in (
      ("ru", "U"),
      (["zz", "k"], "Uru"),
      ("Uruk", ""),
      ("ukx", answer),
    ):
      events = service.stream("capital of Ur", stop=stop, logprobs=True)
      cut = service.ask("capital of Ur", stop=stop, logprobs=True)
      (choice,) = cut["choices"]
      assert choice["message"]["content"] == joined(events, "content") == left
      ends = [e["choices"][0]["finish_reason"] for e in events[-1:]]
      assert [choice["finish_reason"], *ends] == ["stop", "stop"]
      tokens = "".join(e["token"] for e in choice["logprobs"]["content"]).strip()
      assert tokens.startswith(left) and bool(tokens) == bool(left)
    # The reasoning may contain a stop string.
    reply = service.ask("capital of Ur", stop=["work", "think"])
    assert reply["choices"][0]["message"]["content"] == answer


def test_top_p_is_of_the_request(service):
  hot = {"temperature": 2, "seed": 7}
  greedy = service.ask("2 + 3")["choices"][0]["message"]
  # So small a mass keeps only the likeliest token, at any temperature.
  assert service.ask("2 + 3", **hot, top_p=1e-6)["choices"][0]["message"] == greedy
  free = service.ask("2 + 3", **hot)["choices"][0]["message"]
  assert free != greedy
  # A request's top_p does not affect concurrent requests.
  with concurrent.futures.ThreadPoolExecutor() as pool:
    beside = [pool.submit(service.ask, "2 + 3", **hot, top_p=p) for p in (1e-6, 1, 0.5)]
    messages = [f.result()["choices"][0]["message"] for f in beside]
  assert messages[:2] == [greedy, free]


def complete(service: Service, **fields) -> httpx.Response:
  fields = {"model": "coa", "temperature": 0, **fields}
  return service.client.post("/v1/completions", json=fields)


def test_text_completions_are_what_a_harness_asks_for(service):
  # The body from lm-eval's local-completions (generate_until) for a batch of two.
  body = {"prompt": ["2 + 3", "capital of Ur"], "max_tokens": 100, "seed": 1234}
  body |= {"stop": ["Question:", "</s>", "\n\n", "<|im_end|>", "\nclass"]}
  reply = complete(service, **body).json()
  texts = {choice["index"]: choice["text"] for choice in reply["choices"]}
  assert texts == {0: "5", 1: "Uruk"}
  assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
  each = [complete(service, prompt=p).json() for p in body["prompt"]]
  for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
    assert reply["usage"][name] == sum(one["usage"][name] for one in each)
  # n choices per prompt, in the prompts' order; a prompt's tokens count once.
  reply = complete(service, **body, n=2).json()
  assert [c["text"] for c in reply["choices"]] == ["5", "5", "Uruk", "Uruk"]
  assert reply["usage"]["prompt_tokens"] == sum(
    e["usage"]["prompt_tokens"] for e in each
  )
  # Log-probs of the answer's tokens.
  (choice,) = complete(service, prompt="capital of Ur", logprobs=1).json()["choices"]
  logs = choice["logprobs"]
  assert "".join(logs["tokens"]).strip() == "Uruk"
  assert logs["top_logprobs"] == [
    {token: logp}
    for token, logp in zip(logs["tokens"], logs["token_logprobs"], strict=True)
  ]
  for token, at in zip(logs["tokens"], logs["text_offset"], strict=True):
    assert "Uruk"[at:].startswith(token.lstrip())
  # A stream has only the answer.
  text = complete(service, prompt="2 + 3", stream=True).text
  assert text.endswith("data: [DONE]\n\n")
  events = [json.loads(e[6:]) for e in text.split("\n\n")[:-2]]
  assert "".join(c["text"] for e in events for c in e["choices"]) == "5"
  assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_one_model_can_be_asked_for(service):
  (listed,) = service.client.get("/v1/models").json()["data"]
  assert service.client.get("/v1/models/coa").json() == listed
  for name in ("gpt-4o", "org/model", "coa/"):
    response = service.client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_openais_own_client_can_do_it(service):
  openai = pytest.importorskip("openai")
  client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
  with client:
    assert client.models.retrieve("coa").id == client.models.list().data[0].id == "coa"
    ask = {"model": "coa", "temperature": 0}
    ask["messages"] = [{"role": "user", "content": "capital of Ur"}]
    chat = client.chat.completions.create
    reply = chat(**ask, logprobs=True, top_logprobs=1, top_p=0.9, stop=["k"], n=2)
    for choice in reply.choices:
      assert (choice.message.content, choice.finish_reason) == ("Uru", "stop")
      assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    chunks = list(chat(**ask, logprobs=True, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Uruk"
    (logs,) = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert "".join(entry.token for entry in logs.content).strip() == "Uruk"
    text = {"model": "coa", "temperature": 0, "prompt": ["2 + 3", "capital of Ur"]}
    reply = client.completions.create(**text, logprobs=0)
    assert [choice.text for choice in reply.choices] == ["5", "Uruk"]
    assert reply.choices[0].logprobs.top_logprobs is None
    streamed = list(client.completions.create(**text, stream=True))
    assert {c.choices[0].index for c in streamed} == {0, 1}
    with pytest.raises(openai.NotFoundError):
      client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
      chat(**ask, logprobs=True, top_logprobs=5)


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]


@pytest.mark.parametrize(
  ("fields", "status", "param"),
  [
    ({"model": "gpt-4o"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": " "}]}, 400, "messages[0].content"),
    ({"messages": IMAGE}, 400, "messages[0].content"),
    ({"temperature": 2.5}, 400, "temperature"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    ({"n": 65}, 400, "n"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"top_logprobs": 1}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1, "temperature": 1}, 400, "top_logprobs"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a", ""]}, 400, "stop"),
    ({"stop": [1]}, 400, "stop"),
    ({"stop": {"a": 1}}, 400, "stop"),
    ({"reasoning_effort": "low"}, 400, "reasoning_effort"),
    ({"temprature": 0}, 400, "temprature"),
    ({"messages": [{"role": "user", "content": "x" * 900}]}, 400, "messages"),
    # --- /v1/completions.
    ({"prompt": "a", "echo": True}, 400, "echo"),
    ({"prompt": "a", "best_of": 2}, 400, "best_of"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "logprobs": 5}, 400, "logprobs"),
    ({"prompt": "a", "logprobs": 1, "temperature": 1}, 400, "logprobs"),
    ({"prompt": [1, 2, 3]}, 400, "prompt"),
    ({"prompt": [[1, 2], [3]]}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),  # like a missing prompt
    ({"prompt": ["a"] * 40, "n": 2}, 400, "n"),
    ({"prompt": "a", "messages": []}, 400, "messages"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
  ],
)
def test_an_unsupported_field_is_refused_by_name(service, fields, status, param):
  is_text = "prompt" in fields
  response = complete(service, **fields) if is_text else service.post(**fields)
  assert response.status_code == status
  error = response.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  assert (error["type"], error["param"]) == ("invalid_request_error", param)
  assert len(error["message"]) < 200
  if param == "temprature":
    assert "did you mean 'temperature'" in error["message"]
  if param == "reasoning_effort":
    assert "did you mean" not in error["message"]
  if "x" * 900 in str(fields):
    assert error["code"] == "context_length_exceeded"


def test_a_malformed_request_is_refused(service):
  url, json_type = "/v1/chat/completions", {"content-type": "application/json"}

  def status(content: bytes, headers: dict[str, str] = json_type) -> int:
    response = service.client.post(url, content=content, headers=headers)
    assert response.json()["error"]["message"]
    return response.status_code

  assert status(b"{") == 400
  assert status(b"[" * 100_000) == 400
  assert status(b"[]") == 400
  assert status(json.dumps(body("2 + 3", temperature=float("nan"))).encode()) == 400
  assert status(b"{}", {"content-type": "text/plain"}) == 415
  assert status(b" " * (serve.MAX_BODY + 1)) == 413
  assert service.client.get(url).status_code == 405
  assert service.client.get("/v2").json()["error"]["type"] == "invalid_request_error"
  evil = service.client.get("/v1/models", headers={"host": "evil.example"})
  assert evil.status_code == 400
  assert service.client.get("/v1/models").json()["data"][0]["id"] == "coa"
  health = service.client.get("/health").json()
  assert health == {"status": "ok", "running": 0, "waiting": 0}


def test_our_own_client_can_ask(service):
  config = TeacherChatConfig(service.url + "/v1", "coa", temperature=0.0, retries=0)
  with ChatBackend(config) as backend:
    reply = backend("solver", [Message("user", "capital of Ur")])
  assert reply.text == "Uruk" and reply.retries == 0
  assert reply.prompt_tokens > 0 and reply.completion_tokens > 10


def test_a_sandbox_that_is_down_is_no_answer(worker):
  def down(name: str, arguments: str) -> ToolCall:
    return ToolCall(name, arguments, "error", CallStatus.INFRASTRUCTURE)

  with serving(worker, toy.TableToolbox(down)) as service:
    response = service.post("2 + 3")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "infrastructure"
    last = service.post("2 + 3", stream=True).text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    config = TeacherChatConfig(service.url + "/v1", "coa", retries=1)
    with ChatBackend(config) as backend, pytest.raises(InfrastructureError):
      backend("solver", [Message("user", "2 + 3")])


@pytest.fixture
def slow_windows(monkeypatch) -> None:
  """Makes a window (one token on `one_slot`) take 250 ms: 51 outlast any stop."""
  real = sampler.window
  monkeypatch.setattr(sampler, "window", lambda *a: time.sleep(0.25) or real(*a))


def begin(service: Service, stream: bool) -> http.client.HTTPConnection:
  """Opens a connection and waits for the first 3 of an answer's 51 tokens."""
  engine = service.server.worker.engine
  before = engine.counters.sampled_tokens
  out = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=300)
  headers = {"content-type": "application/json"}
  text = json.dumps(body("4 * 4 + 1", stream=stream))
  out.request("POST", "/v1/chat/completions", text, headers)
  eventually(lambda: engine.counters.sampled_tokens >= before + 3)
  return out


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(one_slot, slow_windows, caplog, stream):
  engine = one_slot.engine
  with serving(one_slot) as service:
    before = engine.counters.sampled_tokens
    leaving = begin(service, stream)
    if stream:
      assert b"data: " in leaving.getresponse().readline()
    leaving.close()
    eventually(lambda: service.server.counts == (0, 0))
    assert engine.counters.sampled_tokens <= before + 20
  assert not caplog.records  # a leaving client is not an error


def test_a_stop_cuts_off_what_takes_too_long(one_slot, slow_windows):
  engine = one_slot.engine
  before = engine.counters.sampled_tokens
  with serving(one_slot, grace_s=0.2) as service:
    cut_off = begin(service, stream=True)
  assert engine.counters.sampled_tokens <= before + 20
  text = cut_off.getresponse().fp.read()
  assert b"reasoning_content" in text and b"[DONE]" not in text
  cut_off.close()


def test_too_many_requests_are_told_to_come_back(one_slot):
  gate = threading.Event()
  toolbox = toy.TableToolbox(lambda *unused: gate.wait(600) and "5")
  with (
    serving(one_slot, toolbox, max_waiting=1) as service,
    concurrent.futures.ThreadPoolExecutor() as pool,
  ):
    try:
      first = pool.submit(service.ask, "2 + 3")
      eventually(lambda: toolbox.calls)
      second = pool.submit(service.ask, "2 + 3")
      eventually(lambda: service.server.counts == (1, 1))
      response = service.post("2 + 3")
      assert response.status_code == 429 and response.headers["retry-after"] == "1"
      assert response.json()["error"]["code"] == "queue_full"
    finally:
      gate.set()
    for reply in (first.result(), second.result(), service.ask("2 + 3")):
      assert reply["choices"][0]["message"]["content"] == "5"


def test_a_server_that_stops_says_so(worker):
  gate = threading.Event()
  toolbox = toy.TableToolbox(lambda *unused: gate.wait(600) and "5")
  with serving(worker, toolbox) as service:
    with concurrent.futures.ThreadPoolExecutor() as pool:
      answer = pool.submit(service.post, "2 + 3")
      eventually(lambda: toolbox.calls)
      service.server.close()  # while the tool still runs
      assert not service.server.alive and service.server.counts == (0, 0)
      gate.set()
      assert answer.result().status_code == 503
    assert service.post("2 + 3").status_code == 503
    assert service.client.get("/health").status_code == 503


def test_metrics_count_what_was_served(worker):
  with serving(worker) as service:
    service.ask("2 + 3")
    service.stream("2 + 3")
    assert service.post("2 + 3", model="other").status_code == 404
    response = service.client.get("/metrics")
  assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
  lines = response.text.splitlines()
  for line in (
    'coa_attempts_total{status="ended"} 2.0',
    'coa_requests_refused_total{code="404"} 1.0',
    "coa_time_to_first_token_seconds_count 2.0",
    "coa_attempt_seconds_count 2.0",
    "coa_running 0.0",
    "coa_up 1.0",
  ):
    assert line in lines
  written = sum(len(toy.tokenizer().encode(t)) for t in toy.SCRIPTS["2 + 3"][::2])
  assert f'coa_tokens_total{{kind="generated"}} {2 * written}.0' in lines


def test_the_page_runs_its_own_script_alone_and_asks_this_server_alone(service):
  page = service.client.get("/")
  assert page.headers["content-type"].startswith("text/html")
  (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', page.text)
  assert "default-src 'none'" in policy and "connect-src 'self'" in policy
  assert "unsafe-inline" not in policy.split("script-src")[1]
  assert not re.search(r'\son\w+=|src=|href="http', page.text)

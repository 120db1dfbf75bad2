"""An OpenAI-compatible endpoint as an agent's model: relayed, recorded, graded."""

from __future__ import annotations

import json
import threading

import ml_collections
import openai
import pytest
from chat_server import ChatServer

from coa_jax import evaluate
from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Author, ToolCall, read_trajectories
from coa_jax.rollout.agents.endpoint import EndpointRun
from coa_jax.rollout.agents.worker import Client
from coa_jax.rollout.types import Attempt
from coa_jax.runtime.config import ConfigError

QUESTIONS = {"2 + 3": "5", "4 + 4": "8"}
TOOL = {
  "type": "function",
  "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


class Endpoint(ChatServer):
  """Calls a tool, then gives the tool's result as its answer; samples are wrong."""

  def respond(self, request) -> None:
    if self.faults:
      super().respond(request)
      return
    body = request.json
    assert request.headers["Authorization"] == "Bearer secret"
    *_, last = body["messages"]
    message = {"role": "assistant", "content": None}
    if last["role"] == "tool":
      message["content"] = last["content"] if body["temperature"] == 0 else "no"
    else:
      function = {"name": "add", "arguments": json.dumps({"sum": last["content"]})}
      message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
    usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 4}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "r", "object": "chat.completion", "created": 0, "model": "big"}
    request.send_json({**head, "choices": [choice], "usage": usage})


def solve(task: dict, client: Client) -> str | None:
  llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
  messages: list = [{"role": "user", "content": task["question"]}]
  while True:
    reply = llm.chat.completions.create(model="any", messages=messages, tools=[TOOL])
    message = reply.choices[0].message
    if not message.tool_calls:
      return message.content
    messages.append(message)
    for call in message.tool_calls:
      numbers = json.loads(call.function.arguments)["sum"].split(" + ")
      content = str(sum(map(int, numbers)))
      messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def streamed(task: dict, client: Client) -> str:
  llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
  question = [{"role": "user", "content": task["question"]}]
  chunks = llm.chat.completions.create(model="any", messages=question, stream=True)
  return "".join(c.choices[0].delta.content or "" for c in chunks)


def listing(task: dict, client: Client) -> list:
  return [solve(task, client)]


@pytest.fixture
def config(tmp_path) -> ml_collections.ConfigDict:
  rows = [{"id": q, "question": q, "answers": [a]} for q, a in QUESTIONS.items()]
  tasks = tmp_path / "tasks.jsonl"
  tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "key").write_text("secret\n")
  endpoint = dict(base_url="", model="big", key_file=str(tmp_path / "key"))
  return ml_collections.ConfigDict(
    dict(
      agent=dict(path=f"{__name__}:solve", seconds=60.0, endpoint=endpoint),
      tools=dict(tools=()),
      tasks=dict(uri=str(tasks)),
      reward=dict(shaping=dict(format="none")),
      eval=dict(samples=2),
    )
  )


def test_an_endpoint_is_evaluated(config, tmp_path):
  with Endpoint() as server:
    config.agent.endpoint.base_url = server.url
    results = evaluate.run(config, str(tmp_path / "out"))
    requests = [r.json for r in server.requests]
    again = evaluate.run(config, str(tmp_path / "out"))
    assert len(server.requests) == len(requests)
  assert again == results
  assert len(requests) == 2 * 2 * 3 and {r["model"] for r in requests} == {"big"}
  assert sorted({r["temperature"] for r in requests}) == [0, 1]
  assert len({r["seed"] for r in requests if r["temperature"]}) == 4
  assert (results["pass1_greedy"], results["pass1_sampled"]) == (1.0, 0.0)
  for t in read_trajectories(tmp_path / "out/greedy.jsonl"):
    answer = QUESTIONS[t.task_id]
    call = ToolCall("add", json.dumps({"sum": t.task_id}), answer)
    assert [(c.name, c.arguments, c.result) for c in t.calls] == [
      (call.name, call.arguments, call.result)
    ]
    assert [(s.author, s.text) for s in t.segments] == [
      (Author.PROMPT, t.task_id),
      (Author.POLICY, f"<tool_call>add {call.arguments}</tool_call>"),
      (Author.TOOL, answer),
      (Author.POLICY, answer),
    ]
    # Prompts of 10 and 30 tokens, replies of 4: 30 - 10 - 4 were observed.
    assert (t.usage.prompt, t.usage.observation, t.usage.generated) == (10, 16, 8)
    assert (t.usage.tool_calls, t.usage.tool_turns) == (1, 1)


def test_a_stream_and_faults(config, tmp_path):
  config.agent.path = f"{__name__}:streamed"
  config.agent.workers = 1
  config.eval.samples = 0
  with Endpoint() as server:
    server.faults += [500, "not a completion", "5", 400, "8"]
    config.agent.endpoint.base_url = server.url
    first = evaluate.run(config, str(tmp_path / "out"))
    second = evaluate.run(config, str(tmp_path / "out"))
  # The refused attempt is no wrong answer; the same command plays it again.
  assert (first["tasks"], first["pass1_greedy"]) == (1, 1.0)
  assert (second["tasks"], second["pass1_greedy"]) == (2, 1.0)


NO_CHOICE = {"message": {"role": "assistant", "content": "5\ud800"}}


def test_a_reply_may_lack_its_usage_and_hold_half_a_character(config, tmp_path, caplog):
  config.agent.path = f"{__name__}:streamed"
  config.eval.samples = 0
  config.tasks.limit = 1
  with Endpoint() as server:
    server.faults = [{"choices": [NO_CHOICE]}]
    config.agent.endpoint.base_url = server.url
    results = evaluate.run(config, str(tmp_path / "out"))
  assert results["tasks"] == 1 and "reports no usage" in caplog.text
  (t,) = read_trajectories(tmp_path / "out/greedy.jsonl")
  assert t.segments[-1].text == "5?"


@pytest.mark.parametrize(
  ("faults", "words"),
  [
    ([401] * 9, r"agent\.endpoint: the endpoint: .*401"),
    ([400] * 9, "none of 6 attempts could be graded: .*BadRequestError"),
  ],
)
def test_an_endpoint_that_refuses_ends_the_evaluation(config, tmp_path, faults, words):
  with Endpoint() as server:
    server.faults = faults
    config.agent.endpoint.base_url = server.url
    with pytest.raises(ValueError, match=words):
      evaluate.run(config, str(tmp_path / "out"))
  assert not (tmp_path / "out/results.json").exists()


def test_an_answer_is_a_text(config, tmp_path):
  config.agent.path = f"{__name__}:listing"
  with Endpoint() as server:
    config.agent.endpoint.base_url = server.url
    with pytest.raises(ValueError, match="accepted: an answer's text"):
      evaluate.run(config, str(tmp_path / "out"))


class Together(ChatServer):
  """Answers once this many requests wait."""

  def __init__(self, many: int):
    super().__init__()
    self.arrived = threading.Barrier(many)

  def answer(self, body: dict) -> str:
    self.arrived.wait(60)
    return "5"


def test_attempts_ask_at_the_same_time(config, tmp_path):
  config.agent.path = f"{__name__}:streamed"
  config.agent.workers = config.eval.samples = 24
  config.tasks.limit = 1
  config.eval.greedy = False
  with Together(24) as server:
    config.agent.endpoint.base_url = server.url
    results = evaluate.run(config, str(tmp_path / "out"))
  assert results["status"]["ended"] == 24


def test_another_history_is_another_context():
  run = EndpointRun(Attempt(Task("a", "?", ("5",)), 0, 0, 0, 0.0))
  for question in ("one", "two"):
    message = {"role": "assistant", "content": question.upper()}
    run.record(
      [{"role": "user", "content": question}], {"choices": [{"message": message}]}
    )
  t = run.close()
  assert [[s.text for s in c.segments] for c in t.split()] == [
    ["one", "ONE"],
    ["two", "TWO"],
  ]
  assert t.usage.model_calls == 2 and t.usage.prompt == 0


REFUSED = [
  ({"init": "models/x"}, "init and section vllm would not be used"),
  ({"agent.endpoint": None}, "config lacks field 'init'"),
  ({"agent.format": "team"}, "take agent.format='chat'"),
  ({"agent.endpoint.model": ""}, "name the model"),
  ({"agent.endpoint.base_url": "localhost:8000"}, "must start with http://"),
  ({"agent.endpoint.key_file": "nowhere"}, "agent.endpoint.key_file nowhere: File"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_config_is_refused(config, tmp_path, changes, words):
  config.agent.endpoint.base_url = "http://127.0.0.1:1/v1"
  for name, value in changes.items():
    *sections, field = name.split(".")
    target = config
    for section in sections:
      target = target[section]
    with target.unlocked():
      target[field] = value
  with pytest.raises((ValueError, ConfigError), match=words):
    evaluate.run(config, str(tmp_path / "out"))

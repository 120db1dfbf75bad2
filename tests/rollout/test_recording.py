"""`coa serve --agents`: recorded trajectories of other loops."""

from __future__ import annotations

import json
import threading

import httpx
import openai
import playing
import pytest
import toy

from coa_jax.protocol.trajectory import Author, read_trajectories
from coa_jax.rollout.agents import server
from coa_jax.rollout.agents.recording import FILE, Recorder
from coa_jax.rollout.agents.types import Sampling
from tools_sandbox import http_server


@pytest.fixture
def service(tmp_path):
  """A served team; its URL and folder."""
  worker = playing.toy_worker(toy.MODEL, conversations="team", own_top_p=True)
  with (
    http_server.bind("127.0.0.1", 0) as sock,
    worker,
    Recorder(worker, str(tmp_path)) as recorder,
  ):
    worker.engine.set_policy(toy.actor().params, 0)
    app = server.make_app(
      recorder.find, worker.tokenizer, ["*"], "coa", recorder.end, most=4
    )
    http = http_server.Server(app, 3)
    url = http_server.listen(sock, "127.0.0.1")
    thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]})
    thread.start()
    yield f"{url}/v1", tmp_path
    http.should_exit = True
    thread.join()


def play(url: str, question: str, **headers: str) -> openai.OpenAI:
  llm = openai.OpenAI(base_url=url, api_key="none", default_headers=headers)
  messages: list = [{"role": "user", "content": question}]
  while True:
    reply = llm.chat.completions.create(
      model="coa", messages=messages, temperature=0, logprobs=True, stream=False
    )
    message = reply.choices[0].message
    if not message.tool_calls:
      return reply
    messages.append(message)
    for call in message.tool_calls:
      (argument,) = json.loads(call.function.arguments).values()
      result = toy.TableToolbox().reply(call.function.name, argument)
      messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def test_more_replies_than_the_server_holds_are_refused(service):
  llm = openai.OpenAI(base_url=service[0], api_key="none", max_retries=0)
  prompt = "<think>"
  with pytest.raises(openai.RateLimitError, match="0 of 4 replies are sampled or wait"):
    llm.completions.create(model="coa", prompt=prompt, n=5, max_tokens=1)
  reply = llm.completions.create(model="coa", prompt=prompt, n=4, max_tokens=1)
  assert len(reply.choices) == 4


def test_a_named_trajectory_is_recorded(service):
  url, folder = service
  question = "4 * 4 + 1"
  reply = play(url, question, **{"X-Trajectory": "a/1"})
  assert reply.choices[0].message.content == "17"
  with pytest.raises(openai.BadRequestError, match="the same header X-Trajectory"):
    play(url, "2 + 3")
  ended = httpx.post(f"{url}/trajectories/a/1", json={"reward": 0.5})
  assert ended.json()["contexts"] == 1
  (t,) = read_trajectories(folder / FILE)
  assert (t.task_id, t.reward, len(t.calls)) == ("a/1", 0.5, 2)
  ours = playing.play(
    toy.actor().params, [1], on=playing.engine(toy.MODEL), temperature=0.0
  )
  assert t.text == ours[1].text
  # The last reply's log-probs are the record's.
  own = [s for s in t.segments if s.author == Author.POLICY]
  logps = [entry.logprob for entry in reply.choices[0].logprobs.content]
  assert [p for s in own for p in s.logps][-len(logps) :] == logps
  again = httpx.post(f"{url}/trajectories/a/1", json={})
  assert again.status_code == 404


def test_a_stream_has_the_same_reply(service):
  url, _ = service
  llm = openai.OpenAI(base_url=url, api_key="none")
  asked = dict(model="coa", messages=[{"role": "user", "content": "2 + 3"}], seed=1)
  whole = llm.chat.completions.create(**asked, temperature=0)
  (call,) = whole.choices[0].message.tool_calls
  asked |= dict(temperature=0, stream=True)
  (chunk,) = llm.chat.completions.create(**asked)
  (made,) = chunk.choices[0].delta.tool_calls
  assert made.function.arguments == call.function.arguments
  asked["stream_options"] = {"include_usage": True}
  *_, last = llm.chat.completions.create(**asked)
  assert last.usage == whole.usage and not last.choices


def test_text_completions_of_ids_are_one_context(service):
  url, folder = service
  headers = {"X-Trajectory": "ids"}
  llm = openai.OpenAI(base_url=url, api_key="none", default_headers=headers)
  tokenizer = toy.tokenizer()
  before, after = tokenizer.chat_frame
  prompt = [*before, *tokenizer.encode("2 + 3"), *after]

  def complete(ids: list[int] | str, **fields):
    return llm.completions.create(
      model="coa", prompt=ids, temperature=0, logprobs=0, **fields
    )

  first = complete(prompt)
  (choice,) = first.choices
  assert choice.text.endswith("</code>") and choice.finish_reason == "stop"
  result = tokenizer.encode_observation("5").ids
  second = complete([*prompt, *choice.token_ids, *result])
  assert second.choices[0].text.endswith("<answer> 5</answer>")
  # The same prompt as text, with its control tokens, is another context.
  assert complete(tokenizer.decode(prompt)).choices[0].text == choice.text
  httpx.post(f"{url}/trajectories/ids", json={})
  (t,) = read_trajectories(folder / FILE)
  one, other = t.split()
  assert [s.author for s in one.segments[:2]] == [Author.PROMPT, Author.POLICY]
  assert Author.TOOL in [s.author for s in one.segments]
  sampled = [i for s in one.segments if s.author == Author.POLICY for i in s.ids]
  assert sampled == [*choice.token_ids, *second.choices[0].token_ids]
  assert [p for s in other.segments for p in s.logps] == choice.logprobs.token_logprobs
  with pytest.raises(openai.BadRequestError, match="prompt must be ids from 0 to"):
    complete([10**6])


def test_a_seed_gives_its_reply_again(service):
  url, _ = service
  llm = openai.OpenAI(base_url=url, api_key="none")
  asked = [{"role": "user", "content": "2 + 3"}]

  def reply(seed: int) -> str:
    done = llm.chat.completions.create(
      model="coa", messages=asked, temperature=2, seed=seed, n=2
    )
    return [str(c.message.reasoning_content) for c in done.choices]

  first = reply(7)
  assert first == reply(7) != reply(8) and first[0] != first[1]


def test_an_open_trajectory_is_written_at_the_end(tmp_path):
  worker = playing.toy_worker(toy.MODEL, conversations="team")
  with worker, Recorder(worker, str(tmp_path)) as recorder:
    worker.engine.set_policy(toy.actor().params, 0)
    request = httpx.Request("POST", "http://x", headers={"x-trajectory": "b"})
    session = recorder.find(request)
    asked = [{"role": "user", "content": "2 + 3"}]
    session.complete(asked, [], Sampling(temperature=0.0)).result()
  (t,) = read_trajectories(tmp_path / FILE)
  assert t.task_id == "b" and t.reward is None and t.num_policy

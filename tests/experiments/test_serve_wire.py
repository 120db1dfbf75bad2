"""Text in requests and responses, and the choice of the answer, without a model."""

from __future__ import annotations

import json

import pytest
from absl import flags
from starlette.testclient import TestClient

from coa_jax.cli import completions, serve
from coa_jax.cli.choices import Choice
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.rollout.streaming import Spans

TAGS = ("think", "answer", "observation")
URL = "/v1/chat/completions"


class OneAnswer:
  """Answers every question with one text."""

  alive, counts, max_waiting = True, (0, 0), 4

  def __init__(self, text: str = "<think> x</think><answer> 5</answer>"):
    self.text = text
    self.worker = self.engine = self.config = self
    self.top_p = 1.0

  def submit(self, request, on_event):
    for piece in Spans(TAGS).read(self.text.encode("utf-8", "surrogatepass"), True):
      on_event(piece)
    segments = [Segment(Author.POLICY, "", self.text)]
    on_event(Trajectory("t", segments, status=Status.ENDED))

  def cancel(self, episode) -> None:
    """Nothing runs."""

  finish = cancel


def post(
  body: bytes,
  kind: str = "application/json",
  server: OneAnswer | None = None,
  conversation: bool = False,
):
  app = serve.make_app(server or OneAnswer(), "coa", conversation=conversation)
  client = TestClient(app, raise_server_exceptions=False)
  return client.post(URL, content=body, headers={"content-type": kind})


def asks(**fields) -> bytes:
  messages = [{"role": "user", "content": "2 + 3"}]
  return json.dumps({"model": "coa", "messages": messages, **fields}).encode()


@pytest.mark.parametrize(
  "fields",
  [
    {"\ud800": 1},
    {"stream": True, "stream_options": {"\ud800": 1}},
    {"model": "\ud800"},
  ],
)
def test_a_lone_surrogate_is_refused_as_any_other_name(fields):
  response = post(asks(**fields))
  assert response.status_code == (404 if "model" in fields else 400), response.text
  assert "ud800" in response.text and response.json()["error"]["message"]


@pytest.mark.parametrize(
  ("kind", "status"),
  [
    ("application/json", 200),
    ("Application/JSON", 200),
    ("application/json ; charset=utf-8", 200),
    ("application/jsonl", 415),
    ("text/plain", 415),
  ],
)
def test_a_media_type_has_no_case_and_may_have_spaces(kind: str, status: int):
  assert post(asks(), kind).status_code == status


def test_a_lone_surrogate_of_a_tool_is_told_as_it_is():
  server = OneAnswer("<think> \ud800</think><answer> 5</answer>")
  response = post(asks(), server=server)
  assert response.status_code == 200
  message = response.json()["choices"][0]["message"]
  assert message["reasoning_content"] == "<think> \ud800</think>"
  assert message["content"] == "5"


@pytest.mark.parametrize(
  ("text", "content", "reasoning"),
  [
    ("<think> a</think><answer> 5 </answer>", "5", "<think> a</think>"),
    ("<answer> A <answer> B </answer>", "B", "<answer> A "),
    (
      "<think> x <answer> A </think> <answer> B </answer>",
      "B",
      "<think> x <answer> A </think> ",
    ),
    ("<think> x</think></answer>", "", "<think> x</think>"),
  ],
)
def test_the_answer_is_the_one_that_would_be_graded(text, content, reasoning):
  response = post(asks(), server=OneAnswer(text))
  message = response.json()["choices"][0]["message"]
  assert (message["content"], message["reasoning_content"]) == (content, reasoning)


def test_an_answer_that_was_cut_off_is_what_there_is_of_it():
  choice = Choice(0)
  text = "<think> x</think><answer> fi"
  for piece in Spans(TAGS).read(text.encode(), True):
    choice.delta(piece)
  segments = [Segment(Author.POLICY, "", text)]
  choice.end(Trajectory("t", segments, status=Status.TRUNCATED))
  assert choice.whole["message"]["content"] == "fi"
  assert choice.whole["message"]["reasoning_content"] == "<think> x</think>"
  assert choice.whole["finish_reason"] == "length"


@pytest.mark.parametrize(
  ("answer", "stop", "content"),
  [
    (" a b c ", ("b",), "a"),
    (" a b c ", ("x",), "a b c"),
    (" a\n\nQuestion: b ", ("\n\nQ",), "a"),
    (" a\n\nq ", ("\n\nQ",), "a\n\nq"),
    (" aab ", ("aac", "aa"), ""),
    (" aaab ", ("aab",), "a"),
    (" stop", ("stopping",), "stop"),  # `stop` could begin the stop string
    (" 1\n2 ", ("\n",), "1"),
    (" \n1 ", ("\n",), "1"),  # leading white space belongs to the protocol
    (" \u00e9\u00e9x ", ("\u00e9x",), "\u00e9"),
  ],
)
def test_a_stop_string_is_found_however_the_text_is_cut(answer, stop, content):
  text = f"<think> b aa </think><answer>{answer}</answer>"
  for size in (1, 2, 3, 100):
    choice = Choice(0, stop)
    data = text.encode()
    spans = Spans(TAGS)
    sent = ""
    for at in range(0, len(data), size):
      for piece in spans.read(data[at : at + size], at + size >= len(data)):
        sent += choice.delta(piece).get("content", "")
    segments = [Segment(Author.POLICY, "", text)]
    sent += choice.end(Trajectory("t", segments, status=Status.ENDED)).get(
      "content", ""
    )
    assert sent == choice.whole["message"]["content"] == content
    assert choice.is_cut == (content != answer.strip())


def test_somebody_may_wait():
  with pytest.raises(ValueError, match="positive"):
    flags.FLAGS["max_waiting"].parser.parse("0")


@pytest.mark.parametrize(
  ("turns", "question"),
  [
    ([("user", "a")], "a"),
    ([("system", "s"), ("user", "a")], "s\n\na"),
    (
      [("developer", "s"), ("user", "a"), ("assistant", "b"), ("user", " c")],
      "s\n\nUser: a\n\nAssistant: b\n\nUser:  c",
    ),
    ([("user", "a"), ("user", [{"type": "text", "text": "b"}])], "User: a\n\nUser: b"),
  ],
)
def test_a_conversation_is_written_before_the_question(turns, question):
  data = asks(messages=[{"role": r, "content": c} for r, c in turns])
  assert post(data, conversation=True).status_code == 200
  parsed = completions.read_request(data, "coa", 1.0, 1, conversation=True)
  assert (parsed.attempts[0].question, parsed.ignored_messages) == (question, 0)


def test_an_image_is_refused_in_a_conversation_too():
  image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
  messages = [image, {"role": "user", "content": "2 + 3"}]
  error = post(asks(messages=messages), conversation=True).json()["error"]
  assert error["param"] == "messages[0].content"

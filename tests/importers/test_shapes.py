"""Conversations in many systems' formats: all give the same turns."""

from __future__ import annotations

import copy
import json

import pytest
import recorded
from imported import ALONE, ENDS, GAVE, WHOLE, asks, calls, calls_in, read

from coa_jax.data.importers.importers import Importer, detect
from coa_jax.data.importers.shapes import as_chat
from coa_jax.data.importers.turns import split_turns
from coa_jax.data.teacher.convert import Dropped
from coa_jax.protocol.parser import parse


def take(format_: str, row: dict, **tools: str):
  """Imports one row with the single-agent variant."""
  return read(format_, row, variant=ALONE, tools=tools)


@pytest.mark.parametrize("name", recorded.ROWS)
def test_the_same_conversation_of_every_system(name):
  format_, row = recorded.ROWS[name]
  assert detect(row) == format_
  result = take(format_, row)
  assert not isinstance(result, Dropped), result
  task, trajectory = result
  assert task.question == recorded.QUESTION
  assert calls_in(trajectory, ALONE) == recorded.CALLS
  for thought in recorded.THOUGHTS:
    assert trajectory.text.count(thought) == 1
  assert trajectory.text.endswith(f"<answer> {recorded.ANSWER}</answer>")
  assert parse(trajectory.text, ALONE).ok
  failed = name in ("anthropic", "langchain", "langchain_dict", "langchain_dumpd")
  statuses = [call.status.value for call in trajectory.calls]
  assert statuses == ["ok", "ok", "model" if failed else "ok"]
  notes = [line for line in trajectory.meta.get("lost", []) if "system" not in line]
  image = ["message 4: a part of kind 'image' is left out"]
  assert notes == (image if name == "anthropic" else [])


@pytest.mark.parametrize("name", [n for n in recorded.ROWS if n != "agent_executor"])
def test_converted_again_a_row_does_not_change(name):
  chat = as_chat(recorded.ROWS[name][1])
  before = copy.deepcopy(chat)
  assert as_chat(chat) == chat == before
  more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "y"}]
  chat["messages"] += more
  first, second = split_turns(chat, "t")
  assert calls_in(take("chat", first)[1], ALONE) == recorded.CALLS
  task, trajectory = take("chat", second)
  assert not trajectory.calls and recorded.ANSWER in task.question
  assert "q1" not in task.question and "o1" not in task.question


def hermes(*texts: str) -> dict:
  """A row: a reply with the first text, tool results with the others, and an answer."""
  results = [{"role": "tool", "content": text} for text in texts[1:]]
  return asks({"role": "assistant", "content": texts[0]}, *results, ENDS)


def call(inner: str) -> str:
  return f"<tool_call>{inner}</tool_call>"


QUERY = "meaning of </tool_call> in templates"


@pytest.mark.parametrize(
  ("text", "body"),
  [
    # Inputs from public reports: a tag inside a string, and a Python dict.
    (call(json.dumps({"name": "search", "arguments": {"query": QUERY}})), QUERY),
    (call(str({"arguments": {"query": "Rome"}, "name": "search"})), "Rome"),
    (call(str({"arguments": {"query": QUERY}, "name": "search"})), QUERY),
    (call('{"name": "search", "arguments": {"query": "two\nlines"}}'), "two\nlines"),
    (call('\r\n[{"name": "search", "arguments": "{\\"query\\": \\"q\\"}"}]\r\n'), "q"),
    (call(str({"name": "search", "arguments": {"query": None, "q": True}})), None),
  ],
)  # fmt: skip
def test_call_blocks_in_text(text, body):
  for row in (
    hermes(text, "o"),
    {"conversations": hermes(text, "o")["messages"]},
    {
      "conversations": [
        {"from": "human", "value": "Who?"},
        {"from": "gpt", "value": text},
        {"from": "tool", "value": "<tool_response>\r\no\r\n</tool_response>"},
        {"from": "gpt", "value": "x"},
      ]
    },
  ):
    result = take(detect(row), row)
    if body is None:
      assert isinstance(result, Dropped) and result.reason == "bad_arguments"
      continue
    assert calls_in(result[1], ALONE) == [("web_search", body, "o")]


@pytest.mark.parametrize(
  ("arguments", "written"),
  [
    ('""', None),
    ("", {}),
    (None, {}),
    ("{}", {}),
    ("{'city': 'Rome', 'hot': True}", {"city": "Rome", "hot": True}),
    ('{"city": "a\nb"}', {"city": "a\nb"}),
    ('{"city": NaN}', None),
    ('{"city": [{"a": -Infinity}]}', None),
    ('{"city": 1e999}', None),
    ("{'city': {1, 2}}", None),
    ("{'city': __import__('os')}", None),
    ("[1]", None),
  ],
)
def test_arguments_of_a_function(arguments, written):
  gave = {**GAVE, "tool_call_id": "get_temp"}
  row = asks(calls("get_temp", arguments=arguments), gave, ENDS)
  result = take("chat", row, get_temp="tool")
  if written is None:
    assert isinstance(result, Dropped) and result.reason == "bad_arguments", result
    return
  ((tag, body, observation),) = calls_in(result[1], ALONE)
  assert (tag, observation) == ("tool", "o")
  # Strict JSON: Python's parser would accept NaN.
  value = json.loads(body, parse_constant=pytest.fail)
  assert value == {"name": "get_temp", "arguments": written}


def react(end: str) -> dict:
  lines = ["Thought: t", "Action: search", "Action Input: Paris", "Observation: Seine."]
  lines += ["Thought: t", "Final Answer: x", ""]
  return {"question": "Who?", "text": end.join(lines)}


def test_line_ends_of_another_system_are_no_part_of_an_observation():
  for end in ("\n", "\r\n"):
    _, trajectory = take("react", react(end))
    assert calls_in(trajectory, ALONE) == [("web_search", "Paris", "Seine.")]
    assert "\r" not in trajectory.text
  spans = [
    "<think>t</think>",
    "<search>q</search>",
    "<information>a",
    "b</information>",
  ]
  row = {"question": "Who?", "text": "\r\n".join([*spans, "<answer>x</answer>"])}
  assert calls_in(take("search_r1", row)[1], ALONE) == [("wiki_search", "q", "a\nb")]


@pytest.mark.parametrize(
  ("turns", "reason"),
  [
    (["[21, 4]"], None),
    (['[{"a": 1}, "text"]'], None),
    (["21"], "shared_observation"),
    (["[21]"], "shared_observation"),
    (["21", "4"], None),
  ],
)
def test_calls_made_at_once_and_one_observation(turns, reason):
  made = [{"name": "area", "arguments": {"side": n}} for n in (1, 2)]
  row = {
    "conversations": [
      {"from": "human", "value": "Who?"},
      {"from": "function_call", "value": json.dumps(made)},
      *[{"from": "observation", "value": turn} for turn in turns],
      {"from": "gpt", "value": "x"},
    ]
  }
  result = take("sharegpt", row, area="tool")
  if reason:
    assert isinstance(result, Dropped) and result.reason == reason
    return
  results = [c.result for c in result[1].calls]
  texts = (
    [v if isinstance(v, str) else json.dumps(v) for v in json.loads(turns[0])]
    if len(turns) == 1
    else turns
  )
  assert results == texts


def assistant(*parts: dict) -> dict:
  return {"role": "assistant", "content": list(parts)}


TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "1", "name": "search", "input": {"query": "q"}}
GOT = {"type": "tool_result", "tool_use_id": "1", "content": "o"}


def test_blocks_that_repeat_the_fields_are_read_once():
  for query, same in (("q", True), ("p", False)):
    text = call(json.dumps({"name": "search", "arguments": {"query": query}}))
    result = take("chat", asks(calls("search", content=text), GAVE, ENDS))
    if same:
      assert calls_in(result[1], ALONE) == [("web_search", "q", "o")]
    else:
      assert result.reason == "bad_call"


def test_a_call_without_parameters_may_be_repeated():
  text = call(json.dumps({"name": "now", "arguments": {}}))
  message = calls("now", arguments="{}", content=text)
  given = {**GAVE, "tool_call_id": "now"}
  result = take("chat", asks(message, given, ENDS), now="tool")
  assert [c.result for c in result[1].calls] == ["o"]


def test_streamed_messages_of_langchain():
  row = json.loads(
    json.dumps(recorded.ROWS["langchain"][1]).replace('"ai"', '"AIMessageChunk"')
  )
  assert calls_in(take("chat", row)[1], ALONE) == recorded.CALLS


def test_a_reply_in_pieces_is_one_reply():
  """As streams log a reply: one message per content block."""
  pieces = [
    assistant({"type": "thinking", "thinking": "first"}),
    assistant({"type": "text", "text": "second"}),
    assistant({"type": "thinking", "thinking": "third"}),
    assistant(USE),
    assistant({**USE, "id": "2"}),
    {"role": "user", "content": [GOT]},
    {"role": "user", "content": [{**GOT, "tool_use_id": "2"}]},
    assistant(TEXT),
  ]
  _, trajectory = take("chat", asks(*pieces))
  assert "<think> first\nsecond\nthird</think>" in trajectory.text
  assert calls_in(trajectory, ALONE) == [("web_search", "q", "o")] * 2


def nested(depth: int) -> list:
  value: list = []
  for _ in range(depth):
    value = [value]
  return value


@pytest.mark.parametrize("format_", [f for f, _ in recorded.ROWS.values()])
def test_a_row_nested_deeply_ends_nothing(format_):
  deep = nested(5000)
  messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "x": deep}]
  messages[1] |= {"content": "x", "tool_calls": [{"function": {"name": deep}}]}
  rows = [{"messages": messages}, {"steps": [{"source": deep, "x": deep}]}]
  rows += [{"conversations": [{"from": deep, "value": deep}]}, {"messages": deep}]
  for row in rows:
    for turn in split_turns(row, "t"):
      result = Importer(format_, ALONE, convert=WHOLE).read(0, "t:1", turn)
      assert isinstance(result, Dropped) and result.reason, result


def test_an_id_of_zero_is_an_id():
  task, _ = take("verifiers", recorded.ROWS["verifiers"][1])
  assert (task.id, task.answers) == ("0", (recorded.ANSWER,))

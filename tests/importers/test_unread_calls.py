"""A call left unread by the importer drops its row, in every known form."""

from __future__ import annotations

import time

import foreign
import pytest
from hypothesis import given, settings
from imported import ALONE, ENDS, GAVE, asks, calls, read

from coa_jax.data.importers.unread_calls import count_calls
from coa_jax.data.teacher.convert import Dropped

JSON = '{"name": "search", "arguments": {"query": "q"}}'
BAR, LOW = "\uff5c", "\u2581"
# Calls as models write them in text.
CALLS = [
  f"<function_call>{JSON}</function_call>",
  f"<function_call> {JSON}",
  f"<functioncall> {JSON}",
  "<tool_call>search\n<arg_key>query</arg_key>\n</tool_call>",
  "<tool_call>\n<function=search>\n<parameter=query>\nq\n</parameter>\n</function>\n"
  "</tool_call>",
  '<function=search>{"query": "q"}</function>',
  f"<tool_use>{JSON}</tool_use>",
  "<tool_use>\n<name>search</name>\n</tool_use>",
  f"<|python_tag|>{JSON}",
  '<|python_tag|>search.call(query="q")',
  f"[TOOL_CALLS] [{JSON}]",
  '[TOOL_CALLS]search[ARGS]{"query": "q"}',
  f"[TOOL_REQUEST]{JSON}[END_TOOL_REQUEST]",
  '<invoke name="search"><parameter name="query">q</parameter></invoke>',
  "<function_calls>\n<invoke>\n<tool_name>search</tool_name>\n</invoke>\n"
  "</function_calls>",
  "```tool_code\nsearch(query='q')\n```",
  f"```tool_call\n{JSON}\n```",
  "Action: search[q]",
  "Action: search\nAction Input: q",
  'Action 1: search\nAction Input 1: {"query": "q"}',
  f"<|tool_call|>[{JSON}]",
  f"<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{JSON}",
  f"<{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}>function",
  '<|channel|>commentary to=functions.search <|message|>{"query": "q"}<|call|>',
  '<|action_start|><|plugin|>{"name": "search"}<|action_end|>',
  "\u273fFUNCTION\u273f: search\n\u273fARGS\u273f: {}",
  f"<TOOLCALL>[{JSON}]</TOOLCALL>",
  f"functools[{JSON}]",
  "<execute_bash>ls</execute_bash>",
  "<use_mcp_tool>\n<server_name>s</server_name>\n</use_mcp_tool>",
]
# Texts with a call and nothing else.
WHOLE_CALLS = [
  JSON,
  f"```json\n{JSON}\n```",
  f"[{JSON}]",
  '{"name": "search", "parameters": {"query": "q"}}',
  '{"action": "search", "action_input": "q"}',
  '{"type": "function", "function": {"name": "s", "arguments": "{}"}}',
  '{"tool_calls": [{"id": "1", "function": {"name": "search"}}]}',
  "{'name': 'search', 'arguments': {'query': 'q'}}",
  '[search(query="q")]',
]
# Answers resembling a call.
PLAIN = [
  "Ada Lovelace",
  "Write it between `<tool_call>` and `</tool_call>`.",
  '{"name": "Ada", "born": 1815}',
  "[1, 2, 3]",
  "f(x) = x[0]",
  "Action is needed: call Ada.",
  "```json\n[21, 4]\n```",
  "The function f(a=1) is called.",
  "x < tool and y > call",
]


def chat(answer: str, thought: str = "t") -> dict:
  gave = {**GAVE, "content": f"o {CALLS[0]}"}
  return asks(calls("search", content=thought), gave, {**ENDS, "content": answer})


def take(format_: str, row: dict):
  return read(format_, row, variant=ALONE)


@pytest.mark.parametrize("answer", PLAIN)
def test_an_answer_without_a_call_is_kept(answer):
  for thought in ("t", "I write a <tool_call> with its arguments now."):
    result = take("chat", chat(answer, thought))
    assert not isinstance(result, Dropped), result


@pytest.mark.parametrize("text", CALLS + WHOLE_CALLS)
def test_an_answer_with_a_call_drops_its_row(text):
  for answer in (text, f"{text}\n"):
    result = take("chat", chat(answer))
    assert isinstance(result, Dropped), result
    assert result.reason in ("unread_call", "bad_call", "malformed", "nested"), result


@pytest.mark.parametrize("text", CALLS)
def test_so_does_one_among_other_words_and_in_a_thought(text):
  for row in (chat(f"I search.\n{text}\nThen I answer."), chat("x", f"So.\n{text}")):
    result = take("chat", row)
    assert isinstance(result, Dropped), result


@pytest.mark.parametrize("text", [CALLS[0], CALLS[12], CALLS[15], CALLS[17]])
def test_every_format_is_looked_at(text):
  alpaca = {"instruction": "Who?", "output": f"<think>t</think><answer>{text}</answer>"}
  react = {"question": "Who?", "text": f"Thought: t\nFinal Answer: {text}"}
  spans = "<think>t</think><search>q</search><information>o</information>"
  r1 = {"question": "Who?", "text": f"{spans}<answer>{text}</answer>"}
  steps = [{"model_output": "t", "tool_calls": [], "observations": ""}]
  oagents = {"question": "Who?", "steps": steps, "prediction": text}
  turns = [("human", "Who?"), ("gpt", text)]
  sharegpt = {"conversations": [{"from": f, "value": v} for f, v in turns]}
  atif = {"steps": [{"source": "user", "message": "Who?"}]}
  atif["steps"].append({"source": "agent", "message": text})
  said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": text}]
  rows = {
    "alpaca": alpaca,
    "react": react,
    "search_r1": r1,
    "oagents": oagents,
    "sharegpt": sharegpt,
    "atif": atif,
    "verifiers": {"prompt": said[:1], "completion": said[1:]},
    "responses": {"input": "Who?", "output": said[1:]},
  }
  for format_, row in rows.items():
    result = take(format_, row)
    assert isinstance(result, Dropped), (format_, result)
    reasons = ("unread_call", "ambiguous") if format_ == "react" else ("unread_call",)
    assert result.reason in reasons, (format_, result)
  _, trajectory = take("chat", chat("x"))
  own = trajectory.to_json()
  own["segments"][-1]["text"] = f"<answer>{text}</answer>"
  assert take("trajectories", own).reason == "unread_call"


@settings(max_examples=100, deadline=None)
@given(foreign.ALL)
def test_every_call_of_a_row_is_counted_and_read(drawn):
  """A delegated step of OAgents is one call, with two calls inside."""
  count = count_calls(drawn.row)
  assert (
    count == len(drawn.calls) if drawn.format == "chat" else count <= len(drawn.calls)
  )
  assert not isinstance(read(drawn.format, drawn.row), Dropped)


@pytest.mark.parametrize(
  "piece", ["<tool_call>", "Action: a\n", "[", "{'name':", "<|tool", "`"]
)
def test_a_hostile_answer_takes_linear_time(piece):
  """Quadratic time would be minutes."""
  began = time.process_time()
  take("chat", chat(piece * 20_000))
  assert time.process_time() - began < 5

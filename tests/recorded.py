"""One conversation as each system records it: two searches at once, then a third."""

from __future__ import annotations

import json
from typing import Any

QUESTION = "Who?"
CALLS = [("web_search", "q1", "o1"), ("web_search", "q2", "o2")]
CALLS += [("web_search", "q3", "no page")]
THOUGHTS = ("I look it up.", "Once more.")
ANSWER = "Ada"


def _use(n: int) -> dict[str, Any]:
  return {
    "type": "tool_use",
    "id": f"c{n}",
    "name": "search",
    "input": {"query": f"q{n}"},
  }


def _got(n: int, content: Any, **more: Any) -> dict[str, Any]:
  return {"type": "tool_result", "tool_use_id": f"c{n}", "content": content, **more}


ANTHROPIC = {
  "system": [{"type": "text", "text": "You search."}],
  "messages": [
    {"role": "user", "content": QUESTION},
    {
      "role": "assistant",
      "content": [
        {"type": "thinking", "thinking": THOUGHTS[0], "signature": "s"},
        _use(1),
        _use(2),
      ],
    },
    {
      "role": "user",
      "content": [
        _got(2, [{"type": "text", "text": "o2"}]),
        _got(1, [{"type": "text", "text": "o1"}, {"type": "image", "source": {}}]),
      ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": THOUGHTS[1]}, _use(3)]},
    {"role": "user", "content": [_got(3, "no page", is_error=True)]},
    {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
  ],
}


def _block(tag: str, *texts: str) -> str:
  return "\n".join(f"<{tag}>\n{text}\n</{tag}>" for text in texts)


def _search(n: int) -> dict[str, Any]:
  return {"name": "search", "arguments": {"query": f"q{n}"}}


_JSON = [json.dumps(_search(n)) for n in (1, 2, 3)]
_BOTH = _block("tool_call", _JSON[0], str(_search(2)))  # JSON, and a Python dict
_FIRST = f"<think>\n{THOUGHTS[0]}\n</think>\n\n{_BOTH}"
HERMES = {
  "messages": [
    {"role": "system", "content": "You may call <tools>search</tools>."},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": _FIRST},
    {"role": "user", "content": _block("tool_response", "o1", "o2")},
    {"role": "assistant", "content": f"{THOUGHTS[1]}\n{_block('tool_call', _JSON[2])}"},
    {"role": "tool", "content": _block("tool_response", "no page")},
    {"role": "assistant", "content": ANSWER},
  ]
}


def _openai(n: int) -> dict[str, Any]:
  function = {"name": "search", "arguments": json.dumps({"query": f"q{n}"})}
  return {"id": f"c{n}", "type": "function", "function": function}


_COMPLETION = [
  {
    "role": "assistant",
    "content": THOUGHTS[0],
    "tool_calls": [json.dumps(_openai(1)), json.dumps(_openai(2))],
  },
  {"role": "tool", "tool_call_id": "c1", "content": "o1"},
  {"role": "tool", "tool_call_id": "c2", "content": "o2"},
  {"role": "assistant", "content": THOUGHTS[1], "tool_calls": [_openai(3)]},
  {"role": "tool", "tool_call_id": "c3", "content": "no page"},
  {"role": "assistant", "content": ANSWER},
]
VERIFIERS = {
  "example_id": 0,
  "prompt": [
    {"role": "system", "content": "You search."},
    {"role": "user", "content": QUESTION},
  ],
  "completion": _COMPLETION,
  "answer": ANSWER,
  "reward": 1.0,
  "metrics": {"correct": 1.0},
  "timing": {"total_ms": 7.0},
}


def _atif_call(n: int) -> dict[str, Any]:
  call = {"tool_call_id": f"c{n}", "function_name": "search"}
  return {**call, "arguments": {"query": f"q{n}"}}


ATIF = {
  "schema_version": "ATIF-v1.6",
  "session_id": "s",
  "agent": {"name": "a", "version": "1"},
  "steps": [
    {"step_id": 1, "source": "system", "message": "You search."},
    {"step_id": 2, "source": "user", "message": QUESTION},
    {
      "step_id": 3,
      "timestamp": "2026-01-01T00:00:00Z",
      "source": "agent",
      "model_name": "m",
      "message": "",
      "reasoning_content": THOUGHTS[0],
      "tool_calls": [_atif_call(1), _atif_call(2)],
      "observation": {
        "results": [
          {"source_call_id": "c2", "content": [{"type": "text", "text": "o2"}]},
          {"source_call_id": "c1", "content": "o1"},
        ]
      },
      "metrics": {"prompt_tokens": 3},
    },
    {
      "step_id": 4,
      "source": "agent",
      "message": THOUGHTS[1],
      "tool_calls": [_atif_call(3)],
      "observation": {"results": [{"content": "no page"}]},
    },
    {"step_id": 5, "source": "agent", "message": ANSWER},
  ],
  "final_metrics": {"total_steps": 5},
}


def _lc(n: int) -> dict[str, Any]:
  return {
    "name": "search",
    "args": {"query": f"q{n}"},
    "id": f"c{n}",
    "type": "tool_call",
  }


_LANGCHAIN: list[dict[str, Any]] = [
  {"type": "human", "content": QUESTION, "example": False},
  {
    "type": "ai",
    # Anthropic's model: the same calls stand in the content.
    "content": [{"type": "text", "text": THOUGHTS[0]}, _use(1), _use(2)],
    "tool_calls": [_lc(1), _lc(2)],
    "additional_kwargs": {},
    "response_metadata": {"model": "m"},
    "invalid_tool_calls": [],
  },
  {"type": "tool", "content": "o1", "tool_call_id": "c1", "name": "search"},
  {"type": "tool", "content": "o2", "tool_call_id": "c2", "name": "search"},
  {
    "type": "ai",
    "content": THOUGHTS[1],
    "additional_kwargs": {"tool_calls": [_openai(3)]},
  },
  {"type": "tool", "content": "no page", "tool_call_id": "c3", "status": "error"},
  {"type": "ai", "content": ANSWER},
]
_CLASSES = {"human": "HumanMessage", "ai": "AIMessage", "tool": "ToolMessage"}


def _dumpd(message: dict[str, Any]) -> dict[str, Any]:
  path = ["langchain", "schema", "messages", _CLASSES[message["type"]]]
  return {"lc": 1, "type": "constructor", "id": path, "kwargs": message}


LANGCHAIN = {"messages": _LANGCHAIN}
LANGCHAIN_DICT = {"messages": [{"type": m["type"], "data": m} for m in _LANGCHAIN]}
LANGCHAIN_DUMPD = {"messages": [_dumpd(message) for message in _LANGCHAIN]}


def _function_call(n: int) -> dict[str, Any]:
  return {
    "type": "function_call",
    "id": f"fc_{n}",
    "call_id": f"c{n}",
    "name": "search",
    "arguments": json.dumps({"query": f"q{n}"}),
    "status": "completed",
  }


def _function_output(n: int, output: Any) -> dict[str, Any]:
  return {"type": "function_call_output", "call_id": f"c{n}", "output": output}


def _says(text: str) -> dict[str, Any]:
  part = {"type": "output_text", "text": text, "annotations": []}
  return {"type": "message", "role": "assistant", "content": [part]}


RESPONSES = {
  "instructions": "You search.",
  "input": [
    {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    {
      "type": "reasoning",
      "id": "r",
      "summary": [{"type": "summary_text", "text": THOUGHTS[0]}],
    },
    _function_call(1),
    _function_call(2),
    _function_output(1, "o1"),
    _function_output(2, [{"type": "input_text", "text": "o2"}]),
  ],
  "output": [
    _says(THOUGHTS[1]),
    _function_call(3),
    _function_output(3, "no page"),
    _says(ANSWER),
  ],
}


def _v1(role: str, *parts: tuple[str, str]) -> dict[str, Any]:
  content = [{"type": kind, "value": value} for kind, value in parts]
  return {"role": role, "content": content, "loss_weight": float(role == "assistant")}


LLAMA_FACTORY_V1 = {
  "messages": [
    _v1("system", ("text", "You search.")),
    _v1("user", ("text", QUESTION)),
    _v1(
      "assistant",
      ("reasoning", THOUGHTS[0]),
      ("tool_call", _JSON[0]),
      ("tool_call", _JSON[1]),
    ),
    _v1("tool", ("text", "o1")),
    _v1("tool", ("text", "o2")),
    _v1("assistant", ("text", THOUGHTS[1]), ("tool_call", _JSON[2])),
    _v1("tool", ("text", "no page")),
    _v1("assistant", ("text", ANSWER)),
  ]
}
SHAREGPT = {
  "conversations": [
    {"from": "human", "value": QUESTION},
    {"from": "gpt", "value": THOUGHTS[0]},
    {"from": "function_call", "value": f"[{_JSON[0]}, {_JSON[1]}]"},
    {"from": "observation", "value": '["o1", "o2"]'},  # one for both
    {"from": "gpt", "value": f"{THOUGHTS[1]}\n{_block('tool_call', _JSON[2])}"},
    {"from": "tool", "value": "no page"},
    {"from": "gpt", "value": ANSWER},
  ]
}
_ACTIONS = [
  {
    "tool": "search",
    "tool_input": {"query": f"q{n}"},
    "log": log,
    "type": "AgentAction",
  }
  for n, log in (
    (1, f"Thought: {THOUGHTS[0]}\nAction: search\nAction Input: q1"),
    (2, "\nInvoking: `search` with `{'query': 'q2'}`\n\n\n"),
    (3, f"\nInvoking: `search` with `{{'query': 'q3'}}`\nresponded: {THOUGHTS[1]}\n\n"),
  )
]
AGENT_EXECUTOR = {
  "input": QUESTION,
  "output": ANSWER,
  "intermediate_steps": [
    [_ACTIONS[0], "o1"],
    [{"lc": 1, "type": "constructor", "id": ["a"], "kwargs": _ACTIONS[1]}, "o2"],
    [_ACTIONS[2], "no page"],
  ],
}
# Name -> (format, row).
ROWS = {
  "anthropic": ("chat", ANTHROPIC),
  "hermes": ("chat", HERMES),
  "langchain": ("chat", LANGCHAIN),
  "langchain_dict": ("chat", LANGCHAIN_DICT),
  "langchain_dumpd": ("chat", LANGCHAIN_DUMPD),
  "llama_factory_v1": ("chat", LLAMA_FACTORY_V1),
  "sharegpt": ("sharegpt", SHAREGPT),
  "verifiers": ("verifiers", VERIFIERS),
  "atif": ("atif", ATIF),
  "responses": ("responses", RESPONSES),
  "agent_executor": ("oagents", AGENT_EXECUTOR),
}

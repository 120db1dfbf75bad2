"""Requests of OpenAI's chat completions, read without a server."""

from __future__ import annotations

import json

import pytest

from experiments import completions


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
  messages = [{"role": r, "content": c} for r, c in turns]
  data = json.dumps({"model": "coa", "messages": messages}).encode()
  parsed = completions.read_request(data, "coa", 1.0, 1, conversation=True)
  assert (parsed.attempts[0].question, parsed.ignored_messages) == (question, 0)

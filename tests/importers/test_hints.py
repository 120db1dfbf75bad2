"""Hints for dropped rows: with the flags in a hint, its row is read."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex

import pytest
from imported import ENDS, GAVE, asks, calls, row_of, search

from coa_jax.data.importers import hints
from coa_jax.data.importers.importers import Importer
from coa_jax.data.teacher.convert import ConvertConfig, Dropped
from coa_jax.data.teacher.runs import Run
from coa_jax.protocol.parser import ParseVerdict
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Status

PACKAGE = pathlib.Path(hints.__file__).parent
ALONE = "-plan-reflection-suggested_answer-double_check"


def chat(name: str, *after: dict) -> dict:
  gave = {**GAVE, "tool_call_id": name}
  return asks(calls(name, content=None), gave, ENDS, *after)


PYTHON = {"name": "python_interpreter", "arguments": "print(1)"}
CODE_AGENT = {
  "question": "Who?",
  "steps": [{"model_output": "t", "tool_calls": [PYTHON], "observations": "1"}],
  "prediction": "x",
}
PROGRAM = {
  "instruction": "Who?",
  "output": "<plan>p</plan><think>a</think><code>```py\n1\n```</code>"
  "<observation>1</observation><reflection>r</reflection><think>a</think>"
  "<answer>x</answer>",
}
ILLEGAL = {"instruction": "Who?", "output": "<think>a</think><answer>x</answer>"}
SEARCH_R1 = {
  "question": "Who?",
  "text": "<think>t</think><search>q</search><information>i</information>"
  "<think>t</think><answer>x</answer>",
}


@pytest.mark.parametrize(
  ("format_", "variant", "row", "flags"),
  [
    ("oagents", "web", CODE_AGENT, [f"--variant=unified{ALONE}"]),
    # A run with a plan keeps the plan.
    (
      "oagents",
      "web",
      row_of(search(), prediction="y"),
      ["--variant=web-reflection-suggested_answer-double_check"],
    ),
    (
      "chat",
      "unified",
      chat("search"),
      [f"--variant=unified{ALONE}", "--convert.missing_think=Go on."],
    ),
    (
      "chat",
      "web",
      chat("get_weather"),
      [
        "--tools=get_weather=tool",
        f"--variant=unified{ALONE}",
        "--convert.missing_think=Go on.",
      ],
    ),
    ("alpaca", "web", PROGRAM, ["--variant=code"]),
    ("alpaca", "web", ILLEGAL, ["--keep_illegal"]),
    ("search_r1", "web", SEARCH_R1, [f"--variant=unified{ALONE}"]),
  ],
)
def test_the_flags_that_a_hint_names_read_the_row(format_, variant, row, flags):
  importer = Importer(format_, get_variant(variant))
  record = (0, "f:1", row)
  text = hints.hint(importer, importer.read(*record), record)
  # --- The flags, split as a shell splits them.
  assert text.startswith("try ")
  words = shlex.split(text.replace(",", " ").replace("(", " ").replace(";", " "))
  found = [w for w in words if w.startswith("--") and w != "--tools=NAME=TAG"]
  assert found == flags
  # --- With these flags the row is read.
  given = dict(flag.removeprefix("--").partition("=")[::2] for flag in found)
  name, _, tag = given.get("tools", "").partition("=")
  again = Importer(
    format_,
    get_variant(given.get("variant", variant)),
    tools={name: tag} if name else {},
    convert=ConvertConfig(missing_think=given.get("convert.missing_think", "")),
    keep_illegal="keep_illegal" in given,
  )
  assert not isinstance(again.read(*record), Dropped)


@pytest.mark.parametrize(
  ("format_", "row", "words"),
  [
    ("chat", chat("search", {"role": "assistant", "content": "y"}), "user's message"),
    ("chat", {"messages": []}, "--format=NAME"),
    ("react", {"text": "Thought: t"}, "no answer to learn from"),
    ("runs", Run("a").to_json(), "--tasks=FILE"),
  ],
)
def test_where_no_flag_helps_the_hint_says_why(format_, row, words):
  importer = Importer(format_, get_variant("web"))
  record = (0, "f:1", row)
  assert words in hints.hint(importer, importer.read(*record), record)


def test_a_tool_that_is_not_described_is_named():
  variant = get_variant(f"unified{ALONE}").with_tools(["code"])
  importer = Importer("chat", variant, convert=ConvertConfig(missing_think="Go on."))
  record = (0, "f:1", chat("search"))
  text = hints.hint(importer, importer.read(*record), record)
  assert text.startswith("add --described_tools=web_search")


def test_every_reason_has_a_hint():
  reasons = {s.value for s in Status} - {"ended"} | set(ParseVerdict) - {"ok"}
  for path in PACKAGE.glob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      refuses = isinstance(node, ast.Call) and ast.unparse(node.func) == "RowRefused"
      if refuses and isinstance(node.args[0], ast.Constant):
        reasons.add(node.args[0].value)
  assert reasons == set(hints.HINTS)
  assert all(re.fullmatch(r"[ -~]{20,200}", text) for text in hints.HINTS.values())

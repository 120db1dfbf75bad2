"""docs/extending_tool.md: its example, added to a copy of the library, is a tool."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TABLE = "# Tag -> its row, in the order"
LAST_ROW = "  )\n}\n"
LAST_LINE = "  FUNCTION_TAG: FunctionsTool,\n"
# Run in the copy, which has the tool; every line is a room that reads the table.
PLAY = r"""
import random
from coa_jax.importers.calls import translate
from coa_jax.protocol import prompts, roles, tokens
from coa_jax.protocol.grammar.language import compile_grammar
from coa_jax.protocol.parser import Verdict, parse
from coa_jax.protocol.tool_naming import draw_naming
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.tools.toolbox import Toolbox, ToolsConfig

config = ToolsConfig(tools=("convert",))
variant = roles.get_variant("unified").with_tools(config.tool_descriptions)
line = "- <convert> ...</convert>: convert a length; write NUMBER UNIT in UNIT."
assert line in prompts.instructions(variant)

with Toolbox(config) as tools:
  good = tools.call("convert", "3 km in m")
  assert (good.status, good.result) == (CallStatus.OK, "3000 m"), good
  for body, words in (("3 km", "takes NUMBER"), ("3 km in xx", "no unit xx")):
    bad = tools.call("convert", body)
    assert bad.status == CallStatus.MODEL and words in bad.result, bad

def turns(body):
  end = roles.wrap("suggested_answer", "3") + roles.wrap("double_check", "4")
  return roles.wrap("think", "t") + roles.wrap("convert", body), end + roles.wrap(
    "answer", "3"
  )

def allows(grammar, texts):
  state = 0
  for n, text in enumerate(texts):
    state = grammar.resume_S[state] if n else state
    for b in text.encode():
      state = grammar.next_SX[state, b] if state >= 0 else -1
  return state >= 0 and bool(grammar.ends_S[state])

grammar = compile_grammar(variant)
for body, fits in (("3.5 km in mi", True), ("3.5 km", False), ("km in mi", False)):
  call, end = turns(body)
  read = parse(call + roles.wrap("observation", "o") + end, variant)
  assert read.verdict == (Verdict.OK if fits else Verdict.MALFORMED), read
  assert allows(grammar, (call, end)) == fits, body
assert roles.escape("<convert>") == "&lt;convert>"

assert translate("Unit_Converter", {"query": "1 m in ft"}, {}).tag == "convert"
for held_out, names in ((False, {"convert", "units"}), (True, {"convert"})):
  drawn = [draw_naming(variant, random.Random(n), held_out) for n in range(20)]
  assert {d.names["convert"] for d in drawn} == names
  for d in drawn:
    body = d.formats["convert"].write("3 km in m")
    assert d.read(d.names["convert"], body) == ("convert", "3 km in m")

tokenizer = tokens.train_tokenizer(["some text"] * 3, 400)
assert tokenizer.encode("<convert></convert>") == [398, 399]
"""


def blocks() -> list[str]:
  text = (ROOT / "docs" / "extending_tool.md").read_text()
  return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def edit(path: pathlib.Path, anchor: str, new: str, after: bool = False) -> None:
  """Puts text before (or after) the last place where `anchor` stands."""
  text = path.read_text()
  at = text.rindex(anchor) + (len(anchor) if after else 0)
  path.write_text(text[:at] + new + text[at:])


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> pathlib.Path:
  """A folder with a copy of the library, two of its files edited as the page says."""
  folder = tmp_path_factory.mktemp("library")
  shutil.copytree(ROOT / "coa_jax", folder / "coa_jax")
  functions, spec, tool, line = blocks()
  protocol = folder / "coa_jax" / "protocol" / "tools.py"
  edit(protocol, TABLE, functions + "\n\n")
  edit(protocol, LAST_ROW, spec + ",")
  tools = folder / "coa_jax" / "tools" / "tools.py"
  edit(tools, "# Tag of a row of", tool + "\n\n")
  edit(tools, LAST_LINE, line, after=True)
  return folder


def test_the_example_is_a_tool_in_every_room(library):
  path = os.pathsep.join([str(library), str(ROOT)])
  done = subprocess.run(
    [sys.executable, "-c", PLAY],
    env=os.environ | {"PYTHONPATH": path},
    cwd=library,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


def test_a_tag_with_a_row_and_no_class_is_refused_by_name(library):
  program = (
    "from coa_jax.tools import tools\n"
    "del tools.TOOLS['convert']\n"
    "tools.ToolsConfig(tools=('convert',))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(library), str(ROOT)])},
    cwd=library,
    capture_output=True,
    text=True,
  )
  assert "tools: no tool 'convert'; there are wiki_search" in done.stderr

"""The examples in docs/extending.md work in a copy of the library."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TABLE = "# Tag -> its row, in prompt order"
LAST_ROW = "  )\n}\n"
LAST_LINE = "  FUNCTION_TAG: FunctionsTool,\n"
# Runs in the copy with the example tool. Each part checks another reader of the
# tools' table.
PLAY = r"""
import random
from coa_jax.data.importers.calls import translate
from coa_jax.protocol import prompts, roles, tokenizer_training, tokens
from coa_jax.protocol.grammar.language import compile_grammar
from coa_jax.protocol.parser import ParseVerdict, parse
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
  assert read.verdict == (ParseVerdict.OK if fits else ParseVerdict.MALFORMED), read
  assert allows(grammar, (call, end)) == fits, body
assert roles.escape("<convert>") == "&lt;convert>"

assert translate("Unit_Converter", {"query": "1 m in ft"}, {}).tag == "convert"
drawn = [draw_naming(variant, random.Random(n)) for n in range(20)]
assert {d.names["convert"] for d in drawn} == {"convert", "units"}
for d in drawn:
  form = d.formats["convert"]
  assert form.read(form.write("3 km in m")) == "3 km in m"

tokenizer = tokenizer_training.train_tokenizer(["some text"] * 3, 400)
assert tokenizer.encode("<convert></convert>") == [398, 399]
"""


# The same for the example agent: each part checks another reader of its name.
AGENT = r"""
from coa_jax.data.importers.importers import Importer
from coa_jax.protocol import prompts, roles, tokenizer_training
from coa_jax.protocol.grammar.language import compile_grammar
from coa_jax.protocol.parser import ParseVerdict, parse
from coa_jax.report.page import role_kinds, static_text
from coa_jax.rollout.types import RolloutConfig

variant = roles.get_variant(RolloutConfig(variant="research").variant)
said = prompts.instructions(variant)
assert "- <summary> ...</summary>: say in a sentence what is known by now." in said
assert "- after wiki_search: summary" in said

def text(*names):
  spans = [roles.wrap(name, "x") for name in names]
  return "".join(spans).replace("</wiki_search>", "</wiki_search>" + SAW)

SAW = roles.wrap("observation", "o")
ASKS = ("think", "wiki_search")
cases = (
  ((*ASKS, "summary", "answer"), True),
  ((*ASKS, "summary", *ASKS, "summary", "think", "answer"), True),
  ((*ASKS, "answer"), False),
  (("summary", "answer"), False),
  ((*ASKS, "summary", "summary", "answer"), False),
)
grammar = compile_grammar(variant)
for names, fits in cases:
  verdict = parse(text(*names), variant).verdict
  assert verdict == (ParseVerdict.OK if fits else ParseVerdict.ILLEGAL_TRANSITION)
  state = 0
  for n, turn in enumerate(text(*names).split(SAW)):
    state = grammar.resume_S[state] if n and state >= 0 else state
    for b in turn.encode():
      state = grammar.next_SX[state, b] if state >= 0 else -1
  assert (state >= 0 and bool(grammar.ends_S[state])) == fits, names
alone = roles.get_variant("research-summary")
assert parse(text(*ASKS, "answer"), alone).ok

row = {"instruction": "Who?", "output": text(*ASKS, "summary", "answer")}
_, trajectory = Importer("alpaca", variant).read(0, "f:1", row)
roles_read = [s.role for s in trajectory.segments if s.author == "policy"]
assert roles_read == [*ASKS, "summary", "answer"], roles_read

tokenizer = tokenizer_training.train_tokenizer(["some text"] * 3, 400)
assert len(tokenizer.encode("<summary></summary>")) == 2
assert roles.escape("<summary>") == "&lt;summary>"
assert role_kinds()["summary"] == "summary"
assert ".r-summary { --c: var(--summary); }" in static_text("style.css")
"""


# The same for all other sections.
USE = r"""
import json, math, pathlib
import jax, jax.numpy as jnp, numpy as np
import myrewards
from coa_jax.data.importers.importers import Importer, detect
from coa_jax.learner import batch as batching
from coa_jax.learner.algorithms import LossConfig, preset
from coa_jax.learner.policy_loss import policy_loss
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.convert import ConvertConfig

with Grader(RewardConfig(graders={"ours": "myrewards:near"})) as grader:
  task, empty = Task("t", "How many?", ("10",), source="ours"), Trajectory("t", 0)
  for answer, value in (("10", 1.0), ("9", 0.9), ("ten", 0.0), (None, 0.0)):
    got = grader.answer(task, answer, empty)
    assert got.answer == value, (answer, got)
  assert grader.answer(task, "9", empty).parts == {"part_calls": 0.0}

path = pathlib.Path("strategyqa.jsonl")
path.write_text(json.dumps({"qid": "s", "question": "?", "answer": True, "facts": []}))
(read,) = load_tasks(path)
assert (read.id, read.answers, read.source) == ("s", ("yes",), "strategyqa"), read

row = {
  "question": "Where is Paris?",
  "log": [
    {"call": "search", "arguments": {"query": "Paris"}, "gave": "Paris is in France."}
  ],
  "final": "France",
}
assert detect(row) == "mylog"
alone = get_variant("unified-plan-reflection-suggested_answer-double_check")
importer = Importer("mylog", alone, convert=ConvertConfig(missing_think="Go on."))
asked, trajectory = importer.read(0, "f:1", row)
assert asked.question == "Where is Paris?"
assert "Paris is in France." in trajectory.text
assert "<answer> France</answer>" in trajectory.text

config = LossConfig(**preset("spo")["loss"])
batch = batching.empty(1, 2).replace(
  segment_BT=np.array([[1, 1]]),
  loss_mask_BT=np.ones((1, 2), np.float32),
  advantage_BT=np.array([[1.0, -2.0]], np.float32),
)
logp = jnp.log(jnp.array([[1.1, 1.5]]))
value, sums = policy_loss(config, logp, batch)
by_hand = -(1.1 - 0.01 / 0.4) - (-3.0 - 2 * 0.25 / 0.4)
assert math.isclose(float(value), by_hand, rel_tol=1e-5), (value, by_hand)
assert float(sums["clipped"]) == 1
"""


def section(heading: str) -> str:
  """Returns the page's text below a level-2 heading."""
  text = (ROOT / "docs" / "extending.md").read_text()
  return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks() -> list[str]:
  """Returns the code blocks in the section on tools."""
  code = r"^```python\n(.*?)^```$"
  return re.findall(code, section("A tool"), re.MULTILINE | re.DOTALL)


def apply(patch: str, path: pathlib.Path) -> None:
  """Applies a diff without line numbers; its old lines must occur exactly once."""
  lines = patch.splitlines(keepends=True)
  old = "".join(line[1:] for line in lines if line[0] in " -")
  new = "".join(line[1:] for line in lines if line[0] in " +")
  text = path.read_text()
  assert text.count(old) == 1, f"{path} has {text.count(old)} times\n{old}"
  path.write_text(text.replace(old, new))


def edit(path: pathlib.Path, anchor: str, new: str, after: bool = False) -> None:
  """Inserts text before (or after) the last occurrence of `anchor`."""
  text = path.read_text()
  at = text.rindex(anchor) + (len(anchor) if after else 0)
  path.write_text(text[:at] + new + text[at:])


def run_in(folder: pathlib.Path, program: str) -> subprocess.CompletedProcess[str]:
  """Runs a program with the copy of the library in `folder`."""
  path = os.pathsep.join([str(folder), str(ROOT)])
  return subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | {"PYTHONPATH": path},
    cwd=folder,
    capture_output=True,
    text=True,
  )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> pathlib.Path:
  """A folder with a copy of the library and, in two of its files, the example tool."""
  folder = tmp_path_factory.mktemp("library")
  shutil.copytree(ROOT / "coa_jax", folder / "coa_jax")
  functions, spec, tool, line = blocks()
  protocol = folder / "coa_jax" / "protocol" / "tools.py"
  edit(protocol, TABLE, functions + "\n\n")
  edit(protocol, LAST_ROW, spec + ",")
  tools = folder / "coa_jax" / "tools" / "tools.py"
  edit(tools, "# Tag in `protocol.tools.SPECS`", tool + "\n\n")
  edit(tools, LAST_LINE, line, after=True)
  return folder


def test_the_example_is_a_tool_in_every_room(library):
  done = run_in(library, PLAY)
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_example_needs_no_change_of_a_test(library):
  shutil.copytree(ROOT / "tests", library / "tests")
  for name in ("README.md", "pyproject.toml"):
    shutil.copy(ROOT / name, library)
  names = ("parser", "tag_ids", "tool_naming", "prompts")
  command = [sys.executable, "-m", "pytest", "-n", "0"]
  done = subprocess.run(
    command + [f"tests/protocol/test_{name}.py" for name in names],
    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(library), str(ROOT)])},
    cwd=library,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout


def test_a_tag_with_a_row_and_no_class_is_refused_by_name(library):
  program = (
    "from coa_jax.tools import tools\n"
    "del tools.TOOLS['convert']\n"
    "tools.ToolsConfig(tools=('convert',))"
  )
  done = run_in(library, program)
  assert "tools: no tool 'convert'; there are wiki_search" in done.stderr


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> pathlib.Path:
  """A folder with a copy of the library and all other sections' examples."""
  folder = tmp_path_factory.mktemp("changed")
  shutil.copytree(ROOT / "coa_jax", folder / "coa_jax")
  headings = ("A role agent", "A reward", "A task source", "An importer", "A loss")
  for heading in headings:
    path = None
    for name, kind, code in re.findall(
      r"^In `([\w./]+)`(?:, the name)?:$|^```(diff|python)\n(.*?)^```$",
      section(heading),
      re.MULTILINE | re.DOTALL,
    ):
      if name:
        path = folder / name
      elif kind == "diff":
        apply(code, path)
      else:
        path.write_text(code)
  return folder


def test_the_example_is_an_agent_in_every_room(changed):
  done = run_in(changed, AGENT)
  assert done.returncode == 0, done.stderr


def test_reward_source_importer_and_loss_work_as_the_page_says(changed):
  done = run_in(changed, USE)
  assert done.returncode == 0, done.stderr

"""A perfect and a wrong model on every benchmark, through `coa benchmark`.

The model and the judge are scripted servers on loopback; readers, tools, jail, scorers
and table are real. The wrong model's answers are near misses.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import toy
from chat_server import ChatServer
from rollout.scripted_vllm import ScriptedVllm

from coa_jax.data import suites
from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.trajectory import write_jsonl
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parents[2]
CASES = [
  json.loads(line)
  for line in (ROOT / "tests/fixtures/suite_rows.jsonl").read_text().splitlines()
]
TOOLS = {
  "math": ("code",),
  "code": ("code",),
  "mhqa": ("wiki_search",),
  "web": ("web_search",),
}
QUESTIONS = (
  "question",
  "Question",
  "problem",
  "question_content",
  "description",
  "query",
  "Prompt",
)


def question_of(case: dict) -> str:
  """The part of the question that the prompt surely contains."""
  row = case["row"]
  names = [name for name in QUESTIONS if name in row]
  return row[names[0]] if names else row["prompt"].strip().splitlines()[-1]


def evidence_of(case: dict) -> str:
  return f"evidence for {case['set']}"


def encrypted(text: str, key: bytes) -> str:
  """Encrypts as BrowseComp and xbench do."""
  pairs = zip(text.encode(), itertools.cycle(key), strict=False)
  return base64.b64encode(bytes(a ^ b for a, b in pairs)).decode()


def write_set(folder: pathlib.Path, case: dict) -> None:
  """Writes a set of one row, in its published file."""
  path = folder / case["file"]
  path.parent.mkdir(parents=True, exist_ok=True)
  row = dict(case["row"])
  if case["set"] in ("browsecomp", "xbench"):  # others have a canary in clear
    canary = row["canary"].encode()
    key = hashlib.sha256(canary).digest() if case["set"] == "browsecomp" else canary
    for name in {"problem", "prompt", "answer"} & set(row):
      row[name] = encrypted(row[name], key)
  if path.suffix == ".parquet":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  elif path.suffix in (".csv", ".tsv"):
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open("w", newline="") as f:
      csv.writer(f, delimiter=delimiter).writerows([list(row), list(row.values())])
  else:
    path.write_text(json.dumps(row) + "\n")


class Model(ScriptedVllm):
  """Uses a tool, then answers: rightly only if the tool answered."""

  def __init__(self, quality: str):
    super().__init__(toy.tokenizer())
    self.quality = quality

  def sample(self, body: dict) -> dict:
    ids = body["prompt"]
    text = self.tokenizer.decode(ids)
    (case,) = [one for one in CASES if question_of(one) in text]
    new = self.tokenizer.encode(self.turn(case, text))
    assert len(new) <= body["max_tokens"]
    logps = {"token_logprobs": [-0.1] * len(new)}
    return {"choices": [{"prompt_token_ids": ids, "token_ids": new, "logprobs": logps}]}

  def turn(self, case: dict, text: str) -> str:
    think = roles.wrap(roles.THINK, "work it out")
    _, begun, observation = text.partition(roles.open_tag(roles.OBSERVATION))
    if begun:
      shown = evidence_of(case) in observation
      answer = case[self.quality] if shown else "the tool failed"
      return think + roles.wrap(roles.ANSWER, answer)
    (tool,) = TOOLS[next(s.agent for s in suites.SETS if s.name == case["set"])]
    call = evidence_of(case)
    if tool == "code":
      # Printed backwards, so that only a program that ran shows it.
      call = tool_bodies.render_code(f"print({call[::-1]!r}[::-1])")
    return think + roles.wrap(tool, call)


class Judge(ChatServer):
  """Calls an answer right that contains an accepted one."""

  def answer(self, body: dict) -> str:
    text = body["messages"][-1]["content"]
    if text.startswith("Judge whether"):  # HLE's words
      response = text.partition("[response]: ")[2].partition("\n\nYour judgement")[0]
      accepted = re.search(r"\n\[correct_answer\]: (.*)\n", text)[1]
      verdict = "yes" if accepted in response else "no"
      return f"extracted_final_answer: x\ncorrect: {verdict}\nconfidence: 90%"
    data = json.loads(re.search(r"^\{.*?^\}", text, re.M | re.S)[0])
    predicted = data["predicted_answer"]
    labels = map(re.escape, data["labelled_answers"])
    right = any(re.search(rf"\b{label}\b", predicted) for label in labels)
    judgement = "correct" if right else "incorrect"
    return json.dumps({"rationale": "as told", "judgement": judgement})


CONFIG = """
import ml_collections

def get_config(agent):
  config = ml_collections.ConfigDict()
  config.init = {init!r}
  config.model = dict(remat="none")
  config.rollout = dict(
    variant=agent, style="brief", slots=4, max_len=2048, max_calls=4,
    tool_seconds=120.0, seed=1,
  )
  config.vllm = dict(url={url!r}, folder={init!r} + "_served_" + agent)
  config.tools = dict(
    tools={tools!r}[agent], sandbox={backend!r}, timeout_s=60.0, corpus={corpus!r}
  )
  config.reward = dict(code=dict(sandbox={backend!r}, test_s=60.0, total_s=300.0))
  if agent in ("web", "mhqa"):
    config.reward.graders = dict(qa="judge")
    style = "hle" if agent == "web" else "verdict"
    chat = dict(base_url={judge!r}, model="judge")
    config.reward.judge = dict(chat=chat, style=style)
  # Both ways to count: one greedy attempt, and the mean of samples.
  samples = 2 if agent in ("math", "web") else 0
  config.eval = dict(greedy=not samples, samples=samples, k=(1, 2) if samples else (3,))
  if agent == "web":
    config.eval.selector = dict(chat=chat)
  return config
"""


def run(folder: pathlib.Path, suite: str, quality: str) -> list[dict[str, Any]]:
  """Plays a suite; returns the card's rows."""
  data = folder / "data"
  names = suites.SUITES[suite]
  for case in CASES:
    if case["set"] in names:
      write_set(data, case)
  pages = [{"id": c["set"], "title": c["set"], "text": evidence_of(c)} for c in CASES]
  write_jsonl(folder / "corpus.jsonl", pages)
  toy.save_policy(str(folder / "model"), toy.params())
  with Model(quality) as model, Judge() as judge:
    config = folder / "config.py"
    config.write_text(
      CONFIG.format(
        init=str(folder / "model"),
        url=model.url,
        judge=judge.url,
        tools=TOOLS,
        backend=BACKEND,
        corpus=str(folder / "corpus.jsonl"),
      )
    )
    out = folder / "out"
    command = [sys.executable, "-m", "coa_jax.cli.main", "benchmark"]
    command += [f"--suite={suite}", f"--data={data}", f"--workdir={out}"]
    command += ["--", f"--config={config}:{{agent}}"]
    # No GPU memory for scripted models.
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
      command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
  assert done.returncode == 0, done.stderr[-3000:]
  rows = json.loads((out / "benchmark.json").read_text())["rows"]
  assert {row["set"] for row in rows if "average" not in row["set"]} == set(names)
  return rows


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["afm", "more"])
@pytest.mark.parametrize(("quality", "score"), [("right", 100.0), ("wrong", 0.0)])
def test_every_set_gives_the_scripted_score(tmp_path, suite, quality, score):
  rows = run(tmp_path, suite, quality)
  assert {row["set"]: row["score"] for row in rows} == {r["set"]: score for r in rows}
  assert all(row["calls"] == 1 for row in rows)
  assert {row["chosen"] for row in rows if row["agent"] == "web"} <= {score}
  assert {row["recall"] for row in rows if row["set"] == "browsecomp_plus"} <= {100}


def test_every_set_has_a_row():
  assert sorted(case["set"] for case in CASES) == sorted(s.name for s in suites.SETS)
  assert all(case["right"] != case["wrong"] for case in CASES)

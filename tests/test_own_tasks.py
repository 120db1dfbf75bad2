"""A user's own tasks: a full evaluation for every schema and file format."""

from __future__ import annotations

import json
import pathlib

import ml_collections
import pyarrow
import pyarrow.parquet
import pytest
import toy
from chat_server import ChatServer

from coa_jax import evaluate
from coa_jax.model.hf.io import save_model
from coa_jax.protocol.trajectory import Status, Trajectory, read_trajectories
from coa_jax.runtime.shard import Shard
from tests.backend import BACKEND

# Two tasks in this project's schema; RELEASED has them in the released RL schema.
OURS = [
  {"id": "sum", "question": "2 + 3", "answers": ["5", "five"], "kind": "math"},
  {"id": "capital", "question": "capital of Ur", "answers": ["Uruk"], "kind": "qa"},
]


def released(index: str, question: str, truth: str, ability: str) -> dict:
  """A row with the columns of the released parquet files."""
  head = "You can only use these functions.\n1. <think>...</think>"
  return {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": f"{head}\n\nQuestion: {question}"}],
    "ability": ability,
    "reward_model": {"style": "rule", "ground_truth": truth},
    "extra_info": {
      "need_tools_kwargs": True,
      "index": f"mine-{index}",
      "question": question,
      "answer": ["not read: the ground truth is"],
      "tools_kwargs": {"wiki_search": {"create_kwargs": {"ground_truth": truth}}},
    },
  }


RELEASED = [
  released("sum", "2 + 3", "5", "math"),
  released(
    "capital", "capital of Ur", '{"target": ["Uruk"], "question": "capital of Ur"}', ""
  ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, actor, tokenizer) -> str:
  """The folder of a model trained on both answers."""
  folder = str(tmp_path_factory.mktemp("model"))
  save_model(folder, toy.MODEL, actor.params)
  tokenizer.save(folder)
  return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
  """The path of a one-page corpus."""
  path = tmp_path_factory.mktemp("corpus") / "pages.jsonl"
  page = {"id": "0", "title": "Ur", "text": "Ur: its capital is Uruk."}
  path.write_text(json.dumps(page) + "\n")
  return str(path)


def write(path: pathlib.Path, rows: list[dict]) -> str:
  """Writes rows in the format of the path's suffix; returns the path."""
  if path.suffix == ".parquet":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  elif path.suffix == ".json":
    path.write_text(json.dumps(rows, indent=1))
  else:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def journey(model: str, corpus: str, uri: str) -> ml_collections.ConfigDict:
  """The config of a greedy evaluation."""
  config = ml_collections.ConfigDict()
  config.init = model
  config.model = dict()
  config.rollout = dict(
    variant="unified", style="brief", slots=2, window=16, max_len=toy.MAX_LEN
  )
  config.tools = dict(tools=toy.TOOLS, corpus=corpus, top_k=1, sandbox=BACKEND)
  config.tasks = dict(uri=uri)
  config.eval = dict(greedy=True, samples=0)
  return config


@pytest.mark.slow
@pytest.mark.parametrize(
  ("suffix", "rows", "ids"),
  [
    (".jsonl", OURS, ["sum", "capital"]),
    (".json", OURS, ["sum", "capital"]),
    (".parquet", RELEASED, ["mine-sum", "mine-capital"]),
  ],
)
def test_tasks_of_any_kind_are_played_and_graded(
  tmp_path, model, corpus, suffix, rows, ids
):
  config = journey(model, corpus, write(tmp_path / f"tasks{suffix}", rows))
  results = evaluate.run(config, str(tmp_path / "out"))
  assert results["tasks"] == 2
  assert results["pass1_greedy"] == results["protocol_ok"] == 1.0
  played = read_trajectories(tmp_path / "out" / "greedy.jsonl")
  assert [t.task_id for t in played] == ids
  assert [t.meta["question"] for t in played] == ["2 + 3", "capital of Ur"]
  assert all(t.reward == 1.0 and len(t.calls) == 1 for t in played)


@pytest.mark.slow
def test_a_judge_is_not_asked_again_by_a_run_that_starts_again(tmp_path, model, corpus):
  rows, requests = [dict(row, answers=["none such"], kind="qa") for row in OURS], []

  def answer(body: dict) -> str:
    requests.append(body)
    return '{"judgement": "correct"}'

  config = journey(model, corpus, write(tmp_path / "tasks.jsonl", rows))
  with ChatServer(lambda agent, messages: None) as server:
    server.answer = answer
    chat = dict(base_url=server.url, model="m")
    config.reward = dict(graders=dict(qa="judge"), judge=dict(chat=chat))
    for _ in range(2):
      assert evaluate.run(config, str(tmp_path / "w"))["pass1_greedy"] == 1.0
      (tmp_path / "w" / "greedy.jsonl").unlink()
  assert len(requests) == 2


def test_an_episode_ended_by_infrastructure_is_played_again(tmp_path):
  path = tmp_path / "greedy.part.jsonl"
  lost, played = (
    Trajectory("x", [], sample=n, status=status)
    for n, status in enumerate((Status.INFRASTRUCTURE, Status.ENDED))
  )
  part = evaluate.AttemptLog(str(path), Shard(0, 1))
  list(part.added(iter([(0, lost), (1, played)])))
  again = evaluate.AttemptLog(str(path), Shard(0, 1))
  assert list(again.ended) == [(1, 1)]
  assert len(path.read_text().splitlines()) == 2

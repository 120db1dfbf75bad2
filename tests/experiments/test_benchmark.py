"""`coa benchmark`: a suite's files, one evaluation per agent, one table."""

from __future__ import annotations

import csv
import json
import pathlib
import subprocess
import sys

import pytest
import toy
from chat_server import ChatServer

from coa_jax.cli import benchmark
from coa_jax.data import suites
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  ToolCall,
  Trajectory,
  write_jsonl,
)
from coa_jax.runtime.config import ConfigError

ROOT = pathlib.Path(__file__).parents[2]


def write(path: pathlib.Path, *rows: dict) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path) -> pathlib.Path:
  """Questions that the toy policy answers: 2 of 2 rightly, and 0 of 1."""
  folder = tmp_path / "data"
  right = [
    {"problem": q, "answer": a} for q, a in (("2 + 3", "5"), ("4 * 4 + 1", "17"))
  ]
  write(folder / "AIME24.jsonl", *right)
  write(folder / "math-500" / "test.jsonl", {"problem": "2 + 3", "answer": "6"})
  write(folder / "math-500" / "train.jsonl", {"problem": "x", "answer": "1"})
  write(folder / "nq_corpus.jsonl", {"id": "1", "text": "no question"})
  # Equal by GAIA's rule for numbers, not as text.
  gaia = {"Question": "2 + 3", "Final answer": "5.0", "Level": 1}
  write(folder / "gaia.jsonl", gaia)
  return folder


def test_files_are_found_by_their_names(data):
  found, missing = benchmark.choose_files("afm", str(data), [])
  names = {name: str(pathlib.Path(p).relative_to(data)) for name, p in found.items()}
  assert names == {
    "aime24": "AIME24.jsonl",
    "math500": "math-500/test.jsonl",
    "gaia": "gaia.jsonl",
  }
  assert {"aime25", "nq", "hle"} <= {one.name for one in missing}
  own = str(data / "gaia.jsonl")
  found, _ = benchmark.choose_files("math", str(data), [f"amc23={own}"])
  assert found["amc23"] == own and "gaia" not in found


@pytest.mark.parametrize(
  ("files", "words"),
  [
    (["aim24=x"], "--files=aim24=x: write NAME=PATH"),
    (["aime24=nowhere"], "nowhere does not exist"),
    ([], r"none of suite mhqa is there: nq .RUC-NLPIR"),
  ],
)
def test_files_that_are_not_there_are_refused(data, files, words):
  with pytest.raises(ConfigError, match=words):
    benchmark.choose_files("mhqa", str(data), files)


def test_test_files_come_before_others(tmp_path):
  names = ["nq/dev.jsonl", "nq/test.jsonl", "nq/train.jsonl", "hle/data/test-0.parquet"]
  names += ["GAIA/2023/test/metadata.parquet"]
  names += [f"GAIA/2023/validation/metadata{n}.parquet" for n in ("", ".level1")]
  names += [
    f"OlympiadBench/{n}/{n}.parquet" for n in ("OE_MM_x", "OE_TO_maths_en_COMP")
  ]
  for name in names:
    write(tmp_path / name)
  found, _ = benchmark.choose_files("afm", str(tmp_path), [])
  assert {n: str(pathlib.Path(p).relative_to(tmp_path)) for n, p in found.items()} == {
    "nq": names[1],
    "hle": names[3],
    "gaia": names[5],
    "olympiadbench": names[-1],
  }


def test_a_file_in_parts_is_read_whole(tmp_path):
  parts = [f"browsecomp_plus/data/test-0000{n}-of-00002.parquet" for n in (0, 1)]
  parts += [f"livecodebench_v5/test{n}.jsonl" for n in ("", "2", "3")]
  for name in [*parts, "browsecomp_plus/data/test-00000-of-00003.parquet"]:
    write(tmp_path / name)
  found, _ = benchmark.choose_files("more", str(tmp_path), [])
  assert found["browsecomp_plus"].split(",") == [str(tmp_path / p) for p in parts[:2]]
  found, _ = benchmark.choose_files("code", str(tmp_path), [])
  assert found["livecodebench_v5"].split(",") == [str(tmp_path / p) for p in parts[2:]]


def test_training_rows_are_named(tmp_path):
  names = ["musique_train.json", "hotpotqa/dev.json", "aime_2024/train-0.parquet"]
  for name in names:
    write(tmp_path / name)
  found, _ = benchmark.choose_files("afm", str(tmp_path), [])
  assert set(found) == {"musique", "hotpotqa", "aime24"}
  assert suites.training_sets(found) == ["musique"]


def test_training_data_is_compared_with_each_set(data, tmp_path):
  found, _ = benchmark.choose_files("afm", str(data), [])
  seen = "How many lamps did the mayor of Tarn buy in 1931?"
  write(data / "AIME24.jsonl", {"problem": seen, "answer": "5"})
  page = Segment(Author.TOOL, "observation", f"A page: {seen} It says five.")
  rows = [
    Trajectory("a", meta={"question": "2 + 3"}),  # equal to a short one, of two sets
    Trajectory("b", [page], meta={"question": "Who?"}),
    Trajectory("c", meta={"question": "What is 2 + 3, and why?"}),
  ]
  write_jsonl(tmp_path / "sft.jsonl", rows)
  write(tmp_path / "rl.jsonl", {"question": seen.upper(), "answer": "5"})
  files = [str(tmp_path / name) for name in ("sft.jsonl", "rl.jsonl")]
  table = benchmark.overlap_table(files, found, 8)
  counts = [(row["set"], row["rows"], row["example"]) for row in table.rows]
  assert counts[:3] == [("aime24", 1, "b"), ("math500", 1, "a"), ("gaia", 1, "a")]
  assert [row["rows"] for row in table.rows[3:]] == [1, 0, 0]
  assert table.rows[0]["share"] == pytest.approx(100 / 3)


def test_every_suite_names_known_sets():
  known = {s.name: s for s in suites.SETS}
  assert len(known) == len(suites.SETS)
  for names in suites.SUITES.values():
    assert names and set(names) <= set(known)
  assert all(0 < v < 100 for s in suites.SETS for v in s.paper.values())


def test_calls_to_blocked_sites_are_counted(tmp_path):
  results = [
    "1. [A](https://a.example)\na (results on blocked sites, not shown: 3)",
    "1. [A](https://a.example)\na\n(results on blocked sites, not shown: 3)\nand more",
    "1. [A](https://a.example)\na\n(results on blocked sites, not shown: 3)",
    "(results on blocked sites, not shown: 1)",
    "the site hf.co is blocked",  # says a page
  ]
  t = Trajectory("a", meta={"source": "gaia"})
  t.calls = [ToolCall("web_search", "x", result) for result in results]
  fault = "the site hf.co is blocked"
  t.calls.append(ToolCall("crawl_page", "x", fault, CallStatus.MODEL))
  write_jsonl(tmp_path / "greedy.jsonl", [t])
  assert benchmark.read_attempts(str(tmp_path)) == ({"gaia": 0.0}, 3)


CONFIG = """
import ml_collections

def get_config(arg):
  assert arg in ("math", "web")
  config = ml_collections.ConfigDict()
  config.init = {init!r}
  config.model = dict(remat="none")
  config.rollout = dict(style="brief", slots=4, max_len=128, seed=1)
  config.tools = dict(tools=("code",))
  config.eval = dict(greedy=True, samples=0)
  return config
"""


def without_seconds(workdir: pathlib.Path) -> dict:
  """A run's card without the only figure that another run may change."""
  card = json.loads((workdir / "benchmark.json").read_text())
  for row in card["rows"]:
    assert row.pop("seconds") > 0
  return card


@pytest.mark.slow
def test_a_suite_in_one_table(data, tmp_path):
  toy.save_policy(str(tmp_path / "model"), toy.actor().params)
  config = tmp_path / "bench.py"
  config.write_text(CONFIG.format(init=str(tmp_path / "model")))
  out = tmp_path / "out"
  command = [sys.executable, "-m", "experiments.benchmark", f"--data={data}"]
  command += [f"--workdir={out}", "--", f"--config={config}:{{agent}}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert "missing: aime25; published as yentinglin/aime_2025" in done.stderr
  card = json.loads((out / "benchmark.json").read_text())
  rows = card["rows"]
  agent = card["agents"]["math"]
  assert (agent["judge"], agent["blocked_calls"]) == (None, 0)
  assert set(agent["inputs"]) == {"tasks", "tools.corpus", "init"}
  scores = {row["set"]: (row.get("score"), row["tasks"]) for row in rows}
  assert scores == {
    "aime24": (100.0, 2),
    "math500": (0.0, 1),
    "math, average": (50.0, 3),
    "gaia": (100.0, 1),
  }
  assert rows[0]["paper_7b"] == 51.9 and rows[0]["metric"] == "greedy"
  with (out / "benchmark.csv").open() as f:
    assert len(list(csv.reader(f))) == 5
  assert "| aime24 | 2 | 100.0 |" in (out / "benchmark.md").read_text()
  assert "<td>aime24</td>" in (out / "benchmark.html").read_text()
  # The same command finds everything done, and writes the same card.
  card = (out / "benchmark.json").read_bytes()
  again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert again.returncode == 0 and (out / "benchmark.json").read_bytes() == card
  # In two shards; the last one writes the table.
  cut = tmp_path / "cut"
  for number in (0, 1):
    assert not (cut / "benchmark.json").exists()
    part = [*command[:4], f"--workdir={cut}", f"--shard={number}/2", *command[5:]]
    done = subprocess.run(part, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
  assert without_seconds(cut) == without_seconds(out)


@pytest.mark.slow
def test_a_suite_over_an_endpoint(data, tmp_path):
  command = [sys.executable, "-m", "experiments.benchmark", "--suite=math"]
  command += [f"--data={data}", f"--workdir={tmp_path / 'out'}", "--"]
  command += ["--config=configs/evaluate_chat.py:endpoint"]
  with ChatServer() as server:
    server.faults += ["\\boxed{5}"] * 3
    command += [f"--config.agent.endpoint.base_url={server.url}"]
    command += ["--config.agent.endpoint.model=big"]
    done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=False
    )
  assert done.returncode == 0, done.stderr
  card = json.loads((tmp_path / "out/benchmark.json").read_text())
  (agent,) = card["agents"].values()
  assert agent["model"] == "big" and set(agent["inputs"]) == {"tasks", "tools.corpus"}
  scores = {row["set"]: (row["score"], row["tokens"]) for row in card["rows"]}
  # One of AIME's two answers is 5, MATH500's is 6; 100 tokens asked, 7 replied.
  assert scores == {
    "aime24": (50.0, 107),
    "math500": (0.0, 107),
    "math, average": (25.0, 107),
  }

"""A sweep runs every combination once, goes on, is shared out, and is compared."""

from __future__ import annotations

import os

import pytest

from coa_jax.config import ConfigError
from experiments import compare, sweep

# A journey in miniature: its loss is known, and it fails where it is told to.
JOURNEY = """
import json, os, sys
values = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
folder = values.pop("workdir")
lr = float(values["config.optim.lr"])
seed = int(values["config.data.seed"])
with open(os.environ["RUNS"], "a") as f:
  f.write(os.path.basename(folder) + "\\n")
if lr == 9:
  sys.exit(2)
os.makedirs(folder)
record = {"optim": {"lr": lr}, "data": {"seed": seed, "rows": 8}}
first = {"stage": "sft", "step": 1, "seconds": 1, "loss": lr + seed + 1}
rows = [first, {**first, "step": 2, "loss": lr + seed}]
with open(folder + "/config.json", "w") as f:
  json.dump({"config": record, "inputs": {}}, f)
with open(folder + "/metrics.jsonl", "w") as f:
  f.writelines(json.dumps(row) + "\\n" for row in rows)
with open(folder + "/results.json", "w") as f:
  json.dump({"loss": lr + seed, "name": "x"}, f)
"""


@pytest.fixture
def journey(tmp_path, monkeypatch):
  """Makes `python -m toy_journey` possible; returns what reads which runs began."""
  (tmp_path / "toy_journey.py").write_text(JOURNEY)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setenv("RUNS", str(tmp_path / "runs.txt"))
  monkeypatch.setitem(sweep.SEED_FIELDS, "toy_journey", "data.seed")
  log = tmp_path / "runs.txt"
  return lambda: log.read_text().split() if log.exists() else []


GRID = [("optim.lr", ["1", "2"])]


def test_a_sweep_runs_each_combination_once_and_grows(journey, tmp_path):
  workdir = str(tmp_path / "sweep")
  os.makedirs(workdir)
  folders = sweep.sweep(workdir, ["toy_journey"], GRID, seeds=2)
  assert journey() == [
    "optim.lr=1,data.seed=0",
    "optim.lr=1,data.seed=1",
    "optim.lr=2,data.seed=0",
    "optim.lr=2,data.seed=1",
  ]
  more = sweep.sweep(workdir, ["toy_journey"], GRID, seeds=3)
  assert len(more) == 6 and len(journey()) == 6 and set(folders) < set(more)
  with pytest.raises(ConfigError, match="holds a sweep of"):
    sweep.sweep(workdir, ["toy_journey", "--config.data.rows=4"], GRID)


def test_shards_run_everything_and_nothing_twice(journey, tmp_path):
  workdir = str(tmp_path / "sweep")
  os.makedirs(workdir)
  for index in range(3):
    sweep.sweep(workdir, ["toy_journey"], GRID, seeds=2, shard=(index, 3))
  assert len(journey()) == len(set(journey())) == 4


def test_a_run_that_fails_is_named_and_the_others_are_done(journey, tmp_path):
  workdir = str(tmp_path / "sweep")
  os.makedirs(workdir)
  grid = [("optim.lr", ["9", "1"])]
  with pytest.raises(
    ConfigError, match=r"2 of 4 runs failed: .*optim.lr=9,data.seed=0"
  ):
    sweep.sweep(workdir, ["toy_journey"], grid, seeds=2)
  assert os.path.exists(f"{workdir}/optim.lr=1,data.seed=1/results.json")


def test_runs_are_grouped_over_seeds_and_compared(journey, tmp_path, capsys):
  workdir = tmp_path / "sweep"
  workdir.mkdir()
  sweep.sweep(str(workdir), ["toy_journey"], GRID, seeds=2)
  runs = [compare.read(path) for path in compare.find([str(workdir)])]
  groups = compare.group(runs)
  assert {name: len(runs) for name, runs in groups.items()} == {
    "optim.lr=1.0": 2,
    "optim.lr=2.0": 2,
  }
  # Losses 1 and 2: mean 1.5; t(0.975, 1) = 12.706, and the error of the mean is 0.5.
  rows = compare.table(groups).rows
  assert rows[0]["loss"] == "1.500 \u00b1 6.353"
  page = tmp_path / "compare.html"
  compare.compare([str(workdir)], str(page))
  assert "optim.lr=2.0" in page.read_text() and "<svg" in page.read_text()
  assert "1.500" in capsys.readouterr().out


def test_what_can_not_be_compared_is_named(journey, tmp_path):
  with pytest.raises(FileNotFoundError, match="no run is there"):
    compare.find([str(tmp_path)])
  (tmp_path / "sweep").mkdir()
  sweep.sweep(str(tmp_path / "sweep"), ["toy_journey"], GRID, seeds=1)
  with pytest.raises(ConfigError, match=r"no run has 'los'; did you mean 'loss'\?"):
    compare.compare([str(tmp_path / "sweep")], figures=["los"])


@pytest.mark.parametrize(
  ("text", "values"),
  [
    ("optim.lr=1e-3,3e-3", ["1e-3", "3e-3"]),
    ("config.tools.tools=('code',),('code','web_search')", None),
    ("--config.init=a", ["a"]),
  ],
)
def test_a_grid_is_read(text: str, values):
  field, found = sweep.parse_grid(text)
  assert field in ("optim.lr", "tools.tools", "init")
  assert found == (values or ["('code',)", "('code','web_search')"])


@pytest.mark.parametrize("text", ["optim.lr", "=1,2", "optim.lr=1,,2", ""])
def test_a_grid_that_says_nothing_is_refused(text: str):
  with pytest.raises(ConfigError, match="write FIELD=VALUE"):
    sweep.parse_grid(text)


@pytest.mark.parametrize("text", ["4/4", "a/b", "1", "-1/2", ""])
def test_a_shard_out_of_range_is_refused(text: str):
  with pytest.raises(ConfigError, match="write I/N"):
    sweep.parse_shard(text)

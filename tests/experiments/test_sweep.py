"""A sweep runs every combination once, grows, splits into shards, compares its runs."""

from __future__ import annotations

import json
import os

import pytest

from coa_jax.cli import compare, sweep
from coa_jax.runtime.config import ConfigError
from coa_jax.runtime.shard import Shard

# A miniature stage with a known loss, which fails at lr=9.
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
  """Makes `python -m toy_journey` work; returns a function that lists started runs."""
  (tmp_path / "toy_journey.py").write_text(JOURNEY)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setenv("RUNS", str(tmp_path / "runs.txt"))
  monkeypatch.setitem(sweep.SEED_FIELDS, "toy_journey", "data.seed")
  (tmp_path / "sweep").mkdir()
  log = tmp_path / "runs.txt"
  return lambda: log.read_text().split() if log.exists() else []


GRID = [("optim.lr", ["1", "2"])]


def test_a_sweep_runs_each_combination_once_and_grows(journey, tmp_path):
  workdir = str(tmp_path / "sweep")
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


def test_values_that_differ_in_a_slash_have_their_own_folders(journey, tmp_path):
  grid = [("optim.lr", ["1"]), ("model.path", ["a/b", "a_b"])]
  folders = sweep.sweep(str(tmp_path / "sweep"), ["toy_journey"], grid, seeds=1)
  assert len(set(folders)) == len(journey()) == 2


@pytest.mark.parametrize(
  ("grid", "words"),
  [
    (("optim.lr", ["1e-3", "zzz"]), "--grid: optim.lr=zzz: .*zzz"),
    (("optim.lrr", ["1e-3"]), "--grid: optim.lrr=1e-3: .*did you mean .lr."),
  ],
)
def test_a_field_is_refused_before_the_first_run(tmp_path, grid, words):
  command = ["coa", "sft", "--config=configs/sft_world.py:tiny"]
  (tmp_path / "sweep").mkdir()
  with pytest.raises(ConfigError, match=words):
    sweep.sweep(str(tmp_path / "sweep"), command, [grid])
  assert os.listdir(tmp_path / "sweep") == ["sweep.json"]


def test_shards_run_everything_and_nothing_twice(journey, tmp_path):
  for index in range(3):
    shard = Shard(index, 3)
    sweep.sweep(str(tmp_path / "sweep"), ["toy_journey"], GRID, seeds=2, shard=shard)
  assert len(journey()) == len(set(journey())) == 4


def test_a_run_that_fails_is_named_and_the_others_are_done(journey, tmp_path):
  workdir = str(tmp_path / "sweep")
  grid = [("optim.lr", ["9", "1"])]
  with pytest.raises(
    ConfigError, match=r"2 of 4 runs failed: .*optim.lr=9,data.seed=0"
  ):
    sweep.sweep(workdir, ["toy_journey"], grid, seeds=2)
  assert os.path.exists(f"{workdir}/optim.lr=1,data.seed=1/results.json")


def test_runs_are_grouped_over_seeds_and_compared(journey, tmp_path, capsys):
  workdir = str(tmp_path / "sweep")
  sweep.sweep(workdir, ["toy_journey"], GRID, seeds=2)
  runs = [compare.read(path) for path in compare.find([workdir])]
  groups = compare.group(runs)
  assert {name: len(runs) for name, runs in groups.items()} == {
    "optim.lr=1.0": 2,
    "optim.lr=2.0": 2,
  }
  # Losses 1 and 2: mean 1.5, standard error 0.5; t(0.975, 1) = 12.706.
  rows = compare.table(groups).rows
  assert rows[0]["loss"] == "1.500 \u00b1 6.353"
  page = tmp_path / "compare.html"
  compare.compare([workdir], str(page))
  assert "optim.lr=2.0" in page.read_text() and "<svg" in page.read_text()
  assert "1.500" in capsys.readouterr().out


def test_incomparable_runs_are_named(journey, tmp_path):
  with pytest.raises(FileNotFoundError, match="no run found"):
    compare.find([str(tmp_path)])
  sweep.sweep(str(tmp_path / "sweep"), ["toy_journey"], GRID, seeds=1)
  with pytest.raises(ConfigError, match=r"no run has 'los'; did you mean 'loss'\?"):
    compare.compare([str(tmp_path / "sweep")], figures=["los"])


def a_run(folder, config: dict, results: dict | None = None, rows: list | None = None):
  """Writes a stage's workdir with a model folder in Hugging Face's form."""
  (folder / "model").mkdir(parents=True)
  (folder / "model" / "config.json").write_text('{"model_type": "qwen2"}')
  (folder / "config.json").write_text(json.dumps({"config": config, "inputs": {}}))
  (folder / "results.json").write_text(json.dumps(results or {"seconds": 1.5}))
  lines = "".join(json.dumps(row) + "\n" for row in rows or ())
  (folder / "metrics.jsonl").write_text(lines)
  return str(folder)


def test_a_model_folder_is_no_run(tmp_path):
  one = a_run(tmp_path / "a", {"data": {"seed": 0}})
  two = a_run(tmp_path / "b", {"data": {"seed": 1}})
  assert compare.find([one, two]) == compare.find([str(tmp_path)]) == [one, two]
  with pytest.raises(FileNotFoundError, match="no run found"):
    compare.find([f"{one}/model"])
  (tmp_path / "c").mkdir()
  (tmp_path / "c" / "config.json").write_text("{")
  with pytest.raises(ConfigError, match=r"c/config\.json"):
    compare.compare([str(tmp_path / "c")])


def test_a_glob_may_match_files_and_folders_without_a_run(tmp_path, capsys):
  one = a_run(tmp_path / "a", {"data": {"seed": 0}})
  (tmp_path / "compare.html").write_text("")
  (tmp_path / "empty").mkdir()
  paths = [str(p) for p in sorted(tmp_path.iterdir())]
  assert compare.find(paths) == [one]
  said = capsys.readouterr().err
  assert said.count("\n") == 1 and "compare.html" in said and "empty" in said
  with pytest.raises(FileNotFoundError, match=r"lrr: there is no such workdir"):
    compare.find([one, str(tmp_path / "lrr")])


def test_stages_are_compared_apart(tmp_path, capsys, recwarn):
  loss = [{"stage": "sft", "step": 1, "seconds": 1, "loss": 2.0}]
  reward = [{"stage": "rl", "step": 1, "seconds": 1, "reward": 0.5, "loss": None}]
  a_run(tmp_path / "sft", {"data": {"rows": 8}}, {"loss": 2.0}, loss)
  a_run(tmp_path / "rl", {"algo": {"steps": 1}}, {"reward": 0.5}, reward)
  a_run(tmp_path / "distill", {"teacher": {}, "tasks": {}}, {"right": 1.0})
  out = tmp_path / "page.html"
  compare.compare([str(tmp_path)], str(out))
  said = capsys.readouterr().out
  for stage in ("sft", "rl", "distill"):
    assert f"Runs of {stage}" in said
  assert "runs of 3 stages" in said and said.count("\n") < 40
  assert "sft, loss:" in out.read_text() and "rl, loss:" not in out.read_text()
  assert not recwarn.list


def test_long_values_with_one_ending_are_not_one_row(tmp_path):
  end = "x" * 60
  for name in "ab":
    a_run(tmp_path / name, {"data": {"trajectories": f"{name}/{end}", "seed": 1}})
  groups = compare.group([compare.read(p) for p in compare.find([str(tmp_path)])])
  assert [len(runs) for runs in groups.values()] == [1, 1]


def test_names_are_without_the_folder_that_all_share(tmp_path):
  for name in ("sft", "rl"):
    config = {"eval": {"k": [3]}, "init": f"runs/quickstart/{name}/model"}
    a_run(tmp_path / name, config)
  groups = compare.group([compare.read(p) for p in compare.find([str(tmp_path)])])
  assert sorted(groups) == ["init=rl/model", "init=sft/model"]


@pytest.mark.parametrize(
  ("text", "field", "values"),
  [
    ("optim.lr=1e-3,3e-3", "optim.lr", ["1e-3", "3e-3"]),
    ("config.tools.tools=('a',),('a','b')", "tools.tools", ["('a',)", "('a','b')"]),
    ("--config.init=a", "init", ["a"]),
  ],
)
def test_a_grid_is_read(text: str, field: str, values: list[str]):
  assert sweep.parse_grid(text) == (field, values)


@pytest.mark.parametrize("text", ["optim.lr", "=1,2", "optim.lr=1,,2", ""])
def test_a_grid_that_says_nothing_is_refused(text: str):
  with pytest.raises(ConfigError, match="write FIELD=VALUE"):
    sweep.parse_grid(text)

"""The distillation stage: end to end, interrupted, refused."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import runpy

import ml_collections
import pytest

from coa_jax import distill
from coa_jax.data.tasks.world.build import WorldConfig, write_world
from coa_jax.data.teacher.backend import InfrastructureError
from coa_jax.data.teacher.runs import Run
from coa_jax.protocol.trajectory import Status, read_trajectories
from coa_jax.runtime.config import ConfigError
from tests.backend import BACKEND
from tests.cards import read_card

CONFIG = runpy.run_path(
  os.path.join(os.path.dirname(__file__), "..", "configs", "distill_world.py")
)["get_config"]
TASKS = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A small world's pages and tasks."""
  world = WorldConfig(towns=40, people=60, films=20, companies=20, train_worlds=1)
  return write_world(tmp_path_factory.mktemp("world"), "train", TASKS, world)


def config_for(files) -> ml_collections.ConfigDict:
  """Returns the tiny config for the small world."""
  config = CONFIG("tiny")
  config.tasks.uri = files["tasks"]
  config.tools.corpus = files["corpus"]
  config.tools.sandbox = BACKEND
  return config


@pytest.fixture
def config(files) -> ml_collections.ConfigDict:
  """A config that a test may change."""
  return config_for(files)


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
  """An uninterrupted run's workdir and results."""
  workdir = str(tmp_path_factory.mktemp("finished"))
  return workdir, distill.run(config_for(files), workdir)


def read(workdir: str, name: str) -> bytes:
  with open(os.path.join(workdir, name), "rb") as f:
    return f.read()


def rows(workdir: str, name: str) -> list[dict]:
  return [json.loads(line) for line in read(workdir, name).splitlines()]


def test_counts_add_up_and_files_hold_what_they_say(finished):
  workdir, results = finished
  assert results == json.loads(read(workdir, "results.json"))
  assert results["tasks"] == results["runs"] == TASKS
  assert results["infrastructure"] == 0 and 0.6 < results["right"] < 1
  convert = results["convert"]
  assert convert["kept"] + sum(convert["dropped"].values()) == TASKS
  assert results["filters"]["in"] == convert["kept"]
  front, sections, _ = read_card(pathlib.Path(workdir))
  manifest = json.loads(read(workdir, "manifest.json"))
  assert {"Config": manifest.pop("config"), "Manifest": manifest} == sections
  assert front["configs"][0]["data_files"] == "trajectories.jsonl"
  found = read_trajectories(os.path.join(workdir, "trajectories.jsonl"))
  assert len(found) == results["kept"] == sum(results["kept_by_family"].values()) > 20
  assert all(t.reward == 1.0 for t in found)
  assert len(rows(workdir, "runs.jsonl")) == TASKS
  meters = read_trajectories(os.path.join(workdir, "teacher.jsonl"))
  assert sum(m.reward for m in meters) == pytest.approx(results["right"] * TASKS)
  assert all(m.usage.prompt > m.usage.cached > 0 for m in meters)
  manifest = json.loads(read(workdir, "manifest.json"))
  assert manifest["config"]["teacher"]["backend"] == "scripted"
  sha256 = hashlib.sha256(read(workdir, "trajectories.jsonl")).hexdigest()
  assert manifest["sha256"]["trajectories.jsonl"] == sha256


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(
  finished, config, tmp_path, monkeypatch
):
  workdir, results = finished
  again = str(tmp_path / "again")
  worked: list[str] = []

  def stop_after(limit):
    real = distill.solve

    def solve(task, *rest):
      worked.append(task.id)
      if len(worked) >= limit:
        raise KeyboardInterrupt
      return real(task, *rest)

    return solve

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(distill, "solve", stop_after(15))
    distill.run(config, again)
  done = [row["task_id"] for row in rows(again, "runs.jsonl")]
  assert 0 < len(done) < TASKS
  with open(os.path.join(again, "runs.jsonl"), "ab") as f:
    f.write(b'{"task_id": "cut')  # a line cut by a kill
  worked.clear()
  with monkeypatch.context() as patch:
    patch.setattr(distill, "solve", stop_after(10**9))
    resumed = distill.run(config, again)
  assert sorted(worked + done) == sorted(
    r["task_id"] for r in rows(again, "runs.jsonl")
  )
  assert read(again, "trajectories.jsonl") == read(workdir, "trajectories.jsonl")

  def timeless(where):
    out = [Run.from_json(row) for row in rows(where, "runs.jsonl")]
    for run in out:
      run.usage.seconds = 0.0
      for call in run.calls:
        call.seconds = 0.0
    return out

  assert timeless(again) == timeless(workdir)
  for part in (results, resumed):
    part["mean_usage"]["seconds"] = 0.0
  assert resumed == results


@pytest.mark.slow
def test_more_workers_and_more_samples(finished, config, tmp_path):
  workdir, _ = finished
  config.teacher.workers, config.teacher.samples = 1, 2
  distill.run(config, str(tmp_path))
  twice = rows(str(tmp_path), "runs.jsonl")
  assert [row["sample"] for row in twice] == [0, 1] * TASKS
  events = [[e["content"] for e in row["events"]] for row in twice]
  first = [[e["content"] for e in row["events"]] for row in rows(workdir, "runs.jsonl")]
  assert events[::2] == first
  assert events[1::2] != first


def test_another_config_may_not_go_on_in_the_same_workdir(finished, config):
  config.scripted.seed = 9
  with pytest.raises(ConfigError, match=r"scripted\.seed was 0 and not 9"):
    distill.run(config, finished[0])


def test_other_tasks_of_the_same_file_may_not_go_on_in_the_same_workdir(
  config, tmp_path
):
  """The ids are equal, so finished runs would count for the changed tasks."""
  file = tmp_path / "tasks.jsonl"
  lines = pathlib.Path(config.tasks.uri).read_text().splitlines()[:4]
  file.write_text("\n".join(lines) + "\n")
  config.tasks.uri = str(file)
  distill.run(config, str(tmp_path / "w"))
  lines[0] = json.dumps(json.loads(lines[0]) | {"answers": ["nobody"]})
  file.write_text("\n".join(lines) + "\n")
  with pytest.raises(ConfigError, match="read other contents of tasks"):
    distill.run(config, str(tmp_path / "w"))


@pytest.mark.parametrize(
  ("section", "changes", "message"),
  [
    ("chat", dict(base_url="http://localhost", model="m"), "no section 'chat'"),
    ("formats", dict(copies=2), "='full' describes formats"),
    ("convert", dict(observation_chars=3), "must be 0 or at least 16"),
  ],
)
def test_refusals_come_before_any_work(config, tmp_path, section, changes, message):
  with config.unlocked():
    config[section] = {**config.get(section, {}), **changes}
  with pytest.raises(ConfigError, match=message):
    distill.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_tasks_of_others_need_a_real_model(config, tmp_path):
  path = tmp_path / "mine.jsonl"
  path.write_text('{"question": "Who?", "answer": "Me"}\n')
  config.tasks.uri = str(path)
  with pytest.raises(ConfigError, match="use an LLM endpoint"):
    distill.run(config, str(tmp_path / "w"))


def test_failing_infrastructure_stops_and_keeps_what_is_done(
  config, tmp_path, monkeypatch
):
  real = distill.solve
  count = 0

  def flaky(task, *rest):
    nonlocal count
    count += 1
    if count in (3, 5) or count > 12:
      return Run(task.id, status=Status.INFRASTRUCTURE, error="sandbox down")
    return real(task, *rest)

  config.teacher.workers = 1
  with monkeypatch.context() as patch:
    patch.setattr(distill, "solve", flaky)
    with pytest.raises(InfrastructureError, match=r"8 runs in a row.*sandbox down"):
      distill.run(config, str(tmp_path))
  assert len(rows(str(tmp_path), "runs.jsonl")) == 10
  assert distill.run(config, str(tmp_path))["infrastructure"] == 0
  assert len(rows(str(tmp_path), "runs.jsonl")) == TASKS


def test_a_funnel_short_observations_and_copies_in_other_formats(config, tmp_path):
  config.tasks.limit = 8
  config.formats = dict(copies=2)
  config.teacher.prompt = "full"
  config.convert = dict(observation_chars=16)
  config.filters.update(keep_unreflected=1.0, min_activations=1)
  results = distill.run(config, str(tmp_path))
  for picture in ("funnel.png", "statistics.png"):
    assert read(str(tmp_path), picture).startswith(b"\x89PNG")
  before, after = json.loads(read(str(tmp_path), "manifest.json"))["statistics"]
  assert before["trajectories"] == 8 and after["spans"]["plan"] >= 1
  found = read_trajectories(tmp_path / distill.TRAJECTORIES)
  assert any("shortened" in t.meta for t in found)
  assert all(len(c.result) <= 16 + 40 for t in found for c in t.calls)
  # Copies are added to the originals.
  copies = [t for t in found if "format" in t.meta]
  assert len(copies) == results["augmented"] > 0
  assert len(found) == results["kept"] + results["augmented"]

"""Asynchronous RL end to end: it learns, bounds staleness, resumes, ends cleanly."""

from __future__ import annotations

import threading

import guessing
import ml_collections
import numpy as np
import pytest
from guessing import RIGHT, STEPS

from coa_jax import rl
from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.data.tasks.task import Task
from coa_jax.model.sharding import Partitioner
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.report.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
  """The RL config of a guessing policy."""
  return guessing.rl_config(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def ahead(config) -> ml_collections.ConfigDict:
  """The config of the synchronous tests, but with tokens up to 2 updates old."""
  out = config.copy_and_resolve_references()
  with out.unlocked():
    out.algo.update(keep_every=1, sampling=dict(staleness=2), loss=dict(is_clip=2.0))
  return out


def test_a_run_that_was_killed_learns_keeps_its_bound_and_plays_every_group_once(
  ahead, tmp_path
):
  ahead.checkpoint.every = 8
  with guessing.killed_before_log_of(11):
    rl.run(ahead, str(tmp_path))
  assert not [t for t in threading.enumerate() if t.name == "ahead"]
  results = rl.run(ahead, str(tmp_path))
  assert not [t for t in threading.enumerate() if t.name == "ahead"]
  log = read_metrics(f"{tmp_path}/metrics.jsonl", "rl")
  assert [row["step"] for row in log] == list(range(1, STEPS + 1))
  assert np.mean([row["reward"] for row in log[-5:]]) > 0.9
  assert results["dev_accuracy"] == 1.0
  learned = [row for row in log if "ratio" in row]
  assert learned and max(row["staleness_max"] for row in learned) in (1, 2)
  for row in learned:
    assert 0 <= row["staleness"] <= row["staleness_max"]
    assert 0 <= row["off_policy_share"] <= 1 and row["importance"] > 0
    assert row["learner_waited"] >= 0 and row["rollouts_waited"] >= 0
  draw = TaskSampler([Task(q, q, (a,)) for q, a in RIGHT.items()], 0)
  n = 0
  for step in range(STEPS):
    file = f"{tmp_path}/trajectories/step_{step:06d}.jsonl"
    trajectories = read_trajectories(file)
    versions = [v for t in trajectories for s in t.segments for v in s.versions]
    assert step - 2 <= min(versions) and max(versions) <= step
    for i in range(0, len(trajectories), 8):
      group = trajectories[i : i + 8]
      assert {t.task_id for t in group} == {draw.task(n, 0).id}
      assert [t.sample for t in group] == list(range(8))
      n += 1


def test_answers_to_groups_that_may_be_begun_again_are_kept(
  ahead, tmp_path, monkeypatch
):
  """A group missing in the oldest checkpoint began up to `staleness` updates before."""
  forgotten = []
  monkeypatch.setattr(rl.Checkpoints, "oldest", 7)
  monkeypatch.setattr(rl.ToolJournal, "forget", lambda _, n: forgotten.append(n))
  ahead.algo.steps = 1
  rl.run(ahead, str(tmp_path))
  assert forgotten == [5]


def test_a_broken_tool_service_ends_the_run(ahead, tmp_path, monkeypatch):
  def start(self, *args):
    raise OSError("no tools here")

  monkeypatch.setattr(rl.Toolbox, "start", start)
  ahead.algo.steps = 2
  with pytest.raises(OSError, match="no tools here"):
    rl.run(ahead, str(tmp_path))
  assert not [t for t in threading.enumerate() if t.name == "ahead"]


@pytest.mark.parametrize(
  ("section", "changes", "message"),
  [
    (
      "algo",
      dict(sampling=dict(task_sampler="learnability")),
      r"several processes and algo\.sampling\.task_sampler='learn",
    ),
    ("vllm", dict(folder="x"), "several processes and section vllm"),
  ],
)
def test_an_option_impossible_with_several_processes_is_refused(
  ahead, tmp_path, monkeypatch, section, changes, message
):
  monkeypatch.setattr(Partitioner, "num_processes", 2)
  with ahead.unlocked():
    if section not in ahead:
      ahead[section] = {}
    ahead[section].update(changes)
  with pytest.raises(ValueError, match=f"staleness=2 does not go with {message}"):
    rl.run(ahead, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()

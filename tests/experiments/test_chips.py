"""The best arrangement of devices, by hand-computed cases and by laws."""

from __future__ import annotations

import itertools
import json
import pathlib

import pytest

from coa_jax.cli.deploy.arrangements import arrangements, describe_run, step_seconds


@pytest.mark.parametrize(
  ("devices", "team", "processes", "own", "apart"),
  [
    (8, 1, 1, 4, 1 + max(2 * 2 + 10, 6 * 2)),
    (8, 3, 1, 3, 1 + 2 * 8 / 3 + 10),
    (12, 2, 3, 6, 1 + 2 * 2 + 10),
  ],
)
def test_hand_computed(devices, team, processes, own, apart):
  ways = arrangements(1.0, 2.0, 10.0, 6.0, devices, team, processes)
  assert ways["interleaved (staleness=0, mesh.rollout=0)"] == 19.0
  assert ways[f"apart (staleness>=1, mesh.rollout={own})"] == pytest.approx(apart)
  beside = ways.get("side by side (staleness>=1, mesh.rollout=0)")
  assert beside == (13.0 if team == 1 else None)


def test_a_replica_leaves_the_learner_a_device():
  with pytest.raises(ValueError, match="a replica of 4 on each of 1 processes leaves"):
    arrangements(1.0, 2.0, 10.0, 6.0, 4, 4)


def test_without_waiting_apart_is_never_faster_than_interleaved():
  for decode, learn, devices in itertools.product((1, 3, 8), (1, 2, 9), (2, 8, 64)):
    ways = arrangements(0.5, decode, 0.0, learn, devices, 1)
    interleaved, apart, beside = ways.values()
    assert apart >= interleaved - 1e-9
    assert beside <= interleaved


def test_a_log_is_read_without_its_first_step_evaluation_and_saving():
  row = {"seconds_decode": 2.0, "seconds_tools": 3.0, "seconds_other": 1.0, "step": 1}
  row |= {"seconds_learn": 4.0, "seconds_sync": 0.5, "seconds_dev": 9, "seconds": 99}
  seconds = step_seconds([{**row, "seconds_learn": 100.0}, row, row])
  assert seconds == dict(sync=0.5, decode=2.0, wait=4.0, learn=4.0)
  with pytest.raises(ValueError, match="has 1 steps"):
    step_seconds([row])
  with pytest.raises(ValueError, match="the run was asynchronous"):
    step_seconds([row, {**row, "rollouts_waited": 0.0}])


@pytest.mark.parametrize(("tensor", "own"), [(0, 2), (4, 4)])
def test_a_runs_record_names_its_replicas_devices(
  tmp_path: pathlib.Path, tensor: int, own: int
):
  """rollout.tensor=0, the default, means mesh.tensor."""
  config = {"rollout": {"tensor": tensor}, "mesh": {"tensor": 2}}
  (tmp_path / "config.json").write_text(json.dumps({"config": config}))
  row = {"stage": "rl", "devices": 8.0, "processes": 1.0, "seconds_learn": 2.0}
  log = [{**row, "step": step, "seconds": 4.0 * step} for step in (1, 2)]
  text = "".join(json.dumps(row) + "\n" for row in log)
  (tmp_path / "metrics.jsonl").write_text(text)
  lines = describe_run(str(tmp_path)).splitlines()
  assert len(lines) == 3 and "learn 2 s" in lines[0]
  assert f"mesh.rollout={own})" in lines[1] and "interleaved" in lines[2]

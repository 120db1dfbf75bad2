"""The best arrangement of devices, by hand-computed cases and by laws."""

from __future__ import annotations

import itertools
import json
import pathlib

import pytest

from coa_jax.cli.deploy import arrangements
from coa_jax.cli.deploy.arrangements import StepSeconds


def test_hand_computed():
  seconds = StepSeconds(sync=1.0, decode=2.0, wait=10.0, learn=6.0)
  assert seconds.interleaved() == 19.0
  assert seconds.side_by_side() == 13.0
  # 2 of 8 devices decode for 8 s and wait 10 s; the others learn for 8 s.
  assert seconds.apart(8, 2) == 19.0
  assert seconds.apart(8, 4) == 1 + max(2 * 2 + 10, 6 * 2) == 15.0
  assert seconds.best_apart(8, 1) == 4
  assert seconds.best_apart(8, 3) == 3
  assert seconds.best_apart(12, 2, processes=3) == 6
  with pytest.raises(ValueError, match="a replica of 4 on each of 1 processes leaves"):
    seconds.best_apart(4, 4)


def test_without_waiting_apart_is_never_faster_than_interleaved():
  for decode, learn, devices in itertools.product((1, 3, 8), (1, 2, 9), (2, 8, 64)):
    seconds = StepSeconds(sync=0.5, decode=decode, wait=0.0, learn=learn)
    own = seconds.best_apart(devices, 1)
    assert seconds.apart(devices, own) >= seconds.interleaved() - 1e-9
    assert seconds.side_by_side() <= seconds.interleaved()


def test_a_log_is_read_without_its_first_step_evaluation_and_saving():
  row = {"seconds_decode": 2.0, "seconds_tools": 3.0, "seconds_other": 1.0, "step": 1}
  row |= {"seconds_learn": 4.0, "seconds_sync": 0.5, "seconds_dev": 9, "seconds": 99}
  seconds = StepSeconds.of([{**row, "seconds_learn": 100.0}, row, row])
  assert seconds == StepSeconds(sync=0.5, decode=2.0, wait=4.0, learn=4.0)
  row |= {"devices": 8.0, "processes": 1.0}
  text = arrangements.lines([row, row], team=2)
  assert len(text) == 3 and "interleaved" in text[1] and "mesh.rollout=4" in text[2]
  with pytest.raises(ValueError, match="has 1 steps"):
    StepSeconds.of([row])
  with pytest.raises(ValueError, match="the run was asynchronous"):
    StepSeconds.of([row, {**row, "rollouts_waited": 0.0}])


@pytest.mark.parametrize(("tensor", "team"), [(0, 2), (4, 4)])
def test_a_runs_record_names_its_replicas_devices(
  tmp_path: pathlib.Path, tensor: int, team: int
):
  """rollout.tensor=0, the default, means mesh.tensor."""
  config = {"rollout": {"tensor": tensor}, "mesh": {"tensor": 2}}
  (tmp_path / "config.json").write_text(json.dumps({"config": config}))
  row = {"stage": "rl", "devices": 8.0, "processes": 1.0, "seconds_decode": 2.0}
  log = [{**row, "step": step, "seconds": 4.0 * step} for step in (1, 2)]
  text = "".join(json.dumps(row) + "\n" for row in log)
  (tmp_path / "metrics.jsonl").write_text(text)
  expected = arrangements.lines(log, team)
  assert arrangements.describe_run(str(tmp_path)).splitlines() == expected

"""A run resumes with another process count, on the same data, tasks and steps."""

from __future__ import annotations

import json
import os
import pathlib
import time

import guessing
import numpy as np
import pytest
import toy
from programs import config_file, ended, start_together, wait_for_step

from coa_jax import rl
from coa_jax.learner.checkpoint import whole_steps
from coa_jax.protocol.trajectory import read_trajectories, write_jsonl
from coa_jax.report.metrics import read_metrics

STEPS = {"sft": 60, "rl": 10}
EVERY = {"sft": 10, "rl": 2}  # steps between two checkpoints
FLAGS = ("--heartbeat_s=10", "--config.mesh.fsdp=-1")
# Sums over another device count differ in their last bits; another row or token
# makes a difference of 1e-2.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
  """Config files with batches divisible over 1, 2 and 4 processes."""
  folder = tmp_path_factory.mktemp("inputs")
  # Another device count changes weights by less than 1e-7 of their size. This policy
  # rarely samples near the boundary between two tokens: it samples the same tokens
  # even after a change of 1e-4. A policy trained for 100 steps sampled others after
  # 3e-6, and once after rounding alone.
  of_rl = guessing.rl_config(folder).to_dict()
  of_rl["optim"] = dict(lr=3e-4)
  of_rl["algo"] |= dict(steps=STEPS["rl"], keep_every=1)
  of_rl["algo"]["sampling"] |= dict(prompts=4, samples=4, filter_groups=False)
  of_rl["algo"]["batch"] = dict(rows=4, length=toy.MAX_LEN)
  of_rl["rollout"]["slots"] = 4
  of_rl["dev"]["every"] = STEPS["rl"]
  write_jsonl(folder / "data.jsonl", toy.trajectories() * 4)
  data = dict(trajectories=str(folder / "data.jsonl"), validation=2)
  data |= dict(length=toy.MAX_LEN, steps=STEPS["sft"], rows=4, validate_every=0)
  sft = dict(init=of_rl["init"], data=data)
  out = {}
  for name, config in {"sft": sft, "rl": of_rl}.items():
    config["checkpoint"] = dict(every=EVERY[name], keep=2)
    out[name] = config_file(folder / f"{name}.py", config)
  return out


def killed_after_a_save(processes: list, workdir: pathlib.Path) -> None:
  """Kills a run once it has saved a checkpoint and logged a later step."""
  wait_for_step(processes, workdir, 1)
  before = whole_steps(workdir / "checkpoints")
  while before == (saved := whole_steps(workdir / "checkpoints")):
    time.sleep(0.01)
  wait_for_step(processes, workdir, saved[-1] + 1)
  for process in processes:
    process.kill()
  for process in processes:
    process.communicate()


def played(workdir: pathlib.Path, step: int) -> list[tuple]:
  """Returns an RL step's rollouts: tasks, attempts and token ids."""
  rows = []
  for file in sorted(workdir.glob(f"**/trajectories/step_{step:06d}.jsonl")):
    for t in read_trajectories(file):
      rows.append((t.task_id, t.sample, [s.ids for s in t.segments]))
  return sorted(rows)


def test_records_after_the_checkpoint_are_void(tmp_path):
  """One process repeats the steps of two, so the files of both are deleted."""
  names = [f"step_{step:06d}.jsonl" for step in (0, 20, 40)]
  for folder in ("", "process_1"):
    (tmp_path / folder / "trajectories").mkdir(parents=True)
    for name in [*names, "notes.txt"]:
      (tmp_path / folder / "trajectories" / name).write_text("{}")
  folders = [str(tmp_path), str(tmp_path / "process_1"), str(tmp_path / "process_2")]
  rl.drop_trajectories(folders, 20)
  for folder in ("", "process_1"):
    left = sorted(os.listdir(tmp_path / folder / "trajectories"))
    assert left == ["notes.txt", "step_000000.jsonl"]


@pytest.mark.soak
@pytest.mark.parametrize("journey", ["sft", "rl"])
def test_other_processes_go_on_with_the_same_steps(configs, journey, tmp_path):
  config = configs[journey]
  steps = STEPS[journey]
  every = EVERY[journey]
  whole = tmp_path / "whole"
  ended(start_together(journey, config, whole, 2, *FLAGS))

  # --- Two processes, then one, then four; the first two runs die with unsaved steps.
  workdir = tmp_path / "elastic"
  for count in (2, 1):
    processes = start_together(journey, config, workdir, count, *FLAGS)
    killed_after_a_save(processes, workdir)
  said = ended(start_together(journey, config, workdir, 4, *FLAGS))
  assert "with 4 devices of 4 processes, before 1 devices of 1 processes" in said[0]

  # --- Each step once, also in the logs of processes that joined late.
  rows = read_metrics(workdir, journey)
  expected = read_metrics(whole, journey)
  for folder in (workdir, workdir / "process_1", workdir / "process_3"):
    log = read_metrics(folder, journey)
    assert [row["step"] for row in log] == list(range(1, steps + 1))
    assert [row["loss"] for row in log] == [row["loss"] for row in rows]
  processes = [row["processes"] for row in rows]
  assert set(processes[:every]) == {2} and processes[-1] == 4
  assert 1 in processes

  # --- The same rows, tasks and tokens, so the uninterrupted run's losses.
  assert {row["devices"] for row in expected} == {2}
  if journey == "rl":
    for step in range(steps):
      assert played(workdir, step) == played(whole, step), f"step {step}"
  for name in ("loss", "grad_norm"):
    values = [[row[name] for row in log] for log in (rows, expected)]
    np.testing.assert_allclose(*values, rtol=TOLERANCE, atol=TOLERANCE)
    if journey == "rl":  # it learns: most steps differ
      assert len({round(value, 4) for value in values[0]}) > steps / 2
  results = json.loads((workdir / "process_3" / "results.json").read_text())
  assert results["steps"] == steps


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused_in_a_line(configs, tmp_path):
  flags = ("--config.data.rows=3", "--config.data.steps=1", "--config.mesh.fsdp=-1")
  ended(start_together("sft", configs["sft"], tmp_path, 1, *flags))
  for error in ended(start_together("sft", configs["sft"], tmp_path, 2, *flags), 2):
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert lines == [
      "error: the mesh does not divide data.rows=3 over data=1 x fsdp=2: choose other "
      "sizes in section mesh, or take the axis out of mesh.rules"
    ]
  assert whole_steps(tmp_path / "checkpoints") == [1]
